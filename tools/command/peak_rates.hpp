// The peak rates of this machine, to which CPU kernels are compared.
#pragma once

#include "runtime/timing.hpp"

namespace flashjit::command {

// TFLOP/s of float32 multiply-adds in registers on `num_threads` threads, over about 10 ms of the clock.
// vector_bytes: 64 (AVX-512) or 32 (AVX2).
double measure_fma_tflops(int vector_bytes, int num_threads, Clock clock);

// TFLOP/s of bf16 products by AMX. The numbers are random and come from the first-level cache: each product
// of two tiles loads one. The process must have permission to use AMX; an engine for an AMX target asks for
// it.
double measure_amx_tflops(int num_threads, Clock clock);

// TB/s at which `num_threads` threads read memory that is in no cache: each thread's best of ten passes.
double measure_read_bandwidth(int num_threads);

}  // namespace flashjit::command
