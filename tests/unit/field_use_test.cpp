// A family computes what it names: the kernel reads each field of the spec that the family names, each field
// of a mask, and each choice that has several values. One that nothing reads would be computed wrong and,
// since the oracle may not know it either, pass for right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "codegen/render.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {
namespace {

// A field that kernels of an operation need not read, and which of them.
enum class On { all, cpu, without_wgmma };
struct Unread {
  std::string_view field;
  Operation op;
  On on = On::all;
};
constexpr Unread unread[] = {
    // Their results are the same bits run after run, anyway.
    {"deterministic", Operation::forward},
    {"deterministic", Operation::decode},
    {"deterministic", Operation::merge},
    {"deterministic", Operation::append_kv},
    {"deterministic", Operation::make_block_lists},
    {"deterministic", Operation::copy_kv},
    {"deterministic", Operation::backward, On::cpu},
    // Params say it: strides of rows and of scales; one page for each batch entry.
    {"varlen", Operation::merge},
    {"kv_scale", Operation::decode, On::cpu},
    {"paged", Operation::append_kv},
    // They take v as a view of k. Others use the copy of K.
    {"v_in_k", Operation::forward, On::without_wgmma},
    {"v_in_k", Operation::decode, On::cpu},
    // Masks and formulas have it in their params; there is no dropout.
    {"offsets", Operation::decode, On::cpu},
    // Masks do not depend on it.
    {"head_dim_v", Operation::make_block_lists},
};
bool may_be_unread(std::string_view field, Operation op, const Target& target) {
  return std::any_of(std::begin(unread), std::end(unread), [&](const Unread& one) {
    const bool here = one.on == On::all || !target.is_cuda() ||
                      (one.on == On::without_wgmma && !target.has(Instructions::wgmma));
    return one.field == field && one.op == op && here;
  });
}

// A spec of the operation that the target's family computes.
AttentionSpec usual(Operation op) {
  AttentionSpec spec{.op = op, .head_dim = 64};
  if (op == Operation::make_block_lists) spec.mask = {BlockSparseMask{.of_masks = true}, CausalMask{}};
  return spec;
}

// Gives the spec another value of the field. `before` becomes a spec without it that is otherwise the same.
void give(const SpecField& field, AttentionSpec& before, AttentionSpec& spec) {
  const std::string_view name = field.name;
  const bool forward = spec.op == Operation::forward, decode = spec.op == Operation::decode;
  const auto both = [&](auto&& change) { change(before), change(spec); };
  if (name == "kv_dtype" || name == "kv_scale") both([&](AttentionSpec& s) { s.paged = s.paged || forward; });
  if (name == "kv_scale") both([](AttentionSpec& s) { s.kv_dtype = DType::int8; });
  // In a backward it implies the other.
  if (name == "batch_invariant") both([](AttentionSpec& s) { s.deterministic = true; });
  if (name == "rotary") both([&](AttentionSpec& s) { s.append = s.append || decode; });
  if (name == "precise") both([](AttentionSpec& s) { s.score = {"tanh(score)"}; });
  if (name == "tables") {
    before.mask.emplace_back(FormulaMask{"key < 9"}), spec.mask.emplace_back(FormulaMask{"key < table[key]"});
    spec.tables = {{"table", DType::int32, {{.kind = TableDimension::Kind::seqlen_k}}}};
  } else if (name == "scalars") {
    before.mask.emplace_back(FormulaMask{"key < 9"}), spec.mask.emplace_back(FormulaMask{"key < scalar"});
    spec.scalars = {{"scalar", DType::int32}};
  } else {
    std::visit(
        [&]<class T>(T AttentionSpec::* member) {
          T& value = spec.*member;
          if constexpr (std::is_same_v<T, bool>)
            value = !value;
          else if constexpr (std::is_same_v<T, int>)
            value = field.range.first + field.range.step;
          else if constexpr (std::is_same_v<T, std::optional<DType>>)
            value = name == "kv_dtype" ? DType::int8 : name == "parts_dtype" ? DType::bf16 : DType::fp32;
          else if constexpr (std::is_same_v<T, std::optional<KvScale>>)
            value = KvScale::token_head;
          else if constexpr (std::is_same_v<T, std::vector<Mask>>)
            value.emplace_back(FormulaMask{"key < 9"});
          else if constexpr (std::is_same_v<T, std::optional<Rotary>>)
            value = Rotary{.style = RotaryStyle::interleaved, .dim = 32, .q = true, .tables = DType::fp32};
          else if constexpr (std::is_same_v<T, std::vector<std::string>>)
            value = {"score / 2"};
        },
        field.member);
  }
}

// A rendered text: the members of Spec, by line, and all the rest but its comment and Config.
struct Text {
  std::set<std::string> members;
  std::string rest;
};
Text parts_of(const std::string& text) {
  Text parts;
  std::istringstream lines(text);
  enum { outside, in_spec, in_config } place = outside;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("//")) continue;
    if (line.starts_with("struct ") && line.find("Spec : ") != line.npos) place = in_spec;
    if (line == "struct Config {") place = in_config;
    if (place == outside) parts.rest += line + "\n";
    if (place == in_spec && line.starts_with("  ")) parts.members.insert(line);
    if (line == "};") place = outside;
  }
  return parts;
}
// "  static constexpr bool lse = false;" is lse.
std::string name_of(const std::string& member) {
  const std::string before = member.substr(0, member.find(" = "));
  return before.substr(before.rfind(' ') + 1);
}

