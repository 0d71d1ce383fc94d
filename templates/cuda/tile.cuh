// Matrices in shared memory. Rows consist of 16-byte chunks (8 elements), swizzled so that ldmatrix and
// row-wise 16-byte accesses have no bank conflicts for any row length.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/layout.h"

namespace flashjit::device {

// A row has `chunks` chunks; eight chunks fill all banks once. With g = gcd(chunks, 8), rows r and r + 8/g
// start in the same bank. Exclusive-or with (r / (8/g)) % g moves a chunk within its aligned group of g. Then
// any eight consecutive rows, aligned at 8, hold their chunk c in eight different places. An odd `chunks`
// needs no swizzle.
template <int rows_, int chunks_>
struct SharedTile {
  static constexpr int rows = rows_, chunks = chunks_;
  static constexpr int group = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
  static constexpr int row_bytes = chunks * 16;
  static constexpr int bytes = rows * row_bytes;

  // Unsigned throughout, so that division and remainder are shifts and masks.
  FLASHJIT_FN static u32 offset(u32 row, u32 chunk) {
    return row * row_bytes + (chunk ^ row / (8 / group) % group) * 16;
  }

  // The offset from a matrix's first element to lane l's row of the four 8x8 matrices of one ldmatrix. The
  // registers then are in mma's order. lane_offset: rows {0, 8, 0, 8} and chunks {0, 0, 1, 1}, for rows of A
  // and, transposed, columns of B. lane_offset_b: rows {0, 0, 8, 8} and chunks {0, 1, 0, 1}, for columns of B
  // that lie in memory as rows. first_chunk: an even number.
  FLASHJIT_FN static u32 lane_offset(u32 lane, u32 first_chunk = 0) {
    return offset(lane % 16, first_chunk + lane / 16);
  }
  FLASHJIT_FN static u32 lane_offset_b(u32 lane) { return offset(lane / 16 * 8 + lane % 8, lane / 8 % 2); }
  // Moves an address made by lane_offset() or lane_offset_b() on by `row` rows, a multiple of 8, and by
  // `chunk` chunks, an even number. With a first_chunk it is a multiple of a power of two above that.
  FLASHJIT_FN static u32 at(u32 lane_address, u32 row, u32 chunk) {
    return (lane_address ^ (chunk % group * 16)) + (chunk / group * group * 16 + row * row_bytes);
  }
};

// Copies rows of a matrix in global memory into a SharedTile, asynchronously, by all threads of a block.
// Consecutive threads copy consecutive chunks of a row. Columns beyond head_dim (the padding of k to 16)
// become zeros.
template <class Tile, int head_dim, int threads>
class TileCopy {
  static constexpr int rows_per_pass = threads / Tile::chunks;
  static constexpr int passes = ceil_div(Tile::rows, rows_per_pass);
  static constexpr bool all_threads = threads % Tile::chunks == 0;
  static constexpr bool all_rows = Tile::rows % rows_per_pass == 0;
  static constexpr bool padded = Tile::chunks * 8 != head_dim;

 public:
  // `matrix` is the address of element (0, 0); `row_stride` counts elements of 2 bytes.
  FLASHJIT_FN TileCopy(const void* matrix, i64 row_stride, u32 thread)
      : row_(thread / Tile::chunks), chunk_(thread % Tile::chunks), row_bytes_(row_stride * 2) {
    source_ = static_cast<const char*>(matrix) + chunk_ * 16;
  }

  // Copies rows [first, first + Tile::rows). Rows from `end` on are not read and become zeros.
  FLASHJIT_FN void operator()(u32 tile, int first, int end) const {
    if (!all_threads && row_ >= rows_per_pass) return;
    const int row = static_cast<int>(row_);
    const char* source = source_ + (first + row) * row_bytes_;
    const int left = padded && chunk_ * 8 >= head_dim ? 0 : end - first - row;
    const u32 to = tile + Tile::offset(row_, chunk_);
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int rows = pass * rows_per_pass;
      // The swizzle repeats every eight rows.
      const u32 address =
          rows_per_pass % 8 == 0 ? to + rows * Tile::row_bytes : tile + Tile::offset(row_ + rows, chunk_);
      if (all_rows || row + rows < Tile::rows) cp_async_cg(address, source, rows < left ? 16 : 0);
      source += rows_per_pass * row_bytes_;
    }
  }

 private:
  const char* source_;
  u32 row_, chunk_;
  i64 row_bytes_;
};

}  // namespace flashjit::device
