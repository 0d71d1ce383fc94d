// The kernels of PyTorch's operators in C++ have this in common. They take no GIL.
#pragma once

#include <cstddef>

#include "libtorch.hpp"

namespace flashjit::python {

// The numbers of a call of q, k and v alone.
constexpr std::size_t tensors_of_call = 3, most_numbers = 24;

// The arguments of a launch.
struct TorchArguments {
  flashjit_argument all[tensors_of_call + most_numbers + 10];
  std::size_t count = 0;
  void add(const flashjit_argument& one) { all[count++] = one; }
  void add(std::int32_t id, const flashjit_tensor& tensor) {
    all[count].id = id;
    all[count++].value.tensor = &tensor;
  }
};

// A new tensor on the device of `like`, row-major. Its description is `to`.
TorchTensor make(const flashjit_tensor& like, flashjit_dtype dtype, int rank, const std::int64_t* sizes,
                 flashjit_tensor& to);

// Takes a tensor [batch, heads, seqlen, head_dim] as [batch, seqlen, heads, head_dim].
void put_rows_first(flashjit_tensor& tensor);

// Throw what PyTorch makes a RuntimeError of.
[[noreturn]] void fail(const flashjit_tensor& q, const char* what);  // there is no memory for it
[[noreturn]] void fail_with_last();                                  // the library's last failure

// The engine, spec and layout of a launch.
struct TorchLaunch {
  flashjit_engine* engine = nullptr;
  const flashjit_spec* spec = nullptr;
  bool heads_first = false;
};
// Launches on PyTorch's current stream with a workspace, if there is use for one. q and k: [batch, seqlen,
// heads, head_dim].
void launch(const TorchLaunch& of, const flashjit_tensor& q, const flashjit_tensor& k,
            TorchArguments& arguments);

enum OfBackward { of_q, of_k, of_v, of_o, of_lse, of_do, tensors_of_backward };
// Computes the gradients of q, k and v. `arguments` are the numbers. False if a tensor has no memory that
// flashjit can read.
bool launch_backward(const TorchLaunch& of, const TorchTensor* const (&given)[tensors_of_backward],
                     TorchArguments& arguments, TorchTensor (&gradients)[tensors_of_call]);

}  // namespace flashjit::python
