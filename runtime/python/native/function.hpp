// Calls by tensors alone: the spec follows from the tensors and keywords, the kernel from a cache.
#pragma once

#include "python.hpp"

namespace flashjit::python {

// Adds the type Function and the function call() to the module; -1 with an exception.
int add_function(PyObject* module);

}  // namespace flashjit::python
