// The workspace of a backward has the bytes that the tables of runtime/semantics.md say.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "codegen/families/search_space.hpp"
#include "runtime/operation.hpp"

namespace flashjit {
namespace {

using Bytes = std::size_t;

constexpr Bytes ceil_to(Bytes x, Bytes unit) {
  return (x + unit - 1) / unit * unit;
}
constexpr Bytes floor_to(Bytes x, Bytes unit) {
  return x / unit * unit;
}

struct WorkspaceCase {
  const char* target;
  int head_dim, head_dim_v;
  std::string more;  // fields of the spec
  Shape shape;
  bool has_row_bits = false;
};

constexpr int workspace_threads = 3;

Bytes documented(const WorkspaceCase& c, const AttentionSpec& spec, int block_m) {
  const Shape& s = c.shape;
  const Bytes b = s.batch, h = s.num_heads_q, k = s.num_heads_kv;
  const Bytes total_q = spec.varlen ? s.total_q : 0, total_k = spec.varlen ? s.total_k : 0;
  if (std::string_view(c.target).starts_with("x86")) {
    const Bytes r = spec.varlen ? floor_to(total_q, 32) + 32 * b : b * ceil_to(s.seqlen_q, 32);
    const Bytes longest = spec.varlen ? s.seqlen_q + 32 : ceil_to(s.seqlen_q, 32);
    return 12 * h * r + 4 * (h / k) * (k * r + 4 * workspace_threads * longest) * ceil_to(c.head_dim, 32);
  }
  const auto rows = [&](Bytes seqlen, Bytes total) {
    return spec.varlen ? floor_to(total, 128) + 128 * b : b * std::max(ceil_to(seqlen, 128), Bytes{128});
  };
  const Bytes r = rows(s.seqlen_q, total_q), keys = rows(s.seqlen_k, total_k);
  const Bytes longest = spec.varlen ? total_q : s.seqlen_q;
  Bytes bytes = 49 * h * r / 4 + 4;
  const int columns = c.head_dim + c.head_dim_v;
  const bool both = columns <= 256 || (c.head_dim <= 192 && c.head_dim_v <= 128);
  const bool copied = columns <= 256 && (columns > 128 || std::max(c.head_dim, c.head_dim_v) <= 64);
  const bool in_order = std::string_view(c.target) == "sm_90a" && !c.has_row_bits && (copied || !both);
  const bool second_pass = spec.deterministic && !in_order;
  if (!second_pass) bytes += 4 * h * r * ceil_to(c.head_dim, 16);
  if (spec.deterministic && !second_pass) bytes += h * r / 8;
  if (std::string_view(c.target) == "sm_90a") bytes += 4 * b * h;
  if (std::string_view(c.target) == "sm_90a" && both && !spec.deterministic) {
    const Bytes of_rows = h / k * longest * (2 * c.head_dim + 2 * c.head_dim_v + 4 * ceil_to(c.head_dim, 16));
    const bool exceeds = h > k && of_rows > Bytes{32} << 20;
    const Bytes most = exceeds ? k * keys : workspace_threads * Bytes{h > k ? 512u : 128u};
    if (h > k || !c.has_row_bits)
      bytes += 4 * std::min(k * keys, most) * (ceil_to(c.head_dim, 16) + ceil_to(c.head_dim_v, 16));
    if (!c.has_row_bits) bytes += 4 * std::min(b * h, Bytes{workspace_threads}) * ceil_to(longest, 128) / 128;
  }
  if (c.has_row_bits) bytes += 8 * h * (keys / 128) * (ceil_to(longest, 32 * block_m) / (32 * block_m));
  return bytes;
}

TEST(BackwardWorkspace, HasTheDocumentedBytes) {
  const Shape small{.batch = 3, .seqlen_q = 50, .seqlen_k = 190, .num_heads_q = 6, .num_heads_kv = 2};
  const Shape none{.batch = 2, .seqlen_q = 0, .seqlen_k = 0, .num_heads_q = 2, .num_heads_kv = 2};
  const Shape packed{.batch = 3,
                     .seqlen_q = 170,
                     .seqlen_k = 300,
                     .num_heads_q = 6,
                     .num_heads_kv = 2,
                     .total_q = 333,
                     .total_k = 700};
  const Shape grouped{.batch = 1, .seqlen_q = 40000, .seqlen_k = 8000, .num_heads_q = 8, .num_heads_kv = 1};
  const Shape many{.batch = 4, .seqlen_q = 300, .seqlen_k = 800, .num_heads_q = 4, .num_heads_kv = 1};
  Shape alone = grouped;
  alone.num_heads_kv = 8;
  const std::string tree = R"(, "mask": ["tree"])", varlen = R"(, "varlen": true)";
  const std::string deterministic = R"(, "deterministic": true)";
  const WorkspaceCase cases[] = {
      {"x86-64-v3", 40, 72, "", small},
      {"x86-64-v3", 40, 72, varlen, packed},
      {"sm_80", 72, 40, "", small},
      {"sm_80", 72, 40, "", none},
      {"sm_80", 72, 40, varlen, packed},
      {"sm_80", 72, 40, deterministic, small},
      {"sm_80", 64, 64, tree, small},
      {"sm_80", 64, 64, "", grouped},
      {"sm_90a", 72, 40, "", small},
      {"sm_90a", 72, 40, "", none},
      {"sm_90a", 64, 64, "", many},
      {"sm_90a", 72, 40, varlen, packed},
      {"sm_90a", 128, 128, deterministic, grouped},
      {"sm_90a", 64, 64, deterministic + varlen, packed},
      {"sm_90a", 192, 128, deterministic, small},
      {"sm_90a", 256, 256, deterministic, grouped},
      {"sm_90a", 64, 64, deterministic + tree, alone, true},
      {"sm_90a", 128, 128, "", alone},
      {"sm_90a", 128, 128, "", grouped},
      {"sm_90a", 192, 128, "", grouped},
      {"sm_90a", 192, 192, "", grouped},
      {"sm_90a", 200, 64, "", grouped},
      {"sm_90a", 64, 64, tree, alone, true},
      {"sm_90a", 64, 64, tree + varlen, packed, true},
      {"sm_90a", 128, 128, R"(, "mask": ["key % 3 != 1"])", small, true},
      {"sm_90a", 128, 128, R"(, "mask": [{"kind": "sliding_window", "sinks": true}])", small, true},
      {"sm_90a", 128, 128, R"(, "mask": ["sliding_window", "padding"])", small},
  };
  for (const WorkspaceCase& c : cases) {
    const AttentionSpec spec = AttentionSpec::from_json(
        R"({"op": "backward", "dtype": "bf16", "head_dim": )" + std::to_string(c.head_dim) +
        R"(, "head_dim_v": )" + std::to_string(c.head_dim_v) + c.more + "}");
    const Target target = Target::parse(c.target);
    const KernelConfig config = heuristic_config(spec, target, c.shape);
    const PlannedKernel kernel{
        .spec = spec, .target = target, .config = config, .parallelism = workspace_threads};
    EXPECT_EQ(runtime_of(Operation::backward).workspace_bytes(kernel, c.shape),
              documented(c, spec, config.block_m))
        << c.target << " " << spec.to_json();
  }
}

}  // namespace
}  // namespace flashjit
