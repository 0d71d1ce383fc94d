// A launch of append_kv in guarded memory: caches full of poison, places of every kind, and the check that
// what the oracle names was written rightly and nothing else was touched.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "tests/support/guarded_tensor.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/oracle.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::testing_support {

struct AppendCase {
  int batch = 2, seqlen = 5, rows = 64;  // rows: of an entry's cache
  int heads_kv = 2, heads_q = 4, head_dim = 64, head_dim_v = 0;
  DType dtype = DType::bf16;
  std::optional<DType> kv_dtype = {};
  KvScale kv_scale = KvScale::tensor;
  bool v_in_k = false;  // there is no V
  bool packed = false, by_slots = false;
  int page_size = 0;  // 0: contiguous
  std::optional<Rotary> rotary = {};
  bool in_place = false, own_positions = false;  // rotary_positions are given
  MemoryLayout layout = MemoryLayout::contiguous;
  bool wild = true;        // some places are outside the caches
  bool hard_rows = false;  // some new rows are zeros, tiny, huge, or hold NaN or infinity
  int longest_position = 1 << 20;
  std::optional<double> base = {}, scale = {};
  unsigned seed = 1;

  AttentionSpec spec() const {
    AttentionSpec spec;
    spec.op = Operation::append_kv;
    spec.dtype = dtype;
    spec.head_dim = head_dim;
    spec.head_dim_v = head_dim_v;
    spec.varlen = packed;
    spec.paged = page_size > 0;
    spec.v_in_k = v_in_k;
    spec.rotary = rotary;
    spec.kv_dtype = kv_dtype;
    if (spec.has_kv_scales()) spec.kv_scale = kv_scale;
    return spec.validated();
  }
  Shape shape() const {
    return {.batch = batch,
            .seqlen_q = seqlen,
            .seqlen_k = rows,
            .num_heads_q = heads_q,
            .num_heads_kv = heads_kv,
            .page_size = page_size};
  }
  std::string str() const {
    return spec().to_json() + " batch " + std::to_string(batch) + " seqlen " + std::to_string(seqlen) +
           " rows " + std::to_string(rows) + " heads " + std::to_string(heads_q) + " over " +
           std::to_string(heads_kv) + " page size " + std::to_string(page_size) + (by_slots ? " slots" : "") +
           (in_place ? " in place" : "") + (hard_rows ? " hard rows" : "") + " layout " +
           std::to_string(static_cast<int>(layout)) + " seed " + std::to_string(seed);
  }
};

class AppendProblem {
  using Fence = GuardedTensor::Fence;

 public:
  AppendProblem(TestDevice& device, const AppendCase& given)
      : case_(given),
        spec_(given.spec()),
        k_new_(device, given.dtype, of_tokens(given.heads_kv, given.head_dim), Poison::nan, Fence::after),
        v_new_(device, given.dtype, of_tokens(given.heads_kv, spec_.head_dim_v), Poison::nan, Fence::before),
        k_(device, cache_dtype(), of_cache(spec_.key_elements()), Poison::nan, Fence::after),
        v_(device, cache_dtype(), of_cache(spec_.head_dim_v), Poison::infinity, Fence::before),
        k_scale_(device, DType::fp32, of_scales(), Poison::nan, Fence::after),
        v_scale_(device, DType::fp32, of_scales(), Poison::infinity, Fence::before),
        q_(device, given.dtype, of_tokens(given.heads_q, given.head_dim), Poison::nan, Fence::after),
        q_out_(device, given.dtype, of_tokens(given.heads_q, given.head_dim), Poison::nan, Fence::before),
        slots_(device, DType::int64, plain(token_sizes()), Poison::nan, Fence::after),
        positions_(device, DType::int32, plain({given.batch}), Poison::nan, Fence::after),
        starts_(device, DType::int32, plain({given.batch + 1}), Poison::nan, Fence::after),
        pages_(device, DType::int32, plain({given.batch, pages_of_entry()}), Poison::nan, Fence::after),
        rotary_positions_(device, DType::int32, plain(token_sizes()), Poison::nan, Fence::after),
        cos_(device, table_dtype(), plain({table_rows, pairs()}), Poison::nan, Fence::after),
        sin_(device, table_dtype(), plain({table_rows, pairs()}), Poison::nan, Fence::before) {
    std::mt19937 random(given.seed);
    for (GuardedTensor* const tensor : {&k_new_, &v_new_, &q_}) fill(*tensor, random, given.hard_rows);
    fill_tables(random);
    fill_places(random);
    fill_scales();
    for (GuardedTensor* const tensor : all()) tensor->upload();
    make_args();
    keep_as_before();
  }

