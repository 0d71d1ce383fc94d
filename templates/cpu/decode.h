// Decode on a CPU: a few query rows of each batch entry against a long cache (split-KV: FlashDecoding, Dao et
// al. 2023). Memory bounds it. An item is a part of a batch entry's keys, for some key/value heads and all
// query heads of their groups, so K and V are read once. Keys are not packed: scores are dot products of rows
// as they lie in memory. A block's keys are walked twice, for the scores and for the product with V. Both
// walks fetch rows some keys ahead, a cache line at a time between multiply-adds: the processor then computes
// while memory works.
//
// With batch_invariant the keys, the row and the target alone decide the arithmetic of a row of finite
// numbers:
// - Parts begin at fixed keys. A tile merges them in their order, whether one thread has them all or many.
// - In a part, blocks and the lanes of vectors begin at fixed keys, and columns and rows never mix.
// - Blocks and parts that a row does not see change nothing in it: where they would make -0 of 0 or 0 of -0,
//   the output has 0.
#pragma once

#include "cpu/row_products.h"
#include "shared/decode_cpu_params.h"
#include "shared/decode_layout.h"
#include "shared/kv_scale_params.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct DecodeCpuSpec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using Offsets = NoOffsets;
  using o_dtype = void;
  using kv_dtype = void;
  static constexpr bool lse = true, varlen = false, paged = false, batch_invariant = false;
};

template <class Spec, class Config>
class DecodeTile {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using KvElement = typename OutputElement<typename Spec::kv_dtype, Element>::type;
  static constexpr bool has_scales = is_quantised<KvElement>, converts = !__is_same(KvElement, Element);
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using Sinks = typename Spec::Sinks;

  static constexpr int rows_at_once = decode_rows_at_once, keys_at_once = device::keys_at_once<rows_at_once>;
  static constexpr int values_at_once = 16;  // keys before the next head's turn at V
  static constexpr int load_vectors = vectors_of_load<KvElement>, load_width = load_vectors * lanes;
  static constexpr int q_row = round_up(head_dim, load_width), o_row = round_up(head_dim_v, load_width);

  static constexpr int fetched_bytes = 32768;  // of K or V on their way

  const CpuDecodeParams& p_;
  const Problem& problem_;  // of the first head
  const int group_;         // query heads of a key/value head
  const int heads_;         // key/value heads of the tile
  // Rows [first_row_, first_row_ + rows_) of each key/value head's group: row r is position r / group_ of its
  // query head r % group_.
  const int first_row_, rows_;
  const Span positions_;  // of these rows
  const int padded_;      // rows_ in whole rows_at_once
  const int ahead_;       // rows of K and V are fetched so many keys ahead
  float *q_, *s_;         // of heads_ * padded_ rows, as all that follow
  struct State {
    float *o, *maximum, *sums;  // a row has `lanes` sums
  };
  State state_;
  State earlier_;  // with batch_invariant: of the parts before
  // The first head's rows of K and V of this block and of the next one, [4][block_n], in the order of the
  // walk. The last row stands in for keys beyond a block's end.
  const KvElement** rows_of_;
  const float** scales_of_;  // their scales, likewise

 public:
  // `rows` of each key/value head's group.
  FLASHJIT_FN DecodeTile(const CpuDecodeParams& p, const Problem& problem, int heads, Span rows,
                         void* scratch)
      : p_(p),
        problem_(problem),
        group_(p.num_heads_q / p.num_heads_kv),
        heads_(heads),
        first_row_(rows.begin),
        rows_(rows.size()),
        positions_{rows.begin / group_, (rows.end - 1) / group_ + 1},
        padded_(round_up(rows_, rows_at_once)),
        ahead_(max(values_at_once,
                   min(fetched_bytes / static_cast<int>(heads * head_dim * sizeof(KvElement)), block_n))) {
    float* room = static_cast<float*>(scratch);
    const auto take = [&](int floats) __attribute__((always_inline)) {
      float* const taken = room;
      room += floats;
      return taken;
    };
    constexpr int maxima = round_up(block_m, 16), sums = block_m * 16;
    q_ = take(block_m * q_row);
    state_.o = take(block_m * o_row);
    s_ = take(block_m * block_n);
    state_.maximum = take(maxima);
    state_.sums = take(sums);
    if constexpr (Spec::batch_invariant) earlier_ = {take(block_m * o_row), take(maxima), take(sums)};
    rows_of_ = reinterpret_cast<const KvElement**>(room);
    if constexpr (has_scales) scales_of_ = reinterpret_cast<const float**>(rows_of_ + 4 * block_n);
  }

