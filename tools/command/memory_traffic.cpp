#include "tools/command/memory_traffic.hpp"

#include <algorithm>

namespace flashjit::command {
namespace {

using i64 = std::int64_t;

constexpr i64 round_up(i64 bytes) {
  return (bytes + CacheModel::line - 1) / CacheModel::line * CacheModel::line;
}

// A tensor [batch, seqlen, heads, columns] in memory.
struct Place {
  i64 begin, seqlen, heads, row;  // row: bytes of the columns

  i64 bytes(i64 batch) const { return round_up(batch * seqlen * heads * row); }
  i64 at(i64 batch, i64 position, i64 head) const {
    return begin + ((batch * seqlen + position) * heads + head) * row;
  }
};

}  // namespace

CacheModel::CacheModel(i64 capacity, i64 memory)
    : places_(std::max<i64>(capacity / line, 1)), lines_(static_cast<std::size_t>(round_up(memory) / line)) {}

void CacheModel::unlink(Line& at) {
  (at.newer == last ? newest_ : lines_[static_cast<std::size_t>(at.newer)].older) = at.older;
  (at.older == last ? oldest_ : lines_[static_cast<std::size_t>(at.older)].newer) = at.newer;
  at.newer = at.older = absent;
}

void CacheModel::use_line(std::int32_t number, bool read, bool written) {
  Line& at = lines_[static_cast<std::size_t>(number)];
  if (at.newer != absent) {
    unlink(at);
  } else {
    lines_read_ += read;
    if (used_ == places_) {
      Line& replaced = lines_[static_cast<std::size_t>(oldest_)];
      lines_written_ += replaced.dirty;
      replaced.dirty = false;
      unlink(replaced);
    } else {
      ++used_;
    }
  }
  at.newer = last;
  at.older = newest_;
  (newest_ == last ? oldest_ : lines_[static_cast<std::size_t>(newest_)].newer) = number;
  newest_ = number;
  at.dirty |= written;
}

void CacheModel::use(i64 address, i64 bytes, bool read, bool written) {
  for (i64 at = address / line; at * line < address + bytes; ++at)
    use_line(static_cast<std::int32_t>(at), read, written);
}

void CacheModel::write_back(i64 address, i64 bytes) {
  for (i64 at = address / line; at * line < address + bytes; ++at) {
    Line& one = lines_[static_cast<std::size_t>(at)];
    lines_written_ += one.dirty;
    one.dirty = false;
  }
}

double ForwardWalk::lines_used(const AttentionSpec& spec, const Shape& shape) const {
  const auto count = [](double a, double b) { return (a + b - 1) / b; };
  const double tiles = double(shape.batch) * shape.num_heads_q / packed_heads *
                       count(double(shape.seqlen_q) * packed_heads, tile_rows);
  const double keys = 2.0 * block_n * (spec.head_dim + spec.head_dim_v) * double(size_of(spec.dtype));
  return tiles * count(shape.seqlen_k, block_n) * (keys + double(scratch) + 2 * double(packed_block)) /
         double(CacheModel::line);
}

std::vector<MovedBytes> forward_traffic(const AttentionSpec& spec, const Shape& shape,
                                        const ForwardWalk& walk, const SeesBlock& sees,
                                        const std::vector<i64>& capacities) {
  const auto element = static_cast<i64>(size_of(spec.dtype));
  const auto o_element = static_cast<i64>(size_of(spec.o_dtype.value_or(spec.dtype)));
  const i64 heads_q = shape.num_heads_q, heads_kv = shape.num_heads_kv, batch = shape.batch;
  i64 end = 0;
  const auto place = [&](i64 seqlen, i64 heads, i64 row) {
    const Place made{end, seqlen, heads, row};
    end += made.bytes(batch);
    return made;
  };
  const Place q = place(shape.seqlen_q, heads_q, spec.head_dim * element),
              k = place(shape.seqlen_k, heads_kv, spec.head_dim * element),
              v = place(spec.v_in_k ? 0 : shape.seqlen_k, heads_kv, spec.head_dim_v * element),
              o = place(shape.seqlen_q, heads_q, spec.head_dim_v * o_element);
  const Place lse{end, heads_q, shape.seqlen_q, sizeof(float)};  // [batch, heads, rows]
  if (spec.lse) end += lse.bytes(batch);
  const i64 tensors = end, scratch = tensors, packed = scratch + round_up(walk.scratch);
  const i64 memory = packed + walk.packed_blocks * round_up(walk.packed_block);

  std::vector<CacheModel> caches;
  for (const i64 capacity : capacities) caches.emplace_back(capacity, memory);
  CacheModel least(tensors, tensors);
  // Tensors alone count for the least.
  const auto read = [&](const Place& from, i64 entry, i64 row, i64 head) {
    for (CacheModel& cache : caches) cache.read(from.at(entry, row, head), from.row);
    least.read(from.at(entry, row, head), from.row);
  };
  const auto write = [&](const Place& to, i64 entry, i64 row, i64 head) {
    for (CacheModel& cache : caches) cache.write(to.at(entry, row, head), to.row);
    least.write(to.at(entry, row, head), to.row);
  };
  const auto each_cache = [&](void (CacheModel::*use)(i64, i64), i64 at, i64 bytes) {
    for (CacheModel& cache : caches) (cache.*use)(at, bytes);
  };

  const int group = walk.packed_heads, rows = shape.seqlen_q * group;
  const int tiles = (rows + walk.tile_rows - 1) / walk.tile_rows;
  const int blocks = (shape.seqlen_k + walk.block_n - 1) / walk.block_n;
  // A tile's rows, which are rows of several heads in turn.
  const auto each_row = [&](int tile, const auto& use) {
    for (int i = tile * walk.tile_rows; i < std::min(rows, (tile + 1) * walk.tile_rows); ++i)
      use(i / group, i % group);
  };
  for (int entry = 0; entry < shape.batch; ++entry) {
    i64 packed_head = -1;
    std::vector<int> packed_index;  // the block that each place has
    for (int head = 0; head < shape.num_heads_q; head += group) {
      const i64 head_kv = head / (heads_q / heads_kv);
      if (packed_head != head_kv) packed_index.assign(static_cast<std::size_t>(walk.packed_blocks), -1);
      packed_head = head_kv;
      for (int tile = tiles - 1; tile >= 0; --tile) {
        each_row(tile, [&](int row, int i) { read(q, entry, row, head + i); });
        each_cache(&CacheModel::write, scratch, walk.scratch);
        const int first = tile * walk.tile_rows / group,
                  after = (std::min(rows, (tile + 1) * walk.tile_rows) - 1) / group + 1;
        for (int block = 0; block < blocks; ++block) {
          bool seen = false;
          for (int i = 0; i < group && !seen; ++i) seen = sees(entry, head + i, first, after - first, block);
          if (!seen) continue;
          const int place = walk.packed_blocks > 0 ? block % walk.packed_blocks : -1;
          const i64 copy = packed + place * round_up(walk.packed_block);
          if (place < 0 || packed_index[static_cast<std::size_t>(place)] != block) {
            const int after_last = std::min(shape.seqlen_k, (block + 1) * walk.block_n);
            for (int key = block * walk.block_n; key < after_last; ++key) {
              read(k, entry, key, head_kv);
              if (!spec.v_in_k) read(v, entry, key, head_kv);
            }
            if (place >= 0) each_cache(&CacheModel::write, copy, walk.packed_block);
          }
          if (place >= 0) {
            packed_index[static_cast<std::size_t>(place)] = block;
            each_cache(&CacheModel::read, copy, walk.packed_block);
          }
          each_cache(&CacheModel::update, scratch, walk.scratch);
        }
        each_cache(&CacheModel::read, scratch, walk.scratch);
        each_row(tile, [&](int row, int i) {
          write(o, entry, row, head + i);
          if (spec.lse) write(lse, entry, head + i, row);
        });
      }
    }
  }
  std::vector<MovedBytes> traffic;
  caches.push_back(std::move(least));
  for (CacheModel& cache : caches) {
    cache.write_back(0, tensors);
    traffic.push_back({cache.bytes_read(), cache.bytes_written()});
  }
  return traffic;
}

}  // namespace flashjit::command
