// Random specs, sizes, layouts and data. FLASHJIT_TEST_SEED
// chooses other cases, FLASHJIT_TEST_CASES their number.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>

#include "codegen/families/kernel_family.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : seed_(seed) {}
  // A number in [first, last].
  int between(int first, int last) {
    return first + static_cast<int>(verify::random_bits(seed_, count_++) %
                                    static_cast<std::uint64_t>(last - first + 1));
  }
  bool one_in(int n) { return between(1, n) == 1; }
  template <class T>
  T of(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(between(0, static_cast<int>(choices.size()) - 1))];
  }
  // A length: mostly short, sometimes 0, seldom long.
  int length(int longest) { return std::min(longest, one_in(12) ? 0 : between(1, 1 << between(0, 11))); }

 private:
  std::uint64_t seed_, count_ = 0;
};

std::vector<Mask> draw_masks(Draw& draw) {
  std::vector<Mask> masks;
  const bool tree = draw.one_in(5);
  const auto align = tree || draw.one_in(2) ? CausalAlign::bottom_right : CausalAlign::top_left;
  if (tree) masks.emplace_back(TreeMask{});
  if (draw.one_in(2)) masks.emplace_back(CausalMask{align});
  if (!tree && draw.one_in(4)) masks.emplace_back(SlidingWindowMask{align, draw.one_in(2)});
  if (draw.one_in(4)) masks.emplace_back(PaddingMask{});
  if (draw.one_in(4))
    masks.emplace_back(BlockSparseMask{16 * draw.between(1, 16), 16 * draw.between(1, 16), draw.one_in(3)});
  return masks;
}

AttentionSpec draw_spec(Draw& draw, const std::vector<DType>& dtypes) {
  const int dim = draw.one_in(2) ? draw.of<int>({64, 128}) : 8 * draw.between(1, 32);
  const DType dtype = draw.of(dtypes);
  SpecOptions options;
  options.head_dim_v = draw.one_in(4) ? 8 * draw.between(1, 32) : dim;
  options.lse = !draw.one_in(4);
  options.varlen = draw.one_in(3);
  options.dropout = draw.one_in(4);
  if (draw.one_in(4)) options.o_dtype = DType::fp32;
  options.paged = draw.one_in(4);
  return forward_spec(dtype, dim, draw_masks(draw), options);
}

AttentionSpec draw_decode_spec(Draw& draw, const std::vector<DType>& dtypes) {
  AttentionSpec spec = draw_spec(draw, dtypes);
  spec.op = Operation::decode;
  spec.dropout = false;
  spec.paged |= draw.one_in(2);
  std::erase_if(spec.mask, [](const Mask& mask) {
    return std::holds_alternative<PaddingMask>(mask) || std::holds_alternative<BlockSparseMask>(mask);
  });
  return spec.validated();
}

AttentionSpec draw_backward_spec(Draw& draw, const std::vector<DType>& dtypes) {
  AttentionSpec spec = draw_spec(draw, dtypes);
  spec.op = Operation::backward;
  spec.lse = true;
  spec.paged = false;
  if (draw.one_in(3)) spec.grad_dtype = DType::fp32;
  spec.deterministic = draw.one_in(3);
  return spec.validated();
}

Case draw_case(Draw& draw, const AttentionSpec& spec, bool is_cuda) {
  using enum MemoryLayout;
  Case c{.spec = spec};
  // Multiply-adds of a whole case. The oracle takes several times as long for a backward.
  const std::int64_t budget = std::int64_t{spec.op == Operation::backward ? 20 : 150} << 20;
  c.heads_kv = draw.between(1, 3);
  c.heads_q = c.heads_kv * draw.between(1, 4);
  c.batch = draw.one_in(16) ? 0 : draw.between(1, 4);
  const std::int64_t per_pair =
      std::int64_t{c.heads_q} * std::max(c.batch, 1) * (spec.head_dim + spec.head_dim_v);
  const auto longest = [&](int other) {
    return static_cast<int>(std::min<std::int64_t>(4096, budget / per_pair / std::max(other, 1)));
  };
  c.seqlen_q = draw.length(2048);
  c.seqlen_k = draw.one_in(3) ? std::min(c.seqlen_q, longest(c.seqlen_q)) : draw.length(longest(c.seqlen_q));
  c.seqlen_q = std::min(c.seqlen_q, longest(c.seqlen_k));
  for (int b = 0; spec.varlen && b < c.batch; ++b) {
    c.lengths_q.push_back(draw.between(0, c.seqlen_q));
    c.lengths_k.push_back(draw.one_in(3) ? std::min(c.lengths_q.back(), c.seqlen_k)
                                         : draw.between(0, c.seqlen_k));
  }
  if (spec.varlen) {
    c.spare_rows = draw.one_in(2) ? draw.between(1, 200) : 0;
    c.max_seqlen_q = draw.one_in(2) ? std::optional(c.shape().seqlen_q) : std::nullopt;
    c.max_seqlen_k = draw.one_in(2) ? std::optional(c.shape().seqlen_k) : std::nullopt;
  }
  if (spec.paged) {
    c.page_size = draw.of<int>({1, 2, 4, 16, 48, 64, 80, 256});
    c.max_seqlen_k.reset();
  }
  std::vector<MemoryLayout> layouts = {contiguous, heads_first, batch_inside, padded, sliced_heads};
  if (!is_cuda) layouts.push_back(odd);
  c.layout = draw.of(layouts);
  c.layout_kv = draw.of(layouts);
  c.data = draw.one_in(2) ? Data::random
                          : draw.of<Data>({Data::equal_scores, Data::rising, Data::falling, Data::huge_scores,
                                           Data::positive_v});
  c.poison = draw.of<Poison>({Poison::nan, Poison::infinity});
  if (draw.one_in(4)) c.softmax_scale = 1.0f / static_cast<float>(draw.between(1, 200));
  c.dropout_p = draw.of<double>({0, 1e-3, 0.1, 0.5, 0.9, 1});
  c.seed = static_cast<std::uint64_t>(draw.between(1, 1 << 30));
  return c;
}

