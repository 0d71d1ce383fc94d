// sm_90a: wgmma kernels of one producer warpgroup and a consumer warpgroup for every 64 query rows.
#include <algorithm>
#include <cstdint>

#include "search_space_family.hpp"
#include "shared/layout.h"

namespace flashjit {
namespace {

constexpr int warps_of_a_group = 4;

int consumers(const KernelConfig& config) {
  return config.block_m / device::Sm90aLayout::group_rows;
}

int shared_memory(const AttentionSpec& spec, const KernelConfig& config) {
  return device::Sm90aLayout(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                             config.num_stages)
      .end;
}

// Registers of a consumer's thread that hold scores, weights, output and Q.
int held_registers(const AttentionSpec& spec, const KernelConfig& config) {
  const int q = config.q_in_registers ? device::ceil_div(spec.head_dim, 16) * 4 : 0;
  return config.block_n / 2 + config.block_n / 4 + spec.head_dim_v / 2 + q;
}

// How many of them leave enough for the rest, of the 255, 240 or 160 that a thread of 1, 2 or 3 consumers
// has. Found by compiling; tests/compile holds every config to no spills.
int register_budget(const KernelConfig& config) {
  constexpr int with_q[] = {216, 212, 132}, without_q[] = {196, 196, 116};
  const int budget = (config.q_in_registers ? with_q : without_q)[consumers(config) - 1];
  if (config.tile_order != TileOrder::pairs) return budget;
  return budget - (config.ping_pong ? 16 : 24);
}

std::string refusal(const AttentionSpec& spec, const Target& target) {
  return cuda_search_space.refusal(spec, target);
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const auto wrong = [](const char* field, int value, const std::string& rule) {
    return std::string(field) + " " + std::to_string(value) + " " + rule;
  };
  if (config.block_m != 64 && config.block_m != 128 && config.block_m != 192)
    return wrong("block_m", config.block_m, "is not 64, 128 or 192");
  if (const int warps = warps_of_a_group * (consumers(config) + 1); config.num_warps != warps) {
    return wrong("num_warps", config.num_warps,
                 "is not " + std::to_string(warps) + ": 4 that copy, and 4 for every 64 of block_m " +
                     std::to_string(config.block_m));
  }
  if (config.block_n <= 0 || config.block_n % 16 != 0 || config.block_n > 256)
    return wrong("block_n", config.block_n, "is not a multiple of 16 up to 256");
  if (config.num_stages < 2) return wrong("num_stages", config.num_stages, "is not 2 or more");
  if (config.ping_pong && config.block_m < 128)
    return wrong("block_m", config.block_m,
                 "is not 128 or 192, as ping_pong takes several groups of 64 rows");
  if (spec.varlen && config.tile_order != TileOrder::heads) {
    return std::string("tile_order ") + to_string(config.tile_order) +
           " is not heads: lengths that differ are only known on the device";
  }
  if (const int held = held_registers(spec, config); held > register_budget(config)) {
    return "block_n " + std::to_string(config.block_n) +
           (config.q_in_registers ? " with q_in_registers" : "") + " and block_m " +
           std::to_string(config.block_m) + " hold " + std::to_string(held) +
           " values in registers, more than the " + std::to_string(register_budget(config)) +
           " that a thread has for them";
  }
  if (const int bytes = shared_memory(spec, config); bytes > target.max_shared_memory()) {
    return "block_m " + std::to_string(config.block_m) + ", block_n " + std::to_string(config.block_n) +
           " and num_stages " + std::to_string(config.num_stages) + " need " + std::to_string(bytes) +
           " bytes of shared memory, more than the " + std::to_string(target.max_shared_memory()) +
           " of a block on " + target.str();
  }
  return {};
}

bool is_even(const AttentionSpec& spec) {
  return spec.mask.empty() || spec.varlen;
}

ConfigAxes axes(const AttentionSpec& spec, const Target&) {
  return {.block_m = {64, 128, 192},
          .block_n = {32, 48, 64, 80, 96, 112, 128},
          .num_stages = {2},
          .num_warps = {8, 12, 16},
          .q_in_registers = {false, true},
          .ping_pong = {false, true},
          .tile_order = is_even(spec) ? std::vector{TileOrder::heads}
                                      : std::vector{TileOrder::pairs, TileOrder::longest_first}};
}

// Measured (tests/bench/README.md): a narrow block where a wider one fits only repeats what blocks cost
// beside their products.
bool worth_trying(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  KernelConfig wider = config;
  wider.block_n += 48;
  return config.block_n >= 96 || !misfit(spec, target, wider).empty();
}

// Measured on an H200 (tests/bench/README.md).
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  const int widest = std::max(spec.head_dim, spec.head_dim_v);
  KernelConfig config{.block_m = 128, .num_stages = 2};
  if (shape.seqlen_q <= 64) {
    config.block_m = 64;
  } else if (widest <= 96 && shape.seqlen_q >= (is_even(spec) ? 4096 : 2048)) {
    // With narrow heads exponentials take as long as products: a third group keeps both units busy. Its rows
    // have to fill long sequences.
    config.block_m = 192;
  }
  config.num_warps = warps_of_a_group * (consumers(config) + 1);
  if (!is_even(spec)) {
    // By pairs, K and V stay in L2 while a head is worked on; over all heads, the last tiles are the
    // shortest.
    const bool fits_l2 = std::int64_t{shape.seqlen_k} * (spec.head_dim + spec.head_dim_v) <= 1 << 20;
    config.tile_order = fits_l2 && config.block_m < 192 ? TileOrder::pairs : TileOrder::longest_first;
  }
  config.ping_pong = config.block_m == 192 ||
                     (config.block_m == 128 && widest > 64 && config.tile_order != TileOrder::longest_first);
  // The widest block, with Q in registers unless that makes it narrow. Below a diagonal a narrower one leaves
  // less to mask, which counts where there are few.
  const int largest = config.block_m == 192 && !is_even(spec) && shape.seqlen_k <= 4096 ? 96 : 128;
  for (const int least : {80, 16}) {
    for (const bool q_in_registers : {true, false}) {
      config.q_in_registers = q_in_registers;
      for (config.block_n = largest; config.block_n >= least; config.block_n -= 16) {
        if (misfit(spec, target, config).empty()) return config;
      }
    }
  }
  return config;
}

}  // namespace

const SearchSpaceFamily sm90a_search_space = {refusal, misfit, axes, worth_trying, preferred};

}  // namespace flashjit
