// Dropout on every device: results are right under every mask, and exactly
// the weights drop that the bit function names, whatever the config.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>

#include "codegen/families/search_space.hpp"
#include "runtime/dropout.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tests/unit/expect_error.h"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

AttentionSpec dropout_spec(DType dtype, int head_dim, std::vector<Mask> masks = {},
                           SpecOptions options = {}) {
  options.dropout = true;
  return forward_spec(dtype, head_dim, std::move(masks), options);
}

// An int64 in memory that the device's kernels can read.
class Number {
 public:
  Number(TestDevice& device, std::uint64_t value) : device_(device) {
    if (device.is_cuda()) buffer_ = cuda::DeviceBuffer(device.context(), sizeof value_);
    set(value);
  }
  void set(std::uint64_t value) {
    value_ = value;
    if (device_.is_cuda()) buffer_.copy_from(&value_, sizeof value_);
    device_.synchronize();
  }
  Tensor tensor() {
    void* data = device_.is_cuda() ? buffer_.data() : &value_;
    return Tensor::contiguous(data, DType::int64, device_.device(), {1});
  }

 private:
  TestDevice& device_;
  std::uint64_t value_ = 0;
  cuda::DeviceBuffer buffer_;
};

class DropoutOn : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }

  std::vector<std::byte> run(Workload& workload, const Kernel& kernel, const AttentionArgs& args) {
    workload.reset();
    kernel.launch(args);
    return workload.outputs();
  }
};

TEST_P(DropoutOn, EveryDtypeAndHeadDim) {
  std::uint64_t seed = 1;
  for (const DType dtype : on().dtypes()) {
    for (const int head_dim : {8, 40, 64, 80, 128, 192, 256}) {
      const AttentionSpec spec = dropout_spec(dtype, head_dim);
      seed += 2;
      if (!takes_next(spec)) continue;
      for (const double p : {0.1, 0.75})
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = 150,
                .seqlen_k = 290,
                .dropout_p = p,
                .seed = seed + (p > 0.5)});
    }
  }
}

TEST_P(DropoutOn, EveryMask) {
  using enum CausalAlign;
  std::uint64_t seed = 100;
  for (const auto& masks : std::vector<std::vector<Mask>>{
           {CausalMask{}},
           {CausalMask{top_left}},
           {SlidingWindowMask{}},
           {SlidingWindowMask{bottom_right, true}},
           {PaddingMask{}},
           {BlockSparseMask{64, 128}},
           {BlockSparseMask{64, 64, true}},
           {TreeMask{}},
           {CausalMask{}, PaddingMask{}},
           {CausalMask{}, PaddingMask{}, BlockSparseMask{64, 64}, TreeMask{}},
           {CausalMask{}, SlidingWindowMask{bottom_right, true}, PaddingMask{}, BlockSparseMask{64, 64}}}) {
    const std::vector<DType> dtypes = on().dtypes();
    const AttentionSpec spec = dropout_spec(dtypes[seed % dtypes.size()], 64, masks);
    seed += 5;
    if (!takes_next(spec)) continue;
    std::uint64_t of_sizes = seed;
    for (const auto& [rows, keys] : {std::pair{1, 300}, {130, 130}, {129, 257}, {200, 70}, {64, 17}})
      expect({.spec = spec,
              .batch = 3,
              .heads_q = 4,
              .heads_kv = 2,
              .seqlen_q = rows,
              .seqlen_k = keys,
              .layout_kv = MemoryLayout::padded,
              .dropout_p = 0.3,
              .seed = ++of_sizes});
  }
}

TEST_P(DropoutOn, PackedSequences) {
  std::uint64_t seed = 200;
  for (const auto& masks : std::vector<std::vector<Mask>>{{}, {CausalMask{}}, {BlockSparseMask{64, 64}}})
    for (const int head_dim : {64, 128}) {
      const AttentionSpec spec = dropout_spec(DType::bf16, head_dim, masks, {.varlen = true});
      ++seed;
      if (!takes_next(spec)) continue;
      expect({.spec = spec,
              .heads_q = 4,
              .heads_kv = 2,
              .lengths_q = {0, 5, 300, 1, 64, 65, 0},
              .lengths_k = {7, 5, 260, 130, 0, 64, 0},
              .spare_rows = 130,
              .dropout_p = 0.3,
              .seed = seed});
    }
}

