// The arguments of a launch. Plain data, part of the public interface.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "../base/error.hpp"
#include "../spec/spec.hpp"

namespace flashjit {

struct Device {
  enum class Kind { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  // "cpu" or "cuda:N" ("cuda" is "cuda:0").
  static FLASHJIT_API Device parse(std::string_view text);
  // "cpu", "cuda:N"; "cpu:N" for an index that no CPU has.
  std::string str() const {
    if (kind == Kind::cpu && index == 0) return "cpu";
    return (kind == Kind::cpu ? "cpu:" : "cuda:") + std::to_string(index);
  }
  bool operator==(const Device&) const = default;
};

// Memory that the caller owns, aligned to its dtype. Strides count elements. The last dimension must be
// contiguous, unless the argument may have any strides. On a GPU, data pointers and other strides of tensors
// with a head_dim must be multiples of 16 bytes.
struct Tensor {
  static constexpr int max_rank = 6;
  void* data = nullptr;
  DType dtype = DType::bf16;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> strides{};

  // A row-major tensor of this shape.
  static FLASHJIT_API Tensor contiguous(void* data, DType dtype, Device device,
                                        std::span<const std::int64_t> shape);
  static Tensor contiguous(void* data, DType dtype, Device device,
                           std::initializer_list<std::int64_t> shape) {
    return contiguous(data, dtype, device, std::span(shape.begin(), shape.size()));
  }
};

// A table or scalar that the spec declares for its formulas: {"slope", tensor} or {"cap", 30.0}.
struct NamedArgument {
  std::string_view name{};
  std::variant<Tensor, double> value{};  // a number holds every float32 and int32

  NamedArgument() = default;
  NamedArgument(std::string_view argument, const Tensor& table) : name(argument), value(table) {}
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  NamedArgument(std::string_view argument, Number scalar)
      : name(argument), value(static_cast<double>(scalar)) {}
};

// Arguments of one launch; arguments.hpp has them in a table. q, k, v and o are
// [batch, seqlen, heads, head_dim], with varlen packed [total, heads, head_dim]; in decode and with paged
// varlen packs q and o only. With paged, k and v are [num_pages, page_size, heads_kv, head_dim]. A
// sequence has at most longest_sequence (shape.hpp) rows or keys. A launch has at
// most 2^48 query rows, counted over batch and heads. Later operations add arguments.
//
// Rows of an output must not overlap: in some order of the dimensions, each dimension's stride
// must reach beyond everything that the dimensions inside it span; other strides are refused. What a launch
// writes, the bytes of the workspace that it uses included, must share memory with no other tensor of the
// launch, tables and named ones included; but q_out may be q itself, and the sources of a copy_kv its k and
// v. A launch is refused if strides and addresses prove that it does. The proof is exact for tensors of equal
// strides, such as slices of one buffer, and where one tensor has no gaps and the dimensions of the other lie
// within one another.
struct AttentionArgs {
  // q is of the spec's dtype, k and v of its kv_dtype, o of its o_dtype. make_block_lists reads the sizes of
  // q and k, and no element.
  std::optional<Tensor> q{}, k{}, v{}, o{};
  // float32 [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q]: the natural logarithm
  // of each row's softmax sum. A row with nothing to attend to has -inf. A row with a score of
  // NaN or +inf has NaN, and so has its o; on GPUs so has a row whose largest score, times
  // log2(e), is beyond 2^26 either way. A score that float32 rounds to -inf is an unseen key.
  std::optional<Tensor> lse{};
  // varlen: where each sequence begins in the packed tensors. int32 [batch + 1], on the kernel's device.
  // cu_seqlens_k is not for decode, and not for paged.
  std::optional<Tensor> cu_seqlens_q{};
  std::optional<Tensor> cu_seqlens_k{};
  // varlen: a bound on the length of each sequence. Absent:
  // the total of all rows or keys, at most longest_sequence.
  std::optional<int> max_seqlen_q{}, max_seqlen_k{};

  // Arguments of masks; each is given only if the spec has its kind of mask. Integer tables are
  // int32, contiguous and on the kernel's device; bit i of a word stands for its i-th row or key,
  // the lowest bit first. With varlen, a table may be made for a larger max_seqlen than the launch
  // has: its further query blocks and rows are not read, its further key blocks are not seen.

