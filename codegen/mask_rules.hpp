// What a list of masks means together.
#pragma once

#include <string>
#include <vector>

#include "mask.hpp"

namespace flashjit {

// Refuses a spec, with the reason and what would work.
[[noreturn]] void invalid(const std::string& message);

// Masks are an intersection: their order and repetition do not count.
std::vector<Mask> canonical(std::vector<Mask> masks);

// Throws invalid_spec, with the reason and what would work, for masks that contradict each other, that one
// launch has no arguments for, or whose fields are out of range. `masks` are canonical.
void check_masks(const std::vector<Mask>& masks);

// Whether only the device knows how much a tile has to do: tiles are then handed out one by one, to whichever
// multiprocessor is free.
bool uneven_on_device(const std::vector<Mask>& masks, bool varlen);

// "causal", or {"kind": "causal", "align": "top_left"} where a field is not at its default.
std::string to_json(const Mask& mask);

// The list's mask of that kind; null if there is none.
template <class Kind>
const Kind* find_mask(const std::vector<Mask>& masks) {
  for (const Mask& mask : masks)
    if (const Kind* found = std::get_if<Kind>(&mask)) return found;
  return nullptr;
}

}  // namespace flashjit
