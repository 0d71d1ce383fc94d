#include "runtime/cuda/tensor_maps.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "runtime/cuda/driver.hpp"
#include "templates/shared/backward_sm90a_layout.h"
#include "templates/shared/backward_sm90a_wide_layout.h"
#include "templates/shared/gathered.h"
#include "templates/shared/layout.h"
#include "templates/shared/paged_forward_params.h"

namespace flashjit::cuda {
namespace {

static_assert(sizeof(device::TensorMap) == sizeof(CUtensorMap) &&
              alignof(device::TensorMap) == alignof(CUtensorMap));

// element_bytes, box_columns: 2 and a panel, but for 8-bit keys and values. Strides are in elements.
TensorMapShape shape_of(const device::TensorView& tensor, int batch, int heads, int rows, int dim,
                        int box_rows, int element_bytes = 2, int box_columns = device::Sm90aLayout::panel) {
  using Size = unsigned long long;
  // The view's stride is 0 in a dimension with one index, where any stride would do; 16 is a legal one.
  const auto bytes = [&](int size, std::int64_t stride) {
    return size > 1 ? static_cast<Size>(stride * element_bytes) : Size{16};
  };
  return {.sizes = {static_cast<Size>(dim), static_cast<Size>(rows), static_cast<Size>(heads),
                    static_cast<Size>(batch)},
          .strides = {bytes(rows, tensor.row_stride), bytes(heads, tensor.head_stride),
                      bytes(batch, tensor.batch_stride)},
          .box = {static_cast<unsigned>(box_columns), static_cast<unsigned>(box_rows), 1, 1}};
}

class Encoder {
 public:
  explicit Encoder(DType dtype)
      : encode_(driver().TensorMapEncodeTiled),
        type_(dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16) {}

  void operator()(const char* name, const device::TensorView& tensor, const TensorMapShape& shape,
                  device::TensorMap& map) const {
    make(name, tensor, shape, type_, CU_TENSOR_MAP_SWIZZLE_128B, map);
  }
  // 8-bit elements, whose rows lie in shared memory as they do in the tensor.
  void stored(const char* name, const device::TensorView& tensor, const TensorMapShape& shape, int bytes,
              device::TensorMap& map) const {
    make(name, tensor, shape, bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
         CU_TENSOR_MAP_SWIZZLE_NONE, map);
  }

 private:
  void make(const char* name, const device::TensorView& tensor, const TensorMapShape& shape,
            CUtensorMapDataType type, CUtensorMapSwizzle swizzle, device::TensorMap& map) const {
    const unsigned steps[] = {1, 1, 1, 1};
    const CUresult result =
        encode_(reinterpret_cast<CUtensorMap*>(&map), type, 4, tensor.data, shape.sizes.data(),
                shape.strides.data(), shape.box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) refuse_strides(name, tensor, result);
  }

  [[noreturn]] static void refuse_strides(const char* name, const device::TensorView& tensor,
                                          CUresult result) {
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " with strides " + std::to_string(tensor.batch_stride) + " (batch), " +
                    std::to_string(tensor.row_stride) + " (rows) and " + std::to_string(tensor.head_stride) +
                    " (heads) cannot be copied by sm_90a's copy engine, which takes strides from 0 to 2^39 "
                    "elements: " +
                    error_text(result) + "; copy the tensor, or ask for target sm_90");
  }

  decltype(DriverApi::TensorMapEncodeTiled) encode_;
  CUtensorMapDataType type_;
};

}  // namespace

int stored_element_bytes(const AttentionSpec& spec) {
  return device::Sm90aLayout::stored_row(std::max(spec.key_elements(), spec.head_dim_v)) > 256 ? 4 : 1;
}

TensorMapShapes tensor_map_shapes(const AttentionSpec& spec, const KernelConfig& config,
                                  const device::Sm90aForwardParams& p) {
  const int batch = spec.varlen ? 1 : p.batch;
  const int rows_q = spec.varlen ? p.total_q : p.seqlen_q;
  int batch_k = batch, rows_k = spec.varlen ? p.total_k : p.seqlen_k, box_k = config.block_n;
  if (spec.gathered) rows_k -= device::gathered_keys(p).pad + device::gathered_keys(p).keys;
  const auto keys = [&](const device::TensorView& tensor, int dim) {
    if (!spec.kv_dtype) return shape_of(tensor, batch_k, p.num_heads_kv, rows_k, dim, box_k);
    TensorMapShape shape = shape_of(tensor, batch_k, p.num_heads_kv, rows_k, dim, box_k, 1,
                                    spec.has_kv_scales() ? device::Sm90aLayout::stored_row(dim) : dim);
    shape.sizes[0] /= static_cast<unsigned>(stored_element_bytes(spec));
    shape.box[0] /= static_cast<unsigned>(stored_element_bytes(spec));
    return shape;
  };
  if (spec.paged) {
    const auto& paged = device::with_pages(p);
    batch_k = paged.pages.num_pages;
    rows_k = paged.pages.page_size;
    box_k = paged.box_keys;
  }
  TensorMapShapes shapes{shape_of(p.q, batch, p.num_heads_q, rows_q, spec.head_dim, config.block_m),
                         keys(p.k, spec.key_elements()), keys(p.v, spec.head_dim_v)};
  if (config.pack_gqa) {
    std::swap(shapes.q.sizes[1], shapes.q.sizes[2]);
    std::swap(shapes.q.strides[0], shapes.q.strides[1]);
    const auto heads = static_cast<unsigned>(p.packed_heads);
    shapes.q.box = {device::Sm90aLayout::panel, heads, static_cast<unsigned>(config.block_m) / heads, 1};
  }
  return shapes;
}