  // padding: [batch], the true length of each batch entry; with varlen, the used rows of
  // each packed sequence. One of the two may be absent: all rows, or all keys, are used. Unused rows get
  // output 0 and lse -inf, also with sink_logits, and give no gradient.
  std::optional<Tensor> seqlens_q{};
  // Decode and paged take seqlens_k without padding: it counts the new tokens, too.
  std::optional<Tensor> seqlens_k{};
  std::optional<int> window_left{};   // sliding_window: keys before a row's own; absent: all
  std::optional<int> window_right{};  // keys after a row's own; absent: all
  std::optional<int> num_sinks{};     // with sinks: how many first keys every row sees; absent: 0
  // block_sparse: query block i of batch entry b and head h sees the key blocks block_indices[e]
  // for e from block_offsets[b, h, i] up to, but not including, block_offsets[b, h, i + 1], in
  // ascending order. A dimension of size 1 is shared by all batch entries or heads. make_block_lists writes
  // them, with room for all blocks in block_indices and block_bitmask_of (most_listed_blocks() in masks.hpp),
  // and as many bitmasks as block_bitmasks has room for.
  // [batch or 1, with per_head num_heads_q or 1, else 1, ceil(seqlen_q / block_m) + 1]
  std::optional<Tensor> block_offsets{};
  std::optional<Tensor> block_indices{};  // [listed blocks]
  // [listed blocks]: the index of each block's bitmask, or -1: the block is seen whole; absent: all -1. With
  // of_masks it must be given, and -2 says that the spec's other masks test the block. Entries that no list
  // holds may be anything.
  std::optional<Tensor> block_bitmask_of{};
  // [bitmasks, block_m, ceil(block_n / 32)]; without of_masks given together with block_bitmask_of.
  std::optional<Tensor> block_bitmasks{};
  // tree: [batch or 1, seqlen_q, words of 32 new keys], the new keys that each row sees.
  std::optional<Tensor> tree_bits{};
  // tree: [batch], how many keys come before the new ones; absent: seqlen_k - seqlen_q, of each batch entry's
  // own lengths. A CPU launch refuses this where it is negative and there are keys.
  std::optional<Tensor> prefix_lengths{};

  // dropout: the probability that a weight is dropped, rounded to a multiple of 2^-32; the
  // other weights are multiplied by 1 / (1 - p). Seed, offset and the element's place decide
  // which weights drop (dropout.hpp): two calls that are to differ must not use the same seed
  // and offset. Both are given as values or, for CUDA graphs whose replays are to differ, as
  // int64 tensors [1] on the kernel's device, which are read when the kernel runs.
  std::optional<double> dropout_p{};              // 0 to 1
  std::optional<std::uint64_t> dropout_seed{};    // any number
  std::optional<std::uint64_t> dropout_offset{};  // any number; absent: 0
  std::optional<Tensor> dropout_seed_tensor{};    // instead of dropout_seed
  std::optional<Tensor> dropout_offset_tensor{};  // instead of dropout_offset

  // paged: int32 [batch, max_pages]; its rows may be apart. Key j of batch entry b is row j % page_size of
  // page page_table[b, j / page_size]. page_size is a power of two up to 256 or a multiple of 16. Keys beyond
  // a length, or before every row's window, are never read, and the page ids of such keys may be anything.
  std::optional<Tensor> page_table{};

  // merge: n partial results, each over keys of its own. A part whose
  // log-sum-exp is -inf counts as nothing, whatever its parts_o holds.
  // [n, batch, seqlen, heads, head_dim], packed [n, total, heads, head_dim].
  // With sum they are added as they are, and o may be the first of them.
  std::optional<Tensor> parts_o{};
  // Without sum: float32 [n, batch, heads, seqlen], packed [n, heads, total]; like a merge's lse by any
  // strides.
  std::optional<Tensor> parts_lse{};

  // backward: the loss's gradients. o and lse are inputs then, as the forward wrote them: o has the spec's
  // o_dtype. An lse of -inf, a row without keys, gives gradients of 0.
  std::optional<Tensor> d_o{};             // by o: of the spec's dtype, the shape of o
  std::optional<Tensor> dlse{};            // by lse: float32, the shape of lse; absent: 0
  std::optional<Tensor> dq{}, dk{}, dv{};  // written: by q, k and v, of the spec's grad_dtype

  // sink_logits: float32 [num_heads_q], natural units, by any stride. The softmax's sum of each row begins
  // with exp(logit), and lse contains it. A used row that sees no key has output 0 and lse = the logit.
  std::optional<Tensor> sink_logits{};
  // backward: written: their gradient, float32 [num_heads_q], by any stride but 0.
  std::optional<Tensor> d_sink_logits{};

  // kv_dtype: a stored key or value times its scale is the true one. float32: [1]; with "kv_scale":
  // "head" [num_heads_kv]; with "token_head" [batch, seqlen_k, num_heads_kv], paged [num_pages, page_size,
  // num_heads_kv], by any strides. Scales of keys beyond a length are never read. append_kv writes those of
  // "token_head", each with its token, and reads the others. On a CPU those of [1] and "head" must be finite.
  std::optional<Tensor> k_scale{}, v_scale{};

