// K and V in pages, for the producer of sm_90a's forward.
#pragma once

#include "cuda/forward_sm90a_shared.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/paged_forward_params.h"
#include "shared/read_keys.h"

namespace flashjit::device {

// A block of keys comes in boxes of p.box_keys keys, which divides page_size and block_n: a box lies within
// a page, since both begin at multiples of it. The producer's warps take turns at boxes, and their lanes:
// lanes of a warp copy one after the other. The swizzle goes by addresses in shared memory, so boxes of any
// size fit together. A box past the last page is zeros: that is how keys come that are not to be read.
//
// several_warps: the producer has p.copying_warps warps, else one.
template <class Spec, class Config, bool several_warps>
class Sm90aPages {
  static constexpr int block_n = Config::block_n;

 public:
  struct Found {
    int page, row;
  };

  FLASHJIT_FN explicit Sm90aPages(const Sm90aForwardParams& p) : p_(with_pages(p)) {}

  FLASHJIT_FN int warps() const { return several_warps ? p_.copying_warps : 1; }

  // A new tile.
  template <class Mask>
  FLASHJIT_FN void begin(const Problem& problem, const Mask& mask, Span rows) {
    table_ = p_.pages.table + problem.batch * p_.pages.table_stride;
    head_ = problem.head_kv;
    reads_ = read_keys(mask, rows);
  }

  // Looks up the lane's first box of a block.
  FLASHJIT_FN Found find(int block) const { return find_key(block * block_n + first_key()); }

  // Copies panels of a block; `found` is find()'s answer. All lanes of the warp, which stay together.
  // row_bytes: of a panel.
  FLASHJIT_FN void copy(u32 to, const TensorMap& map, u32 full, Span panels, int block, Found found,
                        int row_bytes = 128) const {
    __syncwarp();
    const int all_lanes = 32 * warps() * p_.box_keys;
#pragma unroll 1
    for (int key = first_key(); key < block_n; key += all_lanes) {
      if (key >= all_lanes) found = find_key(block * block_n + key);
#pragma unroll
      for (int i = panels.begin; i < panels.end; ++i)
        cp_async_bulk_tensor_4d(to + i * (block_n * 128) + key * row_bytes, map, full, i * Sm90aLayout::panel,
                                found.row, head_, found.page);
    }
  }

  FLASHJIT_FN int head() const { return head_; }
  // The place of a key; page -1: it is not to be read.
  FLASHJIT_FN Found place(int key) const {
    if (!reads_({key, key + 1})) return {-1, 0};
    const int index = p_.pages.page_of(key);
    return {p_.pages.clamped(table_[index]), key - index * p_.pages.page_size};
  }

 private:
  // Of the lane's first box in a block.
  FLASHJIT_FN int first_key() const {
    const int thread = static_cast<int>(threadIdx.x);
    const int box = several_warps ? thread % 32 * warps() + thread / 32 : thread;
    return box * p_.box_keys;
  }
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
};

}  // namespace flashjit::device