// Whether code of a header that the source reaches has the name, such as "Spec::lse".
bool reads(const KernelSource& source, const std::string& name) {
  const auto in_name = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  const auto in_text = [&](std::string_view text) {
    for (std::size_t at = 0; (at = text.find(name, at)) != text.npos; at += name.size()) {
      const std::size_t line = text.rfind('\n', at) + 1, end = at + name.size();
      const bool whole = (at == 0 || !in_name(text[at - 1])) && (end == text.size() || !in_name(text[end]));
      if (whole && text.substr(line, at - line).find("//") == text.npos) return true;
    }
    return false;
  };
  return in_text(source.text) || std::any_of(source.headers.begin(), source.headers.end(),
                                             [&](const EmbeddedHeader& h) { return in_text(h.text); });
}

// Why the kernel does not depend on what differs between the specs; empty if it does.
std::string unused(const AttentionSpec& before, const AttentionSpec& after, const Target& target,
                   const KernelConfig& config) {
  const KernelSource source = render(after, target, config);
  const Text a = parts_of(render(before, target, config).text), b = parts_of(source.text);
  std::vector<std::string> differ;
  std::set_symmetric_difference(a.members.begin(), a.members.end(), b.members.begin(), b.members.end(),
                                std::back_inserter(differ));
  if (differ.empty() && a.rest == b.rest) return "the rendered text is the same";
  for (const std::string& member : differ)
    if (!reads(source, "Spec::" + name_of(member))) return "no header reads Spec::" + name_of(member);
  return {};
}

// Few rows and many: a family may have a kernel for each.
constexpr Shape shapes[] = {
    {}, {.batch = 64, .seqlen_q = 64, .seqlen_k = 4096, .num_heads_q = 64, .num_heads_kv = 8}};

// Each family once, with a target that it serves.
void for_each_family(const std::function<void(const KernelFamily&, const Target&)>& visit) {
  std::set<const KernelFamily*> seen;
  for (const Target& target : Target::all())
    for (const Operation op : operations_on(target)) {
      const KernelFamily& family = family_of(op, target);
      if (!seen.insert(&family).second) continue;
      SCOPED_TRACE(std::string(to_string(op)) + " on " + target.str());
      visit(family, target);
    }
  EXPECT_GE(seen.size(), 15u);
}

