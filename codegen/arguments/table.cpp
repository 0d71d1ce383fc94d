#include "codegen/arguments/table.hpp"

#include <array>
#include <utility>

#include "codegen/spec/spec_fields.hpp"

namespace flashjit {
namespace {

constexpr unsigned bit(Needs need) {
  return 1u << static_cast<int>(need);
}

unsigned met_by(const AttentionSpec& spec) {
  unsigned met = bit(Needs::nothing);
  if (spec.lse) met |= bit(Needs::lse);
  if (key_layout(spec) == KeyLayout::packed) met |= bit(Needs::packed_keys);
  if (is_cached(spec)) met |= bit(Needs::key_lengths);
  if (!spec.sum) met |= bit(Needs::weights);
  if (spec.has_kv_scales() && (!info_of(spec.op).copies || spec.kv_scale == KvScale::token_head))
    met |= bit(Needs::kv_dtype);
  const bool rotates_q = spec.rotary && spec.rotary->q;
  const When appends = info_of(spec.op).appends;
  if (appends != When::always || rotates_q) met |= bit(Needs::queries);
  if (appends == When::always || spec.append) met |= bit(Needs::new_rows);
  if (rotates_q) met |= bit(Needs::rotates_q);
  if (spec.rotary)
    met |= bit(Needs::rotary) | bit(spec.rotary->tables ? Needs::rotary_tables : Needs::rotary_numbers);
  for (const Mask& mask : spec.mask) {
    if (std::holds_alternative<PaddingMask>(mask)) met |= bit(Needs::padding) | bit(Needs::key_lengths);
    if (const auto* window = std::get_if<SlidingWindowMask>(&mask))
      met |= bit(Needs::sliding_window) | (window->sinks ? bit(Needs::sinks) : 0);
    if (std::holds_alternative<BlockSparseMask>(mask)) met |= bit(Needs::block_sparse);
    if (std::holds_alternative<TreeMask>(mask)) met |= bit(Needs::tree);
  }
  return met;
}

// The conditions of the table, each once, with their arguments.
struct Conditional {
  Condition condition = Needs::nothing;
  ArgumentSets sets{};
};
constexpr std::size_t num_conditions = [] {
  std::size_t count = 0;
  for (std::size_t i = 0; i < num_arguments; ++i) {
    bool is_new = true;
    for (std::size_t j = 0; j < i; ++j) is_new = is_new && arguments[j].needs != arguments[i].needs;
    count += is_new;
  }
  return count;
}();
constexpr std::array<Conditional, num_conditions> sets_of_conditions() {
  std::array<Conditional, num_conditions> all{};
  std::size_t count = 0;
  for (const Argument& argument : arguments) {
    std::size_t at = 0;
    while (at < count && all[at].condition != argument.needs) ++at;
    if (at == count) all[count++].condition = argument.needs;
    all[at].sets.allowed |= bit_of(argument);
    if (argument.required) all[at].sets.required |= bit_of(argument);
  }
  return all;
}

// One for each bit of Argument::operations.
constexpr std::array<ArgumentSets, num_operations> sets_of_operations() {
  std::array<ArgumentSets, num_operations> sets{};
  for (const Argument& argument : arguments)
    for (std::size_t i = 0; i < sets.size(); ++i) {
      if (!(argument.operations >> i & 1)) continue;
      sets[i].allowed |= bit_of(argument);
      if (!(argument.optional_in >> i & 1)) sets[i].required |= bit_of(argument);
    }
  return sets;
}

const char* name_of(bool AttentionSpec::* member) {
  for (const SpecField& field : spec_fields)
    if (field.member == SpecField::Member(member)) return field.name;
  throw Error(ErrorCode::internal, "no field of the spec has that member");
}

std::string without_field(bool AttentionSpec::* member) {
  const std::string name = std::string("\"") + name_of(member) + "\": ";
  return "the spec has " + name + "false: ask for a kernel with " + name + "true";
}

std::string without_mask(const char* kind) {
  return std::string("the spec has no ") + kind + " mask: add \"" + kind +
         "\" to its mask, or leave the argument out";
}

}  // namespace

ArgumentSet given_arguments(const AttentionArgs& args) noexcept {
  const auto given = [&]<std::size_t... i>(std::index_sequence<i...>) {
    return (... | (ArgumentSet{(args.*std::get<arguments[i].member.index()>(arguments[i].member)).has_value()}
                   << i));
  };
  return given(std::make_index_sequence<num_arguments>());
}

ArgumentSets arguments_of(const AttentionSpec& spec) noexcept {
  static constexpr auto conditional = sets_of_conditions();
  static constexpr auto of_operations = sets_of_operations();
  const unsigned met = met_by(spec);
  ArgumentSets sets{};
  for (const Conditional& one : conditional) {
    const Condition& condition = one.condition;
    if (condition.field ? !(spec.*condition.field) : !(met & bit(condition.needs))) continue;
    if (condition.of_values && spec.v_in_k) continue;
    sets.allowed |= one.sets.allowed;
    sets.required |= one.sets.required;
  }
  const ArgumentSets& of_operation = of_operations[static_cast<std::size_t>(spec.op)];
  return {sets.allowed & of_operation.allowed, sets.required & of_operation.required};
}

std::string why_not_allowed(const AttentionSpec& spec, const Argument& argument) {
  if (!(argument.operations & argument_table::bit(spec.op)))
    return std::string("the spec has \"op\": \"") + to_string(spec.op) +
           "\", which has no such argument: leave it out";
  if (argument.needs.of_values && spec.v_in_k)
    return "the spec has \"v_in_k\": true, which makes v the first columns of k: leave the argument out";
  if (argument.needs.field) return without_field(argument.needs.field);
  switch (argument.needs.needs) {
    case Needs::nothing:
      break;
    case Needs::lse:
      return "the spec has \"lse\": false: nothing would be written to it";
    case Needs::packed_keys:
      if (spec.paged)
        return "the spec has \"paged\": true: keys lie in pages, and seqlens_k has their number";
      return without_field(&AttentionSpec::varlen);
    case Needs::weights:
      return "the spec has \"sum\": true, which adds the parts without weights: leave the argument out";
    case Needs::padding:
    case Needs::key_lengths:
      return without_mask("padding");
    case Needs::sliding_window:
      return without_mask("sliding_window");
    case Needs::sinks:
      return "the spec has no sliding_window mask with \"sinks\": true: "
             "ask for one, or leave the argument out";
    case Needs::block_sparse:
      return without_mask("block_sparse");
    case Needs::tree:
      return without_mask("tree");
    case Needs::kv_dtype:
      if (spec.kv_dtype && !spec.has_kv_scales())
        return "the rows of kv_dtype fp8_ds_mla hold their scales: leave the argument out";
      if (spec.kv_dtype)
        return "the spec's scales are those of a tensor or of heads, which do not move with rows: leave the "
               "argument out, or ask for \"kv_scale\": \"token_head\"";
      return "the spec has no \"kv_dtype\": k and v hold their values themselves; leave the argument out";
    case Needs::new_rows:
      return without_field(&AttentionSpec::append);
    case Needs::queries:
    case Needs::rotates_q:
      return "the spec's rotary does not rotate Q: ask for a kernel with \"rotary\": {\"q\": true}";
    case Needs::rotary:
      return "the spec has no rotary: ask for a kernel with \"rotary\": {\"style\": \"half\"}";
    case Needs::rotary_tables:
      return "the spec's rotary has no tables: ask for a kernel with \"rotary\": {\"tables\": \"fp32\"}";
    case Needs::rotary_numbers:
      return spec.rotary ? "the spec's rotary has tables, which say what the angles are"
                         : "the spec has no rotary: leave the argument out";
  }
  return "the spec has it";
}

std::string condition_text(const Condition& condition) {
  if (condition.of_values) {
    const std::string other = condition_text({condition.needs});
    return (other.empty() ? "" : other + ", ") + "no `v_in_k`";
  }
  if (condition.field) return std::string("`") + name_of(condition.field) + "`";
  switch (condition.needs) {
    case Needs::nothing:
      break;
    case Needs::lse:
      return "`lse`";
    case Needs::packed_keys:
      return "`varlen`, keys not in pages";
    case Needs::weights:
      return "no `sum`";
    case Needs::padding:
      return "a padding mask";
    case Needs::key_lengths:
      return "a padding mask, or a cache";
    case Needs::sliding_window:
      return "a sliding_window mask";
    case Needs::sinks:
      return "a sliding_window mask with `sinks`";
    case Needs::block_sparse:
      return "a block_sparse mask";
    case Needs::tree:
      return "a tree mask";
    case Needs::kv_dtype:
      return "an 8-bit `kv_dtype` but fp8_ds_mla";
    case Needs::new_rows:
      return "`append`";
    case Needs::queries:
    case Needs::rotates_q:
      return "`rotary.q`";
    case Needs::rotary:
      return "`rotary`";
    case Needs::rotary_tables:
      return "`rotary.tables`";
    case Needs::rotary_numbers:
      return "`rotary` without `tables`";
  }
  return {};
}

}  // namespace flashjit
