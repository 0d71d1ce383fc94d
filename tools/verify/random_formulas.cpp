#include "tools/verify/random_formulas.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "codegen/arguments/table.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/formulas/formula.hpp"
#include "codegen/spec/declarations.hpp"

namespace flashjit::verify {
namespace {

class Writer {
 public:
  Writer(Draw& draw, FormulaUse use, const AttentionSpec& declared)
      : draw_(draw), use_(use), declared_(declared) {}

  // Formulas in brackets, except single operands.
  std::string condition(int levels) {
    if (levels > 0 && draw_.chance(0.4)) {
      if (draw_.chance(0.2)) return "!" + condition(levels - 1);
      if (draw_.chance(0.1))
        return "(" + condition(levels - 1) + " ? " + condition(levels - 1) + " : " + condition(levels - 1) +
               ")";
      return "(" + condition(levels - 1) + one_of({" && ", " || "}) + condition(levels - 1) + ")";
    }
    const std::string op = one_of({" < ", " <= ", " > ", " >= ", " == ", " != "});
    if (draw_.chance(0.7)) return "(" + integer(levels - 1) + op + integer(levels - 1) + ")";
    return "(" + real(levels - 1) + op + real(levels - 1) + ")";
  }

  std::string integer(int levels) {
    if (levels <= 0 || draw_.chance(0.3)) return integer_leaf(levels);
    switch (draw_.between(0, 9)) {
      case 0:
        return "-" + integer(levels - 1);
      case 1:
        return "abs(" + integer(levels - 1) + ")";
      case 2:
        return one_of({"min", "max"}) + "(" + integer(levels - 1) + ", " + integer(levels - 1) + ")";
      case 3:
        return "floor(" + real(levels - 1) + ")";
      case 4:
        return "(" + condition(levels - 1) + " ? " + integer(levels - 1) + " : " + integer(levels - 1) + ")";
      case 5:
      case 6:
        // Any divisor, or one that leaves something.
        return "(" + integer(levels - 1) + one_of({" / ", " % "}) +
               (draw_.chance(0.2) ? integer(levels - 1) : std::to_string(draw_.between(1, 40))) + ")";
      default:
        return "(" + integer(levels - 1) + one_of({" + ", " - ", " - ", " * "}) + integer(levels - 1) + ")";
    }
  }

  std::string real(int levels) {
    if (levels <= 0 || draw_.chance(0.3)) return real_leaf(levels);
    const bool functions = use_ == FormulaUse::score;
    switch (draw_.between(0, functions ? 11 : 7)) {
      case 0:
        return "-" + real(levels - 1);
      case 1:
        return "abs(" + real(levels - 1) + ")";
      case 2:
        return one_of({"min", "max"}) + "(" + real(levels - 1) + ", " + real(levels - 1) + ")";
      case 3:
        return "(" + condition(levels - 1) + " ? " + real(levels - 1) + " : " + real(levels - 1) + ")";
      case 4:
        return "(" + real(levels - 1) + " / " + (draw_.chance(0.2) ? real(levels - 1) : literal()) + ")";
      case 8:
        return "tanh(" + real(levels - 1) + ")";
      case 9:
        return "exp(-abs(" + real(levels - 1) + "))";
      case 10:
        return "log(1 + abs(" + real(levels - 1) + "))";
      case 11:
        return "sqrt(abs(" + real(levels - 1) + "))";
      default:
        return "(" + (draw_.chance(0.3) ? integer(levels - 1) : real(levels - 1)) +
               one_of({" + ", " - ", " * "}) + real(levels - 1) + ")";
    }
  }

 private:
  std::string one_of(std::initializer_list<const char*> words) {
    return words.begin()[draw_.between(0, static_cast<int>(words.size()) - 1)];
  }
  std::string literal() {
    char text[32];
    std::snprintf(text, sizeof text, "%d.%02d", draw_.between(0, 9), draw_.between(1, 99));
    return text;
  }

