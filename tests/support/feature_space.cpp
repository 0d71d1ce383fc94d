#include "tests/support/feature_space.hpp"

#include <algorithm>
#include <utility>

#include "codegen/arguments/table.hpp"
#include "codegen/families/kernel_family.hpp"

namespace flashjit::testing_support {
namespace {

using Kind = TableDimension::Kind;

void do_nothing(FeatureCase&) {}

auto with_mask(Mask mask) {
  return [mask = std::move(mask)](FeatureCase& c) { c.spec.mask.push_back(mask); };
}

auto with_score(std::vector<std::string> formulas) {
  return [formulas = std::move(formulas)](FeatureCase& c) { c.spec.score = formulas; };
}

void declare(AttentionSpec& spec, DeclaredTable table) {
  table.grad = table.grad && info_of(spec.op).writes_gradients;
  spec.tables.push_back(std::move(table));
}

}  // namespace

std::vector<int> FeatureCase::lengths(int longest) const {
  return {longest, some_empty ? 0 : (longest + 2) / 3, std::min(longest, 1)};
}

Shape FeatureCase::shape() const {
  return {.batch = spec.varlen ? 3 : 2,
          .seqlen_q = seqlen_q,
          .seqlen_k = seqlen_k,
          .num_heads_q = heads_q,
          .num_heads_kv = heads_kv,
          .page_size = page_size};
}

std::string FeatureCase::command(const std::string& device, const std::string& target) const {
  const Shape shape = this->shape();
  std::string text = "flashjit run '" + spec.to_json() + "' --device " + device + " --target " + target;
  const auto add = [&](const char* option, int value) {
    text += std::string(" --") + option + " " + std::to_string(value);
  };
  add("batch", shape.batch);
  add("seqlen-q", shape.seqlen_q);
  add("seqlen-k", shape.seqlen_k);
  add("heads-q", shape.num_heads_q);
  add("heads-kv", shape.num_heads_kv);
  if (spec.paged) add("page-size", shape.page_size);
  if (spec.dropout) text += " --dropout-p 0.2";
  add("seed", static_cast<int>(seed));
  return text + " --verify";
}

FeatureSpace::FeatureSpace(Operation op, const Target& target) : op_(op), target_(target) {
  add_numbers();
  add_score();
  if (has("mask")) add_masks();
  add_flag("varlen", &AttentionSpec::varlen);
  add_keys();
  add_flag("sink_logits", &AttentionSpec::sink_logits);
  add_flag("dropout", &AttentionSpec::dropout);
  add_flag("offsets", &AttentionSpec::offsets);
  // No other kernels than those that write gradients differ by it.
  if (info_of(op).writes_gradients) add_flag("deterministic", &AttentionSpec::deterministic);
  add_flag("batch_invariant", &AttentionSpec::batch_invariant);
  add_append();
  add_sizes();
}

bool FeatureSpace::has(std::string_view field) const {
  const KernelFamily::Names fields = family_of(op_, target_).fields;
  return std::find(fields.begin(), fields.end(), field) != fields.end();
}

bool FeatureSpace::has_mask(std::string_view kind) const {
  const KernelFamily::Names masks = family_of(op_, target_).masks;
  return std::find(masks.begin(), masks.end(), kind) != masks.end();
}

void FeatureSpace::add(std::string name, std::vector<Value> values) {
  axes_.push_back({std::move(name), std::move(values)});
}

void FeatureSpace::add_flag(const char* name, bool AttentionSpec::* field, bool common) {
  if (!has(name)) return;
  add(name, {{common ? "true" : "false", [=](FeatureCase& c) { c.spec.*field = common; }},
             {common ? "false" : "true", [=](FeatureCase& c) { c.spec.*field = !common; }}});
}

void FeatureSpace::add_numbers() {
  std::vector<Value> dtypes;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    dtypes.push_back({to_string(dtype), [=](FeatureCase& c) { c.spec.dtype = dtype; }});
  add("dtype", dtypes);
  // Multiples of 64 and of 8, up to 64, 128, 256 and more: kernels pad, divide and choose their tiles by
  // these.
  std::vector<Value> dims, dims_v;
  for (const int dim : {64, 40, 72, 128, 136, 192, 256, 328}) {
    if (dim > family_of(op_, target_).head_dim.last) continue;
    dims.push_back({std::to_string(dim), [=](FeatureCase& c) { c.spec.head_dim = dim; }});
    dims_v.push_back({std::to_string(dim), [=](FeatureCase& c) { c.spec.head_dim_v = dim; }});
  }
  add("head_dim", dims);
  if (!has_argument({.op = op_}, argument_of(&AttentionArgs::parts_o))) add("head_dim_v", dims_v);
  const auto floats = [&](const char* name, std::optional<DType> AttentionSpec::* field) {
    if (!has(name)) return;
    add(name, {{"absent", do_nothing}, {"fp32", [=](FeatureCase& c) { c.spec.*field = DType::fp32; }}});
  };
  if (has("parts_dtype"))
    add("parts_dtype",
        {{"absent", do_nothing}, {"dtype", [](FeatureCase& c) { c.spec.parts_dtype = c.spec.dtype; }}});
  add_flag("sum", &AttentionSpec::sum, false);
  floats("grad_dtype", &AttentionSpec::grad_dtype);
  floats("o_dtype", &AttentionSpec::o_dtype);
  add_flag("lse", &AttentionSpec::lse, true);
}

// A formula of each class that kernels and code generation tell apart.
void FeatureSpace::add_score() {
  if (!has("score")) return;
  add("score", {{"none", do_nothing},
                {"shift",
                 [](FeatureCase& c) {
                   c.spec.score = {"score + shift[batch]"};
                   declare(c.spec, {.name = "shift", .shape = {{.kind = Kind::batch}}});
                 }},
                {"scaled", with_score({"score * 0.5"})},
                {"learned",
                 [](FeatureCase& c) {
                   c.spec.score = {"score * (1 + gain[head] / 8) + bias[head, min(abs(position - key), 5)]"};
                   declare(c.spec, {.name = "gain", .shape = {{.kind = Kind::heads_q}}, .grad = true});
                   declare(c.spec, {.name = "bias",
                                    .shape = {{.kind = Kind::heads_q}, {.kind = Kind::number, .size = 6}},
                                    .grad = true});
                 }},
                {"tilt",
                 [](FeatureCase& c) {
                   c.spec.score = {"score + slope[head] * (key - position)"};
                   declare(c.spec, {.name = "slope", .shape = {{.kind = Kind::heads_q}}, .grad = true});
                 }},
                {"alibi", with_score({"alibi"})},
                {"softcap", with_score({"softcap"})},
                {"functions", with_score({"sqrt(abs(score) + 1) - exp(-abs(score))", "softcap"})},
                // Not finite at score 0, which padding has.
                {"log", with_score({"log(abs(score))"})}});
  add_flag("precise", &AttentionSpec::precise);
}

void FeatureSpace::add_masks() {
  using enum CausalAlign;
  std::vector<Value> causal = {{"no", do_nothing},
                               {"bottom_right", with_mask(CausalMask{})},
                               {"top_left", with_mask(CausalMask{top_left})}};
  if (info_of(op_).makes_lists) std::swap(causal[0], causal[1]);  // lists are of another mask
  add("causal", causal);
  add("sliding_window", {{"no", do_nothing},
                         {"bottom_right", with_mask(SlidingWindowMask{})},
                         {"top_left", with_mask(SlidingWindowMask{top_left})},
                         {"sinks", with_mask(SlidingWindowMask{.sinks = true})}});
  add("tree", {{"no", do_nothing}, {"yes", with_mask(TreeMask{})}});
  if (has_mask(PaddingMask::kind)) add("padding", {{"no", do_nothing}, {"yes", with_mask(PaddingMask{})}});
  if (has_mask(BlockSparseMask::kind)) {
    std::vector<Value> lists = {{"of_masks", with_mask(BlockSparseMask{64, 128, false, true})},
                                {"of_masks per_head", with_mask(BlockSparseMask{128, 64, true, true})}};
    if (!info_of(op_).makes_lists) {
      lists.push_back({"64x64", with_mask(BlockSparseMask{64, 64})});
      lists.push_back({"80x48 per_head", with_mask(BlockSparseMask{80, 48, true})});
      lists.insert(lists.begin(), {"no", do_nothing});
    }
    add("block_sparse", lists);
  }
  add(FormulaMask::kind, {{"no", do_nothing},
                          {"interval", with_mask(FormulaMask{"position - key < 90 && key <= position + 7"})},
                          {"of heads", with_mask(FormulaMask{"(key + position + head) % 5 != 0"})},
                          {"of a table", [](FeatureCase& c) {
                             c.spec.mask.emplace_back(
                                 FormulaMask{"document[batch, key] == document[batch, min(position, last)]"});
                             declare(c.spec, {.name = "document",
                                              .dtype = DType::int32,
                                              .shape = {{.kind = Kind::batch}, {.name = "n"}}});
                             c.spec.scalars.push_back({"last", DType::int32});
                           }}});
  // Kinds that are not above, with their defaults.
  const auto add_usual = [&](auto mask) {
    const auto is_it = [&](const Axis& axis) { return axis.name == mask.kind; };
    if (has_mask(mask.kind) && std::none_of(axes_.begin(), axes_.end(), is_it))
      add(mask.kind, {{"no", do_nothing}, {"yes", with_mask(mask)}});
  };
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    (add_usual(std::variant_alternative_t<i, Mask>{}), ...);
  }(std::make_index_sequence<std::variant_size_v<Mask>>());
}

