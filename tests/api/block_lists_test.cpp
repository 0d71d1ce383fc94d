// make_block_lists through the C++ and the C interface: an example by hand, and bad arguments, each of which
// is refused with its name.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"
#include "runtime/masks.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit::block_lists_testing {
namespace {

constexpr int batch = 2, rows = 40, keys = 70, heads = 2;

Engine& listing_engine() {
  static Engine instance{EngineOptions{}};
  return instance;
}

// Blocks of 16 x 32: 3 query blocks and 3 key blocks.
struct GoodLists {
  std::vector<std::uint16_t> q, k;
  std::vector<std::int32_t> offsets = std::vector<std::int32_t>(batch * 4, 99),
                            indices = std::vector<std::int32_t>(batch * 9, 99), bitmask_of = indices;
  std::vector<std::int32_t> document;
  alignas(64) std::int32_t workspace[64];
  std::vector<NamedArgument> named;
  AttentionArgs args;

  GoodLists() : q(batch * rows * heads * 16), k(batch * keys * heads * 16) {
    for (int i = 0; i < batch * keys; ++i) document.push_back(i % keys / 32);
    const auto ints = [](std::vector<std::int32_t>& data, std::initializer_list<std::int64_t> sizes) {
      return Tensor::contiguous(data.data(), DType::int32, {}, sizes);
    };
    args.q = Tensor::contiguous(q.data(), DType::bf16, {}, {batch, rows, heads, 16});
    args.k = Tensor::contiguous(k.data(), DType::bf16, {}, {batch, keys, heads, 16});
    args.block_offsets = ints(offsets, {batch, 1, 4});
    args.block_indices = ints(indices, {batch * 9});
    args.block_bitmask_of = ints(bitmask_of, {batch * 9});
    args.workspace = Tensor::contiguous(workspace, DType::int32, {}, {64});
    named.emplace_back("document", ints(document, {batch, keys}));
    args.named = named;
  }
};

constexpr char documents[] = R"("causal", "document[key] == document[position]"],
    "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})";

const Kernel& kernel_of(const std::string& masks, const std::string& blocks = "") {
  const auto spec = AttentionSpec::from_json(
      R"({"op": "make_block_lists", "dtype": "bf16", "head_dim": 16,
          "mask": [{"kind": "block_sparse", "block_m": 16, "block_n": 32, "of_masks": true)" +
      blocks + "}, " + masks + "}");
  return listing_engine().get(
      spec,
      {.batch = batch, .seqlen_q = rows, .seqlen_k = keys, .num_heads_q = heads, .num_heads_kv = heads});
}

// Rows are positions 30 to 69, documents end at keys 32 and 64. Query block 0 (positions 30 to 45) sees parts
// of key blocks 0 and 1, block 1 (46 to 61) a part of block 1, block 2 (62 to 69) parts of blocks 1 and 2.
void expect_lists(const GoodLists& given) {
  const std::vector<std::int32_t> blocks = {0, 1, 1, 1, 2};
  for (int b = 0; b < batch; ++b) {
    const int first = b * 9;
    for (const auto& [list, begin] : {std::pair{0, 0}, {1, 2}, {2, 3}, {3, 5}})
      EXPECT_EQ(given.offsets[static_cast<std::size_t>(b * 4 + list)], first + begin);
    for (std::size_t e = 0; e < blocks.size(); ++e) {
      EXPECT_EQ(given.indices[static_cast<std::size_t>(first) + e], blocks[e]);
      EXPECT_EQ(given.bitmask_of[static_cast<std::size_t>(first) + e], -2);
    }
    EXPECT_EQ(given.indices[static_cast<std::size_t>(first) + 5], 99) << "not written";
  }
}

TEST(MakeBlockLists, ByHand) {
  GoodLists given;
  kernel_of(documents).launch(given.args);
  expect_lists(given);
}

// Each of the two batch entries has one of three bitmasks, for its first block that is kept in part. The
// third is not written.
TEST(MakeBlockLists, Bitmasks) {
  GoodLists given;
  std::vector<std::int32_t> bitmasks(3 * 16, 99);
  given.args.block_bitmasks = Tensor::contiguous(bitmasks.data(), DType::int32, {}, {3, 16, 1});
  kernel_of(documents).launch(given.args);
  for (int b = 0; b < batch; ++b) {
    const auto first = static_cast<std::size_t>(b * 9);
    EXPECT_EQ(given.bitmask_of[first], b);
    for (std::size_t e = 1; e < 5; ++e) EXPECT_EQ(given.bitmask_of[first + e], -2);
    // Positions 30 and 31 see keys 0 to their own, the next rows are of another document.
    for (std::size_t row = 0; row < 16; ++row)
      EXPECT_EQ(bitmasks[static_cast<std::size_t>(b) * 16 + row], row == 0 ? 0x7fffffff : row == 1 ? -1 : 0);
  }
  EXPECT_EQ(bitmasks[2 * 16], 99) << "not written";
}

TEST(MakeBlockLists, WholeBlocks) {
  GoodLists given;
  given.args.named = {};
  kernel_of(R"("key < 64"])").launch(given.args);
  EXPECT_EQ(given.offsets[3], 6);
  for (std::size_t e = 0; e < 6; ++e) {
    EXPECT_EQ(given.indices[e], static_cast<std::int32_t>(e % 2));
    EXPECT_EQ(given.bitmask_of[e], -1);
  }
}

TEST(MakeBlockLists, SizesByQuery) {
  const BlockSparseMask mask{.block_m = 16, .block_n = 32};
  EXPECT_EQ(most_listed_blocks(mask, {.batch = batch, .seqlen_q = rows, .seqlen_k = keys}), batch * 9);
  expect_error(ErrorCode::invalid_argument, {"more than 2147483647"}, [&] {
    most_listed_blocks(mask, {.batch = 1, .seqlen_q = longest_sequence, .seqlen_k = 4096});
  });
  const flashjit_block_lists lists = {16, 32, 0, batch, 1, rows, keys};
  std::int64_t most = 0;
  EXPECT_EQ(flashjit_most_listed_blocks(&lists, &most), FLASHJIT_OK);
  EXPECT_EQ(most, batch * 9);
  EXPECT_EQ(flashjit_most_listed_blocks(&lists, nullptr), FLASHJIT_INVALID_ARGUMENT);
}

TEST(MakeBlockLists, Refusals) {
  const auto expect_refusal = [](std::initializer_list<const char*> texts,
                                 const std::function<void(GoodLists&)>& spoil) {
    GoodLists given;
    spoil(given);
    expect_error(ErrorCode::invalid_argument, texts, [&] { kernel_of(documents).launch(given.args); });
    for (const std::int32_t value : given.indices) ASSERT_EQ(value, 99);
  };
  expect_refusal({"block_offsets is missing"}, [](GoodLists& g) { g.args.block_offsets.reset(); });
  expect_refusal({"block_indices is missing"}, [](GoodLists& g) { g.args.block_indices.reset(); });
  expect_refusal({"block_bitmask_of is missing", "keep whole"},
                 [](GoodLists& g) { g.args.block_bitmask_of.reset(); });
  expect_refusal({"block_indices has 17 elements", "at least 18", "most_listed_blocks"},
                 [](GoodLists& g) { g.args.block_indices->shape[0] = 17; });
  expect_refusal({"block_bitmask_of has 17 elements"},
                 [](GoodLists& g) { g.args.block_bitmask_of->shape[0] = 17; });
  // Lists for blocks of other sizes.
  expect_refusal({"block_offsets", "dimension 2", "must be 4", "block_m"}, [](GoodLists& g) {
    g.args.block_offsets = Tensor::contiguous(g.offsets.data(), DType::int32, {}, {batch, 1, 3});
  });
  expect_refusal({"block_offsets", "dimension 0 must be 2", "differ between batch entries"},
                 [](GoodLists& g) {
                   g.args.block_offsets = Tensor::contiguous(g.offsets.data(), DType::int32, {}, {1, 1, 4});
                 });
  expect_refusal({"block_offsets", "per_head"}, [](GoodLists& g) {
    g.args.block_offsets = Tensor::contiguous(g.offsets.data(), DType::int32, {}, {batch, 2, 4});
  });
  expect_refusal({"block_indices", "block_bitmask_of"},
                 [](GoodLists& g) { g.args.block_bitmask_of->data = g.args.block_indices->data; });
  expect_refusal({"k has shape", "q's batch"}, [](GoodLists& g) { g.args.k->shape[0] = 1; });
  expect_refusal({"workspace is missing"}, [](GoodLists& g) { g.args.workspace.reset(); });
  expect_refusal({"workspace has 64 bytes"}, [](GoodLists& g) { g.args.workspace->shape[0] = 16; });
  expect_refusal({"table document is missing"}, [](GoodLists& g) { g.args.named = {}; });
  expect_refusal({"v was given", "make_block_lists"}, [](GoodLists& g) { g.args.v = g.args.k; });
  expect_refusal({"block_bitmasks", "dimension 1 must be 16", "block_m"}, [](GoodLists& g) {
    g.args.block_bitmasks = Tensor::contiguous(g.document.data(), DType::int32, {}, {2, 8, 1});
  });
  expect_refusal({"block_bitmasks", "dimension 2 must be 1", "32 keys"}, [](GoodLists& g) {
    g.args.block_bitmasks = Tensor::contiguous(g.document.data(), DType::int32, {}, {1, 16, 2});
  });
  expect_refusal({"block_bitmasks", "block_indices"}, [](GoodLists& g) {
    g.args.block_bitmasks = Tensor::contiguous(g.indices.data(), DType::int32, {}, {1, 16, 1});
  });
  expect_refusal({"block_offsets is on cuda:0"},
                 [](GoodLists& g) { g.args.block_offsets->device = {Device::Kind::cuda, 0}; });
}

// One list for all batch entries, where the masks are alike in all of them.
TEST(MakeBlockLists, SharedByBatchEntries) {
  GoodLists given;
  given.args.named = {};
  given.args.block_offsets->shape[0] = 1;
  kernel_of(R"("key < 64"])").launch(given.args);
  EXPECT_EQ(given.offsets[3], 6);
  EXPECT_EQ(given.offsets[4], 99);
}

TEST(MakeBlockLists, BitmasksSharedByBatchEntries) {
  GoodLists given;
  given.args.named = {};
  given.args.block_offsets->shape[0] = 1;
  std::vector<std::int32_t> bitmasks(2 * 16, 99);
  given.args.block_bitmasks = Tensor::contiguous(bitmasks.data(), DType::int32, {}, {2, 16, 1});
  const Kernel& kernel = kernel_of(R"("key < 40"])");
  kernel.launch(given.args);
  // Each query block sees key block 0 whole and 8 keys of block 1.
  for (std::size_t list = 0; list < 3; ++list) {
    EXPECT_EQ(given.bitmask_of[2 * list], -1);
    EXPECT_EQ(given.bitmask_of[2 * list + 1], list < 2 ? static_cast<std::int32_t>(list) : -2);
  }
  for (const std::int32_t word : bitmasks) EXPECT_EQ(word, 0xff);
  // No bitmasks at all.
  given.args.block_bitmasks = Tensor::contiguous(nullptr, DType::int32, {}, {0, 16, 1});
  kernel.launch(given.args);
  EXPECT_EQ(given.bitmask_of[1], -2);
}

}  // namespace
}  // namespace flashjit::block_lists_testing
