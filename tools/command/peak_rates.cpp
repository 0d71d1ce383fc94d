#include "tools/command/peak_rates.hpp"

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace flashjit::command {
namespace {

// Enough independent chains to hide the latency of two units; few enough to stay in registers.
constexpr int chains = 12;
constexpr int rounds = 4096;

// Each burst returns how many floating-point operations it did. The sums go to `sink`, so that the compiler
// keeps them.
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

constexpr int amx_steps = 8, amx_tile = 512;

// 32 x 32 sums from two tiles of each side at a time, amx_steps after each other; `a` and `b` at cache lines.
__attribute__((target("amx-tile,amx-bf16"))) double burst_amx(const std::uint16_t* a,
                                                              const std::uint16_t* b) {
  // Static: GCC's ldtilecfg tells the optimiser only of the first bytes.
  static constexpr struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < rounds; ++i) {
    const std::ptrdiff_t at = i % amx_steps * 2 * amx_tile;
    _tile_loadd(4, a + at, 64);
    _tile_loadd(5, a + at + amx_tile, 64);
    _tile_loadd(6, b + at, 64);
    _tile_loadd(7, b + at + amx_tile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 2.0 * 32 * 32 * 32 * rounds;
}

// TFLOP/s of the calling thread; burst() returns how many operations it did.
template <class Burst>
double rate_of(Burst burst, Clock clock) {
  double flops = 0;
  const double start = now_ms(clock);
  double now = start;
  do {
    flops += burst();
    now = now_ms(clock);
  } while (now < start + 10);
  return flops / (now - start) * 1e-9;
}

double fma_of_one_thread(int vector_bytes, Clock clock) {
  float sink[3] = {0.5f, 1.0f, 0.0f};
  const double rate = rate_of([&] { return vector_bytes == 64 ? burst_512(sink) : burst_256(sink); }, clock);
  volatile float keep = sink[2];
  static_cast<void>(keep);
  return rate;
}

double amx_of_one_thread(Clock clock) {
  // 16 kB of each side, in a first-level cache together, rows of tiles in a cache line each.
  struct alignas(64) Tiles {
    std::array<std::uint16_t, amx_steps * 2 * amx_tile> numbers;
  };
  const auto sides = std::make_unique<std::array<Tiles, 2>>();
  std::mt19937 random;
  for (Tiles& side : *sides)
    for (std::uint16_t& x : side.numbers)  // between 1/2 and 2, either sign
      x = static_cast<std::uint16_t>((random() & 0x80ff) | 0x3f00);
  return rate_of([&] { return burst_amx((*sides)[0].numbers.data(), (*sides)[1].numbers.data()); }, clock);
}

// Threads begin together and measure each for itself; returns the sum.
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

// The sum of the rates of `num_threads` threads that run at once. One of them is the caller, whose processor
// time is its own.
template <class Measure>
double rate_of_threads(int num_threads, Measure measure) {
  if (num_threads == 1) return measure();
  return sum_of_threads(num_threads, [&](auto wait_for_others) {
    wait_for_others();
    return measure();
  });
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
  return rate_of_threads(num_threads, [&] { return fma_of_one_thread(vector_bytes, clock); });
}

double measure_amx_tflops(int num_threads, Clock clock) {
  return rate_of_threads(num_threads, [&] { return amx_of_one_thread(clock); });
}

double measure_read_bandwidth(int num_threads) {
  constexpr int passes = 10;  // other processes may disturb some passes
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
