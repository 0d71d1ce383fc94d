#include "codegen/arguments/table.hpp"

#include <array>
#include <utility>

namespace flashjit {
namespace {

constexpr std::size_t num_needs = static_cast<std::size_t>(Needs::rotary_numbers) + 1;

constexpr unsigned bit(Needs need) {
  return 1u << static_cast<int>(need);
}

unsigned met_by(const AttentionSpec& spec) {
  unsigned met = bit(Needs::nothing);
  if (spec.lse) met |= bit(Needs::lse);
  if (spec.varlen) met |= bit(Needs::varlen);
  if (key_layout(spec) == KeyLayout::packed) met |= bit(Needs::packed_keys);
  if (spec.paged) met |= bit(Needs::paged);
  if (is_cached(spec)) met |= bit(Needs::key_lengths);
  if (spec.dropout) met |= bit(Needs::dropout);
  if (spec.kv_dtype) met |= bit(Needs::kv_dtype);
  if (spec.sink_logits) met |= bit(Needs::sink_logits);
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

constexpr std::array<ArgumentSets, num_needs> sets_of_needs() {
  std::array<ArgumentSets, num_needs> sets{};
  for (const Argument& argument : arguments) {
    ArgumentSets& of_need = sets[static_cast<std::size_t>(argument.needs)];
    of_need.allowed |= bit_of(argument);
    if (argument.required) of_need.required |= bit_of(argument);
  }
  return sets;
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

constexpr char without_varlen[] = "the spec has \"varlen\": false: ask for a kernel with \"varlen\": true";

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
  static constexpr auto of_needs = sets_of_needs();
  static constexpr auto of_operations = sets_of_operations();
  const unsigned met = met_by(spec);
  ArgumentSets sets{};
  for (std::size_t need = 0; need < num_needs; ++need) {
    if (!(met >> need & 1)) continue;
    sets.allowed |= of_needs[need].allowed;
    sets.required |= of_needs[need].required;
  }
  const ArgumentSets& of_operation = of_operations[static_cast<std::size_t>(spec.op)];
  return {sets.allowed & of_operation.allowed, sets.required & of_operation.required};
}

std::string why_not_allowed(const AttentionSpec& spec, const Argument& argument) {
  if (!(argument.operations & argument_table::bit(spec.op)))
    return std::string("the spec has \"op\": \"") + to_string(spec.op) +
           "\", which has no such argument: leave it out";
  switch (argument.needs) {
    case Needs::nothing:
      break;
    case Needs::lse:
      return "the spec has \"lse\": false: nothing would be written to it";
    case Needs::varlen:
      return without_varlen;
    case Needs::packed_keys:
      if (spec.paged)
        return "the spec has \"paged\": true: keys lie in pages, and seqlens_k has their number";
      return without_varlen;
    case Needs::paged:
      return "the spec has \"paged\": false: ask for a kernel with \"paged\": true";
    case Needs::dropout:
      return "the spec has \"dropout\": false: ask for a kernel with \"dropout\": true";
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
      return "the spec has no \"kv_dtype\": k and v hold their values themselves; leave the argument out";
    case Needs::sink_logits:
      return "the spec has \"sink_logits\": false: ask for a kernel with \"sink_logits\": true";
    case Needs::new_rows:
      return "the spec has \"append\": false: ask for a kernel with \"append\": true";
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

}  // namespace flashjit
