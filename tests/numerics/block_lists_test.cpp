// make_block_lists against the elementwise oracle, and forwards and backwards that take its lists against
// attention of the masks alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tests/support/documents.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/backward_oracle.hpp"
#include "tools/verify/random_formulas.hpp"

namespace flashjit::testing_support {
namespace {

struct ListedMasks {
  const char* name;
  const char* fields;  // of the spec, as JSON; the mask's list begins with the lists of blocks
};

constexpr ListedMasks listed_masks[] = {
    {"documents", R"_("mask": [{"kind": "block_sparse", "block_m": 64, "block_n": 64, "of_masks": true},
        "document[key] == document[position]"],
        "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})_"},
    {"causal within documents",
     R"_("mask": [{"kind": "block_sparse", "block_m": 128, "block_n": 64, "of_masks": true}, "causal",
        "document[key] == document[position]"],
        "tables": {"document": {"dtype": "uint8", "shape": ["batch or 1", "seqlen_k"]}})_"},
    {"built-in masks alone",
     R"_("mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 48, "of_masks": true}, "causal",
        {"kind": "sliding_window", "sinks": true}, "padding"])_"},
    {"a tree",
     R"_("mask": [{"kind": "block_sparse", "block_m": 16, "block_n": 32, "of_masks": true}, "tree"])_"},
    {"a window of each row",
     R"_("mask": [{"kind": "block_sparse", "block_m": 48, "block_n": 80, "of_masks": true},
        "abs(position - key) < reach[position]", "key >= first[row]"],
        "tables": {"reach": {"dtype": "int8", "shape": ["seqlen_k"]},
                   "first": {"dtype": "int32", "shape": ["seqlen_q"]}})_"},
    {"each head its own lists",
     R"_("mask": [{"kind": "block_sparse", "block_m": 64, "block_n": 32, "per_head": true, "of_masks": true},
        "key <= position && (position - key < reach[head] || is_global[key] != 0)"],
        "tables": {"reach": {"dtype": "int32", "shape": ["heads_q"]},
                   "is_global": {"dtype": "uint8", "shape": ["seqlen_k"]}})_"},
    {"pairs and reals",
     R"_("mask": [{"kind": "block_sparse", "block_m": 16, "block_n": 16, "of_masks": true},
        "allowed[position / 16, key / 16] != 0", "weight[key] < limit * weight[position]"],
        "tables": {"allowed": {"dtype": "uint8", "shape": ["m", "n"]},
                   "weight": {"dtype": "fp16", "shape": ["seqlen_k"]}}, "scalars": {"limit": "fp32"})_"},
};

// More of the variants of formulas_test.cpp, with their blocks.
constexpr ListedMasks more_masks[] = {
    {"images see all of themselves",
     R"_("mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 32, "of_masks": true},
        "key <= position || image[key] != 0 && image[key] == image[position]"],
        "tables": {"image": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})_"},
    {"window, global and random blocks",
     R"_("mask": [{"kind": "block_sparse", "block_m": 16, "block_n": 16, "of_masks": true},
        "key < 16 || position < 16 || abs(position - key) < 24 || blocks[position / 16, key / 16] != 0"],
        "tables": {"blocks": {"dtype": "uint8", "shape": ["blocks_m", "blocks_n"]}})_"},
    {"neighbourhood", R"_("mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 16, "of_masks": true},
        {"kind": "neighbourhood", "shape": [25, 16], "window": [5, 7], "dilation": [1, 2]}])_"},
    {"prefix-LM, dilated",
     R"_("mask": [{"kind": "block_sparse", "block_m": 64, "block_n": 16, "of_masks": true},
        "prefix_lm", "(position - key) % 3 == 0 && abs(position - key) <= 96"])_"},
    {"each key/value head its own window",
     R"_("mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 64, "per_head": true, "of_masks": true},
        "key <= position && position - key < reach[head_kv]"],
        "tables": {"reach": {"dtype": "int32", "shape": ["heads_kv"]}})_"},
};

AttentionSpec listed_spec(const std::string& fields, const std::string& op, DType dtype = DType::bf16) {
  return AttentionSpec::from_json(R"({"op": ")" + op + R"(", "dtype": ")" + to_string(dtype) +
                                  R"(", "head_dim": 64, )" + fields + "}");
}

