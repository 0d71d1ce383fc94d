// The spec: what a kernel computes. Plain data that knows no device and holds no run-time value.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../base/error.hpp"
#include "config.hpp"
#include "dtype.hpp"
#include "field_values.hpp"
#include "mask.hpp"
#include "operation.hpp"

namespace flashjit {

// Stored 8-bit keys and values times a float32 scale are the true ones. Which of them share a scale: all;
// those of a key/value head; those of a key and a key/value head.
enum class KvScale { tensor, head, token_head };
inline constexpr std::array kv_scales = {KvScale::tensor, KvScale::head, KvScale::token_head};
FLASHJIT_API const char* to_string(KvScale) noexcept;

// Tables and scalars that the formulas of a spec read, and a launch gives by name (AttentionArgs::named).
// formulas.md has the language.
struct TableDimension {
  enum class Kind { number, batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, free };
  Kind kind = Kind::free;
  int size = 0;         // of a number
  bool or_one = false;  // a tensor may have size 1 there, which all batch entries, heads, rows or keys share
  std::string name = {};  // of a free dimension: the tensor decides its size

  bool operator==(const TableDimension&) const = default;
};
struct DeclaredTable {
  std::string name;
  DType dtype = DType::fp32;  // fp32, fp16, bf16: reals; int32, int8, uint8: integers
  std::vector<TableDimension> shape = {};
  bool grad = false;  // a backward writes the gradient d_<name>; of reals only, no meaning elsewhere

  bool operator==(const DeclaredTable&) const = default;
};
struct DeclaredScalar {
  std::string name;
  DType dtype = DType::fp32;  // fp32: a real; int32: an integer

  bool operator==(const DeclaredScalar&) const = default;
};

// The pairs of columns that a rotary embedding turns (Su et al. 2021): half: i and i + dim / 2; interleaved:
// 2 i and 2 i + 1.
enum class RotaryStyle { half, interleaved };
inline constexpr std::array rotary_styles = {RotaryStyle::half, RotaryStyle::interleaved};
FLASHJIT_API const char* to_string(RotaryStyle) noexcept;

// Rotary embedding of `dim` columns of K's heads from `first` on: of append_kv, and of a decode that appends.
struct Rotary {
  static constexpr Range firsts = {.first = 0, .step = 8}, dims = {.first = 2, .last = 256, .step = 2};
  RotaryStyle style = RotaryStyle::half;
  int first = 0;                     // a multiple of 8
  int dim = 0;                       // even, up to 256; 0: all from `first` on
  bool q = false;                    // the launch rotates Q, too
  std::optional<DType> tables = {};  // of the given cosines and sines: fp32 or dtype; absent: computed

  // As that of a mask.
  template <class Self, class Visit>
  static void for_each_field(Self& self, Visit&& visit) {
    visit("style", self.style, rotary_styles);
    visit("first", self.first, firsts);
    visit("dim", self.dim, dims);
    visit("q", self.q);
    visit("tables", self.tables, float_dtypes);
  }
  // The rotated columns of a head.
  int columns(int head_dim) const { return dim ? dim : head_dim - first; }
  bool operator==(const Rotary&) const = default;
};

// Families say how large a head may be.
inline constexpr Range head_dims = {.first = 8, .step = 8};
inline constexpr int ds_mla_bytes = 656;  // of a key of fp8_ds_mla
inline constexpr std::array kv_dtypes = {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2, DType::fp8_ds_mla,
                                         DType::bf16, DType::fp16,     DType::fp32};

struct FLASHJIT_API AttentionSpec {
  Operation op = Operation::forward;
  DType dtype = DType::bf16;
  int head_dim = 0;
  int head_dim_v = 0;           // 0: the same as head_dim
  std::vector<Mask> mask = {};  // intersection; empty: every key is seen
  bool dropout = false;         // drop softmax weights with a probability given at run time
  bool lse = true;              // write the log-sum-exp of every row
  bool varlen = false;          // packed [total, heads, head_dim] with cu_seqlens
  bool paged = false;
  bool v_in_k = false;  // v is the first head_dim_v columns of k, as in latent caches
  bool deterministic = false;
  // The bits of a row depend on its own query, keys and target only, not on the rest of the batch.
  bool batch_invariant = false;
  std::optional<DType> o_dtype = {};      // absent: dtype
  std::optional<DType> parts_dtype = {};  // merge: dtype of the partial results; absent: fp32
  // merge: adds the parts as they are, without weights, such as gradients of several launches.
  bool sum = false;
  std::optional<DType> grad_dtype = {};  // backward: dtype of dq, dk and dv; absent: dtype
  std::optional<DType> kv_dtype = {};    // an 8-bit dtype: that of k and v; absent: dtype
  std::optional<KvScale> kv_scale = {};  // with kv_dtype; absent: tensor
  // Formulas that turn scale * q.k into the score that the softmax sees, applied one after the other.
  std::vector<std::string> score = {};
  std::vector<DeclaredTable> tables = {};
  std::vector<DeclaredScalar> scalars = {};
  bool sink_logits = false;  // each head's softmax sums begin with exp of a logit, as if with one more key
  bool precise = false;      // exp, log, tanh and sqrt of scores are exact to float32
  bool append = false;       // decode: the launch first writes new rows into the caches
  std::optional<Rotary> rotary = {};  // with append, and of append_kv; absent: K is written as it is
  // Rows and keys are a part of longer sequences: the launch says where they begin (row_offset, key_offset).
  bool offsets = false;
  // forward: keys lie in two pairs of tensors, those of k_gathered and v_gathered before those of k and v. On
  // a GPU the kernel may wait for the former while they arrive.
  bool gathered = false;
  PinnedConfig config = {};

