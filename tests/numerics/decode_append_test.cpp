// A decode that appends against append_kv and a decode without: every byte is the same. Both are held to the
// float64 oracle in tests of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "codegen/families/kernel_family.hpp"
#include "runtime/cuda/memory.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/guarded_tensor.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/ds_mla.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

struct AppendingCase {
  int seqlen_q = 1, rows = 300;                     // rows: of an entry's cache
  std::vector<int> lengths = {300, 17, 1, 0, 299};  // keys of the entries, new ones included
  int heads_q = 4, heads_kv = 2, head_dim = 64, head_dim_v = 0;
  DType dtype = DType::bf16;
  bool packed = false;
  bool v_in_k = false;  // there is no V
  int page_size = 0;
  std::optional<DType> kv_dtype = {};
  KvScale kv_scale = KvScale::tensor;
  std::optional<Rotary> rotary = {};
  bool in_place = false;  // q_out is q
  std::vector<Mask> mask = {CausalMask{}};

  AttentionSpec decode() const {
    AttentionSpec spec{.op = Operation::decode,
                       .dtype = dtype,
                       .head_dim = head_dim,
                       .head_dim_v = head_dim_v,
                       .mask = mask,
                       .varlen = packed,
                       .paged = page_size > 0,
                       .v_in_k = v_in_k,
                       .kv_dtype = kv_dtype};
    if (spec.has_kv_scales()) spec.kv_scale = kv_scale;
    return spec;
  }
  AttentionSpec append_kv() const {
    AttentionSpec spec = decode();
    spec.op = Operation::append_kv;
    spec.mask.clear();
    spec.rotary = rotary;
    return spec.validated();
  }
  AttentionSpec both() const {
    AttentionSpec spec = decode();
    spec.append = true;
    spec.rotary = rotary;
    return spec.validated();
  }
};

// A launch's tensors. Equal seeds give equal contents.
class Tensors {
 public:
  Tensors(TestDevice& device, const AppendingCase& c) : device_(device) {
    const auto batch = static_cast<std::int64_t>(c.lengths.size());
    std::vector<std::int32_t> starts = {0}, positions;
    for (std::size_t b = 0; b < c.lengths.size(); ++b) {
      const int rows =
          c.packed ? static_cast<int>(b * 5 % static_cast<std::size_t>(c.seqlen_q + 1)) : c.seqlen_q;
      starts.push_back(starts.back() + rows);
      positions.push_back(c.lengths[b] - rows);
    }
    const int dim_v = c.head_dim_v ? c.head_dim_v : c.head_dim;
    const auto of_rows = [&](std::int64_t heads, std::int64_t dim) -> std::vector<std::int64_t> {
      if (c.packed) return {starts.back(), heads, dim};
      return {batch, c.seqlen_q, heads, dim};
    };
    const std::int64_t pages = c.page_size ? (c.rows + c.page_size - 1) / c.page_size : 1;
    const std::vector<std::int64_t> of_scales = {c.page_size ? batch * pages : batch,
                                                 c.page_size ? c.page_size : c.rows, c.heads_kv};
    std::vector<std::int64_t> of_cache = of_scales;
    of_cache.push_back(c.decode().key_elements());
    add(&AttentionArgs::q, c.dtype, of_rows(c.heads_q, c.head_dim));
    add(&AttentionArgs::k_new, c.dtype, of_rows(c.heads_kv, c.head_dim));
    const bool is_ds_mla = c.kv_dtype == DType::fp8_ds_mla;
    add(&AttentionArgs::k, is_ds_mla ? DType::uint8 : c.kv_dtype.value_or(c.dtype), of_cache);
    if (is_ds_mla) {
      verify::fill_random_ds_mla(at(&AttentionArgs::k).on_host(), 3);
      at(&AttentionArgs::k).upload();
    }
    of_cache.back() = dim_v;
    if (!c.v_in_k) {
      add(&AttentionArgs::v_new, c.dtype, of_rows(c.heads_kv, dim_v));
      add(&AttentionArgs::v, c.kv_dtype.value_or(c.dtype), of_cache);
    }
    add(&AttentionArgs::o, c.dtype, of_rows(c.heads_q, dim_v));
    if (c.packed) {
      add(&AttentionArgs::lse, DType::fp32, {c.heads_q, starts.back()});
      table(&AttentionArgs::cu_seqlens_q, {batch + 1}, starts);
    } else {
      add(&AttentionArgs::lse, DType::fp32, {batch, c.heads_q, c.seqlen_q});
    }
    if (c.decode().has_kv_scales()) {
      const bool of_tokens = c.kv_scale == KvScale::token_head;
      const std::vector<std::int64_t> sizes =
          of_tokens ? of_scales : std::vector<std::int64_t>{c.kv_scale == KvScale::head ? c.heads_kv : 1};
      for (const TensorMember scale : {&AttentionArgs::k_scale, &AttentionArgs::v_scale}) {
        const Tensor t = add(scale, DType::fp32, sizes).on_host();
        std::fill_n(static_cast<float*>(t.data), t.shape[0] * t.strides[0], 1.0f / 32);
        at(scale).upload();
      }
    }
    table(&AttentionArgs::seqlens_k, {batch}, {c.lengths.begin(), c.lengths.end()});
    table(&AttentionArgs::append_positions, {batch}, positions);
    if (c.page_size) {
      std::vector<std::int32_t> ids(static_cast<std::size_t>(batch * pages));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
      table(&AttentionArgs::page_table, {batch, pages}, ids);
    }
    if (c.rotary && c.rotary->q) {
      add(&AttentionArgs::q_out, c.dtype, of_rows(c.heads_q, c.head_dim));
      if (c.in_place) args_.q_out = args_.q;
    }
  }