TEST_P(DropoutOn, ScoresThatMoveTheMaximum) {
  std::uint64_t seed = 300;
  for (const Data data : {Data::rising, Data::falling, Data::huge_scores, Data::positive_v})
    for (const int head_dim : {64, 128}) {
      const AttentionSpec spec = dropout_spec(DType::bf16, head_dim);
      ++seed;
      if (!takes_next(spec)) continue;
      expect({.spec = spec,
              .heads_q = 2,
              .heads_kv = 2,
              .seqlen_q = 200,
              .seqlen_k = 700,
              .data = data,
              .dropout_p = 0.5,
              .seed = seed});
    }
}

TEST_P(DropoutOn, CertainDropoutGivesZerosAndTheUndroppedLse) {
  for (const DType dtype : own_dtypes()) {
    for (const bool varlen : {false, true}) {
      Workload workload(on(), {.spec = dropout_spec(dtype, 64, {CausalMask{}}, {.varlen = varlen}),
                               .batch = 2,
                               .heads_q = 2,
                               .heads_kv = 1,
                               .seqlen_q = 100,
                               .seqlen_k = 100,
                               .lengths_q = {30, 70},
                               .lengths_k = {90, 70},
                               .dropout_p = 1});
      const std::vector<std::byte> bits = run(workload, workload.kernel(on().engine()), workload.args());
      const std::size_t of_o = std::size_t{2} * (varlen ? 100 : 200) * 64 * size_of(dtype);
      EXPECT_TRUE(std::all_of(bits.begin(), bits.begin() + static_cast<std::ptrdiff_t>(of_o),
                              [](std::byte b) { return b == std::byte{0}; }));
      EXPECT_TRUE(workload.check());
    }
  }
}

TEST_P(DropoutOn, ImpossibleDropoutIsNoDropoutBitForBit) {
  for (const auto& [head_dim, masks, varlen] :
       std::vector<std::tuple<int, std::vector<Mask>, bool>>{{64, {}, false},
                                                             {64, {CausalMask{}}, true},
                                                             {128, {CausalMask{}}, false},
                                                             {128, {PaddingMask{}, TreeMask{}}, false},
                                                             {256, {}, false}}) {
    for (const DType dtype : on().dtypes()) {
      const AttentionSpec with = dropout_spec(dtype, head_dim, masks, {.varlen = varlen});
      if (!takes_next(with)) continue;
      Workload workload(on(), {.spec = with,
                               .batch = 2,
                               .heads_q = 4,
                               .heads_kv = 2,
                               .seqlen_q = 200,
                               .seqlen_k = 333,
                               .lengths_q = {1, 150, 0, 77},
                               .lengths_k = {33, 150, 5, 300},
                               .dropout_p = 0});
      const Kernel& kernel = workload.kernel(on().engine());
      const std::vector<std::byte> bits = run(workload, kernel, workload.args());
      AttentionSpec without = with;
      without.dropout = false;
      without.config = pinned(kernel.info().config);
      AttentionArgs args = workload.args();
      args.dropout_p.reset();
      args.dropout_seed.reset();
      args.dropout_offset.reset();
      EXPECT_EQ(run(workload, on().engine().get(without, workload.given().shape()), args), bits)
          << workload.given().str();
    }
  }
}

