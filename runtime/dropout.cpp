#include "runtime/dropout.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "codegen/base/float_state.hpp"
#include "runtime/arguments/checks.hpp"
#include "templates/shared/dropout.h"

namespace flashjit {
namespace {

using device::u32;
constexpr std::uint64_t certain = std::uint64_t{1} << 32;  // the threshold for p = 1

// The column words of `keys` keys from `first` on. A call of dropout_column_words() returns those of four.
std::vector<u32> column_words(const device::Words& philox_key, int batch, std::size_t keys, int first = 0) {
  std::vector<u32> words;
  words.reserve(keys + 7);
  const int before = first % 4;
  for (int quad = first / 4; words.size() < keys + static_cast<std::size_t>(before); ++quad) {
    const device::Words four = device::dropout_column_words(philox_key, quad, batch);
    words.insert(words.end(), std::begin(four.x), std::end(four.x));
  }
  words.erase(words.begin(), words.begin() + before);
  return words;
}

void keep_row(const device::RowWords& row, const std::vector<u32>& columns, std::uint64_t threshold,
              std::span<std::uint8_t> keep) {
  for (std::size_t i = 0; i < keep.size(); ++i)
    keep[i] = threshold < certain && !device::dropped(row, columns[i], static_cast<u32>(threshold));
}

// Not inlined: otherwise the compiler might compute outside of a scope of DefaultFloatState.
[[gnu::noinline]] std::uint64_t threshold_of(double p) {
  if (!(p >= 0 && p <= 1)) refuse_argument("dropout_p is ", p, ", it must be between 0 and 1");
  return static_cast<std::uint64_t>(std::llround(p * static_cast<double>(certain)));
}

[[gnu::noinline]] double scale_of(double p) {
  const std::uint64_t threshold = threshold_of(p);
  return threshold == certain ? 0 : static_cast<double>(certain) / static_cast<double>(certain - threshold);
}

}  // namespace

std::uint64_t dropout_threshold(double p) {
  const DefaultFloatState state;
  return threshold_of(p);
}

double dropout_scale(double p) {
  const DefaultFloatState state;
  return scale_of(p);
}

void dropout_row(const Dropout& dropout, int batch, int head, int row, std::span<std::uint8_t> keep,
                 int first_key) {
  if (first_key < 0) refuse_argument("first_key is ", first_key, ", it must be at least 0");
  if (keep.size() > longest_sequence)
    refuse_argument("keep has ", keep.size(), " keys, a row has at most ", longest_sequence);
  if (keep.size() + static_cast<std::size_t>(first_key) > longest_sequence)
    refuse_argument("keep has ", keep.size(), " keys from ", first_key, " on, a row has at most ",
                    longest_sequence);
  const device::Words philox_key = device::dropout_key(dropout.seed, dropout.offset);
  keep_row(device::dropout_row_words(philox_key, row, head, batch),
           column_words(philox_key, batch, keep.size(), first_key), dropout_threshold(dropout.p), keep);
}

std::size_t dropout_mask_size(const Shape& shape) {
  for (const int size : {shape.batch, shape.num_heads_q, shape.seqlen_q, shape.seqlen_k})
    if (size < 0) refuse_argument("shape has a size of ", size, ", it must be at least 0");
  for (const int length : {shape.seqlen_q, shape.seqlen_k})
    if (length > longest_sequence)
      refuse_argument("shape has a length of ", length, ", a sequence has at most ", longest_sequence,
                      " rows");
  const auto elements = product_of({shape.batch, shape.num_heads_q, shape.seqlen_q, shape.seqlen_k});
  if (!elements)
    refuse_argument("a mask of batch ", shape.batch, " x num_heads_q ", shape.num_heads_q, " x seqlen_q ",
                    shape.seqlen_q, " x seqlen_k ", shape.seqlen_k,
                    " has more elements than 64 bits count; split the batch, or take dropout_row()");
  return static_cast<std::size_t>(*elements);
}

void dropout_mask(const Dropout& dropout, const Shape& shape, std::span<std::uint8_t> keep) {
  if (keep.size() != dropout_mask_size(shape))
    refuse_argument("keep has ", keep.size(), " elements, the shape's mask has ", dropout_mask_size(shape),
                    ": batch * num_heads_q * seqlen_q * seqlen_k");
  const std::uint64_t threshold = dropout_threshold(dropout.p);
  const device::Words philox_key = device::dropout_key(dropout.seed, dropout.offset);
  const auto keys = static_cast<std::size_t>(shape.seqlen_k);
  if (keep.empty()) return;
  for (int batch = 0; batch < shape.batch; ++batch) {
    const std::vector<u32> columns = column_words(philox_key, batch, keys);
    for (int head = 0; head < shape.num_heads_q; ++head)
      for (int row = 0; row < shape.seqlen_q; ++row, keep = keep.subspan(keys))
        keep_row(device::dropout_row_words(philox_key, row, head, batch), columns, threshold,
                 keep.first(keys));
  }
}

}  // namespace flashjit
