#include "errors.hpp"

namespace flashjit::python {
namespace {

PyObject* classes;  // a tuple; the class of status i is its element i - 1

}  // namespace

int load_errors() {
  const Ref module(PyImport_ImportModule("flashjit._errors"));
  if (!module) return -1;
  Ref found(PyObject_GetAttrString(module.get(), "BY_STATUS"));
  if (!found) return -1;
  Py_XDECREF(classes);
  classes = found.release();
  return 0;
}

std::nullptr_t raise(flashjit_status status, const std::string& message, const std::string& detail) {
  const bool known = status >= 1 && status <= PyTuple_Size(classes);
  PyObject* const type = PyTuple_GetItem(classes, (known ? status : FLASHJIT_INTERNAL) - 1);
  const Ref error(PyObject_CallFunction(type, "ss", message.c_str(), detail.c_str()));
  if (error) PyErr_SetObject(type, error.get());
  return nullptr;
}

std::nullptr_t raise_last(flashjit_status status) {
  if (PyErr_Occurred()) return nullptr;
  return raise(status, flashjit_last_error_message(), flashjit_last_error_detail());
}

std::nullptr_t refuse_with_cause(const std::string& prefix) {
  if (!PyErr_Occurred()) return refuse(prefix + "the framework gave no reason");
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref owned_type(type), owned_trace(trace);
  Ref cause(value);
  const Ref text(PyObject_Str(cause.get()));
  const char* const said = text ? text_of(text.get()) : nullptr;
  if (!said) PyErr_Clear();
  refuse(prefix + (said ? said : "no text"));
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value) PyException_SetCause(value, cause.release());
  PyErr_Restore(type, value, trace);
  return nullptr;
}

}  // namespace flashjit::python
