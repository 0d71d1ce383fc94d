// The table of a launch's arguments, one line for each. The checks, the
// C interface, the tuner, the command's files and the tests iterate it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "codegen/arguments/attention_args.hpp"
#include "codegen/base/shape.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {

enum class Role {
  input,      // elements
  output,     // written
  table,      // integers in memory that say what to compute
  number,     // by value
  workspace,  // scratch memory of the caller; its contents do not outlast a launch
};

using TensorMember = std::optional<Tensor> AttentionArgs::*;
// The member of AttentionArgs that holds the argument; its type is the argument's type.
using ArgumentMember =
    std::variant<TensorMember, std::optional<int> AttentionArgs::*, std::optional<float> AttentionArgs::*,
                 std::optional<double> AttentionArgs::*, std::optional<std::uint64_t> AttentionArgs::*>;

// The part of a spec without which the argument has no meaning, where it is no boolean field.
enum class Needs {
  nothing,
  lse,
  packed_keys,
  padding,
  key_lengths,
  weights,  // a merge that weighs its parts
  sliding_window,
  sinks,
  block_sparse,
  tree,
  kv_dtype,  // of a copy_kv with scales of tokens, which alone move with their rows
  queries,   // every operation but an append_kv that does not rotate Q
  new_rows,  // of append_kv, or of a decode that appends
  rotates_q,
  rotary,
  rotary_tables,
  rotary_numbers,  // rotary without tables
};

// Where a spec has the argument: a boolean field that is true, or one of the above. `of_values`: and v is not
// the first columns of k.
struct Condition {
  constexpr explicit(false) Condition(Needs part, bool values = false) : needs(part), of_values(values) {}
  constexpr explicit(false) Condition(bool AttentionSpec::* of) : field(of) {}
  bool operator==(const Condition&) const = default;

  Needs needs = Needs::nothing;
  bool of_values = false;
  bool AttentionSpec::* field = nullptr;
};

// Whether k and v are a cache, of whose keys a launch may use fewer than it has room for.
constexpr bool is_cached(const AttentionSpec& spec) {
  const When caches = info_of(spec.op).caches;
  return caches == When::always || (caches == When::by_field && spec.paged);
}

// How the tensors k and v hold keys: a slot for each batch entry, packed sequences, or pages.
enum class KeyLayout { batched, packed, paged };
constexpr KeyLayout key_layout(const AttentionSpec& spec) {
  if (spec.paged) return KeyLayout::paged;
  return spec.varlen && info_of(spec.op).caches != When::always ? KeyLayout::packed : KeyLayout::batched;
}

// A tensor's dimensions.
struct Layout {
  using Sizes = std::vector<std::int64_t> (*)(const AttentionSpec& spec, const Shape& shape);

  // `packed_dims`: the dimensions with varlen. `sizes_of`: null if the data decide the sizes.
  constexpr Layout(const char* dims, const char* packed_dims, Sizes sizes_of)
      : text(dims), packed(packed_dims), sizes(sizes_of) {}
  constexpr Layout(const char* dims, Sizes sizes_of) : Layout(dims, dims, sizes_of) {}
  // For k_scale and v_scale, whose dimensions depend on KvScale and KeyLayout.
  constexpr Layout(const char* of_tensor, const char* of_head, const char* of_token,
                   const char* of_token_in_pages, Sizes sizes_of)
      : text(of_tensor),
        packed(of_head),
        paged(of_token_in_pages),
        token(of_token),
        of_scales(true),
        sizes(sizes_of) {}
  // For k and v, whose dimensions depend on KeyLayout.
  constexpr Layout(const char* dims, const char* packed_dims, const char* paged_dims, Sizes sizes_of)
      : text(dims), packed(packed_dims), paged(paged_dims), of_keys(true), sizes(sizes_of) {}

  struct Form {
    const char* text = nullptr;
    int rank = 0;
    constexpr Form() = default;
    constexpr explicit Form(const char* dims) : text(dims), rank(1) {
      for (; *dims; ++dims) rank += *dims == ',';
    }
  };
  constexpr const Form& of(const AttentionSpec& spec) const {
    if (of_scales) {
      const KvScale scale = spec.kv_scale.value_or(KvScale::tensor);
      if (scale != KvScale::token_head) return scale == KvScale::head ? packed : text;
      return spec.paged ? paged : token;
    }
    if (!of_keys) return spec.varlen ? packed : text;
    const KeyLayout keys = key_layout(spec);
    return keys == KeyLayout::paged ? paged : keys == KeyLayout::packed ? packed : text;
  }

