// How a kernel computes: the choices that a tuner makes and a spec may pin.
#pragma once

#include <array>
#include <compare>
#include <optional>
#include <string>
#include <type_traits>

#include "../base/error.hpp"
#include "field_values.hpp"

namespace flashjit {

// The order in which the blocks of a persistent grid take a launch's tiles;
// device code has the same names (templates/cuda/tile_schedule.cuh).
enum class TileOrder { heads, sections, waves };
inline constexpr std::array tile_orders = {TileOrder::heads, TileOrder::sections, TileOrder::waves};
FLASHJIT_API const char* to_string(TileOrder) noexcept;

struct KernelConfig {
  int block_m = 0;     // query rows of one tile
  int block_n = 0;     // keys of one step
  int num_stages = 1;  // K/V buffers in flight (cuda); 1 on a CPU
  int num_warps = 4;   // warps of one block (cuda); 1 on a CPU
  // sm_90a only; other targets keep these values.
  bool q_in_registers = false;  // Q as wgmma's register operand; else read from shared memory
  bool ping_pong = false;       // consumers take turns at the tensor cores
  TileOrder tile_order = TileOrder::heads;
  bool pack_gqa = false;  // query heads of one key/value head may share a tile if rows are few

  auto operator<=>(const KernelConfig&) const = default;
};

// The fields of a spec's "config"; the tuner chooses the absent ones.
struct PinnedConfig {
  std::optional<int> block_m = {}, block_n = {}, num_stages = {}, num_warps = {};
  std::optional<bool> q_in_registers = {}, ping_pong = {};
  std::optional<TileOrder> tile_order = {};
  std::optional<bool> pack_gqa = {};

  bool empty() const { return *this == PinnedConfig{}; }
  bool operator==(const PinnedConfig&) const = default;
};

// Calls visit(name, member of KernelConfig, member of PinnedConfig, values that a pin may have) for every
// choice, in the order of the fields. Values are those of a mask's fields (mask.hpp).
template <class Visit>
constexpr void for_each_choice_and_values(Visit&& visit) {
  constexpr Range tile = {.first = 16, .last = 1024, .step = 16};
  visit("block_m", &KernelConfig::block_m, &PinnedConfig::block_m, tile);
  visit("block_n", &KernelConfig::block_n, &PinnedConfig::block_n, tile);
  visit("num_stages", &KernelConfig::num_stages, &PinnedConfig::num_stages, Range{1, 8});
  visit("num_warps", &KernelConfig::num_warps, &PinnedConfig::num_warps, Range{1, 32});
  visit("q_in_registers", &KernelConfig::q_in_registers, &PinnedConfig::q_in_registers);
  visit("ping_pong", &KernelConfig::ping_pong, &PinnedConfig::ping_pong);
  visit("tile_order", &KernelConfig::tile_order, &PinnedConfig::tile_order, tile_orders);
  visit("pack_gqa", &KernelConfig::pack_gqa, &PinnedConfig::pack_gqa);
}
// The same without the values.
template <class Visit>
constexpr void for_each_choice(Visit&& visit) {
  for_each_choice_and_values(
      [&](const char* name, auto choice, auto pin, const auto&...) { visit(name, choice, pin); });
}

// Pins every choice of `config`, except a size of 0: the config's kernel has no such choice.
inline PinnedConfig pinned(const KernelConfig& config) {
  PinnedConfig pins;
  for_each_choice([&](const char*, auto choice, auto pin) {
    if constexpr (std::is_same_v<decltype(choice), int KernelConfig::*>) {
      if (config.*choice == 0) return;
    }
    pins.*pin = config.*choice;
  });
  return pins;
}

// {"block_m": 128, ...}: the pinned choices only.
FLASHJIT_API std::string to_json(const PinnedConfig&);
inline std::string to_json(const KernelConfig& config) {
  return to_json(pinned(config));
}

// A choice's value as text: 128, true, heads.
inline std::string choice_text(int value) {
  return std::to_string(value);
}
inline std::string choice_text(bool value) {
  return value ? "true" : "false";
}
inline std::string choice_text(TileOrder value) {
  return to_string(value);
}

}  // namespace flashjit
