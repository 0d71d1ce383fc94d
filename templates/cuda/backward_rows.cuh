// The first and the last step of a backward on GPUs: what the kernel between them needs of each row, and dQ
// from its sums.
#pragma once

#include "cuda/backward_far_rows.cuh"
#include "cuda/gradient_row.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/row_bits.cuh"
#include "shared/backward_cuda_params.h"
#include "shared/mask.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct BackwardCudaSpec {
  using Mask = Intersect<Bounds>;
  using o_dtype = void;
  using grad_dtype = void;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using Offsets = NoOffsets;
  static constexpr bool varlen = false, dropout = false, deterministic = false, batch_invariant = false;
};

// The place of a float of a 16x8 accumulator tile in dQ's sums: lane l has floats e = 0 ... 3. From sm_90 on
// a lane adds its four at once, before it adds one after the other.
FLASHJIT_FN u32 backward_sum_place(u32 lane, u32 e) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + e;
#else
  return e * 32 + lane;
#endif
}

// A lane's sums of a tile.
FLASHJIT_FN void ld_backward_sums(u32 (&sums)[4], const float* tile, u32 lane) {
#if __CUDA_ARCH__ >= 900
  ld_global_cg_v4(sums, tile + backward_sum_place(lane, 0));
#else
#pragma unroll
  for (u32 e = 0; e < 4; ++e) sums[e] = __float_as_uint(ld_global_cg(tile + backward_sum_place(lane, e)));
#endif
}

// A mask of block lists drops blocks that nobody may ever have written, and 0 * NaN is NaN. So kernels with
// such a mask keep NaN and infinity of a dropped pair out of their products:
// - A row whose Q is not finite has an lse of NaN, or of -inf if it sees no key. backward_prepare also makes
//   it NaN if dO is not finite. So the row's weights are NaN at all keys that it sees, or 0. Then dK and dV
//   are right with zeros for its Q and dO.
// - A key whose K is not finite has weights of NaN, because lse of the rows that see it is NaN, or of 0. Then
//   dQ is right with zeros for its K.
// - Weights of dropped pairs become 0 after the exponential, so an lse of NaN does not matter.
template <class Mask>
constexpr bool isolates_dropped = Mask::list_rows > 0;

// Whether a row's weights are 0 or NaN.
FLASHJIT_FN bool has_no_weights(float lse_log2) {
  return !(lse_log2 < -minus_infinity);
}

// Rows of a tile in shared memory, whose class has offset(row, chunk). A lane has every `step`-th chunk.
template <class Element, class Tile>
struct RowOfTile {
  static constexpr u32 chunks = Tile::chunks;
  u32 tile, first, step;

  // 0 if the lane's chunks are finite, else NaN.
  FLASHJIT_FN float zero_or_nan(u32 row) const {
    float sum = 0;
    for (u32 chunk = first; chunk < chunks; chunk += step) {
      u32 words[4];
      ld_shared_v4(words, tile + Tile::offset(row, chunk));
#pragma unroll
      for (u32 word : words)
        sum = __fmaf_rn(to_float(Element{static_cast<unsigned short>(word)}), 0,
                        __fmaf_rn(to_float(Element{static_cast<unsigned short>(word >> 16)}), 0, sum));
    }
    return sum;
  }
  FLASHJIT_FN void clear(u32 row) const {
    for (u32 chunk = first; chunk < chunks; chunk += step)
      st_shared_v4(tile + Tile::offset(row, chunk), 0, 0, 0, 0);
  }
  // By a warp whose lanes have whole rows: whether one of `rows` rows is not finite; zeros in place of those.
  FLASHJIT_FN bool any_bad(u32 rows, u32 lane) const {
    float sum = 0;
#pragma unroll 1
    for (u32 row = lane; row < rows; row += 32) sum += zero_or_nan(row);
    return __any_sync(0xffffffff, sum != 0);
  }
  FLASHJIT_FN void clear_bad(u32 rows, u32 lane) const {
#pragma unroll 1
    for (u32 row = lane; row < rows; row += 32)
      if (zero_or_nan(row) != 0) clear(row);
  }
};

