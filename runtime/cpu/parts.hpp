// Room for the results of tiles whose keys are worked on in parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/executable.hpp"
#include "templates/shared/platform.h"

namespace flashjit {

// Puts lent memory into a step's params: a cleared counter for each tile, then what parts leave. Null memory:
// no tile is worked on in parts.
inline void lend_partials(Items& items, void* memory, int& parts, device::u32*& arrived, float*& partials) {
  const std::int64_t tiles = items.count / parts;
  if (memory == nullptr) {
    parts = 1;
    items.count = tiles;
    items.pieces = std::min(items.pieces, tiles);
    return;
  }
  const std::size_t counters = sizeof(device::u32) * static_cast<std::size_t>(tiles);
  arrived = static_cast<device::u32*>(memory);
  std::memset(arrived, 0, counters);
  partials = reinterpret_cast<float*>(static_cast<std::byte*>(memory) + (counters + 63) / 64 * 64);
}

// Bytes to lend.
constexpr std::size_t partials_bytes(std::size_t tiles, std::size_t parts, std::size_t part_bytes) {
  return tiles * (parts * part_bytes + sizeof(device::u32)) + 64;
}

}  // namespace flashjit