TEST(FieldUse, KernelsReadTheFieldsThatFamiliesName) {
  for_each_family([](const KernelFamily& family, const Target& target) {
    for (const SpecField& field : spec_fields) {
      if (std::find(family.fields.begin(), family.fields.end(), field.name) == family.fields.end()) continue;
      if (std::string_view(field.name) == "config") continue;  // choices: below
      SCOPED_TRACE(field.name);
      AttentionSpec before = usual(family.op), after = before;
      give(field, before, after);
      before = before.validated(), after = after.validated();
      ASSERT_EQ(why_unsupported(after, target), "");
      ASSERT_NE(before, after) << "give() knows no other value of this field";
      std::string why;  // of the last kernel that does not read it
      for (const Shape& shape : shapes)
        if (std::string one = unused(before, after, target, family.preferred(after, target, shape));
            !one.empty())
          why = one;
      EXPECT_EQ(why.empty(), !may_be_unread(field.name, family.op, target)) << why;
    }
  });
}

// Another value of a mask's field.
void change(bool& value) {
  value = !value;
}
void change(int& value, const Range& range) {
  value = value == range.first ? range.first + range.step : range.first;
}
template <class Enum, class Values>
void change(Enum& value, const Values& values) {
  value = values[value == values[0] ? 1 : 0];
}
void change(std::string& formula) {
  formula = "key < 9";
}

TEST(FieldUse, KernelsReadTheFieldsOfMasks) {
  for_each_family([](const KernelFamily& family, const Target& target) {
    const auto check = [&](auto mask) {
      if (std::find(family.masks.begin(), family.masks.end(), std::string_view(mask.kind)) ==
          family.masks.end())
        return;
      if constexpr (std::is_same_v<decltype(mask), FormulaMask>) mask.formula = "key < 8";
      const bool lists = family.op == Operation::make_block_lists;
      const auto with = [&](auto one) {
        AttentionSpec spec = usual(family.op);
        // Masks beside it, for lists of masks; lists are made of masks.
        const bool blocks = std::is_same_v<decltype(one), BlockSparseMask>;
        spec.mask = lists && !blocks ? std::vector<Mask>{BlockSparseMask{.of_masks = true}, PaddingMask{}}
                                     : std::vector<Mask>{FormulaMask{"key > 1"}};
        if constexpr (requires { one.of_masks; }) one.of_masks = one.of_masks || lists;
        spec.mask.emplace_back(one);
        return spec.validated();
      };
      auto other = mask;
      other.for_each_field(other, [&](const char* name, auto& value, const auto&... values) {
        SCOPED_TRACE(std::string(mask.kind) + " " + name);
        const auto usual_value = value;
        change(value, values...);
        const AttentionSpec before = with(mask), after = with(other);
        const bool given = lists && std::string_view(name) == "of_masks";  // always
        const KernelConfig config = family.preferred(after, target, {});
        if (!given) {
          EXPECT_EQ(unused(before, after, target, config), "");
        }
        value = usual_value;
      });
    };
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      (check(std::variant_alternative_t<i, Mask>{}), ...);
    }(std::make_index_sequence<std::variant_size_v<Mask>>());
  });
}

// A choice that no kernel reads would cost the tuner time and change nothing.
TEST(FieldUse, KernelsReadTheChoicesThatFamiliesName) {
  for_each_family([](const KernelFamily& family, const Target& target) {
    const AttentionSpec spec = usual(family.op).validated();
    const ConfigAxes axes = family.axes(spec, target);
    const KernelSource few = render(spec, target, family.preferred(spec, target, shapes[0])),
                       many = render(spec, target, family.preferred(spec, target, shapes[1]));
    axes.for_each([&](const char* name, const auto& values, auto, auto) {
      if (!family.has_choice(name) || values.size() < 2) return;
      const std::string config = std::string("Config::") + name;
      EXPECT_TRUE(reads(few, config) || reads(many, config)) << "no header reads " << config;
    });
  });
}

}  // namespace
}  // namespace flashjit
