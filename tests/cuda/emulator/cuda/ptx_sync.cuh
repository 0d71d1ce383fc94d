// templates/cuda/ptx_sync.cuh on the host. Copies are complete at once.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

inline void mbarrier_init(u32 bar, u32 count) {
  emulator::block().init(bar, count);
}
inline void mbarrier_arrive(u32 bar) {
  emulator::block().arrive(bar, 0);
}
inline void cp_async_mbarrier_arrive_noinc(u32 bar) {
  mbarrier_arrive(bar);
}
inline void mbarrier_wait(u32 bar, u32 parity) {
  emulator::block().wait_mbarrier(bar, parity);
}
inline void bar_sync(int id, int threads) {
  emulator::block().named_sync(id, threads);
}
inline void red_add_release(u32* to, u32 value) {
  *to += value;
}
inline void st_release(u32* to, u32 value) {
  *to = value;
}
inline void ld_acquire_wait(const u32* from, u32 least) {
  emulator::block().wait([&] { return *from >= least; });
}
inline void ld_acquire_sys_wait(const u32* from, u32 least) {
  ld_acquire_wait(from, least);
}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

}  // namespace flashjit::device