// formula_gradient.cuh defines these. Kernels without formulas name them, too, and nvcc must know that they
// are templates.
template <int rows, int tiles, class Mask, class Others>
FLASHJIT_FN void drop_pairs(float* scores, const Mask& mask, const Problem& problem, int first_row,
                            int first_key, float value, const Others& others);
template <class Spec, class Params>
FLASHJIT_FN void add_up_sink_logit(const Params& p, int head);

// Eight lanes have a row.
template <class Spec>
class BackwardRow {
  static constexpr u32 lanes = 8, rows = backward_threads / lanes, all_lanes = 0xffffffff;
  static constexpr int sums_row = cuda_backward_row(Spec::head_dim);
  static constexpr float log2_e = 1.4426950408889634f;
  static_assert(rows == backward_rows_of_block);
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;

 public:
  FLASHJIT_FN BackwardRow(const CudaBackwardParams& p, u32 thread, u32 block)
      : p_(p), lane_(thread % lanes), of_warp_(thread % 32 / lanes) {
    const u32 blocks =
        static_cast<u32>(max(ceil_div(p.seqlen_q, backward_row_unit), 1)) * (backward_row_unit / rows);
    // The last rows first: then those that the next kernel begins with are in the second-level cache.
    const u32 place = blocks * static_cast<u32>(p.batch * p.num_heads_q) - 1 - block;
    const u32 index = place / blocks;
    const int batch = static_cast<int>(index / p.num_heads_q);
    problem_ = make_problem<Spec::varlen, Spec::Mask::padding>(
        p, batch, static_cast<int>(index - batch * p.num_heads_q));
    row_ = static_cast<int>(place % blocks * rows + thread / lanes);
    place_ = problem_.head_q * p.rows + p.first_row(batch, problem_.first_q, Spec::varlen) + row_;
  }

  // Makes lse_log2, delta, far_max and zeros of dQ's sums. A row that no gradient comes to gives none,
  // whatever its scores are. Returns whether a row of the warp is far: find_far_row() has to follow.
  FLASHJIT_FN bool prepare() const {
    const int padded = round_up(problem_.rows, backward_row_unit);
    const bool used = row_ < problem_.seqlen_q;
    const float lse = used ? this->lse() : minus_infinity;  // first, to arrive with the row's elements
    const float given_dlse =
        used && p_.dlse.data ? static_cast<const float*>(p_.dlse.data)[offset(p_.dlse)] : 0;
    if (p_.dq_sums != nullptr && row_ < padded) {
      constexpr u32 zeros[4] = {};
      float* const sums = p_.dq_sums + place_ * sums_row;
      for_each_of_lane<sums_row / 4>([&](u32 i) { st_global_v4(sums + i * 4, zeros); });
    }
    float delta = 0;
    u32 any_bits = 0;       // of dO, but for signs
    float zero_or_nan = 0;  // NaN if dO is not finite, where that matters
    if (used) {
      const auto* const o = static_cast<const OElement*>(p_.o.data) + offset(p_.o);
      const auto* const d_o = static_cast<const Element*>(p_.d_o.data) + offset(p_.d_o);
      for_each_of_lane<Spec::head_dim_v / 8>([&](u32 chunk) {
        float x[8], y[8];
        load8(x, o + chunk * 8);
        load8(y, d_o + chunk * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          delta = __fmaf_rn(x[i], y[i], delta);
          any_bits |= __float_as_uint(y[i]) << 1;
          if constexpr (isolates_dropped<typename Spec::Mask>) zero_or_nan = __fmaf_rn(y[i], 0, zero_or_nan);
        }
      });
    }
#pragma unroll
    for (u32 distance = lanes / 2; distance > 0; distance /= 2) {
      delta += __shfl_xor_sync(all_lanes, delta, distance);
      if constexpr (isolates_dropped<typename Spec::Mask>)
        zero_or_nan += __shfl_xor_sync(all_lanes, zero_or_nan, distance);
    }
    if (row_ >= padded) return false;
    const bool sees_keys = lse != minus_infinity, is_near = !sees_keys || is_near_lse(lse);
    const float dlse = sees_keys ? given_dlse : 0;
    const u32 row_lanes = __ballot_sync(all_lanes, any_bits != 0) >> of_warp_ * lanes;
    const bool has_weights = sees_keys && ((row_lanes & ((1u << lanes) - 1)) != 0 || dlse != 0);
    const bool is_far = has_weights && !is_near && fabsf(lse + zero_or_nan) < -minus_infinity;
    // Formulas may make any score of the zeros behind a sequence's end.
    const bool any_score = used ? !is_near : Spec::Score::changes;
    const bool drops_all = !has_weights && any_score;
    if (lane_ == 0) {
      p_.lse_log2[place_] =
          has_weights ? lse * log2_e + zero_or_nan - lg2_approx(p_.weight_scale) : -minus_infinity;
      p_.delta[place_] = has_weights ? (delta - dlse) * p_.delta_scale : 0;
      p_.far_max[place_] = drops_all ? -minus_infinity : 0;
    }
    const bool any_marked = __any_sync(all_lanes, drops_all || is_far);
    if (of_warp_ == 0 && lane_ == 0) p_.far_marks[place_ / 4] = any_marked;
    return __any_sync(all_lanes, is_far);
  }
  // Replaces lse_log2 and far_max of the warp's far rows.
  FLASHJIT_FN void find_far_row() const {
    __syncwarp();  // another lane wrote the row's lse_log2
    const bool used = row_ < problem_.seqlen_q;
    const float lse = used ? this->lse() : 0;
    const RowSum found = FarRows<Spec>(p_, problem_, row_ - static_cast<int>(of_warp_)).find(lse * log2_e);
    // prepare() leaves a finite one to rows with weights alone.
    const bool is_far = !is_near_lse(lse) && fabsf(p_.lse_log2[place_]) < -minus_infinity;
    __syncwarp();  // all have read it
    if (!is_far || lane_ != 0) return;
    p_.lse_log2[place_] = found.log2_sum - lg2_approx(p_.weight_scale);
    p_.far_max[place_] = found.top;
  }

