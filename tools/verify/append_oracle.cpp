#include "tools/verify/append_oracle.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <numbers>
#include <unordered_map>

#include "tools/verify/ds_mla.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/error_bound.hpp"
#include "tools/verify/forward_oracle.hpp"
#include "tools/verify/layout.hpp"

namespace flashjit::verify {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// A token's row of the new tensors and of the caches.
struct Token {
  std::int64_t entry = 0, row = 0;       // packed: entry 0
  std::int64_t page = -1, page_row = 0;  // page -1: it is not written
  std::int64_t position = 0;             // of its rotary embedding
  bool in_batch = true;
};

struct Append {
  AttentionSpec spec;
  AttentionArgs args;
  OracleOptions options;
  std::vector<Token> tokens;

  const Tensor& k_new() const { return *args.k_new; }
  std::int64_t index(const Tensor& t, const Token& token, std::int64_t head) const {
    if (t.rank == 3) return token.row * t.strides[0] + head * t.strides[1];
    return token.entry * t.strides[0] + token.row * t.strides[1] + head * t.strides[2];
  }
};

template <class T>
T at(const Tensor& t, std::int64_t i, std::int64_t j = 0) {
  return static_cast<const T*>(t.data)[i * t.strides[0] + j * t.strides[1]];
}

std::vector<Token> tokens_of(const AttentionSpec& spec, const AttentionArgs& args) {
  const Tensor& k_new = need(args.k_new, "k_new", spec.varlen ? 3 : 4);
  const Tensor& k = need(args.k, "k", 4);
  if (!spec.v_in_k) {
    need(args.v_new, "v_new", spec.varlen ? 3 : 4);
    need(args.v, "v", 4);
  }
  if (!args.slots == !args.append_positions) refuse("either slots or append_positions is needed");
  const std::int64_t entries = spec.varlen ? 1 : k_new.shape[0], rows = k_new.shape[spec.varlen ? 0 : 1];
  const std::int64_t page_size = k.shape[1];
  std::vector<Token> tokens;
  std::unordered_map<std::int64_t, int> writers;  // of a slot
  for (std::int64_t entry = 0; entry < entries; ++entry)
    for (std::int64_t row = 0; row < rows; ++row) {
      Token token{.entry = entry, .row = row};
      const auto number = static_cast<std::int64_t>(tokens.size());
      std::int64_t slot = -1;
      if (args.slots) {
        slot = static_cast<const std::int64_t*>(args.slots->data)[number];
        if (slot >= k.shape[0] * page_size) slot = -1;
      } else {
        std::int64_t owner = entry, first = 0;
        if (spec.varlen) {
          const Tensor& starts = need(args.cu_seqlens_q, "cu_seqlens_q", 1);
          for (owner = 0; owner + 1 < starts.shape[0]; ++owner)
            if (at<std::int32_t>(starts, owner) <= row && row < at<std::int32_t>(starts, owner + 1)) break;
          token.in_batch = owner + 1 < starts.shape[0];
          if (token.in_batch) first = at<std::int32_t>(starts, owner);
        }
        if (token.in_batch) {
          token.position = at<std::int32_t>(*args.append_positions, owner) + row - first;
          std::int64_t page = owner;
          bool inside = token.position >= 0;
          if (spec.paged) {
            const Tensor& table = need(args.page_table, "page_table", 2);
            inside = inside && token.position < table.shape[1] * page_size;
            if (inside) page = at<std::int32_t>(table, owner, token.position / page_size);
            inside = inside && page >= 0 && page < k.shape[0];
          } else {
            inside = inside && token.position < page_size;
          }
          if (inside) slot = page * page_size + (spec.paged ? token.position % page_size : token.position);
        }
      }
      if (slot >= 0) {
        token.page = slot / page_size;
        token.page_row = slot % page_size;
        ++writers[slot];
      }
      if (args.rotary_positions)
        token.position = static_cast<const std::int32_t*>(args.rotary_positions->data)[number];
      tokens.push_back(token);
    }
  for (Token& token : tokens)
    if (token.page >= 0 && writers[token.page * page_size + token.page_row] > 1) token.page = -1;
  return tokens;
}

bool is_ds_mla(const AttentionSpec& spec) {
  return spec.kv_dtype == DType::fp8_ds_mla;
}
bool writes_scales(const AttentionSpec& spec) {
  return spec.kv_dtype && spec.kv_scale == KvScale::token_head;
}
// Outputs are k and v, of which a spec with v_in_k has k alone, the scales that are written, and q_out. A k
// of fp8_ds_mla is three outputs: its columns, their scales, its rotary columns.
std::size_t num_caches(const AttentionSpec& spec) {
  return spec.v_in_k ? 1 : 2;
}
std::size_t output_of_q(const AttentionSpec& spec) {
  return is_ds_mla(spec) ? 3 : (writes_scales(spec) ? 2 : 1) * num_caches(spec);
}

class Rows {
 public:
  Rows(const Append& append, const Visit& visit)
      : append_(append),
        visit_(visit),
        dim_(append.spec.rotary ? append.spec.rotary->columns(append.spec.head_dim) : 0),
        first_(static_cast<std::size_t>(append.spec.rotary ? append.spec.rotary->first : 0)) {
    cosines_.resize(static_cast<std::size_t>(dim_ / 2));
    sines_ = cosines_;
  }

