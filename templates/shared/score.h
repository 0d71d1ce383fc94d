// The hook for formulas on scores. A kernel calls Spec::Score::modify for each block of scores, before its
// masks. Each target passes scores in its own form, with their rows and keys.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Leaves scores as they are.
struct PlainScore {
  template <class... Block>
  FLASHJIT_FN static void modify(const Block&...) {}
};

}  // namespace flashjit::device
