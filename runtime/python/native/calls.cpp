#include "calls.hpp"

#include <algorithm>
#include <cstddef>

#include "function.hpp"
#include "tensor.hpp"

namespace flashjit::python {
namespace {

constexpr std::size_t most_values = 64;
constexpr long fixed = -1, a_window = -2, block_lists = -3;  // in the place of a place

PyObject* not_implemented() {
  return Ref::borrowed(Py_NotImplemented).release();
}

// Whether a framework has to see the call: 1, 0, or -1 with an exception.
int is_watched(PyObject* q) {
  const Framework* const framework = framework_of(q, "q");
  if (!framework) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(framework->watching); ++i) {
    const Ref said(PyObject_CallFunctionObjArgs(PyTuple_GetItem(framework->watching, i), nullptr));
    const int is_true = said ? PyObject_IsTrue(said.get()) : -1;
    if (is_true != 0) return is_true;
  }
  return 0;
}

// Whether a value means the same as one of an earlier call, which is a constant or consists of texts.
bool is_same(PyObject* value, PyObject* earlier) {
  if (value == earlier) return true;
  if (Py_TYPE(value) != Py_TYPE(earlier)) return false;
  if (!PyUnicode_Check(value) && !PyTuple_Check(value) && !PyList_Check(value) && !PyDict_Check(value))
    return false;
  const int same = PyObject_RichCompareBool(value, earlier, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

// Attributes of BlockLists.
struct Names {
  PyObject* tensors[4];
  PyObject* sizes[4];
};
const Names& names() {
  const auto interned = [](const char* text) { return PyUnicode_InternFromString(text); };
  static const Names all = {
      {interned("block_offsets"), interned("block_indices"), interned("block_bitmask_of"),
       interned("block_bitmasks")},
      {interned("block_m"), interned("block_n"), interned("per_head"), interned("of_masks")}};
  return all;
}

// Puts the tensors of BlockLists into their places, if its sizes are these. They are attributes that nobody
// changes, and so live as long as the lists.
bool fill_lists(PyObject* lists, PyObject* sizes, PyObject** places) {
  for (Py_ssize_t i = 0; i < 4; ++i) {
    const Ref size(PyObject_GetAttr(lists, names().sizes[i]));
    if (!size || PyObject_RichCompareBool(size.get(), PyTuple_GetItem(sizes, i), Py_EQ) != 1) return false;
    const Ref tensor(PyObject_GetAttr(lists, names().tensors[i]));
    if (!tensor) return false;
    places[i] = tensor.get();
  }
  return true;
}

// Puts the keywords' values into their places, if they are those of the pattern (function, count, window_at,
// lists_at, names, places, fixed values).
bool fill(PyObject* pattern, PyObject* keywords, PyObject** values, std::size_t* count) {
  PyObject *const given = PyTuple_GetItem(pattern, 4), *const places = PyTuple_GetItem(pattern, 5),
                  *const fixed_values = PyTuple_GetItem(pattern, 6);
  if (PyTuple_Size(given) != PyDict_Size(keywords)) return false;
  *count = PyLong_AsSize_t(PyTuple_GetItem(pattern, 1));
  std::fill_n(values, *count, Py_None);
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0, i = 0; PyDict_Next(keywords, &at, &name, &value); ++i) {
    if (name != PyTuple_GetItem(given, i)) return false;
    const long place = PyLong_AsLong(PyTuple_GetItem(places, i));
    if (place == fixed) {
      if (!is_same(value, PyTuple_GetItem(fixed_values, i))) return false;
    } else if (place == a_window) {
      if (!PyTuple_CheckExact(value) || PyTuple_Size(value) != 2) return false;
      PyObject** const sides = values + PyLong_AsSize_t(PyTuple_GetItem(pattern, 2));
      for (Py_ssize_t side = 0; side < 2; ++side) sides[side] = PyTuple_GetItem(value, side);
      if (sides[0] == Py_None && sides[1] == Py_None) return false;  // says nothing, and is a window
    } else if (place == block_lists) {
      PyObject** const tensors = values + PyLong_AsSize_t(PyTuple_GetItem(pattern, 3));
      if (fill_lists(value, PyTuple_GetItem(fixed_values, i), tensors)) continue;
      PyErr_Clear();
      return false;
    } else {
      values[place] = value;
    }
  }
  return true;
}

// attend(patterns, q, k, v, keywords) -> what the call returns, or NotImplemented if no pattern is like it or
// a framework has to see it.
PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t) {
  PyObject *const patterns = args[0], *const keywords = args[4];
  PyObject* values[most_values];
  std::size_t count = 0;
  for (Py_ssize_t i = 0; i < PyList_Size(patterns); ++i) {
    // Others may change the list while the call runs without the GIL.
    const Ref pattern = Ref::borrowed(PyList_GetItem(patterns, i));
    if (!fill(pattern.get(), keywords, values, &count)) continue;
    const int watched = is_watched(args[1]);
    if (watched != 0) PyErr_Clear();  // what is no tensor is refused elsewhere
    if (watched != 0) return not_implemented();
    std::copy_n(args + 1, 3, values);
    return call_function(PyTuple_GetItem(pattern.get(), 0), values, count);
  }
  return not_implemented();
}

// call_alone(function, *arguments) -> what call(function, None, None, *arguments) does, or NotImplemented if
// a framework has to see it
PyObject* call_alone(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int watched = is_watched(args[1]);
  if (watched != 0) PyErr_Clear();
  return watched != 0 ? not_implemented()
                      : call_function(args[0], args + 1, static_cast<std::size_t>(count - 1));
}

PyMethodDef methods[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL, nullptr},
    {"call_alone", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_alone)), METH_FASTCALL,
     nullptr},
    {}};

}  // namespace

int add_calls(PyObject* module) {
  return PyModule_AddFunctions(module, methods);
}

}  // namespace flashjit::python
