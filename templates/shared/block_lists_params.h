// Parameters of make_block_lists.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

// Which pairs of a block the masks keep.
enum class Keeps : unsigned char { nothing, all, some };
// Blocks of a list, and those among them that are kept in part.
struct ListCounts {
  int blocks, partial;
};

// How many blocks of a GPU's grid write a list and its bitmasks, and the warps of each. Some lists have many
// bitmasks: where a document ends, every block is kept in part.
constexpr int block_lists_writers = 8, block_lists_write_warps = 4;

// A group of lists is of one batch entry and head, and has a list for each query block. Groups are counted
// over batch entries and heads, the latter fastest. The places of a group's blocks in memory begin where
// those of the groups before it would end if they listed all blocks, so that no group waits for another.
struct BlockListsParams : ProblemParams {
  i64 groups;
  int list_heads;  // num_heads_q, or 1: all heads share their lists
  int row_blocks;  // lists of a group
  int key_blocks;  // the most blocks of a list
  int* offsets;    // [row_blocks + 1] of one batch entry and head
  i64 offsets_batch_stride, offsets_head_stride;
  int *indices, *bitmask_of;  // [groups * row_blocks * key_blocks]
  u32* bitmasks;              // [groups, group_bitmasks, block_m, ceil(block_n / 32)]
  int group_bitmasks;  // of the first blocks of a group that are kept in part; the masks test the others
  ListCounts* counts;  // [groups, row_blocks]
  Keeps* found;        // [groups, row_blocks, key_blocks]
};

}  // namespace flashjit::device
