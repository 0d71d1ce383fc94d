// A tile of the forward on a CPU: at most block_m query rows of one head, or of several heads that share K
// and V. It packs each block of K and V into scratch once, for all its rows; the block may stay there for the
// head's next tiles. Each unit of rows then computes scores, softmax and the product with V in turn (see
// tile.h).
#pragma once

#include "cpu/tile.h"
#include "shared/forward_cpu_params.h"
#include "shared/kv_scale_params.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct ForwardCpuSpec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using Offsets = NoOffsets;
  using o_dtype = void;
  using kv_dtype = void;
  static constexpr KvScale kv_scale = KvScale::tensor;
  static constexpr bool lse = true, varlen = false, paged = false, dropout = false, batch_invariant = false;
  static constexpr bool gathered = false;
};

// The rows of K and V of a problem.
template <class Spec>
struct StridedKeys {
  using Element = typename Spec::Element;
  StridedRows<Element> k, v;
  FLASHJIT_FN StridedKeys(const CpuForwardParams& params, const Problem& problem)
      : k{static_cast<const Element*>(params.k.data) + problem.k_offset(params.k), params.k.row_stride},
        v{static_cast<const Element*>(params.v.data) + problem.k_offset(params.v), params.v.row_stride} {}
  // The rows of a group of keys. They may lie in `room`, of K or of V, not both.
  struct Group {
    StridedRows<Element> of_k, of_v;
    FLASHJIT_FN const auto& k(float* /*room*/) const { return of_k; }
    FLASHJIT_FN const auto& v(float* /*room*/) const { return of_v; }
  };
  FLASHJIT_FN Group group(int key, int) const { return {{k[key], k.stride}, {v[key], v.stride}}; }
  // The rows of at most `most` keys, and of later ones, as they are stored.
  template <int most>
  FLASHJIT_FN Group stored(Span keys, int /*end*/) const {
    return group(keys.begin, keys.size());
  }
};
template <class Spec>
struct PagedKeys;  // cpu/paged_keys.h
template <class Spec>
struct PairsOfKeys;  // cpu/gathered_keys.h
template <class Spec>
struct QuantisedKeys;  // cpu/quantised_keys.h

template <class Spec, class Config>
struct ForwardTile {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using Sinks = typename Spec::Sinks;
  using Products = typename Config::Products;
  using Operand = typename Products::Operand;
  static constexpr bool quantised = is_quantised<typename Spec::kv_dtype>;
  using StoredKeys = typename Choose<Spec::gathered, PairsOfKeys<Spec>, StridedKeys<Spec>>::type;
  using KeyRows = typename Choose<quantised, QuantisedKeys<Spec>,
                                  typename Choose<Spec::paged, PagedKeys<Spec>, StoredKeys>::type>::type;
  static constexpr int most_rows = round_up(block_m, Products::row_step);
  static constexpr int q_row = Products::q_row, o_row = Products::o_rows;
  static constexpr int keys_whole = Products::keys_whole;
  static constexpr int step_n = min(Products::step_n, round_up(block_n, keys_whole));
  static constexpr int s_block = step_n * Products::most_rows;

  // Scratch, in this order. Arrays over rows hold one unit after the other.
  PackedHead* head;
  Operand* q;                // [q_row][unit_rows], in the layout of the products
  float* o;                  // [o_row][unit_rows]
  float* state;              // RowState
  float* s;                  // [score_blocks][step_n][unit_rows]
  float* alpha;              // [unit_rows]
  u32 *multiplier, *addend;  // one for each row; with dropout only
  u32* column;               // [block_n], rounded up to whole groups; with dropout only
  float* room;               // [cpu_room()]
  char* blocks;              // [head->blocks]: PackedBlock, K [k_block], V [v_block]

