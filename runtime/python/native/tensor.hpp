// Tensors of other frameworks: their memory by DLPack, their allocators and their streams.
#pragma once

#include <cstdint>

#include "dlpack.hpp"
#include "python.hpp"
#include "runtime/flashjit.h"

namespace flashjit::python {

// A type of tensors, looked at once. Lives as long as the process.
struct Framework {
  PyObject* type = nullptr;
  const dlpack::ExchangeApi* api = nullptr;  // null: __dlpack__
  bool is_numpy = false;                     // always on the CPU; dtypes of ml_dtypes by a view
  bool has_memory = true;                    // false: tensors may stand for others, which a trace will have
  // Functions of the framework and of flashjit._frameworks, or None: is_grad_enabled() and
  // is_deterministic(), where tensors have requires_grad; allocate(like, shape, dtype), finish(output) and
  // current_stream(device_index). watching: a tuple of functions, of which one says so if the framework has
  // to see each call.
  PyObject *is_grad_enabled = nullptr, *is_deterministic = nullptr, *allocate = nullptr, *finish = nullptr,
           *current_stream = nullptr, *watching = nullptr;
};
// Null with an exception if the object is no tensor; `name` is the argument's.
const Framework* framework_of(PyObject* object, const char* name);

// Whether the object is of a type of tensors; other objects that count as numbers are numbers.
bool is_tensor(PyObject* object);

// A tensor whose memory a framework holds. The caller keeps the object alive; capsules are kept here.
class Tensor {
 public:
  // False with an exception if flashjit cannot take it.
  bool read(PyObject* object, const char* name);
  // Whether the framework wants a gradient by this tensor, of which a launch knows nothing; -1 with an
  // exception. *enabled is whether it wants gradients at all, or -1 until it has been asked.
  int wants_gradient(PyObject* object, int* enabled) const;
  // False with an exception if it does.
  bool has_no_gradient(PyObject* object, const char* name) const;
  // Takes a tensor [batch, heads, seqlen, head_dim] as [batch, seqlen, heads, head_dim].
  void put_rows_first();

  const flashjit_tensor& get() const { return tensor_; }
  const Framework& framework() const { return *framework_; }
  bool is_read_only() const { return read_only_; }

 private:
  bool read_capsule(PyObject* object, const char* name);
  bool take(const dlpack::Tensor& tensor, const char* name);

  flashjit_tensor tensor_{};
  const Framework* framework_ = nullptr;
  Ref capsule_;
  bool read_only_ = false;
};

// Raises that a function without gradients was asked for one.
void refuse_gradient(const char* name);

// A new tensor of the framework of `like`; null with an exception.
PyObject* allocate(const Tensor& like, PyObject* like_object, const std::int64_t* shape, int rank,
                   flashjit_dtype dtype);
// The framework's current stream on the tensor's device.
bool current_stream(const Tensor& tensor, void** stream);

const char* dtype_name(std::int32_t dtype);

// Whether the addresses of two tensors overlap. If not, they share no memory.
bool share_addresses(const flashjit_tensor& a, const flashjit_tensor& b);

// Whether a backward can read the gradient of o as it is: it reads 16 bytes at once.
bool is_readable(const flashjit_tensor& gradient, const flashjit_tensor& q);

}  // namespace flashjit::python
