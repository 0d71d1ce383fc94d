// The masks' arguments. Arguments that are missing, do not fit or are contradictory
// are refused by name, and so are those that the spec's masks do not read.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "tests/api/arguments.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

constexpr int seqlen_q = GoodArguments::seqlen_q, seqlen_k = GoodArguments::seqlen_k;

// Valid arguments for a kernel with these masks; tests add the masks' tables.
class MaskArguments {
 public:
  explicit MaskArguments(std::vector<Mask> masks, bool varlen = false) : good_(varlen) {
    AttentionSpec spec;
    spec.head_dim = GoodArguments::head_dim;
    spec.head_dim_v = GoodArguments::head_dim_v;
    spec.mask = std::move(masks);
    spec.varlen = varlen;
    kernel_ = &engine().get(spec, GoodArguments::shape());
  }

  AttentionArgs& args() { return good_.args; }
  std::vector<std::int32_t>& table(std::optional<Tensor> AttentionArgs::* argument,
                                   std::initializer_list<std::int64_t> shape,
                                   std::vector<std::int32_t> values) {
    tables_.push_back(std::make_unique<std::vector<std::int32_t>>(std::move(values)));
    args().*argument = Tensor::contiguous(tables_.back()->data(), DType::int32, {}, shape);
    return *tables_.back();
  }

  void expect_works() { EXPECT_NO_THROW(kernel_->launch(args())); }
  void expect_refusal(std::initializer_list<const char*> parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { kernel_->launch(args()); });
    expect_error(ErrorCode::invalid_argument, parts, [&] { kernel_->prepare(args()); });
  }

 private:
  static Engine& engine() {
    static Engine instance{EngineOptions{}};
    return instance;
  }
  GoodArguments good_;
  std::vector<std::unique_ptr<std::vector<std::int32_t>>> tables_;
  const Kernel* kernel_;
};

TEST(MaskArguments, PaddingLengths) {
  MaskArguments m({PaddingMask{}});
  m.expect_refusal({"seqlens_k", "missing"});
  auto& lengths = m.table(&AttentionArgs::seqlens_k, {2}, {seqlen_k, 0});
  m.expect_works();
  lengths[1] = seqlen_k + 1;
  m.expect_refusal({"seqlens_k[1] is 8", "seqlen_k = 7"});
  lengths[1] = -1;
  m.expect_refusal({"seqlens_k[1] is -1"});
  m.table(&AttentionArgs::seqlens_k, {3}, {1, 1, 1});
  m.expect_refusal({"seqlens_k", "[3]", "the batch"});
  m.table(&AttentionArgs::seqlens_k, {2}, {1, 1});
  m.table(&AttentionArgs::seqlens_q, {2}, {0, seqlen_q + 1});
  m.expect_refusal({"seqlens_q[1] is 6", "seqlen_q = 5"});
}

TEST(MaskArguments, WindowSizes) {
  MaskArguments m({SlidingWindowMask{}});
  m.expect_works();
  m.args().window_left = 0;
  m.args().window_right = 1 << 30;
  m.expect_works();
  m.args().window_left = -1;
  m.expect_refusal({"window_left is -1", "without the argument"});
  m.args().window_left = 3;
  m.args().num_sinks = 2;
  m.expect_refusal({"num_sinks was given", "\"sinks\": true"});
  MaskArguments sinks({SlidingWindowMask{.sinks = true}});
  sinks.args().num_sinks = 2;
  sinks.expect_works();
  sinks.args().num_sinks = -2;
  sinks.expect_refusal({"num_sinks is -2"});
}

// 5 rows of 7 keys in blocks of 16 make one list with room for
// one block. More lists or blocks would belong to a longer shape.
TEST(MaskArguments, BlockLists) {
  MaskArguments m({BlockSparseMask{.block_m = 16, .block_n = 16}});
  m.expect_refusal({"block_offsets", "missing"});
  auto& offsets = m.table(&AttentionArgs::block_offsets, {1, 1, 2}, {0, 1});
  m.expect_refusal({"block_indices", "missing"});
  auto& blocks = m.table(&AttentionArgs::block_indices, {2}, {0, 0});
  m.expect_works();
  offsets[1] = 2;
  m.expect_refusal({"block_indices[1]", "query block 0", "batch 0, head 0", "twice"});
  blocks[1] = 1;
  m.expect_refusal({"block_indices[1]", "is 1", "between 0 and 0"});
  blocks[0] = -1;
  m.expect_refusal({"block_indices[0]", "is -1"});
  blocks[0] = 0;
  for (const int end : {-1, 3}) {
    offsets[1] = end;
    m.expect_refusal({"block_offsets", "query block 0", "0 to the 2 of block_indices"});
  }
  offsets[1] = 1;
  auto& bitmask_of = m.table(&AttentionArgs::block_bitmask_of, {2}, {0, -1});
  m.expect_refusal({"block_bitmask_of and block_bitmasks belong together"});
  m.table(&AttentionArgs::block_bitmasks, {1, 16, 1}, std::vector<std::int32_t>(16));
  m.expect_works();
  bitmask_of[0] = 1;
  m.expect_refusal({"block_bitmask_of[0] is 1", "one of the 1 block_bitmasks"});
  bitmask_of[0] = -2;
  m.expect_refusal({"block_bitmask_of[0] is -2", "must be -1 or"});
  bitmask_of[0] = 0;
  m.table(&AttentionArgs::block_bitmasks, {1, 32, 1}, std::vector<std::int32_t>(32));
  m.expect_refusal({"block_bitmasks", "[1, 32, 1]", "block_m"});
  m.args().block_bitmasks.reset();
  m.args().block_bitmask_of.reset();
  m.table(&AttentionArgs::block_offsets, {1, 4, 2}, std::vector<std::int32_t>(8));
  m.expect_refusal({"block_offsets", "per_head"});
  m.table(&AttentionArgs::block_offsets, {1, 1, 3}, {0, 0, 0});
  m.expect_refusal({"block_offsets", "[1, 1, 3]", "must be 2"});
  m.table(&AttentionArgs::block_offsets, {3, 1, 2}, std::vector<std::int32_t>(6));
  m.expect_refusal({"block_offsets", "1 or the batch"});
}

