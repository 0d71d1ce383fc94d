// Which rows an oracle computes, and the threads that share them.
#pragma once

#include <algorithm>
#include <atomic>
#include <span>
#include <thread>
#include <vector>

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Consecutive rows of one head.
struct RowTask {
  int sequence, head;
  std::vector<int> rows;
};

// Tasks for all rows of all heads, or for a spread of them (OracleOptions::max_rows). A task has at most
// group_rows rows; sequence i has rows_of[i] rows.
std::vector<RowTask> row_tasks(std::span<const int> rows_of, int heads, int group_rows,
                               const OracleOptions& options);

// Calls worker.run(task) for every task. Each thread has its own worker from make_worker().
void run_tasks(const std::vector<RowTask>& tasks, const OracleOptions& options, const auto& make_worker) {
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    auto worker = make_worker();
    for (std::size_t i; (i = next++) < tasks.size();) worker.run(tasks[i]);
  };
  const std::size_t wanted = options.num_threads > 0 ? static_cast<std::size_t>(options.num_threads)
                                                     : std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::jthread> helpers;
  for (std::size_t i = 1; i < std::min(wanted, tasks.size()); ++i) helpers.emplace_back(work);
  work();
}

}  // namespace flashjit::verify