  FLASHJIT_FN explicit ForwardTile(void* scratch) {
    head = static_cast<PackedHead*>(scratch);
    q = reinterpret_cast<Operand*>(head + 1);
    o = reinterpret_cast<float*>(q + most_rows * q_row);
    state = o + most_rows * o_row;
    s = state + most_rows * cpu_row_state;
    alpha = s + Products::score_blocks * s_block;
    multiplier = reinterpret_cast<u32*>(alpha + Products::most_rows);
    addend = multiplier + most_rows;
    column = addend + most_rows;
    room = reinterpret_cast<float*>(Spec::dropout ? column + round_up(block_n, keys_whole) : multiplier);
    blocks = reinterpret_cast<char*>(room + cpu_room(head_dim, head_dim_v));
  }
  FLASHJIT_FN PackedBlock& packed_block(int index) const {
    constexpr i64 bytes = sizeof(PackedBlock) + sizeof(Operand) * (Products::k_block + Products::v_block);
    return *reinterpret_cast<PackedBlock*>(blocks + index % head->blocks * bytes);
  }
  FLASHJIT_FN static Operand* k_of(PackedBlock& block) { return reinterpret_cast<Operand*>(&block + 1); }
  FLASHJIT_FN static Operand* v_of(PackedBlock& block) { return k_of(block) + Products::k_block; }

  // Discards packed blocks that belong to another head.
  FLASHJIT_FN void keep_blocks_of(const CpuForwardParams& params, const Problem& problem) const {
    const i64 number = static_cast<i64>(problem.batch) * params.num_heads_kv + problem.head_kv;
    if (head->head == number) return;
    head->head = number;
    for (int i = 0; i < head->blocks; ++i) packed_block(i).index = -1;
  }
  // Packs the block's groups that hold any of `keys`, unless they are packed already. Returns whether V is
  // finite in these groups. Other groups do not count: otherwise the result would depend on earlier tiles.
  __attribute__((noinline)) bool pack(const CpuForwardParams& params, const Problem& problem, Span keys,
                                      PackedBlock& block) const {
    const int first = block.index * block_n;
    const Span groups = {(keys.begin - first) / packed_group, (keys.end - 1 - first) / packed_group + 1};
    const u32 wanted = interval_bits(groups, 0);
    const KeyRows rows(params, problem);
    for (int i = groups.begin; i < groups.end; ++i) {
      if (block.packed >> i & 1) continue;
      const int at = i * packed_group, key = first + at;
      const int count = min(packed_group, min(block_n - at, problem.seqlen_k - key));
      const auto group = rows.group(key, count);
      Products::pack_k(group.k(room), count, k_of(block) + at * Products::k_key);
      if (!Products::pack_v(group.v(room), count, v_of(block) + at * Products::v_key))
        block.nonfinite |= 1u << i;
    }
    block.packed |= wanted;
    return !(block.nonfinite & wanted);
  }

  // Part `part` of the keys of a tile, of params.key_parts parts.
  struct Work {
    Mask mask;
    Span valid, positions;  // the tile's valid rows, their positions
    Span ours, within;      // the part; its keys that any of the rows may see
    int unit_rows;          // of the first unit
    __attribute__((noinline)) Work(const CpuForwardParams& params, const Problem& problem, Span tile,
                                   int part)
        : mask(params, problem),
          valid(valid_rows(params, problem, tile)),
          positions(ForwardTile::positions(params, valid)),
          unit_rows(rows_of_unit(params, tile, tile.begin)) {
      see_heads(mask, {problem.head_q, problem.head_q + params.packed_heads});
      const Span hull = searched_hull(mask, positions);
      ours = part_of(hull, part, params.key_parts);
      within = intersect(hull, ours);
    }
  };

