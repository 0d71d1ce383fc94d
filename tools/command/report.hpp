// Output for people and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {

using Json = nlohmann::ordered_json;

// Prints to stdout, indented. Bytes that are not UTF-8 (in a path or a log) are replaced.
void print_json(const Json& json);

// A table as standard output shows it: a terminal gets none that is wider than itself.
std::string shown(const verify::Table& table);

// "64x128, 2 stages, 4 warps"; on a CPU "64x128", without block_m "x128", without choices "-".
std::string to_text(const KernelConfig& config, const Target& target);
// The spec's masks with the fields that a reader needs: "causal and sliding_window (sinks)"; "no mask".
std::string mask_text(const AttentionSpec& spec);
Json config_json(const KernelConfig& config);

// {batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv}, and heads by their names in version 0.1.
Json shape_json(const Shape& shape);
// {spec, target, config, cache_key, path, origin, registers, spill_bytes, shared_memory, get_ms, ...}, and
// some by their names in version 0.1.
Json kernel_json(const KernelInfo& info);
// The kernel's path on disk, or the reason why it has none.
std::string where_cached(const KernelInfo& info);

// A time or a rate with about three digits and no exponent: "1530", "41.6", "0.26".
std::string number(double value);

}  // namespace flashjit::command
