// What this machine does at best: the yardsticks for CPU kernels.
#pragma once

#include "runtime/timing.hpp"

namespace flashjit::command {

// float32 multiply-adds in registers, on so many threads at once: TFLOP/s over about 10 ms of that clock.
// vector_bytes: 64 (AVX-512) or 32 (AVX2).
double measure_fma_tflops(int vector_bytes, int num_threads, Clock clock);

// The same of bf16 products by AMX, random numbers loaded from the first-level cache: one load of a tile for
// each product of two. The process must be allowed to use AMX, as one with an engine for it is.
double measure_amx_tflops(int num_threads, Clock clock);

// Reading memory that is in no cache, on so many threads at once: TB/s, each thread's best of ten passes.
double measure_read_bandwidth(int num_threads);

}  // namespace flashjit::command
