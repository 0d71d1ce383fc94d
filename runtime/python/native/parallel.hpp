// The Python types of attention over several ranks, each as thin as its type of flashjit.h.
#pragma once

#include "python.hpp"

namespace flashjit::python {

// Adds the types and functions to the module; -1 with an exception.
int add_parallel(PyObject* module);

}  // namespace flashjit::python
