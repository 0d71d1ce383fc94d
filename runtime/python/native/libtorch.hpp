// PyTorch's stable C interface, found in the libraries that PyTorch has loaded: nothing is linked to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "runtime/flashjit.h"

namespace flashjit::python {

// Its functions return 0, or else say why on the standard error output. Null functions are missing.
struct LibTorch {
  using Handle = void*;         // a tensor
  using Value = std::uint64_t;  // an argument or a result: a tensor, a number, a list
  using Kernel = void (*)(Value* stack, std::uint64_t inputs, std::uint64_t outputs);

  int (*aoti_torch_library_init_impl)(const char* ns, const char* key, const char* file, std::uint32_t line,
                                      void** library);
  int (*torch_library_impl)(void* library, const char* op, Kernel kernel, std::uint64_t version);
  int (*torch_call_dispatcher)(const char* op, const char* overload, Value* stack, std::uint64_t version);
  int (*torch_delete_list)(void* list);
  int (*torch_list_size)(void* list, std::size_t* size);
  int (*torch_list_get_item)(void* list, std::size_t at, Value* item);
  int (*torch_delete_string)(void* text);
  int (*torch_string_length)(void* text, std::size_t* length);
  int (*torch_string_c_str)(void* text, const char** data);
  int (*aoti_torch_new_uninitialized_tensor)(Handle* made);
  int (*aoti_torch_delete_tensor_object)(Handle tensor);
  int (*aoti_torch_empty_strided)(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                                  std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                                  Handle* made);
  int (*aoti_torch_copy_)(Handle to, Handle from, std::int32_t without_waiting);
  int (*aoti_torch_get_data_ptr)(Handle tensor, void** data);
  int (*aoti_torch_get_dim)(Handle tensor, std::int64_t* rank);
  int (*aoti_torch_get_sizes)(Handle tensor, std::int64_t** sizes);
  int (*aoti_torch_get_strides)(Handle tensor, std::int64_t** strides);
  int (*aoti_torch_get_dtype)(Handle tensor, std::int32_t* dtype);
  int (*aoti_torch_get_device_type)(Handle tensor, std::int32_t* type);
  int (*aoti_torch_get_device_index)(Handle tensor, std::int32_t* index);
  std::int32_t (*aoti_torch_device_type_cpu)();
  std::int32_t (*aoti_torch_device_type_cuda)();
  std::int32_t (*aoti_torch_dtype_float32)();
  std::int32_t (*aoti_torch_dtype_float16)();
  std::int32_t (*aoti_torch_dtype_bfloat16)();
  std::int32_t (*aoti_torch_dtype_uint8)();
  bool (*aoti_torch_grad_mode_is_enabled)();
  int (*aoti_torch_get_current_cuda_stream)(std::int32_t device_index, void** stream);  // null: no CUDA

  static constexpr std::uint64_t version = std::uint64_t{2} << 56 | std::uint64_t{11} << 48;  // 2.11
};

// Null before PyTorch is loaded, and if it lacks one of them: it is older than 2.10.
const LibTorch* libtorch();

// An owned tensor of PyTorch, or none.
class TorchTensor {
 public:
  TorchTensor() = default;
  explicit TorchTensor(LibTorch::Value owned) : handle_(reinterpret_cast<LibTorch::Handle>(owned)) {}
  TorchTensor(TorchTensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  TorchTensor& operator=(TorchTensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~TorchTensor() {
    if (handle_) libtorch()->aoti_torch_delete_tensor_object(handle_);
  }
  // A tensor without elements or dtype, as operators return it where they have nothing to return.
  static TorchTensor undefined();
  // An uninitialised tensor; none if there is no memory, of which PyTorch has told already.
  static TorchTensor empty(const flashjit_tensor& of);

  LibTorch::Handle get() const { return handle_; }
  LibTorch::Value release() { return reinterpret_cast<LibTorch::Value>(std::exchange(handle_, nullptr)); }
  explicit operator bool() const { return handle_ != nullptr; }
  // False if it has no memory, or a dtype, device or rank that flashjit has not.
  bool read(flashjit_tensor& to) const;

 private:
  LibTorch::Handle handle_ = nullptr;
};

}  // namespace flashjit::python
