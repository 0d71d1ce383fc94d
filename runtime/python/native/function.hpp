// Calls by tensors alone: the spec follows from the tensors and keywords, the kernel from a cache.
#pragma once

#include <vector>

#include "arguments.hpp"
#include "tensor.hpp"

namespace flashjit::python {

// Calls a Function with arguments in the order of its names, on the framework's current stream; null with an
// exception. read: for each argument the tensor that was read of it already, or null. Nobody asks whether
// such a one requires a gradient.
PyObject* call_function(PyObject* function, PyObject* const* values, std::size_t count,
                        const Tensor* const* read = nullptr);

// A launch of a Function on the framework's current stream, but for its outputs and its workspace.
struct Launch {
  const void* spec = nullptr;  // one of the same spec has the same address here
  const flashjit_kernel* kernel = nullptr;
  Arguments arguments;  // in the order of the function's names
  void* stream = nullptr;
  std::size_t workspace_bytes = 0;
  // Functions that write o have these:
  flashjit_dtype o_dtype = FLASHJIT_FP32;
  int o_rank = 0;
  std::int64_t o_sizes[FLASHJIT_MAX_RANK], lse_sizes[FLASHJIT_MAX_RANK];
};
// Finds what call_function() would launch; false with an exception. `values` and `read` must live as long as
// the launch.
bool plan_launch(PyObject* function, PyObject* const* values, std::size_t count, const Tensor* const* read,
                 Launch& launch);

// Launches of a Function have this in common where their arguments are like these.
struct Planned {
  Ref engine_object, spec_object;  // keep these alive:
  flashjit_engine* engine = nullptr;
  const flashjit_spec* spec = nullptr;
  flashjit_dtype o_dtype = FLASHJIT_FP32;
  std::vector<ArgumentInfo> infos;  // of the arguments
};
// False with an exception. given: in the order of the function's names.
bool plan_function(PyObject* function, const std::vector<Given>& given, const flashjit_tensor& q,
                   const flashjit_tensor& v, Planned& planned);

// Adds the type Function and the function call() to the module; -1 with an exception.
int add_function(PyObject* module);

}  // namespace flashjit::python
