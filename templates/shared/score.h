// The hook for formulas on scores: a kernel calls Spec::Score::modify for each block of scores, before its
// masks. Each target passes the scores in its own form, and the rows and keys that they belong to.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Leaves scores as they are.
struct PlainScore {
  template <class... Block>
  FLASHJIT_FN static void modify(const Block&...) {}
};

}  // namespace flashjit::device