void FeatureSpace::add_keys() {
  if (!has("kv_dtype")) return;
  if (has("paged"))
    add("paged", {{"false", do_nothing},
                  {"16", [](FeatureCase& c) { c.spec.paged = true, c.page_size = 16; }},
                  {"80", [](FeatureCase& c) { c.spec.paged = true, c.page_size = 80; }}});
  std::vector<Value> values = {{"absent", do_nothing}};
  for (const DType dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2})
    for (const KvScale scale : {KvScale::tensor, KvScale::head, KvScale::token_head})
      if (dtype == DType::int8 || scale == KvScale::token_head)
        values.push_back({std::string(to_string(dtype)) + " " + to_string(scale), [=](FeatureCase& c) {
                            c.spec.kv_dtype = dtype;
                            c.spec.kv_scale = scale;
                          }});
  add("kv_dtype", values);
}

void FeatureSpace::add_append() {
  add_flag("append", &AttentionSpec::append);
  if (info_of(op_).appends == When::always || info_of(op_).copies) add_flag("v_in_k", &AttentionSpec::v_in_k);
  if (info_of(op_).copies)
    add("sources", {{"other caches", do_nothing}, {"k and v", [](FeatureCase& c) { c.in_place = true; }}});
  if (!has("rotary")) return;
  const auto with_rotary = [](const Rotary& rotary) {
    return [=](FeatureCase& c) { c.spec.rotary = rotary; };
  };
  add("rotary", {{"absent", do_nothing},
                 {"half", with_rotary({})},
                 {"half of 20 from 8 on, q", with_rotary({.first = 8, .dim = 20, .q = true})},
                 {"interleaved, q, tables",
                  with_rotary({.style = RotaryStyle::interleaved, .q = true, .tables = DType::fp32})}});
  if (!has_argument({.op = op_}, argument_of(&AttentionArgs::slots))) return;
  add("places", {{"positions", do_nothing},
                 {"slots", [](FeatureCase& c) { c.by_slots = true; }},
                 {"positions and rotary_positions", [](FeatureCase& c) { c.own_positions = true; }}});
}