class BlockLists : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }
};

TEST_P(BlockLists, KnownMasks) {
  std::uint64_t seed = 0;
  std::vector<ListedMasks> all(std::begin(listed_masks), std::end(listed_masks));
  all.insert(all.end(), std::begin(more_masks), std::end(more_masks));
  for (const ListedMasks& variant : all) {
    SCOPED_TRACE(variant.name);
    const AttentionSpec spec = listed_spec(variant.fields, "make_block_lists");
    seed += 4;
    if (!takes_next(spec, 1)) continue;
    std::uint64_t of_sizes = seed;
    struct Sizes {
      int rows, keys;
      // 9: one more than a multiple of the groups, which are 8 with per_head and else 2; 1: no group has any.
      std::optional<int> bitmasks;
    };
    for (const Sizes& sizes :
         {Sizes{333, 270, {}}, {70, 400, 9}, {1, 1, 1}, {130, 0, {}}, {130, 200, 1}, {90, 150, 0}})
      expect({.spec = spec,
              .batch = 2,
              .heads_q = 4,
              .heads_kv = 2,
              .seqlen_q = sizes.rows,
              .seqlen_k = sizes.keys,
              .bitmasks = sizes.bitmasks,
              .seed = ++of_sizes});
  }
}

TEST_P(BlockLists, PackedSequences) {
  const char* const fields[] = {
      R"_("varlen": true, "mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 64, "of_masks": true},
          "causal", "document[key] == document[position]"],
          "tables": {"document": {"dtype": "int8", "shape": ["total_k"]}})_",
      R"_("varlen": true, "mask": [{"kind": "block_sparse", "block_m": 64, "block_n": 16, "per_head": true,
          "of_masks": true}, "sliding_window", "key % 5 != row % 3"])_"};
  std::uint64_t seed = 40;
  for (const char* const of_spec : fields) {
    const AttentionSpec spec = listed_spec(of_spec, "make_block_lists");
    ++seed;
    if (!takes_next(spec, 1)) continue;
    expect({.spec = spec,
            .heads_q = 4,
            .heads_kv = 2,
            .lengths_q = {0, 5, 300, 1, 64, 65, 0},
            .lengths_k = {7, 5, 260, 130, 0, 64, 0},
            .spare_rows = 9,
            .seed = seed});
  }
}

TEST_P(BlockLists, RandomMasks) {
  const bool many = test_all() || on().is_cuda();
  const std::uint64_t seed = sample_seed();
  verify::Draw draw(seed + (many ? 0 : std::hash<std::string>{}(on().target()) % 1000));
  for (int i = 0; i < (many ? 24 : 3); ++i) {
    AttentionSpec spec{.op = Operation::make_block_lists, .dtype = DType::bf16, .head_dim = 64};
    spec.varlen = draw.chance(0.3);
    verify::declare_names(spec);
    spec.mask.emplace_back(BlockSparseMask{.block_m = 16 * draw.between(1, 16),
                                           .block_n = 16 * draw.between(1, 16),
                                           .per_head = true,
                                           .of_masks = true});
    if (draw.chance(0.3)) spec.mask.emplace_back(CausalMask{});
    for (int masks = draw.between(1, 2); masks > 0; --masks)
      spec.mask.emplace_back(FormulaMask{verify::random_formula(draw, FormulaUse::mask, spec)});
    verify::drop_unread_names(spec);
    spec = spec.validated();
    Case c{.spec = spec,
           .batch = 2,
           .heads_q = 4,
           .heads_kv = 2,
           .seqlen_q = draw.between(1, 150),
           .seqlen_k = draw.between(1, 300),
           .seed = static_cast<std::uint64_t>(draw.between(1, 1 << 30))};
    if (spec.varlen) c.lengths_q = {c.seqlen_q, 3}, c.lengths_k = {c.seqlen_k, 17};
    expect(c);
  }
}

// A launch with lists that were made on its device computes what the masks alone say.
class ListsForAttention : public BlockLists {
 protected:
  // same_bits: the config has the same tiles with lists and without, so that the bits are the same.
  void expect_attention(const std::string& op, const char* fields, const Case& sizes,
                        const PinnedConfig& config = {}, bool same_bits = false) {
    try {
      check(op, fields, sizes, config, same_bits);
    } catch (const Prebuilt&) {
    } catch (const Error& error) {
      ADD_FAILURE() << error.message() << "\n" << error.detail();
    }
  }