  // Computes the rows' state over the keys that they see in `keys`. With batch_invariant `keys` begin where a
  // part does, and may be several parts.
  FLASHJIT_FN void run(Span keys) {
    load_rows();
    Mask mask(p_, problem_);
    see_heads(mask, {problem_.head_q, problem_.head_q + heads_ * group_});
    if constexpr (!Spec::batch_invariant) {
      run_part(mask, keys);
    } else {
      constexpr int size = cpu_fixed_part_keys;
      const Span seen = intersect(keys, searched_hull(mask, positions_));
      const int first = max(seen.begin, 0) / size * size;
      for (int begin = first; begin == first || begin < seen.end; begin += size) {
        run_part(mask, intersect(keys, {begin, begin + size}));
        if (begin > first)
          each_row([&](int i, int, int) __attribute__((always_inline)) {
            add_part(earlier_, i, state_.o + i * o_row, state_.maximum[i], sum_of(state_, i));
          });
        else
          swap_states();
      }
      swap_states();
    }
  }

  // Stores the rows' partial results: for each head O, maxima and sums of the group's rows.
  FLASHJIT_FN void leave(float* part, i64 group_rows) const {
    each_row([&](int i, int head, i64 row) __attribute__((always_inline)) {
      float* const to = part + head * p_.head_floats;
      for (int c = 0; c < head_dim_v; c += 8)
        store8(to + row * head_dim_v + c, load8(state_.o + i * o_row + c));
      to[group_rows * head_dim_v + row] = state_.maximum[i];
      to[group_rows * (head_dim_v + 1) + row] = sum_of(state_, i);
    });
  }
  // Adds the partial results of a part to the rows' state, which clear() makes that of no keys.
  FLASHJIT_FN void merge(const float* part, i64 group_rows) const {
    each_row([&](int i, int head, i64 row) __attribute__((always_inline)) {
      const float* const from = part + head * p_.head_floats;
      add_part(state_, i, from + row * head_dim_v, from[group_rows * head_dim_v + row],
               from[group_rows * (head_dim_v + 1) + row]);
    });
  }
  FLASHJIT_FN void clear() const {
    for (int i = 0; i < heads_ * padded_; ++i) {
      for (int c = 0; c < o_row; c += lanes) store(state_.o + i * o_row + c, Vec{});
      state_.maximum[i] = minus_infinity;
      store(state_.sums + i * lanes, Vec{});
    }
  }
  // Not inlined: all rows are written by the same instructions.
  __attribute__((noinline)) void write_rows() const {
    each_row([&](int i, int head, int row) __attribute__((always_inline)) {
      const int position = row / group_, head_q = head * group_ + row % group_;
      OElement* const to = static_cast<OElement*>(p_.o.data) + problem_.q_offset(p_.o) +
                           position * p_.o.row_stride + head_q * p_.o.head_stride;
      const float sum = sum_of(state_, i);
      const bool empty = sum == 0;
      float inverse = empty ? 0 : 1 / sum, lse;
      if constexpr (Sinks::exist) {
        alignas(64) float top[lanes] = {state_.maximum[i]}, all[lanes] = {sum},
                          sinks[lanes] = {Sinks::log2(p_, problem_.head_q + head_q)};
        Sinks::add(lanes, Score::scale_log2(p_), top, all, sinks);
        inverse = empty ? 0 : 1 / all[0];
        lse = top[0];
      } else if constexpr (Spec::lse) {
        lse =
            empty ? minus_infinity : state_.maximum[i] * (Score::scale_log2(p_) * ln_2) + log(splat(sum))[0];
      }
      for (int c = 0; c < head_dim_v; c += 8) {
        Vec8 o = empty ? Vec8{} : load8(state_.o + i * o_row + c) * inverse;
        if constexpr (Spec::batch_invariant) o += 0.0f;  // 0 of -0
        store8(to + c, o);
      }
      if constexpr (Spec::lse)
        static_cast<float*>(p_.lse.data)[problem_.q_offset(p_.lse) + position * p_.lse.row_stride +
                                         head_q * p_.lse.head_stride] = lse;
    });
  }

