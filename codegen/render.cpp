#include "render.hpp"

#include <algorithm>
#include <type_traits>

#include "cpu_products.hpp"
#include "embedded_headers.hpp"
#include "error.hpp"
#include "shared/layout.h"
#include "wgmma_products.hpp"

namespace flashjit {
namespace {

constexpr char entry[] = "flashjit_forward";

const EmbeddedHeader& header(std::string_view name) {
  for (const EmbeddedHeader& candidate : embedded_headers()) {
    if (candidate.name == name) return candidate;
  }
  throw Error(ErrorCode::internal, "no header \"" + std::string(name) + "\" in templates/");
}

// The name in an `#include "name"` line; empty for any other line.
std::string_view included_name(std::string_view line) {
  constexpr std::string_view start = "#include \"";
  if (!line.starts_with(start)) return {};
  line.remove_prefix(start.size());
  return line.substr(0, line.find('"'));
}

// Calls body(line) for every line of the text, without its end.
template <class Body>
void for_each_line(std::string_view text, Body body) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    body(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

bool has(const std::vector<EmbeddedHeader>& headers, std::string_view name) {
  return std::any_of(headers.begin(), headers.end(), [&](const EmbeddedHeader& h) { return h.name == name; });
}

void collect_headers(std::string_view text, std::vector<EmbeddedHeader>& headers) {
  for_each_line(text, [&](std::string_view line) {
    const std::string_view name = included_name(line);
    if (name.empty() || has(headers, name)) return;
    headers.push_back(header(name));
    collect_headers(headers.back().text, headers);
  });
}

void fold(std::string_view text, std::vector<EmbeddedHeader>& folded, std::string& out) {
  for_each_line(text, [&](std::string_view line) {
    if (line == "#pragma once") return;
    const std::string_view name = included_name(line);
    if (name.empty()) {
      out.append(line) += '\n';
    } else if (!has(folded, name)) {
      folded.push_back(header(name));
      out += "// ---- " + std::string(name) + "\n";
      fold(folded.back().text, folded, out);
      out += "// ---- end of " + std::string(name) + "\n";
    }
  });
}

// A mask's functor and the header that has it; `tables`: its test looks things up in memory.
struct Functor {
  std::string type;
  const char* header;
  bool tables = false;
};

Functor functor(const CausalMask& mask) {
  return {std::string("Causal<Align::") + to_string(mask.align) + ">", "shared/mask.h"};
}
Functor functor(const SlidingWindowMask& mask) {
  return {std::string(mask.sinks ? "SlidingWindowWithSinks" : "SlidingWindow") +
              "<Align::" + to_string(mask.align) + ">",
          "shared/sliding_window.h"};
}
Functor functor(const PaddingMask&) {
  return {"Padding", "shared/mask.h"};
}
Functor functor(const BlockSparseMask& mask) {
  return {"BlockSparse<" + std::to_string(mask.block_m) + ", " + std::to_string(mask.block_n) + ", " +
              (mask.per_head ? "true" : "false") + ">",
          "shared/block_sparse.h", true};
}
Functor functor(const TreeMask&) {
  return {"Tree", "shared/tree.h", true};
}
Functor functor_of(const Mask& mask) {
  return std::visit([](const auto& m) { return functor(m); }, mask);
}

bool reads_tables(const AttentionSpec& spec) {
  return std::any_of(spec.mask.begin(), spec.mask.end(), [](const Mask& m) { return functor_of(m).tables; });
}

std::string mask_type(const AttentionSpec& spec) {
  std::string type = "Intersect<Bounds";
  for (const Mask& mask : spec.mask) type += ", " + functor_of(mask).type;
  return type + ">";
}

// The kernel's header, and those of masks that it does not include itself.
std::string includes(const char* kernel, const AttentionSpec& spec) {
  std::string text = std::string("#include \"") + kernel + "\"\n";
  for (const Mask& mask : spec.mask) {
    const std::string_view name = functor_of(mask).header;
    if (name != "shared/mask.h") text += "#include \"" + std::string(name) + "\"\n";
  }
  return text;
}

struct CpuProducts {
  const char *type, *header;
};
CpuProducts cpu_products(const AttentionSpec& spec, const Target& target) {
  if (keeps_amx_tiles(spec, target)) return {"AmxKeptProducts", "cpu/amx_kept_products.h"};
  if (uses_amx(spec, target)) return {"AmxProducts", "cpu/amx_products.h"};
  return {"VectorProducts", "cpu/vector_products.h"};
}

std::string constant(const char* type, const char* name, const std::string& value) {
  return std::string("  static constexpr ") + type + " " + name + " = " + value + ";\n";
}
std::string constant(const char* name, int value) {
  return constant("int", name, std::to_string(value));
}
std::string constant(const char* name, bool value) {
  return constant("bool", name, value ? "true" : "false");
}

// Unnamed namespace: kernels of different specs can be loaded side by side without sharing a symbol.
std::string structs(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  std::string text = "namespace {\n\nusing namespace flashjit::device;\n\n";
  text += "struct Spec {\n  using Element = " + std::string(to_string(spec.dtype)) + ";\n";
  text += "  using Mask = " + mask_type(spec) + ";\n";
  text += constant("head_dim", spec.head_dim);
  text += constant("head_dim_v", spec.head_dim_v);
  text += constant("lse", spec.lse);
  text += constant("varlen", spec.varlen);
  text += constant("dropout", spec.dropout);
  text += "};\n\n";
  if (target.specific) text += wgmma_products(spec, config);
  text += "struct Config {\n";
  for_each_choice([&](const char* name, auto choice, auto) {
    using Choice = decltype(choice);
    if constexpr (std::is_same_v<Choice, TileOrder KernelConfig::*>) {
      if (target.specific)
        text += constant("TileOrder", name, "TileOrder::" + std::string(to_string(config.*choice)));
    } else if (target.specific || std::is_same_v<Choice, int KernelConfig::*>) {
      text += constant(name, config.*choice);
    }
  });
  if (target.specific) text += "  using Products = WgmmaProducts;\n";
  if (!target.is_cuda())
    text += "  using Products = " + std::string(cpu_products(spec, target).type) + "<Spec, Config>;\n";
  return text + "};\n\n}  // namespace\n\n";
}

}  // namespace

KernelSource render(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  KernelSource source{
      .target = target, .config = config, .text = {}, .headers = {}, .steps = {}, .options = {}};
  // Without its pins: what came of them stands in Config, and a kernel is the same whoever chose it.
  AttentionSpec unpinned = spec;
  unpinned.config = {};
  source.text = "// flashjit forward for " + target.str() + "\n// " + unpinned.to_json() + "\n";
  if (target.specific) {
    source.text +=
        includes("cuda/forward_sm90a.cuh", spec) + "#pragma nv_hdrstop\n\n" + structs(spec, target, config) +
        "extern \"C\" __global__ void __launch_bounds__(Config::num_warps * 32, 1)\n    " + entry +
        "(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardMaps maps) {\n"
        "  forward_sm90a<Spec, Config>(params, maps);\n}\n";
    source.steps.push_back(
        {.entry = entry,
         .threads = config.num_warps * 32,
         .shared_memory = device::Sm90aLayout(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                              config.num_stages, spec.dropout)
                              .end});
  } else if (target.is_cuda()) {
    source.text += includes("cuda/forward_sm80.cuh", spec) + "#pragma nv_hdrstop\n\n" +
                   structs(spec, target, config) +
                   "extern \"C\" __global__ void __launch_bounds__(Config::num_warps * 32)\n    " + entry +
                   "(const __grid_constant__ ForwardParams params) {\n"
                   "  forward_sm80<Spec, Config>(params);\n}\n";
    source.steps.push_back({.entry = entry,
                            .threads = config.num_warps * 32,
                            .shared_memory = device::cuda_forward_shared_memory(
                                spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                config.num_stages, spec.dropout)});
    // At its default level ptxas loads operands ahead until what else is live no longer fits, or squeezes
    // small kernels into fewer registers than they need: both spill, and the former is slower.
    const int accumulators =
        device::cuda_forward_accumulators(spec.head_dim_v, config.block_m, config.block_n, config.num_warps);
    const bool tables = reads_tables(spec);
    if (accumulators > 168 || accumulators <= (tables ? 96 : 80) || (tables && spec.dropout))
      source.options.push_back("--ptxas-options=-O1");
  } else {
    source.text += includes("cpu/forward.h", spec) + "#include \"" + cpu_products(spec, target).header +
                   "\"\n\n" + structs(spec, target, config) + "extern \"C\" void " + entry +
                   "(const ForwardParams* params, i64 begin, i64 end, void* scratch) {\n"
                   "  forward<Spec, Config>(*params, begin, end, scratch);\n}\n";
    source.steps.push_back({.entry = entry, .scratch = cpu_scratch(spec, target, config)});
  }
  collect_headers(source.text, source.headers);
  return source;
}

std::string standalone(const KernelSource& source) {
  std::string out;
  std::vector<EmbeddedHeader> folded;
  fold(source.text, folded, out);
  return out;
}

}  // namespace flashjit
