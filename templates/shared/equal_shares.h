// Equal, contiguous shares of units for the blocks of a grid ("stream-K", Osama et al. 2023).
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Shares of `total` units, at most 2^31 - 1: they differ by a unit. The first `used` blocks have one.
struct EqualShares {
  u32 total, used;
  u32 size, larger;  // the first `larger` shares have size + 1 units

  // A block has at least `least` units, if there are so many.
  FLASHJIT_FN EqualShares(u32 units, u32 blocks, u32 least)
      : total(units),
        used(min(max(units / least, 1u), blocks)),
        size(units / used),
        larger(units - size * used) {}
  // For block <= used.
  FLASHJIT_FN u32 begin(u32 block) const { return block * size + min(block, larger); }
  FLASHJIT_FN u32 block_of(u32 unit) const {
    const u32 in_larger = larger * (size + 1);
    return unit < in_larger ? unit / (size + 1) : larger + (unit - in_larger) / size;
  }
};

// A unit's place: its batch entry, and the units of that entry before it.
struct UnitPlace {
  int batch, skipped;
};

}  // namespace flashjit::device
