// Parts of a tile's keys in sm_90a's forward, for launches with fewer tiles than multiprocessors. Each part
// is a tile of its own in the schedule. A warp writes what it has of its 16 rows to the workspace,
// unnormalised, and counts itself. The last one of a tile's warps with these rows adds up all parts in the
// order of keys, so that its result has the same bits whichever it is, and goes on as if it had seen all
// keys.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/ptx_sync.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/mask.h"

namespace flashjit::device {

// A part of a tile's keys: equally many blocks of keys between the first and the last that the rows may see.
// A tile with few keys has fewer parts than others.
struct KeyPart {
  int index = 0, count = 1;

  template <class Mask>
  FLASHJIT_FN KeyPart(const Sm90aForwardParams& p, const Mask& mask, Span rows, int block_n, int number) {
    if (p.parts == 1) return;
    index = number;
    const int all = blocks(mask.hull(Keys{}, rows), block_n).size();
    count = max(ceil_div(all, max(p.part_blocks, ceil_div(all, p.parts))), 1);
  }
  FLASHJIT_FN KeyPart(int number, int parts) : index(number), count(parts) {}

  FLASHJIT_FN bool exists() const { return index < count; }
  // The part's keys for a BlockWalk.
  template <class Mask>
  FLASHJIT_FN Span keys(const Mask& mask, Span rows, int block_n) const {
    if (count == 1) return {0, 0x7fffffff};
    const Span all = blocks(mask.hull(Keys{}, rows), block_n);
    const int of_part = ceil_div(all.size(), count), begin = min(all.begin + index * of_part, all.end);
    return {begin * block_n, min(begin + of_part, all.end) * block_n};
  }

 private:
  FLASHJIT_FN static Span blocks(Span keys, int block_n) {
    if (keys.empty()) return {0, 0};
    return {max(keys.begin, 0) / block_n, ceil_div(keys.end, block_n)};
  }
};

// A warp's 16 rows of a tile in all parts. `output` has a lane's sums of both of its rows, as accumulators
// do.
template <int columns, int warps>
class Sm90aPartsOfRows {
 public:
  const int count;

  // tile: its number among all tiles; warp: its number among those of a tile.
  FLASHJIT_FN Sm90aPartsOfRows(const Sm90aForwardParams& p, int parts, u32 tile, u32 warp, int lane)
      : count(parts), p_(p), tile_(tile), warp_(warp), lane_(lane) {}

  FLASHJIT_FN void store(int part, const float (&output)[columns / 2]) const {
    float* const to = output_of(part);
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      const u32 words[] = {__float_as_uint(output[4 * i]), __float_as_uint(output[4 * i + 1]),
                           __float_as_uint(output[4 * i + 2]), __float_as_uint(output[4 * i + 3])};
      st_global_v4(to + i * 128, words);
    }
  }
  // After store(), if the part has keys. Returns whether all parts of the rows are written: true for one of
  // them alone.
  template <class Softmax>
  FLASHJIT_FN bool store_states(int part, const Softmax& softmax) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = softmax.reference(r) > Softmax::lowest ? softmax.reference(r) : minus_infinity;
      const u32 words[] = {__float_as_uint(maximum), __float_as_uint(softmax.relative_sum(r))};
      if (lane_ % 4 == 0) st_global_v2(state_of(part, r), words);
    }
    __syncwarp();
    u32 before = 0;
    if (lane_ == 0) {
      griddepcontrol_wait();  // for the step that clears the counters
      before = atom_add_acq_rel(p_.parts_done + tile_ * warps + warp_, 1);
    }
    return __shfl_sync(0xffffffff, before, 0) + 1 == static_cast<u32>(count);
  }
  // Adds up all parts.
  template <class Softmax>
  FLASHJIT_FN void merge(float (&output)[columns / 2], Softmax& softmax) const {
    float maximum[2] = {minus_infinity, minus_infinity}, sum[2] = {};
#pragma unroll 1
    for (int part = 0; part < count; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r) maximum[r] = fmaxf(maximum[r], state(part, r).maximum);
#pragma unroll
    for (float& x : output) x = 0;
#pragma unroll 1
    for (int part = 0; part < count; ++part) {
      float weight[2];
      bool any[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const State of = state(part, r);
        any[r] = of.maximum != minus_infinity;  // else its output may be anything
        weight[r] = any[r] ? ex2_approx(of.maximum - maximum[r]) : 1.f;
        sum[r] = __fmaf_rn(weight[r], of.sum, sum[r]);  // of a row without keys 0, or NaN
      }
      if (!__any_sync(0xffffffff, any[0] || any[1])) continue;
      const float* const from = output_of(part);
#pragma unroll
      for (int i = 0; i < columns / 8; ++i) {
        u32 words[4];
        ld_global_cg_v4(words, from + i * 128);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (any[e / 2])
            output[4 * i + e] = __fmaf_rn(weight[e / 2], __uint_as_float(words[e]), output[4 * i + e]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      softmax.set(r, fmaxf(maximum[r], Softmax::lowest), lane_ % 4 == 0 ? sum[r] : 0.f);
  }

 private:
  struct State {
    float maximum, sum;
  };
  FLASHJIT_FN u32 place(int part) const {
    return (tile_ * static_cast<u32>(p_.parts) + static_cast<u32>(part)) * warps + warp_;
  }
  FLASHJIT_FN float* output_of(int part) const {
    return p_.parts_o + static_cast<i64>(place(part)) * (16 * columns) + lane_ * 4;
  }
  FLASHJIT_FN float* state_of(int part, int r) const {
    return p_.parts_state + (static_cast<i64>(place(part)) * 16 + lane_ / 4 + 8 * r) * 2;
  }
  FLASHJIT_FN State state(int part, int r) const {
    u32 words[2];
    ld_global_cg_v2(words, state_of(part, r));
    return {__uint_as_float(words[0]), __uint_as_float(words[1])};
  }

  const Sm90aForwardParams& p_;
  const u32 tile_, warp_;
  const int lane_;
};

// The step before a launch with parts.
FLASHJIT_FN void forward_sm90a_clear(const Sm90aForwardParams& p) {
  griddepcontrol_launch_dependents();
  for (u32 i = tid_x(); i < p.num_counters; i += forward_clear_threads) p.parts_done[i] = 0;
}

}  // namespace flashjit::device
