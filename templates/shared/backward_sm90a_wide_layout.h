// Shared memory of sm_90a's backward of heads of more than 256 columns. The host sizes launches by it.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

FLASHJIT_FN constexpr bool backward_is_wide(int head_dim, int head_dim_v) {
  return max(head_dim, head_dim_v) > 256;
}

// The sums of a block of the grid: dK or dV of 64 keys, or dQ of 64 rows.
enum class WideSums { dk, dv, dq };

// Offsets in bytes from a start that is aligned to 1024. Two operands of the sums' own 64 keys or rows stay
// in shared memory: K and V for dK, K for dV, Q and dO for dQ. The rows or keys of the other side come in
// chunks of 128 columns, through two rings: `held` chunks are an operand of the sums, and their memory is
// free after that product (Q for dK, dO for dV, K for dQ). `streamed` chunks are free after the first product
// (dO, Q, V).
struct Sm90aWideLayout {
  static constexpr int own = 64;  // keys or rows of a block of the grid
  static constexpr int warpgroup_keys = own;
  static constexpr int block = 64;         // rows or keys of a step
  static constexpr int product_rows = 32;  // of the other side, in a warpgroup's first product
  static constexpr int panel = 64, chunk_columns = 2 * panel;
  static constexpr int box_rows = 32;  // of every copy by TMA
  static constexpr int own_panel = own * 128, own_chunk = 2 * own_panel;
  static constexpr int streamed_panel = product_rows * 128;  // of one warpgroup's rows
  static constexpr int stages = 2;                           // of messages and of numbers
  static constexpr int weights_bytes = own * 128, exchange_bytes = 8192;
  static constexpr int message_bytes = 16, barrier_bytes = 8;
  static constexpr int threads = 384;

  bool makes_dv;
  int parts;                         // of a step: one, or two halves where both first products differ
  int part_rows;                     // of a part
  int held_panel;                    // bytes
  int held_chunks, streamed_chunks;  // of a part
  int held_bytes, streamed_bytes;    // of a chunk
  int held_slots, streamed_slots;    // of the rings
  int first_bytes, second_bytes;     // the operands that stay
  // weights: P or dS, two buffers for dV. exchange: scores and dP that warpgroups exchange. lse, delta,
  // far_max, words, messages: `stages` each; dQ's kernel has words of keys alone.
  int first, second, weights, exchange, held, streamed, lse, delta, far_max, words, messages, dropout_key,
      barriers, end;

  FLASHJIT_FN constexpr Sm90aWideLayout(WideSums sums, int head_dim, int head_dim_v, bool dropout,
                                        bool derivatives)
      : makes_dv(sums == WideSums::dv),
        parts(makes_dv ? 1 : 2),
        part_rows(block / parts),
        held_panel(part_rows * 128),
        held_chunks(ceil_div(makes_dv ? head_dim_v : head_dim, chunk_columns)),
        streamed_chunks(ceil_div(makes_dv ? head_dim : head_dim_v, chunk_columns)),
        held_bytes(2 * held_panel),
        streamed_bytes(part_rows * 256),
        held_slots(0),
        streamed_slots(0),
        first_bytes(ceil_div(head_dim, panel) * own_panel),
        second_bytes(makes_dv ? 0 : ceil_div(head_dim_v, panel) * own_panel),
        first(0),
        second(first_bytes),
        weights(second + second_bytes),
        exchange(weights + weights_bytes),
        held(exchange + exchange_bytes),
        streamed(0),
        lse(0),
        delta(0),
        far_max(0),
        words(0),
        messages(0),
        dropout_key(0),
        barriers(0),
        end(0) {
    // As many chunks as fit: of the held ones the next come while the product reads the ones before.
    const int numbers = stages * block * 4, of_rows = sums == WideSums::dq ? 0 : numbers;
    const int of_dk = sums == WideSums::dk ? numbers : 0;
    const int rest = of_rows + of_dk + (derivatives ? of_dk : 0) +
                     (dropout ? (sums == WideSums::dq ? 1 : 2) * numbers + 16 : 0) + stages * message_bytes;
    const int most_slots = (most_bytes - held - rest - 2 * 32 * barrier_bytes) / held_bytes;
    held_slots = min(2 * held_chunks, most_slots - streamed_chunks);
    streamed_slots = min(2 * streamed_chunks, most_slots - held_slots);
    streamed = held + held_slots * held_bytes;
    lse = streamed + streamed_slots * streamed_bytes;
    delta = lse + of_rows;
    far_max = delta + of_dk;
    words = far_max + (derivatives ? of_dk : 0);
    messages = words + (dropout ? (sums == WideSums::dq ? 1 : 2) * numbers : 0);
    dropout_key = messages + stages * message_bytes;
    barriers = dropout_key + (dropout ? 16 : 0);
    end = barriers + (1 + 3 * stages + 2 * (held_slots + streamed_slots)) * barrier_bytes;
  }

  // The chunks of the sums that the first warpgroup has, and the second one.
  FLASHJIT_FN constexpr int chunks_of(int warpgroup) const {
    return warpgroup == 0 ? ceil_div(held_chunks, 2) : held_chunks / 2;
  }
  // Bytes from an operand's start to its part in a step of a product.
  FLASHJIT_FN static constexpr int own_step(int step) { return step / 4 * own_panel + step % 4 * 32; }
  FLASHJIT_FN static constexpr int streamed_step(int step) {
    return step / 4 * streamed_panel + step % 4 * 32;
  }
  FLASHJIT_FN static constexpr int row_step(int step) { return step * 16 * 128; }

 private:
  static constexpr int most_bytes = 227 * 1024;  // of a block on sm_90a
};

}  // namespace flashjit::device
