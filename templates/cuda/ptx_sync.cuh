// Wrappers of PTX instructions by which warps and kernels wait for each other. Each is named after its
// instruction.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

// --- mbarrier

FLASHJIT_FN void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
FLASHJIT_FN void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// This thread arrives when all its earlier cp.async copies are complete.
FLASHJIT_FN void cp_async_mbarrier_arrive_noinc(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// The loop is part of the statement: this makes fewer blocks for the compiler, which takes long over each
// block. From sm_90 on a thread sleeps while it waits.
FLASHJIT_FN void mbarrier_wait(u32 bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(bar),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.test_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(bar),
      "r"(parity)
      : "memory");
#endif
}

// --- named barriers

FLASHJIT_FN void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- numbers in global memory that blocks count up for each other

// Adds when all that this thread has written, or has seen written, is visible.
FLASHJIT_FN void red_add_release(u32* to, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// Writes when all that this thread has written, or has seen written, is visible.
FLASHJIT_FN void st_release(u32* to, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// Waits until the number is at least so large.
FLASHJIT_FN void ld_acquire_wait(const u32* from, u32 least) {
  u32 value;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  while (value < least);
}
// The same for a number that another device writes.
FLASHJIT_FN void ld_acquire_sys_wait(const u32* from, u32 least) {
  u32 value;
  do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  while (value < least);
}

// --- dependent launches: nothing before sm_90, where the next kernel begins when this one has ended

// Lets the next kernel of the stream begin.
FLASHJIT_FN void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the kernel before this one has ended and its results are visible.
FLASHJIT_FN void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashjit::device
