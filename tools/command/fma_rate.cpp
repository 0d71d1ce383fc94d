#include "tools/command/fma_rate.hpp"

#include <immintrin.h>

#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>

namespace flashjit::command {
namespace {

// Enough independent chains to hide the latency of two units; few enough to stay in registers.
constexpr int chains = 12;
constexpr int rounds = 4096;

// Each returns the floating-point operations it did. The sums go through `sink`, so that they are computed.
__attribute__((target("avx512f"))) double burst_512(float* sink) {
  __m512 sums[chains];
  for (int i = 0; i < chains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(sink[0]), b = _mm512_set1_ps(sink[1]);
  for (int r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < chains; ++i) sums[i] = _mm512_fmadd_ps(sums[i], a, b);
  }
  float lanes[16];
  for (int i = 1; i < chains; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  _mm512_storeu_ps(lanes, sums[0]);
  sink[2] += lanes[0];
  return 2.0 * 16 * chains * rounds;
}

__attribute__((target("avx2,fma"))) double burst_256(float* sink) {
  __m256 sums[chains];
  for (int i = 0; i < chains; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(sink[0]), b = _mm256_set1_ps(sink[1]);
  for (int r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < chains; ++i) sums[i] = _mm256_fmadd_ps(sums[i], a, b);
  }
  float lanes[8];
  for (int i = 1; i < chains; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  _mm256_storeu_ps(lanes, sums[0]);
  sink[2] += lanes[0];
  return 2.0 * 8 * chains * rounds;
}

// TFLOP/s of the calling thread.
double one_thread(int vector_bytes, Clock clock) {
  float sink[3] = {0.5f, 1.0f, 0.0f};
  double flops = 0;
  const double start = now_ms(clock);
  double now = start;
  do {
    flops += vector_bytes == 64 ? burst_512(sink) : burst_256(sink);
    now = now_ms(clock);
  } while (now < start + 10);
  volatile float keep = sink[2];
  static_cast<void>(keep);
  return flops / (now - start) * 1e-9;
}

}  // namespace

double measure_fma_tflops(int vector_bytes, int num_threads, Clock clock) {
  if (num_threads == 1) return one_thread(vector_bytes, clock);
  std::vector<double> rates(num_threads);
  std::barrier start(num_threads);
  {
    std::vector<std::jthread> threads;
    for (double& rate : rates) {
      threads.emplace_back([&] {
        start.arrive_and_wait();
        rate = one_thread(vector_bytes, clock);
      });
    }
  }
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

}  // namespace flashjit::command