  // Computes attention of `rows` over part `part` of their keys, of params.key_parts parts. `rows` are at
  // most block_m rows of one problem; some or all of them may be padding.
  FLASHJIT_FN void run(const CpuForwardParams& params, const Problem& problem, Span rows, int part) const {
    const Work work(params, problem, rows, part);
    keep_blocks_of(params, problem);
    const float scale = Score::scale_log2(params);
    load_rows(params, problem, rows);
    Products products;
    if constexpr (Spec::dropout) make_row_words(params, problem, rows);

    BlockWalk<Keys, Mask> walk(work.mask, work.positions, block_n, work.ours);
    OpenBlock open[2];
    const auto open_block = [&](ScoreBlock& scores) {  // opens the next block that has kept keys
      for (Block block; scores.kept.empty() && walk.next(block);) {
        const Span keys = intersect(work.within, block_span(block.index, block_n));
        if (keys.empty()) continue;
        PackedBlock& packed = packed_block(block.index);
        if (packed.index != block.index) packed = {block.index, 0, 0};
        const bool finite = pack(params, problem, keys, packed);
        scores.block = scores.block == open ? open + 1 : open;
        *scores.block = {keys, block.index * block_n, finite, k_of(packed), v_of(packed)};
        scores.row = scores.unit_rows = scores.first = 0;
        scores.list = -1;
        find_scores(params, work.mask, rows, work.valid, scores);
      }
    };
    // With Products::ahead the scores of the next step are computed during the softmax of this step. At the
    // end of a block these are scores of the next block, unless that block takes the place of this block in
    // scratch.
    const bool opens_ahead = Products::ahead && head->blocks > 1;
    ScoreBlock scores[2] = {{.block = open, .s = s}, {}};
    open_block(scores[0]);
    take_scores(products, scores[0]);
    products.finish();
    int words_of = -1;
    for (int index = 0; !scores[index].kept.empty(); index ^= 1) {
      // A reference: a copy of values that were just written would wait for all stores before it.
      const ScoreBlock& now = scores[index];
      ScoreBlock& next = scores[index ^ 1];
      next = now;
      next.first += step_n;
      next.s = s + (now.s - s + s_block) % (Products::score_blocks * s_block);
      find_scores(params, work.mask, rows, work.valid, next);
      if (opens_ahead) open_block(next);
      if (Products::ahead) take_scores(products, next);
      const int row = now.row, unit_rows = now.unit_rows, before = now.block->first + now.first;
      const Span seen = {now.kept.begin - before, now.kept.end - before};  // kept, from the step's first key
      const bool whole = edit_scores(params, problem, work.mask, unit_rows, now.s + seen.begin * unit_rows,
                                     now.rows, now.positions, now.kept);
      leave_out(unit_rows, now.s, now.used.begin, seen.begin);
      leave_out(unit_rows, now.s, seen.end, now.used.end);
      float* const p = now.s + now.used.begin * unit_rows;
      const auto dropout = [&] {
        if constexpr (Spec::dropout) {
          if (now.block->first != words_of) make_column_words(params, problem, now.block->keys);
          words_of = now.block->first;
          return Drop{multiplier + row, addend + row, column + now.first + now.used.begin,
                      params.dropout.below};
        } else {
          return KeepAll{};
        }
      }();
      const bool begun = softmax(unit_rows, p, scale, row_state(state, row, unit_rows), alpha,
                                 now.used.size(), dropout, products);
      products.finish();
      const bool weighted = now.block->finite || (whole && now.used.size() == seen.size());
      float* const sums = o + row * o_row;
      const Operand* const values = now.block->v + now.first * Products::v_key;
      products.add_product(unit_rows, values, p, begun ? alpha : nullptr, sums, weighted ? now.used : Span{});
      if (!weighted) Products::add_weighted(unit_rows, values, p, sums, now.used);
      const bool opens = !opens_ahead && next.kept.empty();
      if (opens) {
        products.finish();
        open_block(next);
      }
      if (opens || !Products::ahead) {
        take_scores(products, next);
        products.finish();
      }
    }
    products.finish();
  }

  // Makes the scores that the softmax takes of products: scales, formulas, masks. s: [key][unit_rows] for
  // `keys`. Returns whether the rows keep all of the keys.
  __attribute__((noinline)) static bool edit_scores(const CpuForwardParams& params, const Problem& problem,
                                                    const Mask& mask, int unit_rows, float* s, Span rows,
                                                    Span positions, Span keys) {
    const bool whole = mask.whole(positions, keys);
    if constexpr (quantised) KeyRows(params, problem).scale_scores(unit_rows, s, keys);
    if constexpr (Score::changes)
      Score::modify_rows(params, problem, unit_rows, s, rows, keys, params.packed_heads);
    if (!whole) {
      if constexpr (has_formula<Mask>)
        mask_rows(unit_rows, mask, s, rows, keys, problem.head_q, params.packed_heads);
      else
        apply_mask(unit_rows, mask, s, rows, keys, params.packed_heads);
    }
    return whole;
  }