  // The arguments that a launch of the spec takes.
  AttentionArgs args(const AttentionSpec& spec, const Kernel& kernel, const Shape& shape) {
    AttentionArgs args = args_;
    if (kernel.workspace_bytes(shape) > 0 && !workspace_) {
      workspace_ = std::make_unique<cuda::DeviceBuffer>(device_.context(), kernel.workspace_bytes(shape));
      args.workspace =
          Tensor::contiguous(workspace_->data(), DType::int32, device_.device(),
                             {static_cast<std::int64_t>(kernel.workspace_bytes(shape) / sizeof(int))});
    }
    for (const Argument& argument : arguments)
      if (argument.tensor() && !has_argument(spec, argument)) (args.*argument.tensor()).reset();
    return args;
  }
  // The elements after a launch.
  std::vector<std::byte> elements(TensorMember member) {
    at(member).download();
    return at(member).elements();
  }
  bool has(TensorMember member) const { return (args_.*member).has_value(); }

 private:
  GuardedTensor& at(TensorMember member) {
    return *std::find_if(all_.begin(), all_.end(), [&](const Named& n) {
              return n.member == member;
            })->tensor;
  }
  GuardedTensor& add(TensorMember member, DType dtype, const std::vector<std::int64_t>& sizes) {
    const Tensor like = Tensor::contiguous(nullptr, dtype, {}, sizes);
    auto tensor =
        std::make_unique<GuardedTensor>(device_, dtype, TensorShape{like.rank, like.shape, like.strides},
                                        Poison::nan, GuardedTensor::Fence::after);
    verify::RandomOptions options;
    if (dtype == DType::int8) options.scale = 32;
    verify::fill_random(tensor->on_host(), static_cast<std::uint64_t>(all_.size()) + 1, options);
    tensor->upload();
    args_.*member = tensor->on_device();
    all_.push_back({member, std::move(tensor)});
    return *all_.back().tensor;
  }
  void table(TensorMember member, const std::vector<std::int64_t>& sizes,
             const std::vector<std::int32_t>& values) {
    GuardedTensor& tensor = add(member, DType::int32, sizes);
    std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(tensor.on_host().data));
    tensor.upload();
  }

  struct Named {
    TensorMember member;
    std::unique_ptr<GuardedTensor> tensor;
  };
  TestDevice& device_;
  std::vector<Named> all_;
  std::unique_ptr<cuda::DeviceBuffer> workspace_;
  AttentionArgs args_;
};

