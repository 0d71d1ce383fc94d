// What sm_90a adds to ptx.cuh, each wrapper named after its instruction (PTX ISA 8.0 and later).
#pragma once

#include "cuda/ptx.cuh"
#include "shared/params.h"

namespace flashjit::device {

// --- mbarrier

FLASHJIT_FN void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
FLASHJIT_FN void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
FLASHJIT_FN void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
FLASHJIT_FN void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
FLASHJIT_FN bool mbarrier_try_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}
FLASHJIT_FN void mbarrier_wait(u32 bar, u32 parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

// --- named barriers, register redistribution, election

FLASHJIT_FN void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
FLASHJIT_FN void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int registers>
FLASHJIT_FN void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
FLASHJIT_FN void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// --- bulk tensor copies

FLASHJIT_FN void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
FLASHJIT_FN void cp_async_bulk_tensor_4d(u32 to, const TensorMap& map, u32 bar, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Orders this thread's ordinary accesses to shared memory before later ones of wgmma and of bulk copies.
FLASHJIT_FN void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- wgmma

FLASHJIT_FN void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
FLASHJIT_FN void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
FLASHJIT_FN void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Shared-memory operand with 128-byte swizzle. leading: bytes between 128-byte wide panels (only read where
// the operand is not K-major); rows are 128 bytes, in groups of 8.
FLASHJIT_FN u64 wgmma_descriptor(u32 address, u32 leading) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{leading >> 4} << 16) | ((address & 0x3ffff) >> 4);
}

// d[n / 2] (+)= a * b, m64 n k16, float32 sums; overwrites d where accumulate is 0. The table below has one
// line for each n.
// clang-format off
#define FLASHJIT_D8 "%0, %1, %2, %3"
#define FLASHJIT_D16 FLASHJIT_D8 ", %4, %5, %6, %7"
#define FLASHJIT_D24 FLASHJIT_D16 ", %8, %9, %10, %11"
#define FLASHJIT_D32 FLASHJIT_D24 ", %12, %13, %14, %15"
#define FLASHJIT_D40 FLASHJIT_D32 ", %16, %17, %18, %19"
#define FLASHJIT_D48 FLASHJIT_D40 ", %20, %21, %22, %23"
#define FLASHJIT_D56 FLASHJIT_D48 ", %24, %25, %26, %27"
#define FLASHJIT_D64 FLASHJIT_D56 ", %28, %29, %30, %31"
#define FLASHJIT_D72 FLASHJIT_D64 ", %32, %33, %34, %35"
#define FLASHJIT_D80 FLASHJIT_D72 ", %36, %37, %38, %39"
#define FLASHJIT_D88 FLASHJIT_D80 ", %40, %41, %42, %43"
#define FLASHJIT_D96 FLASHJIT_D88 ", %44, %45, %46, %47"
#define FLASHJIT_D104 FLASHJIT_D96 ", %48, %49, %50, %51"
#define FLASHJIT_D112 FLASHJIT_D104 ", %52, %53, %54, %55"
#define FLASHJIT_D120 FLASHJIT_D112 ", %56, %57, %58, %59"
#define FLASHJIT_D128 FLASHJIT_D120 ", %60, %61, %62, %63"
#define FLASHJIT_D136 FLASHJIT_D128 ", %64, %65, %66, %67"
#define FLASHJIT_D144 FLASHJIT_D136 ", %68, %69, %70, %71"
#define FLASHJIT_D152 FLASHJIT_D144 ", %72, %73, %74, %75"
#define FLASHJIT_D160 FLASHJIT_D152 ", %76, %77, %78, %79"
#define FLASHJIT_D168 FLASHJIT_D160 ", %80, %81, %82, %83"
#define FLASHJIT_D176 FLASHJIT_D168 ", %84, %85, %86, %87"
#define FLASHJIT_D184 FLASHJIT_D176 ", %88, %89, %90, %91"
#define FLASHJIT_D192 FLASHJIT_D184 ", %92, %93, %94, %95"
#define FLASHJIT_D200 FLASHJIT_D192 ", %96, %97, %98, %99"
#define FLASHJIT_D208 FLASHJIT_D200 ", %100, %101, %102, %103"
#define FLASHJIT_D216 FLASHJIT_D208 ", %104, %105, %106, %107"
#define FLASHJIT_D224 FLASHJIT_D216 ", %108, %109, %110, %111"
#define FLASHJIT_D232 FLASHJIT_D224 ", %112, %113, %114, %115"
#define FLASHJIT_D240 FLASHJIT_D232 ", %116, %117, %118, %119"
#define FLASHJIT_D248 FLASHJIT_D240 ", %120, %121, %122, %123"
#define FLASHJIT_D256 FLASHJIT_D248 ", %124, %125, %126, %127"
#define FLASHJIT_O8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FLASHJIT_O16 FLASHJIT_O8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FLASHJIT_O24 FLASHJIT_O16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define FLASHJIT_O32 FLASHJIT_O24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define FLASHJIT_O40 FLASHJIT_O32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define FLASHJIT_O48 FLASHJIT_O40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define FLASHJIT_O56 FLASHJIT_O48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FLASHJIT_O64 FLASHJIT_O56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FLASHJIT_O72 FLASHJIT_O64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FLASHJIT_O80 FLASHJIT_O72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FLASHJIT_O88 FLASHJIT_O80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define FLASHJIT_O96 FLASHJIT_O88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FLASHJIT_O104 FLASHJIT_O96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FLASHJIT_O112 FLASHJIT_O104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define FLASHJIT_O120 FLASHJIT_O112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define FLASHJIT_O128 FLASHJIT_O120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FLASHJIT_O136 FLASHJIT_O128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define FLASHJIT_O144 FLASHJIT_O136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define FLASHJIT_O152 FLASHJIT_O144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define FLASHJIT_O160 FLASHJIT_O152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define FLASHJIT_O168 FLASHJIT_O160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define FLASHJIT_O176 FLASHJIT_O168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define FLASHJIT_O184 FLASHJIT_O176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define FLASHJIT_O192 FLASHJIT_O184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define FLASHJIT_O200 FLASHJIT_O192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define FLASHJIT_O208 FLASHJIT_O200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define FLASHJIT_O216 FLASHJIT_O208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define FLASHJIT_O224 FLASHJIT_O216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define FLASHJIT_O232 FLASHJIT_O224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define FLASHJIT_O240 FLASHJIT_O232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define FLASHJIT_O248 FLASHJIT_O240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define FLASHJIT_O256 FLASHJIT_O248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define FLASHJIT_WGMMA_TEXT(n, type, a, b, accumulate, tail)                                               \
  "{.reg .pred p; setp.ne.b32 p, %" #accumulate ", 0;"                                                     \
  " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FLASHJIT_D##n "}, " a ", %" #b     \
  ", p, 1, 1" tail ";}"

