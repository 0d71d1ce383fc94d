// Units of batch entries whose lengths only the device knows, added up and searched by the lanes of a warp.
// units_of(batch) has those of an entry, and 0 beyond the last one.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/equal_shares.h"

namespace flashjit::device {

template <class UnitsOf>
FLASHJIT_FN u32 sum_of_units(int batch, int lane, const UnitsOf& units_of) {
  u32 sum = units_of(lane);
  for (int entry = lane + 32; entry < batch; entry += 32) sum += units_of(entry);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  return sum;
}

// The place of a unit, which must exist.
template <class UnitsOf>
FLASHJIT_FN UnitPlace find_unit(u32 unit, int lane, const UnitsOf& units_of) {
  u32 before = 0;  // units of all entries before `first`
  for (int first = 0;; first += 32) {
    const u32 own = units_of(first + lane);
    u32 sum = own;  // of this and all lower lanes
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const u32 lower = __shfl_sync(0xffffffff, sum, (lane - lanes) & 31);
      if (lane >= lanes) sum += lower;
    }
    const u32 after = __ballot_sync(0xffffffff, before + sum > unit);
    if (after) {
      const int found = __ffs(static_cast<int>(after)) - 1;
      return {first + found, static_cast<int>(unit - before - __shfl_sync(0xffffffff, sum - own, found))};
    }
    before += __shfl_sync(0xffffffff, sum, 31);
  }
}

}  // namespace flashjit::device
