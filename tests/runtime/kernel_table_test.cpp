#include "runtime/kernel_table.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace flashjit {
namespace {

// The table only compares and returns addresses; it never looks into a kernel.
const Kernel* fake_kernel(std::uintptr_t n) {
  return reinterpret_cast<const Kernel*>(n * 64 + 64);
}

AttentionSpec spec_of(int i) {
  AttentionSpec spec;
  spec.head_dim = 8 * (1 + i % 32);
  spec.lse = i / 32 % 2;
  if (i / 64 % 2) spec.mask = {CausalMask{i / 128 % 2 ? CausalAlign::top_left : CausalAlign::bottom_right}};
  return spec;
}

Shape shape_of(int i) {
  return {1 << i % 4, 1 << i % 7, 64, 8, 8};
}

TEST(KernelTable, FindsWhatWasInserted) {
  KernelTable table;
  constexpr int n = 256;  // forces several growths
  for (int i = 0; i < n; ++i) {
    EXPECT_EQ(table.find(spec_of(i), shape_of(i)), nullptr) << i;
    table.insert(spec_of(i), shape_of(i), fake_kernel(i));
    for (int j = 0; j <= i; ++j)
      ASSERT_EQ(table.find(spec_of(j), shape_of(j)), fake_kernel(j)) << i << " " << j;
  }
  Shape other = shape_of(3);
  other.seqlen_k = 128;
  EXPECT_EQ(table.find(spec_of(3), other), nullptr);
}

TEST(KernelTable, KeepsTheFirst) {
  KernelTable table;
  table.insert(spec_of(1), {}, fake_kernel(1));
  table.insert(spec_of(1), {}, fake_kernel(2));
  EXPECT_EQ(table.find(spec_of(1), {}), fake_kernel(1));
}

TEST(KernelTable, ReadersSeeWholeEntriesWhileItGrows) {
  KernelTable table;
  constexpr int n = 256;
  std::atomic<bool> stop = false;
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t)
    readers.emplace_back([&] {
      while (!stop)
        for (int i = 0; i < n; ++i) {
          const Kernel* found = table.find(spec_of(i), shape_of(i));
          if (found) {
            ASSERT_EQ(found, fake_kernel(i));
          }
        }
    });
  for (int i = 0; i < n; ++i) table.insert(spec_of(i), shape_of(i), fake_kernel(i));
  stop = true;
  for (auto& r : readers) r.join();
}

}  // namespace
}  // namespace flashjit
