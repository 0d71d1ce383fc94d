// K and V in pages, for the producer of sm_90a's forward.
#pragma once

#include "cuda/forward_sm90a_shared.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/paged_forward_params.h"
#include "shared/read_keys.h"

namespace flashjit::device {

// A block of keys comes in boxes of p.box_keys keys, which divides page_size and block_n: a box lies within
// a page, since both begin at multiples of it. Each lane of the producer's warp looks up and copies boxes.
// The swizzle goes by addresses in shared memory, so boxes of any size fit together. A box past the last page
// is zeros: that is how keys come that are not to be read.
template <class Spec, class Config>
class Sm90aPages {
  static constexpr int block_n = Config::block_n;

 public:
  struct Found {
    int page, row;
  };

  FLASHJIT_FN explicit Sm90aPages(const Sm90aForwardParams& p)
      : p_(with_pages(p)), lane_(static_cast<int>(threadIdx.x)) {}

  // A new tile.
  template <class Mask>
  FLASHJIT_FN void begin(const Problem& problem, const Mask& mask, Span rows) {
    table_ = p_.pages.table + problem.batch * p_.pages.table_stride;
    head_ = problem.head_kv;
    reads_ = read_keys(mask, rows);
  }

  // Looks up the lane's first box of a block.
  FLASHJIT_FN Found find(int block) const { return find_key(block * block_n + lane_ * p_.box_keys); }

  // Copies panels of a block; `found` is find()'s answer. All lanes of the warp, which stay together.
  FLASHJIT_FN void copy(u32 to, const TensorMap& map, u32 full, int panels, int block, Found found) const {
    __syncwarp();
    const int box = p_.box_keys;
#pragma unroll 1
    for (int key = lane_ * box; key < block_n; key += 32 * box) {
      if (key >= 32 * box) found = find_key(block * block_n + key);
#pragma unroll
      for (int i = 0; i < panels; ++i)
        cp_async_bulk_tensor_4d(to + i * (block_n * 128) + key * 128, map, full, i * Sm90aLayout::panel,
                                found.row, head_, found.page);
    }
  }

 private:
  FLASHJIT_FN Found find_key(int key) const {
    const PageTable& pages = p_.pages;
    if (!reads_({key, key + p_.box_keys})) return {pages.num_pages, 0};
    const int index = pages.page_of(key);
    return {pages.clamped(table_[index]), key - index * pages.page_size};
  }

  const Paged<Sm90aForwardParams>& p_;
  const int* table_ = nullptr;
  ReadKeys reads_{};
  int head_ = 0;
  const int lane_;
};

}  // namespace flashjit::device
