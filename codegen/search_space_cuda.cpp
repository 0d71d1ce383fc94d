// The sm_80 family: mma.sync kernels in which a warp owns 16 query rows, or a multiple, of the tile.
#include "search_space_family.hpp"
#include "shared/layout.h"

namespace flashjit {
namespace {

constexpr int rows_of_a_warp = 16;
constexpr int warp_size = 32;

int shared_memory(const AttentionSpec& spec, const KernelConfig& config) {
  return device::cuda_forward_shared_memory(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                            config.num_stages);
}

std::string refusal(const AttentionSpec& spec, const Target& target) {
  if (spec.dtype != DType::fp32) return {};
  return "dtype fp32 is not supported on " + target.str() +
         ": its kernels run on tensor cores; bf16 or fp16 would work there, and fp32 on x86-64-v3 or "
         "x86-64-v4";
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const auto wrong = [](const char* field, int value, const std::string& rule) {
    return std::string(field) + " " + std::to_string(value) + " " + rule;
  };
  if (config.num_warps != 4 && config.num_warps != 8)
    return wrong("num_warps", config.num_warps, "is not 4 or 8");
  if (config.num_stages != 1 && config.num_stages != 2) {
    return wrong("num_stages", config.num_stages, "is not 1 or 2");
  }
  const int rows = rows_of_a_warp * config.num_warps;
  if (config.block_m <= 0 || config.block_m % rows != 0 || config.block_m > 2 * rows) {
    return wrong("block_m", config.block_m,
                 "is not " + std::to_string(rows) + " or " + std::to_string(2 * rows) +
                     ", 16 or 32 rows for each of " + std::to_string(config.num_warps) + " warps");
  }
  if (config.block_n <= 0 || config.block_n % 16 != 0 || config.block_n > 256) {
    return wrong("block_n", config.block_n, "is not a multiple of 16 up to 256");
  }
  const int bytes = shared_memory(spec, config);
  if (bytes > target.max_shared_memory()) {
    return "block_m " + std::to_string(config.block_m) + ", block_n " + std::to_string(config.block_n) +
           " and num_stages " + std::to_string(config.num_stages) + " need " + std::to_string(bytes) +
           " bytes of shared memory, more than the " + std::to_string(target.max_shared_memory()) +
           " of a block on " + target.str();
  }
  return {};
}

ConfigAxes axes(const AttentionSpec&, const Target&) {
  return {.block_m = {64, 128, 256},
          .block_n = {32, 48, 64, 80, 96, 112, 128, 160, 192, 256},
          .num_stages = {1, 2},
          .num_warps = {4, 8}};
}

// Scores and output of a tile stay in registers; beyond about 192 of 255 the rest of the kernel spills.
bool worth_trying(const AttentionSpec& spec, const Target&, const KernelConfig& config) {
  const int accumulators = config.block_m * (config.block_n + device::round_up(spec.head_dim_v, 16)) /
                           (config.num_warps * warp_size);
  return accumulators <= 192;
}

KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  const int dim = spec.head_dim > spec.head_dim_v ? spec.head_dim : spec.head_dim_v;
  KernelConfig config = dim <= 64    ? KernelConfig{128, 128, 1, 4}
                        : dim <= 128 ? KernelConfig{128, 64, 1, 4}
                        : dim <= 192 ? KernelConfig{128, 64, 1, 8}
                                     : KernelConfig{128, 64, 1, 8};
  // A tile of 64 rows wastes less of a short sequence, and fits where shared memory is small.
  if (shape.seqlen_q <= 64 || shared_memory(spec, config) > target.max_shared_memory()) {
    config.block_m = 64;
    config.num_warps = 4;
  }
  return config;
}

}  // namespace

const SearchSpaceFamily cuda_search_space = {refusal, misfit, axes, worth_trying, preferred};

}  // namespace flashjit
