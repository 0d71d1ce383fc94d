#include "tools/command/memory_traffic.hpp"

#include <algorithm>

namespace flashjit::command {
namespace {

using i64 = std::int64_t;

constexpr i64 round_up(i64 bytes) {
  return (bytes + CacheModel::line - 1) / CacheModel::line * CacheModel::line;
}

constexpr double count(double a, double b) {
  return (a + b - 1) / b;
}

// A tensor [batch, seqlen, heads, columns] in memory.
struct Place {
  i64 begin, seqlen, heads, row;  // row: bytes of the columns

  i64 bytes(i64 batch) const { return round_up(batch * seqlen * heads * row); }
  i64 at(i64 batch, i64 position, i64 head) const {
    return begin + ((batch * seqlen + position) * heads + head) * row;
  }
};

// Places of tensors, one after the other, and of the memory of a launch behind them.
class Places {
 public:
  explicit Places(i64 batch) : batch_(batch) {}
  Place tensor(i64 seqlen, i64 heads, i64 row) {
    const Place made{end_, seqlen, heads, row};
    end_ += made.bytes(batch_);
    return made;
  }
  // Numbers of rows: [batch, heads, rows].
  Place of_rows(i64 heads, i64 rows) { return tensor(heads, rows, sizeof(float)); }
  i64 memory(i64 bytes) {
    const i64 begin = end_;
    end_ += round_up(bytes);
    return begin;
  }
  i64 end() const { return end_; }

 private:
  i64 batch_, end_ = 0;
};

// All caches, and what is least possible, for which tensors alone count.
class Caches {
 public:
  Caches(const std::vector<i64>& capacities, i64 tensors, i64 memory)
      : tensors_(tensors), least_(tensors, tensors) {
    for (const i64 capacity : capacities) caches_.emplace_back(capacity, memory);
  }
  void read(const Place& from, i64 entry, i64 row, i64 head) {
    const i64 at = from.at(entry, row, head);
    use(&CacheModel::read, at, from.row);
    if (at < tensors_) least_.read(at, from.row);
  }
  void write(const Place& to, i64 entry, i64 row, i64 head) {
    const i64 at = to.at(entry, row, head);
    use(&CacheModel::write, at, to.row);
    if (at < tensors_) least_.write(at, to.row);
  }
  void use(void (CacheModel::*how)(i64, i64), i64 at, i64 bytes) {
    for (CacheModel& cache : caches_) (cache.*how)(at, bytes);
  }
  std::vector<MovedBytes> traffic() {
    std::vector<MovedBytes> traffic;
    caches_.push_back(std::move(least_));
    for (CacheModel& cache : caches_) {
      cache.write_back(0, tensors_);
      traffic.push_back({cache.bytes_read(), cache.bytes_written()});
    }
    return traffic;
  }

 private:
  i64 tensors_;
  std::vector<CacheModel> caches_;
  CacheModel least_;
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
  const i64 heads_q = shape.num_heads_q, heads_kv = shape.num_heads_kv;
  Places places(shape.batch);
  const Place q = places.tensor(shape.seqlen_q, heads_q, spec.head_dim * element),
              k = places.tensor(shape.seqlen_k, heads_kv, spec.head_dim * element),
              v = places.tensor(spec.v_in_k ? 0 : shape.seqlen_k, heads_kv, spec.head_dim_v * element),
              o = places.tensor(shape.seqlen_q, heads_q, spec.head_dim_v * o_element),
              lse = places.of_rows(spec.lse ? heads_q : 0, shape.seqlen_q);
  const i64 tensors = places.end(), scratch = places.memory(walk.scratch),
            packed = places.memory(walk.packed_blocks * round_up(walk.packed_block));
  Caches caches(capacities, tensors, places.end());

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
        each_row(tile, [&](int row, int i) { caches.read(q, entry, row, head + i); });
        caches.use(&CacheModel::write, scratch, walk.scratch);
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
              caches.read(k, entry, key, head_kv);
              if (!spec.v_in_k) caches.read(v, entry, key, head_kv);
            }
            if (place >= 0) caches.use(&CacheModel::write, copy, walk.packed_block);
          }
          if (place >= 0) {
            packed_index[static_cast<std::size_t>(place)] = block;
            caches.use(&CacheModel::read, copy, walk.packed_block);
          }
          caches.use(&CacheModel::update, scratch, walk.scratch);
        }
        caches.use(&CacheModel::read, scratch, walk.scratch);
        each_row(tile, [&](int row, int i) {
          caches.write(o, entry, row, head + i);
          if (spec.lse) caches.write(lse, entry, head + i, row);
        });
      }
    }
  }
  return caches.traffic();
}

