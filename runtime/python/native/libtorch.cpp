#include "libtorch.hpp"

#include <dlfcn.h>

#include <algorithm>

namespace flashjit::python {
namespace {

template <typename Function>
bool find(void* library, const char* name, Function& to) {
  void* const found = dlsym(library, name);
  to = reinterpret_cast<Function>(found);
  return found != nullptr;
}

const LibTorch* load() {
  // PyTorch's libraries are no others' to see, but the loader knows them by name.
  void* const cpu = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!cpu) return nullptr;
  auto& t = *new LibTorch{};
  const bool all = find(cpu, "aoti_torch_library_init_impl", t.aoti_torch_library_init_impl) &&
                   find(cpu, "torch_library_impl", t.torch_library_impl) &&
                   find(cpu, "torch_call_dispatcher", t.torch_call_dispatcher) &&
                   find(cpu, "torch_delete_list", t.torch_delete_list) &&
                   find(cpu, "torch_list_size", t.torch_list_size) &&
                   find(cpu, "torch_list_get_item", t.torch_list_get_item) &&
                   find(cpu, "torch_delete_string", t.torch_delete_string) &&
                   find(cpu, "torch_string_length", t.torch_string_length) &&
                   find(cpu, "torch_string_c_str", t.torch_string_c_str) &&
                   find(cpu, "aoti_torch_new_uninitialized_tensor", t.aoti_torch_new_uninitialized_tensor) &&
                   find(cpu, "aoti_torch_delete_tensor_object", t.aoti_torch_delete_tensor_object) &&
                   find(cpu, "aoti_torch_empty_strided", t.aoti_torch_empty_strided) &&
                   find(cpu, "aoti_torch_copy_", t.aoti_torch_copy_) &&
                   find(cpu, "aoti_torch_get_data_ptr", t.aoti_torch_get_data_ptr) &&
                   find(cpu, "aoti_torch_get_dim", t.aoti_torch_get_dim) &&
                   find(cpu, "aoti_torch_get_sizes", t.aoti_torch_get_sizes) &&
                   find(cpu, "aoti_torch_get_strides", t.aoti_torch_get_strides) &&
                   find(cpu, "aoti_torch_get_dtype", t.aoti_torch_get_dtype) &&
                   find(cpu, "aoti_torch_get_device_type", t.aoti_torch_get_device_type) &&
                   find(cpu, "aoti_torch_get_device_index", t.aoti_torch_get_device_index) &&
                   find(cpu, "aoti_torch_device_type_cpu", t.aoti_torch_device_type_cpu) &&
                   find(cpu, "aoti_torch_device_type_cuda", t.aoti_torch_device_type_cuda) &&
                   find(cpu, "aoti_torch_dtype_float32", t.aoti_torch_dtype_float32) &&
                   find(cpu, "aoti_torch_dtype_float16", t.aoti_torch_dtype_float16) &&
                   find(cpu, "aoti_torch_dtype_bfloat16", t.aoti_torch_dtype_bfloat16) &&
                   find(cpu, "aoti_torch_dtype_uint8", t.aoti_torch_dtype_uint8) &&
                   find(cpu, "aoti_torch_grad_mode_is_enabled", t.aoti_torch_grad_mode_is_enabled);
  if (void* const cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY))
    find(cuda, "aoti_torch_get_current_cuda_stream", t.aoti_torch_get_current_cuda_stream);
  return all ? &t : nullptr;
}

struct Dtype {
  std::int32_t of_torch;
  flashjit_dtype dtype;
};
// The dtypes of which kernels have gradients, and bytes.
const Dtype (&dtypes())[4] {
  const LibTorch& t = *libtorch();
  static const Dtype all[] = {{t.aoti_torch_dtype_float32(), FLASHJIT_FP32},
                              {t.aoti_torch_dtype_float16(), FLASHJIT_FP16},
                              {t.aoti_torch_dtype_bfloat16(), FLASHJIT_BF16},
                              {t.aoti_torch_dtype_uint8(), FLASHJIT_UINT8}};
  return all;
}

}  // namespace

const LibTorch* libtorch() {
  static const LibTorch* const all = load();
  return all;
}

TorchTensor TorchTensor::undefined() {
  TorchTensor made;
  libtorch()->aoti_torch_new_uninitialized_tensor(&made.handle_);
  return made;
}

TorchTensor TorchTensor::empty(const flashjit_tensor& of) {
  const LibTorch& t = *libtorch();
  TorchTensor made;
  for (const Dtype& one : dtypes()) {
    if (one.dtype != of.dtype) continue;
    const bool is_cuda = of.device_kind == FLASHJIT_CUDA;
    t.aoti_torch_empty_strided(of.rank, of.shape, of.strides, one.of_torch,
                               is_cuda ? t.aoti_torch_device_type_cuda() : t.aoti_torch_device_type_cpu(),
                               is_cuda ? of.device_index : 0, &made.handle_);
  }
  return made;
}

bool TorchTensor::read(flashjit_tensor& to) const {
  const LibTorch& t = *libtorch();
  std::int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0, type = 0, index = 0;
  void* data = nullptr;
  if (t.aoti_torch_get_data_ptr(handle_, &data) != 0 || t.aoti_torch_get_dim(handle_, &rank) != 0 ||
      rank > FLASHJIT_MAX_RANK || t.aoti_torch_get_sizes(handle_, &sizes) != 0 ||
      t.aoti_torch_get_strides(handle_, &strides) != 0 || t.aoti_torch_get_dtype(handle_, &dtype) != 0 ||
      t.aoti_torch_get_device_type(handle_, &type) != 0 ||
      t.aoti_torch_get_device_index(handle_, &index) != 0)
    return false;
  const bool is_cuda = type == t.aoti_torch_device_type_cuda();
  if (!is_cuda && type != t.aoti_torch_device_type_cpu()) return false;
  if (!data && std::none_of(sizes, sizes + rank, [](std::int64_t size) { return size == 0; })) return false;
  to = {};
  to.data = data;
  to.rank = static_cast<std::int32_t>(rank);
  to.device_kind = is_cuda ? FLASHJIT_CUDA : FLASHJIT_CPU;
  to.device_index = is_cuda ? index : 0;
  std::copy_n(sizes, rank, to.shape);
  std::copy_n(strides, rank, to.strides);
  for (const Dtype& one : dtypes())
    if (one.of_torch == dtype) {
      to.dtype = one.dtype;
      return true;
    }
  return false;
}

}  // namespace flashjit::python