  std::string integer_leaf(int levels) {
    if (draw_.chance(0.25))
      return std::to_string(draw_.chance(0.1) ? draw_.word() & 0x7fffffff : draw_.between(0, 64));
    if (draw_.chance(0.2)) {
      if (const std::string found = declared(FormulaType::integer, levels); !found.empty()) return found;
    }
    return one_of(
        {"key", "key", "position", "position", "row", "head", "head_kv", "batch", "seqlen_q", "seqlen_k"});
  }
  std::string real_leaf(int levels) {
    if (use_ == FormulaUse::score && draw_.chance(0.5)) return "score";
    if (draw_.chance(0.5)) {
      if (const std::string found = declared(FormulaType::real, levels); !found.empty()) return found;
    }
    if (draw_.chance(0.03)) return "inf";
    return literal();
  }
  // A scalar or an element of a table.
  std::string declared(FormulaType type, int levels) {
    std::vector<std::string> found;
    for (const DeclaredScalar& scalar : declared_.scalars)
      if (type_of(scalar.dtype) == type) found.push_back(scalar.name);
    for (const DeclaredTable& table : declared_.tables)
      if (type_of(table.dtype) == type) found.push_back(element(table, levels));
    return found.empty()
               ? ""
               : found[static_cast<std::size_t>(draw_.between(0, static_cast<int>(found.size()) - 1))];
  }
  std::string element(const DeclaredTable& table, int levels) {
    std::string indices;
    const std::size_t leading = leading_dimensions(table);
    const bool leave_out = leading < table.shape.size() && leading > 0 && draw_.chance(0.3);
    for (std::size_t i = leave_out ? leading : 0; i < table.shape.size(); ++i) {
      const bool usual = table.shape[i].kind != TableDimension::Kind::free && draw_.chance(0.7);
      indices += (indices.empty() ? "" : ", ") +
                 (usual ? std::string(usual_index(table.shape[i])) : integer(levels - 2));
    }
    return table.name + "[" + indices + "]";
  }

  Draw& draw_;
  const FormulaUse use_;
  const AttentionSpec& declared_;
};

}  // namespace

void declare_names(AttentionSpec& spec) {
  const auto table = [&](const char* name, DType dtype, std::initializer_list<const char*> shape) {
    DeclaredTable declared{name, dtype};
    for (const char* dim : shape) declared.shape.push_back(dimension_of(dim));
    spec.tables.push_back(std::move(declared));
  };
  const bool packed = key_layout(spec) == KeyLayout::packed;
  table("slope", DType::fp32, {"heads_q"});
  table("bias", DType::bf16, {"batch or 1", "heads_q or 1", "seqlen_q or 1", "seqlen_k"});
  table("document", DType::int32, {"batch", "seqlen_k"});
  table("reach", DType::int32, {"batch", "heads_kv"});
  table("bits", DType::uint8, {"m", "n"});
  table("steps", DType::int8, {packed ? "total_k" : "seqlen_k"});
  table("gates", DType::fp16, {"heads_q", spec.varlen ? "total_q" : "seqlen_q"});
  table("flags", DType::int8, {"batch"});
  spec.scalars = {{"cap", DType::fp32}, {"ahead", DType::int32}};
}

std::string random_formula(Draw& draw, FormulaUse use, const AttentionSpec& declarations) {
  Writer writer(draw, use, declarations);
  const int levels = draw.between(1, 4);
  if (use == FormulaUse::mask) {
    // Often with a part that limits the keys, as masks have.
    const std::string some = writer.condition(levels);
    return draw.chance(0.3)   ? "key <= position && " + some
           : draw.chance(0.3) ? some + " || abs(position - key) < 9"
                              : some;
  }
  return draw.chance(0.5) ? "score + " + writer.real(levels) : writer.real(levels);
}

void drop_unread_names(AttentionSpec& spec) {
  std::string all;
  for (const std::string& formula : spec.score) all += formula + " ";
  for (const Mask& mask : spec.mask)
    if (const auto* formula = std::get_if<FormulaMask>(&mask)) all += formula->formula + " ";
  const auto unread = [&](const auto& one) {
    const auto is_of_name = [](char c) { return is_identifier({&c, 1}) || (c >= '0' && c <= '9'); };
    for (std::size_t at = 0; (at = all.find(one.name, at)) != std::string::npos; ++at)
      if ((at == 0 || !is_of_name(all[at - 1])) && !is_of_name(all[at + one.name.size()])) return false;
    return true;
  };
  std::erase_if(spec.tables, unread);
  std::erase_if(spec.scalars, unread);
}

}  // namespace flashjit::verify