  const AttentionSpec& spec() const { return spec_; }
  const AttentionArgs& args() const { return args_; }

  // `whole`: rows that several tokens write are left out, and so is the check of what was not to be written.
  testing::AssertionResult check(bool whole = true) {
    for (GuardedTensor* const tensor : all()) tensor->download();
    const bool rotates_q = spec_.rotary && spec_.rotary->q;
    for (const auto& [tensor, name, written] : {std::tuple{&k_new_, "k_new", false},
                                                {&v_new_, "v_new", false},
                                                {&k_, "k", true},
                                                {&v_, "v", true},
                                                {&k_scale_, "k_scale", writes_scales()},
                                                {&v_scale_, "v_scale", writes_scales()},
                                                {&q_, "q", rotates_q && case_.in_place},
                                                {&q_out_, "q_out", rotates_q && !case_.in_place},
                                                {&slots_, "slots", false},
                                                {&positions_, "append_positions", false},
                                                {&pages_, "page_table", false},
                                                {&starts_, "cu_seqlens_q", false},
                                                {&rotary_positions_, "rotary_positions", false},
                                                {&cos_, "rotary_cos", false},
                                                {&sin_, "rotary_sin", false}})
      if (auto untouched = tensor->was_not_touched(name, written); !untouched)
        return untouched << case_.str();
    const verify::Oracle oracle = verify::oracle_of(spec_, host_args());
    const verify::Report report = verify::compare(oracle);
    if (!report.ok()) return testing::AssertionFailure() << case_.str() << "\n" << report.str();
    if (!whole) return testing::AssertionSuccess();

    std::vector<const GuardedTensor*> outputs;
    std::vector<std::vector<std::byte>> expected;
    const auto add = [&](const GuardedTensor& output, std::size_t before) {
      outputs.push_back(&output);
      expected.push_back(before_[before]);
    };
    add(k_, 0);
    // Whole keys of fp8_ds_mla are written, though the oracle has three outputs of them.
    const bool is_ds_mla = case_.kv_dtype == DType::fp8_ds_mla;
    if (is_ds_mla) add(k_, 0), add(k_, 0);
    if (!case_.v_in_k) add(v_, 1);
    if (writes_scales()) add(k_scale_, 2);
    if (writes_scales() && !case_.v_in_k) add(v_scale_, 3);
    if (rotates_q) case_.in_place ? add(q_, 5) : add(q_out_, 4);
    oracle.compute([&](const verify::Expected& row) {
      const std::vector<std::int64_t>& sizes = oracle.outputs[row.output].shape;
      const bool is_scale = outputs[row.output] == &k_scale_ || outputs[row.output] == &v_scale_;
      std::int64_t place = 0;
      for (std::size_t i = 0; i + !is_scale < sizes.size(); ++i) place = place * sizes[i] + row.place[i];
      const std::size_t bytes = is_ds_mla && row.output < 3
                                    ? ds_mla_bytes
                                    : row.values.size() * size_of(outputs[row.output]->on_host().dtype);
      const std::vector<std::byte> now = outputs[row.output]->elements();
      const auto at = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(place) * bytes);
      std::copy_n(now.begin() + at, bytes, expected[row.output].begin() + at);
      ++written_;
    });
    for (std::size_t i = 0; i < outputs.size(); ++i)
      if (expected[i] != outputs[i]->elements())
        return testing::AssertionFailure()
               << case_.str() << ": " << oracle.outputs[i].name << " has changed where nothing is written";
    return testing::AssertionSuccess();
  }
  // Rows that the last check() saw written.
  int written() const { return written_; }
  std::vector<std::byte> caches() {
    k_.download();
    v_.download();
    std::vector<std::byte> bytes = k_.elements(), more = v_.elements();
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  }

  // Other rows, places and tables in the same memory. What the caches hold now is to stay where nothing is
  // written.
  void draw_again(unsigned seed) {
    std::mt19937 random(seed);
    for (GuardedTensor* const tensor : {&k_new_, &v_new_, &q_}) fill(*tensor, random, case_.hard_rows);
    fill_places(random);
    for (GuardedTensor* const tensor :
         {&k_new_, &v_new_, &q_, &slots_, &positions_, &starts_, &pages_, &rotary_positions_})
      tensor->upload();
    keep_as_before();
    written_ = 0;
  }

  // Every token is to go to one slot.
  void share_a_slot() {
    const Tensor slots = slots_.on_host();
    std::fill_n(static_cast<std::int64_t*>(slots.data), tokens(), std::int64_t{3});
    slots_.upload();
  }

 private:
  static constexpr int table_rows = 50;

  static TensorShape plain(const std::vector<std::int64_t>& sizes) {
    TensorShape shape{.rank = static_cast<int>(sizes.size())};
    std::int64_t stride = 1;
    for (int i = shape.rank - 1; i >= 0; --i) {
      shape.shape[i] = sizes[static_cast<std::size_t>(i)];
      shape.strides[i] = stride;
      stride *= shape.shape[i];
    }
    return shape;
  }
  std::int64_t tokens() const { return std::int64_t{case_.batch} * case_.seqlen; }
  std::vector<std::int64_t> token_sizes() const {
    if (case_.packed) return {tokens()};
    return {case_.batch, case_.seqlen};
  }
  TensorShape of_tokens(std::int64_t heads, std::int64_t dim) const {
    std::vector<std::int64_t> sizes = token_sizes();
    sizes.insert(sizes.end(), {heads, dim});
    return arrange(case_.layout, sizes, case_.dtype);
  }
  std::int64_t pages_of_entry() const {
    return case_.page_size ? (case_.rows + case_.page_size - 1) / case_.page_size : 1;
  }
  std::int64_t num_pages() const { return case_.batch * pages_of_entry() + 2; }
  TensorShape of_cache(std::int64_t dim) const {
    if (case_.page_size)
      return arrange(case_.layout, {num_pages(), case_.page_size, case_.heads_kv, dim}, cache_dtype());
    return arrange(case_.layout, {case_.batch, case_.rows, case_.heads_kv, dim}, cache_dtype());
  }
  DType cache_dtype() const {
    return case_.kv_dtype == DType::fp8_ds_mla ? DType::uint8 : case_.kv_dtype.value_or(case_.dtype);
  }
  bool writes_scales() const { return case_.kv_dtype && case_.kv_scale == KvScale::token_head; }
  TensorShape of_scales() const {
    if (case_.kv_scale == KvScale::tensor) return plain({1});
    if (case_.kv_scale == KvScale::head) return plain({case_.heads_kv});
    return of_cache(1);
  }
  // Without the last dimension, of size 1, of scales of tokens.
  Tensor scales(Tensor t) const {
    if (writes_scales()) t.rank = 3;
    return t;
  }
  int pairs() const {
    if (!case_.rotary) return 1;
    return case_.rotary->columns(case_.head_dim) / 2;
  }
  DType table_dtype() const {
    return case_.rotary && case_.rotary->tables ? *case_.rotary->tables : DType::fp32;
  }
  std::vector<GuardedTensor*> all() {
    return {&k_new_, &v_new_,     &k_,      &v_,     &k_scale_, &v_scale_,          &q_,  &q_out_,
            &slots_, &positions_, &starts_, &pages_, &cos_,     &rotary_positions_, &sin_};
  }

  void keep_as_before() {
    before_.clear();
    for (const GuardedTensor* const tensor : {&k_, &v_, &k_scale_, &v_scale_, &q_out_, &q_})
      before_.push_back(tensor->elements());
  }
  static void fill(GuardedTensor& tensor, std::mt19937& random, bool hard_rows) {
    std::normal_distribution<float> normal;
    const Tensor t = tensor.on_host();
    const std::int64_t entries = t.rank == 4 ? t.shape[0] : 1;
    for (std::int64_t b = 0; b < entries; ++b)
      for (std::int64_t i = 0; i < t.shape[t.rank - 3]; ++i)
        for (std::int64_t h = 0; h < t.shape[t.rank - 2]; ++h)
          for (std::int64_t c = 0; c < t.shape[t.rank - 1]; ++c)
            verify::store_element(t.data, t.dtype,
                                  (t.rank == 4 ? b * t.strides[0] : 0) + i * t.strides[t.rank - 3] +
                                      h * t.strides[t.rank - 2] + c,
                                  hard_rows ? hard(i, c, normal(random)) : normal(random));
  }
  static float hard(std::int64_t row, std::int64_t column, float normal) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const float factors[] = {0, 0x1p-130f, 0x1p-118f, 0x1p-20f, 0x1p15f, 0x1p120f};
    switch (row % 8) {
      case 0:
        return column == 3 ? NAN : normal;
      case 1:
        return column == 4 ? -infinity : normal;
      default:
        return normal * factors[row % 8 - 2];
    }
  }
  void fill_tables(std::mt19937& random) {
    std::uniform_real_distribution<float> angle(0, 6.2831853f);
    const Tensor c = cos_.on_host(), s = sin_.on_host();
    for (std::int64_t i = 0; i < std::int64_t{table_rows} * pairs(); ++i) {
      const float a = angle(random);
      verify::store_element(c.data, c.dtype, i, std::cos(a));
      verify::store_element(s.data, s.dtype, i, std::sin(a));
    }
  }
  // Some values saturate int8.
  void fill_scales() {
    if (writes_scales()) return;
    const float stored = case_.kv_dtype == DType::int8 ? 48 : 4;
    for (const Tensor& t : {k_scale_.on_host(), v_scale_.on_host()})
      for (std::int64_t i = 0; i < t.shape[0]; ++i)
        static_cast<float*>(t.data)[i] = case_.hard_rows && i < 2
                                             ? std::array{0x1p-127f, -0x1.8p127f}[i]
                                             : (i % 2 ? -1 : 1) / (stored + static_cast<float>(i));
  }
  void fill_places(std::mt19937& random) {
    const auto ints = [](const GuardedTensor& t) { return static_cast<std::int32_t*>(t.on_host().data); };
    // Packed sequences of any lengths, among them none; the last tokens belong to none.
    std::int32_t* const starts = ints(starts_);
    starts[0] = 0;
    for (int b = 1; b <= case_.batch; ++b) {
      const std::int64_t left = tokens() - starts[b - 1], mean = 2 * case_.seqlen + 1;
      const auto length = static_cast<std::int32_t>(random() % static_cast<unsigned>(mean));
      starts[b] = starts[b - 1] + static_cast<std::int32_t>(std::min<std::int64_t>(length, left));
    }
    // The first entries lie across the cache's beginning and end.
    for (int b = 0; b < case_.batch; ++b)
      ints(positions_)[b] =
          case_.wild && b == 0 ? case_.rows - case_.seqlen / 2
          : case_.wild && b == 1
              ? -case_.seqlen / 3
              : static_cast<std::int32_t>(random() %
                                          static_cast<unsigned>(std::max(case_.rows - case_.seqlen + 1, 1)));
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_pages()));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    const std::int64_t entries = case_.batch * pages_of_entry();
    std::copy_n(ids.begin(), entries, ints(pages_));
    if (case_.wild && entries > 2) {
      ints(pages_)[entries - 1] = -5;
      ints(pages_)[entries - 2] = static_cast<std::int32_t>(num_pages());
    }
    const std::int64_t num_slots =
        case_.page_size ? num_pages() * case_.page_size : std::int64_t{case_.batch} * case_.rows;
    std::vector<std::int64_t> places(static_cast<std::size_t>(std::max(num_slots, tokens())));
    std::iota(places.begin(), places.end(), 0);  // those beyond the caches are skipped
    std::shuffle(places.begin(), places.end(), random);
    const Tensor slots = slots_.on_host();
    for (std::int64_t i = 0; i < tokens(); ++i) {
      std::int64_t slot = places[static_cast<std::size_t>(i)];
      if (case_.wild && i % 5 == 1) slot = -1 - i;
      if (case_.wild && i % 7 == 3) slot = num_slots + i - 3;  // the first of them is the first beyond
      if (case_.wild && i % 11 == 5) slot = std::numeric_limits<std::int64_t>::max() - i;
      static_cast<std::int64_t*>(slots.data)[i] = slot;
      ints(rotary_positions_)[i] =
          case_.rotary && case_.rotary->tables
              ? static_cast<std::int32_t>(random() % 60) - 4
              : static_cast<std::int32_t>(random() % static_cast<unsigned>(case_.longest_position));
    }
  }

  void make_args() {
    args_.k_new = k_new_.on_device();
    args_.k = k_.on_device();
    if (spec_.has_kv_scales()) args_.k_scale = scales(k_scale_.on_device());
    if (!case_.v_in_k) {
      args_.v_new = v_new_.on_device();
      args_.v = v_.on_device();
      if (case_.kv_dtype) args_.v_scale = scales(v_scale_.on_device());
    }
    if (case_.by_slots) {
      args_.slots = slots_.on_device();
    } else {
      args_.append_positions = positions_.on_device();
      if (case_.packed) args_.cu_seqlens_q = starts_.on_device();
      if (case_.page_size) args_.page_table = pages_.on_device();
    }
    if (!case_.rotary) return;
    if (case_.by_slots || case_.own_positions) args_.rotary_positions = rotary_positions_.on_device();
    if (case_.rotary->tables) {
      args_.rotary_cos = cos_.on_device();
      args_.rotary_sin = sin_.on_device();
    } else {
      args_.rotary_base = case_.base;
      args_.rotary_scale = case_.scale;
    }
    if (!case_.rotary->q) return;
    args_.q = q_.on_device();
    args_.q_out = case_.in_place ? q_.on_device() : q_out_.on_device();
  }
  // The oracle reads Q as it was.
  AttentionArgs host_args() {
    AttentionArgs args = args_;
    const std::pair<TensorMember, GuardedTensor*> members[] = {
        {&AttentionArgs::k_new, &k_new_},
        {&AttentionArgs::v_new, &v_new_},
        {&AttentionArgs::k, &k_},
        {&AttentionArgs::v, &v_},
        {&AttentionArgs::k_scale, &k_scale_},
        {&AttentionArgs::v_scale, &v_scale_},
        {&AttentionArgs::slots, &slots_},
        {&AttentionArgs::append_positions, &positions_},
        {&AttentionArgs::cu_seqlens_q, &starts_},
        {&AttentionArgs::page_table, &pages_},
        {&AttentionArgs::rotary_positions, &rotary_positions_},
        {&AttentionArgs::rotary_cos, &cos_},
        {&AttentionArgs::rotary_sin, &sin_},
        {&AttentionArgs::q, &q_},
        {&AttentionArgs::q_out, case_.in_place ? &q_ : &q_out_}};
    for (const auto& [member, tensor] : members)
      if (args.*member) args.*member = tensor->on_host();
    for (const TensorMember member : {&AttentionArgs::k_scale, &AttentionArgs::v_scale})
      if (args.*member) args.*member = scales(*(args.*member));
    if (args.q && case_.in_place) {
      q_before_ = before_[5];
      std::vector<std::int64_t> sizes(args.q->shape.begin(), args.q->shape.begin() + args.q->rank);
      args.q = Tensor::contiguous(q_before_.data(), case_.dtype, {}, sizes);
    }
    return args;
  }

  const AppendCase case_;
  const AttentionSpec spec_;
  GuardedTensor k_new_, v_new_, k_, v_, k_scale_, v_scale_, q_, q_out_, slots_, positions_, starts_, pages_,
      rotary_positions_, cos_, sin_;
  AttentionArgs args_;
  std::vector<std::vector<std::byte>> before_;  // k, v, k_scale, v_scale, q_out, q
  std::vector<std::byte> q_before_;
  int written_ = 0;
};

}  // namespace flashjit::testing_support