 private:
  // A row's sum after run().
  FLASHJIT_FN static float& sum_of(const State& state, int row) { return state.sums[row * lanes]; }

  FLASHJIT_FN void swap_states() {
    const State state = state_;
    state_ = earlier_;
    earlier_ = state;
  }

  // Adds the results over later keys to row i of a state. Not inlined, as write_rows().
  __attribute__((noinline)) void add_part(const State& to, int i, const float* later, float maximum,
                                          float sum) const {
    if (maximum == minus_infinity && sum == 0) return;  // of no keys
    const float before = to.maximum[i], top = maximum > before ? maximum : before;
    const float reference = top == minus_infinity ? 0 : top;
    const float by = exp2(splat((before - reference) * Score::scale_log2(p_)))[0];
    const float by_later = exp2(splat((maximum - reference) * Score::scale_log2(p_)))[0];
    to.maximum[i] = top;
    sum_of(to, i) = __builtin_elementwise_fma(sum, by_later, sum_of(to, i) * by);
    for (float* o = to.o + i * o_row; o < to.o + i * o_row + head_dim_v; o += 8, later += 8)
      store8(o, __builtin_elementwise_fma(load8(later), Vec8{} + by_later, load8(o) * by));
  }

  // Computes the rows' state over the keys that they see in `keys`.
  FLASHJIT_FN void run_part(const Mask& mask, Span keys) {
    clear();
    Span within = intersect(keys, searched_hull(mask, positions_));
    // Lanes begin at fixed keys. Those before the hull are masked.
    if constexpr (Spec::batch_invariant) within.begin = within.begin / lanes * lanes;
    BlockWalk<Keys, Mask> walk(mask, positions_, block_n, keys);
    Block block, next;
    const auto keys_of = [&](const Block& b) __attribute__((always_inline)) {
      return intersect(within, block_span(b.index, block_n));
    };
    bool more = walk.next(block);
    if (more) find_rows(keys_of(block), 0);
    while (more) {
      const Span here = keys_of(block);
      more = walk.next(next);
      Span coming = more ? keys_of(next) : Span{};
      if (coming.empty()) coming = {max(here.begin, here.end - 1), here.end};
      find_rows(coming, 2 * block_n);
      if (!here.empty()) {
        const bool whole = mask.whole(positions_, here);
        take_scores(here.size());
        for (int head = 0; head < heads_; ++head) {
          float* const scores = s_ + head * padded_ * block_n;
          if constexpr (has_scales)
            scale_by_key<false>(scores, here.size(), 0, head * with_kv_scales(p_).k_scale.head_stride);
          if constexpr (Score::changes) modify_scores(scores, here, head);
          if (!whole) apply_mask(mask, scores, here, head);
          softmax(head * padded_, here.size());
          if constexpr (has_scales)
            scale_by_key<true>(scores, here.size(), block_n, head * with_kv_scales(p_).v_scale.head_stride);
        }
        if (whole)
          add_values(here.size());
        else
          add_seen_values(here.size());
      }
      __builtin_memcpy(rows_of_, rows_of_ + 2 * block_n, 2 * block_n * sizeof *rows_of_);
      if constexpr (has_scales)
        __builtin_memcpy(scales_of_, scales_of_ + 2 * block_n, 2 * block_n * sizeof *scales_of_);
      block = next;
    }
    for (int row = 0; row < heads_ * padded_; ++row) {
      for (int c = 0; c < o_row; c += load_width) order_columns<KvElement>(state_.o + row * o_row + c);
      for (int lane = 1; lane < lanes; ++lane) sum_of(state_, row) += state_.sums[row * lanes + lane];
    }
  }

