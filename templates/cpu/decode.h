// Decode on a CPU: a few query rows of each batch entry against a long cache (split-KV: FlashDecoding, Dao et
// al. 2023). Memory bounds it. An item is a part of a batch entry's keys, for some key/value heads and all
// query heads of their groups, so K and V are read once. Keys are not packed: scores are dot products of rows
// as they lie in memory. A block's keys are walked twice, for the scores and for the product with V. Each
// walk fetches the next block's rows, because the hardware does not foresee rows that are apart.
#pragma once

#include "cpu/vector.h"
#include "shared/decode_layout.h"
#include "shared/decode_params.h"
#include "shared/mask.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct DecodeCpuSpec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using o_dtype = void;
  static constexpr bool lse = true, varlen = false, paged = false;
};

// As many elements of a row as a vector has.
FLASHJIT_FN Vec load_row(const fp32* p) {
  return load_unaligned<Vec>(p);
}
FLASHJIT_FN Vec load_row(const fp16* p) {
  using Halves = _Float16 __attribute__((vector_size(2 * lanes)));
  return __builtin_convertvector(load_unaligned<Halves>(p), Vec);
}
FLASHJIT_FN Vec load_row(const bf16* p) {
  using Shorts = unsigned short __attribute__((vector_size(2 * lanes)));
  return reinterpret_cast<Vec>(__builtin_convertvector(load_unaligned<Shorts>(p), WordVec) << 16);
}
// A vector of a row's columns, from column `c` on. Columns from `columns` on, a multiple of 8, are zeros.
template <int columns, class Element>
FLASHJIT_FN Vec load_columns(const Element* row, int c) {
  if constexpr (lanes == 8 || columns % lanes == 0) {
    return load_row(row + c);
  } else {
    if (c + lanes <= columns) return load_row(row + c);
    return __builtin_shufflevector(load8(row + c), Vec8{}, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                   15);
  }
}

