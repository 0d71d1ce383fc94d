// More wrappers of sm_90a's instructions: copies of contiguous memory by the copy engine, and stores of
// matrices. Each is named after its instruction.
#pragma once

#include "cuda/ptx_sm90a.cuh"

namespace flashjit::device {

// Copies contiguous memory; addresses and sizes are multiples of 16.
FLASHJIT_FN void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}
// Adds floats in shared memory to floats in global memory.
FLASHJIT_FN void cp_reduce_async_bulk_add(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}
FLASHJIT_FN void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's groups have read shared memory.
FLASHJIT_FN void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until this thread's groups are complete.
FLASHJIT_FN void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Stores four 8x8 matrices of 16-bit elements, transposed: a lane holds rows 2 (lane % 4) and the next one of
// column lane / 4. Lane l gives the address of row l % 8 of matrix l / 8.
FLASHJIT_FN void stmatrix_x4_trans(u32 to, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
FLASHJIT_FN void ld_shared_v2(float& a, float& b, u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}

}  // namespace flashjit::device
