#include "codegen/families/kernel_text.hpp"

#include <algorithm>

#include "codegen/families/params_type.hpp"
#include "codegen/formulas/formula_functors.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/append_params.h"
#include "shared/last_keys.h"

namespace flashjit {
namespace {

// A mask's functor type and the header that defines it.
struct Functor {
  std::string type, header;
};

// A field's value as a template argument.
std::string template_argument(bool value) {
  return value ? "true" : "false";
}
std::string template_argument(int value) {
  return std::to_string(value);
}
std::string template_argument(CausalAlign value) {
  return std::string("Align::") + to_string(value);
}

// "SlidingWindow" of "sliding_window"
std::string type_name(std::string_view kind) {
  std::string name;
  bool starts = true;
  for (const char c : kind) {
    if (c != '_') name += starts && c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    starts = c == '_';
  }
  return name;
}

// By the mask's name, with its fields as template arguments: a mask "every_nth" with a field n is EveryNth<n>
// of shared/every_nth.h. Masks whose functors are called otherwise have an overload below.
template <class Kind>
Functor functor(const Kind& mask) {
  std::string arguments;
  mask.for_each_field(mask, [&](const char*, const auto& value, const auto&...) {
    arguments += (arguments.empty() ? "" : ", ") + template_argument(value);
  });
  return {type_name(Kind::kind) + (arguments.empty() ? "" : "<" + arguments + ">"),
          std::string("shared/") + Kind::kind + ".h"};
}
Functor functor(const CausalMask& mask) {
  return {"Causal<" + template_argument(mask.align) + ">", "shared/mask.h"};
}
Functor functor(const SlidingWindowMask& mask) {
  return {std::string(mask.sinks ? "SlidingWindowWithSinks" : "SlidingWindow") + "<" +
              template_argument(mask.align) + ">",
          "shared/sliding_window.h"};
}
Functor functor(const PaddingMask&) {
  return {"Padding", "shared/mask.h"};
}
Functor functor(const BlockSparseMask& mask) {
  return {"BlockSparse<" + template_argument(mask.block_m) + ", " + template_argument(mask.block_n) + ", " +
              template_argument(mask.per_head) + (mask.of_masks ? ", true>" : ">"),
          mask.of_masks ? "shared/listed_mask.h" : "shared/block_sparse.h"};
}
Functor functor(const FormulaMask&) {
  return {"FormulaMask<Mask#, Params>", "shared/formula_mask.h"};  // #: its number
}
Functor functor_of(const Mask& mask) {
  return std::visit([](const auto& m) { return functor(m); }, mask);
}

std::string line(const std::string& declaration) {
  return "  " + declaration + ";\n";
}
std::string constant(const char* name, int value) {
  return line(std::string("static constexpr int ") + name + " = " + std::to_string(value));
}
std::string constant(const char* name, bool value) {
  return line(std::string("static constexpr bool ") + name + " = " + (value ? "true" : "false"));
}
std::string constant(const char* name, TileOrder value) {
  return line(std::string("static constexpr TileOrder ") + name + " = TileOrder::" + to_string(value));
}

std::string member(const char* name, bool value) {
  if (std::string_view(name) == "append") return {};  // a step of its own
  if (std::string_view(name) == "sink_logits") return line("using Sinks = SinkLogits<Params>");
  if (std::string_view(name) == "precise") return {};  // functors of formulas are so
  if (std::string_view(name) == "offsets") return line("using Offsets = PositionOffsets<Params>");
  return constant(name, value);
}
std::string member(const char* name, const std::optional<DType>& dtype) {
  return line(std::string("using ") + name + " = " + to_string(*dtype));
}
std::string member(const char* name, const std::optional<KvScale>& scale) {
  return line(std::string("static constexpr KvScale ") + name + " = KvScale::" + to_string(*scale));
}
// A mask of a shard. Rows of the whole are their own positions, however masks are aligned. Formulas count in
// the whole by themselves.
Functor functor_in_shard(Mask mask) {
  if (auto* causal = std::get_if<CausalMask>(&mask)) causal->align = CausalAlign::top_left;
  if (auto* window = std::get_if<SlidingWindowMask>(&mask)) window->align = CausalAlign::top_left;
  Functor made = functor_of(mask);
  if (!std::holds_alternative<FormulaMask>(mask) && !std::holds_alternative<PaddingMask>(mask))
    made.type = "OffsetMask<" + made.type + ", Params>";
  return made;
}
std::string mask_member(const AttentionSpec& spec) {
  std::string type = "using Mask = Intersect<Bounds", lists;
  int formulas = 0;
  for (const Mask& mask : spec.mask) {
    std::string one = (spec.offsets ? functor_in_shard(mask) : functor_of(mask)).type;
    if (std::holds_alternative<FormulaMask>(mask)) one.replace(one.find('#'), 1, std::to_string(++formulas));
    (is_of_masks(mask) ? lists : type) += ", " + one;
  }
  if (spec.gathered) type += ", LateKeys<Params>";
  if (lists.empty()) return line(type + ">");
  // The others go by the lists: Intersect<Bounds, Listed<BlockSparse<...>, Intersect<...>>>.
  const std::string bounds = "using Mask = Intersect<Bounds, ";
  return line(bounds + "Listed<" + lists.substr(2) + ", Intersect<" + type.substr(bounds.size()) + ">>>");
}
std::string member(const char*, const std::optional<Rotary>& rotary) {
  std::string text =
      line(std::string("static constexpr RotaryStyle rotary = RotaryStyle::") + to_string(rotary->style));
  if (rotary->first) text += constant("rotary_first", rotary->first);
  if (rotary->dim) text += constant("rotary_dim", rotary->dim);
  if (rotary->q) text += constant("rotates_q", true);
  if (rotary->tables) text += line(std::string("using RotaryTable = ") + to_string(*rotary->tables));
  return text;
}
// spec_struct() writes masks, and head_dim_v beside head_dim; the effect of pins stands in Config.
std::string member(const char*, const std::vector<Mask>&) {
  return {};
}
std::string member(const char*, int) {
  return {};
}
std::string member(const char*, const PinnedConfig&) {
  return {};
}
std::string member(const char*, const std::vector<std::string>& scores) {
  std::string type = "using Score = FormulaScore<Params";
  for (std::size_t i = 1; i <= scores.size(); ++i) type += ", Score" + std::to_string(i);
  return line(type + ">");
}
// Formulas read them by types that stand before them.
std::string member(const char*, const std::vector<DeclaredTable>&) {
  return {};
}
std::string member(const char*, const std::vector<DeclaredScalar>&) {
  return {};
}

std::string spec_struct(const AttentionSpec& spec, const char* defaults, const char* name = "Spec") {
  std::string text = std::string("struct ") + name + " : " + defaults + " {\n" +
                     line(std::string("using Element = ") + to_string(spec.dtype)) +
                     constant("head_dim", spec.head_dim) + constant("head_dim_v", spec.head_dim_v);
  for (const GivenField& given : given_fields(spec))
    if (!spec.append || std::string_view(given.field.name) != "rotary")  // it is of the step that appends
      text += std::string_view(given.field.name) == "mask" ? mask_member(spec)
              : std::string_view(given.field.name) == "gathered"
                  ? (spec.mask.empty() ? mask_member(spec) : "") + constant("gathered", true)
                  : std::visit([&](auto field) { return member(given.field.name, spec.*field); },
                               given.field.member);
  return text + "};\n\n";
}

std::string config_struct(KernelFamily::Names choices, const KernelConfig& config,
                          const std::string& products) {
  std::string text = "struct Config {\n";
  for_each_choice([&](const char* name, auto choice, auto) {
    if (std::find(choices.begin(), choices.end(), name) != choices.end())
      text += constant(name, config.*choice);
  });
  if (!products.empty()) text += line("using Products = " + products);
  return text + "};\n\n";
}

}  // namespace

std::string include_lines(const char* kernel, const AttentionSpec& spec, const char* pages) {
  std::string text = std::string("#include \"") + kernel + "\"\n";
  if (pages && spec.paged) text += std::string("#include \"") + pages + "\"\n";
  const bool is_cpu = std::string_view(kernel).starts_with("cpu/");
  if (spec.gathered)
    text += is_cpu ? "#include \"cpu/gathered_keys.h\"\n" : "#include \"cuda/forward_sm90a_gathered.cuh\"\n";
  if (spec.append)
    text +=
        std::string("#include \"") + append_header(is_cpu, spec) + "\"\n#include \"shared/last_keys.h\"\n";
  if (reads_formula_params(spec)) {
    text += is_cpu ? "#include \"cpu/formula.h\"\n" : "#include \"cuda/formula.cuh\"\n";
    if (info_of(spec.op).writes_gradients)
      text += is_cpu ? "#include \"cpu/formula_gradient.h\"\n" : "#include \"cuda/formula_gradient.cuh\"\n";
  }
  if (spec.offsets)
    text += std::string("#include \"shared/") +
            (reads_formula_params(spec) ? "formula_offsets.h\"\n" : "offsets.h\"\n");
  for (const Mask& mask : spec.mask) {
    const std::string name = functor_of(mask).header;
    if (name != "shared/mask.h" && name != "shared/formula_mask.h") text += "#include \"" + name + "\"\n";
  }
  return text;
}

const char* append_header(bool is_cpu, const AttentionSpec& spec) {
  if (is_cpu && spec.kv_dtype == DType::fp8_ds_mla) return "cpu/append_ds_mla.h";
  if (spec.kv_dtype) return is_cpu ? "cpu/append_quantised.h" : "cuda/append_quantised.cuh";
  return is_cpu ? "cpu/append.h" : "cuda/append.cuh";
}

std::string name_of_append(bool is_cpu, const AttentionSpec& spec) {
  if (is_cpu && spec.kv_dtype == DType::fp8_ds_mla) return "AppendDsMla";
  return spec.kv_dtype ? "AppendQuantised" : "Append";
}

void add_append_step(const AttentionSpec& spec, KernelSource& source) {
  if (!spec.append) return;
  const AttentionSpec rows{.op = Operation::append_kv,
                           .dtype = spec.dtype,
                           .head_dim = spec.head_dim,
                           .head_dim_v = spec.head_dim_v,
                           .varlen = spec.varlen,
                           .v_in_k = spec.v_in_k,
                           .kv_dtype = spec.kv_dtype,
                           .kv_scale = spec.kv_scale,
                           .rotary = spec.rotary};
  const bool is_cpu = !source.target.is_cuda();
  const std::string kind = name_of_append(is_cpu, spec), defaults = kind == "AppendDsMla" ? "Append" : kind;
  source.text += "\nnamespace {\n\n" +
                 spec_struct(rows, (defaults + (is_cpu ? "CpuSpec" : "CudaSpec")).c_str(), "AppendSpec");
  if (is_cpu) {
    source.text += "using AppendStep = " + kind + R"(<AppendSpec, LastKeys<AppendParams>>;

}  // namespace

extern "C" void flashjit_append(const AppendStep::Params* params, i64 begin, i64 end, void*) {
  AppendStep{)" + (spec.kv_dtype ? "{*params}" : "*params") +
                   R"(}.run(begin, end);
}
)";
  } else {
    source.text += R"(struct AppendConfig {
  static constexpr int num_warps = append_step_warps;
};

