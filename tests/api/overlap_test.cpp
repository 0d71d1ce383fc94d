// A launch's outputs share memory with nothing else of the launch.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/api/any_launch.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

constexpr Shape sizes{.batch = 2, .seqlen_q = 5, .seqlen_k = 48, .num_heads_q = 4, .num_heads_kv = 2};

// Only make_block_lists reads no element of q and k. A copy from other caches uses no workspace.
bool is_read(const AnyLaunch& launch, const std::string& name) {
  if (info_of(launch.spec.op).copies) return name != "workspace";
  return !info_of(launch.spec.op).makes_lists || (name != "q" && name != "k");
}

// q_out may be q, and the sources of a copy may be its caches.
bool may_share(const std::string& a, const std::string& b) {
  const auto is_source = [](const std::string& name) { return name.ends_with("_from"); };
  const auto is_cache = [](const std::string& name) { return name[0] == 'k' || name[0] == 'v'; };
  return (a == "q" && b == "q_out") || (is_source(a) != is_source(b) && is_cache(a) && is_cache(b));
}

TEST(Overlap, OfEveryPairOfTensorsIsFound) {
  Engine engine{EngineOptions{}};
  std::set<std::string> met;
  for (const AnySpec& of : any_specs()) {
    SCOPED_TRACE(of.json);
    AnyLaunch launch(of, sizes, engine);
    ASSERT_NO_THROW(launch.kernel.prepare(launch.args));
    for (const AnyLaunch::Given& a : launch.tensors()) met.insert(a.name);
    for (const AnyLaunch::Given& a : launch.tensors())
      for (const AnyLaunch::Given& b : launch.tensors()) {
        // The smaller one moves, so that it meets no third one.
        if (a.tensor == b.tensor || !(a.written || b.written)) continue;
        if (AnyLaunch::bytes_of(*a.tensor) > AnyLaunch::bytes_of(*b.tensor)) continue;
        const Tensor before = *a.tensor;
        a.tensor->data = b.tensor->data;
        launch.args.named = launch.named;
        const bool same = may_share(a.name, b.name) || may_share(b.name, a.name);
        if (same || !is_read(launch, a.name) || !is_read(launch, b.name))
          EXPECT_NO_THROW(launch.kernel.prepare(launch.args)) << a.name << " " << b.name;
        else
          expect_error(ErrorCode::invalid_argument, {a.name.c_str(), b.name.c_str(), "share memory"},
                       [&] { launch.kernel.prepare(launch.args); });
        *a.tensor = before;
      }
  }
  for (const Argument& argument : flashjit::arguments)
    if (argument.tensor()) {
      EXPECT_TRUE(met.contains(argument.name)) << argument.name << ": no spec has it";
    }
}

// A table between the rows of an output is apart from it, and one in a row is not.
TEST(Overlap, WithATableInTheGapsOfAnOutput) {
  Engine engine{EngineOptions{}};
  AnyLaunch launch(any_specs()[1], sizes, engine);
  Tensor& dk = *launch.args.dk;
  const std::int64_t row = dk.strides[0], gap = 16;
  std::vector<float> memory(static_cast<std::size_t>(dk.shape[0] * (row + gap)));
  dk.data = memory.data();
  dk.strides[0] = row + gap;
  Tensor& starts = *launch.args.cu_seqlens_k;
  const void* const table = starts.data;
  const auto put = [&](std::int64_t element) {
    starts.data = memory.data() + element;
    std::memcpy(starts.data, table, sizeof(std::int32_t) * 3);
  };
  put(3 * (row + gap) + row);
  EXPECT_NO_THROW(launch.kernel.prepare(launch.args));
  put(7 * (row + gap) - 3);
  EXPECT_NO_THROW(launch.kernel.prepare(launch.args));
  for (const std::int64_t element : {7 * (row + gap) - 2, 8 * (row + gap) + row - 1, 9 * (row + gap) + 5}) {
    put(element);
    expect_error(ErrorCode::invalid_argument, {"dk", "cu_seqlens_k", "share memory"},
                 [&] { launch.kernel.prepare(launch.args); });
  }
}

}  // namespace
}  // namespace flashjit
