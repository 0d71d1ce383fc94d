#include "runtime/wrap.hpp"

#include <algorithm>
#include <optional>
#include <string>

#include "codegen/base/shape.hpp"
#include "codegen/base/suggest.hpp"
#include "runtime/arguments/checks.hpp"

namespace flashjit {
namespace {

// The dtypes by the type codes of DLPack and the letters of array interfaces.
struct ForeignType {
  DType dtype;
  int code, bits;
  std::string_view typestr;
};
constexpr ForeignType foreign_types[] = {
    {DType::fp32, 2, 32, "f4"},   {DType::fp16, 2, 16, "f2"},   {DType::bf16, 4, 16, "V2"},
    {DType::bf16, 4, 16, "u2"},   {DType::int64, 0, 64, "i8"},  {DType::int32, 0, 32, "i4"},
    {DType::int8, 0, 8, "i1"},    {DType::uint8, 1, 8, "u1"},   {DType::uint8, 1, 8, "V1"},
    {DType::fp8_e4m3, 10, 8, ""}, {DType::fp8_e5m2, 12, 8, ""},
};

void check_rank(std::int64_t rank) {
  if (rank < 1 || rank > Tensor::max_rank)
    refuse_argument("a tensor to wrap has rank ", rank, "; 1 to ", Tensor::max_rank, " would work");
}

// The strides of any memory, in elements.
Tensor strided(void* data, DType dtype, Device device, std::span<const std::int64_t> shape,
               const std::int64_t* strides) {
  Tensor tensor = Tensor::contiguous(data, dtype, device, shape);
  for (const std::int64_t size : shape)
    if (size < 0) refuse_argument("a tensor to wrap has size ", size, ": sizes are at least 0");
  if (strides) std::copy_n(strides, shape.size(), tensor.strides.begin());
  return tensor;
}

}  // namespace

Tensor wrap(void* data, std::size_t count, DType dtype, Device device, std::span<const std::int64_t> shape) {
  check_rank(static_cast<std::int64_t>(shape.size()));
  Tensor tensor = strided(data, dtype, device, shape, nullptr);
  const std::optional<std::int64_t> elements = product_of(shape);
  if (!elements || static_cast<std::uint64_t>(*elements) != count)
    refuse_argument("memory of ", count, " elements cannot be a tensor ", shape_text(tensor), ", which has ",
                    elements ? std::to_string(*elements) : "more than 64 bits count");
  return tensor;
}

Tensor wrap_dlpack(const DlpackTensor& t) {
  check_rank(t.ndim);
  const auto* const type =
      std::find_if(std::begin(foreign_types), std::end(foreign_types),
                   [&](const ForeignType& one) { return one.code == t.code && one.bits == t.bits; });
  if (type == std::end(foreign_types) || t.lanes != 1)
    refuse_argument("a DLPack tensor has type code ", int{t.code}, " with ", int{t.bits}, " bits and ",
                    int{t.lanes}, " lanes; fp32, fp16, bf16, fp8, int8, uint8, int32 or int64 would work");
  Device device;
  if (t.device_type == 2 || t.device_type == 13)
    device = {Device::Kind::cuda, t.device_id};
  else if (t.device_type != 1 && t.device_type != 3)
    refuse_argument("a DLPack tensor is on a device of type ", t.device_type,
                    "; 1 (cpu), 2 (cuda), 3 (pinned host memory) or 13 (managed memory) would work");
  return strided(static_cast<std::byte*>(t.data) + t.byte_offset, type->dtype, device,
                 {t.shape, static_cast<std::size_t>(t.ndim)}, t.strides);
}

Tensor wrap_array_interface(std::uintptr_t data, std::string_view typestr,
                            std::span<const std::int64_t> shape, std::span<const std::int64_t> byte_strides,
                            Device device) {
  check_rank(static_cast<std::int64_t>(shape.size()));
  // '<' little-endian, '|' of one byte, '=' as the machine.
  const bool native =
      !typestr.empty() && std::string_view("<|=").find(typestr.front()) != std::string_view::npos;
  const auto* const type =
      std::find_if(std::begin(foreign_types), std::end(foreign_types), [&](const ForeignType& one) {
        return native && !one.typestr.empty() && typestr.substr(1) == one.typestr;
      });
  if (type == std::end(foreign_types))
    refuse_argument("an array has typestr ", in_quotes(typestr),
                    "; <f4, <f2, <V2 (bf16), <i8, <i4, |i1 or |u1 would work");
  if (!byte_strides.empty() && byte_strides.size() != shape.size())
    refuse_argument("an array has ", byte_strides.size(), " strides and ", shape.size(), " dimensions");
  std::array<std::int64_t, Tensor::max_rank> strides{};
  const auto size = static_cast<std::int64_t>(size_of(type->dtype));
  for (std::size_t i = 0; i < byte_strides.size(); ++i) {
    if (byte_strides[i] % size)
      refuse_argument("an array has a stride of ", byte_strides[i], " bytes, which is no multiple of its ",
                      size, "-byte elements");
    strides[i] = byte_strides[i] / size;
  }
  return strided(reinterpret_cast<void*>(data), type->dtype, device, shape,
                 byte_strides.empty() ? nullptr : strides.data());
}

}  // namespace flashjit