template <class T>
constexpr bool is_bf16 = false;
template <>
inline constexpr bool is_bf16<bf16> = true;

// a and b from shared memory, both K-major.
template <class T, int N>
FLASHJIT_FN void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
#define FLASHJIT_WGMMA(n, r0, r1, r2, r3, r4, r5)                                                                      \
  if constexpr (N == n && is_bf16<T>)                                                                                  \
    asm volatile(FLASHJIT_WGMMA_TEXT(n, "bf16", "%" #r0, r1, r2, ", 0, 0") : FLASHJIT_O##n : "l"(a), "l"(b), "r"(accumulate)); \
  else if constexpr (N == n)                                                                                           \
    asm volatile(FLASHJIT_WGMMA_TEXT(n, "f16", "%" #r0, r1, r2, ", 0, 0") : FLASHJIT_O##n : "l"(a), "l"(b), "r"(accumulate));
  FLASHJIT_WGMMA(8, 4, 5, 6, 7, 8, 9)
  FLASHJIT_WGMMA(16, 8, 9, 10, 11, 12, 13)
  FLASHJIT_WGMMA(24, 12, 13, 14, 15, 16, 17)
  FLASHJIT_WGMMA(32, 16, 17, 18, 19, 20, 21)
  FLASHJIT_WGMMA(40, 20, 21, 22, 23, 24, 25)
  FLASHJIT_WGMMA(48, 24, 25, 26, 27, 28, 29)
  FLASHJIT_WGMMA(56, 28, 29, 30, 31, 32, 33)
  FLASHJIT_WGMMA(64, 32, 33, 34, 35, 36, 37)
  FLASHJIT_WGMMA(72, 36, 37, 38, 39, 40, 41)
  FLASHJIT_WGMMA(80, 40, 41, 42, 43, 44, 45)
  FLASHJIT_WGMMA(88, 44, 45, 46, 47, 48, 49)
  FLASHJIT_WGMMA(96, 48, 49, 50, 51, 52, 53)
  FLASHJIT_WGMMA(104, 52, 53, 54, 55, 56, 57)
  FLASHJIT_WGMMA(112, 56, 57, 58, 59, 60, 61)
  FLASHJIT_WGMMA(120, 60, 61, 62, 63, 64, 65)
  FLASHJIT_WGMMA(128, 64, 65, 66, 67, 68, 69)
  FLASHJIT_WGMMA(136, 68, 69, 70, 71, 72, 73)
  FLASHJIT_WGMMA(144, 72, 73, 74, 75, 76, 77)
  FLASHJIT_WGMMA(152, 76, 77, 78, 79, 80, 81)
  FLASHJIT_WGMMA(160, 80, 81, 82, 83, 84, 85)
  FLASHJIT_WGMMA(168, 84, 85, 86, 87, 88, 89)
  FLASHJIT_WGMMA(176, 88, 89, 90, 91, 92, 93)
  FLASHJIT_WGMMA(184, 92, 93, 94, 95, 96, 97)
  FLASHJIT_WGMMA(192, 96, 97, 98, 99, 100, 101)
  FLASHJIT_WGMMA(200, 100, 101, 102, 103, 104, 105)
  FLASHJIT_WGMMA(208, 104, 105, 106, 107, 108, 109)
  FLASHJIT_WGMMA(216, 108, 109, 110, 111, 112, 113)
  FLASHJIT_WGMMA(224, 112, 113, 114, 115, 116, 117)
  FLASHJIT_WGMMA(232, 116, 117, 118, 119, 120, 121)
  FLASHJIT_WGMMA(240, 120, 121, 122, 123, 124, 125)
  FLASHJIT_WGMMA(248, 124, 125, 126, 127, 128, 129)
  FLASHJIT_WGMMA(256, 128, 129, 130, 131, 132, 133)
#undef FLASHJIT_WGMMA
}

// a from registers, b from shared memory: K-major, or with N contiguous.
template <class T, int N, bool b_n_major>
FLASHJIT_FN void wgmma_rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
#define FLASHJIT_WGMMA_A(r0, r1, r2, r3) "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}"
#define FLASHJIT_WGMMA_RS(n, type, major, r0, r1, r2, r3, r4, r5)                                          \
  asm volatile(FLASHJIT_WGMMA_TEXT(n, type, FLASHJIT_WGMMA_A(r0, r1, r2, r3), r4, r5, ", " major)          \
               : FLASHJIT_O##n : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate))
#define FLASHJIT_WGMMA(n, r0, r1, r2, r3, r4, r5)                                                          \
  if constexpr (N == n) {                                                                                  \
    if constexpr (is_bf16<T> && b_n_major) FLASHJIT_WGMMA_RS(n, "bf16", "1", r0, r1, r2, r3, r4, r5);      \
    else if constexpr (is_bf16<T>) FLASHJIT_WGMMA_RS(n, "bf16", "0", r0, r1, r2, r3, r4, r5);              \
    else if constexpr (b_n_major) FLASHJIT_WGMMA_RS(n, "f16", "1", r0, r1, r2, r3, r4, r5);                \
    else FLASHJIT_WGMMA_RS(n, "f16", "0", r0, r1, r2, r3, r4, r5);                                         \
  }
  FLASHJIT_WGMMA(8, 4, 5, 6, 7, 8, 9)
  FLASHJIT_WGMMA(16, 8, 9, 10, 11, 12, 13)
  FLASHJIT_WGMMA(24, 12, 13, 14, 15, 16, 17)
  FLASHJIT_WGMMA(32, 16, 17, 18, 19, 20, 21)
  FLASHJIT_WGMMA(40, 20, 21, 22, 23, 24, 25)
  FLASHJIT_WGMMA(48, 24, 25, 26, 27, 28, 29)
  FLASHJIT_WGMMA(56, 28, 29, 30, 31, 32, 33)
  FLASHJIT_WGMMA(64, 32, 33, 34, 35, 36, 37)
  FLASHJIT_WGMMA(72, 36, 37, 38, 39, 40, 41)
  FLASHJIT_WGMMA(80, 40, 41, 42, 43, 44, 45)
  FLASHJIT_WGMMA(88, 44, 45, 46, 47, 48, 49)
  FLASHJIT_WGMMA(96, 48, 49, 50, 51, 52, 53)
  FLASHJIT_WGMMA(104, 52, 53, 54, 55, 56, 57)
  FLASHJIT_WGMMA(112, 56, 57, 58, 59, 60, 61)
  FLASHJIT_WGMMA(120, 60, 61, 62, 63, 64, 65)
  FLASHJIT_WGMMA(128, 64, 65, 66, 67, 68, 69)
  FLASHJIT_WGMMA(136, 68, 69, 70, 71, 72, 73)
  FLASHJIT_WGMMA(144, 72, 73, 74, 75, 76, 77)
  FLASHJIT_WGMMA(152, 76, 77, 78, 79, 80, 81)
  FLASHJIT_WGMMA(160, 80, 81, 82, 83, 84, 85)
  FLASHJIT_WGMMA(168, 84, 85, 86, 87, 88, 89)
  FLASHJIT_WGMMA(176, 88, 89, 90, 91, 92, 93)
  FLASHJIT_WGMMA(184, 92, 93, 94, 95, 96, 97)
  FLASHJIT_WGMMA(192, 96, 97, 98, 99, 100, 101)
  FLASHJIT_WGMMA(200, 100, 101, 102, 103, 104, 105)
  FLASHJIT_WGMMA(208, 104, 105, 106, 107, 108, 109)
  FLASHJIT_WGMMA(216, 108, 109, 110, 111, 112, 113)
  FLASHJIT_WGMMA(224, 112, 113, 114, 115, 116, 117)
  FLASHJIT_WGMMA(232, 116, 117, 118, 119, 120, 121)
  FLASHJIT_WGMMA(240, 120, 121, 122, 123, 124, 125)
  FLASHJIT_WGMMA(248, 124, 125, 126, 127, 128, 129)
  FLASHJIT_WGMMA(256, 128, 129, 130, 131, 132, 133)
#undef FLASHJIT_WGMMA
#undef FLASHJIT_WGMMA_RS
#undef FLASHJIT_WGMMA_A
}
// clang-format on

}  // namespace flashjit::device