  // The optional fields, in the order of canonical text: their names, members and, unless the type says them,
  // the values that they may have. JSON, refusals, text, hash and the features of families follow.
  template <class Visit>
  static constexpr void for_each_field(Visit&& visit) {
    visit("head_dim_v", &AttentionSpec::head_dim_v, head_dims);
    visit("mask", &AttentionSpec::mask);
    visit("dropout", &AttentionSpec::dropout);
    visit("lse", &AttentionSpec::lse);
    visit("varlen", &AttentionSpec::varlen);
    visit("paged", &AttentionSpec::paged);
    visit("v_in_k", &AttentionSpec::v_in_k);
    visit("deterministic", &AttentionSpec::deterministic);
    visit("batch_invariant", &AttentionSpec::batch_invariant);
    visit("o_dtype", &AttentionSpec::o_dtype, float_dtypes);
    visit("parts_dtype", &AttentionSpec::parts_dtype, float_dtypes);
    visit("sum", &AttentionSpec::sum);
    visit("grad_dtype", &AttentionSpec::grad_dtype, float_dtypes);
    visit("kv_dtype", &AttentionSpec::kv_dtype, kv_dtypes);
    visit("kv_scale", &AttentionSpec::kv_scale, kv_scales);
    visit("score", &AttentionSpec::score);
    visit("tables", &AttentionSpec::tables);
    visit("scalars", &AttentionSpec::scalars);
    visit("sink_logits", &AttentionSpec::sink_logits);
    visit("precise", &AttentionSpec::precise);
    visit("append", &AttentionSpec::append);
    visit("rotary", &AttentionSpec::rotary);
    visit("offsets", &AttentionSpec::offsets);
    visit("gathered", &AttentionSpec::gathered);
    visit("config", &AttentionSpec::config);
  }

  // Reads the JSON form (tools/spec.schema.json), at most 256 KiB, and validates it. Throws invalid_spec or
  // unsupported; the message names the field, the value, the rule and the nearest choice that works.
  static AttentionSpec from_json(std::string_view text);
  // The same text read for another operation, as for_op() says.
  static AttentionSpec from_json(std::string_view text, Operation op);
  // The spec of another operation on the same problem, validated: of a forward its backward or the decode of
  // its model. What has no meaning for that operation is left out: pinned configs of other kernels; outputs
  // that it does not write, and their dtypes; dropout in a decode; caches and what is appended to them where
  // it has none; masks, scores and promises about bits where nothing attends. Masks, scores and promises
  // otherwise stay, and are refused where no kernel has them. A table's "grad" stays only if this spec is not
  // validated.
  AttentionSpec for_op(Operation op) const;
  // The fields that are not at their default, in canonical order, on one line. Equal
  // specs give equal text, and a field added to flashjit later changes no text.
  std::string to_json() const;
  // The canonical form, the same for all equal specs: head_dim_v is filled in, dtypes at their
  // default are absent, masks are in canonical order, built-in names of formulas are written out. Throws
  // invalid_spec or unsupported.
  AttentionSpec validated() const;

  // Whether k and v hold values whose scales are arguments.
  bool has_kv_scales() const { return kv_dtype && kv_dtype != DType::fp8_ds_mla; }
  // Elements of a key in the tensor k: bytes with fp8_ds_mla.
  int key_elements() const { return kv_dtype == DType::fp8_ds_mla ? ds_mla_bytes : head_dim; }
  // The elements of a key and its value in the caches. The spec is validated.
  int cached_columns() const { return key_elements() + (v_in_k ? 0 : head_dim_v); }

  std::size_t hash() const noexcept;
  bool operator==(const AttentionSpec&) const = default;
};

FLASHJIT_API const char* to_string(Operation) noexcept;
// The operation of that name. Throws invalid_spec.
FLASHJIT_API Operation operation_named(std::string_view name);

}  // namespace flashjit
