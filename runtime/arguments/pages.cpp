#include "runtime/arguments/pages.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "codegen/spec/mask_rules.hpp"
#include "runtime/arguments/checks.hpp"

namespace flashjit {
namespace {

constexpr int largest_power = 256, page_step = 16;

}  // namespace

void require_page_size(const Tensor& k) {
  const int page_size = size(k, 1);
  const bool is_power = page_size > 0 && std::has_single_bit(static_cast<unsigned>(page_size));
  if ((is_power && page_size <= largest_power) || (page_size > 0 && page_size % page_step == 0)) return;
  const int below = page_size > page_step
                        ? page_size / page_step * page_step
                        : static_cast<int>(std::bit_floor(static_cast<unsigned>(std::max(page_size, 1))));
  refuse_argument("k has shape ", shape_text(k), ": pages of ", page_size,
                  " keys; a page size is a power of two up to ", largest_power, " or a multiple of ",
                  page_step, "; ", below, " would work");
}

// key / page_size by multiplication (Granlund, Montgomery 1994): with 2^(bits - 1) < page_size <= 2^bits, the
// error of 2^(31 + bits) / page_size, rounded up, stays below 1 / page_size for keys below 2^31.
void set_division(device::PageTable& table) {
  const auto size = static_cast<std::uint64_t>(table.page_size);
  table.shift = 31 + static_cast<int>(std::bit_width(size - 1));
  table.inverse = static_cast<device::u32>(((std::uint64_t{1} << table.shift) + size - 1) / size);
}

CheckedPages check_pages(const AttentionSpec& spec, Device device, const AttentionArgs& args, int batch) {
  const Tensor& k = *args.k;
  const Tensor& table = require<&AttentionArgs::page_table>(spec, args, device);
  require_page_size(k);
  require_shape("page_table", table, 0, batch, "the batch");
  require_contiguous_rows("page_table", table);
  require_address("page_table", table, sizeof(int));

  CheckedPages checked{.table = {.table = static_cast<const int*>(table.data),
                                 .table_stride = stride(table, 0),
                                 .page_size = size(k, 1),
                                 .num_pages = size(k, 0),
                                 .inverse = 0,
                                 .shift = 0}};
  set_division(checked.table);
  const std::int64_t room = table.shape[1] * k.shape[1];
  if (k.shape[0] == 0 && batch > 0 && room > 0 && !args.seqlens_k)
    refuse_argument("k has no pages, but without seqlens_k all ", room,
                    " keys of each row of page_table are seen: give pages, or lengths of 0");
  if (k.shape[0] > 0) checked.longest = static_cast<int>(std::min<std::int64_t>(room, longest_sequence));
  return checked;
}

void check_page_ids(const AttentionSpec& spec, const device::ProblemParams& p, const device::PageTable& pages,
                    const device::OffsetParams* offsets) {
  const auto* window = find_mask<SlidingWindowMask>(spec.mask);
  const std::int64_t page_size = pages.page_size;
  for (int b = 0; b < p.batch; ++b) {
    int rows = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.seqlen_q;
    if (p.seqlens_q) rows = std::min(rows, p.seqlens_q[b]);
    if (rows == 0) continue;
    // The table has room for seqlen_k keys; another thread may have written lengths since they were checked.
    const int length = p.seqlens_k ? std::min(p.seqlens_k[b], p.seqlen_k) : p.seqlen_k;
    std::int64_t sinks_end = 0, window_begin = 0;  // keys between the two are not read
    if (window) {
      std::int64_t first_row = window->align == CausalAlign::bottom_right ? length - rows : 0, first_key = 0;
      if (offsets) {
        first_key = offsets->key[b * offsets->key_stride];
        first_row = offsets->row[b * offsets->row_stride] - first_key;
      }
      window_begin = std::max<std::int64_t>(first_row - p.window_left, 0);
      sinks_end = p.num_sinks - first_key;
    }
    const int* const of_entry = pages.table + b * pages.table_stride;
    for (std::int64_t page = 0; page * page_size < length; ++page) {
      if (page * page_size >= sinks_end && (page + 1) * page_size <= window_begin) continue;
      const int id = of_entry[page];
      if (id >= 0 && id < pages.num_pages) continue;
      refuse_argument("page_table[", b, ", ", page, "] is ", id, ", it must be between 0 and ",
                      pages.num_pages - 1, ", the last page of k: batch entry ", b, " has ", length, " keys");
    }
  }
}

}  // namespace flashjit
