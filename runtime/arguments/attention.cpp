#include "runtime/arguments/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <tuple>

#include "cache/environment.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/masks.hpp"
#include "runtime/arguments/overlap.hpp"
#include "runtime/dropout.hpp"

namespace flashjit {
namespace {

using device::ForwardParams;

// A bound on the length of packed sequences: the given one,
// but at most the sum of all lengths and longest_sequence.
int longest(const char* name, std::optional<int> given, int total) {
  if (given && *given < 0) refuse_argument(name, " is ", *given, ", it must be at least 0");
  return std::min({given.value_or(total), total, longest_sequence});
}

// The length of sequences that are not packed; throws if it is beyond longest_sequence.
int length(const char* name, const Tensor& t) {
  if (t.shape[1] > longest_sequence)
    refuse_argument(name, " has shape ", shape_text(t), ": a sequence has at most ", longest_sequence,
                    " rows");
  return size(t, 1);
}

// With this limit, sums over tiles and over parts of tiles fit 64 bits.
void require_countable_rows(const device::ProblemParams& p) {
  constexpr std::int64_t most = std::int64_t{1} << 48;
  if (const auto rows = product_of({p.batch, p.num_heads_q, p.seqlen_q}); !rows || *rows > most)
    refuse_argument(
        "batch ", p.batch, " x num_heads_q ", p.num_heads_q, " x seqlen_q ", p.seqlen_q,
        ": a launch has at most 2^48 query rows; split the batch, or give a smaller max_seqlen_q");
}

template <TensorMember member>
const device::u64* number_at(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
  const Tensor& t = require<member>(spec, args, device);
  const char* const name = argument_of(member).name;
  require_shape(name, t, 0, 1, "one number");
  require_table(name, t);
  return static_cast<const device::u64*>(t.data);
}

void check_dropout(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                   device::DropoutParams& p) {
  if (!spec.dropout) return;
  const std::uint64_t threshold = dropout_threshold(*args.dropout_p);
  p.below =
      static_cast<device::u32>(std::min<std::uint64_t>(threshold, std::numeric_limits<device::u32>::max()));
  p.scale = static_cast<float>(dropout_scale(*args.dropout_p));

  if (args.dropout_seed_tensor.has_value() != args.dropout_offset_tensor.has_value())
    refuse_argument(
        "dropout_seed_tensor and dropout_offset_tensor belong together: give both, or neither and values");
  if (!args.dropout_seed_tensor) {
    if (!args.dropout_seed)
      refuse_argument(
          "dropout_seed is missing: give it, or both dropout_seed_tensor and dropout_offset_tensor");
    p.seed = *args.dropout_seed;
    p.offset = args.dropout_offset.value_or(0);
    return;
  }
  if (args.dropout_seed || args.dropout_offset)
    refuse_argument(
        "dropout's seed and offset were given twice, as values and as tensors: leave one pair out");
  p.seed_at = number_at<&AttentionArgs::dropout_seed_tensor>(spec, device, args);
  p.offset_at = number_at<&AttentionArgs::dropout_offset_tensor>(spec, device, args);
}

template <TensorMember member>
void check_offset(const AttentionSpec& spec, Device device, const AttentionArgs& args, int batch,
                  const device::i64*& data, device::i64& of_entry) {
  const Tensor& t = require<member>(spec, args, device);
  const char* const name = argument_of(member).name;
  require_shape(name, t, 0, batch, "the batch");
  require_address(name, t, sizeof(device::i64));
  data = static_cast<const device::i64*>(t.data);
  of_entry = stride(t, 0);
}

std::optional<device::OffsetParams> check_offsets(const AttentionSpec& spec, Device device,
                                                  const AttentionArgs& args, int batch) {
  if (!spec.offsets) return std::nullopt;
  device::OffsetParams p{};
  check_offset<&AttentionArgs::row_offset>(spec, device, args, batch, p.row, p.row_stride);
  check_offset<&AttentionArgs::key_offset>(spec, device, args, batch, p.key, p.key_stride);
  return p;
}

// Counts gathered keys among the problem's, which are those of k so far.
std::optional<device::GatheredKeys> check_gathered(const AttentionSpec& spec, Device device,
                                                   const AttentionArgs& args, device::ProblemParams& p) {
  if (!spec.gathered) return std::nullopt;
  const Tensor &k = require<&AttentionArgs::k_gathered>(spec, args, device),
               &v = require<&AttentionArgs::v_gathered>(spec, args, device);
  for (const auto& [name, t, dim] :
       {std::tuple{"k_gathered", &k, spec.head_dim}, std::tuple{"v_gathered", &v, spec.head_dim_v}}) {
    require_shape(name, *t, 0, p.batch, "q's batch");
    require_shape(name, *t, 1, k.shape[1], "as k_gathered");
    require_shape(name, *t, 2, p.num_heads_kv, "k's heads");
    require_shape(name, *t, 3, dim, "that of the spec");
    require_alignment(name, *t);
  }
  // Padding may come before them.
  constexpr int most = longest_sequence - 256;
  if (k.shape[1] > most || p.seqlen_k > most - k.shape[1])
    refuse_argument("k_gathered and k have ", k.shape[1], " and ", p.seqlen_k,
                    " keys: together they have at most ", most);
  device::GatheredKeys gathered{};
  gathered.k = view(k), gathered.v = view(v);
  gathered.keys = size(k, 1);
  gathered.early_rows = args.early_rows.value_or(0);
  gathered.late_keys = args.late_keys.value_or(0);
  if (gathered.early_rows < 0 || gathered.early_rows > p.seqlen_q)
    refuse_argument("early_rows is ", gathered.early_rows, ", it must be from 0 to seqlen_q, ", p.seqlen_q);
  if (gathered.late_keys < 0 || gathered.late_keys > gathered.keys)
    refuse_argument("late_keys is ", gathered.late_keys, ", it must be from 0 to the gathered keys, ",
                    gathered.keys);
  if (args.arrived) {
    const Tensor& arrived = require<&AttentionArgs::arrived>(spec, args, device);
    require_table("arrived", arrived);
    const int pieces = size(arrived, 0);
    if (pieces < 1 || gathered.keys % pieces != 0)
      refuse_argument("arrived has ", pieces, " words, which do not divide the ", gathered.keys,
                      " gathered keys into equal pieces");
    gathered.arrived = static_cast<const device::u32*>(arrived.data);
    gathered.piece_keys = std::max(gathered.keys / pieces, 1);
  }
  p.seqlen_k += gathered.keys;
  return gathered;
}

}  // namespace

bool checks_device_data() {
  static const bool checks = environment_variable(Variable::check) == "1";
  return checks;
}

void check_heads(const Tensor& q, const Tensor& k, device::ProblemParams& p) {
  p.num_heads_q = size(q, q.rank - 2);
  p.num_heads_kv = size(k, k.rank - 2);
  if (p.num_heads_q > 0 && (p.num_heads_kv == 0 || p.num_heads_q % p.num_heads_kv))
    refuse_argument("q has ", p.num_heads_q, " heads and k has ", p.num_heads_kv,
                    ": the number of query heads must be a multiple of the number of key/value heads");
}

CheckedPages check_sequences(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                             int most_rows, device::ProblemParams& p) {
  const Tensor &q = *args.q, &k = *args.k;
  CheckedPages pages;
  if (spec.varlen) {
    const Tensor& cq = require<&AttentionArgs::cu_seqlens_q>(spec, args, device);
    if (cq.shape[0] < 1)
      refuse_argument("cu_seqlens_q is empty: it holds batch + 1 running totals, the first of them 0");
    require_table("cu_seqlens_q", cq);
    p.cu_seqlens_q = static_cast<const int*>(cq.data);
    p.batch = size(cq, 0) - 1;
    p.total_q = size(q, 0);
    p.seqlen_q = std::min(longest("max_seqlen_q", args.max_seqlen_q, p.total_q), most_rows);
  } else {
    p.batch = size(q, 0);
    p.seqlen_q = length("q", q);
  }
  switch (key_layout(spec)) {
    case KeyLayout::packed: {
      const Tensor& ck = require<&AttentionArgs::cu_seqlens_k>(spec, args, device);
      require_shape("cu_seqlens_k", ck, 0, p.batch + 1, "as cu_seqlens_q");
      require_table("cu_seqlens_k", ck);
      p.cu_seqlens_k = static_cast<const int*>(ck.data);
      p.total_k = size(k, 0);
      p.seqlen_k = longest("max_seqlen_k", args.max_seqlen_k, p.total_k);
      break;
    }
    case KeyLayout::batched:
      if (spec.varlen) {
        require_shape("k", k, 0, p.batch, "the batch of cu_seqlens_q");
        if (args.v) require_shape("v", *args.v, 0, p.batch, "the batch of cu_seqlens_q");
      }
      p.seqlen_k = length("k", k);
      break;
    case KeyLayout::paged:
      pages = check_pages(spec, device, args, p.batch);
      p.seqlen_k = pages.longest;
  }
  require_countable_rows(p);
  return pages;
}

CheckedAttention check_attention(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                                 int most_rows, device::ProblemParams& p) {
  const bool varlen = spec.varlen;
  const KeyLayout keys = key_layout(spec);
  check_presence(spec, args);
  const Tensor& q = require<&AttentionArgs::q>(spec, args, device);
  const Tensor& k = require<&AttentionArgs::k>(spec, args, device);
  const Tensor& v = spec.v_in_k ? k : require<&AttentionArgs::v>(spec, args, device);
  const Tensor& o = require<&AttentionArgs::o>(spec, args, device);

  const int rank = q.rank;
  const int rows = varlen ? 0 : 1, heads = rank - 2, dim = rank - 1;
  const int key_rows = k.rank - 3, key_heads = k.rank - 2, key_dim = k.rank - 1;
  require_shape("q", q, dim, spec.head_dim, "the spec's head_dim");
  require_shape("k", k, key_dim, spec.key_elements(), rule_of_key_elements(spec));
  if (!spec.v_in_k) require_shape("v", v, key_dim, spec.head_dim_v, "the spec's head_dim_v");
  require_shape("o", o, dim, spec.head_dim_v, "the spec's head_dim_v");
  require_shape("o", o, rows, q.shape[rows], "as q");
  require_shape("o", o, heads, q.shape[heads], "as q");
  require_shape("v", v, key_rows, k.shape[key_rows], "as k");
  require_shape("v", v, key_heads, k.shape[key_heads], "as k");
  if (!varlen) require_shape("o", o, 0, q.shape[0], "q's batch");
  if (keys == KeyLayout::paged) require_shape("v", v, 0, k.shape[0], "k's pages");
  if (keys == KeyLayout::batched && !varlen) {
    require_shape("k", k, 0, q.shape[0], "q's batch");
    require_shape("v", v, 0, q.shape[0], "q's batch");
  }
  check_heads(q, k, p);
  require_alignment("q", q);
  require_alignment("k", k);
  require_alignment("v", v);
  require_alignment("o", o);

  const bool writes_o = argument_of(&AttentionArgs::o).role_in(spec) == Role::output;
  CheckedAttention checked{.q = view(q), .k = view(k), .v = view(v), .o = view(o)};
  checked.pages = check_sequences(spec, device, args, most_rows, p);
  checked.gathered = check_gathered(spec, device, args, p);

  if (spec.lse) {
    const Tensor& lse = require<&AttentionArgs::lse>(spec, args, device);
    if (!varlen) require_shape("lse", lse, 0, p.batch, "q's batch");
    require_shape("lse", lse, rank - 3, p.num_heads_q, "q's heads");
    require_shape("lse", lse, rank - 2, q.shape[rows], "q's rows");
    require_contiguous_rows("lse", lse);
    require_address("lse", lse, sizeof(float));
    if (writes_o) require_distinct_rows("lse", lse);
    checked.lse = {lse.data, varlen ? 0 : stride(lse, 0), 1, stride(lse, rank - 3)};
  }

  if (writes_o) require_distinct_rows("o", o);

  const float scale = args.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(spec.head_dim)));
  checked.scale = scale;
  checked.scale_log2 = scale * std::numbers::log2e_v<float>;
  // CPU kernels treat denormal numbers as zeros.
  if (!(scale >= std::numeric_limits<float>::min() && std::isfinite(checked.scale_log2)))
    refuse_argument("softmax_scale is ", scale, ", it must be between 1.2e-38 and 2.3e38");

  check_dropout(spec, device, args, p.dropout);
  check_mask_arguments(spec, device, args, p);
  checked.offsets = check_offsets(spec, device, args, p.batch);

  checked.shape = {.batch = p.batch,
                   .seqlen_q = p.seqlen_q,
                   .seqlen_k = p.seqlen_k,
                   .num_heads_q = p.num_heads_q,
                   .num_heads_kv = p.num_heads_kv,
                   .page_size = checked.pages.table.page_size};
  checked.empty = p.batch == 0 || p.num_heads_q == 0 || p.seqlen_q == 0;
  return checked;
}

