// Copies of K and V that lie in pages, for the forward of the sm_80 family.
#pragma once

#include "cuda/tile.cuh"
#include "shared/paged_forward_params.h"
#include "shared/read_keys.h"

namespace flashjit::device {

// Copies keys' rows into a SharedTile as TileCopy does. Each thread looks up the pages of the rows that it
// copies a part of.
template <class Tile, int head_dim, int threads, int element_bytes = 2>
class PagedTileCopy {
  static constexpr int columns = 16 / element_bytes;  // of a chunk
  static constexpr int rows_per_pass = threads / Tile::chunks;
  static constexpr int passes = ceil_div(Tile::rows, rows_per_pass);
  static constexpr int at_once = 4;  // passes whose look-ups are under way together

 public:
  // For tiles of query rows `rows`.
  template <class Params, class Mask>
  FLASHJIT_FN PagedTileCopy(const Params& p, const TensorView& keys, const Problem& problem, const Mask& mask,
                            Span rows, u32 thread)
      : pages_(with_pages(p).pages),
        keys_(keys),
        table_(pages_.table + problem.batch * pages_.table_stride),
        reads_(read_keys(mask, rows)),
        row_(thread / Tile::chunks),
        chunk_(thread % Tile::chunks) {
    source_ = static_cast<const char*>(keys.data) +
              (problem.head_kv * keys.head_stride + chunk_ * columns) * element_bytes;
  }

  // Copies keys [first, first + Tile::rows). Keys that are not to be read become zeros.
  FLASHJIT_FN void operator()(u32 tile, int first, int) const {
    if (threads % Tile::chunks != 0 && row_ >= rows_per_pass) return;
    const int left = (head_dim - static_cast<int>(chunk_) * columns) * element_bytes;
    const int valid = Tile::chunks * columns == head_dim ? 16 : min(max(left, 0), 16);
#pragma unroll
    for (int pass = 0; pass < passes; pass += at_once) {
      int page[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int row = static_cast<int>(row_) + (pass + i) * rows_per_pass, key = first + row;
        page[i] = -1;
        if (pass + i < passes && row < Tile::rows && valid > 0 && reads_({key, key + 1}))
          page[i] = pages_.clamped(table_[pages_.page_of(key)]);
      }
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int row = static_cast<int>(row_) + (pass + i) * rows_per_pass, key = first + row;
        if (pass + i >= passes || row >= Tile::rows) continue;
        const int place = key - pages_.page_of(key) * pages_.page_size;
        const char* const source =
            source_ + (page[i] * keys_.batch_stride + place * keys_.row_stride) * element_bytes;
        cp_async_cg(tile + Tile::offset(static_cast<u32>(row), chunk_), page[i] < 0 ? source_ : source,
                    page[i] < 0 ? 0 : valid);
      }
    }
  }

 private:
  const PageTable& pages_;
  const TensorView& keys_;
  const int* const table_;
  const ReadKeys reads_;
  const u32 row_, chunk_;
  const char* source_;
};

}  // namespace flashjit::device
