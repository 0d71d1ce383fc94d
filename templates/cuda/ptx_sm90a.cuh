// Wrappers of the PTX instructions that sm_90a adds (PTX ISA 8.0 and later). Each is named after
// its instruction.
#pragma once

#include "cuda/ptx_sync.cuh"
#include "shared/tensor_map.h"

namespace flashjit::device {

// --- mbarrier

FLASHJIT_FN void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The address is computed in any case: otherwise ptxas adds a vote on whether to compute it.
FLASHJIT_FN void mbarrier_arrive_if(int condition, u32 bar) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(bar),
               "r"(condition)
               : "memory");
}
FLASHJIT_FN void mbarrier_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
FLASHJIT_FN void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// --- named barriers, register redistribution

FLASHJIT_FN void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// bar.sync of one barrier and bar.arrive at another, if the condition holds in all threads of the warp.
FLASHJIT_FN void bar_sync_arrive_if(int condition, int id, int next, int threads) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p bar.sync %1, %3;\n"
      "@p bar.arrive %2, %3;}" ::"r"(condition),
      "r"(id), "r"(next), "r"(threads)
      : "memory");
}
// Waits as bar.sync does. Whether x holds in any of the threads; all get the same.
FLASHJIT_FN bool bar_red_or(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "bar.red.or.pred p, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, p;}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(x)));
  return any;
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
// Asks for the line of memory that holds an address, for a later load.
FLASHJIT_FN void prefetch_global(const void* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}
FLASHJIT_FN void cp_async_bulk_tensor_4d(u32 to, const TensorMap& map, u32 bar, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Orders this thread's ordinary accesses to shared memory before later accesses by wgmma and by bulk copies.
FLASHJIT_FN void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Orders this thread's accesses to global memory and those of its bulk copies.
FLASHJIT_FN void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
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

// Descriptor of a shared-memory operand with 128-byte swizzle: rows of 128 bytes, in groups of 8. leading:
// bytes between panels of 128-byte rows, read only if the operand is not K-major.
FLASHJIT_FN u64 wgmma_descriptor(u32 address, u32 leading) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{leading >> 4} << 16) | ((address & 0x3ffff) >> 4);
}

}  // namespace flashjit::device