  // body(row of the tile, its key/value head, its row of that head's group)
  template <class Body>
  FLASHJIT_FN void each_row(Body body) const {
    for (int head = 0; head < heads_; ++head)
      for (int i = 0; i < rows_; ++i) body(head * padded_ + i, head, first_row_ + i);
  }

  FLASHJIT_FN void load_rows() const {
    for (int head = 0; head < heads_; ++head)
      for (int i = 0; i < padded_; ++i) {
        const int row = first_row_ + min(i, rows_ - 1);  // padding repeats the last row
        const int at = head * padded_ + i;
        const Element* const from = static_cast<const Element*>(p_.q.data) + problem_.q_offset(p_.q) +
                                    row / group_ * p_.q.row_stride +
                                    (head * group_ + row % group_) * p_.q.head_stride;
        if constexpr (converts) {  // in the order of K's columns
          for (int c = 0; c < q_row; c += 8)
            store8(q_ + at * q_row + c, c < head_dim ? load8(from + c) : Vec8{});
        } else {
          for (int c = 0; c < q_row; c += load_width) {
            Vec columns[load_vectors];
            load_columns<head_dim>(from, c, columns);
            for (int i = 0; i < load_vectors; ++i) store(q_ + at * q_row + c + i * lanes, columns[i]);
          }
        }
      }
  }

  // Finds the first head's rows of K of `keys`, in rows_of_ from `at` on, and block_n later those of V.
  FLASHJIT_FN void find_rows(Span keys, int at) const {
    const KvElement* const k = static_cast<const KvElement*>(p_.k.data) + problem_.head_kv * p_.k.head_stride;
    const KvElement* const v = static_cast<const KvElement*>(p_.v.data) + problem_.head_kv * p_.v.head_stride;
    const KvElement** const rows = rows_of_ + at;
    const auto set = [&](int i, i64 page, int row) __attribute__((always_inline)) {
      rows[i] = k + page * p_.k.batch_stride + row * p_.k.row_stride;
      rows[block_n + i] = v + page * p_.v.batch_stride + row * p_.v.row_stride;
      if constexpr (has_scales) {
        const auto scale = [&](const KvScales& scales) __attribute__((always_inline)) {
          return scales.data + page * scales.batch_stride + row * scales.row_stride +
                 problem_.head_kv * scales.head_stride;
        };
        scales_of_[at + i] = scale(with_kv_scales(p_).k_scale);
        scales_of_[at + block_n + i] = scale(with_kv_scales(p_).v_scale);
      }
    };
    int count = 0;
    if constexpr (Spec::paged) {
      const int size = p_.pages.page_size;
      const int* const table = p_.pages.table + problem_.batch * p_.pages.table_stride;
      for (int key = keys.begin; key < keys.end;) {
        const i64 page = min(max(table[key / size], 0), p_.pages.num_pages - 1);
        for (int row = key % size; row < size && key < keys.end; ++row, ++key) set(count++, page, row);
      }
    } else {
      for (int key = keys.begin; key < keys.end; ++key) set(count++, problem_.batch, key);
    }
    for (int i = count; count > 0 && i < block_n; ++i) {
      rows[i] = rows[count - 1];
      rows[block_n + i] = rows[block_n + count - 1];
    }
  }

  // S = Q K^T: s_[row][key]. Heads take turns, because their rows of a key lie side by side in memory.
  __attribute__((noinline)) void take_scores(int keys) const {
    for (int key = 0; key < keys; key += keys_at_once)
      for (int head = 0; head < heads_; ++head)
        for (int i = 0; i < padded_; i += rows_at_once)
          scores_of(head * padded_ + i, key, i == 0 ? ahead_ : 0, head * p_.k.head_stride);
  }
  // Fetches the rows `ahead` keys on.
  FLASHJIT_FN void scores_of(int row, int key, int ahead, i64 offset) const {
    const KvElement *k[keys_at_once], *next[keys_at_once];
#pragma unroll
    for (int j = 0; j < keys_at_once; ++j) {
      k[j] = rows_of_[key + j] + offset;
      next[j] = rows_of_[key + j + ahead] + offset;
    }
    const Vec scores = dot_products<rows_at_once, head_dim>(
        q_ + row * q_row, q_row, k, next,
        [](int r, int j) __attribute__((always_inline)) { return r * keys_at_once + j; });
#pragma unroll
    for (int r = 0; r < rows_at_once; ++r)
      __builtin_memcpy(s_ + (row + r) * block_n + key,
                       reinterpret_cast<const char*>(&scores) + r * keys_at_once * sizeof(float),
                       keys_at_once * sizeof(float));
  }

