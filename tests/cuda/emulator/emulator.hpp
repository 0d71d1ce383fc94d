// Runs one block of a GPU kernel on the host. Every thread is a fiber; when one would wait, the next one
// runs. The instructions of templates/cuda/ptx*.cuh that the sm_90a kernels use are functions of the same
// names in the headers of cuda/, which come first in the include path. Copies and products happen at
// once. So tests show that every element goes to its place, but not that every access waits for its turn.
#pragma once

#include <ucontext.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/tensor_maps.hpp"
#include "templates/shared/platform.h"
#include "tools/verify/element.hpp"

#define __align__(n) __attribute__((aligned(n)))
#define __shared__

namespace flashjit::device {
inline char dynamic_shared[232448] __align__(1024);
}

struct EmulatedIndex {
  unsigned x, y, z = 0;
};
inline EmulatedIndex threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};

namespace flashjit::emulator {

using device::i64;
using device::u32;
using device::u64;

// The emulated content of a TensorMap. Rows of panels are swizzled, those of 1-byte elements are not.
struct TensorMap {
  const void* data;
  const cuda::TensorMapShape* shape;
  unsigned element_bytes;
};

class Block {
 public:
  // Runs body() on so many threads, with shared memory that
  // holds `garbage`. Throws if all threads wait for each other.
  static void run(int threads, int shared_bytes, int garbage, const std::function<void()>& body) {
    Block block(threads, shared_bytes, body);
    std::memset(device::dynamic_shared, garbage, sizeof device::dynamic_shared);
    current_ = &block;
    block.schedule();
  }
  static Block& current() { return *current_; }

  template <class Condition>
  void wait(const Condition& condition) {
    while (!condition()) swapcontext(&fibers_[running_].context, &scheduler_);
  }
  // Lets all other threads run first.
  void pause() {
    ++progress_;
    swapcontext(&fibers_[running_].context, &scheduler_);
  }

  // ---- shared memory

  char* shared(u32 address, int bytes) {
    if (static_cast<i64>(address) + bytes > shared_bytes_) throw std::runtime_error("outside shared memory");
    return device::dynamic_shared + address;
  }
  template <class T>
  T load(u32 address) {
    T value;
    std::memcpy(&value, shared(address, sizeof value), sizeof value);
    return value;
  }
  template <class T>
  void store(u32 address, const T& value) {
    std::memcpy(shared(address, sizeof value), &value, sizeof value);
  }
  // The address within panels with a swizzle of 128 bytes.
  static u32 swizzled(u32 address) { return address ^ (address >> 3 & 0x70); }

  // ---- barriers

  void init(u32 bar, u32 count) { mbarriers_[bar] = {count, count, 0, 0, true}; }
  // Throws if no thread has waited for the phase before, as compute-sanitizer does.
  void expect(u32 bar, i64 bytes) { mbarriers_.at(bar).bytes += bytes; }
  void arrive(u32 bar, i64 expected_bytes) {
    Mbarrier& b = mbarriers_.at(bar);
    if (b.pending == b.count && !b.was_waited_for)
      throw std::runtime_error("no thread waited for a phase of the mbarrier at " + std::to_string(bar));
    b.bytes += expected_bytes;
    --b.pending;
    b.complete_if_done(progress_);
  }
  void complete(u32 bar, i64 bytes) {
    Mbarrier& b = mbarriers_.at(bar);
    b.bytes -= bytes;
    b.complete_if_done(progress_);
  }
  void wait_mbarrier(u32 bar, u32 parity) {
    wait([&] { return mbarriers_.at(bar).phase != parity; });
    mbarriers_.at(bar).was_waited_for = true;
  }
  void named_arrive(int id, int threads) {
    Barrier& b = named_[static_cast<std::size_t>(id)];
    if (++b.arrived == threads) b.complete(progress_);
  }
  // Whether x holds in any of the threads.
  bool named_sync(int id, int threads, bool x = false) {
    Barrier& b = named_[static_cast<std::size_t>(id)];
    const int generation = b.generation;
    b.any |= x;
    named_arrive(id, threads);
    wait([&] { return b.generation != generation; });
    return b.last_any;
  }
  void warp_sync() {
    Barrier& b = warps_[threadIdx.x / 32];
    const int generation = b.generation;
    if (++b.arrived == 32) b.complete(progress_);
    wait([&] { return b.generation != generation; });
  }
  // The lanes of `mask` wait for each other.
  void warp_sync(u32 mask) {
    Barrier& b = partial_[{threadIdx.x / 32, mask}];
    const int generation = b.generation;
    if (++b.arrived == std::popcount(mask)) b.complete(progress_);
    wait([&] { return b.generation != generation; });
  }
  int threads() const { return static_cast<int>(fibers_.size()); }