// Adds the two quarters of each half: the results of a, then those of b.
template <class V>
FLASHJIT_FN V pair_sums(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  else
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
// Element i is the sum of v[i].
FLASHJIT_FN Vec sums_of(const Vec (&v)[lanes]) {
  Vec quarters[lanes / 4];  // of four vectors: their sums of each quarter
#pragma unroll
  for (int i = 0; i < lanes / 4; ++i) {
    const Vec a = low_words(v[4 * i], v[4 * i + 1]) + high_words(v[4 * i], v[4 * i + 1]);
    const Vec b = low_words(v[4 * i + 2], v[4 * i + 3]) + high_words(v[4 * i + 2], v[4 * i + 3]);
    quarters[i] = low_pairs(a, b) + high_pairs(a, b);
  }
  const Vec halves = pair_sums(quarters[0], quarters[1]);
  if constexpr (lanes == 8) {
    return halves;
  } else {
    return pair_sums(halves, pair_sums(quarters[2], quarters[3]));
  }
}

template <class Spec, class Config>
class DecodeTile {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;

  // Rows and keys whose scores are computed at a time: a sum for each in a register, and one vector of
  // results.
  static constexpr int rows_at_once = decode_rows_at_once, keys_at_once = lanes / rows_at_once;
  // Vectors of output columns that stay in registers.
  static constexpr int columns_at_once = vector_registers / 8;
  static constexpr int vectors_k = ceil_div(head_dim, lanes), vectors_v = ceil_div(head_dim_v, lanes);
  static constexpr int q_row = vectors_k * lanes, o_row = vectors_v * lanes;

  // A block's rows of K or V: pointers to the first head's; other heads lie head_stride apart.
  struct Rows {
    const Element** key;  // [block_n]
    int count;
    i64 head_stride;
  };
  // Prefetches a block's rows into the second-level cache, some at each call, in the order of memory.
  template <int columns>
  struct Fetch {
    const Rows& rows;
    int heads, key = 0, head = 0;
    FLASHJIT_FN void some(int count) {
      for (; count > 0 && key < rows.count; --count) {
        const Element* const row = rows.key[key] + head * rows.head_stride;
#pragma unroll
        for (int c = 0; c < columns; c += 64 / sizeof(Element)) fetch(row + c);
        if (++head == heads) head = 0, ++key;
      }
    }
  };

  const CpuDecodeParams& p_;
  const Problem& problem_;  // of the first head
  const int group_;         // query heads of a key/value head
  const int heads_;         // key/value heads of the tile
  const Span positions_;    // of the tile
  const int rows_;    // of each key/value head: row r is position r / group_ of its query head r % group_
  const int padded_;  // in whole rows_at_once
  float *q_, *o_, *s_, *maximum_, *sum_, *alpha_;  // of heads_ * padded_ rows
  const Element** pointers_;                       // [4][block_n]

 public:
  FLASHJIT_FN DecodeTile(const CpuDecodeParams& p, const Problem& problem, int heads, Span positions,
                         void* scratch)
      : p_(p),
        problem_(problem),
        group_(p.num_heads_q / p.num_heads_kv),
        heads_(heads),
        positions_(positions),
        rows_(positions.size() * group_),
        padded_(round_up(rows_, rows_at_once)) {
    q_ = static_cast<float*>(scratch);
    o_ = q_ + block_m * q_row;
    s_ = o_ + block_m * o_row;
    maximum_ = s_ + block_m * block_n;
    sum_ = maximum_ + block_m;
    alpha_ = sum_ + block_m;
    pointers_ = reinterpret_cast<const Element**>(alpha_ + block_m);
  }

  // Computes the rows' sums over the keys that they see in `keys`.
  FLASHJIT_FN void run(Span keys) {
    load_rows();
    const Mask mask(p_, problem_);
    const Span within = intersect(keys, mask.hull(Keys{}, positions_));
    BlockWalk<Keys, Mask> walk(mask, positions_, block_n, keys);
    Rows k[2], v[2];
    Block block, next;
    const auto look_at = [&](const Block& b, int side) __attribute__((always_inline)) {
      const Span here = intersect(within, block_span(b.index, block_n));
      k[side] = {pointers_ + 2 * side * block_n, max(here.size(), 0), p_.k.head_stride};
      v[side] = {pointers_ + (2 * side + 1) * block_n, max(here.size(), 0), p_.v.head_stride};
      find_rows(here, k[side], v[side]);
    };
    bool more = walk.next(block);
    if (more) look_at(block, 0);
    for (int side = 0; more; side ^= 1) {
      const Span here = intersect(within, block_span(block.index, block_n));
      more = walk.next(next);
      k[side ^ 1].count = v[side ^ 1].count = 0;
      if (more) look_at(next, side ^ 1);
      const bool whole = mask.whole(positions_, here);
      Fetch<head_dim> fetch_k{k[side ^ 1], heads_};
      Fetch<head_dim_v> fetch_v{v[side ^ 1], heads_};
      if (!here.empty()) {
        for (int head = 0; head < heads_; ++head) {
          const int row = head * padded_;
          take_scores(row, head, k[side], fetch_k);
          Spec::Score::modify(s_ + row * block_n, positions_, here, head);
          if (!whole) apply_mask(mask, s_ + row * block_n, here);
          softmax(row, here.size());
          if (whole)
            add_values(row, head, v[side], fetch_v);
          else
            add_seen_values(row, head, v[side]);
        }
      }
      block = next;
    }
  }

  // Stores the rows' partial results: for each head O, maxima and sums of the group's rows.
  FLASHJIT_FN void leave(float* part, i64 part_of_head, int group_rows) const {
    each_row([&](int i, int head, int row) __attribute__((always_inline)) {
      float* const to = part + head * part_of_head;
      for (int c = 0; c < head_dim_v; ++c) to[row * head_dim_v + c] = o_[i * o_row + c];
      to[group_rows * head_dim_v + row] = maximum_[i];
      to[group_rows * (head_dim_v + 1) + row] = sum_[i];
    });
  }
  // Adds a part's partial results. The first part replaces the rows' state.
  FLASHJIT_FN void merge(const float* part, i64 part_of_head, int group_rows, bool first) const {
    const float scale = p_.scale_log2;
    each_row([&](int i, int head, int row) __attribute__((always_inline)) {
      const float* const from = part + head * part_of_head;
      const float there = from[group_rows * head_dim_v + row];
      const float here = first ? minus_infinity : maximum_[i];
      const float top = there > here ? there : here;
      const float reference = top == minus_infinity ? 0 : top;
      const float by = exp2(splat((here - reference) * scale))[0];
      const float by_there = exp2(splat((there - reference) * scale))[0];
      sum_[i] = (first ? 0 : sum_[i] * by) + from[group_rows * (head_dim_v + 1) + row] * by_there;
      maximum_[i] = top;
      for (int c = 0; c < head_dim_v; ++c) {
        const float other = there == minus_infinity ? 0 : from[row * head_dim_v + c] * by_there;
        o_[i * o_row + c] = first ? other : o_[i * o_row + c] * by + other;
      }
    });
  }
  FLASHJIT_FN void write_rows() const {
    each_row([&](int i, int head, int row) __attribute__((always_inline)) {
      const int position = row / group_, head_q = head * group_ + row % group_;
      OElement* const to = static_cast<OElement*>(p_.o.data) + problem_.q_offset(p_.o) +
                           position * p_.o.row_stride + head_q * p_.o.head_stride;
      const bool empty = sum_[i] == 0;
      const float inverse = empty ? 0 : 1 / sum_[i];
      for (int c = 0; c < head_dim_v; c += 8)
        store8(to + c, empty ? Vec8{} : load_unaligned<Vec8>(o_ + i * o_row + c) * inverse);
      if constexpr (Spec::lse)
        static_cast<float*>(p_.lse.data)[problem_.q_offset(p_.lse) + position * p_.lse.row_stride +
                                         head_q * p_.lse.head_stride] =
            empty ? minus_infinity : maximum_[i] * (p_.scale_log2 * ln_2) + log(splat(sum_[i]))[0];
    });
  }

 private:
  // body(row of the tile, its key/value head, its row of that head's group)
  template <class Body>
  FLASHJIT_FN void each_row(Body body) const {
    for (int head = 0; head < heads_; ++head)
      for (int i = 0; i < rows_; ++i) body(head * padded_ + i, head, positions_.begin * group_ + i);
  }

  FLASHJIT_FN void load_rows() const {
    for (int head = 0; head < heads_; ++head)
      for (int i = 0; i < padded_; ++i) {
        const int row = positions_.begin * group_ + min(i, rows_ - 1);  // padding repeats the last row
        const int at = head * padded_ + i;
        const Element* const from = static_cast<const Element*>(p_.q.data) + problem_.q_offset(p_.q) +
                                    row / group_ * p_.q.row_stride +
                                    (head * group_ + row % group_) * p_.q.head_stride;
        for (int c = 0; c < q_row; c += lanes) store(q_ + at * q_row + c, load_columns<head_dim>(from, c));
        for (int c = 0; c < o_row; c += lanes) store(o_ + at * o_row + c, Vec{});
        maximum_[at] = minus_infinity;
        sum_[at] = 0;
      }
  }

  // Finds the rows of K and V of the tile's first head.
  FLASHJIT_FN void find_rows(Span keys, const Rows& k_rows, const Rows& v_rows) const {
    const Element* const k = static_cast<const Element*>(p_.k.data) + problem_.head_kv * p_.k.head_stride;
    const Element* const v = static_cast<const Element*>(p_.v.data) + problem_.head_kv * p_.v.head_stride;
    const auto set = [&](int i, i64 page, int row) __attribute__((always_inline)) {
      k_rows.key[i] = k + page * p_.k.batch_stride + row * p_.k.row_stride;
      v_rows.key[i] = v + page * p_.v.batch_stride + row * p_.v.row_stride;
    };
    if constexpr (Spec::paged) {
      const int size = p_.pages.page_size;
      const int* const table = p_.pages.table + problem_.batch * p_.pages.table_stride;
      for (int key = keys.begin; key < keys.end;) {
        const i64 page = min(max(table[key / size], 0), p_.pages.num_pages - 1);
        for (int row = key % size; row < size && key < keys.end; ++row, ++key)
          set(key - keys.begin, page, row);
      }
    } else {
      for (int key = keys.begin; key < keys.end; ++key) set(key - keys.begin, problem_.batch, key);
    }
  }

  // S = Q K^T: s_[row][key].
  template <class FetchK>
  __attribute__((noinline)) void take_scores(int first_row, int head, const Rows& rows,
                                             FetchK& fetch_k) const {
    for (int key = 0; key < rows.count; key += keys_at_once) {
      const Element* k[keys_at_once];
#pragma unroll
      for (int j = 0; j < keys_at_once; ++j)
        k[j] = rows.key[min(key + j, rows.count - 1)] + head * rows.head_stride;
      fetch_k.some(keys_at_once);
      for (int row = first_row; row < first_row + padded_; row += rows_at_once) {
        const float* const q = q_ + row * q_row;
        Vec sums[lanes] = {};
#pragma unroll
        for (int c = 0; c < vectors_k; ++c) {
          Vec columns[keys_at_once];
#pragma unroll
          for (int j = 0; j < keys_at_once; ++j) columns[j] = load_columns<head_dim>(k[j], c * lanes);
#pragma unroll
          for (int r = 0; r < rows_at_once; ++r) {
            const Vec of_q = load(q + r * q_row + c * lanes);
#pragma unroll
            for (int j = 0; j < keys_at_once; ++j)
              sums[r * keys_at_once + j] = fma(of_q, columns[j], sums[r * keys_at_once + j]);
          }
        }
        const Vec scores = sums_of(sums);
#pragma unroll
        for (int r = 0; r < rows_at_once; ++r)
          __builtin_memcpy(s_ + (row + r) * block_n + key,
                           reinterpret_cast<const char*>(&scores) + r * keys_at_once * sizeof(float),
                           keys_at_once * sizeof(float));
      }
    }
  }

  __attribute__((noinline)) void apply_mask(const Mask& mask, float* s, Span keys) const {
    [[maybe_unused]] auto tile = mask.tile();
    for (int i = 0; i < rows_; ++i, s += block_n) {
      const int row = positions_.begin + i / group_;
      if constexpr (Mask::row_intervals) {
        const Span kept = mask.hull(Keys{}, {row, row + 1});
        for (int key = keys.begin; key < keys.end; ++key)
          if (!kept.contains(key)) s[key - keys.begin] = minus_infinity;
      } else {
        for (int key = keys.begin; key < keys.end;) {
          const int first = key / word_keys * word_keys;
          u32 word[1];
          tile.template bits<word_keys>(row, first, word);
          for (; key < min(first + word_keys, keys.end); ++key)
            if (!(word[0] >> (key - first) & 1)) s[key - keys.begin] = minus_infinity;
        }
      }
    }
  }

  // Scores to weights, with the rows' state as in cpu/tile.h.
  __attribute__((noinline)) void softmax(int first_row, int keys) const {
    const float scale = p_.scale_log2;
    for (int i = first_row; i < first_row + rows_; ++i) {
      float* const s = s_ + i * block_n;
      for (int key = keys; key < round_up(keys, lanes); ++key) s[key] = minus_infinity;
      Vec tops = load(s);
      for (int key = lanes; key < keys; key += lanes) tops = larger(load(s + key), tops);
      const float top = __builtin_reduce_max(tops), before = maximum_[i];
      const float maximum = top > before ? top : before;
      const float reference = maximum == minus_infinity ? 0 : maximum;
      alpha_[i] = before == maximum ? 1 : exp2(splat((before - reference) * scale))[0];
      const float offset = reference * scale;
      // As in cpu/tile.h: rounded, a far offset may take weights beyond exp2.
      const bool far = __builtin_fabsf(offset) > 65536;
      Vec sums{};
      for (int key = 0; key < keys; key += lanes) {
        const Vec score = load(s + key);
        const Vec weight = exp2(far ? (score - reference) * scale : fma(score, splat(scale), splat(-offset)));
        store(s + key, weight);
        sums += weight;
      }
      float sum = sum_[i] * alpha_[i];
      for (int lane = 0; lane < lanes; ++lane) sum += sums[lane];
      sum_[i] = sum;
      maximum_[i] = maximum;
    }
  }

  // O = O * alpha + P V.
  template <class FetchV>
  __attribute__((noinline)) void add_values(int first_row, int head, const Rows& rows,
                                            FetchV& fetch_v) const {
    for (int row = first_row; row < first_row + padded_; row += rows_at_once)
      add_columns<0>(row, row == first_row, head * rows.head_stride, rows, fetch_v);
  }
  template <int first, class FetchV>
  FLASHJIT_FN void add_columns(int row, bool fetches, i64 offset, const Rows& rows, FetchV& fetch_v) const {
    constexpr int count = min(columns_at_once, vectors_v - first);
    float* const o = o_ + row * o_row + first * lanes;
    const float* const p = s_ + row * block_n;
    Vec sums[rows_at_once][count];
#pragma unroll
    for (int r = 0; r < rows_at_once; ++r)
#pragma unroll
      for (int c = 0; c < count; ++c) sums[r][c] = load(o + r * o_row + c * lanes) * alpha_[row + r];
    for (int key = 0; key < rows.count; ++key) {
      if (first == 0 && fetches) fetch_v.some(1);
      const Element* const row_of_v = rows.key[key] + offset;
      Vec v[count];
#pragma unroll
      for (int c = 0; c < count; ++c) v[c] = load_columns<head_dim_v>(row_of_v, (first + c) * lanes);
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
        const Vec weight = splat(p[r * block_n + key]);
#pragma unroll
        for (int c = 0; c < count; ++c) sums[r][c] = fma(weight, v[c], sums[r][c]);
      }
    }
#pragma unroll
    for (int r = 0; r < rows_at_once; ++r)
#pragma unroll
      for (int c = 0; c < count; ++c) store(o + r * o_row + c * lanes, sums[r][c]);
    if constexpr (first + count < vectors_v) add_columns<first + count>(row, false, offset, rows, fetch_v);
  }
  // The same without terms of weight 0, so that NaN in V reaches only rows that see it.
  __attribute__((noinline)) void add_seen_values(int first_row, int head, const Rows& rows) const {
    for (int i = first_row; i < first_row + rows_; ++i) {
      float* const o = o_ + i * o_row;
      for (int c = 0; c < o_row; c += lanes) store(o + c, load(o + c) * alpha_[i]);
      for (int key = 0; key < rows.count; ++key) {
        const float weight = s_[i * block_n + key];
        if (weight == 0) continue;
        const Element* const v = rows.key[key] + head * rows.head_stride;
        for (int c = 0; c < o_row; c += lanes)
          store(o + c, fma(splat(weight), load_columns<head_dim_v>(v, c), load(o + c)));
      }
    }
  }
};

