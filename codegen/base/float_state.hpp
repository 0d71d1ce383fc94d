// The floating-point state that the library computes in, whatever the host's is.
#pragma once

#include <cstdint>

namespace flashjit {

// While an object of this class lives, its thread rounds to the nearest, takes denormal numbers as they are
// and traps no exception, as when a process begins: a host may have changed any of these (fesetround,
// feenableexcept, a program linked with -ffast-math). Its end restores the host's state, raised flags
// included. Costs some 10 ns. This is for float and double; long double needs the next class.
class DefaultSseState {
 public:
  DefaultSseState() noexcept {
    asm volatile("stmxcsr %0" : "=m"(before_)::"memory");
    asm volatile("ldmxcsr %0" ::"m"(at_start) : "memory");
  }
  ~DefaultSseState() { asm volatile("ldmxcsr %0" ::"m"(before_) : "memory"); }
  DefaultSseState(const DefaultSseState&) = delete;
  DefaultSseState& operator=(const DefaultSseState&) = delete;

 private:
  static constexpr std::uint32_t at_start = 0x1f80;
  std::uint32_t before_;
};

// The same for long double, too, and for libraries that may use it.
class DefaultFloatState {
 public:
  DefaultFloatState() noexcept {
    asm volatile("fnstcw %0\n\tfnstsw %1" : "=m"(control_), "=m"(status_)::"memory");
    if (control_ != at_start) asm volatile("fldcw %0" ::"m"(at_start) : "memory");
  }
  ~DefaultFloatState() {
    // Flags that were raised meanwhile would trap when the host's control word is back.
    std::uint16_t status;
    asm volatile("fnstsw %0" : "=m"(status)::"memory");
    if ((status ^ status_) & flags) restore_flags();
    if (control_ != at_start) asm volatile("fldcw %0" ::"m"(control_) : "memory");
  }
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;

 private:
  [[gnu::noinline]] void restore_flags() const noexcept {
    struct Environment {
      std::uint16_t words[14];
    } environment;
    constexpr int status_word = 2;
    asm volatile("fnstenv %0" : "=m"(environment)::"memory");
    std::uint16_t& status = environment.words[status_word];
    status = static_cast<std::uint16_t>((status & ~flags) | (status_ & flags));
    environment.words[0] = at_start;
    asm volatile("fldenv %0" ::"m"(environment) : "memory");
  }

  static constexpr std::uint16_t at_start = 0x37f;
  static constexpr unsigned flags = 0xff;  // exceptions and their summaries
  const DefaultSseState sse_;
  std::uint16_t control_, status_;
};

}  // namespace flashjit
