// Kernels of the operators that graphs of torch.compile hold for calls of q, k and v alone:
// flashjit::qkv_forward and flashjit::qkv_backward, in C++ and without Python. Operators in Python cost a
// graph several times what such a call costs.
#pragma once

#include "python.hpp"

namespace flashjit::python {

// Adds register_graph_operators() to the module; -1 with an exception.
int add_graph_operators(PyObject* module);

}  // namespace flashjit::python
