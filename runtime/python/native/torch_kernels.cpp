#include "torch_kernels.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "tensor.hpp"

namespace flashjit::python {
namespace {

// Whether elements with these strides fill memory without gaps, each at a place of its own.
bool is_dense(const flashjit_tensor& tensor) {
  int order[FLASHJIT_MAX_RANK];
  std::iota(order, order + tensor.rank, 0);
  std::sort(order, order + tensor.rank, [&](int a, int b) {
    if (tensor.shape[a] < 2 || tensor.shape[b] < 2) return tensor.shape[a] >= 2;
    return tensor.strides[a] < tensor.strides[b];
  });
  std::int64_t elements = 1;
  for (const int* i = order; i != order + tensor.rank && tensor.shape[*i] >= 2; ++i) {
    if (tensor.strides[*i] != elements) return false;
    elements *= tensor.shape[*i];
  }
  return true;
}

// Sets the strides of torch.empty_like(), which graphs have been told of gradients. In tensors that are not
// dense, PyTorch sorts dimensions by strides, but for those with stride 0.
void set_strides_like(const flashjit_tensor& like, flashjit_tensor& to) {
  if (is_dense(like)) return;
  int order[FLASHJIT_MAX_RANK];  // from the innermost
  std::iota(order, order + like.rank, 0);
  std::reverse(order, order + like.rank);
  const auto compare = [&](int a, int b) {  // > 0: b belongs inside a
    if (like.strides[a] == 0 || like.strides[b] == 0) return 0;
    if (like.strides[a] != like.strides[b]) return like.strides[a] > like.strides[b] ? 1 : -1;
    return like.shape[a] > like.shape[b] ? 1 : 0;
  };
  for (int i = 1; i < like.rank; ++i)
    for (int inner = i - 1, outer = i; inner >= 0; --inner) {
      const int compared = compare(order[inner], order[outer]);
      if (compared < 0) break;
      if (compared > 0) {
        std::swap(order[inner], order[outer]);
        outer = inner;
      }
    }
  std::int64_t elements = 1;
  for (const int* i = order; i != order + like.rank; ++i) {
    to.strides[*i] = elements;
    elements *= std::max<std::int64_t>(like.shape[*i], 1);
  }
}

TorchTensor make_like(const flashjit_tensor& like, flashjit_tensor& to) {
  to = like;
  set_strides_like(like, to);
  TorchTensor made = TorchTensor::empty(to);
  if (made && libtorch()->aoti_torch_get_data_ptr(made.get(), &to.data) != 0) return {};
  return made;
}

}  // namespace

TorchTensor make(const flashjit_tensor& like, flashjit_dtype dtype, int rank, const std::int64_t* sizes,
                 flashjit_tensor& to) {
  to = {};
  to.dtype = dtype;
  to.rank = rank;
  to.device_kind = like.device_kind;
  to.device_index = like.device_index;
  std::int64_t elements = 1;
  for (int i = rank - 1; i >= 0; --i) {
    to.shape[i] = sizes[i];
    to.strides[i] = elements;
    elements *= sizes[i];
  }
  TorchTensor made = TorchTensor::empty(to);
  if (made && libtorch()->aoti_torch_get_data_ptr(made.get(), &to.data) != 0) return {};
  return made;
}

void put_rows_first(flashjit_tensor& tensor) {
  std::swap(tensor.shape[1], tensor.shape[2]);
  std::swap(tensor.strides[1], tensor.strides[2]);
}

void fail(const flashjit_tensor& q, const char* what) {
  // Programs that try again with less look for this beginning.
  throw std::runtime_error(std::string(q.device_kind == FLASHJIT_CUDA ? "CUDA out of memory. " : "") +
                           "flashjit.attention has no memory for " + what);
}
void fail_with_last() {
  throw std::runtime_error(std::string("flashjit: ") + flashjit_last_error_message());
}

void launch(const TorchLaunch& of, const flashjit_tensor& q, const flashjit_tensor& k,
            TorchArguments& arguments) {
  flashjit_shape shape{};
  shape.struct_size = sizeof shape;
  const auto size = [](std::int64_t one) {
    if (one > INT32_MAX) throw std::runtime_error("flashjit: sizes of the tensors are beyond 2147483647");
    return static_cast<std::int32_t>(one);
  };
  shape.batch = size(q.shape[0]);
  shape.seqlen_q = size(q.shape[1]);
  shape.seqlen_k = size(k.shape[1]);
  shape.num_heads_q = size(q.shape[2]);
  shape.num_heads_kv = size(k.shape[2]);
  const flashjit_kernel* kernel = nullptr;
  std::size_t bytes = 0;
  if (flashjit_engine_get(of.engine, of.spec, &shape, &kernel) != FLASHJIT_OK ||
      flashjit_kernel_workspace(kernel, &shape, &bytes) != FLASHJIT_OK)
    fail_with_last();
  TorchTensor workspace;
  flashjit_tensor bytes_of_workspace;
  if (bytes > 0) {
    const auto elements = static_cast<std::int64_t>(bytes);
    workspace = make(q, FLASHJIT_UINT8, 1, &elements, bytes_of_workspace);
    if (!workspace) fail(q, "a workspace");
    arguments.add(FLASHJIT_ARG_WORKSPACE, bytes_of_workspace);
  }
  void* stream = nullptr;
  if (q.device_kind == FLASHJIT_CUDA &&
      libtorch()->aoti_torch_get_current_cuda_stream(q.device_index, &stream) != 0)
    throw std::runtime_error("flashjit: PyTorch did not tell its current stream");
  if (flashjit_kernel_launch(kernel, arguments.all, arguments.count, stream) != FLASHJIT_OK) fail_with_last();
}

bool launch_backward(const TorchLaunch& of, const TorchTensor* const (&given)[tensors_of_backward],
                     TorchArguments& arguments, TorchTensor (&gradients)[tensors_of_call]) {
  flashjit_tensor read[tensors_of_backward], written[tensors_of_call];
  for (int i = 0; i < tensors_of_backward; ++i)
    if (!given[i]->read(read[i])) return false;
  const flashjit_tensor& q = read[of_q];
  for (std::size_t i = 0; i < tensors_of_call; ++i) {
    gradients[i] = make_like(read[i], written[i]);
    if (!gradients[i]) fail(q, "gradients");
  }
  TorchTensor regular;
  if (flashjit_tensor& of_output = read[of_do]; !is_readable(of_output, q)) {
    flashjit_tensor to;
    regular = make(q, static_cast<flashjit_dtype>(q.dtype), of_output.rank, of_output.shape, to);
    if (!regular || libtorch()->aoti_torch_copy_(regular.get(), given[of_do]->get(), 1) != 0)
      fail(q, "a gradient");
    of_output = to;
  }
  if (of.heads_first)
    for (flashjit_tensor* const one : {&read[of_q], &read[of_k], &read[of_v], &read[of_o], &read[of_do],
                                       &written[0], &written[1], &written[2]})
      put_rows_first(*one);
  constexpr std::int32_t ids[] = {FLASHJIT_ARG_Q, FLASHJIT_ARG_K,   FLASHJIT_ARG_V,
                                  FLASHJIT_ARG_O, FLASHJIT_ARG_LSE, FLASHJIT_ARG_DO};
  constexpr std::int32_t ids_written[] = {FLASHJIT_ARG_DQ, FLASHJIT_ARG_DK, FLASHJIT_ARG_DV};
  for (std::size_t i = 0; i < std::size(ids); ++i) arguments.add(ids[i], read[i]);
  for (std::size_t i = 0; i < tensors_of_call; ++i) arguments.add(ids_written[i], written[i]);
  launch(of, q, read[of_k], arguments);
  return true;
}

}  // namespace flashjit::python
