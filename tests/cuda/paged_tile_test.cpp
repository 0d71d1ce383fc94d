// Copies of keys in pages for the sm_80 family, on the host: each thread's cp.async happens at once.
#include "cuda/paged_tile.cuh"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "runtime/arguments/pages.hpp"

namespace flashjit::device {
namespace {

TEST(PageTable, DividesByMultiplication) {
  std::vector<int> sizes = {1, 2, 4, 8, 32, 64, 128, 256, 1 << 20, 0x7ffffff0};
  for (int size = 16; size <= 4096; size += 16) sizes.push_back(size);
  for (const int size : sizes) {
    PageTable pages{};
    pages.page_size = size;
    set_division(pages);
    for (std::int64_t near :
         {std::int64_t{0}, std::int64_t{size}, std::int64_t{size} * 7, std::int64_t{1} << 30,
          std::int64_t{0x7fffffff} / size * size, std::int64_t{0x7fffffff}})
      for (std::int64_t key = std::max<std::int64_t>(near - 3, 0); key <= near + 3 && key <= 0x7fffffff;
           ++key)
        ASSERT_EQ(pages.page_of(static_cast<int>(key)), key / size) << size;
  }
}

// Pages hold a number for each key and column. A tile of a block has those of the keys that are read, and
// zeros; its swizzle is SharedTile's.
struct MaskOf {
  ReadKeys keys;
  Span hull(Keys, Span) const { return keys.hull; }
};
Span key_gap(const MaskOf& mask, Span) {
  return mask.keys.gap;
}

template <int rows, int head_dim, int threads>
void check_tile(int page_size, ReadKeys reads) {
  using Tile = SharedTile<rows, ceil_div(head_dim, 16) * 2>;
  SCOPED_TRACE("pages of " + std::to_string(page_size) + ", head_dim " + std::to_string(head_dim));
  constexpr int heads = 2, num_pages = 40, of_entry = 30;
  const i64 row = heads * head_dim + 8, page = row * page_size + 24;
  std::vector<u32> ids(2 * of_entry);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<u32>(i * 17 % num_pages);
  std::vector<int> table(ids.begin(), ids.end());
  const int keys = std::min(of_entry * page_size, 200);
  for (int i = 0; i < 2 * of_entry; ++i)  // wild where no key is read
    if (!reads({i % of_entry * page_size, (i % of_entry + 1) * page_size}))
      table[static_cast<std::size_t>(i)] = -7;
  table[of_entry] = num_pages + 5;  // clamped to the last page
  ids[of_entry] = num_pages - 1;
  std::vector<std::uint16_t> memory(static_cast<std::size_t>(num_pages * page));
  std::iota(memory.begin(), memory.end(), std::uint16_t{1});

  Paged<ProblemParams> p{};
  p.pages = {table.data(), of_entry, page_size, num_pages, 0, 0};
  set_division(p.pages);
  const TensorView view{memory.data(), page, row, head_dim};
  Problem problem{};
  problem.batch = 1;
  problem.head_kv = 1;
  reads.hull.end = std::min(reads.hull.end, keys);
  for (int first = 0; first < keys; first += rows) {
    emulator::Block::run(threads, Tile::bytes, 0xff, [&] {
      PagedTileCopy<Tile, head_dim, threads>(static_cast<const ProblemParams&>(p), view, problem,
                                             MaskOf{reads}, Span{0, 1}, threadIdx.x)(0, first, keys);
    });
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < Tile::chunks * 8; ++c) {
        std::uint16_t copied, expected = 0;
        std::memcpy(&copied,
                    dynamic_shared + Tile::offset(static_cast<u32>(r), static_cast<u32>(c / 8)) + c % 8 * 2,
                    2);
        const int key = first + r;
        if (c < head_dim && reads({key, key + 1}))
          expected = memory[static_cast<std::size_t>(
              ids[static_cast<std::size_t>(of_entry + key / page_size)] * page + key % page_size * row +
              head_dim + c)];
        ASSERT_EQ(copied, expected) << "key " << key << ", column " << c;
      }
  }
}

TEST(PagedTileCopy, TakesEachRowFromItsPage) {
  const Span all = {0, 0x7fffffff}, none = {0, 0};
  for (const int page_size : {1, 2, 16, 48, 64, 256})
    for (const ReadKeys reads : {ReadKeys{all, none}, ReadKeys{{5, 90}, none}, ReadKeys{all, {3, 70}}}) {
      check_tile<64, 128, 128>(page_size, reads);
      check_tile<48, 40, 128>(page_size, reads);  // six chunks a row, one of them padding
      check_tile<32, 256, 256>(page_size, reads);
      check_tile<80, 64, 256>(page_size, reads);
    }
}

}  // namespace
}  // namespace flashjit::device
