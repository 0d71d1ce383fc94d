#pragma once

namespace flashjit {

// The sizes of one problem, as far as they matter to the choice of a config.
struct Shape {
  int batch = 1;
  int seqlen_q = 1, seqlen_k = 1;  // the longest of the batch
  int num_heads_q = 1, num_heads_kv = 1;
  bool operator==(const Shape&) const = default;
};

}  // namespace flashjit
