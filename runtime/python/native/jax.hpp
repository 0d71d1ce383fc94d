// Kernels as foreign functions of XLA, which runs what JAX compiles.
#pragma once

#include "python.hpp"

namespace flashjit::python {

// Adds the function xla_handlers() to the module; -1 with an exception.
int add_jax(PyObject* module);

}  // namespace flashjit::python