 private:
  FLASHJIT_FN float lse() const { return static_cast<const float*>(p_.lse.data)[offset(p_.lse)]; }
  FLASHJIT_FN static bool is_near_lse(float lse) { return fabsf(lse) <= farthest_lse(Element{}); }
  FLASHJIT_FN i64 offset(const TensorView& t) const { return problem_.q_offset(t) + row_ * t.row_stride; }

  // The lane's share of `count` parts of a row. Without a loop, so that all loads of a row are on their way
  // at once.
  template <u32 count, class Do>
  FLASHJIT_FN void for_each_of_lane(const Do& act) const {
#pragma unroll
    for (u32 first = 0; first < count; first += lanes)
      if (first + lanes <= count || first + lane_ < count) act(first + lane_);
  }
  template <class T>
  FLASHJIT_FN static void load8(float (&x)[8], const T* from) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      constexpr int in_words = 16 / sizeof(T);
      if (i % in_words == 0) ld_global_nc_v4(words, from + i);
      if constexpr (sizeof(T) == 4)
        x[i] = __uint_as_float(words[i % 4]);
      else
        x[i] = to_float(T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)});
    }
  }

  const CudaBackwardParams& p_;
  const u32 lane_, of_warp_;  // of the row's; the row's place among the warp's
  Problem problem_;
  int row_;
  i64 place_;
};

// Blocks of backward_row_unit rows, over batch entries and heads.
FLASHJIT_FN u32 backward_row_blocks(const CudaBackwardParams& p) {
  const u32 units = static_cast<u32>(max(ceil_div(p.seqlen_q, backward_row_unit), 1));
  return units * static_cast<u32>(p.batch) * static_cast<u32>(p.num_heads_q);
}

// The blocks of the grid share dK's and dV's sums.
template <class Spec>
FLASHJIT_FN void clear_key_sums(const CudaBackwardParams& p) {
  if (p.dk_sums == nullptr) return;
  constexpr u32 zeros[4] = {};
  const i64 rows = p.num_heads_kv * p.key_rows, step = static_cast<i64>(nctaid_x()) * (backward_threads * 4);
  const i64 first = (static_cast<i64>(ctaid_x()) * backward_threads + tid_x()) * 4;
  for (i64 i = first; i < rows * cuda_backward_row(Spec::head_dim); i += step)
    st_global_v4(p.dk_sums + i, zeros);
  for (i64 i = first; i < rows * cuda_backward_row(Spec::head_dim_v); i += step)
    st_global_v4(p.dv_sums + i, zeros);
}

