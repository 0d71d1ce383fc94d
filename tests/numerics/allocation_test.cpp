// A launch on a CPU allocates nothing, at any length: every way to the heap is counted. Scratch, where a
// thread takes some at its first launch, is the same for short and long sequences.
#include <gtest/gtest.h>

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace {

std::atomic<bool> counting = false;
std::atomic<long> allocations = 0;

void count() {
  if (counting.load(std::memory_order_relaxed)) ++allocations;
}

}  // namespace

// The C library's own allocator under its internal names, so that everything in the process is counted.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(std::size_t n, std::size_t bytes) {
  count();
  return __libc_calloc(n, bytes);
}
void* realloc(void* old, std::size_t bytes) {
  count();
  return __libc_realloc(old, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return memalign(alignment, bytes);
}
int posix_memalign(void** to, std::size_t alignment, std::size_t bytes) {
  *to = memalign(alignment, bytes);
  return *to ? 0 : 12;
}
}

namespace flashjit::testing_support {
namespace {

class Allocation : public OnEveryDevice {
 protected:
  long of(const auto& body) {
    allocations = 0;
    counting = true;
    body();
    counting = false;
    return allocations;
  }
};

TEST_P(Allocation, TheCounterCounts) {
  EXPECT_GE(of([] { ::operator delete(::operator new(8)); }), 1);
  EXPECT_GE(of([] { std::free(std::aligned_alloc(64, 64)); }), 1);
}

Case short_case(const AttentionSpec& spec) {
  return {.spec = spec,
          .batch = 2,
          .heads_q = 4,
          .heads_kv = 2,
          .seqlen_q = 65,
          .seqlen_k = 65,
          .lengths_q = {65, 60},
          .lengths_k = {65, 65}};
}
Case long_case(const AttentionSpec& spec) {
  return {.spec = spec, .seqlen_q = 3000, .seqlen_k = 3000, .lengths_q = {3000}, .lengths_k = {3000}};
}

TEST_P(Allocation, LaunchesTakeNoneAfterTheFirst) {
  const auto engine = on().make_engine({.num_threads = 1});
  for (const DType dtype : on().dtypes()) {
    for (const bool varlen : {false, true}) {
      const AttentionSpec spec = forward_spec(dtype, 64, {CausalMask{}}, {.varlen = varlen});
      Workload small(on(), short_case(spec)), large(on(), long_case(spec));
      const Kernel& kernel = small.kernel(*engine);
      kernel.launch(small.args());
      on().synchronize();
      EXPECT_EQ(of([&] { kernel.launch(small.args()); }), 0);
      EXPECT_EQ(of([&] { kernel.launch(large.args()); }), 0) << "a longer sequence";
      const PreparedLaunch prepared = kernel.prepare(large.args());
      EXPECT_EQ(of([&] { prepared.launch(); }), 0);
      EXPECT_EQ(kernel.workspace_bytes(large.args()), 0u);
      EXPECT_TRUE(large.check());
    }
  }
}

TEST_P(Allocation, EveryThreadTakesItsScratchOnce) {
  constexpr int threads = 3;
  const auto engine = on().make_engine({.num_threads = threads});
  const AttentionSpec spec = forward_spec(DType::bf16, 64, {CausalMask{}});
  Workload small(on(), short_case(spec)), large(on(), long_case(spec));
  const Kernel& kernel = small.kernel(*engine);
  EXPECT_LE(of([&] {
              for (int i = 0; i < 50; ++i) kernel.launch((i % 2 ? large : small).args());
            }),
            2 * threads);  // the buffer, and the C++ library's note to free it when the thread ends
}

TEST_P(Allocation, AKernelInMemoryIsFoundWithoutAny) {
  const AttentionSpec spec = forward_spec(DType::bf16, 64);
  const Shape shape{1, 64, 64, 1, 1};
  Engine& engine = on().engine();
  const Kernel* first = &engine.get(spec, shape);
  const Kernel* again = nullptr;
  EXPECT_EQ(of([&] { again = &engine.get(spec, shape); }), 0);
  EXPECT_EQ(first, again);
}

FLASHJIT_ON_EVERY_DEVICE(Allocation);

}  // namespace
}  // namespace flashjit::testing_support