double BackwardWalk::lines_used(const AttentionSpec& spec, const Shape& shape) const {
  const double heads = double(shape.batch) * shape.num_heads_q, blocks = count(shape.seqlen_k, block_n);
  const double row = double(dq_row) + (spec.head_dim + spec.head_dim_v) * double(size_of(spec.dtype));
  return heads * blocks * count(shape.seqlen_q, unit_rows) * (unit_rows * row + double(scratch)) /
         double(CacheModel::line);
}

std::vector<MovedBytes> backward_traffic(const AttentionSpec& spec, const Shape& shape,
                                         const BackwardWalk& walk, const SeesBlock& sees,
                                         const std::vector<i64>& capacities) {
  const auto element = static_cast<i64>(size_of(spec.dtype));
  const auto o_element = static_cast<i64>(size_of(spec.o_dtype.value_or(spec.dtype)));
  const auto gradient = static_cast<i64>(size_of(spec.grad_dtype.value_or(spec.dtype)));
  const i64 rows = shape.seqlen_q, keys = shape.seqlen_k;
  const i64 heads_q = shape.num_heads_q, heads_kv = shape.num_heads_kv;
  const i64 of_k = spec.head_dim, of_v = spec.head_dim_v;
  Places places(shape.batch);
  const Place q = places.tensor(rows, heads_q, of_k * element),
              k = places.tensor(keys, heads_kv, of_k * element),
              v = places.tensor(keys, heads_kv, of_v * element),
              o = places.tensor(rows, heads_q, of_v * o_element),
              d_o = places.tensor(rows, heads_q, of_v * element), lse = places.of_rows(heads_q, rows),
              dq = places.tensor(rows, heads_q, of_k * gradient),
              dk = places.tensor(keys, heads_kv, of_k * gradient),
              dv = places.tensor(keys, heads_kv, of_v * gradient);
  const i64 tensors = places.end();
  const Place offsets = places.of_rows(heads_q, rows), maxima = places.of_rows(heads_q, rows),
              deltas = places.of_rows(heads_q, rows), sums = places.tensor(heads_q, rows, walk.dq_row);
  const i64 scratch = places.memory(walk.scratch);
  Caches caches(capacities, tensors, places.end());

  for (int entry = 0; entry < shape.batch; ++entry)
    for (i64 head = 0; head < heads_q; ++head)
      for (i64 row = 0; row < rows; ++row) {
        caches.read(o, entry, row, head);
        caches.read(d_o, entry, row, head);
        caches.read(lse, entry, head, row);
        for (const Place* of_row : {&offsets, &maxima, &deltas}) caches.write(*of_row, entry, head, row);
      }
  const i64 group = heads_q / heads_kv;
  const auto unit_rows = static_cast<i64>(walk.unit_rows);
  for (int entry = 0; entry < shape.batch; ++entry)
    for (i64 head_kv = 0; head_kv < heads_kv; ++head_kv) {
      for (i64 head = head_kv * group; head < (head_kv + 1) * group; ++head)
        for (i64 row = 0; row < rows; ++row) caches.write(sums, entry, head, row);
      for (i64 block = 0; block * walk.block_n < keys; ++block) {
        const i64 first_key = block * walk.block_n, after_keys = std::min(keys, first_key + walk.block_n);
        caches.use(&CacheModel::write, scratch, walk.scratch);
        for (i64 key = first_key; key < after_keys; ++key) {
          caches.read(k, entry, key, head_kv);
          caches.read(v, entry, key, head_kv);
        }
        for (i64 head = head_kv * group; head < (head_kv + 1) * group; ++head)
          for (i64 first = 0; first < rows; first += unit_rows) {
            const i64 after = std::min(rows, first + unit_rows);
            if (!sees(entry, static_cast<int>(head), static_cast<int>(first), static_cast<int>(after - first),
                      static_cast<int>(block)))
              continue;
            for (i64 row = first; row < after; ++row) {
              caches.read(q, entry, row, head);
              caches.read(d_o, entry, row, head);
              for (const Place* of_row : {&offsets, &maxima, &deltas}) caches.read(*of_row, entry, head, row);
            }
            caches.use(&CacheModel::update, scratch, walk.scratch);
            for (i64 row = first; row < after; ++row)
              caches.use(&CacheModel::update, sums.at(entry, head, row), sums.row);
          }
        caches.use(&CacheModel::read, scratch, walk.scratch);
        for (i64 key = first_key; key < after_keys; ++key) {
          caches.write(dk, entry, key, head_kv);
          caches.write(dv, entry, key, head_kv);
        }
      }
    }
  for (int entry = 0; entry < shape.batch; ++entry)
    for (i64 head = 0; head < heads_q; ++head)
      for (i64 row = 0; row < rows; ++row) {
        caches.read(sums, entry, head, row);
        caches.write(dq, entry, row, head);
      }
  return caches.traffic();
}

}  // namespace flashjit::command