template <class Spec>
FLASHJIT_FN void clear_turns(const CudaBackwardParams& p) {
  if (p.next_turn == nullptr) return;
  const u32 first = ctaid_x() * backward_threads + tid_x(), heads = p.schedule_heads();
  if (first == 0) *p.next_turn = 0;
  for (u32 i = first; i < heads; i += nctaid_x() * backward_threads) p.places_done[i] = 0;
  if (!Spec::deterministic || p.dq_blocks_added == nullptr) return;
  const i64 counts = backward_ordered_blocks(p.num_heads_q * p.rows);
  for (i64 i = first; i < counts; i += static_cast<i64>(nctaid_x()) * backward_threads)
    p.dq_blocks_added[i] = 0;
}

// Up to 64 columns the first step needs 32 registers but for far rows, which are rare: they spill, so that
// all of a multiprocessor's threads have a row. Formulas and bits of rows need more.
template <class Spec>
constexpr int backward_first_blocks_sm90a =
    Spec::head_dim_v <= 64 && !Spec::Score::changes && !has_row_bits<typename Spec::Mask>
        ? 2048 / backward_threads
        : backward_first_blocks;

// by_wgmma: for the kernels of sm_90a.
template <class Spec, bool by_wgmma, class Params>
FLASHJIT_FN void backward_prepare(const Params& params) {
  // The next kernel waits for the results before it reads them.
  griddepcontrol_launch_dependents();
  if constexpr (has_gradients<Params>) {
    clear_gradients(params);
    if (params.batch == 0 || params.num_heads_q == 0) return;
  }
  if constexpr (by_wgmma) {
    clear_turns<Spec>(params);
    clear_key_sums<Spec>(params);
    if constexpr (has_row_bits<typename Spec::Mask>) make_row_bits<Spec>(params);
  }
  if (!BackwardRow<Spec>(params, tid_x(), ctaid_x()).prepare()) return;
  // Hides where these come from: all else is computed anew, so that no register holds it for rare rows.
  u32 thread = tid_x(), block = ctaid_x();
  asm volatile("" : "+r"(thread), "+r"(block));
  BackwardRow<Spec>(params, thread, block).find_far_row();
}

// A warp's 16 rows of a gradient, from their sums.
template <class Spec, int head_dim>
class GradientRows {
  using Gradient = typename OutputElement<typename Spec::grad_dtype, typename Spec::Element>::type;
  static constexpr int tile = 128, warp_rows = 16;

 public:
  // place: the first row in the sums; `first` in the problem, which has `rows`. Those from `valid` on are
  // zeros, whatever the sums are.
  FLASHJIT_FN GradientRows(const float* sums, i64 place, const TensorView& gradient, i64 offset, int first,
                           int rows, int valid, float factor)
      : from_(sums + place * cuda_backward_row(head_dim)),
        row_stride_(gradient.row_stride),
        factor_(factor),
        lane_(tid_x() % 32) {
    const int row = first + static_cast<int>(lane_ / 4);
    to_ = static_cast<Gradient*>(gradient.data) + offset + row * row_stride_;
    rows_ = rows - row;
    valid_ = valid - row;
  }
  template <int columns>
  FLASHJIT_FN void load(float (&sums)[columns / 2], int column) const {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      u32 words[4];
      ld_backward_sums(words, from_ + column * warp_rows + i * tile, lane_);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[4 * i + e] = __uint_as_float(words[e]);
    }
  }
  template <int columns>
  FLASHJIT_FN void write(const float (&sums)[columns / 2], int column) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      write_gradient<false>(to_ + column + half * 8 * row_stride_, sums, half,
                            half * 8 < valid_ ? factor_ : 0, half * 8 < rows_, static_cast<int>(lane_ % 4));
  }
  // 32 columns at a time, so that four lanes write 64 bytes of a row.
  FLASHJIT_FN void convert() const {
    constexpr int columns = 32, whole = head_dim / columns * columns;
#pragma unroll 4
    for (int column = 0; column < whole; column += columns) convert<columns>(column);
    if constexpr (whole < head_dim) convert<head_dim - whole>(whole);
  }

 private:
  template <int columns>
  FLASHJIT_FN void convert(int column) const {
    float sums[columns / 2];
    load<columns>(sums, column);
    write<columns>(sums, column);
  }

  const float* from_;
  Gradient* to_;
  i64 row_stride_;
  float factor_;
  u32 lane_;
  int rows_, valid_;  // from the lane's first row on
};
// A warp's 16 rows of dQ, from the problem's row `first` on.
template <class Spec>
FLASHJIT_FN auto dq_rows(const CudaBackwardParams& p, const Problem& problem, int first) {
  const i64 place =
      problem.head_q * p.rows + p.first_row(problem.batch, problem.first_q, Spec::varlen) + first;
  return GradientRows<Spec, Spec::head_dim>(p.dq_sums, place, p.dq, problem.q_offset(p.dq), first,
                                            problem.rows, problem.rows, p.scale);
}