  // Multiplies scores, or weights, by the scales of their keys, which stand in scales_of_ from `at` on. A
  // weight of 0 stays 0: the key need not be seen, and its scale may be NaN.
  template <bool weights>
  __attribute__((noinline)) void scale_by_key(float* s, int keys, int at, i64 offset) const {
    alignas(64) float scales[block_n];
    for (int key = 0; key < block_n; ++key) scales[key] = key < keys ? scales_of_[at + key][offset] : 0;
    for (int i = 0; i < rows_; ++i, s += block_n)
      for (int key = 0; key < keys; key += lanes) {
        const Vec values = load(s + key), scaled = values * load(scales + key);
        store(s + key, weights ? select(values == 0, values, scaled) : scaled);
      }
  }

  // The query head of row i of a key/value head.
  FLASHJIT_FN int head_of(int i, int head) const {
    return problem_.head_q + head * group_ + (first_row_ + i) % group_;
  }
  __attribute__((noinline)) void modify_scores(float* s, Span keys, int head) const {
    for (int i = 0; i < rows_; ++i, s += block_n)
      Score::modify_keys(p_, problem_, s, (first_row_ + i) / group_, head_of(i, head), keys);
  }

  __attribute__((noinline)) void apply_mask(const Mask& mask, float* s, Span keys,
                                            [[maybe_unused]] int head) const {
    [[maybe_unused]] auto tile = mask.tile();
    for (int i = 0; i < rows_; ++i, s += block_n) {
      const int row = (first_row_ + i) / group_;
      if constexpr (has_formula<Mask>) {
        mask_keys(mask, s, row, head_of(i, head), keys, [&](const auto& other, float* scores) {
          auto of_other = other.tile();
          mask_row(other, of_other, row, scores, keys);
        });
      } else {
        mask_row(mask, tile, row, s, keys);
      }
    }
  }
  template <class AnyMask, class Tile>
  FLASHJIT_FN static void mask_row(const AnyMask& mask, Tile& tile, int row, float* s, Span keys) {
    if constexpr (AnyMask::row_intervals) {
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

  // Scores to weights, with the rows' state as in cpu/tile.h. O is rescaled where a row's maximum grows.
  __attribute__((noinline)) void softmax(int first_row, int keys) const {
    const float scale = Score::scale_log2(p_);
    for (int i = first_row; i < first_row + rows_; ++i) {
      float* const s = s_ + i * block_n;
      float* const sums = state_.sums + i * lanes;
      for (int key = keys; key < round_up(keys, lanes); ++key) s[key] = minus_infinity;
      Vec tops = load(s);
      for (int key = lanes; key < keys; key += lanes) tops = larger(load(s + key), tops);
      if (__builtin_reduce_or(tops > splat(state_.maximum[i]))) {
        const float before = state_.maximum[i], maximum = __builtin_reduce_max(tops);
        const float alpha = exp2(splat((before - maximum) * scale))[0];
        for (float* o = state_.o + i * o_row; o < state_.o + (i + 1) * o_row; o += lanes)
          store(o, load(o) * alpha);
        store(sums, load(sums) * alpha);
        state_.maximum[i] = maximum;
      }
      const float reference = state_.maximum[i] == minus_infinity ? 0 : state_.maximum[i];
      const Vec offset = splat(-reference * scale);
      // As in cpu/tile.h: rounded, a far offset may take weights beyond exp2.
      const auto weigh = [&](auto exponent) __attribute__((always_inline)) {
        Vec sum = load(sums);
        for (int key = 0; key < keys; key += lanes) {
          const Vec weight = exp2(exponent(load(s + key)));
          store(s + key, weight);
          sum += weight;
        }
        store(sums, sum);
      };
      if (__builtin_fabsf(reference * scale) > 65536)
        weigh([&](Vec score) __attribute__((always_inline)) { return (score - reference) * scale; });
      else
        weigh([&](Vec score) __attribute__((always_inline)) { return fma(score, splat(scale), offset); });
    }
  }

  // O += P V. Several heads take turns, as they do for the scores.
  __attribute__((noinline)) void add_values(int keys) const {
    const int step = heads_ > 1 ? values_at_once : block_n;
    for (int key = 0; key < keys; key += step)
      for (int head = 0; head < heads_; ++head) {
        const Span some{key, min(key + step, keys)};
        add_values_of<true>(head * padded_, some, head * p_.v.head_stride);
        for (int i = rows_at_once; i < padded_; i += rows_at_once)
          add_values_of<false>(head * padded_ + i, some, head * p_.v.head_stride);
      }
  }
  template <bool fetches>
  FLASHJIT_FN void add_values_of(int row, Span keys, i64 offset) const {
    const KvElement* const* const rows = rows_of_ + block_n + keys.begin;
    device::add_values<rows_at_once, head_dim_v, fetches>(
        Weights{s_ + row * block_n + keys.begin, block_n, 1}, keys.size(),
        [&](int key) __attribute__((always_inline)) { return rows[key] + offset; },
        [&](int key) __attribute__((always_inline)) { return rows[key + ahead_] + offset; },
        state_.o + row * o_row, o_row);
  }
  // The same without terms of weight 0, so that NaN in V reaches only rows that see it.
  __attribute__((noinline)) void add_seen_values(int keys) const {
    for (int head = 0; head < heads_; ++head)
      for (int i = head * padded_; i < head * padded_ + rows_; ++i)
        device::add_seen_values<head_dim_v>(
            Weights{s_, block_n, 1}, i, keys,
            [&](int key)
                __attribute__((always_inline)) { return rows_of_[block_n + key] + head * p_.v.head_stride; },
            state_.o + i * o_row);
  }
};

// Items [begin, end) of a launch.
template <class Spec, class Config>
FLASHJIT_FN void decode(const CpuDecodeParams& p, i64 begin, i64 end, void* scratch) {
  const DenormalsAreZeros mode;
  const int group = p.num_heads_q / p.num_heads_kv;
  for (i64 index = begin; index < end; ++index) {
    const CpuDecodeItem item(p, index);
    const int head_kv = item.head_tile * p.heads_at_once;
    const int heads = min(p.heads_at_once, p.num_heads_kv - head_kv);
    const Problem problem = decode_problem<Spec::varlen>(p, item.batch, head_kv * group);
    const int group_rows = problem.rows * group;
    const auto slot_of = [&](int part) __attribute__((always_inline)) {
      return p.partials + (item.slot + part) * p.slot_floats();
    };
    const Span keys = item.keys(p, problem.seqlen_k);
    const auto each_tile = [&](auto body) __attribute__((always_inline)) {
      for (int row = 0; row < group_rows; row += p.tile_rows)
        body(DecodeTile<Spec, Config>(p, problem, heads, {row, min(row + p.tile_rows, group_rows)}, scratch));
    };
    each_tile([&](DecodeTile<Spec, Config> tile) __attribute__((always_inline)) {
      tile.run(keys);
      if (item.parts == 1)
        tile.write_rows();
      else
        tile.leave(slot_of(item.part), group_rows);
    });
    u32* const arrived = p.arrived + i64{item.batch} * p.head_tiles() + item.head_tile;
    if (item.parts == 1 || __atomic_add_fetch(arrived, 1u, __ATOMIC_ACQ_REL) != static_cast<u32>(item.parts))
      continue;
    each_tile([&](DecodeTile<Spec, Config> tile) __attribute__((always_inline)) {
      tile.clear();
      for (int part = 0; part < item.parts; ++part) tile.merge(slot_of(part), group_rows);
      tile.write_rows();
    });
  }
}

}  // namespace flashjit::device
