// CPython's limited API, which one binary of this extension uses on every CPython from 3.10 on.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <string>
#include <utility>

namespace flashjit::python {

// An owned reference to an object, or none.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* const before = std::exchange(object_, std::exchange(other.object_, nullptr));
    Py_XDECREF(before);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Other Python threads run during its life.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// The UTF-8 text of a str object, valid as long as the object; null with an exception for other objects.
inline const char* text_of(PyObject* text) {
  return PyUnicode_AsUTF8AndSize(text, nullptr);
}

// "list", "torch.Tensor" and so on.
inline std::string type_name(PyObject* object) {
  const Ref name(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const char* const text = name ? text_of(name.get()) : nullptr;
  if (text) return text;
  PyErr_Clear();
  return "object of unknown type";
}

}  // namespace flashjit::python