// Lists that were made of the other masks.
TEST(MaskArguments, BlockListsOfMasks) {
  MaskArguments m({BlockSparseMask{.block_m = 16, .block_n = 16, .of_masks = true}, CausalMask{}});
  m.table(&AttentionArgs::block_offsets, {1, 1, 2}, {0, 1});
  m.table(&AttentionArgs::block_indices, {2}, {0, 99});
  m.expect_refusal({"block_bitmask_of is missing", "make_block_lists writes it"});
  auto& bitmask_of = m.table(&AttentionArgs::block_bitmask_of, {2}, {-2, 99});
  m.expect_works();
  bitmask_of[0] = -3;
  m.expect_refusal({"block_bitmask_of[0] is -3", "-1, -2 or"});
  bitmask_of[0] = 0;
  m.expect_refusal({"block_bitmask_of[0] is 0", "one of the 0 block_bitmasks"});
  m.table(&AttentionArgs::block_bitmasks, {1, 16, 1}, std::vector<std::int32_t>(16, 1));
  m.expect_works();
}

TEST(MaskArguments, Trees) {
  MaskArguments m({TreeMask{}});
  m.expect_refusal({"tree_bits", "missing"});
  m.table(&AttentionArgs::tree_bits, {1, seqlen_q, 1}, {1, 3, 7, 15, 31});
  m.expect_works();
  m.table(&AttentionArgs::prefix_lengths, {2}, {0, seqlen_k + 1});
  m.expect_refusal({"prefix_lengths[1] is 8"});
  m.args().prefix_lengths.reset();
  m.table(&AttentionArgs::tree_bits, {2, seqlen_q + 1, 1}, std::vector<std::int32_t>(12));
  m.expect_refusal({"tree_bits", "seqlen_q"});
}

// Without prefix_lengths the rows of a tree are the last keys.
TEST(MaskArguments, TreesOfMoreRowsThanKeys) {
  MaskArguments m({TreeMask{}, PaddingMask{}});
  m.table(&AttentionArgs::tree_bits, {1, seqlen_q, 1}, {1, 3, 7, 15, 31});
  auto& lengths = m.table(&AttentionArgs::seqlens_k, {2}, {seqlen_q, 0});
  m.expect_works();  // the second one has no keys
  lengths[1] = seqlen_q - 1;
  m.expect_refusal({"prefix_lengths is missing", "entry 1 has 5 rows and 4 keys"});
  m.table(&AttentionArgs::seqlens_q, {2}, {seqlen_q, seqlen_q - 1});
  m.expect_works();
  m.args().seqlens_q.reset();
  m.table(&AttentionArgs::prefix_lengths, {2}, {0, 0});
  m.expect_works();
}