void check_data(const AttentionSpec& spec, Device device, const device::ProblemParams& p,
                const device::PageTable& pages, const std::optional<device::OffsetParams>& offsets) {
  const device::OffsetParams* const given = offsets ? &*offsets : nullptr;
  if (device.kind == Device::Kind::cpu) {
    check_tables(spec, p, pages, given);
  } else if (checks_device_data()) {
    check_tables_on(device, spec, p, pages, given);
  }
}

CheckedArguments check_arguments(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
  CheckedArguments checked;
  ForwardParams& p = checked.params;
  const CheckedAttention attention = check_attention(spec, device, args, longest_sequence, p);
  p.scale_log2 = attention.scale_log2;
  p.q = attention.q;
  p.k = attention.k;
  p.v = attention.v;
  p.o = attention.o;
  p.lse = attention.lse;
  checked.pages = attention.pages.table;
  checked.formulas = check_formula_arguments(spec, device, args, p, attention.scale);
  checked.kv_scales = check_kv_scales(spec, device, args);
  checked.offsets = attention.offsets;
  checked.gathered = attention.gathered;
  check_data(spec, device, p, checked.pages, checked.offsets);
  checked.shape = attention.shape;
  checked.empty = attention.empty;
  return checked;
}

}  // namespace flashjit
