#include "runtime/arguments/append_rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>

#include "codegen/base/float_state.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/arguments/overlap.hpp"
#include "runtime/arguments/pages.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/append_quantised.h"
#include "templates/shared/last_keys.h"

namespace flashjit {
namespace {

// Kernels without rotary read the beginning.
template <class Own>
Own& make_rotated(StepLaunch& step, const CheckedAppend& checked) {
  auto& made = step.make_params<device::Rotated<Own, device::most_rotary_pairs>>(
      static_cast<const device::AppendParams&>(checked));
  made.rotary = checked.rotary;
  return made;
}
template <class Own>
Own& make_quantised(StepLaunch& step, const CheckedAppend& checked) {
  if (!checked.scales) return make_rotated<Own>(step, checked);
  auto& made = make_rotated<device::Quantised<Own>>(step, checked);
  made.k_scale = checked.scales->k;
  made.v_scale = checked.scales->v;
  return made;
}
// The params of a step, but for what Own adds.
template <class Own>
Own& make_append_params(StepLaunch& step, const CheckedAppend& checked) {
  const ParamsType& type = step.described->params;
  if (type.own != &id_of_struct<Own> || type.quantised != checked.scales.has_value() ||
      type.last_keys != checked.last_keys.has_value())
    refuse_params(*step.described, "a struct");
  if (!checked.last_keys) return make_quantised<Own>(step, checked);
  auto& made = make_quantised<device::LastKeys<Own>>(step, checked);
  made.seqlens_k = checked.last_keys->seqlens_k;
  made.seqlen_k = checked.last_keys->seqlen_k;
  return made;
}

device::RotaryStyle style_of(const AttentionSpec& spec) {
  if (!spec.rotary) return device::RotaryStyle::none;
  return spec.rotary->style == RotaryStyle::half ? device::RotaryStyle::half
                                                 : device::RotaryStyle::interleaved;
}
int rotary_dim(const AttentionSpec& spec) {
  return spec.rotary ? spec.rotary->columns(spec.head_dim) : 0;
}
device::RowItems items_of_k(const AttentionSpec& spec) {
  return {style_of(spec), rotary_dim(spec), spec.head_dim, static_cast<int>(size_of(spec.dtype))};
}
device::RowItems items_of_v(const AttentionSpec& spec) {
  return {device::RotaryStyle::none, 0, spec.v_in_k ? 0 : spec.head_dim_v,
          static_cast<int>(size_of(spec.dtype))};
}

// A positive finite number.
double positive_number(const char* name, const std::optional<double>& given, double otherwise) {
  const double value = given.value_or(otherwise);
  if (!(value > 0 && std::isfinite(value)))
    refuse_argument(name, " is ", value, ", it must be a positive number");
  return value;
}

// Each pair's turns for one position, in units of 2^-64. Whole turns have no effect.
void set_turns(const AttentionSpec& spec, const AttentionArgs& args, device::u64* turns) {
  const DefaultFloatState state;
  const long double base = positive_number("rotary_base", args.rotary_base, 10000);
  const long double scale = positive_number("rotary_scale", args.rotary_scale, 1);
  static_assert(Rotary::dims.last / 2 <= device::most_rotary_pairs);
  const int dim = rotary_dim(spec);
  for (int i = 0; i < dim / 2; ++i) {
    const long double radians = std::pow(base, -2.0L * i / dim) / scale;
    const long double part = std::fmod(radians / (2 * std::numbers::pi_v<long double>), 1.0L);
    const long double units = std::nearbyint(std::ldexp(part, 64));
    turns[i] = units < std::ldexp(1.0L, 64) ? static_cast<device::u64>(units) : 0;
  }
}

// Scales of tokens are written. All other tensors have been checked.
void check_written_scales(const AttentionSpec& spec, const AttentionArgs& args) {
  if (spec.kv_scale != KvScale::token_head) return;
  require_distinct_rows("k_scale", *args.k_scale);
  if (!spec.v_in_k) require_distinct_rows("v_scale", *args.v_scale);
}

void check_tables(const AttentionSpec& spec, Device device, const AttentionArgs& args, CheckedAppend& p) {
  const Tensor& cosines = require<&AttentionArgs::rotary_cos>(spec, args, device);
  const Tensor& sines = require<&AttentionArgs::rotary_sin>(spec, args, device);
  const int pairs = rotary_dim(spec) / 2;
  const auto element = static_cast<std::int64_t>(size_of(*spec.rotary->tables));
  // A GPU loads the angles of a piece's pairs at once.
  const int of_piece = items_of_k(spec).columns / (spec.rotary->style == RotaryStyle::half ? 1 : 2);
  const std::int64_t bytes =
      device.kind == Device::Kind::cuda ? std::min<std::int64_t>(16, of_piece * element) : element;
  for (const auto& [name, t] : {std::pair{"rotary_cos", &cosines}, {"rotary_sin", &sines}}) {
    require_shape(name, *t, 1, pairs, "half of the rotary dimension");
    require_shape(name, *t, 0, cosines.shape[0], "as rotary_cos");
    if (t->shape[0] == 0) refuse_argument(name, " has no positions");
    require_contiguous_rows(name, *t);
    require_address(name, *t, static_cast<std::size_t>(bytes));
    if (stride(*t, 0) * element % bytes)
      refuse_argument(name, "'s stride ", t->strides[0], " of dimension 0 is not a multiple of ",
                      bytes / element, " elements (", bytes, " bytes), which GPU kernels need");
  }
  p.rotary.cos = cosines.data;
  p.rotary.sin = sines.data;
  p.rotary.cos_stride = stride(cosines, 0);
  p.rotary.sin_stride = stride(sines, 0);
  p.rotary.table_rows = size(cosines, 0);
}

void check_rotary(const AttentionSpec& spec, Device device, const AttentionArgs& args, CheckedAppend& p) {
  if (args.rotary_positions) {
    const Tensor& positions = require<&AttentionArgs::rotary_positions>(spec, args, device);
    require_of_tokens("rotary_positions", positions, *args.k_new);
    p.rotary.positions = static_cast<const int*>(positions.data);
  } else if (args.slots) {
    refuse_argument("rotary_positions is missing: slots do not say a token's position in its sequence");
  }
  if (spec.rotary->tables) {
    check_tables(spec, device, args, p);
  } else {
    set_turns(spec, args, p.rotary.turns);
  }
  if (!spec.rotary->q) return;
  const Tensor &k_new = *args.k_new, &q = require<&AttentionArgs::q>(spec, args, device),
               &out = require<&AttentionArgs::q_out>(spec, args, device);
  const int heads = q.rank - 2;
  require_shape("q", q, heads + 1, spec.head_dim, "the spec's head_dim");
  for (int i = 0; i < heads; ++i) require_shape("q", q, i, k_new.shape[i], "as k_new");
  for (int i = 0; i < q.rank; ++i) require_shape("q_out", out, i, q.shape[i], "as q");
  require_alignment("q", q);
  require_alignment("q_out", out);
  require_distinct_rows("q_out", out);
  p.rotary.q = view(q);
  p.rotary.q_out = view(out);
  p.rotary.heads_q = static_cast<device::u32>(q.shape[heads]);
}

}  // namespace

void require_of_tokens(const char* name, const Tensor& t, const Tensor& k_new) {
  for (int i = 0; i < t.rank; ++i) require_shape(name, t, i, k_new.shape[i], "k_new's tokens");
  require_table(name, t);
}

namespace {

void check_new_values(const AttentionSpec& spec, Device device, const AttentionArgs& args, CheckedAppend& p) {
  const Tensor &k_new = *args.k_new, &k = *args.k;
  const Tensor& v_new = require<&AttentionArgs::v_new>(spec, args, device);
  const Tensor& v = require<&AttentionArgs::v>(spec, args, device);
  const int dim = k_new.rank - 1;
  require_shape("v_new", v_new, dim, spec.head_dim_v, "the spec's head_dim_v");
  for (int i = 0; i < dim; ++i) require_shape("v_new", v_new, i, k_new.shape[i], "as k_new");
  require_shape("v", v, 3, spec.head_dim_v, "the spec's head_dim_v");
  for (int i = 0; i < 3; ++i) require_shape("v", v, i, k.shape[i], "as k");
  require_alignment("v_new", v_new);
  require_alignment("v", v);
  require_distinct_rows("v", v);
  p.v_new = view(v_new);
  p.v = view(v);
}

}  // namespace

void check_new_rows(const AttentionSpec& spec, Device device, const AttentionArgs& args, CheckedAppend& p) {
  const Tensor& k_new = require<&AttentionArgs::k_new>(spec, args, device);
  const Tensor& k = require<&AttentionArgs::k>(spec, args, device);
  const int rank = k_new.rank, rows = rank - 3, heads = rank - 2, dim = rank - 1;
  require_shape("k_new", k_new, dim, spec.head_dim, "the spec's head_dim");
  require_shape("k", k, 3, spec.key_elements(), rule_of_key_elements(spec));
  require_shape("k", k, 2, k_new.shape[heads], "k_new's heads");
  if (spec.paged) {
    require_page_size(k);
  } else if (k.shape[1] > longest_sequence) {
    refuse_argument("k has shape ", shape_text(k), ": a sequence has at most ", longest_sequence, " rows");
  }
  require_alignment("k_new", k_new);
  require_alignment("k", k);
  require_distinct_rows("k", k);
  if (!spec.v_in_k) check_new_values(spec, device, args, p);
  p.scales = check_kv_scales(spec, device, args);

  const auto tokens = product_of({spec.varlen ? 1 : k_new.shape[0], k_new.shape[rows]});
  if (!tokens || *tokens > std::numeric_limits<int>::max())
    refuse_argument("k_new has shape ", shape_text(k_new),
                    ": a launch has at most 2147483647 tokens; split the batch");
  p.tokens = static_cast<int>(*tokens);
  p.heads_kv = static_cast<device::u32>(k_new.shape[heads]);
  p.k_new = view(k_new);
  p.k = view(k);
  p.num_pages = size(k, 0);
  p.page_size = divisor_of(k.shape[1]);
  p.num_slots = k.shape[0] * k.shape[1];
  // Slots times the page size are what Divisor divides rightly.
  if (const auto most = product_of({k.shape[0], k.shape[1], k.shape[1]}); !most)
    refuse_argument("k has shape ", shape_text(k), ": more rows than a launch can number");
  p.seqlen = divisor_of(spec.varlen ? 1 : k_new.shape[1]);
}

void check_append_pages(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                        CheckedAppend& p) {
  const Tensor& table = require<&AttentionArgs::page_table>(spec, args, device);
  require_shape("page_table", table, 0, p.batch, "the batch");
  require_contiguous_rows("page_table", table);
  require_address("page_table", table, sizeof(int));
  p.page_table = static_cast<const int*>(table.data);
  p.table_stride = stride(table, 0);
  p.entry_rows = table.shape[1] * args.k->shape[1];
}

void check_conversions(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                       CheckedAppend& p) {
  if (spec.rotary) check_rotary(spec, device, args, p);
  if (spec.has_kv_scales()) check_written_scales(spec, args);
}

void plan_cuda_append(const PlannedKernel& kernel, int num_warps, const CheckedAppend& params,
                      Launch& launch) {
  const AttentionSpec& spec = kernel.spec;
  StepLaunch& step = add_step(kernel, launch, "flashjit_append");
  auto& p = make_append_params<device::CudaAppendParams>(step, params);
  const auto threads = static_cast<std::int64_t>(num_warps) * 32;
  const device::RowItems k = items_of_k(spec), v = items_of_v(spec);
  const device::QuantisedRows rows{
      spec.kv_dtype && (!spec.has_kv_scales() || spec.kv_scale == KvScale::token_head), k, v};
  const std::int64_t group = device::heads_of_append_item(spec.rotary.has_value());
  const auto groups_of = [&](device::u32 heads) { return (std::int64_t{heads} + group - 1) / group; };
  std::int64_t items = groups_of(params.heads_kv) * rows.threads(k) +
                       std::int64_t{params.heads_kv} * rows.threads(v) +
                       groups_of(params.rotary.heads_q) * k.items;
  items = (items + rows.lanes - 1) / rows.lanes * rows.lanes;  // so that no row lies across warps
  constexpr std::int64_t most_blocks = 65535;                  // limit of a grid's second dimension
  if (items > most_blocks * threads)
    refuse_argument("k_new has ", params.heads_kv, " heads and q ", params.rotary.heads_q,
                    ": more than a launch takes");
  p.items = static_cast<device::u32>(items);
  p.tokens_of_block = static_cast<device::u32>(std::max<std::int64_t>(threads / items, 1));
  p.items_inverse = p.tokens_of_block > 1 ? static_cast<device::u32>((65536 + items - 1) / items) : 0;
  step.grid = {.x = (static_cast<unsigned>(params.tokens) - 1) / p.tokens_of_block + 1,
               .y = static_cast<unsigned>((items - 1) / threads + 1)};
}

void plan_cpu_append(const PlannedKernel& kernel, const CheckedAppend& params, Launch& launch) {
  const AttentionSpec& spec = kernel.spec;
  constexpr std::int64_t worthwhile = 1 << 17;  // elements that take some 10 us
  StepLaunch& step = add_step(kernel, launch, "flashjit_append");
  make_append_params<device::AppendParams>(step, params);
  const std::int64_t elements = std::int64_t{params.heads_kv} * spec.cached_columns() +
                                std::int64_t{params.rotary.heads_q} * spec.head_dim;
  const std::int64_t least = std::max<std::int64_t>(1, worthwhile / elements);  // tokens of a piece
  step.items.count = params.tokens;
  step.items.pieces =
      std::clamp<std::int64_t>(params.tokens / least, 1, 4 * std::int64_t{kernel.parallelism});
}

}  // namespace flashjit
