// Memory budgets, shared by host and device code. The host refuses configs that do not fit and sizes launches
// by them. Device code lays memory out by them.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Warps of the sm_80 forward that share rows. A warp has registers for 256 columns of its rows' output. Wider
// ones are divided between two (cuda/forward_sm80_columns.cuh). So is the output of wide keys, of which
// shared memory holds few: there are more warps then for the same rows.
FLASHJIT_FN constexpr int cuda_forward_column_groups(int head_dim, int head_dim_v) {
  return max(head_dim, head_dim_v) > 256 ? 2 : 1;
}
// Bytes that such warps exchange weights in, 16 bits each, and a number of each row.
FLASHJIT_FN constexpr int cuda_forward_exchange(int head_dim, int head_dim_v, int block_m, int block_n) {
  const int groups = cuda_forward_column_groups(head_dim, head_dim_v);
  return groups == 1 ? 0 : block_m * (2 * block_n + 4 * groups);
}

// Bytes of dynamic shared memory of one block of the sm_80 forward: Q, then num_stages buffers of K and of V,
// then with dropout num_stages buffers of column words. At the end O takes the same place. Behind all is the
// exchange. Rows of Q and K are padded to a multiple of 16 elements.
FLASHJIT_FN constexpr int cuda_forward_shared_memory(int head_dim, int head_dim_v, int block_m, int block_n,
                                                     int num_stages, bool dropout) {
  const int padded = round_up(head_dim, 16);
  const int inputs = block_m * padded + num_stages * block_n * (padded + head_dim_v);
  const int words = dropout ? num_stages * block_n : 0;
  return max(2 * inputs + 4 * words, 2 * block_m * head_dim_v) +
         cuda_forward_exchange(head_dim, head_dim_v, block_m, block_n);
}

// Bytes of a block of 8-bit K and V as it is stored. own_scales: and of their scales, and of those of the
// keys that are in use.
FLASHJIT_FN constexpr int cuda_stored_block(int head_dim, int head_dim_v, int block_n, bool own_scales) {
  return block_n * (round_up(head_dim, 16) + round_up(head_dim_v, 16) + (own_scales ? 3 * 4 : 0));
}
// The same with 8-bit K and V: Q, a block of K and V, and the next one as it is stored.
FLASHJIT_FN constexpr int cuda_quantised_forward_shared_memory(int head_dim, int head_dim_v, int block_m,
                                                               int block_n, bool own_scales) {
  const int inputs = 2 * (block_m + block_n) * round_up(head_dim, 16) + 2 * block_n * head_dim_v;
  return max(inputs + cuda_stored_block(head_dim, head_dim_v, block_n, own_scales),
             2 * block_m * head_dim_v) +
         cuda_forward_exchange(head_dim, head_dim_v, block_m, block_n);
}

// Registers of a thread of the sm_80 forward for scores and output.
FLASHJIT_FN constexpr int cuda_forward_accumulators(int head_dim_v, int block_m, int block_n, int num_warps) {
  return block_m * (block_n + head_dim_v) / (num_warps * 32);
}

// Whether K and V are 8-bit and converted in a kernel; whether scales of each of their rows come with them,
// or lie in the rows (ds_mla.h).
enum class Converts : int { nothing, numbers, scaled_rows, ds_mla };

// The sm_90a forward's layout of shared memory: offsets in bytes from a start that is aligned to 1024.
struct Sm90aLayout {
  // Columns of a panel. Its rows are 128 bytes, the widest that TMA swizzles.
  static constexpr int panel = 64;
  static constexpr int warpgroup_rows = 64;  // query rows of a consumer warpgroup
  static constexpr int announcement_bytes = 16;

  // A warpgroup has registers for 256 columns of its rows' output. Wider outputs are divided between two, by
  // panels: the first one makes the weights and hands them to the second (cuda/forward_sm90a_columns.cuh).
  FLASHJIT_FN static constexpr int column_groups(int head_dim_v) { return head_dim_v > 256 ? 2 : 1; }
  FLASHJIT_FN static constexpr int first_columns(int head_dim_v) {
    return column_groups(head_dim_v) == 1 ? head_dim_v : ceil_div(head_dim_v, panel) / 2 * panel;
  }

  // Whether panels of a stage arrive and are released in two pieces: V's columns of the second group, and all
  // others. Two stages of values in keys do, since they are free late.
  FLASHJIT_FN static constexpr bool in_pieces(int head_dim_v, int num_stages, Converts converts,
                                              bool v_in_k) {
    return v_in_k && num_stages == 2 && column_groups(head_dim_v) > 1 && converts == Converts::nothing;
  }

  // Whether a step of Q K^T reads the second piece.
  FLASHJIT_FN static constexpr bool in_second_piece(int head_dim_v, int step) {
    const int at = step * 16 / panel;
    return at >= first_columns(head_dim_v) / panel && at < ceil_div(head_dim_v, panel);
  }

