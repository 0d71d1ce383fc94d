// Gradients of PyTorch's tensors: calls go to a function of autograd, whose forward and backward are here.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tensor.hpp"

namespace flashjit::python {

// The arguments of a call. Bit i is of argument i.
struct GivenArguments {
  PyObject* const* values;
  const Tensor* const* read;  // those that are tensors
  std::size_t count;
  std::uint64_t given, tensors, wants;  // wants: tensors by which PyTorch wants a gradient
};

// A function with gradients keeps this of the calls that it has seen.
class Differentiable {
 public:
  Differentiable() = default;
  // make(tensors, integers, reals, wants, deterministic), with places of arguments, makes a _Kind of
  // flashjit.torch, or NotImplemented. None: there are no gradients.
  explicit Differentiable(PyObject* make) : make_(Ref::borrowed(make)) {}
  bool is_possible() const { return make_ && make_.get() != Py_None; }
  // The outputs, which autograd knows; NotImplemented if an argument is neither a tensor of PyTorch nor a
  // plain number; null with an exception.
  PyObject* call(const GivenArguments& arguments, bool returns_lse, const Framework& framework);
  int traverse(visitproc visit, void* arg) const;

 private:
  struct Seen {
    std::uint64_t given = 0, tensors = 0, reals = 0, wants = 0;
    bool deterministic = false;
    bool operator==(const Seen&) const = default;
  };
  struct Known {
    Seen seen;
    Ref kind, forward, apply;
    bool has_node = false;
  };
  // Null with an exception; without a forward if there are no gradients.
  const Known* kind_of(const Seen& seen, std::uint64_t integers);

  Ref make_;
  std::vector<std::unique_ptr<Known>> known_;  // never removed: a call uses them without the GIL
};

// The kind of calls (a _Kind of flashjit.torch) that operators know by its text; null with an exception.
Ref kind_of_text(PyObject* text);

// Adds forward(), backward() and method_of() of autograd's function and those of operators to the module; -1
// with an exception.
int add_autograd(PyObject* module);

}  // namespace flashjit::python
