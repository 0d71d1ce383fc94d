// The hardware that a kernel runs on: "sm_80", ..., "sm_90a", "x86-64-v3", "x86-64-v4", "x86-64-v4+bf16",
// "x86-64-v4+amx".
#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"

namespace flashjit {

// Instructions that kernels are written for: those of every target of a family, or a set that some targets
// have. wgmma: with it TMA and setmaxnreg, which come together.
enum class Instructions { common, wgmma };

struct FLASHJIT_API Target {
  enum class Family { cuda, cpu };
  Family family = Family::cpu;
  // cuda: compute capability as the two digits of sm_NN (80, 86, ..., 120). cpu: level of x86-64-vN (3 or 4).
  int level = 3;
  // cuda: code may use instructions that only this compute capability has: the "a" of sm_90a. has() says
  // which.
  bool arch_specific = false;
  // cpu: has AMX for bf16; has fast products of pairs of bf16 by vectors.
  bool amx = false, avx512_bf16 = false;

  // Reads a target's name; "native" is this machine's CPU. Throws invalid_argument
  // with the closest known target, or unsupported for names such as x86-64-v2.
  static Target parse(std::string_view text);
  // The best CPU target whose instructions this machine has; throws target_unavailable below
  // x86-64-v3. AMX also needs the operating system's permission (runtime/cpu/amx.hpp).
  static Target native();
  // The best CUDA target for a device of compute capability major.minor; throws target_unavailable.
  static Target for_compute_capability(int major, int minor);
  static const std::vector<Target>& all();

  std::string str() const;
  bool is_cuda() const { return family == Family::cuda; }
  // Whether code for this target may use the instructions.
  bool has(Instructions instructions) const;
  // Whether code for this target runs on a GPU of this compute capability.
  bool runs_on(int major, int minor) const;
  // cpu: whether a CPU of this target runs code for `other`.
  bool runs(const Target& other) const {
    return !is_cuda() && !other.is_cuda() && level >= other.level && amx >= other.amx &&
           avx512_bf16 >= other.avx512_bf16;
  }
  // The targets whose code runs wherever this one's does, but for itself; the best first.
  std::vector<Target> lesser() const;
  // cuda: bytes of shared memory that one block may ask for.
  int max_shared_memory() const;
  // cpu: bytes of a vector register.
  int vector_bytes() const { return level >= 4 ? 64 : 32; }

  auto operator<=>(const Target&) const = default;
};

}  // namespace flashjit