  // 8-bit K and V as they arrive: bytes of a row, so many that any number of rows begins at a multiple of
  // 128, as the copy engine wants it. Of fp8_ds_mla there is no room for more than a row has, so that only
  // eight rows do.
  FLASHJIT_FN static constexpr int stored_row(int head_dim) { return round_up(head_dim, 128); }
  static constexpr int ds_mla_row = 656;

  int qk_steps, pv_steps;         // wgmmas of Q K^T, each for 16 columns; of weights V, each for 16 keys
  int q_panel, kv_panel;          // bytes of one panel of a tile of Q, of a block of K or V
  int q_bytes, k_bytes, v_bytes;  // bytes of all panels
  int q, k, v;                    // offsets; k, v: num_stages blocks each, the same ones with v_in_k
  // With conversion: slots for K or V as they arrive, the bytes of a row of K, and a slot's size. Two do not
  // hide the time of a copy, but wide heads leave no room for more, unless V is in K.
  int stored_slots, stored_k_row, stored_bytes, stored;
  int barriers;
  int announced, passed;  // passed: 8 bytes a stage
  // With dropout: dropout_key has 16 bytes, dropout_asked 16 bytes a stage, dropout_words the column words of
  // 2 * num_stages blocks.
  int dropout_key, dropout_asked, dropout_words;
  // With conversion: 32 bytes for each slot, its mbarriers and a message. With scales of rows: those of a
  // slot's rows, and of the keys of 2 * num_stages blocks.
  int stored_barriers, stored_scales, k_scales;
  int second_piece;  // bytes of V's columns of the second group; 0: a stage is one piece
  int own_part;      // with wide heads: 16 bytes (cuda/forward_sm90a_lengths.cuh)
  // With two column groups: 16 bytes for each thread and step of weights V, and for its rows, which four
  // threads share with one piece.
  int handed;
  int end;

  FLASHJIT_FN constexpr Sm90aLayout(int head_dim, int head_dim_v, int block_m, int block_n, int num_stages,
                                    bool dropout, Converts converts = Converts::nothing, bool v_in_k = false,
                                    bool alternates = false)
      : qk_steps(ceil_div(head_dim, 16)),
        pv_steps(block_n / 16),
        q_panel(block_m * 128),
        kv_panel(block_n * 128),
        q_bytes(ceil_div(head_dim, panel) * q_panel),
        k_bytes(ceil_div(head_dim, panel) * kv_panel),
        v_bytes(v_in_k ? 0 : ceil_div(head_dim_v, panel) * kv_panel),
        q(0),
        k(q_bytes),
        v(v_in_k ? k : k + num_stages * k_bytes),
        stored_slots(converts == Converts::nothing      ? 0
                     : max(head_dim, head_dim_v) <= 128 ? 4
                     : v_in_k && num_stages == 2        ? 3
                                                        : 2),
        stored_k_row(converts == Converts::ds_mla ? ds_mla_row : stored_row(head_dim)),
        stored_bytes(converts == Converts::nothing ? 0 : block_n * max(stored_k_row, stored_row(head_dim_v))),
        stored(k + num_stages * (k_bytes + v_bytes)),
        barriers(stored + stored_slots * stored_bytes),
        announced(barriers + 16 + num_stages * 32),
        passed(announced + announcement_bytes),
        dropout_key(round_up(passed + num_stages * 8, 16)),
        dropout_asked(dropout_key + 16),
        dropout_words(dropout_asked + num_stages * 16),
        stored_barriers(dropout_key),
        stored_scales(stored_barriers + stored_slots * 32),
        k_scales(stored_scales + stored_slots * block_n * 4),
        second_piece(in_pieces(head_dim_v, num_stages, converts, v_in_k)
                         ? (ceil_div(head_dim_v, panel) - first_columns(head_dim_v) / panel) * kv_panel
                         : 0),
        own_part(0),
        handed(0),
        end(dropout                             ? dropout_words + 2 * num_stages * block_n * 4
            : converts == Converts::nothing     ? passed + num_stages * 8
            : converts == Converts::scaled_rows ? k_scales + 2 * num_stages * block_n * 4
                                                : stored_scales) {
    if (max(head_dim, head_dim_v) <= 256) return;
    own_part = round_up(end, 16);
    handed = own_part + 16;
    if (alternates) handed = round_up(handed, 1024);
    end = handed;
    if (column_groups(head_dim_v) > 1) end += pv_steps * 2048 + (alternates ? 2048 : 512);
  }

  // Bytes from an operand's start to its part in a step.
  FLASHJIT_FN constexpr int q_step(int step) const { return step / 4 * q_panel + step % 4 * 32; }
  FLASHJIT_FN constexpr int k_step(int step) const { return step / 4 * kv_panel + step % 4 * 32; }
  FLASHJIT_FN constexpr int v_step(int step) const { return step * 16 * 128; }
};