  Form text, packed, paged{}, token{};
  bool of_keys = false, of_scales = false;
  Sizes sizes;
};

struct Argument {
  const char* name;
  const char* meaning;  // a phrase for the reference; AttentionArgs has the rules
  std::int32_t id;      // FLASHJIT_ARG_... of runtime/flashjit.h
  ArgumentMember member;
  Role role;
  Condition needs;
  bool required;                         // if the spec has what it needs
  DType (*dtype)(const AttentionSpec&);  // null for a number
  Layout layout;                         // a number's text says what it means
  unsigned operations;                   // that have the argument; one bit for each Operation
  unsigned read_by = 0;                  // operations that read it, though `role` is output
  unsigned written_by = 0;               // operations that write it, though `role` is input
  unsigned optional_in = 0;              // operations that do without it, though it is required

  // The role that the argument has for a spec.
  constexpr Role role_in(const AttentionSpec& spec) const {
    const int bit = static_cast<int>(spec.op);
    if (read_by >> bit & 1) return Role::input;
    // Scales of a tensor or of heads are given; those of tokens are written with the tokens.
    const bool is_given = layout.of_scales && spec.kv_scale != KvScale::token_head;
    return written_by >> bit & 1 && !is_given ? Role::output : role;
  }

  // Whether a launch writes it. The caches of a decode that appends are inputs, too.
  constexpr bool written_in(const AttentionSpec& spec) const {
    const bool is_given = layout.of_scales && spec.kv_scale != KvScale::token_head;
    return role_in(spec) == Role::output || (spec.append && written_by != 0 && !is_given);
  }

  // Null for a number.
  constexpr TensorMember tensor() const {
    const TensorMember* found = std::get_if<TensorMember>(&member);
    return found ? *found : nullptr;
  }
  const char* layout_of(const AttentionSpec& spec) const { return layout.of(spec).text; }
  int rank_of(const AttentionSpec& spec) const { return layout.of(spec).rank; }
};

