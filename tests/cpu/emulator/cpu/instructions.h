// templates/cpu/instructions.h for a CPU with AVX-512, AVX512_BF16 and AMX, emulated on
// a CPU that has none: vectors of the same length, and tile registers in
// memory. It replaces that header when a kernel is compiled for x86-64-v3.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

constexpr int lanes = 16;
constexpr int vector_registers = 32;

using Vec = float __attribute__((vector_size(4 * lanes)));
using IntVec = int __attribute__((vector_size(4 * lanes)));
using WordVec = u32 __attribute__((vector_size(4 * lanes)));

FLASHJIT_FN Vec representable(Vec x) {
  const Vec least = -127.0f - Vec{};
  return least > x ? least : x;
}
FLASHJIT_FN Vec fraction(Vec x) {
  return x - __builtin_elementwise_floor(x);
}
FLASHJIT_FN Vec times_power(Vec p, Vec x) {
  const IntVec exponent = __builtin_convertvector(__builtin_elementwise_floor(x), IntVec) + 127;
  return p * reinterpret_cast<Vec>(exponent << 23);
}

class DenormalsAreZeros {
 public:
  FLASHJIT_FN DenormalsAreZeros() { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  FLASHJIT_FN ~DenormalsAreZeros() { __builtin_ia32_ldmxcsr(before_); }

 private:
  const u32 before_ = __builtin_ia32_stmxcsr();
};

FLASHJIT_FN WordVec upper_halves(WordVec low, WordVec high) {
  return (high & 0xffff0000u) | (low >> 16);
}

inline WordVec tiles[8][16];
inline bool configured, misused;

// Asked by the test: whether tiles are configured, and whether they were used while they were not.
extern "C" __attribute__((used)) inline int emulated_tiles_configured() {
  return configured;
}
extern "C" __attribute__((used)) inline int emulated_tiles_misused() {
  return misused;
}

struct TileRegisters {
  TileRegisters() {
    misused |= configured;
    configured = true;
    // A CPU sets zeros, but no code may rely on that.
    for (auto& tile : tiles)
      for (WordVec& row : tile) row = 0x7fc07fc0 - WordVec{};
  }
  ~TileRegisters() {
    misused |= !configured;
    configured = false;
  }
};
template <int tile>
void zero_tile() {
  misused |= !configured;
  for (WordVec& row : tiles[tile]) row = WordVec{};
}
template <int tile>
void load_tile(const void* rows, i64 stride) {
  misused |= !configured;
  for (int i = 0; i < 16; ++i)
    __builtin_memcpy(&tiles[tile][i], static_cast<const char*>(rows) + i * stride, sizeof(WordVec));
}
template <int tile>
void store_tile(void* rows, i64 stride) {
  misused |= !configured;
  for (int i = 0; i < 16; ++i)
    __builtin_memcpy(static_cast<char*>(rows) + i * stride, &tiles[tile][i], sizeof(WordVec));
}

// Denormal inputs and results are zeros.
inline Vec flushed(Vec x) {
  const Vec magnitude = reinterpret_cast<Vec>(reinterpret_cast<WordVec>(x) & 0x7fffffffu);
  return magnitude < 0x1p-126f ? Vec{} : x;
}
inline Vec even_terms(WordVec pairs) {
  return flushed(reinterpret_cast<Vec>(pairs << 16));
}
inline Vec odd_terms(WordVec pairs) {
  return flushed(reinterpret_cast<Vec>(pairs & 0xffff0000u));
}
// Computes like VDPBF16PS (Intel SDM): the odd term is added first, then the even one, both fused and rounded
// to nearest.
inline Vec add_products(WordVec a, WordVec b, Vec sum) {
  sum = flushed(__builtin_elementwise_fma(odd_terms(a), odd_terms(b), flushed(sum)));
  return flushed(__builtin_elementwise_fma(even_terms(a), even_terms(b), sum));
}
// Computes like TDPBF16PS (Intel SDM): sums of the even and of the
// odd terms, fused and rounded to nearest, are added at the end.
template <int c, int a, int b>
void add_product() {
  misused |= !configured;
  for (int row = 0; row < 16; ++row) {
    Vec even{}, odd{};
    for (int i = 0; i < 16; ++i) {
      const WordVec pair = tiles[a][row][i] - WordVec{};
      even = flushed(__builtin_elementwise_fma(even_terms(pair), even_terms(tiles[b][i]), even));
      odd = flushed(__builtin_elementwise_fma(odd_terms(pair), odd_terms(tiles[b][i]), odd));
    }
    const Vec sum = flushed(reinterpret_cast<Vec>(tiles[c][row]) + flushed(even + odd));
    tiles[c][row] = reinterpret_cast<WordVec>(sum);
  }
}

}  // namespace flashjit::device