// The most query rows of a unit with any vector length.
constexpr int cpu_unit_rows = 48;
// Floats of a row's softmax state.
constexpr int cpu_row_state = 2;

// The most rows of a head, or of all heads that share a tile, that a forward multiplies by K and V in place
// (cpu/few_rows.h), with vectors of so many floats. For more rows it packs K and V, which takes longer only
// where memory is slower than multiply-adds: `bytes` are those of a head's K and V.
constexpr int most_few_rows = 16;
FLASHJIT_FN constexpr int cpu_few_rows(int lanes, i64 bytes) {
  constexpr i64 far = 1 << 20;
  return min(bytes < far ? lanes + lanes / 2 : 2 * lanes, most_few_rows);
}

// Floats from one packed row of K or V to the next. Rows a power of two apart would share cache sets.
FLASHJIT_FN constexpr int cpu_packed_row(int columns) {
  return columns + 16;
}

// Scratch of a CPU worker for the forward, 64-byte aligned: a PackedHead; Q, O and the softmax state of the
// tile's rows; a unit's scores and their rescaling; with dropout two words for each row and one for each key;
// room for rows on their way in or out; then one or more packed blocks.
//
// A worker keeps packed blocks for later tiles of the same head, in this call or in another call of the same
// launch. Before a launch the caller initialises every PackedHead.
struct alignas(64) PackedHead {
  i64 head;    // index among all key/value heads of the batch; -1: none
  int blocks;  // places for packed blocks: 1, or all blocks of the longest sequence
};
// The start of a packed block; its K and V follow.
struct alignas(64) PackedBlock {
  int index;
  u32 packed, nonfinite;  // bit i: the block's i-th group of keys is packed; has NaN or infinity in V
};
inline constexpr int packed_group = 32;
static_assert(sizeof(PackedHead) == 64 && sizeof(PackedBlock) == 64);

// Floats of the room for rows on their way in or out: 16 rows, as many as a vector has lanes at most.
FLASHJIT_FN constexpr int cpu_room(int head_dim, int head_dim_v) {
  return 16 * cpu_packed_row(max(head_dim, head_dim_v));
}
FLASHJIT_FN constexpr int cpu_packed_block(int head_dim, int head_dim_v, int block_n) {
  return 64 + 4 * block_n * (cpu_packed_row(head_dim) + cpu_packed_row(head_dim_v));
}
// Bytes of the scratch without packed blocks. block_m is a multiple of 16.
FLASHJIT_FN constexpr int cpu_forward_scratch(int head_dim, int head_dim_v, int block_m, int block_n,
                                              bool dropout) {
  return 64 + 4 * (block_m * (head_dim + head_dim_v + cpu_row_state) + (block_n + 1) * cpu_unit_rows +
                   (dropout ? 2 * block_m + block_n : 0) + cpu_room(head_dim, head_dim_v));
}

// With AMX: operands are bf16, in tiles of 16 rows of 32; a unit has 32 rows, a group has 32 keys.
constexpr int amx_unit = 32;
// Scratch has room for the scores of at most this many keys with narrow heads (cpu/amx_kept_products.h), and
// of three blocks with wider heads.
constexpr int amx_kept_keys = 64;
FLASHJIT_FN constexpr bool amx_keeps(int head_dim, int head_dim_v) {
  return head_dim <= 64 && head_dim_v <= 64;
}
FLASHJIT_FN constexpr int amx_packed_block(int head_dim, int head_dim_v, int block_n) {
  return 64 + 2 * round_up(block_n, amx_unit) * (round_up(head_dim, 32) + round_up(head_dim_v, 32));
}
FLASHJIT_FN constexpr int amx_forward_scratch(int head_dim, int head_dim_v, int block_m, int block_n,
                                              bool dropout) {
  const int rows = round_up(block_m, amx_unit), keys = round_up(block_n, amx_unit);
  const int depth = round_up(head_dim, 32), columns = round_up(head_dim_v, 32);
  const int scores = amx_keeps(head_dim, head_dim_v) ? min(keys, amx_kept_keys) : 3 * keys;
  return 64 + 2 * rows * depth +
         4 * (rows * (columns + cpu_row_state) + (scores + 1) * amx_unit + (dropout ? 2 * rows + keys : 0) +
              cpu_room(head_dim, head_dim_v));
}

// Floats of the result for one part of a tile's keys: cpu_part_o() of O, then the state of the tile's rows;
// cpu_part() in all.
FLASHJIT_FN constexpr int cpu_part_o(int tile_rows, int head_dim_v) {
  return round_up(tile_rows, amx_unit) * round_up(head_dim_v, 32);
}
FLASHJIT_FN constexpr int cpu_part(int tile_rows, int head_dim_v) {
  return cpu_part_o(tile_rows, head_dim_v) + round_up(tile_rows, amx_unit) * cpu_row_state;
}

}  // namespace flashjit::device
