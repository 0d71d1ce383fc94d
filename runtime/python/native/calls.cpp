#include "calls.hpp"

#include <algorithm>
#include <cstddef>

#include "function.hpp"
#include "tensor.hpp"

namespace flashjit::python {
namespace {

constexpr std::size_t most_values = 64;
constexpr long fixed = -1, block_lists = -2;  // in the place of a place

PyObject* not_implemented() {
  return Ref::borrowed(Py_NotImplemented).release();
}

// Whether a framework has to see the call: 1, 0, or -1 with an exception.
int is_watched(PyObject* q) {
  const Framework* const framework = framework_of(q, "q");
  if (!framework) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(framework->watching); ++i) {
    const Ref said(PyObject_CallNoArgs(PyTuple_GetItem(framework->watching, i)));
    const int is_true = said ? PyObject_IsTrue(said.get()) : -1;
    if (is_true != 0) return is_true;
  }
  return 0;
}

bool is_plain_number(PyObject* value) {
  return PyLong_Check(value) || PyFloat_Check(value);
}

// Whether a value means the same as one of an earlier call, which is a constant or consists of constants.
bool is_same(PyObject* value, PyObject* earlier) {
  if (value == earlier) return true;
  if (Py_TYPE(value) != Py_TYPE(earlier)) return false;
  if (!is_plain_number(value) && !PyUnicode_Check(value) && !PyTuple_Check(value) && !PyList_Check(value) &&
      !PyDict_Check(value))
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

// An earlier call like which others are, as flashjit._calls makes it.
class Pattern {
 public:
  explicit Pattern(PyObject* parts) : parts_(parts) {}
  PyObject* function() const { return part(0); }
  std::size_t count() const { return PyLong_AsSize_t(part(1)); }
  // Makes the function's values of a call's, if they are like the earlier one's.
  bool fill(PyObject* arguments, PyObject* keywords, PyObject** values) const {
    PyObject *const constants = part(2), *const names = part(4);
    const Py_ssize_t positional = PyTuple_Size(arguments), named = PyTuple_Size(names);
    if (positional + named != PyTuple_Size(part(5)) || named != PyDict_Size(keywords)) return false;
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0, i = 0; PyDict_Next(keywords, &at, &name, nullptr); ++i)
      if (name != PyTuple_GetItem(names, i)) return false;
    std::fill_n(values, count(), Py_None);
    for (Py_ssize_t i = 0; i < PyTuple_Size(constants); i += 2)
      values[PyLong_AsSize_t(PyTuple_GetItem(constants, i))] = PyTuple_GetItem(constants, i + 1);
    for (Py_ssize_t i = 0; i < positional; ++i)
      if (!put(i, PyTuple_GetItem(arguments, i), values)) return false;
    for (Py_ssize_t at = 0, i = positional; PyDict_Next(keywords, &at, nullptr, &value); ++i)
      if (!put(i, value, values)) return false;
    return true;
  }

 private:
  PyObject* part(Py_ssize_t i) const { return PyTuple_GetItem(parts_, i); }
  // Puts the i-th value of a call into its place, if it is like the earlier one.
  bool put(Py_ssize_t i, PyObject* value, PyObject** values) const {
    PyObject* const kept = PyTuple_GetItem(part(6), i);
    const long place = PyLong_AsLong(PyTuple_GetItem(part(5), i));
    if (place == fixed) return is_same(value, kept);
    if (place == block_lists) {
      const bool filled = fill_lists(value, kept, values + PyLong_AsSize_t(part(3)));
      if (!filled) PyErr_Clear();
      return filled;
    }
    // 0 may mean that there is none, and so is a constant.
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != kept ||
        (is_plain_number(value) && !PyObject_IsTrue(value)))
      return false;
    values[place] = value;
    return true;
  }

  PyObject* parts_;
};

// attend(patterns, arguments, keywords) -> what the call returns, or NotImplemented if no pattern is like it
// or a framework has to see it.
PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t) {
  PyObject* const patterns = args[0];
  PyObject* values[most_values];
  for (Py_ssize_t i = 0; i < PyList_Size(patterns); ++i) {
    // Others may change the list while the call runs without the GIL.
    const Ref kept = Ref::borrowed(PyList_GetItem(patterns, i));
    const Pattern pattern(kept.get());
    if (!pattern.fill(args[1], args[2], values)) continue;
    const int watched = is_watched(values[0]);
    if (watched != 0) PyErr_Clear();  // what is no tensor is refused elsewhere
    if (watched != 0) return not_implemented();
    return call_function(pattern.function(), values, pattern.count());
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