  // A packed block and its keys that the tile's rows may see. Two are in use at a time.
  struct OpenBlock {
    Span keys;
    int first;    // the block's first key
    bool finite;  // V, as returned by pack()
    const Operand *k, *v;
  };
  // A step: a unit of the tile's rows and at most step_n of a block's keys.
  struct ScoreBlock {
    OpenBlock* block;
    int row, unit_rows;          // the unit's first row in the tile, its rows; unit_rows 0: not looked up
    Span rows, positions, hull;  // the unit's valid rows, their positions, the keys they may see
    int list;                    // the mask's list that the unit's rows share
    u32 touched;                 // bit i: these rows may see keys of the block's step i
    int first;                   // the step's first key, from the block's first
    Span kept, used;             // the step's keys that the rows may see; in whole groups, from its first key
    float* s;
  };
  // Moves `scores` on to the next step of its block that has kept keys, or leaves it there if the present
  // step has some. scores.kept is empty if no such step is left. A unit takes all its steps before the next
  // unit begins, so that its O stays in the first-level cache.
  __attribute__((noinline)) void find_scores(const CpuForwardParams& params, const Mask& mask, Span tile,
                                             Span valid, ScoreBlock& scores) const {
    const Span keys = scores.block->keys;
    const int block = scores.block->first;
    for (;; scores.row += scores.unit_rows, scores.unit_rows = 0, scores.first = 0) {
      if (scores.unit_rows == 0) {
        const int row = tile.begin + scores.row;
        if (row >= valid.end) break;
        scores.unit_rows = rows_of_unit(params, tile, row);
        scores.rows = {row, min(row + scores.unit_rows, valid.end)};
        scores.positions = positions(params, scores.rows);
        scores.hull = intersect(mask.hull(Keys{}, scores.positions), keys);
        if constexpr (!Mask::row_intervals) touch(params, mask, valid, keys, scores);
      }
      for (; block + scores.first < keys.end; scores.first += step_n) {
        const int from = block + scores.first;
        scores.kept = intersect(scores.hull, {from, from + step_n});
        if (scores.kept.empty() || (!Mask::row_intervals && !(scores.touched >> scores.first / step_n & 1)))
          continue;
        scores.used = {(scores.kept.begin - from) / keys_whole * keys_whole,
                       round_up(scores.kept.end - from, keys_whole)};
        return;
      }
    }
    scores.kept = {};
  }
  // Finds the steps that a unit's rows may see. The steps of a list are looked up once.
  FLASHJIT_FN static void touch(const CpuForwardParams& params, const Mask& mask, Span valid, Span keys,
                                ScoreBlock& scores) {
    Span rows = scores.positions;
    if constexpr (whole_lists) {
      const int list = rows.begin / Mask::list_rows;
      if (list == scores.list) return;
      scores.list = list;
      rows = intersect(positions(params, valid), block_span(list, Mask::list_rows));
    }
    scores.touched = 0;
    for (int from = keys.begin / block_n * block_n, i = 0; from < keys.end; from += step_n, ++i)
      if (touches(mask, rows, intersect(keys, {from, from + step_n}))) scores.touched |= 1u << i;
  }
  __attribute__((noinline)) void take_scores(Products& products, const ScoreBlock& scores) const {
    if (scores.kept.empty()) return;
    products.scores(scores.unit_rows, scores.block->k + scores.first * Products::k_key,
                    q + scores.row * q_row, scores.s, scores.used);
  }

  // Packs Q^T, by way of `room`, and resets the state of the softmax. Lanes beyond the tile's last row keep
  // the data of an earlier tile; their results are not written. O is undefined until a unit's first product.
  __attribute__((noinline)) void load_rows(const CpuForwardParams& params, const Problem& problem,
                                           Span tile) const {
    const Element* const rows = static_cast<const Element*>(params.q.data) + problem.q_offset(params.q);
    for_each_unit(params, tile, [&](int row, int unit_rows) {
      const int first = tile.begin + row;
      Products::pack_q(unit_rows,
                       UnitRows<Element>{rows, params.q.row_stride, params.q.head_stride, params.packed_heads,
                                         first, tile.end - first},
                       room, q + row * q_row);
    });
    clear_states(params, tile);
  }
  __attribute__((noinline)) void clear_states(const CpuForwardParams& params, Span tile) const {
    for_each_unit(params, tile, [&](int row, int unit_rows) __attribute__((always_inline)) {
      const RowState softmax = row_state(state, row, unit_rows);
      for (int i = 0; i < unit_rows; i += lanes) {
        store(softmax.maximum + i, splat(minus_infinity));
        store(softmax.sum + i, Vec{});
      }
    });
  }

