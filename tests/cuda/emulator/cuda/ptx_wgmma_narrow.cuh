// templates/cuda/ptx_wgmma_narrow.cuh on the host.
#pragma once

#include "cuda/ptx_sm90a.cuh"

namespace flashjit::device {

template <bool accumulates, class T>
void wgmma_m64n16k16(T, float (&d)[8], const u32 (&a)[4], u64 b) {
  wgmma_rs<T, 16, false>(d, a, b, accumulates);
}
template <int count>
void wgmma_results(float (&)[count]) {}

}  // namespace flashjit::device