Case draw_decode_case(Draw& draw, const AttentionSpec& spec, bool is_cuda) {
  constexpr int most_rows = 64;
  Case c = draw_case(draw, spec, is_cuda);
  c.heads_q *= draw.one_in(3) ? 4 : 1;
  c.seqlen_q = std::min(c.seqlen_q, most_rows);
  for (int& rows : c.lengths_q) rows = std::min(rows, most_rows);
  if (c.max_seqlen_q) c.max_seqlen_q = c.shape().seqlen_q;
  c.max_seqlen_k.reset();
  return c;
}

class Random : public ComputesOnEveryDevice {
 protected:
  bool computes_backward() {
    return why_unsupported({.op = Operation::backward, .dtype = DType::bf16, .head_dim = 64},
                           Target::parse(on().target()))
        .empty();
  }
};

TEST_P(Random, SpecsAndShapes) {
  const std::uint64_t seed = sample_seed(), cases = from_environment("FLASHJIT_TEST_CASES",
                                                                     test_all() || on().is_cuda() ? 150 : 70);
  std::cout << "FLASHJIT_TEST_CASES=" << cases << std::endl;
  RecordProperty("seed", std::to_string(seed));
  Draw draw(seed);
  AttentionSpec spec;
  for (std::uint64_t i = 0; i < cases; ++i) {
    if (i % 4 == 0) spec = draw_spec(draw, own_dtypes());  // compiling takes most of a case's time
    EXPECT_TRUE(computes(on(), draw_case(draw, spec, on().is_cuda()))) << "case " << i;
  }
}

TEST_P(Random, DecodeSpecsAndShapes) {
  const std::uint64_t seed = sample_seed(),
                      cases = from_environment("FLASHJIT_TEST_CASES", test_all() || on().is_cuda() ? 80 : 38);
  std::cout << "FLASHJIT_TEST_CASES=" << cases << std::endl;
  RecordProperty("seed", std::to_string(seed));
  Draw draw(seed);
  AttentionSpec spec;
  for (std::uint64_t i = 0; i < cases; ++i) {
    if (i % 4 == 0) {
      spec = draw_decode_spec(draw, own_dtypes());
      spec.batch_invariant = !on().is_cuda() && i % 3 == 0;
    }
    EXPECT_TRUE(computes(on(), draw_decode_case(draw, spec, on().is_cuda()))) << "case " << i;
  }
}

TEST_P(Random, BackwardSpecsAndShapes) {
  if (!computes_backward()) GTEST_SKIP() << "no kernels of op backward";
  const std::uint64_t seed = sample_seed(), cases = from_environment("FLASHJIT_TEST_CASES",
                                                                     test_all() || on().is_cuda() ? 100 : 18);
  std::cout << "FLASHJIT_TEST_CASES=" << cases << std::endl;
  RecordProperty("seed", std::to_string(seed));
  // CPU targets draw cases of their own, since each takes few.
  Draw draw(seed + std::hash<std::string>{}(on().is_cuda() ? "" : on().target()));
  AttentionSpec spec;
  for (std::uint64_t i = 0; i < cases; ++i) {
    if (i % 4 == 0) spec = draw_backward_spec(draw, own_dtypes());
    EXPECT_TRUE(computes(on(), draw_case(draw, spec, on().is_cuda()))) << "case " << i;
  }
}

FLASHJIT_ON_EVERY_DEVICE(Random);

}  // namespace
}  // namespace flashjit::testing_support
