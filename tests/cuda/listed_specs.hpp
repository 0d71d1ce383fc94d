// Block lists of a spec's own masks, for emulated kernels.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "codegen/spec/spec.hpp"
#include "cuda/formula.cuh"
#include "runtime/masks.hpp"
#include "shared/listed_mask.h"
#include "tests/support/workload.hpp"
#include "tools/verify/mask.hpp"

namespace flashjit::testing_support {

// Causal within documents, as codegen renders it. Base: a Spec without masks.
template <class Base, class Params, int block_m, int block_n>
struct WithLists : Base {
  using table_document = device::Table<0, device::int32, device::Dimension::outer>;

  struct Mask1 : device::Formula {
    static constexpr bool loads = true;
    template <class At>
    static auto of_row(const At& at) {
      return device::row_values(at.read(table_document(), at.batch, at.position));
    }
    template <class At, class Row>
    static auto value(const At& at, const Row& row) {
      return at.read(table_document(), at.batch, at.key) == row.a;
    }
  };
  using Mask = device::Intersect<device::Bounds,
                                 device::Listed<device::BlockSparse<block_m, block_n, false, true>,
                                                device::Intersect<device::Causal<device::Align::bottom_right>,
                                                                  device::FormulaMask<Mask1, Params>>>>;

  static AttentionSpec add_to(AttentionSpec spec) {
    spec.mask = {CausalMask{}, BlockSparseMask{.block_m = block_m, .block_n = block_n, .of_masks = true},
                 FormulaMask{"document[key] == document[position]"}};
    spec.tables = {{"document",
                    DType::int32,
                    {{.kind = TableDimension::Kind::batch}, {.kind = TableDimension::Kind::seqlen_k}}}};
    return spec.validated();
  }
};

inline AttentionSpec without_lists(AttentionSpec spec) {
  std::erase_if(spec.mask, [](const Mask& mask) { return std::holds_alternative<BlockSparseMask>(mask); });
  return spec;
}

// Lists of the spec's other masks, made by the oracle's definitions. Every other block that is not whole has
// a bitmask, the rest are tested by the masks. Sets the arguments to them.
inline MaskTables set_lists_of_masks(const AttentionSpec& spec, AttentionArgs& args) {
  const AttentionSpec masks = without_lists(spec);
  const verify::SeenKeys sees(masks, args);
  BlockListShape shape{.batch = static_cast<int>(args.q->shape[0]),
                       .seqlen_q = static_cast<int>(args.q->shape[1]),
                       .seqlen_k = static_cast<int>(args.k->shape[1])};
  std::vector<std::uint8_t> dense;
  std::vector<char> seen(static_cast<std::size_t>(shape.seqlen_k));
  for (const verify::Sequence& sequence : verify::sequences_of(masks, args))
    for (int row = 0; row < shape.seqlen_q; ++row) {
      sees.row(sequence, 0, row, 0, seen);
      dense.insert(dense.end(), seen.begin(), seen.end());
    }
  BlockSparseMask blocks;
  for (const Mask& mask : spec.mask)
    if (const auto* found = std::get_if<BlockSparseMask>(&mask)) blocks = *found;
  MaskTables tables = block_sparse_from_dense(blocks, shape, dense);
  for (MaskTable& table : tables) {
    if (table.argument == &AttentionArgs::block_bitmask_of)
      for (std::int32_t& bitmask : table.values)
        if (bitmask % 2 == 1) bitmask = -2;
    args.*table.argument = table.view();
  }
  return tables;
}

// Launches with lists of the spec's own masks, against attention of the masks alone.
template <class Launch>
void expect_attention_of_masks(Workload& workload, const Launch& launch) {
  const AttentionSpec& spec = workload.given().spec;
  AttentionArgs args = workload.args();
  const MaskTables lists = set_lists_of_masks(spec, args);
  workload.reset();
  launch(spec, args);
  ASSERT_TRUE(workload.fetch());
  const verify::Report report = verify::verify_outputs(without_lists(spec), workload.host_args());
  EXPECT_TRUE(report.ok()) << report.str();
}

}  // namespace flashjit::testing_support
