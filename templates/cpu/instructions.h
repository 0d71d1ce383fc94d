// Operations that differ between instruction sets, under the same names: AVX-512 (x86-64-v4) if the compiler
// targets it, else AVX2 with FMA and F16C (x86-64-v3); AMX on top of AVX-512. All builtins and inline
// assembly are in this file. It does not include <immintrin.h>: parsing that header alone would take longer
// than compiling a kernel.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

#if defined(__AVX512F__)
constexpr int lanes = 16;
constexpr int vector_registers = 32;
#else
constexpr int lanes = 8;
constexpr int vector_registers = 16;
#endif

using Vec = float __attribute__((vector_size(4 * lanes)));
using IntVec = int __attribute__((vector_size(4 * lanes)));
using WordVec = u32 __attribute__((vector_size(4 * lanes)));

// Parts of exp2. representable(x): x, limited to the range of the other two. fraction(x): x - floor(x), zero
// for -inf. times_power(p, x): p * 2^floor(x).
#if defined(__AVX512F__)
FLASHJIT_FN Vec representable(Vec x) {
  return x;
}
FLASHJIT_FN Vec fraction(Vec x) {
  return __builtin_ia32_reduceps512_mask(x, 0x09, x, 0xffff, 4);
}
FLASHJIT_FN Vec times_power(Vec p, Vec x) {
  return __builtin_ia32_scalefps512_mask(p, x, x, 0xffff, 4);
}
#else
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
#endif

// The upper halves of two words as one word: low's half below, high's half above. The shift is inline
// assembly: otherwise Clang would make a slower permutation of the whole expression.
FLASHJIT_FN WordVec upper_halves(WordVec low, WordVec high) {
  WordVec shifted;
  asm("vpsrld $16, %1, %0" : "=v"(shifted) : "v"(low));
  return (high & 0xffff0000u) | shifted;
}

// While an object of this class lives, numbers below 2^-126 are zeros as operands and as results of each
// operation; with AMX they always are. Intel's processors take many times as long for operations with such
// numbers. Weights of keys far below a row's maximum would be such numbers.
class DenormalsAreZeros {
 public:
  FLASHJIT_FN DenormalsAreZeros() { __builtin_ia32_ldmxcsr(before_ | flush_results | flush_operands); }
  FLASHJIT_FN ~DenormalsAreZeros() { __builtin_ia32_ldmxcsr(before_); }

 private:
  static constexpr u32 flush_results = 0x8000, flush_operands = 0x40;
  const u32 before_ = __builtin_ia32_stmxcsr();
};

#if defined(__AVX512BF16__)
// sum + the two products of the bf16 in each word of a and b.
FLASHJIT_FN Vec add_products(WordVec a, WordVec b, Vec sum) {
  using Pairs = __bf16 __attribute__((vector_size(4 * lanes)));
  return __builtin_ia32_dpbf16ps_512(sum, reinterpret_cast<Pairs>(a), reinterpret_cast<Pairs>(b));
}
#endif

#if defined(__AMX_BF16__)
// While an object of this class lives, eight tile registers of 16 rows of 64 bytes exist.
class TileRegisters {
 public:
  FLASHJIT_FN TileRegisters() { __builtin_ia32_tile_loadconfig(&config_); }
  FLASHJIT_FN ~TileRegisters() { __builtin_ia32_tilerelease(); }

 private:
  static constexpr struct {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
  } config_ = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};
template <int tile>
FLASHJIT_FN void zero_tile() {
  __builtin_ia32_tilezero(tile);
}
// load_tile, store_tile: the rows are `stride` bytes apart in memory.
template <int tile>
FLASHJIT_FN void load_tile(const void* rows, i64 stride) {
  __builtin_ia32_tileloadd64(tile, rows, stride);
}
template <int tile>
FLASHJIT_FN void store_tile(void* rows, i64 stride) {
  __builtin_ia32_tilestored64(tile, rows, stride);
}
// c += a b. a: 16 x 32 bf16. b: 32 x 16 bf16; the elements of rows 2 i and 2 i + 1 alternate in row i of the
// tile. c: 16 x 16 float32.
template <int c, int a, int b>
FLASHJIT_FN void add_product() {
  __builtin_ia32_tdpbf16ps(c, a, b);
}
#endif

}  // namespace flashjit::device
