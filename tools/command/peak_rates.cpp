#include "tools/command/peak_rates.hpp"

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <numeric>
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

// The sum of what threads that begin together measure, each for itself.
template <class Measure>
double sum_of_threads(int num_threads, Measure measure) {
  std::vector<double> rates(num_threads);
  std::barrier start(num_threads);
  {
    std::vector<std::jthread> threads;
    for (double& rate : rates)
      threads.emplace_back([&] { rate = measure([&] { start.arrive_and_wait(); }); });
  }
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

__attribute__((target("avx2"))) std::uint64_t sum_of(const std::vector<std::uint64_t>& words) {
  __m256i sums[4] = {};
  for (std::size_t i = 0; i + 16 <= words.size(); i += 16) {
    for (std::size_t j = 0; j < 4; ++j)
      sums[j] = _mm256_add_epi64(
          sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words.data() + i + 4 * j)));
  }
  const __m256i sum =
      _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
  return static_cast<std::uint64_t>(_mm256_extract_epi64(sum, 0));
}

}  // namespace

double measure_fma_tflops(int vector_bytes, int num_threads, Clock clock) {
  if (num_threads == 1) return one_thread(vector_bytes, clock);
  return sum_of_threads(num_threads, [&](auto wait_for_others) {
    wait_for_others();
    return one_thread(vector_bytes, clock);
  });
}

double measure_read_bandwidth(int num_threads) {
  constexpr int passes = 10;  // others may be at work
  const auto last_cache = static_cast<std::size_t>(std::max(::sysconf(_SC_LEVEL3_CACHE_SIZE), 0L));
  const std::size_t bytes = std::clamp<std::size_t>(2 * last_cache, 32 << 20, 256 << 20);
  const std::size_t words = bytes / sizeof(std::uint64_t) / static_cast<std::size_t>(num_threads);
  return sum_of_threads(num_threads, [&](auto wait_for_others) {
    const std::vector<std::uint64_t> memory(words, 1);
    wait_for_others();
    std::uint64_t sum = 0;
    double best = 0;
    for (int pass = 0; pass < passes; ++pass) {
      const double start = now_ms(Clock::wall);
      sum += sum_of(memory);
      best =
          std::max(best, static_cast<double>(words * sizeof(std::uint64_t)) / (now_ms(Clock::wall) - start));
    }
    volatile std::uint64_t keep = sum;
    static_cast<void>(keep);
    return best * 1e-9;
  });
}

}  // namespace flashjit::command