using AppendStep = )" +
                   kind + R"(<AppendSpec, AppendConfig, LastKeys<CudaAppendParams>>;

}  // namespace

extern "C" __global__ void __launch_bounds__(AppendConfig::num_warps * 32)
    flashjit_append(const __grid_constant__ AppendStep::Params params) {
  griddepcontrol_launch_dependents();
  AppendStep::run(params);
}
)";
  }
  source.steps.insert(source.steps.begin(),
                      {.function = "flashjit_append",
                       .threads = is_cpu ? 0 : device::append_step_warps * 32,
                       .params = is_cpu ? params_of_append<device::AppendParams>(rows, true)
                                        : params_of_append<device::CudaAppendParams>(rows, true)});
}

std::string structs(const AttentionSpec& spec, const char* defaults, const std::string& params,
                    const std::string& between, KernelFamily::Names choices, const KernelConfig& config,
                    const std::string& products, ComputedAhead ahead) {
  std::string text = "namespace {\n\nusing namespace flashjit::device;\n\n";
  if (reads_formula_params(spec) || spec.offsets || spec.gathered)
    text += "using Params = " + params + ";\n\n";
  if (reads_formula_params(spec)) text += formula_functors(spec, ahead);
  return text + spec_struct(spec, defaults) + between + config_struct(choices, config, products) +
         "}  // namespace\n\n";
}

bool reads_tables(const AttentionSpec& spec) {
  return std::any_of(spec.mask.begin(), spec.mask.end(), [](const Mask& mask) {
    return std::visit([](const auto& m) { return m.reads_tables; }, mask);
  });
}

}  // namespace flashjit
