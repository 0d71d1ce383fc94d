// Limits of a compilation, and an end to it on demand.
#pragma once

#include <cstdint>
#include <functional>

namespace flashjit {

// A compilation that goes beyond a limit ends with the error limit_exceeded, one that is cancelled with
// cancelled. Nothing of it is kept: the next get() begins anew, and others who wait for the same kernel in
// their own engines go on, one of them compiling. All threads that wait in one engine get the error.
//
// The compiler ends where it asks, so a compilation may go on for a while beyond its end: with Clang for a
// tenth of a second, with NVRTC for the seconds that it takes to assemble a kernel. An NVRTC older than 12.8
// cannot be ended, and the memory of no NVRTC can be limited: such limits are refused with unsupported when
// an engine is made.
struct CompileLimits {
  double seconds = 0;       // of each compilation; 0: no limit
  std::uint64_t bytes = 0;  // of the compiler's memory in each compilation; 0: no limit
  // Asked while a kernel is compiled or tuned on first use, or another process's compilation is waited for:
  // true cancels. The thread that waits asks, 50 or more times a second; NVRTC asks on any thread, now and
  // then. One call at a time for each compilation, but several threads may compile. It must not use an
  // engine.
  std::function<bool()> cancelled{};

  bool any() const { return seconds != 0 || bytes != 0 || cancelled; }
};

}  // namespace flashjit
