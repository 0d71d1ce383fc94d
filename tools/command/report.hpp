// Output for people and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::command {

using Json = nlohmann::ordered_json;

// Prints to stdout, indented. Bytes that are not UTF-8 (in a path or a log) are replaced.
void print_json(const Json& json);

// "64x128, 2 stages, 4 warps"; on a CPU "64x128", without block_m "x128", without choices "-".
std::string to_text(const KernelConfig& config, const Target& target);
// The spec's masks with the fields that a reader needs: "causal and sliding_window (sinks)"; "no mask".
std::string mask_text(const AttentionSpec& spec);
Json config_json(const KernelConfig& config);

// {spec, target, config, key, path, origin, registers, spill_bytes, smem_bytes, ms, ...}
Json kernel_json(const KernelInfo& info);
// The kernel's path on disk, or the reason why it has none.
std::string where_cached(const KernelInfo& info);

// A time or a rate with about three digits and no exponent: "1530", "41.6", "0.26".
std::string number(double value);

}  // namespace flashjit::command
