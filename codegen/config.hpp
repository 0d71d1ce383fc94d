// How a kernel computes: the choices that a tuner makes and a spec may pin.
#pragma once

#include <compare>
#include <optional>
#include <string>

namespace flashjit {

struct KernelConfig {
  int block_m = 0;     // query rows of one tile
  int block_n = 0;     // keys of one step
  int num_stages = 1;  // K/V buffers in flight (cuda); 1 on a CPU
  int num_warps = 4;   // warps of one block (cuda); 1 on a CPU

  auto operator<=>(const KernelConfig&) const = default;
};

// The fields of a spec's "config"; what is absent is the tuner's choice.
struct PinnedConfig {
  std::optional<int> block_m = {}, block_n = {}, num_stages = {}, num_warps = {};

  bool empty() const { return !block_m && !block_n && !num_stages && !num_warps; }
  bool operator==(const PinnedConfig&) const = default;
};

}  // namespace flashjit
