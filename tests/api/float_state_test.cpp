// A host may round in another direction, take denormal numbers for zeros and trap exceptions. Nothing that
// the library computes depends on it, and its state is the same afterwards.
#include <fenv.h>
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <functional>
#include <string>
#include <thread>

#include "runtime/dropout.hpp"
#include "tests/api/any_launch.hpp"

namespace flashjit {
namespace {

constexpr unsigned masks = 0x1f80, flushes = 0x8040;

class HostState {
 public:
  HostState(int rounding, bool flush, bool trap) {
    fegetenv(&before_);
    feclearexcept(FE_ALL_EXCEPT);
    fesetround(rounding);
    if (flush) _mm_setcsr(_mm_getcsr() | flushes);
    // Inexact results and denormal operands as well: any computation in the host's state would trap.
    if (trap) feenableexcept(FE_ALL_EXCEPT), _mm_setcsr(_mm_getcsr() & ~masks);
    sse_ = _mm_getcsr();
    x87_ = x87_control();
  }
  ~HostState() { fesetenv(&before_); }
  // Neither control bits nor flags have changed.
  bool is_unchanged() const {
    return _mm_getcsr() == sse_ && x87_control() == x87_ && !fetestexcept(FE_ALL_EXCEPT);
  }

 private:
  static unsigned short x87_control() {
    unsigned short word;
    asm volatile("fnstcw %0" : "=m"(word));
    return word;
  }
  fenv_t before_;
  unsigned sse_;
  unsigned short x87_;
};

constexpr Shape of_launches{.batch = 2, .seqlen_q = 5, .seqlen_k = 48, .num_heads_q = 4, .num_heads_kv = 2};

// Every operation from text to result; whether `state` held after each call is in `held`.
std::string results(Engine& engine, const std::function<bool()>& unchanged, bool& held) {
  std::string bytes;
  const auto check = [&] { held = held && unchanged(); };
  for (const AnySpec& of : any_specs()) {
    AnyLaunch launch(of, of_launches, engine);  // reads the spec, compiles or loads the kernel
    check();
    launch.kernel.launch(launch.args);
    check();
    bytes += launch.written();
    launch.kernel.prepare(launch.args).launch();
    check();
    bytes += launch.written() + launch.kernel.info_json().substr(0, 40);
  }
  const double scale = dropout_scale(1.0 / 3);
  check();
  bytes.append(reinterpret_cast<const char*>(&scale), sizeof scale);
  return bytes;
}

// Threads of the host, each in the state that the test gives it.
void host_threads(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  std::thread other([&] { body(context, count / 2, count); });  // begins in its maker's state
  body(context, 0, count / 2);
  other.join();
}

TEST(FloatState, OfTheHostChangesNothing) {
  for (const bool own_threads : {true, false}) {
    EngineOptions options;
    options.num_threads = 2;
    if (!own_threads) options.parallel_for = host_threads;
    bool held = true;
    std::string expected;
    {
      Engine engine(options);
      expected = results(engine, [] { return true; }, held);
    }
    for (const int rounding : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST})
      for (const bool trap : {false, true}) {
        SCOPED_TRACE(testing::Message() << "rounding " << rounding << ", traps " << trap);
        std::string found;
        {
          const HostState state(rounding, rounding != FE_TONEAREST, trap);
          Engine engine(options);
          held = state.is_unchanged();
          found = results(engine, [&] { return state.is_unchanged(); }, held);
        }
        EXPECT_TRUE(held);
        EXPECT_TRUE(found == expected);
      }
  }
}

// The compiler's own arithmetic, too: without a cache each engine compiles.
TEST(FloatState, OfTheHostDoesNotReachTheCompiler) {
  EngineOptions options;
  options.num_threads = 1;
  options.cache_dir = "";
  const auto compiled = [&] {
    Engine engine(options);
    AnyLaunch launch(any_specs()[0], of_launches, engine);
    launch.kernel.launch(launch.args);
    return launch.written();
  };
  const std::string expected = compiled();
  std::string found;
  {
    const HostState state(FE_UPWARD, true, true);
    found = compiled();
  }
  EXPECT_TRUE(found == expected);
}

}  // namespace
}  // namespace flashjit
