// Where a block of the GPU decode begins: the units of all batch entries, by the lanes of a warp.
#pragma once

#include "cuda/entry_units.cuh"
#include "shared/decode_schedule.h"

namespace flashjit::device {

// The units of all batch entries, added up and searched by the lanes of a warp.
template <class Spec, class Entry>
class DecodeUnits {
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
    own_ = of(lane);
    total_ = sum_of_units(p.batch, lane, [&](int batch) { return cached(batch); });
  }

  FLASHJIT_FN u32 total() const { return total_; }

  // Of all entries before this one.
  FLASHJIT_FN u32 before(int batch) const {
    if (alike_) return static_cast<u32>(batch) * own_;
    return sum_of_units(batch, lane_, [&](int entry) { return entry < batch ? cached(entry) : 0; });
  }

  FLASHJIT_FN UnitPlace find(u32 unit) const {
    if (alike_) {
      const u32 batch = unit / own_;
      return {static_cast<int>(batch), static_cast<int>(unit - batch * own_)};
    }
    return find_unit(unit, lane_, [&](int batch) { return cached(batch); });
  }

 private:
  FLASHJIT_FN u32 cached(int batch) const { return batch == lane_ ? own_ : of(batch); }
  FLASHJIT_FN u32 of(int batch) const { return batch < p_.batch ? Entry(p_, batch).all_units() : 0; }

  const CudaDecodeParams& p_;
  const int lane_;
  const bool alike_;  // all entries have equally many units
  u32 own_;           // of entry `lane`, or of each entry
  u32 total_;
};

}  // namespace flashjit::device