  __attribute__((noinline)) void make_row_words(const CpuForwardParams& params, const Problem& problem,
                                                Span tile) const {
    const Words key = dropout_key(params.dropout);
    for (int i = 0; i < tile.size(); ++i) {
      const int row = tile.begin + i, head = problem.head_q + row % params.packed_heads;
      const RowWords words =
          row_words_at<typename Spec::Offsets>(params, key, row / params.packed_heads, head, problem.batch);
      multiplier[i] = words.multiplier;
      addend[i] = words.addend;
    }
  }
  // Makes the words of each group of four keys that holds any of `keys`. A word's place is its key's place in
  // the block.
  __attribute__((noinline)) void make_column_words(const CpuForwardParams& params, const Problem& problem,
                                                   Span keys) const {
    const Words key = dropout_key(params.dropout);
    for (int group = keys.begin / 4; group * 4 < keys.end; ++group) {
      const Words words = column_words_at<typename Spec::Offsets>(params, key, group, problem.batch);
      for (int i = 0; i < 4; ++i) column[group * 4 % block_n + i] = words.x[i];
    }
  }

  // Stores this part's result beside the results of the tile's other parts. Returns true if all parts are
  // stored now: O and the state then hold the sum of all parts, which is always added up in the same order.
  __attribute__((noinline)) bool collect(const CpuForwardParams& params, Span tile, i64 index,
                                         int part) const {
    const int size = cpu_part(params.tile_rows, head_dim_v),
              size_o = cpu_part_o(params.tile_rows, head_dim_v);
    float* const parts = params.partials + index * params.key_parts * size;
    const int rows = round_up(tile.size(), Products::row_step);
    for_each_unit(params, tile, [&](int row, int unit_rows) {
      if (saw_nothing(unit_rows, row_state(state, row, unit_rows))) clear(o + row * o_row, unit_rows * o_row);
    });
    copy(parts + part * size, o, rows * o_row);
    copy(parts + part * size + size_o, state, rows * cpu_row_state);
    if (__atomic_add_fetch(params.arrived + index, 1u, __ATOMIC_ACQ_REL) !=
        static_cast<u32>(params.key_parts))
      return false;
    copy(o, parts, rows * o_row);
    copy(state, parts + size_o, rows * cpu_row_state);
    for (int other = 1; other < params.key_parts; ++other) {
      float* const from = parts + other * size;
      for_each_unit(params, tile, [&](int row, int unit_rows) {
        merge(unit_rows, Score::scale_log2(params), row_state(state, row, unit_rows), o + row * o_row,
              row_state(from + size_o, row, unit_rows), from + row * o_row, head_dim_v);
      });
    }
    return true;
  }