// Q is 0, so every visible key has the same weight. V is a unit matrix for head_dim_v
// keys at a time, so an element of o is nonzero exactly if the weight was kept.
std::vector<std::uint8_t> mask_of_kernel(TestDevice& device, Workload& workload, const Kernel& kernel) {
  const Case& c = workload.given();
  const Tensor q = workload.q().on_host(), v = workload.v().on_host();
  const int dim = c.spec.head_dim_v;
  const auto rows = static_cast<std::size_t>(c.batch) * c.heads_q * c.seqlen_q;
  std::vector<std::uint8_t> keep(rows * static_cast<std::size_t>(c.seqlen_k));
  std::memset(q.data, 0, static_cast<std::size_t>(q.shape[0] * q.strides[0]) * size_of(q.dtype));
  workload.q().upload();
  for (int first = 0; first < c.seqlen_k; first += dim) {
    for (std::int64_t i = 0; i < v.shape[0] * v.shape[1] * v.shape[2] * dim; ++i) {
      const std::int64_t key = i / dim / v.shape[2] % v.shape[1], column = i % dim;
      verify::store_element(v.data, v.dtype, i, key == first + column ? 1.0f : 0.0f);
    }
    workload.v().upload();
    workload.reset();
    kernel.launch(workload.args());
    device.synchronize();
    const std::vector<std::byte> o = workload.outputs();  // [batch, row, head, column]
    for (std::size_t i = 0; i < rows; ++i) {
      const std::size_t head = i % static_cast<std::size_t>(c.heads_q);
      const std::size_t row = i / static_cast<std::size_t>(c.heads_q) % static_cast<std::size_t>(c.seqlen_q);
      const std::size_t batch = i / static_cast<std::size_t>(c.heads_q * c.seqlen_q);
      const std::size_t to =
          (batch * static_cast<std::size_t>(c.heads_q) + head) * static_cast<std::size_t>(c.seqlen_q) + row;
      for (int column = 0; column < std::min(dim, c.seqlen_k - first); ++column)
        keep[to * static_cast<std::size_t>(c.seqlen_k) + static_cast<std::size_t>(first + column)] =
            verify::load_element(o.data(), c.spec.dtype, static_cast<std::int64_t>(i) * dim + column) != 0;
    }
  }
  return keep;
}

TEST_P(DropoutOn, DropsWhatTheBitFunctionSaysInEveryConfig) {
  for (const int head_dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      AttentionSpec spec =
          dropout_spec(DType::bf16, head_dim, causal ? std::vector<Mask>{CausalMask{}} : std::vector<Mask>{},
                       {.lse = false});
      const std::vector<KernelConfig> space = search_space(spec, Target::parse(on().target()));
      constexpr std::size_t configs = 5;
      ASSERT_GE(space.size(), configs);
      for (std::size_t i = 0; i < configs; ++i) {
        const KernelConfig& config = space[i * (space.size() - 1) / (configs - 1)];
        if (!takes_next(spec)) continue;
        spec.config = pinned(config);
        Workload workload(on(), {.spec = spec,
                                 .batch = 2,
                                 .heads_q = 4,
                                 .heads_kv = 2,
                                 .seqlen_q = 203,
                                 .seqlen_k = 277,
                                 .dropout_p = 0.3,
                                 .seed = 7 + i});
        const AttentionArgs& args = workload.args();
        std::vector<std::uint8_t> expected(dropout_mask_size(workload.given().shape()));
        dropout_mask({.p = *args.dropout_p, .seed = *args.dropout_seed, .offset = *args.dropout_offset},
                     workload.given().shape(), expected);
        if (causal)  // aligned bottom_right
          for (std::size_t at = 0; at < expected.size(); ++at)
            if (at % 277 > at / 277 % 203 + (277 - 203)) expected[at] = 0;
        EXPECT_EQ(mask_of_kernel(on(), workload, workload.kernel(on().engine())), expected)
            << workload.given().str() << " " << to_json(config);
      }
    }
  }
}

