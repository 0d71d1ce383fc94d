// Decode's products of 8-bit keys and values. They stay 8-bit in shared memory. A warp loads them by
// ldmatrix as pairs of bytes, and converts them in registers, always to fp16: to bf16 that takes three times
// the instructions, and memory would not be the bound.
//
// Q is prepared once for a tile, in shared memory. If it is bf16 it becomes fp16: each row times a power of
// two, by which its scores are divided. Weights are at most 2^10 (online_softmax.cuh).
//
// K: a thread gets columns 4 t ... 4 t + 3 of 16, with t = lane % 4. It takes them for columns 2 t, 2 t + 1,
// 2 t + 8 and 2 t + 9 of mma's operand, and Q's columns are put in the same order. V, transposed: a thread
// gets columns 2 g and 2 g + 1 of two keys, with g = lane / 4. The even columns of 16 make one accumulator
// tile, the odd ones the next. So four columns of a row lie in one thread.
#pragma once

#include "cuda/decode_merge.cuh"
#include "cuda/kv_convert.cuh"

namespace flashjit::device {

template <class Spec>
class QuantisedProducts {
  using Element = typename Spec::Element;
  using Convert = ConvertKeys<fp16, typename Spec::kv_dtype>;
  static constexpr bool own_scales = Spec::kv_scale == KvScale::token_head;

 public:
  // Whether Q is not in the type of products.
  static constexpr bool converts_q = !is_fp16<Element>;

  // A key's scale; 0 if it does not exist.
  FLASHJIT_FN static void copy_scale(u32 to, const float* from, bool exists) {
    cp_async_ca_4(to, from, exists ? 4 : 0);
  }

  // Orders the columns of a row of a tile of Q in shared memory, by a whole warp, and converts them. Leaves
  // 1 / the row's factor at `inverse`. Takes the chunks from `first` on, of which a lane has each 32nd;
  // `largest` is of the chunks before them.
  template <class QTile, u32 first = 0>
  FLASHJIT_FN static auto prepare_q(u32 q_tile, u32 row, u32 inverse, u32 lane, u32 largest = 0) {
    const u32 chunk = q_tile + QTile::offset(row, lane + first);
    u32 words[4] = {};
    if (lane + first < QTile::chunks) ld_shared_v4(words, chunk);
    if constexpr (converts_q) {
#pragma unroll
      for (const u32 word : words) largest = max(largest, largest_bits(word));
    }
    const auto halved = [&] {
      if constexpr (first + 32 < QTile::chunks)
        return prepare_q<QTile, first + 32>(q_tile, row, inverse, lane, largest);
      else
        return factor_of(largest);
    }();
    if constexpr (converts_q) {
#pragma unroll
      for (u32& word : words) word = halved(word);
      if (first == 0 && lane == 0) st_shared(inverse, __float_as_uint(halved.inverse()));
    }
    // Two lanes have 16 columns. The even one takes the even pairs of columns, the odd one the others.
    const bool odd = lane % 2;
    const u32 a = __shfl_xor_sync(0xffffffff, odd ? words[0] : words[1], 1);
    const u32 b = __shfl_xor_sync(0xffffffff, odd ? words[2] : words[3], 1);
    if (lane + first >= QTile::chunks) return halved;
    if (odd)
      st_shared_v4(chunk, a, b, words[1], words[3]);
    else
      st_shared_v4(chunk, words[0], words[2], a, b);
    return halved;
  }

  FLASHJIT_FN static float inverse(u32 from) { return ld_shared(from); }

  // s += q k^T for columns of `step`, and if `both` of the next 16. k_address: from lane_offset().
  template <class KTile, int m_tiles, int n_tiles>
  FLASHJIT_FN static void add_scores(float (&s)[m_tiles][n_tiles][4], const u32 (&q)[m_tiles][4],
                                     const u32 (&next_q)[m_tiles][4], u32 k_address, int step, bool both) {
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      u32 k[4];
      ldmatrix_x4(k, KTile::at(k_address, n * 8, step));
      add_product(s, n, q, k[0], k[1]);
      if (both) add_product(s, n, next_q, k[2], k[3]);
    }
  }

