// Both kernels of sm_90a's backward share these parts: messages, copies by TMA, rows past a sequence's end.
#pragma once

#include "cuda/backward_rows.cuh"
#include "cuda/forward_sm90a_shared.cuh"
#include "cuda/ptx_sm90a_bulk.cuh"
#include "shared/backward_cuda_params.h"
#include "shared/backward_sm90a_layout.h"
#include "shared/backward_sm90a_params.h"

namespace flashjit::device {

// The producer's message about a block. Consumers read messages as ordinary memory, as in the forward.
struct BackwardMessage {
  int word;  // see block_word()
  // For the key blocks' kernel: the query head, and the place of the block's rows in the workspace, in units
  // of 64 rows. For dQ's: the walk's look-up.
  int second, place;
  int first_row;
  FLASHJIT_FN bool ends() const { return word < 0; }
  FLASHJIT_FN int index() const { return index_of(word); }
  FLASHJIT_FN bool whole() const { return word & 1; }
  // If the block is not whole: whether one of its rows has a far_max.
  FLASHJIT_FN bool far() const { return word & 2; }

  FLASHJIT_FN static int block_word(int index, bool whole) { return index << 2 | (whole ? 1 : 0); }
  // A block with far rows is not whole, so that other blocks need no test of their own.
  FLASHJIT_FN static int far_word(int word) { return (word & ~1) | 2; }
  FLASHJIT_FN static int index_of(int word) { return word >> 2; }
  // The message that there are no more blocks has the next turn, and the rows of dQ that this turn has. Their
  // head counts over batch entries and heads with places of their own. `first_row` is the first of them.
  FLASHJIT_FN u32 next_turn() const { return static_cast<u32>(second); }
  FLASHJIT_FN int rows() const { return ~word * 16; }
  FLASHJIT_FN u32 head_of_rows() const { return static_cast<u32>(place); }
};
constexpr int place_rows = 64;
FLASHJIT_FN void st_message(u32 to, int word, int second, int place) {
  st_shared_v4(to, static_cast<u32>(word), static_cast<u32>(second), static_cast<u32>(place), 0);
}
constexpr int no_more_blocks = -1;
// A consumer's message about its dQ: it is a place's last, or the place has none.
constexpr int last_dq = 1, no_dq = -2;

// Copies panels of `rows` rows from (row, head, batch) on, in boxes.
template <int panels, int rows>
FLASHJIT_FN void copy_tile(u32 to, const TensorMap& map, u32 full, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < panels; ++panel)
#pragma unroll
    for (int at = 0; at < rows; at += Sm90aBackwardLayout::box_rows)
      cp_async_bulk_tensor_4d(to + (panel * rows + at) * 128, map, full, panel * Sm90aBackwardLayout::panel,
                              row + at, head, batch);
}

// Zeros the rows [first, rows) of a tile's panels, by the threads of a warpgroup. Old data there may be NaN,
// which a weight of 0 does not cancel.
template <int panels, int rows>
FLASHJIT_FN void zero_rows_from(u32 tile, int first) {
#pragma unroll 1
  for (int i = first * 8 + static_cast<int>(threadIdx.x) % 128; i < rows * 8; i += 128)
    for (int panel = 0; panel < panels; ++panel) st_shared_v4(tile + (panel * rows * 8 + i) * 16, 0, 0, 0, 0);
}

// Panels of `rows` rows as a tile of RowOfTile, which takes a row's chunks in any order.
template <int panels, int rows>
struct PanelTile {
  static constexpr u32 chunks = panels * 8;
  FLASHJIT_FN static u32 offset(u32 row, u32 chunk) {
    return (chunk / 8 * rows + row) * 128 + chunk % 8 * 16;
  }
};

// The workspace's row of a problem's first row.
template <class Spec>
FLASHJIT_FN i64 workspace_row(const CudaBackwardParams& p, const Problem& problem) {
  return problem.head_q * p.rows + p.first_row(problem.batch, problem.first_q, Spec::varlen);
}

// Whether dQ has a kernel of its own.
template <class Config>
constexpr bool has_dq_kernel = requires { typename Config::DqProducts; };

// Whether tiles may have rows past their sequence's end that TMA does not zero.
template <class Spec>
constexpr bool ends_within_tensors = Spec::varlen || Spec::Mask::padding;

}  // namespace flashjit::device
