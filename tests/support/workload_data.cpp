// The values of a workload's tensors.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/support/workload.hpp"
#include "tools/verify/ds_mla.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

// Replaces each value by f(index in the last dimension, row, value).
template <class F>
void transform(const Tensor& t, F&& f) {
  const int heads = t.rank - 2, rows = t.rank - 3;
  for (std::int64_t b = 0; b < (t.rank == 4 ? t.shape[0] : 1); ++b) {
    for (std::int64_t row = 0; row < t.shape[rows]; ++row) {
      for (std::int64_t h = 0; h < t.shape[heads]; ++h) {
        const std::int64_t at =
            (t.rank == 4 ? b * t.strides[0] : 0) + row * t.strides[rows] + h * t.strides[heads];
        for (std::int64_t c = 0; c < t.shape[t.rank - 1]; ++c) {
          const auto value = static_cast<float>(verify::load_element(t.data, t.dtype, at + c));
          verify::store_element(t.data, t.dtype, at + c, f(c, row, value));
        }
      }
    }
  }
}

}  // namespace

float Workload::poison_value() const {
  return case_.poison == Poison::nan ? std::numeric_limits<float>::quiet_NaN()
                                     : std::numeric_limits<float>::infinity();
}

void Workload::fill() {
  if (info_of(case_.spec.op).makes_lists) return;  // it reads no elements
  // Memory beyond the last sequence stays poisoned.
  const auto used = [&](GuardedTensor& tensor, bool is_packed) {
    Tensor t = tensor.on_host();
    if (is_packed) t.shape[0] -= case_.spare_rows;
    return t;
  };
  const Tensor q = used(this->q(), case_.spec.varlen), k = used(this->k(), packed_keys()),
               v = used(this->v(), packed_keys());
  verify::RandomOptions options;
  if (case_.data == Data::huge_scores) options.scale = 30;
  if (case_.data == Data::plain || case_.data == Data::long_rows) options.outlier_every = 0;
  if (case_.data == Data::plain || case_.data == Data::outliers) options.long_row_every = 0;
  verify::fill_random(q, case_.seed * 3, options);
  // Stored values and scales whose products are like those of other dtypes.
  const float stored = case_.spec.kv_dtype == DType::int8 ? 40 : 1;
  options.scale *= stored;
  verify::fill_random(k, case_.seed * 3 + 1, options);
  options.scale = stored;
  verify::fill_random(v, case_.seed * 3 + 2, options);
  if (case_.spec.kv_dtype == DType::fp8_ds_mla) verify::fill_random_ds_mla(k, case_.seed * 3 + 1);
  if (case_.spec.kv_dtype)
    for (const TensorMember member :
         {TensorMember(&AttentionArgs::k_scale), TensorMember(&AttentionArgs::v_scale)})
      if (tensors_[&argument_of(member) - arguments])
        fill_scales(tensor(member).on_host(), 1 / stored,
                    member == &AttentionArgs::v_scale && case_.spec.kv_scale == KvScale::token_head);
  if (case_.spec.sink_logits) {
    // Above and below what rows' sums usually are.
    const Tensor sinks = tensor(&AttentionArgs::sink_logits).on_host();
    for (std::int64_t h = 0; h < sinks.shape[0]; ++h)
      static_cast<float*>(sinks.data)[h * sinks.strides[0]] =
          static_cast<float>(verify::random_bits(case_.seed, static_cast<std::uint64_t>(h)) % 64) / 4 - 6;
  }
  if (case_.spec.append) {
    std::uint64_t seed = case_.seed * 3 + 4;
    for (const TensorMember member : {&AttentionArgs::k_new, &AttentionArgs::v_new})
      if (tensors_[&argument_of(member) - arguments])
        verify::fill_random(used(tensor(member), case_.spec.varlen), seed++);
    // Any numbers will do for cosines and sines.
    for (const TensorMember member : {&AttentionArgs::rotary_cos, &AttentionArgs::rotary_sin})
      if (tensors_[&argument_of(member) - arguments]) verify::fill_random(tensor(member).on_host(), seed++);
  }
  if (tensors_[&argument_of(&AttentionArgs::d_o) - arguments]) {
    verify::fill_random(used(tensor(&AttentionArgs::d_o), case_.spec.varlen), case_.seed * 3 + 3, options);
    const Tensor dlse = tensor(&AttentionArgs::dlse).on_host();
    std::int64_t last = 0;
    bool empty = false;
    for (int i = 0; i < dlse.rank; ++i) {
      last += (dlse.shape[i] - 1) * dlse.strides[i];
      empty |= dlse.shape[i] == 0;
    }
    for (std::int64_t i = 0; i <= last && !empty; ++i)
      static_cast<float*>(dlse.data)[i] = static_cast<float>(i % 7 - 3) / 4;
  }
  switch (case_.data) {
    case Data::random:
    case Data::huge_scores:
    case Data::plain:
    case Data::outliers:
    case Data::long_rows:
      break;
    case Data::equal_scores:
      transform(k, [](std::int64_t c, std::int64_t, float) { return static_cast<float>(c % 5) - 2.0f; });
      break;
    case Data::rising:
    case Data::falling:
      // Products of 3 and small multiples of 1/4 are exact in every dtype.
      transform(q, [](std::int64_t c, std::int64_t, float) { return c < 8 ? 3.0f : 0.0f; });
      transform(k, [&](std::int64_t c, std::int64_t row, float) {
        const auto steps = static_cast<float>(row % 400) - 200.0f;
        return c < 8 ? (case_.data == Data::rising ? steps : -steps) / 4 : 0.0f;
      });
      break;
    case Data::positive_v:
      transform(v, [](std::int64_t, std::int64_t, float value) { return value + 3.0f; });
  }
  const float poison = poison_value();
  const AttentionSpec& spec = case_.spec;
  for (const MaskTable& table : masks_.tables) {
    const auto fill_padding = [&](const Tensor& t, bool is_packed, const std::vector<int>& lengths) {
      std::int64_t first = 0;
      for (std::size_t b = 0; b < table.values.size(); ++b) {
        const std::int64_t rows = is_packed ? lengths[b] : t.shape[1];
        const int at = is_packed ? 0 : 1;  // the dimension of rows
        for (std::int64_t row = table.values[b]; row < rows; ++row)
          for (std::int64_t h = 0; h < t.shape[at + 1]; ++h)
            for (std::int64_t c = 0; c < t.shape[at + 2]; ++c)
              verify::store_element(t.data, t.dtype,
                                    (is_packed ? 0 : static_cast<std::int64_t>(b) * t.strides[0]) +
                                        (first + row) * t.strides[at] + h * t.strides[at + 1] + c,
                                    poison);
        if (is_packed) first += rows;
      }
    };
    if (table.argument == &AttentionArgs::seqlens_q) {
      fill_padding(q, spec.varlen, case_.lengths_q);
      if (tensors_[&argument_of(&AttentionArgs::d_o) - arguments])
        fill_padding(tensor(&AttentionArgs::d_o).on_host(), spec.varlen, case_.lengths_q);
    }
    if (table.argument == &AttentionArgs::seqlens_k && !spec.paged)
      for (const Tensor& t : of_keys()) fill_padding(t, packed_keys(), case_.lengths_k);
  }
  if (spec.paged) poison_stale_slots(poison);
}