  // o += p v for 16 keys from `key` on. v_address: from lane_offset().
  template <class VTile, int m_tiles, int o_tiles>
  FLASHJIT_FN static void add_values(float (&o)[m_tiles][o_tiles][4], const u32 (&p)[m_tiles][4],
                                     u32 v_address, int key) {
    constexpr int chunks = o_tiles / 2;
#pragma unroll
    for (int c = 0; c < chunks; c += 2) {
      u32 v[4];
      if (c + 1 < chunks)
        ldmatrix_x4_trans(v, VTile::at(v_address, key, c));
      else
        ldmatrix_x2_trans(v[0], v[1], VTile::at(v_address, key, c));
#pragma unroll
      for (int d = 0; d < min(2, chunks - c); ++d) {
        u32 even[2], odd[2];
        Convert::parted(v[2 * d], even[0], odd[0]);
        Convert::parted(v[2 * d + 1], even[1], odd[1]);
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
          mma_m16n8k16(fp16{}, o[i][2 * (c + d)], p[i], even[0], even[1]);
          mma_m16n8k16(fp16{}, o[i][2 * (c + d) + 1], p[i], odd[0], odd[1]);
        }
      }
    }
  }

  // Multiplies scores by their rows' factors and, with own scales in shared memory, their keys'.
  template <int m_tiles, int n_tiles>
  FLASHJIT_FN static void scale_scores(float (&s)[m_tiles][n_tiles][4], const float (&of_rows)[m_tiles][2],
                                       u32 scales, u32 lane) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      float of_keys[2] = {1, 1};
      if constexpr (own_scales) ld_shared_v2(of_keys[0], of_keys[1], scales + (n * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (own_scales) s[i][n][e] *= of_keys[e % 2];
          if (!own_scales || converts_q) s[i][n][e] *= of_rows[i][e / 2];
        }
    }
  }

  // Own scales of values may be of any size, and fp16 holds few. So a row's weights times scales are divided
  // by a unit, a power of two, and sums are of values in units. The unit follows the row's largest weight
  // times scale. So a key that weighs nothing, or that only other rows see, costs no precision, whatever its
  // scale is.
  template <int m_tiles>
  class Units {
   public:
    FLASHJIT_FN void reset() {
#pragma unroll
      for (u32& both : inverses_) both = twice(0x7e80);  // 2^126
    }

    // Multiplies weights by their keys' scales / units. Multiplies sums by the softmax's corrections, if it
    // `corrects`, and by old units / new ones.
    template <int n_tiles, int o_tiles, class Softmax>
    FLASHJIT_FN void scale_weights(float (&p)[m_tiles][n_tiles][4], float (&o)[m_tiles][o_tiles][4],
                                   u32 scales, const Softmax& softmax, bool corrects, u32 lane) {
      float largest[2 * m_tiles] = {};
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        float of_keys[2];
        ld_shared_v2(of_keys[0], of_keys[1], scales + (n * 8 + lane % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < m_tiles; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            p[i][n][e] *= of_keys[e % 2];
            largest[2 * i + e / 2] = fmaxf(largest[2 * i + e / 2], fabsf(p[i][n][e]));
          }
      }
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) corrects |= exceeds(r, largest[r]);
      if (__any_sync(0xffffffff, corrects)) {
#pragma unroll
        for (int r = 0; r < 2 * m_tiles; ++r) {
          const float factor = renew(r, largest[r], softmax.correction(r));
#pragma unroll
          for (int c = 0; c < o_tiles; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e) o[r / 2][c][r % 2 * 2 + e] *= factor;
        }
      }
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) p[i][n][e] *= inverse(2 * i + e / 2);
    }

    FLASHJIT_FN float operator[](int r) const { return reciprocal(inverse(r)); }

   private:
    // Of weights times scales, in units: fp16's range is used from its top down. A new unit leaves room, so
    // that it lasts.
    static constexpr float most = 0x1p15f;
    static constexpr int room = 12;  // log2 of what the largest becomes, at least

    FLASHJIT_FN bool exceeds(int r, float largest) const { return largest * inverse(r) > most; }

    // Returns the factor of the row's sums. Other rows change nothing.
    FLASHJIT_FN float renew(int r, float largest, float correction) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
      if (correction == 1 && !exceeds(r, largest)) return 1;
      // What the sums are in, corrected: the softmax's new reference may have made it far too large.
      const float before = reciprocal(inverse(r)) * correction;
      const int exponent = max(exponent_of(before), exponent_of(largest) - room);
      set_inverse(r, reciprocal(__uint_as_float(static_cast<u32>(max(exponent, 1)) << 23)));
      return before * inverse(r);
    }
    FLASHJIT_FN static int exponent_of(float x) { return static_cast<int>(__float_as_uint(x) >> 23); }
    // Of a power of two.
    FLASHJIT_FN static float reciprocal(float x) {
      return __uint_as_float((254u << 23) - __float_as_uint(x));
    }

    // 1 / the unit of row r. Two rows share a register: a power of two has 16 bits in bf16.
    FLASHJIT_FN float inverse(int r) const {
      const u32 both = inverses_[r / 2];
      return __uint_as_float(r % 2 ? both & 0xffff0000 : both << 16);
    }
    FLASHJIT_FN void set_inverse(int r, float to) {
      inverses_[r / 2] = prmt(inverses_[r / 2], __float_as_uint(to), r % 2 ? 0x7610 : 0x3276);
    }

    u32 inverses_[m_tiles];
  };

  // Writes a row's columns from accumulator tile `tile` on to shared memory, before column `end`.
  template <int o_tiles>
  FLASHJIT_FN static void give(const float (&o)[o_tiles][4], float factor, int half, int tile, int end,
                               u32 to, u32 lane) {
    const auto word = [&](int c, int e) {
      return __float_as_uint(own_scales ? o[c][half * 2 + e] * factor : o[c][half * 2 + e]);
    };
#pragma unroll
    for (int c = tile; c < o_tiles && c * 8 < end; c += 2)
      st_shared_v4(to + ((c - tile) * 8 + lane % 4 * 4) * 4, word(c, 0), word(c + 1, 0), word(c, 1),
                   word(c + 1, 1));
  }

 private:
  // By which a warp halves a row whose lanes' largest bits are given; none where Q is in the type of
  // products.
  FLASHJIT_FN static auto factor_of(u32 largest) {
    if constexpr (converts_q) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, lanes));
      return HalvedRow(largest);
    } else {
      return 0;
    }
  }

  // Keys of two accumulator tiles times 16 columns of q.
  template <int m_tiles, int n_tiles>
  FLASHJIT_FN static void add_product(float (&s)[m_tiles][n_tiles][4], int n, const u32 (&q)[m_tiles][4],
                                      u32 k_low, u32 k_high) {
    u32 low[2], high[2];
    Convert::in_order(k_low, low[0], low[1]);
    Convert::in_order(k_high, high[0], high[1]);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      mma_m16n8k16(fp16{}, s[i][n], q[i], low[0], low[1]);
      mma_m16n8k16(fp16{}, s[i][n + 1], q[i], high[0], high[1]);
    }
  }
};

}  // namespace flashjit::device