TEST_P(DropoutOn, SeedsInMemoryAreReadWhenTheKernelRuns) {
  for (const bool varlen : {false, true}) {
    Workload workload(on(), {.spec = dropout_spec(DType::bf16, 64, {CausalMask{}}, {.varlen = varlen}),
                             .batch = 2,
                             .heads_q = 4,
                             .heads_kv = 2,
                             .seqlen_q = 200,
                             .seqlen_k = 300,
                             .lengths_q = {1, 150, 0, 77},
                             .lengths_k = {33, 150, 5, 300}});
    const Kernel& kernel = workload.kernel(on().engine());
    AttentionArgs by_value = workload.args();
    const auto expected = [&](std::uint64_t seed, std::uint64_t offset) {
      by_value.dropout_seed = seed;
      by_value.dropout_offset = offset;
      return run(workload, kernel, by_value);
    };
    constexpr std::uint64_t seed = 0x8000000200000001;
    Number seed_number(on(), seed), offset_number(on(), 5);
    AttentionArgs args = workload.args();
    args.dropout_seed.reset();
    args.dropout_offset.reset();
    args.dropout_seed_tensor = seed_number.tensor();
    args.dropout_offset_tensor = offset_number.tensor();
    const auto first = run(workload, kernel, args);
    EXPECT_EQ(first, expected(seed, 5));
    EXPECT_NE(first, expected(seed, 6));
    EXPECT_NE(first, expected(seed + 1, 5));
    const auto at_zero = expected(seed, 0);
    by_value.dropout_offset.reset();
    EXPECT_EQ(run(workload, kernel, by_value), at_zero) << "an offset that is not given is 0";

    const PreparedLaunch prepared = kernel.prepare(args);
    for (const std::uint64_t offset : {std::uint64_t{6}, std::uint64_t{1} << 32}) {
      offset_number.set(offset);
      workload.reset();
      prepared.launch();
      EXPECT_EQ(workload.outputs(), expected(seed, offset)) << offset;
    }
    if (!on().is_cuda()) continue;
    const cuda::Graph graph(on().context(), [&](Stream stream) { kernel.launch(args, stream); });
    for (const std::uint64_t offset : {std::uint64_t{7}, std::uint64_t{8}}) {
      offset_number.set(offset);
      workload.reset();
      graph.launch();
      EXPECT_EQ(workload.outputs(), expected(seed, offset)) << "replay, offset " << offset;
    }
  }
}

TEST_P(DropoutOn, SeedsOfAnotherDeviceAreRefused) {
  Workload workload(on(), {.spec = dropout_spec(DType::bf16, 64), .seqlen_q = 10, .seqlen_k = 10});
  const Kernel& kernel = workload.kernel(on().engine());
  Number seed(on(), 1), offset(on(), 2);
  AttentionArgs args = workload.args();
  args.dropout_seed.reset();
  args.dropout_offset.reset();
  args.dropout_seed_tensor = seed.tensor();
  args.dropout_offset_tensor = offset.tensor();
  EXPECT_NO_THROW(kernel.launch(args));
  const auto refused = [&](std::initializer_list<const char*> parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { kernel.launch(args); });
  };
  args.dropout_seed_tensor->device = {Device::Kind::cuda, 7};
  refused({"dropout_seed_tensor", "cuda:7", "copy the tensor there"});
  args.dropout_seed_tensor = seed.tensor();
  args.dropout_offset_tensor->device = {on().is_cuda() ? Device::Kind::cpu : Device::Kind::cuda, 0};
  refused({"dropout_offset_tensor"});
  if (!on().is_cuda()) return;
  // The tensor claims to be on the GPU, and is not.
  std::uint64_t on_host = 3;
  args.dropout_offset_tensor = Tensor::contiguous(&on_host, DType::int64, on().device(), {1});
  try {
    kernel.launch(args);
    on().synchronize();  // works if the device uses the host's page tables
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(error.message().find("dropout_offset_tensor"), std::string::npos);
  }
}

TEST_P(DropoutOn, SameBitsRunAfterRun) {
  Workload workload(on(), {.spec = dropout_spec(DType::bf16, 128, {CausalMask{}}),
                           .batch = 2,
                           .heads_q = 8,
                           .heads_kv = 2,
                           .seqlen_q = 700,
                           .seqlen_k = 700});
  const Kernel& kernel = workload.kernel(on().engine());
  const auto bits = run(workload, kernel, workload.args());
  EXPECT_TRUE(workload.check());
  for (int i = 0; i < 10; ++i) ASSERT_EQ(run(workload, kernel, workload.args()), bits) << "run " << i;
}

FLASHJIT_ON_EVERY_DEVICE(DropoutOn);

}  // namespace
}  // namespace flashjit::testing_support
