// Where a block of the GPU decode begins: the units of all batch entries, by the lanes of a warp.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/decode_schedule.h"

namespace flashjit::device {

// The units of all batch entries, added up and searched by the lanes of a warp.
template <class Spec, class Entry>
class DecodeUnits {
  static constexpr u32 all_lanes = 0xffffffff;

 public:
  FLASHJIT_FN DecodeUnits(const CudaDecodeParams& p, int lane)
      // A mask whose rows keep intervals has no table of each entry.
      : p_(p),
        lane_(lane),
        alike_(!Spec::varlen && !Spec::Offsets::exist && Spec::Mask::row_intervals &&
               p.seqlens_k == nullptr) {
    if (alike_) {
      own_ = Entry(p, 0).all_units();
      total_ = own_ * p.batch;
      return;
    }
    total_ = own_ = of(lane);
    for (int batch = lane + 32; batch < p.batch; batch += 32) total_ += of(batch);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) total_ += __shfl_xor_sync(all_lanes, total_, lanes);
  }

  FLASHJIT_FN u32 total() const { return total_; }

  FLASHJIT_FN DecodePlace find(u32 unit) const {
    if (alike_) {
      const u32 batch = unit / own_;
      return {static_cast<int>(batch), static_cast<int>(unit - batch * own_)};
    }
    u32 before = 0;  // units of all entries before `first`
    for (int first = 0;; first += 32) {
      const u32 own = first == 0 ? own_ : of(first + lane_);
      u32 sum = own;  // of this and all lower lanes
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const u32 lower = __shfl_sync(all_lanes, sum, (lane_ - lanes) & 31);
        if (lane_ >= lanes) sum += lower;
      }
      const u32 after = __ballot_sync(all_lanes, before + sum > unit);
      if (after) {
        const int found = __ffs(static_cast<int>(after)) - 1;
        return {first + found, static_cast<int>(unit - before - __shfl_sync(all_lanes, sum - own, found))};
      }
      before += __shfl_sync(all_lanes, sum, 31);
    }
  }

 private:
  FLASHJIT_FN u32 of(int batch) const { return batch < p_.batch ? Entry(p_, batch).all_units() : 0; }

  const CudaDecodeParams& p_;
  const int lane_;
  const bool alike_;  // all entries have equally many units
  u32 own_;           // of entry `lane`, or of each entry
  u32 total_;
};

}  // namespace flashjit::device