// Gradients from their sums, backward_row_unit rows a block.
template <class Spec>
class BackwardFinish {
  static_assert(backward_threads / 32 * 16 == backward_row_unit);

 public:
  // block: of query rows, over batch entries and heads.
  FLASHJIT_FN static void finish_dq(const CudaBackwardParams& p, u32 block) {
    const Place at(block, p.seqlen_q, p.num_heads_q);
    const Problem problem = make_problem<Spec::varlen, Spec::Mask::padding>(p, at.batch, at.head);
    griddepcontrol_wait();
    if (at.first < problem.rows) dq_rows<Spec>(p, problem, at.first).convert();
  }
  // block: of keys, over batch entries and heads of K and V.
  FLASHJIT_FN static void finish_dk_dv(const CudaBackwardParams& p, u32 block) {
    const Place at(block, p.seqlen_k, p.num_heads_kv);
    const Problem problem =
        make_problem<Spec::varlen>(p, at.batch, at.head * (p.num_heads_q / p.num_heads_kv));
    const i64 place =
        problem.head_kv * p.key_rows + p.first_key_row(at.batch, problem.first_k, Spec::varlen) + at.first;
    int valid = problem.seqlen_k;
    if constexpr (Spec::Mask::padding) valid = padded_length(p.seqlens_k, at.batch, valid);
    griddepcontrol_wait();
    if (at.first >= problem.seqlen_k) return;
    GradientRows<Spec, Spec::head_dim>(p.dk_sums, place, p.dk, problem.k_offset(p.dk), at.first,
                                       problem.seqlen_k, valid, p.scale)
        .convert();
    GradientRows<Spec, Spec::head_dim_v>(p.dv_sums, place, p.dv, problem.k_offset(p.dv), at.first,
                                         problem.seqlen_k, valid, p.dv_scale)
        .convert();
  }

 private:
  // The warp's rows.
  struct Place {
    int batch, head, first;
    FLASHJIT_FN Place(u32 block, int seqlen, int heads) {
      const u32 blocks = static_cast<u32>(max(ceil_div(seqlen, backward_row_unit), 1)),
                index = block / blocks;
      batch = static_cast<int>(index / heads);
      head = static_cast<int>(index - batch * heads);
      first = static_cast<int>(block % blocks * backward_row_unit + tid_x() / 32 * 16);
    }
  };
};
// Blocks of the grid write dQ, gradients of sink logits, and dK and dV where groups are divided, in this
// order. persistent: the step before was a persistent grid, which wrote dQ itself.
template <class Spec, bool persistent, class Params>
FLASHJIT_FN void backward_finish(const Params& params) {
  u32 block = ctaid_x();
  if constexpr (!persistent) {
    const u32 blocks = backward_row_blocks(params);
    // The last rows first: the second-level cache has their sums.
    if (block < blocks) return BackwardFinish<Spec>::finish_dq(params, blocks - 1 - block);
    block -= blocks;
  }
  if constexpr (Spec::Sinks::exist) {
    const u32 heads = static_cast<u32>(params.num_heads_q);
    if (block < heads) return add_up_sink_logit<Spec>(params, static_cast<int>(block));
    block -= heads;
  }
  if constexpr (persistent) BackwardFinish<Spec>::finish_dk_dv(params, block);
}

}  // namespace flashjit::device
