// Waves of a grid over rounds of tiles of unknown length: guided self-scheduling (Polychronopoulos and Kuck,
// 1987). The hardware starts the next block where one ends, so fewer blocks follow a block that met long
// tiles. Waves shrink, so that all blocks end together, although few blocks are started for many tiles.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// A wave. Each of its blocks computes one tile in each of these rounds.
struct TileWave {
  u32 first_round, rounds;
};

// Every wave takes half of the rounds that are left.
FLASHJIT_FN constexpr TileWave wave_of(u32 index, u32 rounds) {
  const u32 left = rounds >> index;
  return {rounds - left, left - left / 2};
}
FLASHJIT_FN constexpr u32 count_waves(u32 rounds) {
  u32 waves = 0;
  for (; rounds > 0; rounds /= 2) ++waves;
  return waves;
}

}  // namespace flashjit::device
