// Rules for the list of masks of a spec.
#pragma once

#include <string>
#include <vector>

#include "codegen/spec/mask.hpp"

namespace flashjit {

// Throws invalid_spec. The message says what is wrong and what would work.
[[noreturn]] void invalid(const std::string& message);

// The masks in canonical order, each once: they are an intersection, so order and repetition do not count.
std::vector<Mask> canonical(std::vector<Mask> masks);

// Throws invalid_spec if a field of the mask has a value that it may not have.
void check_values(const Mask& mask);

// Throws invalid_spec if masks contradict each other, or if one launch has no arguments for them; unsupported
// for lists of other masks where there are none, and for a window of a tree. `masks` are canonical.
void check_masks(const std::vector<Mask>& masks);

// Whether only the device knows how much work a tile has. Tiles
// are then handed out one by one to multiprocessors that are free.
bool uneven_on_device(const std::vector<Mask>& masks, bool varlen);

// "causal", or {"kind": "causal", "align": "top_left"} if a field is not at its default. A formula: its text
// in quotes.
std::string to_json(const Mask& mask);

// Whether its lists were made of the spec's other masks.
bool is_of_masks(const Mask& mask);

// The list's mask of this kind; null if there is none.
template <class Kind>
const Kind* find_mask(const std::vector<Mask>& masks) {
  for (const Mask& mask : masks)
    if (const Kind* found = std::get_if<Kind>(&mask)) return found;
  return nullptr;
}

}  // namespace flashjit