 private:
  void check(const std::string& op, const char* fields, Case c, const PinnedConfig& config, bool same_bits) {
    const DType dtype = on().dtypes().front();
    const AttentionSpec lists_spec = listed_spec(fields, "make_block_lists", dtype);
    Case of_lists = c;
    of_lists.spec = lists_spec;
    std::unique_ptr<Workload> made;
    try {
      made = std::make_unique<Workload>(on(), of_lists);
    } catch (const Prebuilt&) {  // the next one says so, too
    }
    c.spec = listed_spec(fields, op, dtype);
    c.spec.config = config;
    AttentionSpec masks = c.spec;
    std::erase_if(masks.mask, [](const Mask& mask) { return std::holds_alternative<BlockSparseMask>(mask); });
    Workload attention(on(), c), &lists = *made;
    if (masks.op == Operation::backward) {  // of the masks alone, not of the lists that were drawn
      verify::fill_forward(masks, attention.host_args());
      attention.tensor(&AttentionArgs::o).upload();
      attention.tensor(&AttentionArgs::lse).upload();
    }
    const Kernel& make = lists.kernel(on().engine());
    // The masks' arguments are attention's.
    AttentionArgs args = attention.args();
    for (const Argument& argument : arguments)
      if (!has_argument(lists_spec, argument))
        std::visit([&](auto member) { (args.*member).reset(); }, argument.member);
    args.workspace = lists.args().workspace;
    const TensorMember of_lists_members[] = {&AttentionArgs::block_offsets, &AttentionArgs::block_indices,
                                             &AttentionArgs::block_bitmask_of,
                                             &AttentionArgs::block_bitmasks};
    for (const TensorMember member : of_lists_members) args.*member = lists.args().*member;
    lists.reset();
    make.launch(args);

    attention.reset();
    const Kernel& attend = attention.kernel(on().engine());
    AttentionArgs with_lists = attention.args();
    for (const TensorMember member : of_lists_members) with_lists.*member = lists.args().*member;
    attend.launch(with_lists);
    ASSERT_TRUE(attention.fetch());
    const verify::Report report = verify::verify_outputs(masks, attention.host_args());
    EXPECT_TRUE(report.ok()) << report.str() << "\n" << c.str();
    if (!same_bits) return;
    c.spec = masks;
    Workload alone(on(), c);
    alone.reset();
    alone.kernel(on().engine()).launch(alone.args());
    EXPECT_EQ(alone.outputs(), attention.outputs()) << c.str();
  }
};

TEST_P(ListsForAttention, ComputesWhatTheMasksSay) {
  for (const ListedMasks& variant : listed_masks) {
    SCOPED_TRACE(variant.name);
    const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 333, .seqlen_k = 270, .seed = 5};
    if (takes_next(listed_spec(variant.fields, "forward"), 1)) expect_attention("forward", variant.fields, c);
  }
  // Blocks that are skipped, whole and partly kept.
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 1000, .seqlen_k = 1000, .seed = 6};
  c.named = documents_of(150, 2, 1000);
  expect_attention("forward", listed_masks[0].fields, c);
  if (!on().is_cuda())
    expect_attention(
        "forward",
        R"_("mask": [{"kind": "block_sparse", "block_m": 64, "block_n": 64, "of_masks": true}, "causal"])_",
        c, {.block_m = 64, .block_n = 64}, true);
}

TEST_P(ListsForAttention, GradientsAreThoseOfTheMasks) {
  Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 300, .seqlen_k = 300, .seed = 7};
  c.named = documents_of(70, 2, 300);
  for (const ListedMasks* variant : {&listed_masks[0], &listed_masks[2]}) {
    SCOPED_TRACE(variant->name);
    if (takes_next(listed_spec(variant->fields, "backward"), 1))
      expect_attention("backward", variant->fields, c);
  }
}

FLASHJIT_ON_EVERY_DEVICE(BlockLists);
FLASHJIT_ON_EVERY_DEVICE(ListsForAttention);

}  // namespace
}  // namespace flashjit::testing_support
