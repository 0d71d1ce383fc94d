// The Python types Engine, Spec, Kernel and Prepared, each as thin as its type of flashjit.h.
#pragma once

#include <string>
#include <vector>

#include "arguments.hpp"

namespace flashjit::python {

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

struct KernelObject {
  PyObject_HEAD const flashjit_kernel* kernel;
  PyObject *engine, *spec;  // owned
};

extern PyTypeObject *engine_type, *spec_type;
// Adds the types to the module; -1 with an exception.
int add_objects(PyObject* module);

}  // namespace flashjit::python
