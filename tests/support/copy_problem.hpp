// A launch of copy_kv in guarded memory: caches of random bytes, slots of every kind, and the check that each
// copied row has the bytes of its source and nothing else was touched.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "tests/support/guarded_tensor.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/oracle.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::testing_support {

struct CopyCase {
  // Where the sources are: in caches of their own, in k and v, or in the pages of k and v but the first.
  enum class From { others, themselves, later_pages };

  int rows = 20;                                                       // to be copied
  int pages = 4, page_size = 16, from_pages = 3, from_page_size = 24;  // the latter two of others
  int heads = 2, head_dim = 64, head_dim_v = 0;
  DType dtype = DType::bf16;
  std::optional<DType> kv_dtype = {};
  KvScale kv_scale = KvScale::tensor;
  bool v_in_k = false;  // there is no V
  From from = From::others;
  MemoryLayout layout = MemoryLayout::contiguous, from_layout = MemoryLayout::contiguous;
  bool wild = true;  // some slots are outside the caches
  unsigned seed = 1;

  AttentionSpec spec() const {
    AttentionSpec spec{
        .op = Operation::copy_kv, .dtype = dtype, .head_dim = head_dim, .head_dim_v = head_dim_v};
    spec.kv_dtype = kv_dtype;
    if (kv_dtype) spec.kv_scale = kv_scale;
    spec.v_in_k = v_in_k;
    return spec.validated();
  }
  Shape shape() const {
    return {.batch = 1, .seqlen_q = rows, .seqlen_k = page_size, .num_heads_q = heads, .num_heads_kv = heads};
  }
  std::string str() const {
    return spec().to_json() + " rows " + std::to_string(rows) + " heads " + std::to_string(heads) +
           " pages " + std::to_string(pages) + " of " + std::to_string(page_size) + " from " +
           std::to_string(static_cast<int>(from)) + " layouts " + std::to_string(static_cast<int>(layout)) +
           " " + std::to_string(static_cast<int>(from_layout)) + " seed " + std::to_string(seed);
  }
};

class CopyProblem {
  using Fence = GuardedTensor::Fence;
  using From = CopyCase::From;

 public:
  // `workspace_bytes`: of the case's shape. Sources in caches of their own take no workspace.
  CopyProblem(TestDevice& device, const CopyCase& given, std::size_t workspace_bytes)
      : case_(given),
        spec_(given.spec()),
        k_(device, cache_dtype(), of_cache(given.head_dim), Poison::nan, Fence::after),
        v_(device, cache_dtype(), of_cache(spec_.head_dim_v), Poison::infinity, Fence::before),
        k_scale_(device, DType::fp32, of_cache(1), Poison::nan, Fence::after),
        v_scale_(device, DType::fp32, of_cache(1), Poison::infinity, Fence::before),
        k_from_(device, cache_dtype(), of_source(given.head_dim), Poison::nan, Fence::before),
        v_from_(device, cache_dtype(), of_source(spec_.head_dim_v), Poison::infinity, Fence::after),
        k_scale_from_(device, DType::fp32, of_source(1), Poison::nan, Fence::before),
        v_scale_from_(device, DType::fp32, of_source(1), Poison::infinity, Fence::after),
        from_slots_(device, DType::int64, list(given.rows), Poison::nan, Fence::after),
        to_slots_(device, DType::int64, list(given.rows), Poison::nan, Fence::before),
        workspace_(device, DType::int8, list(static_cast<std::int64_t>(workspace_bytes)), Poison::nan,
                   Fence::after) {
    draw(given.seed);
    workspace_.upload();
    make_args();
  }

  const AttentionSpec& spec() const { return spec_; }
  const AttentionArgs& args() const { return args_; }
  AttentionArgs& args() { return args_; }

  // Other rows and slots in the same memory.
  void draw(unsigned seed) {
    std::mt19937 random(seed);
    for (GuardedTensor* const tensor : caches()) fill(*tensor, random);
    fill_slots(random);
    for (GuardedTensor* const tensor : caches()) tensor->upload();
    from_slots_.upload();
    to_slots_.upload();
    before_.clear();
    for (GuardedTensor* const tensor : caches()) before_.push_back(tensor->elements());
  }

  // Row i is to go from and to slots_of(i), a pair. Places are to differ.
  template <class SlotsOf>
  void set_slots(const SlotsOf& slots_of) {
    for (int i = 0; i < case_.rows; ++i)
      std::tie(static_cast<std::int64_t*>(from_slots_.on_host().data)[i],
               static_cast<std::int64_t*>(to_slots_.on_host().data)[i]) = slots_of(i);
    from_slots_.upload();
    to_slots_.upload();
  }

  // Every row is to go to one slot.
  void share_a_slot() {
    std::fill_n(static_cast<std::int64_t*>(to_slots_.on_host().data), case_.rows, shared_slot);
    to_slots_.upload();
  }
  static constexpr std::int64_t shared_slot = 3;