namespace argument_table {

using Args = AttentionArgs;
using Spec = AttentionSpec;
using Sizes = std::vector<std::int64_t>;

// An operation's bit in Argument::operations.
static_assert(num_operations <= std::numeric_limits<unsigned>::digits);
constexpr unsigned bit(Operation operation) {
  return 1u << static_cast<int>(operation);
}
constexpr unsigned forward = bit(Operation::forward), decode = bit(Operation::decode),
                   merge = bit(Operation::merge), backward = bit(Operation::backward),
                   append = bit(Operation::append_kv), listing = bit(Operation::make_block_lists),
                   copy = bit(Operation::copy_kv);
constexpr unsigned attention = forward | decode, training = forward | backward;
constexpr bool required = true, optional = false;

constexpr DType elements(const Spec& s) {
  return s.dtype;
}
constexpr DType of_keys(const Spec& s) {
  return s.kv_dtype == DType::fp8_ds_mla ? DType::uint8 : s.kv_dtype.value_or(s.dtype);
}
constexpr DType of_o(const Spec& s) {
  return s.o_dtype.value_or(s.dtype);
}
constexpr DType fp32(const Spec&) {
  return DType::fp32;
}
constexpr DType of_gradients(const Spec& s) {
  return s.grad_dtype.value_or(s.dtype);
}
constexpr DType of_parts(const Spec& s) {
  return s.parts_dtype.value_or(DType::fp32);
}
constexpr DType of_rotary_tables(const Spec& s) {
  return s.rotary ? s.rotary->tables.value_or(DType::fp32) : DType::fp32;
}
constexpr DType int32(const Spec&) {
  return DType::int32;
}
constexpr DType int64(const Spec&) {
  return DType::int64;
}

constexpr std::int64_t total(int batch, int seqlen, std::int64_t given) {
  return given ? given : std::int64_t{batch} * seqlen;
}
inline Sizes q_sizes(const Spec& s, const Shape& z, int dim) {
  if (s.varlen) return {total(z.batch, z.seqlen_q, z.total_q), z.num_heads_q, dim};
  return {z.batch, z.seqlen_q, z.num_heads_q, dim};
}
// The page size of shapes that leave it 0.
constexpr int usual_page_size = 16;
constexpr int page_size_of(const Shape& z) {
  return z.page_size ? z.page_size : usual_page_size;
}
// Pages of the longest sequence.
constexpr std::int64_t pages_of(const Shape& z) {
  return (std::int64_t{z.seqlen_k} + page_size_of(z) - 1) / page_size_of(z);
}
// Keys of typical shapes that are gathered, as of two ranks.
constexpr int gathered_of(const Shape& z) {
  return z.seqlen_k / 2;
}
inline Sizes k_sizes(const Spec& s, const Shape& z, int dim) {
  if (key_layout(s) == KeyLayout::paged)
    return {std::int64_t{z.batch} * pages_of(z), page_size_of(z), z.num_heads_kv, dim};
  if (key_layout(s) == KeyLayout::packed) return {total(z.batch, z.seqlen_k, z.total_k), z.num_heads_kv, dim};
  return {z.batch, s.gathered ? z.seqlen_k - gathered_of(z) : z.seqlen_k, z.num_heads_kv, dim};
}
inline int dim_v(const Spec& s) {
  return s.head_dim_v ? s.head_dim_v : s.head_dim;
}

constexpr char rows[] = "[batch, seqlen, heads, head_dim]", packed[] = "packed [total, heads, head_dim]",
               pages[] = "pages [num_pages, page_size, heads_kv, head_dim]";
constexpr Layout like_q{rows, packed,
                        [](const Spec& s, const Shape& z) { return q_sizes(s, z, s.head_dim); }};
constexpr Layout like_k{rows, packed, pages,
                        [](const Spec& s, const Shape& z) { return k_sizes(s, z, s.key_elements()); }};
constexpr Layout like_v{rows, packed, pages,
                        [](const Spec& s, const Shape& z) { return k_sizes(s, z, dim_v(s)); }};
constexpr Layout gathered_k{rows, [](const Spec& s, const Shape& z) -> Sizes {
                              return {z.batch, gathered_of(z), z.num_heads_kv, s.head_dim};
                            }};
constexpr Layout gathered_v{rows, [](const Spec& s, const Shape& z) -> Sizes {
                              return {z.batch, gathered_of(z), z.num_heads_kv, dim_v(s)};
                            }};
constexpr Layout pieces{"[pieces]", nullptr};
constexpr Layout like_o{rows, packed, [](const Spec& s, const Shape& z) { return q_sizes(s, z, dim_v(s)); }};
constexpr Layout of_rows{"[batch, num_heads_q, seqlen_q]", "[num_heads_q, total_q]",
                         [](const Spec& s, const Shape& z) -> Sizes {
                           if (s.varlen) return {z.num_heads_q, total(z.batch, z.seqlen_q, z.total_q)};
                           return {z.batch, z.num_heads_q, z.seqlen_q};
                         }};
inline Sizes new_sizes(const Spec& s, const Shape& z, int dim) {
  if (s.varlen) return {total(z.batch, z.seqlen_q, z.total_q), z.num_heads_kv, dim};
  return {z.batch, z.seqlen_q, z.num_heads_kv, dim};
}
constexpr Layout new_k{rows, packed,
                       [](const Spec& s, const Shape& z) { return new_sizes(s, z, s.head_dim); }};
constexpr Layout new_v{rows, packed, [](const Spec& s, const Shape& z) { return new_sizes(s, z, dim_v(s)); }};
constexpr Layout of_tokens{"[batch, seqlen]", "packed [total]", [](const Spec& s, const Shape& z) -> Sizes {
                             if (s.varlen) return {total(z.batch, z.seqlen_q, z.total_q)};
                             return {z.batch, z.seqlen_q};
                           }};
constexpr Layout angles{"[positions, rotary dim / 2]", [](const Spec& s, const Shape& z) -> Sizes {
                          const int dim = s.rotary ? s.rotary->columns(s.head_dim) : s.head_dim;
                          return {z.seqlen_k, dim / 2};
                        }};
// The tuner measures with so many parts.
inline Sizes parts_of(Sizes sizes) {
  sizes.insert(sizes.begin(), 4);
  return sizes;
}
constexpr Layout parts_of_o{"[parts, batch, seqlen, heads, head_dim]",
                            "packed [parts, total, heads, head_dim]",
                            [](const Spec& s, const Shape& z) { return parts_of(like_o.sizes(s, z)); }};
constexpr Layout parts_of_lse{"[parts, batch, heads, seqlen]", "packed [parts, heads, total]",
                              [](const Spec& s, const Shape& z) { return parts_of(of_rows.sizes(s, z)); }};
constexpr Layout starts{"[batch + 1]",
                        [](const Spec&, const Shape& z) -> Sizes { return {std::int64_t{z.batch} + 1}; }};
constexpr Layout of_kv_scales{"[1]", "[num_heads_kv]", "[batch, seqlen, heads_kv]",
                              "[num_pages, page_size, heads_kv]", [](const Spec& s, const Shape& z) -> Sizes {
                                const KvScale scale = s.kv_scale.value_or(KvScale::tensor);
                                if (scale == KvScale::tensor) return {1};
                                if (scale == KvScale::head) return {z.num_heads_kv};
                                Sizes sizes = k_sizes(s, z, 1);
                                sizes.pop_back();
                                return sizes;
                              }};
constexpr Layout of_heads{"[num_heads_q]",
                          [](const Spec&, const Shape& z) -> Sizes { return {z.num_heads_q}; }};
constexpr Layout lengths{"[batch]", [](const Spec&, const Shape& z) -> Sizes { return {z.batch}; }};
constexpr Layout page_lists{"[batch, max_pages]",
                            [](const Spec&, const Shape& z) -> Sizes { return {z.batch, pages_of(z)}; }};
constexpr Layout one{"[1]", [](const Spec&, const Shape&) -> Sizes { return {1}; }};
// Sizes of lists that an operation makes.
inline Sizes list_sizes(const Spec& s, const Shape& z) {
  const auto* blocks = find_mask<BlockSparseMask>(s.mask);
  if (!blocks) return {0, 0, 0};
  return {z.batch, blocks->per_head ? z.num_heads_q : 1,
          (std::int64_t{z.seqlen_q} + blocks->block_m - 1) / blocks->block_m + 1};
}
constexpr Layout lists{"[batch or 1, num_heads_q or 1, query blocks + 1]", list_sizes};
constexpr Layout listed{"[listed blocks]", [](const Spec& s, const Shape& z) -> Sizes {
                          const auto* blocks = find_mask<BlockSparseMask>(s.mask);
                          if (!blocks) return {0};
                          const Sizes of_lists = list_sizes(s, z);
                          return {of_lists[0] * of_lists[1] * (of_lists[2] - 1) *
                                  ((std::int64_t{z.seqlen_k} + blocks->block_n - 1) / blocks->block_n)};
                        }};
// Callers may give any number. The tools give four for each list, which hold the edges of long documents.
constexpr Layout bitmasks{"[bitmasks, block_m, ceil(block_n / 32)]",
                          [](const Spec& s, const Shape& z) -> Sizes {
                            const auto* blocks = find_mask<BlockSparseMask>(s.mask);
                            if (!blocks) return {0, 0, 0};
                            const Sizes of_lists = list_sizes(s, z);
                            return {of_lists[0] * of_lists[1] * (of_lists[2] - 1) * 4, blocks->block_m,
                                    (std::int64_t{blocks->block_n} + 31) / 32};
                          }};
// Caches of a copy's sources, and their scales: in typical shapes as many rows as are copied.
inline Sizes source_sizes(const Shape& z) {
  return {z.batch, z.seqlen_q, z.num_heads_kv};
}
constexpr char sources[] = "[pages or batch, rows, heads_kv, head_dim]";
constexpr Layout source_k{sources, [](const Spec& s, const Shape& z) {
                            Sizes sizes = source_sizes(z);
                            sizes.push_back(s.head_dim);
                            return sizes;
                          }};
constexpr Layout source_v{sources, [](const Spec& s, const Shape& z) {
                            Sizes sizes = source_sizes(z);
                            sizes.push_back(dim_v(s));
                            return sizes;
                          }};
constexpr Layout source_scales{"[pages or batch, rows, heads_kv]",
                               [](const Spec&, const Shape& z) { return source_sizes(z); }};
constexpr Layout copied_rows{"[copied rows]", [](const Spec&, const Shape& z) -> Sizes {
                               return {std::int64_t{z.batch} * z.seqlen_q};
                             }};
constexpr Layout tree_rows{"[batch or 1, seqlen_q, words of 32 new keys]", nullptr};
constexpr Layout bytes{"[bytes]", nullptr};
constexpr Layout value{"a number", nullptr};
constexpr Layout probability{"the probability that a weight is dropped", nullptr};

using enum Role;
using enum Needs;
constexpr Condition values(Needs part) {
  return {part, true};
}
constexpr auto varlen = &Spec::varlen, paged = &Spec::paged, dropout = &Spec::dropout,
               sink_logits = &Spec::sink_logits, offsets = &Spec::offsets, gathered = &Spec::gathered;
// clang-format off
inline constexpr Argument all[] = {
    {"q", "queries", 1, &Args::q, input, queries, required, elements, like_q, attention | backward | append | listing},
    {"k", "keys", 2, &Args::k, input, nothing, required, of_keys, like_k, attention | backward | append | listing | copy, 0, append | copy},
    {"v", "values", 3, &Args::v, input, values(nothing), required, of_keys, like_v, attention | backward | append | copy, 0, append | copy},
    {"o", "the result of each row", 4, &Args::o, output, nothing, required, of_o, like_o, attention | merge | backward, backward},
    {"lse", "log-sum-exp of each row, natural logarithm", 5, &Args::lse, output, lse, required, fp32, of_rows, attention | merge | backward, backward},
    {"cu_seqlens_q", "where each sequence's rows begin in the packed tensors", 6, &Args::cu_seqlens_q, table, varlen, required, int32, starts, attention | backward | append | listing, 0, 0, append},
    {"cu_seqlens_k", "where each sequence's keys begin in the packed tensors", 7, &Args::cu_seqlens_k, table, packed_keys, required, int32, starts, training | listing},
    {"max_seqlen_q", "a bound on the rows of each sequence; absent: the rows of all", 8, &Args::max_seqlen_q, number, varlen, optional, nullptr, value, attention | backward | listing},
    {"max_seqlen_k", "a bound on the keys of each sequence; absent: the keys of all", 9, &Args::max_seqlen_k, number, packed_keys, optional, nullptr, value, training | listing},
    {"softmax_scale", "factor of q.k; absent: 1 / sqrt(head_dim)", 10, &Args::softmax_scale, number, nothing, optional, nullptr, value, attention | backward},
    {"workspace", "Kernel::workspace_bytes() bytes of any dtype, for each launch in flight", 11, &Args::workspace, workspace, nothing, optional, int32, bytes, attention | backward | listing | copy},
    {"seqlens_q", "used rows of each batch entry; absent: all", 12, &Args::seqlens_q, table, padding, optional, int32, lengths, training | listing},
    {"seqlens_k", "used keys of each batch entry, new tokens included; absent: all", 13, &Args::seqlens_k, table, key_lengths, optional, int32, lengths, attention | backward | listing},
    {"window_left", "keys before a row's own that it sees; absent: all", 14, &Args::window_left, number, sliding_window, optional, nullptr, value, attention | backward | listing},
    {"window_right", "keys after a row's own that it sees; absent: all", 15, &Args::window_right, number, sliding_window, optional, nullptr, value, attention | backward | listing},
    {"num_sinks", "first keys that every row sees; absent: 0", 16, &Args::num_sinks, number, sinks, optional, nullptr, value, attention | backward | listing},
    {"block_offsets", "where each query block's list begins in block_indices", 17, &Args::block_offsets, table, block_sparse, required, int32, lists, training | listing, 0, listing},
    {"block_indices", "the key blocks of each list, ascending", 18, &Args::block_indices, table, block_sparse, required, int32, listed, training | listing, 0, listing},
    {"block_bitmask_of", "the bitmask of each listed block; -1: seen whole; -2: the spec's other masks test it", 19, &Args::block_bitmask_of, table, block_sparse, optional, int32, listed, training | listing, 0, listing},
    {"block_bitmasks", "32 keys of a row in each word, the lowest bit first", 20, &Args::block_bitmasks, table, block_sparse, optional, int32, bitmasks, training | listing, 0, listing},
    {"tree_bits", "the new keys that each row sees, the lowest bit first", 21, &Args::tree_bits, table, tree, required, int32, tree_rows, attention | backward | listing},
    {"prefix_lengths", "keys before the new ones; absent: seqlen_k - seqlen_q", 22, &Args::prefix_lengths, table, tree, optional, int32, lengths, attention | backward | listing},
    {"dropout_p", "the probability that a weight is dropped, 0 to 1", 23, &Args::dropout_p, number, dropout, required, nullptr, probability, training},
    {"dropout_seed", "any number; or dropout_seed_tensor", 24, &Args::dropout_seed, number, dropout, optional, nullptr, value, training},
    {"dropout_offset", "any number; absent: 0; or dropout_offset_tensor", 25, &Args::dropout_offset, number, dropout, optional, nullptr, value, training},
    {"dropout_seed_tensor", "dropout_seed, read when the kernel runs", 26, &Args::dropout_seed_tensor, table, dropout, optional, int64, one, training},
    {"dropout_offset_tensor", "dropout_offset, read when the kernel runs", 27, &Args::dropout_offset_tensor,
     table, dropout, optional, int64, one, training},
    {"parts_o", "partial results, each over keys of its own", 28, &Args::parts_o, input, nothing, required, of_parts, parts_of_o, merge},
    {"parts_lse", "their log-sum-exps; -inf: the part counts as nothing", 29, &Args::parts_lse, input, weights, required, fp32, parts_of_lse, merge},
    {"page_table", "the pages of each batch entry, in order", 30, &Args::page_table, table, paged, required, int32, page_lists, attention | append, 0, 0, append},
    {"do", "gradient of the loss by o", 31, &Args::d_o, input, nothing, required, elements, like_o, backward},
    {"dlse", "gradient of the loss by lse; absent: 0", 32, &Args::dlse, input, nothing, optional, fp32, of_rows, backward},
    {"dq", "gradient of the loss by q", 33, &Args::dq, output, nothing, required, of_gradients, like_q, backward},
    {"dk", "gradient of the loss by k", 34, &Args::dk, output, nothing, required, of_gradients, like_k, backward},
    {"dv", "gradient of the loss by v", 35, &Args::dv, output, nothing, required, of_gradients, like_v, backward},
    {"sink_logits", "each head's softmax sums begin with exp of its logit", 36, &Args::sink_logits, input, sink_logits, required, fp32, of_heads, attention | backward},
    {"k_scale", "a stored key times its scale is the true one", 37, &Args::k_scale, input, kv_dtype, required, fp32, of_kv_scales, attention | append | copy, 0, append | copy},
    {"v_scale", "a stored value times its scale is the true one", 38, &Args::v_scale, input, values(kv_dtype), required, fp32, of_kv_scales, attention | append | copy, 0, append | copy},
    {"k_new", "new keys, written to the cache", 39, &Args::k_new, input, new_rows, required, elements, new_k, append | decode},
    {"v_new", "new values, written to the cache", 40, &Args::v_new, input, values(new_rows), required, elements, new_v, append | decode},
    {"slots", "the row of the caches that each token goes to; negative: none; or append_positions", 41, &Args::slots, table, nothing, optional, int64, of_tokens, append},
    {"append_positions", "the place of each batch entry's first new token; or slots", 42, &Args::append_positions, table, nothing, optional, int32, lengths, append},
    {"q_out", "q rotated; may be q itself", 43, &Args::q_out, output, rotates_q, required, elements, like_q, append | decode},
    {"rotary_positions", "the position of each token; absent: its place", 44, &Args::rotary_positions, table, rotary, optional, int32, of_tokens, append | decode},
    {"rotary_cos", "cosine of each pair's angle at each position", 45, &Args::rotary_cos, input, rotary_tables, required, of_rotary_tables, angles, append | decode},
    {"rotary_sin", "sine of each pair's angle at each position", 46, &Args::rotary_sin, input, rotary_tables, required, of_rotary_tables, angles, append | decode},
    {"rotary_base", "pair i turns by p / rotary_scale * rotary_base^(-2 i / dim) at position p; absent: 10,000", 47, &Args::rotary_base, number, rotary_numbers, optional, nullptr, value, append | decode},
    {"rotary_scale", "see rotary_base; absent: 1", 48, &Args::rotary_scale, number, rotary_numbers, optional, nullptr, value, append | decode},
    {"d_sink_logits", "gradient of the loss by sink_logits", 49, &Args::d_sink_logits, output, sink_logits, required, fp32, of_heads, backward},
    {"k_from", "the cache of keys that rows are copied from; may be k itself", 50, &Args::k_from, input, nothing, required, of_keys, source_k, copy},
    {"v_from", "the cache of values that rows are copied from; may be v itself", 51, &Args::v_from, input, values(nothing), required, of_keys, source_v, copy},
    {"k_scale_from", "k_from's scales; may be k_scale itself", 52, &Args::k_scale_from, input, kv_dtype, required, fp32, source_scales, copy},
    {"v_scale_from", "v_from's scales; may be v_scale itself", 53, &Args::v_scale_from, input, values(kv_dtype), required, fp32, source_scales, copy},
    {"from_slots", "the row of k_from and v_from that each copied row is; negative: none", 54, &Args::from_slots, table, nothing, required, int64, copied_rows, copy},
    {"to_slots", "the row of k and v that it goes to; negative: none", 55, &Args::to_slots, table, nothing, required, int64, copied_rows, copy},
    {"row_offset", "the place of each batch entry's first row in the whole", 56, &Args::row_offset, table, offsets, required, int64, lengths, attention | backward},
    {"key_offset", "the place of each batch entry's first key in the whole", 57, &Args::key_offset, table, offsets, required, int64, lengths, attention | backward},
    {"k_gathered", "keys before those of k", 58, &Args::k_gathered, input, gathered, required, elements, gathered_k, forward},
    {"v_gathered", "values before those of v", 59, &Args::v_gathered, input, gathered, required, elements, gathered_v, forward},
    {"early_rows", "so many first rows do not see the first late_keys keys; absent: 0", 60, &Args::early_rows, number, gathered, optional, nullptr, value, forward},
    {"late_keys", "see early_rows; absent: 0", 61, &Args::late_keys, number, gathered, optional, nullptr, value, forward},
    {"arrived", "a word for each piece of the gathered keys, not 0 once it is there; absent: all are", 62, &Args::arrived, table, gathered, optional, int32, pieces, forward},
    {"spare_multiprocessors", "multiprocessors of a GPU that are left to other kernels; absent: 0", 63, &Args::spare_multiprocessors, number, nothing, optional, nullptr, value, forward | backward},
};
// clang-format on

}  // namespace argument_table

