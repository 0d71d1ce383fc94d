// Watches one compilation: decides when it must end, and says why.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "codegen/base/target.hpp"
#include "runtime/compile_limits.hpp"

namespace flashjit {

// Throws invalid_argument for limits that are no numbers of seconds, and unsupported for those that the
// target's compiler cannot keep. A compiler that is missing keeps all of them.
void check_limits(const CompileLimits& limits, const Target& target);

// Thread-safe.
class CompileWatch {
 public:
  // Time counts from here.
  explicit CompileWatch(const CompileLimits& limits) : limits_(limits) {}

  // False: nothing ends the compilation, so nobody need ask.
  bool can_end() const { return limits_.any(); }
  // Whether the compilation, whose memory is `bytes` now, must end. Once true, it stays true.
  bool ends(std::uint64_t bytes) noexcept;
  // The same before the compilation, while time does not count.
  bool is_cancelled() noexcept;
  // Throws why the compilation of `kernel` must end, if it must.
  void check(const std::string& kernel) const;

 private:
  bool ask() noexcept;
  bool ended() const noexcept { return cancelled_ || spent_seconds_ > 0 || spent_bytes_ > 0; }

  const CompileLimits& limits_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  bool cancelled_ = false;
  std::exception_ptr failure_;  // of limits_.cancelled
  double spent_seconds_ = 0;    // when a limit was found exceeded
  std::uint64_t spent_bytes_ = 0;
};

}  // namespace flashjit
