#include "runtime/compile_watch.hpp"

#include <sstream>

#include "codegen/base/error.hpp"
#include "runtime/compiler.hpp"

namespace flashjit {
namespace {

[[noreturn]] void exceeded(const std::string& kernel, const std::string& spent) {
  throw Error(ErrorCode::limit_exceeded,
              "compiling " + kernel + spent +
                  "; a higher limit, a spec whose formulas have fewer operations, or a kernel prebuilt "
                  "elsewhere (flashjit prebuild) would work");
}

template <class Number>
std::string text_of(Number number) {
  std::ostringstream text;
  text << number;
  return text.str();
}

}  // namespace

void check_limits(const CompileLimits& limits, const Target& target) {
  if (!(limits.seconds >= 0))
    throw Error(ErrorCode::invalid_argument, "a compilation's limit of " + text_of(limits.seconds) +
                                                 " seconds is not at least 0, which is no limit");
  if (!limits.any()) return;
  if (target.is_cuda() && limits.bytes)
    throw Error(
        ErrorCode::unsupported,
        "a compilation's limit of " + text_of(limits.bytes) + " bytes is not supported for target " +
            target.str() +
            ": NVRTC does not tell how much memory it takes; a limit of seconds, or a process of its own "
            "with a limit of memory (ulimit -v), would work");
  try {
    compiler_for(target)->check(limits);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::compiler_unavailable) throw;
  }
}

bool CompileWatch::ask() noexcept {
  try {
    if (limits_.cancelled && limits_.cancelled()) cancelled_ = true;
  } catch (...) {
    failure_ = std::current_exception();
    cancelled_ = true;
  }
  return cancelled_;
}

bool CompileWatch::is_cancelled() noexcept {
  const std::lock_guard lock(mutex_);
  return cancelled_ || ask();
}

bool CompileWatch::ends(std::uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (ended() || ask()) return true;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  if (limits_.seconds > 0 && seconds > limits_.seconds) spent_seconds_ = seconds;
  if (limits_.bytes > 0 && bytes > limits_.bytes) spent_bytes_ = bytes;
  return ended();
}

void CompileWatch::check(const std::string& kernel) const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (cancelled_) throw Error(ErrorCode::cancelled, "compiling " + kernel + " was cancelled");
  if (spent_bytes_ > 0)
    exceeded(kernel, " had " + text_of(spent_bytes_) + " bytes of memory, more than its limit of " +
                         text_of(limits_.bytes));
  if (spent_seconds_ > 0)
    exceeded(kernel, " took " + text_of(spent_seconds_) + " seconds, more than its limit of " +
                         text_of(limits_.seconds));
}

}  // namespace flashjit