inline constexpr auto& arguments = argument_table::all;
inline constexpr std::size_t num_arguments = std::size(arguments);

// The table's line for a member.
constexpr const Argument& argument_of(ArgumentMember member) {
  for (const Argument& argument : arguments)
    if (argument.member == member) return argument;
  throw Error(ErrorCode::internal, "no argument has that member");
}

// The table's line for a C id; null if there is none.
constexpr const Argument* find_argument(std::int32_t id) {
  if (id >= 1 && static_cast<std::size_t>(id) <= num_arguments && arguments[id - 1].id == id)
    return &arguments[id - 1];
  return nullptr;
}

// C ids of the tables and scalars that a spec declares, in the order of their names.
inline constexpr std::int32_t first_named_id = 4096;

// A set of arguments: bit i stands for arguments[i].
using ArgumentSet = std::uint64_t;
static_assert(num_arguments <= 64);
constexpr ArgumentSet bit_of(const Argument& argument) {
  return ArgumentSet{1} << (&argument - arguments);
}

ArgumentSet given_arguments(const AttentionArgs& args) noexcept;

// The arguments that a launch of the spec may have, and those that it must have.
struct ArgumentSets {
  ArgumentSet allowed, required;
};
ArgumentSets arguments_of(const AttentionSpec& spec) noexcept;
// Why a launch of the spec may not have the argument: "the spec has ...".
std::string why_not_allowed(const AttentionSpec& spec, const Argument& argument);
// The condition under which a spec's launches have the argument: "a padding mask"; empty if nothing. Some
// operations have it always.
std::string condition_text(const Condition& condition);
inline bool has_argument(const AttentionSpec& spec, const Argument& argument) {
  return (arguments_of(spec).allowed & bit_of(argument)) != 0;
}

// Whether a launch may give the lengths of its cached keys, whatever its masks are.
inline bool counts_keys(const AttentionSpec& spec) {
  return is_cached(spec) && has_argument(spec, argument_of(&AttentionArgs::seqlens_k));
}

// The argument that has the rows of the operation's launches.
constexpr const Argument& rows_of(Operation op) {
  for (const Argument& argument : arguments)
    if (argument.operations & argument_table::bit(op) && std::string_view(argument.name) == info_of(op).rows)
      return argument;
  throw Error(ErrorCode::internal, "the operation has no argument that has its rows");
}
static_assert(
    [] {
      for (const OperationInfo& row : operation_table)
        if (!rows_of(row.op).tensor()) return false;
      return true;
    }(),
    "`rows` of every operation is the name of a tensor that it has");

}  // namespace flashjit
