// The sm_90a forward with batch_invariant, without a GPU: a row has the same bits in any cut of its prompt,
// among any neighbours, by any tile. Every short cut that a warp's rows share would be seen here.
#include <span>

#include "tests/cuda/forward_sm90a_emulated.hpp"
#include "tests/support/row_in_batches.hpp"

namespace flashjit::testing_support {
namespace {

// Cuts with and without later rows, alone and among others.
std::vector<Batch> batches_of(int position) {
  return {{{1}, 0, {}, 16},
          {{position + 1}, 0, {}, 64},
          {{16}, 8, {}, 1},
          {{40}, 11, {60}, 48},
          {{position + 60}, 59, {40, 3}, 16}};
}

class BatchInvariantSm90a : public ForwardSm90a {
 protected:
  template <class Spec, class... Configs>
  void expect_same(const std::vector<Mask>& masks) {
    // A few keys after an edge of blocks: in some cuts a warp has rows from both sides.
    const int position = std::max({Configs::block_n...}) + 3;
    expect_same<Spec, Configs...>(masks, position, batches_of(position), 130, {0});
  }
  // parts: the parts of keys that launches have in turn; 0: none.
  template <class Spec, class... Configs>
  void expect_same(const std::vector<Mask>& masks, int position, const std::vector<Batch>& batches,
                   int window, const std::vector<int>& parts) {
    if (!has_turn()) return;
    std::vector<std::byte> expected;
    for (const Batch& batch : batches) {
      Case given = case_of(with_spec<Invariant<Spec>>({}, masks).spec, batch, position);
      given.masks =
          verify::MaskDataOptions{.window_left = window, .window_right = 0, .lengths_k = given.lengths_k};
      // Some scores are near 0, others not; slopes leave weight to far keys.
      given.named.scalars = {{"cap", 5.6}};
      constexpr float slopes[] = {0.02f, -0.03f, 0.01f};
      given.named.tables = {{"slope", DType::fp32, {3}, {}}};
      const auto elements = std::as_bytes(std::span(slopes));
      given.named.tables[0].elements.assign(elements.begin(), elements.end());
      Workload workload(host, given);
      fill(workload, batch);
      const auto launch_by = [&]<class Config>(Config) {
        SCOPED_TRACE(given.str() + " by tiles of " + std::to_string(Config::block_m) +
                     (Config::pack_gqa ? " packed rows" : " rows"));
        for (const int of_tile : parts) {
          workload.reset();
          launch<Invariant<Spec>, Config>(given.spec, workload.args(), not_a_number, of_tile);
          ASSERT_TRUE(workload.check());
          const std::vector<std::byte> bits = bits_of_row(workload, batch);
          if (expected.empty()) expected = bits;
          EXPECT_TRUE(bits == expected) << of_tile << " parts";
        }
      };
      (launch_by(Configs{}), ...);
    }
  }
};

TEST_F(BatchInvariantSm90a, CutsNeighboursAndTiles) {
  expect_same<SpecOf<Bf16, 64, 64, false, BottomRight>, ConfigOf<64, 128, false, false, sections>,
              ConfigOf<128, 128, true, true, sections>, ConfigOf<192, 128, false, false, sections>>(
      {CausalMask{}});
  using Window = device::SlidingWindow<Align::bottom_right>;
  expect_same<WithFloatOutput<WithPages<SpecOf<Fp16, 128, 72, false, BottomRight, Window>>>,
              ConfigOf<64, 128, true, false, sections>, ConfigOf<128, 128, true, true, waves>>(
      {CausalMask{}, SlidingWindowMask{}});
}

TEST_F(BatchInvariantSm90a, Formulas) {
  using Spec = SpecOf<Bf16, 64, 40, false, BottomRight>;
  expect_same<WithTilt<Spec, FormulaParams, true>, ConfigOf<64, 128, true, false, sections>,
              ConfigOf<128, 128, true, true, sections>>({CausalMask{}});
  expect_same<WithCap<Spec, FormulaParams, false>, ConfigOf<64, 128, true, false, sections>,
              ConfigOf<128, 128, true, true, sections>>({CausalMask{}});
}

TEST_F(BatchInvariantSm90a, EightBitKeysAndDividedColumns) {
  expect_same<
      WithKv<WithPages<SpecOf<Bf16, 64, 64, false, BottomRight>>, device::int8, device::KvScale::head>,
      ConfigOf<64, 128, true, false, sections>, ConfigOf<128, 128, true, true, waves>>({CausalMask{}});
  expect_same<SpecOf<Bf16, 24, 264, false, BottomRight>, DividedConfigOf<64, 2, false, sections>,
              DividedConfigOf<64, 1, true, sections>>({CausalMask{}});
}

// Keys are added up in parts, whether launches divide them or not, from the last to the first: outputs are
// not rounded, so that another order is seen. Some rows of a tile begin a part that others do not see; with a
// window most parts are empty.
TEST_F(BatchInvariantSm90a, PartsOfKeys) {
  const auto keys_of_part = [](int block_n) { return block_n * device::forward_part_blocks(block_n); };
  expect_same<WithFloatOutput<SpecOf<Bf16, 16, 16, false, BottomRight>>,
              ConfigOf<64, 128, false, false, sections>, ConfigOf<128, 128, true, true, waves>>(
      {CausalMask{}}, 5 * keys_of_part(128) / 2, {{{1}, 0, {}, 64}, {{24}, 11, {}, 48}}, 0, {0, 3});
  expect_same<WithPages<SpecOf<Fp16, 16, 24, false, BottomRight, WindowWithSinks>>,
              ConfigOf<64, 128, true, true, sections>>(
      {CausalMask{}, SlidingWindowMask{CausalAlign::bottom_right, true}}, 2 * keys_of_part(128) + 3,
      {{{24}, 11, {}, 48}}, 150, {0, 3});
}

}  // namespace
}  // namespace flashjit::testing_support
