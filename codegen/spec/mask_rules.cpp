#include "codegen/spec/mask_rules.hpp"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

std::string text_of(bool value) {
  return value ? "true" : "false";
}
std::string text_of(int value) {
  return std::to_string(value);
}
std::string text_of(CausalAlign value) {
  return std::string("\"") + to_string(value) + "\"";
}
std::string text_of(const std::string& value) {
  return json_string(value);
}

const char* kind_of(const Mask& mask) {
  return std::visit([](const auto& m) { return std::decay_t<decltype(m)>::kind; }, mask);
}

// "align": "top_left"
template <class Kind>
std::vector<std::string> fields_of(const Kind& mask) {
  std::vector<std::string> fields;
  mask.for_each_field(mask, [&](const char* name, const auto& value, const auto&...) {
    fields.push_back(std::string("\"") + name + "\": " + text_of(value));
  });
  return fields;
}

}  // namespace

void invalid(const std::string& message) {
  throw Error(ErrorCode::invalid_spec, message);
}

std::vector<Mask> canonical(std::vector<Mask> masks) {
  std::sort(masks.begin(), masks.end());
  masks.erase(std::unique(masks.begin(), masks.end()), masks.end());
  return masks;
}

void check_values(const Mask& mask) {
  std::visit([](const auto& m) { m.for_each_field(m, FieldCheck{std::string(m.kind) + "'s "}); }, mask);
}

void check_masks(const std::vector<Mask>& masks) {
  for (std::size_t i = 1; i < masks.size(); ++i) {
    if (masks[i].index() != masks[i - 1].index() || std::holds_alternative<FormulaMask>(masks[i])) continue;
    const bool lists = std::holds_alternative<BlockSparseMask>(masks[i]);
    invalid(std::string("mask has two of kind ") + kind_of(masks[i]) + " that differ, " +
            to_json(masks[i - 1]) + " and " + to_json(masks[i]) +
            (lists ? ": a launch has one list of blocks; their intersection as one list would work"
                   : "; one of them would work"));
  }
  if (const auto* blocks = find_mask<BlockSparseMask>(masks)) {
    if (blocks->of_masks && masks.size() == 1)
      throw Error(
          ErrorCode::unsupported,
          "block_sparse with of_masks is not supported without another mask, of which its lists are made; "
          "one more mask, or leaving of_masks out, would work");
  }
  const auto* causal = find_mask<CausalMask>(masks);
  const auto* window = find_mask<SlidingWindowMask>(masks);
  if (window && find_mask<TreeMask>(masks))
    throw Error(ErrorCode::unsupported,
                "mask tree with sliding_window is not supported: a window counts rows in the order of q, and "
                "not the depth of a draft token in its tree; leaving sliding_window out would work, or a "
                "formula that reads depths from a table, such as "
                "\"key >= seqlen_k - seqlen_q + depth[batch, row] - window\"");
  if (causal && window && causal->align != window->align) {
    invalid(std::string("mask causal with align ") + to_string(causal->align) +
            " and sliding_window with align " + to_string(window->align) +
            " put the same row at two positions; one align for both would work");
  }
  if (causal && causal->align == CausalAlign::top_left && find_mask<TreeMask>(masks))
    invalid(
        "mask tree with causal aligned top_left: draft tokens come after their prefix; "
        "align bottom_right would work");
}

bool uneven_on_device(const std::vector<Mask>& masks, bool varlen) {
  return varlen || find_mask<PaddingMask>(masks) || find_mask<BlockSparseMask>(masks);
}

bool is_of_masks(const Mask& mask) {
  const auto* blocks = std::get_if<BlockSparseMask>(&mask);
  return blocks && blocks->of_masks;
}

std::string to_json(const Mask& mask) {
  if (const auto* formula = std::get_if<FormulaMask>(&mask)) {
    // A string that is one identifier would be the name of a kind.
    const std::string text = json_string(formula->formula);
    return is_identifier(formula->formula) ? "{\"formula\": " + text + "}" : text;
  }
  const std::string kind = std::string("\"") + kind_of(mask) + '"';
  std::string given;
  std::visit(
      [&](const auto& m) {
        const std::vector<std::string> fields = fields_of(m),
                                       defaults = fields_of(std::decay_t<decltype(m)>());
        for (std::size_t i = 0; i < fields.size(); ++i)
          if (fields[i] != defaults[i]) given += ", " + fields[i];
      },
      mask);
  return given.empty() ? kind : "{\"kind\": " + kind + given + "}";
}

const char* to_string(CausalAlign align) noexcept {
  switch (align) {
    case CausalAlign::bottom_right:
      return "bottom_right";
    case CausalAlign::top_left:
      return "top_left";
  }
  return "unknown";
}

}  // namespace flashjit
