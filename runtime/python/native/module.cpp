// The extension module flashjit._native.
#include "autograd.hpp"
#include "calls.hpp"
#include "errors.hpp"
#include "function.hpp"
#include "graph.hpp"
#include "jax.hpp"
#include "node.hpp"
#include "objects.hpp"
#include "parallel.hpp"

namespace flashjit::python {
namespace {

// most_listed_blocks(block_m, block_n, per_head, batch, heads, seqlen_q, seqlen_k)
PyObject* most_listed_blocks(PyObject*, PyObject* args) {
  flashjit_block_lists lists{};
  if (!PyArg_ParseTuple(args, "iiiiiii", &lists.block_m, &lists.block_n, &lists.per_head, &lists.batch,
                        &lists.heads, &lists.seqlen_q, &lists.seqlen_k))
    return nullptr;
  std::int64_t blocks = 0;
  const flashjit_status status = flashjit_most_listed_blocks(&lists, &blocks);
  return status == FLASHJIT_OK ? PyLong_FromLongLong(blocks) : raise_last(status);
}

// describe(tensor, name) -> (shape, dtype, device)
PyObject* describe(PyObject*, PyObject* args) {
  PyObject* object = nullptr;
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "Os", &object, &name)) return nullptr;
  Tensor tensor;
  if (!tensor.read(object, name)) return nullptr;
  const flashjit_tensor& t = tensor.get();
  const Ref shape(PyTuple_New(t.rank));
  for (int i = 0; shape && i < t.rank; ++i)
    if (PyTuple_SetItem(shape.get(), i, PyLong_FromLongLong(t.shape[i])) != 0) return nullptr;
  const std::string device =
      t.device_kind == FLASHJIT_CUDA ? "cuda:" + std::to_string(t.device_index) : std::string("cpu");
  return shape ? Py_BuildValue("Oss", shape.get(), dtype_name(t.dtype), device.c_str()) : nullptr;
}

// empty_like(tensor, shape, dtype): a new tensor of its framework on its device
PyObject* empty_like(PyObject*, PyObject* args) {
  PyObject *like = nullptr, *shape = nullptr;
  const char* dtype = nullptr;
  if (!PyArg_ParseTuple(args, "OO!s", &like, &PyTuple_Type, &shape, &dtype)) return nullptr;
  Tensor tensor;
  if (!tensor.read(like, "like")) return nullptr;
  std::int64_t sizes[FLASHJIT_MAX_RANK] = {};
  const int rank = static_cast<int>(PyTuple_Size(shape));
  for (int i = 0; i < rank && i < FLASHJIT_MAX_RANK; ++i)
    sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
  if (PyErr_Occurred()) return nullptr;
  int code = FLASHJIT_FP32;
  while (code < FLASHJIT_FP8_E5M2 && std::string(dtype_name(code)) != dtype) ++code;
  return allocate(tensor, like, sizes, rank, static_cast<flashjit_dtype>(code));
}

// finished(like, output): the output in the form that callers of the framework of `like` get
PyObject* finished(PyObject*, PyObject* args) {
  PyObject *like = nullptr, *output = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &like, &output)) return nullptr;
  const Framework* const framework = framework_of(like, "like");
  if (!framework) return nullptr;
  if (framework->finish == Py_None) return Ref::borrowed(output).release();
  return PyObject_CallFunctionObjArgs(framework->finish, output, nullptr);
}

PyObject* version(PyObject*, PyObject*) {
  return PyUnicode_FromString(flashjit_version());
}

PyMethodDef methods[] = {{"most_listed_blocks", most_listed_blocks, METH_VARARGS, nullptr},
                         {"describe", describe, METH_VARARGS, nullptr},
                         {"empty_like", empty_like, METH_VARARGS, nullptr},
                         {"finished", finished, METH_VARARGS, nullptr},
                         {"version", version, METH_NOARGS, nullptr},
                         {}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "flashjit._native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace flashjit::python

PyMODINIT_FUNC PyInit__native() {
  using namespace flashjit::python;
  Ref module(PyModule_Create(&definition));
  if (!module || load_errors() < 0 || add_objects(module.get()) < 0 || add_function(module.get()) < 0 ||
      add_autograd(module.get()) < 0 || add_node(module.get()) < 0 || add_graph_operators(module.get()) < 0 ||
      add_calls(module.get()) < 0 || add_jax(module.get()) < 0 || add_parallel(module.get()) < 0)
    return nullptr;
  return module.release();
}
