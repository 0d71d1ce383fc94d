// Pages of keys and values: checked as far as the host sees them, and made into params.
#pragma once

#include "runtime/flashjit.hpp"
#include "templates/shared/offsets.h"
#include "templates/shared/page_table.h"
#include "templates/shared/params.h"

namespace flashjit {

struct CheckedPages {
  device::PageTable table{};
  int longest = 0;  // keys that a row of the table has room for
};

// k has been checked but for its sizes of pages. Throws invalid_argument. Touches no tensor memory.
CheckedPages check_pages(const AttentionSpec& spec, Device device, const AttentionArgs& args, int batch);

// Throws invalid_argument unless k's pages have a size that kernels take.
void require_page_size(const Tensor& k);

// Sets how device code divides by page_size, which is set already.
void set_division(device::PageTable& table);

// Throws invalid_argument for the first page id out of range among those that a launch reads, with its place.
// All pointers are the host's; lengths have been checked.
void check_page_ids(const AttentionSpec& spec, const device::ProblemParams& params,
                    const device::PageTable& pages, const device::OffsetParams* offsets);

}  // namespace flashjit
