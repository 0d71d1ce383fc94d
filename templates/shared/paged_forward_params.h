// Parameters that pages add to those of a forward.
#pragma once

#include "shared/page_table.h"

namespace flashjit::device {

// Params: those of the family. K and V are [num_pages, page_size, heads_kv, head_dim]: their views have pages
// for batch entries.
template <class Params>
struct Paged : Params {
  PageTable pages;
  // sm_90a: keys of a copy, which divide page_size and block_n; the warps that may copy: each has copies to
  // make in every block.
  int box_keys, copying_warps;
};

// The parameters of a kernel whose Spec is paged.
template <class Params>
FLASHJIT_FN const Paged<Params>& with_pages(const Params& p) {
  return static_cast<const Paged<Params>&>(p);
}

}  // namespace flashjit::device