  void run(std::size_t number) {
    const Token& token = append_.tokens[number];
    const AttentionArgs& args = append_.args;
    if (append_.spec.rotary) compute_angles(token.position);
    const int heads = static_cast<int>(args.k_new->shape[args.k_new->rank - 2]);
    if (token.page >= 0)
      for (int head = 0; head < heads; ++head) {
        write({.output = 0, .from = *args.k_new, .rotated = dim_, .cache = *args.k, .scale = args.k_scale},
              token, head);
        if (append_.spec.v_in_k) continue;
        write({.output = 1, .from = *args.v_new, .rotated = 0, .cache = *args.v, .scale = args.v_scale},
              token, head);
      }
    if (!append_.spec.rotary || !append_.spec.rotary->q || !token.in_batch) return;
    const int heads_q = static_cast<int>(args.q->shape[args.q->rank - 2]);
    for (int head = 0; head < heads_q; ++head) {
      std::array<std::int64_t, 4> place = {token.entry, token.row, head};
      if (append_.spec.varlen) place = {token.row, head};
      make(*args.q, append_.index(*args.q, token, head), dim_);
      round(args.q_out->dtype);
      show(output_of_q(append_.spec), append_.index(*args.q_out, token, head), place);
    }
  }

 private:
  // K or V.
  struct Kind {
    std::size_t output;
    const Tensor& from;
    int rotated;
    const Tensor& cache;
    const std::optional<Tensor>& scale;
  };

  void write(const Kind& kind, const Token& token, int head) {
    const auto index = [&](const Tensor& t) {
      return token.page * t.strides[0] + token.page_row * t.strides[1] + head * t.strides[2];
    };
    const std::array<std::int64_t, 4> place = {token.page, token.page_row, head};
    make(kind.from, append_.index(kind.from, token, head), kind.rotated);
    if (is_ds_mla(append_.spec)) return write_ds_mla(kind.cache, token, head);
    if (!append_.spec.kv_dtype) {
      round(kind.cache.dtype);
      return show(kind.output, index(kind.cache), place);
    }
    const Tensor& scale = *kind.scale;
    switch (append_.spec.kv_scale.value_or(KvScale::tensor)) {
      case KvScale::tensor:
        quantise(load_element(scale.data, scale.dtype, 0));
        break;
      case KvScale::head:
        quantise(load_element(scale.data, scale.dtype, head * scale.strides[0]));
        break;
      case KvScale::token_head: {
        const std::vector<double> values = values_, errors = errors_;
        set_scale();
        show(num_caches(append_.spec) + kind.output, index(scale), place);
        values_ = values;
        errors_ = errors;
        quantise(load_element(scale.data, scale.dtype, index(scale)));
      }
    }
    show(kind.output, index(kind.cache), place);
  }

