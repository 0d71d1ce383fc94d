// The first and the last step of a backward on GPUs: what the kernel between them needs of each row, and dQ
// from its sums.
#pragma once

#include "cuda/gradient_row.cuh"
#include "cuda/ptx_sync.cuh"
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
  static constexpr bool varlen = false, dropout = false, deterministic = false;
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
template <int rows, class Mask, class Others>
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
  FLASHJIT_FN explicit BackwardRow(const CudaBackwardParams& p) : p_(p), lane_(tid_x() % lanes) {
    const u32 blocks =
        static_cast<u32>(max(ceil_div(p.seqlen_q, backward_row_unit), 1)) * (backward_row_unit / rows);
    const u32 index = ctaid_x() / blocks;
    const int batch = static_cast<int>(index / p.num_heads_q);
    problem_ = make_problem<Spec::varlen, Spec::Mask::padding>(
        p, batch, static_cast<int>(index - batch * p.num_heads_q));
    row_ = static_cast<int>(ctaid_x() % blocks * rows + tid_x() / lanes);
    place_ = problem_.head_q * p.rows + p.first_row(batch, problem_.first_q, Spec::varlen) + row_;
  }

  // Makes lse_log2, delta and zeros of dQ's sums.
  FLASHJIT_FN void prepare() const {
    const int padded = round_up(problem_.rows, backward_row_unit);
    const bool used = row_ < problem_.seqlen_q;
    if (p_.dq_sums != nullptr && row_ < padded) {
      constexpr u32 zeros[4] = {};
      for (int column = static_cast<int>(lane_) * 4; column < sums_row; column += lanes * 4)
        st_global_v4(p_.dq_sums + place_ * sums_row + column, zeros);
    }
    float delta = 0;
    [[maybe_unused]] float zero_or_nan = 0;  // NaN if dO is not finite
    if (used) {
      const auto* const o = static_cast<const OElement*>(p_.o.data) + offset(p_.o);
      const auto* const d_o = static_cast<const Element*>(p_.d_o.data) + offset(p_.d_o);
      for (u32 chunk = lane_; chunk < Spec::head_dim_v / 8; chunk += lanes) {
        float x[8], y[8];
        load8(x, o + chunk * 8);
        load8(y, d_o + chunk * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          delta = __fmaf_rn(x[i], y[i], delta);
          if constexpr (isolates_dropped<typename Spec::Mask>) zero_or_nan = __fmaf_rn(y[i], 0, zero_or_nan);
        }
      }
    }
#pragma unroll
    for (u32 distance = lanes / 2; distance > 0; distance /= 2) {
      delta += __shfl_xor_sync(all_lanes, delta, distance);
      if constexpr (isolates_dropped<typename Spec::Mask>)
        zero_or_nan += __shfl_xor_sync(all_lanes, zero_or_nan, distance);
    }
    if (row_ >= padded) return;
    if (lane_ == 0) {
      const float lse = used ? static_cast<const float*>(p_.lse.data)[offset(p_.lse)] : minus_infinity;
      const bool sees_keys = lse != minus_infinity;
      const float dlse =
          sees_keys && p_.dlse.data ? static_cast<const float*>(p_.dlse.data)[offset(p_.dlse)] : 0;
      float lse_log2 = lse * log2_e;
      if constexpr (isolates_dropped<typename Spec::Mask>) lse_log2 += zero_or_nan;
      p_.lse_log2[place_] = sees_keys ? lse_log2 : -minus_infinity;
      p_.delta[place_] = sees_keys ? delta - dlse : 0;
    }
  }

 private:
  FLASHJIT_FN i64 offset(const TensorView& t) const { return problem_.q_offset(t) + row_ * t.row_stride; }

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
  const u32 lane_;
  Problem problem_;
  int row_;
  i64 place_;
};

// Blocks of backward_row_unit rows, over batch entries and heads.
FLASHJIT_FN u32 backward_row_blocks(const CudaBackwardParams& p) {
  const u32 units = static_cast<u32>(max(ceil_div(p.seqlen_q, backward_row_unit), 1));
  return units * static_cast<u32>(p.batch) * static_cast<u32>(p.num_heads_q);
}

template <class Spec, class Params>
FLASHJIT_FN void backward_prepare(const Params& params) {
  // The next kernel waits for the results before it reads them.
  griddepcontrol_launch_dependents();
  if constexpr (has_gradients<Params>) {
    clear_gradients(params);
    if (params.batch == 0 || params.num_heads_q == 0) return;
  }
  if (params.next_place && ctaid_x() == 0 && tid_x() == 0) *params.next_place = 0;
  BackwardRow<Spec>(params).prepare();
}

// Writes dQ: a warp converts 16 rows, 32 columns at a time, so that four lanes write 64 bytes of a row.
template <class Spec>
class BackwardFinish {
  using Gradient = typename OutputElement<typename Spec::grad_dtype, typename Spec::Element>::type;
  static constexpr int tile = 128, warp_rows = 16;
  static_assert(backward_threads / 32 * warp_rows == backward_row_unit);

 public:
  FLASHJIT_FN static void run(const CudaBackwardParams& p) {
    const u32 blocks = static_cast<u32>(max(ceil_div(p.seqlen_q, backward_row_unit), 1));
    const u32 index = ctaid_x() / blocks, lane = tid_x() % 32;
    const int batch = static_cast<int>(index / p.num_heads_q);
    const Problem problem = make_problem<Spec::varlen, Spec::Mask::padding>(
        p, batch, static_cast<int>(index - batch * p.num_heads_q));
    const int first = static_cast<int>(ctaid_x() % blocks * backward_row_unit + tid_x() / 32 * warp_rows);
    const int row = first + static_cast<int>(lane / 4);
    const i64 place = problem.head_q * p.rows + p.first_row(batch, problem.first_q, Spec::varlen) + first;
    const float* from = p.dq_sums + place * cuda_backward_row(Spec::head_dim);
    Gradient* const to = static_cast<Gradient*>(p.dq.data) + problem.q_offset(p.dq) + row * p.dq.row_stride;
    griddepcontrol_wait();
    if (first >= problem.rows) return;
    constexpr int columns = 32, whole = Spec::head_dim / columns * columns;
#pragma unroll 4
    for (int column = 0; column < whole; column += columns)
      convert<columns>(p, to + column, from + column * warp_rows, problem.rows - row, lane);
    if constexpr (whole < Spec::head_dim)
      convert<Spec::head_dim - whole>(p, to + whole, from + whole * warp_rows, problem.rows - row, lane);
  }

 private:
  // rows: of the problem, from the lane's first one on.
  template <int columns>
  FLASHJIT_FN static void convert(const CudaBackwardParams& p, Gradient* to, const float* from, int rows,
                                  u32 lane) {
    float sums[columns / 2];
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      u32 words[4];
      ld_backward_sums(words, from + i * tile, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[4 * i + e] = __uint_as_float(words[e]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      write_gradient(to + half * 8 * p.dq.row_stride, sums, half, p.scale, half * 8 < rows,
                     static_cast<int>(lane % 4));
  }
};
// Further blocks write gradients of sink logits.
template <class Spec, class Params>
FLASHJIT_FN void backward_finish(const Params& params) {
  if constexpr (Spec::Sinks::exist) {
    const u32 blocks = backward_row_blocks(params);
    if (ctaid_x() >= blocks) return add_up_sink_logit<Spec>(params, static_cast<int>(ctaid_x() - blocks));
  }
  BackwardFinish<Spec>::run(params);
}

}  // namespace flashjit::device