void FeatureSpace::add_sizes() {
  const auto heads = [](int q, int kv) { return [=](FeatureCase& c) { c.heads_q = q, c.heads_kv = kv; }; };
  add("heads", {{"1/1", heads(1, 1)}, {"4/2", heads(4, 2)}, {"6/1", heads(6, 1)}});
  const auto sizes = [](int q, int k, bool some_empty = false) {
    return [=](FeatureCase& c) { c.seqlen_q = q, c.seqlen_k = k, c.some_empty = some_empty; };
  };
  if (info_of(op_).few_rows) {
    add("sizes", {{"1 on 257", sizes(1, 257)},
                  {"7 on 320", sizes(7, 320)},
                  {"64 on 130", sizes(64, 130)},
                  {"5 on 40, some empty", sizes(5, 40, true)}});
  } else if (has_argument({.op = op_}, argument_of(&AttentionArgs::parts_o))) {
    add("parts", {{"2", [](FeatureCase& c) { c.parts = 2; }},
                  {"1", [](FeatureCase& c) { c.parts = 1; }},
                  {"9", [](FeatureCase& c) { c.parts = 9; }}});
    add("sizes", {{"65", sizes(65, 0)}, {"1", sizes(1, 0)}, {"0", sizes(0, 0)}});
  } else {
    add("sizes", {{"65 on 257", sizes(65, 257)},
                  {"128 on 256", sizes(128, 256)},
                  {"3 on 300", sizes(3, 300)},
                  {"130 on 33", sizes(130, 33)},
                  {"70 on 90, some empty", sizes(70, 90, true)}});
  }
}

std::vector<int> FeatureSpace::sizes() const {
  std::vector<int> sizes;
  for (const Axis& axis : axes_) sizes.push_back(static_cast<int>(axis.values.size()));
  return sizes;
}

FeatureCase FeatureSpace::at(const Row& row) const {
  FeatureCase c;
  c.spec.op = op_;
  for (std::size_t axis = 0; axis < axes_.size(); ++axis)
    axes_[axis].values[static_cast<std::size_t>(row[axis])].set(c);
  // GPU kernels take rows of 8-bit caches in pieces of 16 bytes.
  if (target_.is_cuda() && c.spec.kv_dtype)
    for (int* const dim : {&c.spec.head_dim, &c.spec.head_dim_v}) *dim = (*dim + 15) / 16 * 16;
  c.spec = c.spec.validated();
  return c;
}

std::string FeatureSpace::str(const Triples::Triple& triple) const {
  std::string text;
  for (const auto& [axis, value] : triple) {
    const Axis& of = axes_[static_cast<std::size_t>(axis)];
    text += (text.empty() ? "" : ", ") + of.name + " " + of.values[static_cast<std::size_t>(value)].name;
  }
  return text;
}

CoveringArray FeatureSpace::covering(std::uint64_t seed,
                                     const std::function<bool(const AttentionSpec&)>& is_wanted) const {
  return covering_array(sizes(), seed, [&](const Row& row) {
    try {
      const AttentionSpec spec = at(row).spec;
      return is_wanted(spec) && why_unsupported(spec, target_).empty();
    } catch (const Error&) {
      return false;
    }
  });
}

}  // namespace flashjit::testing_support