  void write_ds_mla(const Tensor& cache, const Token& token, int head) {
    const DsMlaParts parts(cache);
    const auto index = [&](const Tensor& t) {
      return token.page * t.strides[0] + token.page_row * t.strides[1] + head * t.strides[2];
    };
    const std::array<std::int64_t, 4> place = {token.page, token.page_row, head};
    const std::vector<double> values = values_, errors = errors_;
    const auto take = [&](int begin, int count) {
      values_.assign(values.begin() + begin, values.begin() + begin + count);
      errors_.assign(errors.begin() + begin, errors.begin() + begin + count);
    };
    std::vector<double> columns, column_errors, scales, scale_errors;
    for (int group = 0; group < device::DsMla::groups; ++group) {
      take(group * device::DsMla::group, device::DsMla::group);
      set_scale();
      scales.push_back(values_[0]);
      scale_errors.push_back(errors_[0]);
      take(group * device::DsMla::group, device::DsMla::group);
      quantise(load_element(parts.scales.data, DType::fp32, index(parts.scales) + group));
      columns.insert(columns.end(), values_.begin(), values_.end());
      column_errors.insert(column_errors.end(), errors_.begin(), errors_.end());
    }
    values_ = columns, errors_ = column_errors;
    show(0, index(parts.columns), place);
    values_ = scales, errors_ = scale_errors;
    show(1, index(parts.scales), place);
    take(device::DsMla::columns, device::DsMla::rotary_columns);
    for (std::size_t c = 0; c < values_.size(); ++c)
      errors_[c] = is_rotated(c + device::DsMla::columns)
                       ? with_rounding(rounding_of(DType::bf16), values_[c], errors_[c])
                       : 0;
    show(2, index(parts.rotary), place);
  }

  void compute_angles(std::int64_t position) {
    const AttentionArgs& args = append_.args;
    for (int i = 0; i < dim_ / 2; ++i) {
      const auto pair = static_cast<std::size_t>(i);
      if (append_.spec.rotary->tables) {
        const Tensor &c = need(args.rotary_cos, "rotary_cos", 2), &s = need(args.rotary_sin, "rotary_sin", 2);
        const std::int64_t row = std::clamp<std::int64_t>(position, 0, c.shape[0] - 1);
        cosines_[pair] = load_element(c.data, c.dtype, row * c.strides[0] + i * c.strides[1]);
        sines_[pair] = load_element(s.data, s.dtype, row * s.strides[0] + i * s.strides[1]);
      } else {
        const long double base = args.rotary_base.value_or(10000), scale = args.rotary_scale.value_or(1);
        const long double angle =
            static_cast<long double>(position) / scale * std::pow(base, -2.0L * i / dim_);
        cosines_[pair] = static_cast<double>(std::cos(angle));
        sines_[pair] = static_cast<double>(std::sin(angle));
      }
    }
  }

  // The row before it is rounded. `rotated` columns of it are rotated.
  void make(const Tensor& from, std::int64_t first, int rotated) {
    const auto dim = static_cast<std::size_t>(from.shape[from.rank - 1]);
    values_.resize(dim);
    errors_.assign(dim, 0.0);
    for (std::size_t c = 0; c < dim; ++c)
      values_[c] = load_element(from.data, from.dtype, first + static_cast<std::int64_t>(c));
    rotated_ = static_cast<std::size_t>(rotated);
    const bool half = append_.spec.rotary && append_.spec.rotary->style == RotaryStyle::half;
    for (int i = 0; i < rotated / 2; ++i) {
      const auto pair = static_cast<std::size_t>(i), a = first_ + (half ? pair : 2 * pair),
                 b = half ? a + static_cast<std::size_t>(rotated / 2) : a + 1;
      const double x = values_[a], y = values_[b], c = cosines_[pair], s = sines_[pair];
      const bool tables = append_.spec.rotary->tables.has_value();
      const double size = std::abs(x) + std::abs(y);
      const double error =
          tables ? 0x1p-23 * std::max({1.0, std::abs(c), std::abs(s)}) * size : (0x1p-22 + 0x1p-23) * size;
      values_[a] = x * c - y * s;
      values_[b] = x * s + y * c;
      errors_[a] = errors_[b] = std::isfinite(x) && std::isfinite(y) ? error + 0x1p-125 : nan;
    }
  }

