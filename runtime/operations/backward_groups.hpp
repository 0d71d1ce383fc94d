// How sm_90a's backward divides groups of query heads, and their rows, among work tiles.
#pragma once

#include <cstdint>

#include "runtime/operation.hpp"
#include "templates/shared/params.h"

namespace flashjit {

// A work tile has block_n keys of a key/value head, for some or all query heads of its group, or for a part
// of the rows of one. Where it has not all, dK and dV are sums of several work tiles, in the workspace.
struct BackwardGroups {
  const PlannedKernel& kernel;

  struct Tile {
    int heads = 1;                // a divisor of the group
    int row_parts = 1, rows = 0;  // of a head; rows: of a part, a multiple of backward_row_unit
  };
  Tile tile(const device::ProblemParams& problem, std::int64_t key_rows) const;

  // Rows of dK's and dV's sums, over key/value heads: at least as many as a launch of any smaller shape
  // needs. key_rows: of a head. seqlen_q: with packed sequences total_q, since a launch may leave its longest
  // sequence out.
  std::int64_t rows_of_sums(std::int64_t heads_q, std::int64_t heads_kv, std::int64_t key_rows,
                            std::int64_t seqlen_q) const;

  // Parts of rows over all heads of the batch, at least as many as a launch of any smaller shape has.
  std::int64_t most_row_parts(std::int64_t heads, std::int64_t seqlen_q) const;

  // Bytes of a head's Q, dO and sums of dQ.
  static std::int64_t bytes_of_head(const AttentionSpec& spec, std::int64_t seqlen_q);
  // The second-level cache's share that rows which are computed together may take, with dQ's sums.
  static constexpr std::int64_t rows_in_cache = std::int64_t{32} << 20;

 private:
  int parallelism() const;
  bool can_divide(std::int64_t heads_q, std::int64_t heads_kv) const;
  // Whether rows of one head may be divided.
  bool divides_rows() const;
  // The rows of a whole group do not stay in the cache.
  bool exceeds_cache(std::int64_t heads_q, std::int64_t heads_kv, std::int64_t seqlen_q) const;
  std::int64_t most_rows(std::int64_t heads_q, std::int64_t heads_kv) const;
};

}  // namespace flashjit
