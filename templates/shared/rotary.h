// Rotary position embedding (Su et al. 2021): its angles, and the parameters that it adds.
#pragma once

#include "shared/tensor_view.h"

namespace flashjit::device {

// half: pairs of columns i and i + dim / 2; interleaved: 2 i and 2 i + 1.
enum class RotaryStyle { none, half, interleaved };

// Whether a Spec's RotaryTable names the tables' type: void stands for no tables.
template <class Table>
inline constexpr bool is_table = true;
template <>
inline constexpr bool is_table<void> = false;

constexpr int most_rotary_pairs = 128;

// `pairs`: as many as the kernel reads; the host writes most_rotary_pairs.
template <int pairs>
struct RotaryParams {
  TensorView q, q_out;         // unset unless the spec rotates Q
  u32 heads_q;                 // 0 unless the spec rotates Q
  int table_rows;              // with tables
  const int* positions;        // [tokens]; null: the tokens' places
  const void *cos, *sin;       // with tables
  i64 cos_stride, sin_stride;  // from one position to the next
  u64 turns[pairs > 0 ? pairs
                      : 1];  // without tables: of each pair for one position, in units of 2^-64 of a turn
};
template <class Params, int pairs>
struct Rotated : Params {
  RotaryParams<pairs> rotary;
};

// An angle is a fraction of a turn in units of 2^-32, so that whole turns vanish in integer arithmetic. A
// pair turns by `turns` for each position. The product's upper word is exact but for less than 2^-32 turns
// (1.5e-9), whatever the position; an error of `turns` of 2^-65 adds at most 2^-34 turns at positions below
// 2^31.
FLASHJIT_FN u32 angle_of(u64 turns, i64 position) {
  const u32 low = static_cast<u32>(turns), high = static_cast<u32>(turns >> 32),
            p = static_cast<u32>(position);
  return static_cast<u32>(u64{low} * p >> 32) + high * p - (position < 0 ? low : 0);
}

// An angle is a multiple of a quarter turn, the nearest one, and a rest of at most an eighth of a turn.
constexpr float rest_to_radians = 1.4629180792671596e-9f;  // 2 pi / 2^32

// Sine and cosine of |r| <= pi / 4, for a float or a vector. The polynomials interpolate at Chebyshev's
// nodes; their errors are 2^-26.6 and 2^-30.2, those of float32 arithmetic below 2^-23.
template <class F>
FLASHJIT_FN F sine_of_rest(F r) {
  const F s = r * r;
  return r + r * s * (-0.16666664662314287f + s * (0.008332748270625282f + s * -0.00019587890879920283f));
}
template <class F>
FLASHJIT_FN F cosine_of_rest(F r) {
  const F s = r * r;
  return 1.0f - s * 0.5f +
         s * s * (0.04166666465946897f + s * (-0.00138883030342117f + s * 2.45479418925285e-5f));
}

}  // namespace flashjit::device
