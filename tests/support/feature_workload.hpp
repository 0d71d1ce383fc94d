// The launch that a row of a covering array describes.
#pragma once

#include <iterator>

#include "codegen/arguments/table.hpp"
#include "tests/support/feature_space.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {

// The case of an operation that Workload launches. Layouts, values and poison follow from the seed.
inline Case workload_of(const FeatureCase& of) {
  using enum MemoryLayout;
  constexpr MemoryLayout layouts[] = {contiguous, heads_first, batch_inside, padded, sliced_heads};
  Case c{.spec = of.spec,
         .batch = of.shape().batch,
         .heads_q = of.heads_q,
         .heads_kv = of.heads_kv,
         .seqlen_q = of.seqlen_q,
         .seqlen_k = of.seqlen_k,
         .page_size = of.page_size,
         .layout = layouts[of.seed % std::size(layouts)],
         .layout_kv = layouts[of.seed / 2 % std::size(layouts)],
         .poison = of.seed % 2 ? Poison::nan : Poison::infinity,
         .seed = of.seed};
  const bool caches = counts_keys(of.spec);
  if (of.spec.varlen) c.lengths_q = of.lengths_q(), c.spare_rows = static_cast<int>(of.seed % 3) * 40;
  if (of.spec.varlen || caches) c.lengths_k = of.lengths_k();
  if (caches) c.lengths_k.resize(static_cast<std::size_t>(c.batch));
  if (!of.spec.varlen && !caches && of.some_empty) c.seqlen_k = 0;
  return c;
}

}  // namespace flashjit::testing_support