  // To a dtype that holds unrotated columns exactly.
  void round(DType dtype) {
    for (std::size_t c = 0; c < values_.size(); ++c)
      errors_[c] = is_rotated(c) ? with_rounding(rounding_of(dtype), values_[c], errors_[c]) : 0;
  }
  bool is_rotated(std::size_t column) const { return column >= first_ && column - first_ < rotated_; }

  // The value that the row's scale has.
  void set_scale() {
    double largest = 0, error = 0;
    for (std::size_t c = 0; c < values_.size(); ++c) {
      if (std::isnan(errors_[c])) error = nan;
      if (std::isnan(values_[c])) continue;
      largest = std::max(largest, std::min(std::abs(values_[c]), double{std::numeric_limits<float>::max()}));
      if (!std::isnan(error)) error = std::max(error, errors_[c]);
    }
    const double unit = largest_of(stored_dtype());
    const double scale = std::max(largest / unit, 0x1p-126);
    values_ = {scale};
    errors_ = {error / unit + 0x1p-22 * scale};
  }

  // Rounding is monotonous: a stored element lies between what the least and the largest number that a
  // kernel may have before rounding become.
  void quantise(double scale) {
    const DType dtype = stored_dtype();
    const bool is_zero = std::abs(scale) < 0x1p-126;  // counts as 0
    for (std::size_t c = 0; c < values_.size(); ++c) {
      const double value = values_[c];
      if (!std::isfinite(scale) || std::isnan(errors_[c])) {
        errors_[c] = nan;
        continue;
      }
      const double exact = !is_zero ? value / scale : std::isfinite(value) ? 0 : value;
      values_[c] = rounded_to_8_bits(dtype, exact);
      if (!std::isfinite(exact) || is_zero) {
        errors_[c] = 0;
        continue;
      }
      const double off = errors_[c] / std::abs(scale) + 0x1p-22 * std::abs(exact) + 0x1p-125;
      errors_[c] = std::max(rounded_to_8_bits(dtype, exact + off) - values_[c],
                            values_[c] - rounded_to_8_bits(dtype, exact - off));
    }
  }
  DType stored_dtype() const { return is_ds_mla(append_.spec) ? DType::fp8_e4m3 : *append_.spec.kv_dtype; }
  static double largest_of(DType dtype) {
    return dtype == DType::int8 ? 127 : dtype == DType::fp8_e4m3 ? e4m3.largest : e5m2.largest;
  }

  void show(std::size_t output, std::int64_t index, std::array<std::int64_t, 4> place) {
    visit_({.output = output, .place = place, .index = index, .values = values_, .bounds = errors_});
  }

  const Append& append_;
  const Visit& visit_;
  const int dim_;
  const std::size_t first_;              // of the rotated columns
  std::vector<double> cosines_, sines_;  // of the current token
  std::vector<double> values_, errors_;  // of the current row
  std::size_t rotated_ = 0;              // its columns that are
};

std::vector<std::int64_t> sizes_of(const Tensor& t) {
  return {t.shape.begin(), t.shape.begin() + t.rank};
}

}  // namespace

