// The Python types Engine, Spec, Kernel and Prepared, each as thin as its type of flashjit.h.
#pragma once

#include <string>
#include <vector>

#include "arguments.hpp"

namespace flashjit::python {

template <class Object>
Object* as(PyObject* self) {
  return reinterpret_cast<Object*>(self);
}
template <class Function>
PyCFunction function(Function* f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}
inline void free_object(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}
inline PyObject* new_object(PyTypeObject* type) {
  return reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}
// Adds a type to the module; -1 with an exception.
int add_type(PyObject* module, PyType_Spec* spec, PyTypeObject** type);

struct EngineObject {
  PyObject_HEAD flashjit_engine* engine;
};

// An argument that a launch of the spec has been given before.
struct NamedInfo {
  PyObject* name;  // interned, owned
  std::string text;
  ArgumentInfo info;
};
struct SpecState {
  flashjit_spec* spec = nullptr;
  Ref text, fields;                  // the JSON text, and the dict that it says
  std::vector<std::string> written;  // arguments that launches write, by name
  std::vector<NamedInfo> names;

  ~SpecState();
  // Null with an exception if the spec's launches have no such argument.
  const NamedInfo* find(PyObject* name);
};
struct SpecObject {
  PyObject_HEAD SpecState* state;
};

// Reads keyword arguments of a launch; `stream` is set if it is among them. False with an exception.
bool read_arguments(SpecState& spec, PyObject* const* args, Py_ssize_t count, PyObject* names,
                    Arguments& arguments, PyObject** stream, std::vector<Ref>* kept);

struct KernelObject {
  PyObject_HEAD const flashjit_kernel* kernel;
  PyObject *engine, *spec;  // owned
};

extern PyTypeObject *engine_type, *spec_type;
// Adds the types to the module; -1 with an exception.
int add_objects(PyObject* module);

}  // namespace flashjit::python
