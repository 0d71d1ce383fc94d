// The arguments of a launch, from Python objects.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor.hpp"

namespace flashjit::python {

enum class Kind { tensor, integer, real };

// A launch of some spec knows this of an argument.
struct ArgumentInfo {
  std::int32_t id = 0;
  Kind kind = Kind::tensor;
  bool written = false;
};
// The kind of an argument that every spec has by this name; numbers are few.
Kind kind_of(const char* name);

// The kind of an argument of a call: a tensor's dtype, or one of these.
using Given = std::int8_t;
constexpr Given given_integer = -1, given_real = -2, not_given = -3;
Given given_number(PyObject* value);

// The caller keeps the objects alive.
class Arguments {
 public:
  Arguments() {}  // the rooms stay uninitialised
  ~Arguments();
  Arguments(const Arguments&) = delete;

  // Each returns false with an exception. `shown`: the argument's name in messages.
  bool add(const ArgumentInfo& info, const char* shown, PyObject* value);
  bool add(const ArgumentInfo& info, const char* shown, const Tensor& tensor);

  const flashjit_argument* data() const { return room_.arguments; }
  std::size_t size() const { return count_; }
  // The first tensor, whose framework says the stream; null if there is none.
  const Tensor* first() const { return first_; }
  // The stream that `wanted` (None: the current one) says for these tensors.
  bool stream(PyObject* wanted, void** stream) const;

 private:
  bool has_room();

  static constexpr std::size_t most = 96;
  union Arrays {
    Arrays() {}
    ~Arrays() {}
    flashjit_argument arguments[most];
  } room_;
  union Tensors {
    Tensors() {}
    ~Tensors() {}
    Tensor all[most];
  } tensors_;
  std::size_t count_ = 0, tensor_count_ = 0;
  const Tensor* first_ = nullptr;
};

}  // namespace flashjit::python
