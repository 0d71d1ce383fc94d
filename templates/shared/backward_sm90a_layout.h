// Shared memory of sm_90a's backward. The host sizes launches by it.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// The sums that a block of the grid makes for its keys. Where no thread has the registers for both, a block
// makes either, and the weights are computed twice.
enum class BackwardSums { both, dk, dv };
FLASHJIT_FN constexpr bool backward_divides_sums(int head_dim, int head_dim_v) {
  return head_dim + head_dim_v > 256 && (head_dim > 192 || round_up(head_dim_v, 64) > 128);
}

// The key blocks' kernel: offsets in bytes from a start that is aligned to 1024. A block of the grid holds
// block_n keys, and takes block_m query rows at a time. Each consumer warpgroup owns 64 keys.
struct Sm90aBackwardLayout {
  // Columns of a panel. Its rows are 128 bytes, the widest that TMA swizzles.
  static constexpr int panel = 64;
  static constexpr int warpgroup_keys = 64;
  static constexpr int box_rows = 64;  // of every copy by TMA
  static constexpr int barrier_bytes = 8, message_bytes = 16;
  // Blocks of a persistent grid that a multiprocessor holds. Sequences of at most 64 keys mostly have few
  // rows, too, and so one step or two a block: two blocks hide each other's copies and sums.
  FLASHJIT_FN static constexpr int resident_blocks(int block_n) { return block_n == warpgroup_keys ? 2 : 1; }

  int consumers;
  // Rows whose dP a thread holds at once: those of a step, or half of them where dK and dV leave few
  // registers.
  int tile_rows;
  // The same for scores. With all rows of a step in one product, K is read once. Kernels without dQ hold half
  // of them where they have tiles: ptxas finds no registers for all.
  int score_rows;
  // dQ of a step is divided among consumers. With 128 rows each computes 64 of them. With 64 rows each
  // computes one panel of every two, and its part of a last one. So it has one product or two.
  bool divides_rows;
  // With three panels the two are one product where each thread adds its own sums: fewer reads of dS.
  bool joins_dq;
  int dq_pairs;                     // of panels
  int dq_parts;                     // products of a consumer
  int dq_columns, dq_last_columns;  // of a product: all of 64 rows or a panel; of a last panel
  // Whether Q and dO take turns at two buffers, as there is memory for one stage only: the next Q comes where
  // dO was, as soon as dP is computed, and the next dO where Q was.
  bool rotates;
  int stages;  // of everything else that comes with Q and dO
  // Whether the copy engine adds dQ, from shared memory, and not each thread its own, for which there is
  // always room.
  bool stages_dq;
  // Buffers of dS. With three, dQ of a block is computed a step later, so that consumers need not keep pace.
  // That takes registers, which dK of wide heads does not leave.
  int ds_buffers;

  int q_panel, k_panel;                     // bytes of one panel: of Q and dO, of K and V
  int q_bytes, do_bytes, k_bytes, v_bytes;  // bytes of all panels
  int buffer_bytes;                         // of a buffer that holds Q or dO
  int ds_bytes, dq_bytes;                   // dS of a step; a product's sums of one consumer
  // Offsets. k, v: one block; q, d_o, lse, delta, far_max, words: `stages` each; ds: ds_buffers; dq:
  // consumers. dV needs no V. far_max: where scores have derivatives. words: with dropout two words for each
  // row. messages: one for each stage, then one for each consumer.
  int k, v, q, d_o, ds, dq, lse, delta, far_max, words, messages, dropout_key, first_turn, barriers, end;

  FLASHJIT_FN constexpr Sm90aBackwardLayout(int head_dim, int head_dim_v, int block_m, int block_n,
                                            int num_stages, bool dropout, bool separate_dq, bool derivatives,
                                            BackwardSums sums)
      : consumers(block_n / warpgroup_keys),
        tile_rows(sums == BackwardSums::both && head_dim + head_dim_v > 256 ? block_m / 2 : block_m),
        score_rows(separate_dq ? tile_rows : block_m),
        divides_rows(block_m == consumers * 64),
        joins_dq(sums == BackwardSums::dk && !divides_rows && ceil_div(head_dim, panel) == 3),
        dq_pairs(divides_rows ? 0 : ceil_div(head_dim, panel) / 2),
        dq_parts(divides_rows || joins_dq ? 1 : ceil_div(ceil_div(head_dim, panel), 2)),
        dq_columns(divides_rows ? head_dim
                   : joins_dq   ? panel + panel / consumers
                                : panel),
        dq_last_columns(panel / consumers),
        rotates(sums == BackwardSums::dk && num_stages == 1),
        stages(rotates ? 2 : num_stages),
        stages_dq(false),
        ds_buffers(0),
        q_panel(block_m * 128),
        k_panel(block_n * 128),
        q_bytes(ceil_div(head_dim, panel) * q_panel),
        do_bytes(ceil_div(head_dim_v, panel) * q_panel),
        k_bytes(ceil_div(head_dim, panel) * k_panel),
        v_bytes(sums == BackwardSums::dv ? 0 : ceil_div(head_dim_v, panel) * k_panel),
        buffer_bytes(max(q_bytes, do_bytes)),
        ds_bytes(separate_dq || sums == BackwardSums::dv ? 0 : consumers * q_panel),
        dq_bytes(0),
        k(0),
        v(k_bytes),
        q(v + v_bytes),
        d_o(q + (rotates ? buffer_bytes : stages * q_bytes)),
        ds(d_o + (rotates ? buffer_bytes : stages * do_bytes)),
        dq(0),
        lse(0),
        delta(0),
        far_max(0),
        words(0),
        messages(0),
        dropout_key(0),
        first_turn(0),
        barriers(0),
        end(0) {
    const bool makes_dq = !separate_dq && sums != BackwardSums::dv;
    const auto fits = [&](int buffers, bool with_dq) {
      ds_buffers = buffers;
      stages_dq = with_dq && makes_dq && !joins_dq;
      dq_bytes = stages_dq ? 64 * 4 * dq_part_columns(0) : 0;
      place_rest(block_m, sums, dropout, derivatives);
      return end <= most_bytes;
    };
    const bool copies = sums == BackwardSums::both && tile_rows == block_m;
    const bool delays = makes_dq && !rotates && (sums == BackwardSums::both || head_dim <= 192);
    if (delays && fits(3, copies)) return;
    if (!fits(2, true)) fits(2, false);
  }