  // Writes O, by way of `room`, and lse.
  __attribute__((noinline)) void write_rows(const CpuForwardParams& params, const Problem& problem,
                                            Span tile) const {
    float scale_o = Spec::dropout ? params.dropout.scale : 1.0f;
    if constexpr (quantised) scale_o *= KeyRows(params, problem).of_outputs();
    OElement* const rows = static_cast<OElement*>(params.o.data) + problem.q_offset(params.o);
    float* const lse = static_cast<float*>(params.lse.data) + problem.q_offset(params.lse);
    const Span valid = valid_rows(params, problem, tile);
    alignas(64) [[maybe_unused]] float sinks[Sinks::exist ? cpu_unit_rows : 1] = {};
    for_each_unit(params, tile, [&](int row, int unit_rows) {
      if constexpr (Spec::batch_invariant) make_zeros_positive(o + row * o_row, unit_rows * head_dim_v);
      const int first = tile.begin + row, last = min(first + unit_rows, tile.end);
      const RowState softmax = row_state(state, row, unit_rows);
      if constexpr (Mask::padding)
        for (int i = max(valid.end, first); i < last; ++i) softmax.sum[i - first] = 0;
      if constexpr (Sinks::exist) {
        for (int i = first; i < last; ++i)
          sinks[i - first] =
              i < valid.end ? Sinks::log2(params, problem.head_q + i % params.packed_heads) : minus_infinity;
        Sinks::add(unit_rows, Score::scale_log2(params), softmax.maximum, softmax.sum, sinks);
      }
      for (int i = first; i < last; i += lanes) {
        OElement* const unpacked = reinterpret_cast<OElement*>(room);
        unpack<OElement, head_dim_v>(o + row * o_row + i - first, unit_rows, scale_o, softmax.sum + i - first,
                                     unpacked, rows + offset(params, params.o, i + lanes),
                                     params.packed_heads == 1 ? params.o.row_stride : 0);
        for (int j = i; j < min(i + lanes, last); ++j)
          copy_row(rows + offset(params, params.o, j), unpacked + (j - i) * head_dim_v);
      }
      if constexpr (Spec::lse) {
        if constexpr (!Sinks::exist) make_lse(unit_rows, Score::scale_log2(params), softmax);
        for (int i = first; i < last; ++i) lse[offset(params, params.lse, i)] = softmax.maximum[i - first];
      }
    });
  }

 protected:
  FLASHJIT_FN static Span positions(const CpuForwardParams& params, Span rows) {
    if (rows.empty()) return {0, 0};
    return {position_of(rows.begin, params.packed_heads), position_of(rows.end - 1, params.packed_heads) + 1};
  }
  FLASHJIT_FN static i64 offset(const CpuForwardParams& params, const TensorView& tensor, int row) {
    return row_offset(row, params.packed_heads, tensor.row_stride, tensor.head_stride);
  }
  // Copies 64 bytes at a time: whole cache lines if the rows are aligned to them.
  FLASHJIT_FN static void copy_row(OElement* to, const OElement* from) {
    constexpr int line = 64 / sizeof(OElement), whole = head_dim_v / line * line;
    for (int column = 0; column < whole; column += line) __builtin_memcpy(to + column, from + column, 64);
    __builtin_memcpy(to + whole, from + whole, sizeof(OElement) * (head_dim_v - whole));
  }
  FLASHJIT_FN static Span valid_rows(const CpuForwardParams& params, const Problem& problem, Span rows) {
    return {rows.begin, min(rows.end, problem.seqlen_q * params.packed_heads)};
  }
  // Whether units end where the mask's lists end. A unit across two lists would compute the keys of both
  // lists for all its rows.
  static constexpr bool whole_lists = Mask::list_rows > 0 && Mask::list_rows % Products::row_step == 0;
  // Rows of the unit that begins at `row`.
  FLASHJIT_FN static int rows_of_unit(const CpuForwardParams& params, Span tile, int row) {
    const int end =
        whole_lists ? min(tile.end, round_up(row + 1, Mask::list_rows * params.packed_heads)) : tile.end;
    return Products::next_unit_rows(end - row);
  }
  // Calls body(first row of the unit within the tile, unit_rows) for each unit of the tile.
  template <class Body>
  FLASHJIT_FN static void for_each_unit(const CpuForwardParams& params, Span tile, Body body) {
    for (int row = tile.begin, unit_rows; row < tile.end; row += unit_rows) {
      unit_rows = rows_of_unit(params, tile, row);
      body(row - tile.begin, unit_rows);
    }
  }
  FLASHJIT_FN static RowState row_state(float* states, int row, int unit_rows) {
    return {states + row * cpu_row_state, states + row * cpu_row_state + unit_rows};
  }
  // Part `part` of `keys`. Parts are whole steps, divided evenly.
  FLASHJIT_FN static Span part_of(Span keys, int part, int parts) {
    if (keys.empty()) return keys;
    const int first = max(keys.begin, 0) / step_n;
    const i64 steps = ceil_div(keys.end, step_n) - first;
    return {(first + static_cast<int>(steps * part / parts)) * step_n,
            (first + static_cast<int>(steps * (part + 1) / parts)) * step_n};
  }
};

}  // namespace flashjit::device
