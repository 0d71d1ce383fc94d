// Hot calls of flashjit.attention: keywords like those of an earlier call find its function without Python.
#pragma once

#include "python.hpp"

namespace flashjit::python {

// Adds attend() and call_alone() to the module; -1 with an exception.
int add_calls(PyObject* module);

}  // namespace flashjit::python
