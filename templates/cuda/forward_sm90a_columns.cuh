// Outputs of more than 256 columns in sm_90a's forward: one warpgroup makes the weights and has the first
// columns, a second one has the others (as FlashMLA divides 512 columns, DeepSeek, 2025). Both hold the same
// rows in the same lanes, so weights go from a thread to its counterpart as they lie in registers.
#pragma once

#include "cuda/ptx_sm90a.cuh"

namespace flashjit::device {

// The columns of an output that a warpgroup computes. Where there are two groups, the first one makes
// weights, too. `either`: the warpgroup's number says which, and both write outputs by the same code.
enum class ColumnGroup { first, second, either };

// What comes with a block's weights. A tile's last message has no weights.
struct Handed {
  u32 word;
  FLASHJIT_FN bool rescales() const { return word & 1; }
  FLASHJIT_FN bool ends_within() const { return word & 2; }  // as Consumer::ends_within
  FLASHJIT_FN bool ends_tile() const { return word & 4; }
};

// The buffer between the two, of one block. Each warp and its counterpart have two named barriers.
template <int steps>
class HandedWeights {
  static constexpr int first_barrier = 8;

 public:
  FLASHJIT_FN HandedWeights(u32 buffer, int warp)
      : buffer_(buffer + threadIdx.x % 128 * 16),
        message_(buffer + steps * 2048 + threadIdx.x % 128 / 4 * 16),
        warp_(warp) {}

  // The taker says that the buffer is empty; at the end the giver waits for the last such word.
  FLASHJIT_FN void begin() const { bar_arrive(empty(), 64); }
  FLASHJIT_FN void end() const { bar_sync(empty(), 64); }

  // Gives a block's weights and its rows' corrections; without `tells` when tell() is called.
  template <bool tells, class Softmax>
  FLASHJIT_FN void give(const u32 (&weights)[steps][4], const Softmax& softmax, bool rescales,
                        bool ends_within) const {
    bar_sync(empty(), 64);
#pragma unroll
    for (int i = 0; i < steps; ++i)
      st_shared_v4(buffer_ + i * 2048, weights[i][0], weights[i][1], weights[i][2], weights[i][3]);
    message<tells>(softmax.correction(0), softmax.correction(1), (rescales ? 1 : 0) | (ends_within ? 2 : 0));
  }
  FLASHJIT_FN void tell() const { bar_arrive(full(), 64); }
  // Gives the factors of a tile's outputs.
  FLASHJIT_FN void end_tile(const float (&factor)[2]) const {
    bar_sync(empty(), 64);
    message<true>(factor[0], factor[1], 4);
  }
  FLASHJIT_FN Handed take(u32 (&weights)[steps][4], float (&factor)[2]) const {
    bar_sync(full(), 64);
#pragma unroll
    for (int i = 0; i < steps; ++i) ld_shared_v4(weights[i], buffer_ + i * 2048);
    u32 x[4];
    ld_shared_v4(x, message_);
    bar_arrive(empty(), 64);
    factor[0] = __uint_as_float(x[0]), factor[1] = __uint_as_float(x[1]);
    return {__shfl_sync(0xffffffff, x[2], 0)};  // so that the compiler knows that lanes agree
  }

 private:
  FLASHJIT_FN int full() const { return first_barrier + warp_; }
  FLASHJIT_FN int empty() const { return first_barrier + 4 + warp_; }
  template <bool tells>
  FLASHJIT_FN void message(float a, float b, u32 word) const {
    st_shared_v4(message_, __float_as_uint(a), __float_as_uint(b), word, 0);
    if (tells) tell();
  }

  u32 buffer_, message_;  // of the thread; the latter of its rows
  int warp_;
};

}  // namespace flashjit::device
