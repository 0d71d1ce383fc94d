// K and V in two pairs of tensors, for the producer of sm_90a's forward.
#pragma once

#include "cuda/ptx_sm90a.cuh"
#include "cuda/ptx_sync.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/gathered.h"
#include "shared/gathered_maps.h"

namespace flashjit::device {

// Finds the pair that has a block. Copy engines may still be writing gathered keys while the kernel runs: it
// waits for each piece of them. As a tile's blocks come from the last to the first, pieces that come late
// belong at the front.
template <int block_n>
class Sm90aGathered {
 public:
  struct Found {
    bool gathered;
    int row;  // of the block's first key in its pair; negative in the block that has the padding
  };

  FLASHJIT_FN explicit Sm90aGathered(const Sm90aForwardParams& p) : keys_(gathered_keys(p)) {}
  template <class Mask>
  FLASHJIT_FN void begin(const Problem&, const Mask&, Span) const {}
  FLASHJIT_FN int warps() const { return 1; }

  FLASHJIT_FN static bool has_early_tiles(const Sm90aForwardParams& p) {
    return rows_without(gathered_keys(p)) > 0;
  }
  FLASHJIT_FN Found find(int block) {
    const int row = block * block_n - keys_.pad;
    if (row >= keys_.keys) return {false, row - keys_.keys};
    if (keys_.arrived) wait_for({max(row, 0), row + block_n});
    return {true, row};
  }
  FLASHJIT_FN static const TensorMap& map(const TensorMap& own, const TensorMap& gathered, Found found) {
    return found.gathered ? gathered : own;
  }

 private:
  FLASHJIT_FN void wait_for(Span rows) {
    if (there_.contains(rows)) return;
    const int first = rows.begin / keys_.piece_keys, last = (rows.end - 1) / keys_.piece_keys;
    for (int piece = last; piece >= first; --piece) ld_acquire_sys_wait(keys_.arrived + piece, 1);
    fence_proxy_async_global();
    const Span found{first * keys_.piece_keys, (last + 1) * keys_.piece_keys};
    const bool touches = found.begin <= there_.end && there_.begin <= found.end;
    there_ = touches ? Span{min(found.begin, there_.begin), max(found.end, there_.end)} : found;
  }

  const GatheredKeys& keys_;
  Span there_{0, 0};  // rows that have been waited for
};

}  // namespace flashjit::device
