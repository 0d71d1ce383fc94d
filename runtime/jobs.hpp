// Runs many independent jobs, such as compiling kernels, on threads of their own.
#pragma once

#include <cstddef>
#include <functional>

namespace flashjit {

// Calls work(0), work(1), ..., work(count - 1) on `num_threads` threads (0: one for each
// CPU); a thread that finishes a job begins the next. Meanwhile go_on(done) is called on
// the caller's thread after each job and every tenth of a second; once it returns false, no
// more jobs begin. Returns, when all begun jobs have ended, how many were begun; they are
// the first ones. An exception of work() or go_on() also ends the run, and is thrown then.
std::size_t run_jobs(std::size_t count, int num_threads, const std::function<void(std::size_t)>& work,
                     const std::function<bool(std::size_t done)>& go_on = {});

}  // namespace flashjit
