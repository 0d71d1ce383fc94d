// Wrappers of all PTX instructions of the sm_80 family, for sm_80 and newer. Each is named after its
// instruction. Instructions that access shared memory are volatile and keep their order among each other;
// arithmetic may move.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Volatile: values that depend on a second reading are computed again, not held in registers since the first.
FLASHJIT_FN u32 ctaid_x() {
  u32 r;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
  return r;
}
FLASHJIT_FN u32 ctaid_y() {
  u32 r;
  asm("mov.u32 %0, %%ctaid.y;" : "=r"(r));
  return r;
}
FLASHJIT_FN u32 ctaid_z() {
  u32 r;
  asm("mov.u32 %0, %%ctaid.z;" : "=r"(r));
  return r;
}
FLASHJIT_FN u32 nctaid_x() {
  u32 r;
  asm("mov.u32 %0, %%nctaid.x;" : "=r"(r));
  return r;
}
FLASHJIT_FN u32 nctaid_y() {
  u32 r;
  asm("mov.u32 %0, %%nctaid.y;" : "=r"(r));
  return r;
}
FLASHJIT_FN u32 nctaid_z() {
  u32 r;
  asm("mov.u32 %0, %%nctaid.z;" : "=r"(r));
  return r;
}
FLASHJIT_FN u32 tid_x() {
  u32 r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

FLASHJIT_FN u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory. The first `valid` bytes (0 to 16) are read, the others are zeros.
FLASHJIT_FN void cp_async_cg(u32 to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
               : "memory");
}
// The same with a policy of the second-level cache.
FLASHJIT_FN void cp_async_cg(u32 to, const void* from, int valid, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(valid), "l"(policy)
               : "memory");
}
// Policies: for data that are read once, and for all others.
FLASHJIT_FN u64 l2_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
FLASHJIT_FN u64 l2_evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
FLASHJIT_FN void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `pending` of this thread's latest groups are in flight.
template <int pending>
FLASHJIT_FN void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8.
FLASHJIT_FN void ldmatrix_x4(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
FLASHJIT_FN void ldmatrix_x2(u32& r0, u32& r1, u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(from)
               : "memory");
}
FLASHJIT_FN void ldmatrix_x4_trans(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
FLASHJIT_FN void ldmatrix_x2_trans(u32& r0, u32& r1, u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(from)
               : "memory");
}

// d += a * b; a is 16x16 row-major, b is 16x8 column-major, d is float32.
FLASHJIT_FN void mma_m16n8k16(bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FLASHJIT_FN void mma_m16n8k16(fp16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to 16-bit elements in one register, `low` in the low half.
FLASHJIT_FN u32 cvt_rn_x2(bf16, float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
FLASHJIT_FN u32 cvt_rn_x2(fp16, float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

FLASHJIT_FN float to_float(bf16 x) {
  return __uint_as_float(u32{x.bits} << 16);
}
FLASHJIT_FN float to_float(fp16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
  return r;
}
FLASHJIT_FN float ex2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
FLASHJIT_FN float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
FLASHJIT_FN float lg2_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

FLASHJIT_FN void st_shared(u32 to, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
FLASHJIT_FN void ld_shared_v2(int& a, int& b, u32 from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}
FLASHJIT_FN void ld_shared_v4(u32 (&r)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
FLASHJIT_FN void st_shared_v2(u32 to, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
FLASHJIT_FN void st_shared_v4(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// For data that are read once and not written by anyone meanwhile. They stay out of the first-level cache.
FLASHJIT_FN void ld_global_nc_v4(u32 (&r)[4], const void* from) {
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "l"(from));
}
FLASHJIT_FN float ld_global_nc(const float* from) {
  float r;
  asm("ld.global.nc.f32 %0, [%1];" : "=f"(r) : "l"(from));
  return r;
}
// Past the first-level cache, which may hold what another kernel has overwritten since.
FLASHJIT_FN void ld_global_cg_v4(u32 (&r)[4], const void* from) {
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(from)
               : "memory");
}
FLASHJIT_FN void ld_global_cg_v2(u32 (&r)[2], const void* from) {
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(from) : "memory");
}
FLASHJIT_FN float ld_global_cg(const float* from) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(from) : "memory");
  return r;
}
FLASHJIT_FN void st_global(void* to, u32 value) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
FLASHJIT_FN void st_global_v2(void* to, const u32 (&r)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(r[0]), "r"(r[1]) : "memory");
}
FLASHJIT_FN void st_global_v4(void* to, const u32 (&r)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

}  // namespace flashjit::device