// A part of a sequence's keys: whole blocks, dealt out evenly.
FLASHJIT_FN Span decode_part(int seqlen_k, int block_n, int part, int parts) {
  const i64 blocks = ceil_div(seqlen_k, block_n);
  return {static_cast<int>(blocks * part / parts) * block_n,
          min(static_cast<int>(blocks * (part + 1) / parts) * block_n, seqlen_k)};
}

// Items [begin, end) of batch * ceil(num_heads_kv / heads_at_once) * parts.
template <class Spec, class Config>
FLASHJIT_FN void decode(const CpuDecodeParams& p, i64 begin, i64 end, void* scratch) {
  const DenormalsAreZeros mode;
  const int group = p.num_heads_q / p.num_heads_kv, head_tiles = ceil_div(p.num_heads_kv, p.heads_at_once);
  for (i64 item = begin; item < end; ++item) {
    const int part = static_cast<int>(item % p.parts);
    const i64 index = item / p.parts;
    const int head_kv = static_cast<int>(index % head_tiles) * p.heads_at_once;
    const int heads = min(p.heads_at_once, p.num_heads_kv - head_kv);
    const Problem problem =
        decode_problem<Spec::varlen>(p, static_cast<int>(index / head_tiles), head_kv * group);
    const int group_rows = problem.rows * group;
    // Floats of one part and head: O, maxima, sums.
    const i64 floats = i64{p.seqlen_q} * group * (Spec::head_dim_v + 2);
    float* const parts = p.partials + index * p.parts * p.heads_at_once * floats;
    const Span keys = decode_part(problem.seqlen_k, Config::block_n, part, p.parts);
    const auto each_tile = [&](auto body) __attribute__((always_inline)) {
      for (int position = 0; position < problem.rows; position += p.positions_at_once)
        body(DecodeTile<Spec, Config>(
            p, problem, heads, {position, min(position + p.positions_at_once, problem.rows)}, scratch));
    };
    each_tile([&](DecodeTile<Spec, Config> tile) __attribute__((always_inline)) {
      tile.run(keys);
      if (p.parts == 1)
        tile.write_rows();
      else
        tile.leave(parts + part * p.heads_at_once * floats, floats, group_rows);
    });
    if (p.parts == 1 ||
        __atomic_add_fetch(p.arrived + index, 1u, __ATOMIC_ACQ_REL) != static_cast<u32>(p.parts))
      continue;
    each_tile([&](DecodeTile<Spec, Config> tile) __attribute__((always_inline)) {
      for (int other = 0; other < p.parts; ++other)
        tile.merge(parts + other * p.heads_at_once * floats, floats, group_rows, other == 0);
      tile.write_rows();
    });
  }
}

}  // namespace flashjit::device
