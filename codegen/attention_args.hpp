// The arguments of a launch. Plain data, part of the public interface.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "error.hpp"
#include "spec.hpp"

namespace flashjit {

struct Device {
  enum class Kind { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  // "cpu" or "cuda:N" ("cuda" is "cuda:0").
  static FLASHJIT_API Device parse(std::string_view text);
  // "cpu:N" for an index that no CPU has.
  std::string str() const {
    if (kind == Kind::cpu && index == 0) return "cpu";
    return (kind == Kind::cpu ? "cpu:" : "cuda:") + std::to_string(index);
  }
  bool operator==(const Device&) const = default;
};

// Borrowed memory. Strides in elements; the last dimension of q, k, v, o must be contiguous.
struct Tensor {
  static constexpr int max_rank = 6;
  void* data = nullptr;
  DType dtype = DType::bf16;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> strides{};

  // Row-major tensor of that shape.
  static FLASHJIT_API Tensor contiguous(void* data, DType dtype, Device device,
                                        std::span<const std::int64_t> shape);
  static Tensor contiguous(void* data, DType dtype, Device device,
                           std::initializer_list<std::int64_t> shape) {
    return contiguous(data, dtype, device, std::span(shape.begin(), shape.size()));
  }
};

// Arguments of one launch. q, k, v, o: [batch, seqlen, heads, head_dim], or with varlen packed
// [total, heads, head_dim]. A sequence has at most longest_sequence (shape.hpp) rows or keys, a launch at
// most 2^48 query rows over batch and heads. arguments.hpp has them all in a table; later operations add
// some.
//
// Rows of an output may not overlap: each dimension's stride must be beyond all that lies within it, in
// whatever order the dimensions lie; other strides are refused. Memory that o shares with q, k or v is
// refused where that is certain from strides and addresses: tensors of equal strides, slices of one buffer
// among them, are told exactly; of others it is seen where one has no gaps and the other begins or ends in
// it.
struct AttentionArgs {
  std::optional<Tensor> q{}, k{}, v{}, o{};  // of the spec's dtype, o of its o_dtype
  std::optional<Tensor> lse{};  // float32 [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q];
                                // natural logarithm; -inf for a row with nothing to attend to, NaN (as o
                                // is) where a score is NaN or +inf, on GPUs also where the row's largest
                                // score, times log2(e), is beyond 2^26 either way; a score that float32
                                // rounds to -inf is an unseen key
  std::optional<Tensor> cu_seqlens_q{};  // int32 [batch + 1], on the kernel's device; varlen only
  std::optional<Tensor> cu_seqlens_k{};  // int32 [batch + 1]
  // varlen: no sequence is longer; absent: as long as all rows together, at most longest_sequence.
  std::optional<int> max_seqlen_q{}, max_seqlen_k{};

  // For masks of the spec, each with its kind only. Integer tables are int32, contiguous and on the kernel's
  // device; bits are the 32 of a word, the lowest first. With varlen, tables may be made for a larger
  // max_seqlen than the launch has: query blocks and rows beyond it are not read, key blocks beyond not seen.
  std::optional<Tensor> seqlens_q{};  // padding: [batch], true lengths, with varlen the rows used of each
                                      // packed sequence; one of the two may be absent: all rows
  std::optional<Tensor> seqlens_k{};
  std::optional<int> window_left{};   // sliding_window: keys before a row's own; absent: all
  std::optional<int> window_right{};  // keys after it
  std::optional<int> num_sinks{};     // with sinks: the first keys, which every row sees; absent: 0
  // block_sparse: query block i of batch entry b and head h sees the key blocks block_indices[e] for e from
  // block_offsets[b, h, i] to block_offsets[b, h, i + 1], ascending. A size of 1 is shared by all.
  std::optional<Tensor> block_offsets{};     // [batch or 1, num_heads_q or 1, ceil(seqlen_q / block_m) + 1]
  std::optional<Tensor> block_indices{};     // [listed blocks]
  std::optional<Tensor> block_bitmask_of{};  // [listed blocks]: -1, seen whole, or which bitmask; absent: -1
  std::optional<Tensor> block_bitmasks{};    // [bitmasks, block_m, ceil(block_n / 32)]
  std::optional<Tensor> tree_bits{};         // tree: [batch or 1, seqlen_q, words]: new keys that a row sees
  std::optional<Tensor> prefix_lengths{};    // [batch]: keys before the new ones; absent: seqlen_k - seqlen_q

  // dropout: the probability that a weight is dropped, rounded to a multiple of 2^-32; the others are
  // multiplied by 1 / (1 - p). What drops is a function of seed and offset and of the element's place
  // (dropout.hpp): never use the same two for two calls that are to differ. As values or, for CUDA graphs
  // whose replays are to differ, both as int64 tensors [1] on the kernel's device, read when the kernel runs.
  std::optional<double> dropout_p{};              // 0 to 1
  std::optional<std::uint64_t> dropout_seed{};    // any number
  std::optional<std::uint64_t> dropout_offset{};  // any number; absent: 0
  std::optional<Tensor> dropout_seed_tensor{};    // instead of dropout_seed
  std::optional<Tensor> dropout_offset_tensor{};  // instead of dropout_offset

  // merge: n partial results, each over keys of its own. What a part with a log-sum-exp of -inf holds counts
  // as nothing.
  std::optional<Tensor> parts_o{};  // [n, batch, seqlen, heads, head_dim], packed [n, total, heads, head_dim]
  std::optional<Tensor> parts_lse{};  // float32 [n, batch, heads, seqlen], packed [n, heads, total]

  std::optional<float> softmax_scale{};  // default 1 / sqrt(head_dim); from 1.2e-38 to 2.3e38
  std::optional<Tensor> workspace{};     // Kernel::workspace_bytes() bytes of any dtype, contiguous, on the
                                      // kernel's device, aligned to 64 bytes, on a GPU to 256; one for each
                                      // launch in flight; contents undefined before and after
};

}  // namespace flashjit
