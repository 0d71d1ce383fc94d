// Calls whose gradients a node of PyTorch's own autograd computes, in C++ and without Python.
//
// aten::_scaled_dot_product_fused_attention_overrideable is an operator for backends outside of PyTorch.
// PyTorch makes its node, which saves q, k, v, the output and its log-sum-exp, and calls the operator of its
// backward. On CPUs and CUDA devices PyTorch has no kernels for both; those are here, by PyTorch's stable C
// interface.
#pragma once

#include <cstddef>

#include "tensor.hpp"

namespace flashjit::python {

// Whether a kind of calls (a _Kind of flashjit.torch) is for the node: it has no tensors but q, k and v.
bool has_node(PyObject* kind);

// The output of a call with the node: like that of call_function(forward, values, count, read), whose first
// values are q, k and v and whose others are numbers. NotImplemented if the node cannot take it; null with an
// exception.
PyObject* call_with_node(PyObject* kind, PyObject* forward, PyObject* const* values, std::size_t count,
                         const Tensor* const* read);

// Adds register_node(operator) and call_of_node(number) to the module; -1 with an exception.
int add_node(PyObject* module);

}  // namespace flashjit::python
