// Calls by tensors alone: the spec follows from the tensors and keywords, the kernel from a cache.
#pragma once

#include "tensor.hpp"

namespace flashjit::python {

// Calls a Function with arguments in the order of its names, on the framework's current stream; null with an
// exception. read: for each argument the tensor that was read of it already, or null. Nobody asks whether
// such a one requires a gradient.
PyObject* call_function(PyObject* function, PyObject* const* values, std::size_t count,
                        const Tensor* const* read = nullptr);

// Adds the type Function and the function call() to the module; -1 with an exception.
int add_function(PyObject* module);

}  // namespace flashjit::python