  // The values of the warp's lanes, in the order of lanes. All lanes of `mask` call it; other lanes' values
  // are any.
  template <class T>
  std::array<T, 32> all_lanes(const T& mine, u32 mask = 0xffffffff) {
    static_assert(sizeof(T) <= 16);
    std::memcpy(slots_[threadIdx.x].data(), &mine, sizeof mine);
    const auto sync = [&] { mask == 0xffffffff ? warp_sync() : warp_sync(mask); };
    sync();
    std::array<T, 32> all;
    for (std::size_t lane = 0; lane < 32; ++lane)
      std::memcpy(&all[lane], slots_[threadIdx.x / 32 * 32 + lane].data(), sizeof mine);
    sync();
    return all;
  }

 private:
  struct Mbarrier {
    u32 count, pending;
    i64 bytes;
    u32 phase;
    bool was_waited_for;  // the last phase
    void complete_if_done(i64& progress) {
      ++progress;
      if (pending > 0 || bytes != 0) return;
      pending = count;
      phase ^= 1;
      was_waited_for = false;
    }
  };
  struct Barrier {
    int arrived = 0, generation = 0;
    bool any = false, last_any = false;
    void complete(i64& progress) {
      ++progress;
      arrived = 0;
      ++generation;
      last_any = std::exchange(any, false);
    }
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
  };

  Block(int threads, int shared_bytes, const std::function<void()>& body)
      : shared_bytes_(shared_bytes),
        body_(body),
        fibers_(static_cast<std::size_t>(threads)),
        warps_(static_cast<std::size_t>(threads) / 32),
        slots_(static_cast<std::size_t>(threads)) {
    constexpr std::size_t stack_bytes = 1 << 17;
    for (Fiber& fiber : fibers_) {
      fiber.stack = std::make_unique_for_overwrite<char[]>(stack_bytes);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = stack_bytes;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::enter, 0);
    }
  }

  static void enter() {
    try {
      current_->body_();
    } catch (...) {
      current_->error_ = std::current_exception();
    }
    current_->fibers_[current_->running_].done = true;
    ++current_->progress_;
  }

  void schedule() {
    for (std::size_t left = fibers_.size(); left > 0;) {
      const i64 before = progress_;
      for (running_ = 0; running_ < fibers_.size(); ++running_) {
        if (fibers_[running_].done) continue;
        threadIdx.x = static_cast<unsigned>(running_);
        swapcontext(&scheduler_, &fibers_[running_].context);
        if (error_) std::rethrow_exception(error_);
        left -= fibers_[running_].done;
      }
      if (progress_ == before) throw std::runtime_error("all threads wait");
    }
  }

  inline static Block* current_ = nullptr;
  const int shared_bytes_;
  const std::function<void()>& body_;
  std::vector<Fiber> fibers_;
  std::map<u32, Mbarrier> mbarriers_;
  std::array<Barrier, 16> named_;
  std::vector<Barrier> warps_;
  std::map<std::pair<u32, u32>, Barrier> partial_;  // of a warp and a mask
  std::vector<std::array<char, 16>> slots_;
  ucontext_t scheduler_;
  std::size_t running_ = 0;
  i64 progress_ = 0;  // counts events that may end a wait
  std::exception_ptr error_;
};

inline Block& block() {
  return Block::current();
}

inline float to_float(device::bf16, u32 bits) {
  return verify::bf16_to_float(static_cast<std::uint16_t>(bits));
}
inline float to_float(device::fp16, u32 bits) {
  return verify::fp16_to_float(static_cast<std::uint16_t>(bits));
}
inline u32 from_float(device::bf16, float value) {
  return verify::float_to_bf16(value);
}
inline u32 from_float(device::fp16, float value) {
  return verify::float_to_fp16(value);
}

// One row of an operand.
using Operand = std::array<float, 16>;

// d[m, n] = a[m, k] b[k, n], or d[m, n] += a[m, k] b[k, n], for this
// thread's elements: rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <int N, class B>
void multiply(float (&d)[N / 2], const Operand (&a)[2], const B& b, int accumulate) {
  for (int i = 0; i < N / 8; ++i) {
    for (int c = 0; c < 2; ++c) {
      const int n = 8 * i + static_cast<int>(threadIdx.x % 4) * 2 + c;
      for (int r = 0; r < 2; ++r) {
        float& sum = d[4 * i + 2 * r + c];
        if (!accumulate) sum = 0;
        for (int k = 0; k < 16; ++k) sum += a[r][static_cast<std::size_t>(k)] * b(k, n);
      }
    }
  }
}

}  // namespace flashjit::emulator