Oracle append_kv_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  const Append append{spec, args, options, tokens_of(spec, args)};
  if (spec.has_kv_scales()) {
    const int rank = writes_scales(spec) ? 3 : 1;
    need(args.k_scale, "k_scale", rank);
    if (!spec.v_in_k) need(args.v_scale, "v_scale", rank);
  }
  const std::vector<const char*> of_cache = {"page", "row", "head", "dim"};
  Oracle oracle{{{"k", sizes_of(*args.k), args.k, of_cache}}, [append](const Visit& visit) {
                  Rows rows(append, visit);
                  const std::size_t count = append.tokens.size();
                  const auto heads = static_cast<std::size_t>(
                      std::max<std::int64_t>(append.args.k_new->shape[append.args.k_new->rank - 2], 1));
                  const auto most = static_cast<std::size_t>(append.options.max_rows) / heads;
                  const std::size_t step =
                      append.options.max_rows > 0 ? count / std::max<std::size_t>(most, 1) + 1 : 1;
                  for (std::size_t i = 0; i < count; i += step) rows.run(i);
                }};
  if (is_ds_mla(spec)) {
    const DsMlaParts parts(*args.k);
    oracle.outputs = {{"k", sizes_of(parts.columns), parts.columns, of_cache},
                      {"k's scales", sizes_of(parts.scales), parts.scales, of_cache},
                      {"k's rotary columns", sizes_of(parts.rotary), parts.rotary, of_cache}};
  }
  if (!spec.v_in_k) oracle.outputs.push_back({"v", sizes_of(*args.v), args.v, of_cache});
  if (writes_scales(spec)) {
    const std::vector<const char*> of_scale = {"page", "row", "head"};
    oracle.outputs.push_back({"k_scale", sizes_of(*args.k_scale), args.k_scale, of_scale});
    if (!spec.v_in_k) oracle.outputs.push_back({"v_scale", sizes_of(*args.v_scale), args.v_scale, of_scale});
  }
  if (spec.rotary && spec.rotary->q) {
    const Tensor& q_out = need(args.q_out, "q_out", spec.varlen ? 3 : 4);
    std::vector<const char*> names = {"row", "head", "dim"};
    if (!spec.varlen) names.insert(names.begin(), "batch");
    need(args.q, "q", q_out.rank);
    oracle.outputs.push_back({"q_out", sizes_of(q_out), q_out, names});
  }
  return oracle;
}

Oracle decode_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  if (!spec.append) return forward_oracle(spec, args, options);
  AttentionSpec decode = spec, rows = spec;
  decode.append = false;
  decode.rotary.reset();
  rows.op = Operation::append_kv;
  const bool rotates_q = spec.rotary && spec.rotary->q;
  AttentionArgs of_decode = args, of_rows = args;
  if (rotates_q) of_decode.q = need(args.q_out, "q_out", args.q->rank);

  // The new rows are the last keys.
  const auto batch = static_cast<std::int64_t>(
      spec.varlen ? need(args.cu_seqlens_q, "cu_seqlens_q", 1).shape[0] - 1 : need(args.q, "q", 4).shape[0]);
  const Tensor& k = need(args.k, "k", 4);
  const std::int64_t most =
      spec.paged ? need(args.page_table, "page_table", 2).shape[1] * k.shape[1] : k.shape[1];
  const auto positions = std::make_shared<std::vector<std::int32_t>>();
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = args.seqlens_k ? at<std::int32_t>(*args.seqlens_k, b) : most;
    const std::int64_t new_rows =
        spec.varlen ? at<std::int32_t>(*args.cu_seqlens_q, b + 1) - at<std::int32_t>(*args.cu_seqlens_q, b)
                    : args.q->shape[1];
    positions->push_back(static_cast<std::int32_t>(length - new_rows));
  }
  of_rows.append_positions = Tensor::contiguous(positions->data(), DType::int32, {}, {batch});

  Oracle oracle = forward_oracle(decode, of_decode, options);
  const Oracle appended = append_kv_oracle(rows, of_rows, options);
  const std::size_t first = oracle.outputs.size();
  oracle.outputs.insert(oracle.outputs.end(), appended.outputs.begin(), appended.outputs.end());
  oracle.compute = [attention = oracle.compute, rows_of = appended.compute, first,
                    positions](const Visit& visit) {
    attention(visit);
    rows_of([&](const Expected& row) {
      Expected moved = row;
      moved.output += first;
      visit(moved);
    });
  };
  return oracle;
}

}  // namespace flashjit::verify