class DecodeAppends : public OnEveryDevice {
 protected:
  void expect_equal(const AppendingCase& c) {
    const AttentionSpec both = c.both();
    SCOPED_TRACE(both.to_json() + " " + std::to_string(c.seqlen_q) + " rows");
    if (!why_unsupported(both, on().engine().target()).empty()) return;
    const Shape shape = {.batch = static_cast<int>(c.lengths.size()),
                         .seqlen_q = c.seqlen_q,
                         .seqlen_k = c.rows,
                         .num_heads_q = c.heads_q,
                         .num_heads_kv = c.heads_kv,
                         .page_size = c.page_size};
    Tensors apart(on(), c), together(on(), c);
    const auto launch = [&](Tensors& tensors, const AttentionSpec& spec, bool reads_rotated) {
      const Kernel& kernel = on().engine().get(spec, shape);
      AttentionArgs args = tensors.args(spec, kernel, shape);
      if (reads_rotated) args.q = tensors.args(both, kernel, shape).q_out;
      kernel.launch(args);
      on().synchronize();
    };
    launch(apart, c.append_kv(), false);
    launch(apart, c.decode().validated(), c.rotary && c.rotary->q);
    launch(together, both, false);
    for (const TensorMember member :
         {&AttentionArgs::k, &AttentionArgs::v, &AttentionArgs::k_scale, &AttentionArgs::v_scale,
          &AttentionArgs::q, &AttentionArgs::q_out, &AttentionArgs::o, &AttentionArgs::lse}) {
      if (!together.has(member) || (member == &AttentionArgs::q_out && c.in_place)) continue;
      EXPECT_EQ(apart.elements(member), together.elements(member)) << argument_of(member).name;
    }
  }
};

TEST_P(DecodeAppends, AsTwoLaunchesDo) {
  const AppendingCase cases[] = {{},
                                 {.seqlen_q = 5, .packed = true, .page_size = 16},
                                 {.seqlen_q = 3, .page_size = 48, .rotary = Rotary{.q = true}},
                                 {.seqlen_q = 7,
                                  .dtype = DType::fp16,
                                  .packed = true,
                                  .rotary = Rotary{.dim = 20, .q = true},
                                  .in_place = true},
                                 {.seqlen_q = 4,
                                  .heads_q = 2,
                                  .head_dim = 128,
                                  .page_size = 16,
                                  .rotary = Rotary{.style = RotaryStyle::interleaved}},
                                 {.seqlen_q = 2,
                                  .heads_q = 16,
                                  .heads_kv = 1,
                                  .head_dim = 576,
                                  .head_dim_v = 512,
                                  .v_in_k = true,
                                  .page_size = 64,
                                  .rotary = Rotary{.first = 512, .q = true}},
                                 {.seqlen_q = 2,
                                  .heads_q = 16,
                                  .heads_kv = 1,
                                  .head_dim = 576,
                                  .head_dim_v = 512,
                                  .packed = true,
                                  .v_in_k = true,
                                  .page_size = 64,
                                  .kv_dtype = DType::fp8_ds_mla,
                                  .rotary = Rotary{.first = 512, .q = true}},
                                 // So many rows that sm_90a takes the forward's kernel.
                                 {.seqlen_q = 40,
                                  .lengths = std::vector(48, 200),
                                  .heads_q = 8,
                                  .page_size = 16,
                                  .rotary = Rotary{.q = true}}};
  for (const AppendingCase& c : cases)
    if (why_unsupported(c.both(), Target::parse(on().target())).empty() && takes_next(c.both(), 1))
      expect_equal(c);
}

TEST_P(DecodeAppends, QuantisedCaches) {
  for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2})
    for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head}) {
      const AppendingCase c{.seqlen_q = 2,
                            .page_size = 16,
                            .kv_dtype = kv_dtype,
                            .kv_scale = kv_scale,
                            .rotary = Rotary{.q = true}};
      if (takes_next(c.both())) expect_equal(c);
    }
}

FLASHJIT_ON_EVERY_DEVICE(DecodeAppends);

}  // namespace
}  // namespace flashjit::testing_support