  // All tables and scalars of the spec, each once, in any order; names and values must live until the launch
  // returns. A table has its declared dtype, is on the kernel's device and lies by any strides, 0 included.
  // Its sizes are the launch's: seqlen_q and seqlen_k those of q and k, with varlen at least the longest
  // sequence's, with pages any; a name of its own has one size in all tables. A backward takes d_<name>, too,
  // for each table with "grad": float32, of the table's sizes, written; its elements must not overlap.
  std::span<const NamedArgument> named{};
  // append_kv: writes new rows into the caches k and v, which are outputs then: [batch, seqlen_k, heads_kv,
  // head_dim], with paged pages. The rest of the caches keeps its contents. slots or append_positions says
  // where the rows go; a token whose place is outside the caches is skipped. Two tokens with one place: the
  // contents of that row are undefined. With kv_dtype: rounded to the nearest, saturating.
  // A decode with append writes them as the last keys of their batch entries, and takes neither. With v_in_k
  // there is no v_new.
  std::optional<Tensor> k_new{}, v_new{};  // [batch, seqlen, heads_kv, head_dim], varlen: [total, ...]
  // int64 [batch, seqlen], packed [total]: page * page_size + row of the page, in contiguous caches
  // batch entry * seqlen_k + row; a negative one skips the token. Takes no page_table and no cu_seqlens_q.
  std::optional<Tensor> slots{};
  // Instead of slots: int32 [batch], the place of each batch entry's first new token; with paged in the pages
  // that page_table has for it. Packed tokens take cu_seqlens_q then;
  // those beyond its end are skipped.
  std::optional<Tensor> append_positions{};
  // rotary with q: q rotated. It may be q itself; otherwise it must not share memory with q.
  std::optional<Tensor> q_out{};
  // rotary: int32 [batch, seqlen], packed [total]; absent: the tokens' places, which takes append_positions.
  std::optional<Tensor> rotary_positions{};
  // rotary with tables: [positions, rotary dim / 2], the cosine and the sine of each pair's angle. A position
  // beyond the tables counts as the nearest one. On a GPU, gaps keep rows at multiples of 16 bytes.
  std::optional<Tensor> rotary_cos{}, rotary_sin{};
  // rotary without tables: pair i of a token at position p turns by p / rotary_scale * rotary_base^(-2 i /
  // dim).
  std::optional<double> rotary_base{};   // absent: 10,000
  std::optional<double> rotary_scale{};  // absent: 1

  // copy_kv: copies rows of the caches k_from and v_from, with their scales, to rows of k and v, which are
  // outputs then. The rest of k and v keeps its contents. All are [pages or batch, rows, heads_kv, head_dim],
  // by any strides, with as many heads; sources may have other pages, and may be k and v themselves, or views
  // of them. A launch whose sources share addresses with k or v takes a workspace, in which all rows are
  // gathered before one is written: so rows may change places in any way.
  std::optional<Tensor> k_from{}, v_from{};
  std::optional<Tensor> k_scale_from{},
      v_scale_from{};  // with "token_head": float32 [pages or batch, rows, heads_kv]
  // int64 [copied rows]: page * rows of a page + row of the page, of the sources and of k and v. A row is
  // skipped if either is negative or beyond its caches. Two rows with one place: the contents of that place
  // are undefined.
  std::optional<Tensor> from_slots{}, to_slots{};

  // offsets: int64 [batch], a stride of 0 is allowed; on the kernel's device, read when the kernel runs. Row
  // i and key j of batch entry b are row row_offset[b] + i and key key_offset[b] + j of the whole for masks,
  // formulas, trees, block lists and dropout, and `position` is that row. From 0 on; the whole has at most
  // longest_sequence rows and keys.
  std::optional<Tensor> row_offset{}, key_offset{};

  // gathered: [batch, gathered keys, heads_kv, head_dim], of k's dtype. Key i of a launch is gathered key i,
  // or from there on that of k and v. Causal masks are aligned with all of them.
  std::optional<Tensor> k_gathered{}, v_gathered{};
  // Rows before early_rows do not see the gathered keys before late_keys; absent: 0.
  std::optional<int> early_rows{}, late_keys{};
  // On a GPU: int32 [pieces], on its device. The gathered keys have as many pieces of one length. The kernel
  // reads a piece once its word is not 0, which another stream or device may still have to write: it must
  // need no multiprocessor for that, as the kernel may have them all. Absent: all pieces are there. A CPU's
  // launch does not wait, and refuses a word of 0.
  std::optional<Tensor> arrived{};

  // Multiprocessors of a GPU that a grid with a block for each of them leaves to other kernels, such as those
  // of a communication library. Other grids leave some whenever a block ends. Absent: 0.
  std::optional<int> spare_multiprocessors{};

  std::optional<float> softmax_scale{};  // absent: 1 / sqrt(head_dim); from 1.2e-38 to 2.3e38
  // Kernel::workspace_bytes() bytes of any dtype, contiguous, on the kernel's device, aligned to 64 bytes,
  // on a GPU to 256. Each launch in flight needs its own. Its contents are undefined before and after.
  std::optional<Tensor> workspace{};
};

}  // namespace flashjit
