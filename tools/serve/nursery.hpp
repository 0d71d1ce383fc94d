// Compiles in child processes. One process, the nursery, loads the compilers and compiles a kernel with each,
// and then forks a child for each request, which is warm, has limits, and ends with its one compile. A child
// opens no files, starts no processes, and talks to nobody but its parent. It is forked ahead of its request,
// since that takes some milliseconds.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "cache/file.hpp"

namespace flashjit::serve {

// A compile that waits for a busy machine's processors is not to blame for that, so its time is what it has
// had of them. By the clock it may take much longer, and ends in any case.
struct ChildLimits {
  double seconds = 60;                           // of processors
  std::uint64_t bytes = std::uint64_t{4} << 30;  // that the child may write to
  double clock_seconds() const { return 10 * seconds; }
};

class Nursery {
 public:
  // Starts the process. Before the caller starts threads, so that nothing is half done in it.
  explicit Nursery(const ChildLimits& limits);
  Nursery(const Nursery&) = delete;
  Nursery& operator=(const Nursery&) = delete;
  ~Nursery();

  // The bytes of the entry, unsigned, that a child makes of a request's text (compile_request.hpp). Throws
  // Error: what the compiler said; limit_exceeded; cancelled, once `cancelled` is true; compile_failed if the
  // child crashed; device_failed if it was killed. Any number of threads at once.
  std::string compile(const std::string& request, const std::atomic<bool>& cancelled);
  // Processes that the nursery has had: 1, and one more each time that it was lost.
  unsigned started() const { return started_; }
  // Octets of memory of the nursery's process; 0: unknown.
  std::uint64_t memory() const;

 private:
  void start();
  // The socket to a new child, and the child.
  struct Child {
    File socket, process;
  };
  Child take_child(const std::atomic<bool>& cancelled);
  void ask_for_child() const;
  // Gives what a child writes: its whole result, or all until it ends.
  std::string run(const std::string& request, const std::atomic<bool>& cancelled);

  const ChildLimits limits_;
  std::mutex mutex_;
  File control_;
  std::atomic<pid_t> process_{0};
  std::atomic<unsigned> started_{0};
};

}  // namespace flashjit::serve
