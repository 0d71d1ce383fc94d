// AttentionSpec::validated() and for_op(): the rules of a spec, which families and formulas make.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "codegen/base/float_state.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/formulas/write_out.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "codegen/spec/spec.hpp"
#include "codegen/spec/spec_fields.hpp"
#include "shared/ds_mla.h"

namespace flashjit {
namespace {

void check_enumerator(Operation op) {
  if (static_cast<std::size_t>(op) >= num_operations)
    invalid("op " + std::to_string(static_cast<int>(op)) + " is no enumerator of Operation; " +
            to_string(Operation::forward) + " would work");
}

// Fields that say which result is right. No operation that attends may leave one out.
constexpr std::string_view decides_result[] = {"mask",        "score",   "tables",        "scalars",
                                               "sink_logits", "precise", "deterministic", "batch_invariant",
                                               "v_in_k",      "offsets", "gathered"};

bool has_name(const std::string& formula, std::string_view name) {
  const auto is_letter = [&](std::size_t at) {
    return at < formula.size() && is_identifier("_" + formula.substr(at, 1));
  };
  for (std::size_t at = formula.find(name); at != std::string::npos; at = formula.find(name, at + 1))
    if ((at == 0 || !is_letter(at - 1)) && !is_letter(at + name.size())) return true;
  return false;
}

// Leaves out what nothing reads where there are masks, but no scores.
void keep_masks_only(AttentionSpec& spec) {
  const auto is_unread = [&](const auto& declared) {
    return std::none_of(spec.mask.begin(), spec.mask.end(), [&](const Mask& mask) {
      const auto* formula = std::get_if<FormulaMask>(&mask);
      return formula && has_name(formula->formula, declared.name);
    });
  };
  std::erase_if(spec.tables, is_unread);
  std::erase_if(spec.scalars, is_unread);
}

void check_dtype_of(const char* field, const std::optional<DType>& value, DType dtype) {
  if (!value || *value == dtype || *value == DType::fp32) return;
  invalid(std::string(field) + " " + to_string(*value) + " is neither fp32 nor the dtype, " +
          to_string(dtype) + "; leaving it out would work");
}

void check_ds_mla(const AttentionSpec& spec) {
  const OperationInfo& info = info_of(spec.op);
  if (!info.few_rows && info.appends != When::always)
    throw Error(ErrorCode::unsupported, std::string("kv_dtype fp8_ds_mla is not supported by op ") +
                                            to_string(spec.op) + "; decode or append_kv would work");
  static_assert(ds_mla_bytes == device::DsMla::bytes);
  constexpr int dim_v = device::DsMla::columns, dim = dim_v + device::DsMla::rotary_columns;
  if (spec.dtype != DType::bf16 || spec.head_dim != dim || spec.head_dim_v != dim_v || !spec.v_in_k)
    throw Error(ErrorCode::unsupported,
                "kv_dtype fp8_ds_mla is a format of latent caches, and needs dtype bf16, head_dim " +
                    std::to_string(dim) + ", head_dim_v " + std::to_string(dim_v) +
                    " and \"v_in_k\": true; kv_dtype fp8_e4m3 would work");
  if (spec.kv_scale)
    throw Error(ErrorCode::unsupported, std::string("kv_scale ") + to_string(*spec.kv_scale) +
                                            " has no meaning with kv_dtype fp8_ds_mla, whose rows hold their "
                                            "scales; leaving kv_scale out would work");
}

void check_kv_dtype(const AttentionSpec& spec) {
  if (!spec.kv_dtype) {
    if (spec.kv_scale)
      throw Error(ErrorCode::unsupported,
                  std::string("kv_scale ") + to_string(*spec.kv_scale) +
                      " has no meaning without kv_dtype; a kv_dtype, or leaving kv_scale out, would work");
    return;
  }
  const std::string asked = std::string("kv_dtype ") + to_string(*spec.kv_dtype);
  if (spec.kv_dtype == DType::fp8_ds_mla) check_ds_mla(spec);
  if (size_of(*spec.kv_dtype) != 1)
    invalid(asked +
            " is not one of int8, fp8_e4m3, fp8_e5m2, fp8_ds_mla; leaving it out, which means the dtype, "
            "would work");
  if (spec.dtype == DType::fp32)
    throw Error(ErrorCode::unsupported, asked + " is not supported with dtype fp32; bf16 or fp16 would work");
  if (info_of(spec.op).caches == When::by_field && !spec.paged)
    throw Error(ErrorCode::unsupported, asked + " is not supported by a " + to_string(spec.op) +
                                            " without pages; \"paged\": true or op decode would work");
  if (spec.dropout)
    throw Error(
        ErrorCode::unsupported,
        asked + " is not supported with dropout, which is for training; leaving either out would work");
}

void check_v_in_k(const AttentionSpec& spec) {
  if (!spec.v_in_k) return;
  if (spec.head_dim_v > spec.head_dim)
    invalid("v_in_k makes v the first head_dim_v columns of k, and head_dim_v " +
            std::to_string(spec.head_dim_v) + " is more than head_dim " + std::to_string(spec.head_dim) +
            "; " + std::to_string(spec.head_dim) + " or less would work");
}

// A launch with offsets knows its own lengths, not those of the whole.
void check_offsets(const AttentionSpec& spec) {
  if (!spec.offsets) return;
  for (const DeclaredTable& table : spec.tables)
    for (const TableDimension& dim : table.shape)
      if (dim.kind == TableDimension::Kind::total_q || dim.kind == TableDimension::Kind::total_k)
        throw Error(ErrorCode::unsupported,
                    "table " + table.name +
                        " with a dimension total_q or total_k is not supported with offsets: rows and keys "
                        "count in the whole sequence; dimensions batch and seqlen_q or seqlen_k would work");
  for (const FormulaName name : {FormulaName::seqlen_q, FormulaName::seqlen_k})
    if (formulas_read(spec, name))
      throw Error(ErrorCode::unsupported,
                  std::string("a formula that reads ") +
                      (name == FormulaName::seqlen_q ? "seqlen_q" : "seqlen_k") +
                      " is not supported with offsets: a launch does not know the lengths of the whole; a "
                      "scalar would work");
}

// Keys of two pairs of tensors count from the first gathered one, and kernels may put padding before it.
void check_gathered(const AttentionSpec& spec) {
  if (!spec.gathered) return;
  const auto refuse = [](const std::string& what, const char* would_work) {
    throw Error(ErrorCode::unsupported, what + " is not supported with gathered; " + would_work +
                                            ", or keys in one pair of tensors, would work");
  };
  for (const auto& [given, name] : {std::pair{spec.varlen, "varlen"},
                                    {spec.paged, "paged"},
                                    {spec.v_in_k, "v_in_k"},
                                    {spec.offsets, "offsets"},
                                    {spec.dropout, "dropout"},
                                    {spec.batch_invariant, "batch_invariant"},
                                    {spec.sink_logits, "sink_logits"},
                                    {!spec.score.empty(), "score"}})
    if (given) refuse(name, "leaving it out");
  for (const Mask& mask : spec.mask) {
    const auto* causal = std::get_if<CausalMask>(&mask);
    if (!causal) refuse("a mask other than causal", "leaving it out");
    if (causal->align != CausalAlign::bottom_right) refuse("causal with align top_left", "bottom_right");
  }
}

void check_rotary(const AttentionSpec& spec) {
  if (!spec.rotary) return;
  Range firsts = Rotary::firsts, dims = Rotary::dims;
  firsts.last = spec.head_dim - firsts.step;
  if (spec.rotary->first) check_value("rotary.first", spec.rotary->first, firsts);
  const int columns = spec.head_dim - spec.rotary->first;
  if (spec.rotary->dim == 0 && columns > dims.last)
    throw Error(ErrorCode::unsupported, "rotary of all " + std::to_string(columns) + " columns of head_dim" +
                                            (spec.rotary->first ? " from first on" : "") +
                                            " is not supported; \"dim\": " + std::to_string(dims.last) +
                                            " or less would work");
  dims.last = std::min(dims.last, columns);
  if (spec.rotary->dim) check_value("rotary.dim", spec.rotary->dim, dims);
  check_dtype_of("rotary.tables", spec.rotary->tables, spec.dtype);
  if (info_of(spec.op).appends == When::by_field && !spec.append)
    throw Error(ErrorCode::unsupported, std::string("rotary is not supported by a ") + to_string(spec.op) +
                                            " that appends nothing; \"append\": true or op append_kv would "
                                            "work");
}

void check_block_lists(const AttentionSpec& spec) {
  if (!info_of(spec.op).makes_lists) return;
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  if (!blocks || !blocks->of_masks)
    throw Error(
        ErrorCode::unsupported,
        std::string("a spec without a block_sparse mask with of_masks is not supported by op ") +
            to_string(spec.op) +
            ", which "
            R"(makes the lists of one; mask [{"kind": "block_sparse", "of_masks": true}, "causal"] would work)");
  if (!blocks->per_head && masks_differ_by_head(spec))
    invalid(
        "a formula of the mask reads head or head_kv, and block_sparse with \"per_head\": false has one list "
        "for "
        "all heads; \"per_head\": true would work");
}

}  // namespace

AttentionSpec AttentionSpec::validated() const {
  const DefaultFloatState state;
  check_enumerator(op);
  AttentionSpec spec = *this;
  write_out_formulas(spec);
  spec = without_defaults(std::move(spec));
  if (spec.head_dim_v == 0) spec.head_dim_v = spec.head_dim;
  // Sums in an order that no launch changes are the same run after run.
  if (spec.batch_invariant && info_of(spec.op).writes_gradients) spec.deterministic = true;

  if (spec.dtype != DType::bf16 && spec.dtype != DType::fp16 && spec.dtype != DType::fp32)
    invalid(std::string("dtype ") + to_string(spec.dtype) +
            " is none that queries and outputs have; bf16, fp16 or fp32 would work");
  check_head_dims(spec);
  check_rotary(spec);
  check_fields(spec);
  check_v_in_k(spec);
  check_dtype_of("o_dtype", spec.o_dtype, spec.dtype);
  check_dtype_of("parts_dtype", spec.parts_dtype, spec.dtype);
  check_dtype_of("grad_dtype", spec.grad_dtype, spec.dtype);
  check_kv_dtype(spec);
  check_masks(spec.mask);
  check_block_lists(spec);
  check_offsets(spec);
  check_gathered(spec);
  check_supported(spec);
  return spec;
}

AttentionSpec AttentionSpec::for_op(Operation wanted) const {
  const DefaultFloatState state;
  check_enumerator(op);
  check_enumerator(wanted);
  if (wanted == op) return validated();
  AttentionSpec spec = *this;
  write_out_formulas(spec);
  spec.op = wanted;
  spec.config = {};
  const OperationInfo& info = info_of(wanted);
  const AttentionSpec defaults;
  for (const SpecField& field : spec_fields) {
    const bool decides = info.attends && std::find(std::begin(decides_result), std::end(decides_result),
                                                   std::string_view(field.name)) != std::end(decides_result);
    if (decides || computes_field(wanted, field.name)) continue;
    std::visit([&](auto member) { spec.*member = defaults.*member; }, field.member);
  }
  if (!info.attends) keep_masks_only(spec);
  // Caches always count their keys.
  if (info.attends && info.caches == When::always)
    std::erase_if(spec.mask, [](const Mask& one) { return std::holds_alternative<PaddingMask>(one); });
  if (info.caches == When::by_field && !spec.paged) spec.kv_dtype.reset();
  if (!spec.kv_dtype) spec.kv_scale.reset();
  if (info.appends == When::by_field && !spec.append) spec.rotary.reset();
  return spec.validated();
}

}  // namespace flashjit