  // Columns of a part of dQ, 0 if there is no such part. Where they lie in a row: first_column if they are
  // not joined, else by dq_column.
  FLASHJIT_FN constexpr int dq_part_columns(int part) const {
    return part >= dq_parts ? 0 : divides_rows || part < dq_pairs ? dq_columns : dq_last_columns;
  }
  FLASHJIT_FN constexpr int dq_first_column(int part, int consumer) const {
    return divides_rows ? 0 : 2 * part * panel + consumer * (joins_dq ? panel : dq_part_columns(part));
  }
  FLASHJIT_FN constexpr int dq_column(int part, int consumer, int column) const {
    return joins_dq && column >= panel ? 2 * panel + consumer * (dq_columns - panel) + column - panel
                                       : dq_first_column(part, consumer) + column;
  }
  // Bytes between the panels of K that a part of dQ reads.
  FLASHJIT_FN constexpr int dq_leading(int consumer) const {
    return joins_dq ? (2 - consumer) * k_panel + consumer * (dq_columns - panel) * 2 : k_panel;
  }

  // Bytes from an operand's start to its part in a step of a product.
  FLASHJIT_FN constexpr int q_step(int step) const { return step / 4 * q_panel + step % 4 * 32; }
  FLASHJIT_FN constexpr int k_step(int step) const { return step / 4 * k_panel + step % 4 * 32; }
  FLASHJIT_FN static constexpr int row_step(int step) { return step * 16 * 128; }

 private:
  static constexpr int most_bytes = 227 * 1024;  // of a block on sm_90a
  // Places everything behind dS.
  FLASHJIT_FN constexpr void place_rest(int block_m, BackwardSums sums, bool dropout, bool derivatives) {
    const int numbers = stages * block_m * 4, of_dk = sums == BackwardSums::dv ? 0 : numbers;
    dq = ds + ds_buffers * ds_bytes;
    lse = dq + consumers * dq_bytes;
    delta = lse + numbers;
    far_max = delta + of_dk;
    words = far_max + (derivatives ? of_dk : 0);
    messages = words + (dropout ? 2 * numbers : 0);
    dropout_key = messages + (stages + consumers) * message_bytes;
    first_turn = dropout_key + (dropout ? 16 : 0);
    barriers = first_turn + 8;
    end = barriers + (3 + 6 * stages + 2 * consumers + ds_buffers) * barrier_bytes;
  }
};
// Stages of blocks that make dV alone. They hold no V, so two always fit.
constexpr int backward_dv_stages = 2;

// The kernel for dQ alone: a block of the grid holds `rows` rows, and takes `keys` keys at a time. Each
// consumer warpgroup owns 64 rows.
struct Sm90aDqLayout {
  static constexpr int rows = 128, keys = 64, consumers = rows / 64;
  static constexpr int threads = (consumers + 1) * 128;
  int q_panel = rows * 128, k_panel = keys * 128;
  int q_bytes, do_bytes, k_bytes, v_bytes;
  int stages;                                                     // of K and V
  int q, d_o, k, v, words, messages, dropout_key, barriers, end;  // k, v, words, messages: `stages` each

  FLASHJIT_FN constexpr Sm90aDqLayout(int head_dim, int head_dim_v, bool dropout)
      : q_bytes(ceil_div(head_dim, Sm90aBackwardLayout::panel) * q_panel),
        do_bytes(ceil_div(head_dim_v, Sm90aBackwardLayout::panel) * q_panel),
        k_bytes(ceil_div(head_dim, Sm90aBackwardLayout::panel) * k_panel),
        v_bytes(ceil_div(head_dim_v, Sm90aBackwardLayout::panel) * k_panel),
        stages(q_bytes + do_bytes + 2 * (k_bytes + v_bytes) > 208 * 1024 ? 1 : 2),
        q(0),
        d_o(q_bytes),
        k(d_o + do_bytes),
        v(k + stages * k_bytes),
        words(v + stages * v_bytes),
        messages(words + (dropout ? stages * keys * 4 : 0)),
        dropout_key(messages + stages * Sm90aBackwardLayout::message_bytes),
        barriers(dropout_key + (dropout ? 16 : 0)),
        end(barriers + (1 + 4 * stages) * Sm90aBackwardLayout::barrier_bytes) {}

  FLASHJIT_FN constexpr int q_step(int step) const { return step / 4 * q_panel + step % 4 * 32; }
  FLASHJIT_FN constexpr int k_step(int step) const { return step / 4 * k_panel + step % 4 * 32; }
};

}  // namespace flashjit::device