void Workload::poison_unused_rows() {
  const AttentionArgs& args = host_args_;
  for (const verify::Sequence& s : verify::sequences_of(case_.spec, args))
    for (std::int64_t row = s.q_begin + s.seqlen_q; row < s.q_begin + s.rows; ++row)
      for (int head = 0; head < case_.heads_q; ++head) {
        const Tensor& o = *args.o;
        const std::int64_t at = case_.spec.varlen
                                    ? row * o.strides[0] + head * o.strides[1]
                                    : s.batch * o.strides[0] + row * o.strides[1] + head * o.strides[2];
        for (std::int64_t c = 0; c < o.shape[o.rank - 1]; ++c)
          verify::store_element(o.data, o.dtype, at + c, poison_value());
        for (const Tensor& t : {*args.lse, *args.dlse}) {
          const std::int64_t of_head =
              case_.spec.varlen ? head * t.strides[0] : s.batch * t.strides[0] + head * t.strides[1];
          verify::store_element(t.data, t.dtype, of_head + row * t.strides[t.rank - 1], poison_value());
        }
      }
}

void Workload::spoil() {
  spoilt_ = true;
  const AttentionSpec& spec = case_.spec;
  const AttentionArgs& args = host_args_;
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  std::uint64_t draws = 0;
  // Where a row or key of a head begins.
  const auto place = [&](const Tensor& t, int batch, std::int64_t row, int head) {
    return spec.varlen ? row * t.strides[0] + head * t.strides[1]
                       : batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
  };
  const auto fill = [](const Tensor& t, std::int64_t at, float value) {
    for (std::int64_t c = 0; c < t.shape[t.rank - 1]; ++c)
      verify::store_element(t.data, t.dtype, at + c, value);
  };
  const auto draw = [&](int length) {
    return length == 0
               ? -1
               : static_cast<int>(verify::random_bits(case_.seed, draws++) % static_cast<unsigned>(length));
  };
  for (const verify::Sequence& s : verify::sequences_of(spec, args))
    for (int head_kv = 0; head_kv < case_.heads_kv; ++head_kv) {
      const int in_k = draw(s.seqlen_k), in_v = draw(s.seqlen_k);
      if (in_k >= 0) fill(*args.k, place(*args.k, s.batch, s.k_begin + in_k, head_kv), nan);
      if (in_v >= 0) fill(*args.v, place(*args.v, s.batch, s.k_begin + in_v, head_kv), infinity);
      const int group = case_.heads_q / case_.heads_kv;
      for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
        const int in_q = draw(s.seqlen_q), in_do = draw(s.seqlen_q);
        if (in_q >= 0) fill(*args.q, place(*args.q, s.batch, s.q_begin + in_q, head), infinity);
        if (in_do >= 0) fill(*args.d_o, place(*args.d_o, s.batch, s.q_begin + in_do, head), nan);
        for (int row = 0; row < s.seqlen_q; ++row) {
          const auto sees = [&](int key) { return verify::sees(spec, args, s, head, row, key); };
          bool of_k = false;
          for (int key = 0; key < s.seqlen_k && row == in_q; ++key) of_k |= sees(key);
          of_k |= in_k >= 0 && sees(in_k);
          if (of_k || (in_v >= 0 && sees(in_v)))
            fill(*args.o, place(*args.o, s.batch, s.q_begin + row, head), nan);
          const Tensor& lse = *args.lse;
          const std::int64_t at =
              spec.varlen ? head * lse.strides[0] : s.batch * lse.strides[0] + head * lse.strides[1];
          if (of_k) static_cast<float*>(lse.data)[at + s.q_begin + row] = nan;
        }
      }
    }
  for (const TensorMember member : {&AttentionArgs::q, &AttentionArgs::k, &AttentionArgs::v,
                                    &AttentionArgs::d_o, &AttentionArgs::o, &AttentionArgs::lse})
    tensor(member).upload();
}

