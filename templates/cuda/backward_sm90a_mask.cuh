// Masks on the transposed scores of sm_90a's backward.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/mask.h"

namespace flashjit::device {

// Gives `value` to the pairs that a mask without formulas, or with intervals, drops. A thread's registers 4 i
// ... 4 i + 3 hold rows 8 i + 2 (lane % 4) and the next one: first of key lane / 4, then of key lane / 4 + 8.
// Returns the mask's look-up of the warp's pairs.
// drops_rows: rows past the sequence's end are dropped, too. Else their lse does it.
template <int block_m, bool drops_rows>
struct Sm90aBackwardMasked {
  float (&scores)[block_m / 2];
  int seqlen_q, keys_end;
  int first_row, key;  // of the tile, of the warp
  int lane;
  float value;

  template <class Part>
  FLASHJIT_FN int operator()(const Part& mask) const {
    if constexpr (key_intervals<Part>) {
      // A key keeps an interval of rows, too. This thread's rows are 0, 1, 8, 9, 16, ... from `base`.
      // before(limit) counts those before `limit`.
      const int base = first_row + lane % 4 * 2;
      const auto before = [&](int limit) {
        const int n = min(max(limit - base, 0), block_m);
        return n / 8 * 2 + min(n % 8, 2);
      };
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own = key + lane / 4 + 8 * r;
        const Span kept = mask.hull(Queries{}, {own, own + 1});
        const u32 bits = own < keys_end ? low_bits(before(kept.end)) & ~low_bits(before(kept.begin)) : 0;
#pragma unroll
        for (int i = 0; i < block_m / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (!(bits >> (2 * i + c) & 1)) scores[4 * i + 2 * r + c] = value;
      }
      return not_found;
    } else {
      // A lane looks up rows for all lanes of its warp, which has 16 keys.
      const int found = mask.look_up({first_row, first_row + block_m}, {key, key + 16});
      typename Part::Tile tile = mask.template tile<block_m, 16>(found);
      constexpr int rows = min(32, block_m);  // at once
#pragma unroll
      for (int first = 0; first < block_m; first += rows) {
        const int own_row = first_row + first + lane % rows;
        u32 words[1];
        tile.template bits<16>(own_row, key, words);
        if (drops_rows && own_row >= seqlen_q) words[0] = 0;
#pragma unroll
        for (int i = 0; i < rows / 4; ++i) {
          const int row = i / 2 * 8 + i % 2;  // + 2 (lane % 4)
          const u32 bits = __shfl_sync(0xffffffff, words[0], row + lane % 4 * 2) >> lane / 4;
          const int at = 4 * (first / 8 + i / 2) + i % 2;
          if (!(bits & 1)) scores[at] = value;
          if (!(bits >> 8 & 1)) scores[at + 2] = value;
        }
      }
      return found;
    }
  }
};

}  // namespace flashjit::device