// Packed launches take tables made for longer sequences, and compute the same result.
TEST(MaskArguments, PackedWithTablesOfLongerSequences) {
  for (const bool tree : {false, true}) {
    const auto mask = [&]() -> Mask {
      return tree ? Mask(TreeMask{}) : BlockSparseMask{.block_m = 16, .block_n = 16};
    };
    const auto give = [&](MaskArguments& m, int blocks) {
      if (tree) {
        std::vector<std::int32_t> bits(static_cast<std::size_t>(blocks) * seqlen_q, 1);
        m.table(&AttentionArgs::tree_bits, {1, blocks * seqlen_q, 1}, bits);
        return;
      }
      // Every query block lists key blocks 0 to blocks - 1, most of which lie beyond every sequence.
      std::vector<std::int32_t> offsets = {0}, indices;
      for (int i = 0; i < blocks; ++i) {
        for (int j = 0; j < blocks; ++j) indices.push_back(j);
        offsets.push_back(static_cast<std::int32_t>(indices.size()));
      }
      const auto listed = static_cast<std::int64_t>(indices.size());
      m.table(&AttentionArgs::block_offsets, {1, 1, blocks + 1}, offsets);
      m.table(&AttentionArgs::block_indices, {listed}, indices);
    };
    const auto outputs = [&](int blocks) {
      MaskArguments m({mask()}, true);
      auto* v = static_cast<std::uint16_t*>(m.args().v->data);
      for (int i = 0; i < 512; ++i) v[i] = static_cast<std::uint16_t>(0x3f80 + i % 64);
      give(m, blocks);
      m.args().max_seqlen_q = seqlen_q;
      m.args().max_seqlen_k = seqlen_k;
      m.expect_works();
      const auto* o = static_cast<const std::uint16_t*>(m.args().o->data);
      return std::vector<std::uint16_t>(
          o, o + 2 * seqlen_q * GoodArguments::heads_q * GoodArguments::head_dim_v);
    };
    EXPECT_NE(outputs(1).front(), 0);
    EXPECT_EQ(outputs(1), outputs(3));
  }
  MaskArguments few({TreeMask{}}, true);
  few.table(&AttentionArgs::tree_bits, {1, seqlen_q - 1, 1}, std::vector<std::int32_t>(seqlen_q));
  few.args().max_seqlen_q = seqlen_q;
  few.expect_refusal({"tree_bits", "at least 5"});
  few.args().max_seqlen_q.reset();  // the longest sequence may have the rows of all
  few.expect_refusal({"tree_bits", "a smaller max_seqlen_q would work"});
  MaskArguments padded({TreeMask{}});  // not packed: the table must fit exactly
  padded.table(&AttentionArgs::tree_bits, {1, seqlen_q + 1, 1}, std::vector<std::int32_t>(seqlen_q + 1));
  padded.expect_refusal({"tree_bits", "must be 5"});
}

TEST(MaskArguments, RowsUsedOfPackedSequences) {
  MaskArguments m({PaddingMask{}}, true);
  m.expect_refusal({"seqlens_k", "missing"});
  auto& lengths = m.table(&AttentionArgs::seqlens_q, {2}, {seqlen_q, 3});
  const auto elements = 2 * seqlen_q * GoodArguments::heads_q * GoodArguments::head_dim_v;
  std::fill_n(static_cast<std::uint16_t*>(m.args().o->data), elements, std::uint16_t{0x7fff});
  m.expect_works();
  const auto* o = static_cast<const std::uint16_t*>(m.args().o->data);
  const auto* lse = static_cast<const float*>(m.args().lse->data);
  constexpr int row = GoodArguments::heads_q * GoodArguments::head_dim_v;
  EXPECT_EQ(o[9 * row], 0) << "the last row, which is not used";
  EXPECT_EQ(lse[9], -std::numeric_limits<float>::infinity());
  EXPECT_GT(lse[7], 0) << "the last that is";
  lengths[1] = seqlen_q + 1;
  m.expect_refusal({"seqlens_q[1] is 6", "the packed sequence's length, 5"});
  lengths[1] = 0;
  m.table(&AttentionArgs::seqlens_k, {2}, {0, -1});
  m.expect_refusal({"seqlens_k[1] is -1"});
}

TEST(MaskArguments, StridesOfTablesWithoutElements) {
  MaskArguments m({BlockSparseMask{.block_m = 16, .block_n = 16}});
  m.table(&AttentionArgs::block_offsets, {1, 1, 2}, {0, 0});
  m.table(&AttentionArgs::block_indices, {0}, {0});
  m.table(&AttentionArgs::block_bitmask_of, {0}, {0});
  m.table(&AttentionArgs::block_bitmasks, {0, 16, 1}, {0});
  m.args().block_bitmasks->strides = {7, 3, 5};
  m.expect_works();
}

TEST(MaskArguments, WithoutTheirMask) {
  const std::pair<std::optional<Tensor> AttentionArgs::*, const char*> tables[] = {
      {&AttentionArgs::seqlens_q, "padding"},
      {&AttentionArgs::seqlens_k, "padding"},
      {&AttentionArgs::block_offsets, "block_sparse"},
      {&AttentionArgs::block_indices, "block_sparse"},
      {&AttentionArgs::block_bitmask_of, "block_sparse"},
      {&AttentionArgs::block_bitmasks, "block_sparse"},
      {&AttentionArgs::tree_bits, "tree"},
      {&AttentionArgs::prefix_lengths, "tree"}};
  for (const auto& [argument, kind] : tables) {
    MaskArguments m({CausalMask{}});
    m.table(argument, {1}, {0});
    m.expect_refusal({"was given", kind});
    m.args().*argument = std::nullopt;
    m.args().window_left = 3;
    m.expect_refusal({"window_left was given", "sliding_window"});
    m.args().window_left.reset();
    m.expect_works();
  }
}

}  // namespace
}  // namespace flashjit