// From half to twice `usual`, by each element's index.
void Workload::fill_scales(const Tensor& t, float usual, bool wide) const {
  for (std::int64_t i = 0; i < t.shape[0]; ++i)
    for (std::int64_t j = 0; j < (t.rank > 1 ? t.shape[1] : 1); ++j)
      for (std::int64_t h = 0; h < (t.rank > 2 ? t.shape[2] : 1); ++h) {
        const auto place = static_cast<std::uint64_t>((i * 1000 + j) * 1000 + h);
        const std::uint64_t bits = verify::random_bits(case_.seed, place);
        const auto share = static_cast<float>(bits % 48);
        int exponent = wide && bits >> 8 & 1 ? static_cast<int>(bits >> 9 & 15) - 11 : 0;
        if (wide && j < 70 && t.shape[1] > 70) exponent -= 18;
        static_cast<float*>(t.data)[i * t.strides[0] + (t.rank > 1 ? j * t.strides[1] : 0) +
                                    (t.rank > 2 ? h * t.strides[2] : 0)] =
            std::ldexp(usual * (0.5f + share / 32), exponent);
      }
}

std::vector<Tensor> Workload::of_keys() {
  if (case_.spec.kv_dtype == DType::fp8_ds_mla) {
    const verify::DsMlaParts parts(this->k().on_host());
    return {parts.columns, parts.scales, parts.rotary};
  }
  std::vector<Tensor> all = {this->k().on_host(), this->v().on_host()};
  if (case_.spec.kv_scale != KvScale::token_head) return all;
  for (const TensorMember member :
       {TensorMember(&AttentionArgs::k_scale), TensorMember(&AttentionArgs::v_scale)}) {
    if (!tensors_[&argument_of(member) - arguments]) continue;
    Tensor scales = tensor(member).on_host();
    scales.shape[scales.rank] = scales.strides[scales.rank] = 1;
    ++scales.rank;
    all.push_back(scales);
  }
  return all;
}

AttentionArgs Workload::lengths_of_host() const {
  AttentionArgs args;
  for (std::size_t i = 0; i < num_arguments; ++i)
    if (tensors_[i]) args.*arguments[i].tensor() = tensors_[i]->on_host();
  return args;
}

// Keys that no sequence has hold poison.
void Workload::poison_stale_slots(float poison) {
  const Tensor k = this->k().on_host();
  const Tensor pages = tensor(&AttentionArgs::page_table).on_host();
  std::vector<char> has_key(static_cast<std::size_t>(k.shape[0] * k.shape[1]));
  for (const verify::Sequence& s : verify::sequences_of(case_.spec, lengths_of_host()))
    for (std::int64_t key = 0; key < s.seqlen_k; ++key) {
      const std::int64_t entry = s.batch * pages.strides[0] + key / k.shape[1];
      const std::int32_t page = static_cast<const std::int32_t*>(pages.data)[entry];
      if (page >= 0 && page < k.shape[0])
        has_key[static_cast<std::size_t>(page * k.shape[1] + key % k.shape[1])] = 1;
    }
  for (const Tensor& t : of_keys())
    for (std::int64_t slot = 0; slot < t.shape[0] * t.shape[1]; ++slot)
      for (std::int64_t h = 0; h < t.shape[2] && !has_key[static_cast<std::size_t>(slot)]; ++h)
        for (std::int64_t c = 0; c < t.shape[3]; ++c)
          verify::store_element(
              t.data, t.dtype,
              slot / t.shape[1] * t.strides[0] + slot % t.shape[1] * t.strides[1] + h * t.strides[2] + c,
              poison);
}

}  // namespace flashjit::testing_support
