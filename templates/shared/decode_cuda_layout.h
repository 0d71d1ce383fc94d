// Shared memory of the GPU decode: the host sizes launches by it, the kernel lays it out by it.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// 8-bit keys and values; a scale for each of them. v_in_k: values are the first columns of keys. row_bytes:
// of a key that holds its scales.
struct LayoutKeys {
  bool quantised = false, own_scales = false, v_in_k = false;
  int row_bytes = 0;
};

// Offsets in bytes. Four warps of a block copy, two of a block of four; the others compute. `row_warps` warps
// hold the rows of a tile. Where a warp has no registers for all columns of their output, `column_warps`
// warps have the same rows: each computes their scores, and the sums of v_columns columns. With 8-bit keys
// each computes a part of the scores' sums, and they add these in shared memory. All these warps work on the
// same keys; each such group has num_stages blocks of block_n keys. A block of more than 32 has several
// buffers. Its keys are rows of the products (cuda/decode_latents.cuh): each warp of the group, a warpgroup,
// computes the scores of 16 keys, and they share the weights.
struct CudaDecodeLayout {
  static constexpr int message_bytes = 32;  // what a producer tells consumers of a segment
  // With keys as rows, for a group, where it leaves its sums at a tile's end: weights; then scores of 16 rows
  // of each warp, with a stride that spreads them over the banks, and a number of each warp and row.
  static constexpr int weight_bytes = 2048, score_stride = 20, warp_score_bytes = 16 * score_stride * 4,
                       group_score_bytes = 4 * warp_score_bytes + 4 * 16 * 4;

  bool keys_as_rows;
  int buffer_keys;
  int producers, consumers;  // warps
  int m_tiles;               // 16-row tiles of a warp
  int row_warps, column_warps, v_columns, groups;
  int slots;  // buffers of K and V
  // Producers that copy keys. They take turns at the slots. More of them than slots could wait for a slot at
  // once, and the phase of its barrier, one bit, would not tell them apart.
  int copiers;
  int q_bytes, k_bytes;  // of one buffer
  bool shares_k;         // a buffer's values are its keys'
  int v_bytes;           // of one buffer, of values beside keys
  int scale_bytes;       // scales of a buffer's keys, then of its values
  int score_bytes;       // parts of a buffer's scores, if warps share their sums
  // A tile's sums, as its groups leave them to be merged: some columns at a time, float32, with a stride that
  // spreads rows over the banks. And the softmax's state of each row.
  int exchange_columns, exchange_stride;
  int q, exchange, ring, states, barriers, messages;  // two of q and messages: of this segment, the next
  int inverses, end;                                  // of the factors of Q's rows, if K and V are 8-bit
  int q_full, q_empty, ring_full, ring_empty;         // 8 bytes for each buffer

  FLASHJIT_FN constexpr CudaDecodeLayout(int head_dim, int head_dim_v, int block_m, int block_n,
                                         int num_stages, int num_warps, LayoutKeys keys = {})
      : keys_as_rows(block_n > 32),
        buffer_keys(min(block_n, 32)),
        producers(num_warps == 4 ? 2 : 4),
        consumers(num_warps - producers),
        m_tiles(block_m >= 32 && head_dim_v <= 128 && num_warps <= 8 ? 2 : 1),
        row_warps(block_m / (16 * m_tiles)),
        // 8-bit keys take more instructions a byte, so more warps share them.
        column_warps(keys_as_rows                           ? 4
                     : head_dim_v <= 256                    ? 1
                     : head_dim_v <= 512 && !keys.quantised ? 2
                                                            : 4),
        // Whole swizzles of a row of V.
        v_columns(column_warps == 1
                      ? head_dim_v
                      : round_up(ceil_div(head_dim_v, column_warps), keys.quantised ? 128 : 64)),
        groups(consumers / warps_of_group()),
        slots(num_stages * groups * (block_n / buffer_keys)),
        copiers(min(producers, slots)),
        q_bytes(block_m * round_up(head_dim, 16) * 2),
        k_bytes(buffer_keys * (keys.row_bytes   ? keys.row_bytes
                               : keys.quantised ? round_up(head_dim, 32)
                                                : round_up(head_dim, 16) * 2)),
        shares_k(keys_as_rows || (keys.v_in_k && column_warps * v_columns <= round_up(head_dim, 16))),
        v_bytes(shares_k
                    ? 0
                    : block_n * column_warps * (keys.quantised ? round_up(v_columns, 16) : v_columns * 2)),
        scale_bytes(keys.own_scales ? block_n * 8 : 0),
        score_bytes(keys.quantised && column_warps > 1 && !keys_as_rows ? column_warps * block_m * block_n * 4
                                                                        : 0),
        exchange_columns(columns_at_once(groups * block_m, head_dim_v,
                                         keys_as_rows     ? 64
                                         : keys.quantised ? 16
                                                          : 8,
                                         column_warps == 1 ? 72 << 10 : 24 << 10)),
        exchange_stride(row_stride(exchange_columns)),
        q(0),
        // Weights, as Q, are read in swizzles that begin at multiples of 1,024 bytes.
        exchange(keys_as_rows ? 2 * q_bytes : 2 * q_bytes + slots * slot_bytes()),
        ring(keys_as_rows ? exchange + exchange_bytes(block_m) : 2 * q_bytes),
        states(keys_as_rows ? ring + slots * slot_bytes() : exchange + exchange_bytes(block_m)),
        barriers(states + groups * block_m * 8),
        messages(barriers + (4 + 2 * slots) * 8),
        inverses(messages + 2 * message_bytes),
        end(inverses + (keys.quantised ? block_m * 4 : 0)),
        q_full(barriers),
        q_empty(barriers + 16),
        ring_full(barriers + 32),
        ring_empty(barriers + 32 + slots * 8) {}

  FLASHJIT_FN constexpr int warps_of_group() const { return row_warps * column_warps; }
  FLASHJIT_FN constexpr int slot_bytes() const { return k_bytes + v_bytes + scale_bytes + score_bytes; }

  // Blocks of the kernel that a multiprocessor holds: of at most 12 warps together, which leaves a thread 168
  // registers. A multiprocessor has 1 KB of shared memory more than a block may ask for, and reserves 1 KB
  // for each block.
  FLASHJIT_FN constexpr int resident_blocks(int max_shared_memory) const {
    constexpr int most_warps = 12;
    return max(min((max_shared_memory + 1024) / (end + 1024), most_warps / (producers + consumers)), 1);
  }
  // Registers of a thread for Q, and for the output's sums. Q stays in registers if it leaves enough of them.
  FLASHJIT_FN constexpr int q_registers(int head_dim) const {
    const int all = m_tiles * 4 * ceil_div(head_dim, 16);
    return all + accumulators() <= 96 ? all : m_tiles * 8;
  }
  FLASHJIT_FN constexpr int accumulators() const { return m_tiles * v_columns / 2; }

 private:
  FLASHJIT_FN constexpr int exchange_bytes(int block_m) const {
    return max(groups * block_m * exchange_stride * 4,
               keys_as_rows ? groups * (weight_bytes + group_score_bytes) : 0);
  }
  FLASHJIT_FN static constexpr int row_stride(int columns) { return round_up(columns, 32) + 8; }
  // `tile`: columns that lie together in accumulators.
  FLASHJIT_FN static constexpr int columns_at_once(int rows, int columns, int tile, int most_bytes) {
    int times = 1;
    while (rows * row_stride(round_up(ceil_div(columns, times), tile)) * 4 > most_bytes) ++times;
    return round_up(ceil_div(columns, times), tile);
  }
};

}  // namespace flashjit::device
