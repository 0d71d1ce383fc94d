// Where a new token's rows go in the caches.
#pragma once

#include "shared/append_params.h"

namespace flashjit::device {

struct TokenPlace {
  i64 entry, row;      // in the new tensors; packed: entry 0
  i64 page, page_row;  // in the caches
  i64 position;        // of the token among its batch entry's keys; without append_positions 0
  bool has_slot;       // the caches have the slot or position, whatever the page is
  bool in_batch;       // the token belongs to a batch entry
};

// The batch entry that a packed token belongs to, by bisection: the last one that does not begin after it.
FLASHJIT_FN int entry_of(const int* cu_seqlens, int batch, int token) {
  int first = 0, end = batch;
  while (end - first > 1) {
    const int middle = first + (end - first) / 2;
    if (cu_seqlens[middle] <= token)
      first = middle;
    else
      end = middle;
  }
  return first;
}

// The row of the new tensors.
template <bool varlen>
FLASHJIT_FN TokenPlace row_of_token(const AppendParams& p, int token) {
  TokenPlace at{};
  at.row = token;
  if constexpr (!varlen) {
    at.entry = static_cast<i64>(p.seqlen.quotient(static_cast<u64>(token)));
    at.row = token - at.entry * static_cast<i64>(p.seqlen.size);
  }
  return at;
}

// The place of a token at a position of a batch entry's keys. The page of a table is not used here, so that
// nobody waits for it yet.
FLASHJIT_FN void find_at_position(const AppendParams& p, i64 entry, i64 position, TokenPlace& at) {
  at.position = position;
  at.has_slot = at.position >= 0 && at.position < p.entry_rows;
  at.page = entry;
  at.page_row = at.position;
  if (!p.page_table || !at.has_slot) return;
  const auto page = static_cast<i64>(p.page_size.quotient(static_cast<u64>(at.position)));
  at.page = p.page_table[entry * p.table_stride + page];
  at.page_row = at.position - page * static_cast<i64>(p.page_size.size);
}

// The rest of the place.
template <bool varlen>
FLASHJIT_FN void find_in_cache(const AppendParams& p, int token, TokenPlace& at) {
  if (p.slots) {
    const i64 slot = p.slots[token];
    at.in_batch = true;
    at.has_slot = slot >= 0 && slot < p.num_slots;
    at.page = static_cast<i64>(p.page_size.quotient(static_cast<u64>(slot)));
    at.page_row = slot - at.page * static_cast<i64>(p.page_size.size);
    return;
  }
  i64 entry = at.entry, row = at.row;
  at.in_batch = true;
  if constexpr (varlen) {
    entry = entry_of(p.cu_seqlens, p.batch, token);
    row = token - p.cu_seqlens[entry];
    at.in_batch = p.batch > 0 && row >= 0 && token < p.cu_seqlens[entry + 1];
    if (!at.in_batch) return;
  }
  find_at_position(p, entry, i64{p.append_positions[entry]} + row, at);
}

// Whatever slots, positions and page ids are, nothing outside the caches is written.
FLASHJIT_FN bool is_in_cache(const AppendParams& p, const TokenPlace& at) {
  return at.has_slot && at.page >= 0 && at.page < p.num_pages;
}

}  // namespace flashjit::device