  // `whole`: a place to which several rows go is left out.
  testing::AssertionResult check(bool whole = true) {
    for (GuardedTensor* const tensor : caches()) tensor->download();
    const auto named = std::vector<std::pair<GuardedTensor*, const char*>>{{&k_, "k"},
                                                                           {&v_, "v"},
                                                                           {&k_scale_, "k_scale"},
                                                                           {&v_scale_, "v_scale"},
                                                                           {&k_from_, "k_from"},
                                                                           {&v_from_, "v_from"},
                                                                           {&k_scale_from_, "k_scale_from"},
                                                                           {&v_scale_from_, "v_scale_from"}};
    for (std::size_t i = 0; i < named.size(); ++i)
      if (auto untouched = named[i].first->was_not_touched(named[i].second, is_written(i)); !untouched)
        return untouched << case_.str();
    workspace_.download();
    if (auto untouched = workspace_.was_not_touched("workspace", case_.from != From::others); !untouched)
      return untouched << case_.str();
    copied_ = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      if (!is_written(i)) continue;
      std::vector<std::byte> expected = before_[i], now = caches()[i]->elements();
      const std::vector<std::byte>& sources = case_.from == From::others ? before_[i + 4] : before_[i];
      const std::size_t row = row_bytes(i);
      for (int r = 0; r < case_.rows; ++r) {
        const std::int64_t from = source_row(slot(from_slots_, r)), to = slot(to_slots_, r);
        if (from < 0 || to < 0 || to >= num_slots()) continue;
        const auto at = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(to) * row);
        if (whole)
          std::copy_n(sources.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(from) * row),
                      row, expected.begin() + at);
        else
          std::copy_n(now.begin() + at, row, expected.begin() + at);
        ++copied_;
      }
      if (expected != now)
        return testing::AssertionFailure()
               << case_.str() << ": " << named[i].second << " is wrong in row "
               << (std::mismatch(expected.begin(), expected.end(), now.begin()).first - expected.begin()) /
                      static_cast<std::ptrdiff_t>(row);
    }
    return agrees_with_oracle();
  }
  // Rows that the last check() saw copied, of K, V and scales.
  int copied() const { return copied_; }

 private:
  std::int64_t num_slots() const { return std::int64_t{case_.pages} * case_.page_size; }
  std::int64_t num_sources() const {
    switch (case_.from) {
      case From::others:
        return std::int64_t{case_.from_pages} * case_.from_page_size;
      case From::themselves:
        return num_slots();
      case From::later_pages:
        return num_slots() - case_.page_size;
    }
    return 0;
  }
  // The row of all source rows, or of all rows of k and v; -1: outside.
  std::int64_t source_row(std::int64_t slot) const {
    if (slot < 0 || slot >= num_sources()) return -1;
    return slot + (case_.from == From::later_pages ? case_.page_size : 0);
  }
  static std::int64_t slot(const GuardedTensor& slots, int row) {
    return static_cast<const std::int64_t*>(slots.on_host().data)[row];
  }

  DType cache_dtype() const { return case_.kv_dtype.value_or(case_.dtype); }
  bool moves_scales() const { return case_.kv_dtype && case_.kv_scale == KvScale::token_head; }
  // Whether a launch writes this one of caches().
  bool is_written(std::size_t cache) const {
    return cache < (moves_scales() ? 4u : 2u) && (cache % 2 == 0 || !case_.v_in_k);
  }
  static TensorShape list(std::int64_t size) { return {.rank = 1, .shape = {size}, .strides = {1}}; }
  TensorShape of_cache(std::int64_t dim) const {
    return arrange(case_.layout, {case_.pages, case_.page_size, case_.heads, dim},
                   dim == 1 ? DType::fp32 : cache_dtype());
  }
  TensorShape of_source(std::int64_t dim) const {
    return arrange(case_.from_layout, {case_.from_pages, case_.from_page_size, case_.heads, dim},
                   dim == 1 ? DType::fp32 : cache_dtype());
  }
  // The bytes of a row of all heads; caches 2 and 3 are scales.
  std::size_t row_bytes(std::size_t cache) const {
    const auto heads = static_cast<std::size_t>(case_.heads);
    if (cache >= 2) return heads * sizeof(float);
    return heads * static_cast<std::size_t>(cache == 0 ? spec_.head_dim : spec_.head_dim_v) *
           size_of(cache_dtype());
  }

  // k, v and their scales; their sources.
  std::vector<GuardedTensor*> caches() {
    return {&k_, &v_, &k_scale_, &v_scale_, &k_from_, &v_from_, &k_scale_from_, &v_scale_from_};
  }
  // Any bytes, NaN of every kind among them.
  static void fill(GuardedTensor& tensor, std::mt19937& random) {
    const Tensor t = tensor.on_host();
    const std::size_t element = size_of(t.dtype);
    for (std::int64_t page = 0; page < t.shape[0]; ++page)
      for (std::int64_t row = 0; row < t.shape[1]; ++row)
        for (std::int64_t head = 0; head < t.shape[2]; ++head) {
          const std::int64_t first = page * t.strides[0] + row * t.strides[1] + head * t.strides[2];
          auto* const at = static_cast<std::byte*>(t.data) + first * static_cast<std::int64_t>(element);
          for (std::size_t i = 0; i < static_cast<std::size_t>(t.shape[3]) * element; ++i)
            at[i] = static_cast<std::byte>(random() & 0xff);
        }
  }
  void fill_slots(std::mt19937& random) {
    const auto slots_of = [](GuardedTensor& t) { return static_cast<std::int64_t*>(t.on_host().data); };
    std::vector<std::int64_t> places(
        static_cast<std::size_t>(std::max<std::int64_t>(num_slots(), case_.rows)));
    std::iota(places.begin(), places.end(), 0);  // those beyond the caches are skipped
    std::shuffle(places.begin(), places.end(), random);
    const std::int64_t sources = std::max<std::int64_t>(num_sources(), 1);
    for (int i = 0; i < case_.rows; ++i) {
      std::int64_t &from = slots_of(from_slots_)[i], &to = slots_of(to_slots_)[i];
      from = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(sources));
      to = places[static_cast<std::size_t>(i)];
      if (!case_.wild) continue;
      constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();
      if (i % 7 == 1) to = i % 2 ? -1 - i : -huge;
      if (i % 7 == 2) from = i % 2 ? -1 - i : -huge;
      if (i % 11 == 3) to = i % 2 ? num_slots() : huge - i;
      if (i % 11 == 4) from = i % 2 ? huge - i : num_sources();
    }
  }

  Tensor source(const GuardedTensor& cache, const GuardedTensor& other) const {
    if (case_.from == From::others) return other.on_device();
    Tensor t = cache.on_device();
    if (case_.from == From::themselves) return t;
    t.data = static_cast<char*>(t.data) + t.strides[0] * static_cast<std::int64_t>(size_of(t.dtype));
    --t.shape[0];
    return t;
  }
  static Tensor scales(Tensor t) {
    t.rank = 3;
    return t;
  }
  void make_args() {
    args_.k = k_.on_device();
    args_.k_from = source(k_, k_from_);
    if (moves_scales()) {
      args_.k_scale = scales(k_scale_.on_device());
      args_.k_scale_from = scales(source(k_scale_, k_scale_from_));
    }
    if (!case_.v_in_k) {
      args_.v = v_.on_device();
      args_.v_from = source(v_, v_from_);
      if (moves_scales()) {
        args_.v_scale = scales(v_scale_.on_device());
        args_.v_scale_from = scales(source(v_scale_, v_scale_from_));
      }
    }
    args_.from_slots = from_slots_.on_device();
    args_.to_slots = to_slots_.on_device();
    if (case_.from != From::others) args_.workspace = workspace_.on_device();
  }

  // Whether the caches are the oracle's, if the launch has not written the sources.
  testing::AssertionResult agrees_with_oracle() {
    if (case_.from != From::others) return testing::AssertionSuccess();
    AttentionArgs args = args_;
    const std::pair<TensorMember, GuardedTensor*> members[] = {{&AttentionArgs::k, &k_},
                                                               {&AttentionArgs::v, &v_},
                                                               {&AttentionArgs::k_from, &k_from_},
                                                               {&AttentionArgs::v_from, &v_from_},
                                                               {&AttentionArgs::k_scale, &k_scale_},
                                                               {&AttentionArgs::v_scale, &v_scale_},
                                                               {&AttentionArgs::k_scale_from, &k_scale_from_},
                                                               {&AttentionArgs::v_scale_from, &v_scale_from_},
                                                               {&AttentionArgs::from_slots, &from_slots_},
                                                               {&AttentionArgs::to_slots, &to_slots_}};
    for (const auto& [member, tensor] : members)
      if (args.*member) (args.*member)->data = tensor->on_host().data;
    const verify::Report report = verify::compare(verify::oracle_of(spec_, args));
    if (!report.ok()) return testing::AssertionFailure() << case_.str() << "\n" << report.str();
    return testing::AssertionSuccess();
  }

  const CopyCase case_;
  const AttentionSpec spec_;
  GuardedTensor k_, v_, k_scale_, v_scale_, k_from_, v_from_, k_scale_from_, v_scale_from_, from_slots_,
      to_slots_, workspace_;
  AttentionArgs args_;
  std::vector<std::vector<std::byte>> before_;  // of caches()
  int copied_ = 0;
};

}  // namespace flashjit::testing_support