void encode_tensor_maps(const AttentionSpec& spec, const KernelConfig& config,
                        const device::Sm90aForwardParams& p, device::ForwardMaps& maps) {
  const Encoder encode(spec.dtype);
  const TensorMapShapes shapes = tensor_map_shapes(spec, config, p);
  encode("q", p.q, shapes.q, maps.q);
  if (shapes.k.sizes[1] == 0 ||
      shapes.k.sizes[3] == 0) {  // no tile has a block of keys, but kernels prefetch every map
    maps.k = maps.v = maps.q;
    return;
  }
  if (spec.kv_dtype) {
    encode.stored("k", p.k, shapes.k, stored_element_bytes(spec), maps.k);
    encode.stored("v", p.v, shapes.v, stored_element_bytes(spec), maps.v);
    return;
  }
  encode("k", p.k, shapes.k, maps.k);
  encode("v", p.v, shapes.v, maps.v);
}

GatheredMapShapes gathered_map_shapes(const AttentionSpec& spec, const KernelConfig& config,
                                      const device::Sm90aForwardParams& p) {
  const device::GatheredKeys& gathered = device::gathered_keys(p);
  const auto keys = [&](const device::TensorView& tensor, int dim) {
    return shape_of(tensor, p.batch, p.num_heads_kv, gathered.keys, dim, config.block_n);
  };
  return {keys(gathered.k, spec.head_dim), keys(gathered.v, spec.head_dim_v)};
}

void encode_gathered_maps(const AttentionSpec& spec, const KernelConfig& config,
                          const device::Sm90aForwardParams& p, device::GatheredMaps& maps) {
  const device::GatheredKeys& gathered = device::gathered_keys(p);
  if (gathered.keys == 0) {  // as above
    maps.k_gathered = maps.k, maps.v_gathered = maps.v;
    return;
  }
  const Encoder encode(spec.dtype);
  const GatheredMapShapes shapes = gathered_map_shapes(spec, config, p);
  encode("k_gathered", gathered.k, shapes.k, maps.k_gathered);
  encode("v_gathered", gathered.v, shapes.v, maps.v_gathered);
}

BackwardMapShapes backward_map_shapes(const AttentionSpec& spec, const device::BackwardParams& p) {
  const int batch = spec.varlen ? 1 : p.batch;
  const int rows_q = spec.varlen ? p.total_q : p.seqlen_q, rows_k = spec.varlen ? p.total_k : p.seqlen_k;
  const int box = device::backward_is_wide(spec.head_dim, spec.head_dim_v)
                      ? device::Sm90aWideLayout::box_rows
                      : device::Sm90aBackwardLayout::box_rows;
  return {shape_of(p.q, batch, p.num_heads_q, rows_q, spec.head_dim, box),
          shape_of(p.k, batch, p.num_heads_kv, rows_k, spec.head_dim, box),
          shape_of(p.v, batch, p.num_heads_kv, rows_k, spec.head_dim_v, box),
          shape_of(p.d_o, batch, p.num_heads_q, rows_q, spec.head_dim_v, box)};
}

void encode_backward_maps(const AttentionSpec& spec, const device::BackwardParams& p,
                          device::BackwardMaps& maps) {
  const Encoder encode(spec.dtype);
  const BackwardMapShapes shapes = backward_map_shapes(spec, p);
  const bool rows = shapes.q.sizes[1] > 0, keys = shapes.k.sizes[1] > 0;
  if (rows) {
    encode("q", p.q, shapes.q, maps.q);
    encode("do", p.d_o, shapes.d_o, maps.d_o);
  }
  if (keys) {
    encode("k", p.k, shapes.k, maps.k);
    encode("v", p.v, shapes.v, maps.v);
  }
  // Nothing is copied without rows or without keys, but kernels prefetch every map.
  if (!rows) maps.q = maps.d_o = maps.k;
  if (!keys) maps.k = maps.v = maps.q;
}

}  // namespace flashjit::cuda
