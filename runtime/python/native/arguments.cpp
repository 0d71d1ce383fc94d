#include "arguments.hpp"

#include <cstring>
#include <memory>

#include "errors.hpp"

namespace flashjit::python {

Kind kind_of(const char* name) {
  for (const char* const real : {"softmax_scale", "dropout_p", "rotary_base", "rotary_scale"})
    if (std::strcmp(name, real) == 0) return Kind::real;
  for (const char* const integer : {"max_seqlen_q", "max_seqlen_k", "window_left", "window_right",
                                    "num_sinks", "dropout_seed", "dropout_offset"})
    if (std::strcmp(name, integer) == 0) return Kind::integer;
  return Kind::tensor;
}

Given given_number(PyObject* value) {
  return PyIndex_Check(value) ? given_integer : given_real;
}

Arguments::~Arguments() {
  for (std::size_t i = 0; i < tensor_count_; ++i) std::destroy_at(&tensors_.all[i]);
}

bool Arguments::has_room() {
  if (count_ < most) return true;
  refuse("a launch takes at most " + std::to_string(most) + " arguments");
  return false;
}

bool Arguments::add(const ArgumentInfo& info, const char* shown, const Tensor& tensor) {
  if (!has_room()) return false;
  if (info.written && tensor.is_read_only()) {
    refuse("argument " + std::string(shown) +
           " is read-only, and the launch writes it: a copy of it would work");
    return false;
  }
  flashjit_argument& argument = room_.arguments[count_++];
  argument.id = info.id;
  argument.value.tensor = &tensor.get();
  if (!first_) first_ = &tensor;
  return true;
}

bool Arguments::add(const ArgumentInfo& info, const char* shown, PyObject* value) {
  if (!has_room()) return false;
  if (info.kind == Kind::tensor) {
    Tensor& tensor = *std::construct_at(&tensors_.all[tensor_count_++]);
    return tensor.read(value, shown) && tensor.has_no_gradient(value, shown) && add(info, shown, tensor);
  }
  flashjit_argument& argument = room_.arguments[count_];
  argument.id = info.id;
  if (!PyFloat_Check(value) && !PyLong_Check(value) && is_tensor(value)) {
    refuse("argument " + std::string(shown) + " is a tensor: a number would work");
    return false;
  }
  if (info.kind == Kind::real) {
    argument.value.real = PyFloat_AsDouble(value);
  } else {
    const long long number = PyLong_AsLongLong(value);
    argument.value.integer = number;
    if (number == -1 && PyErr_ExceptionMatches(PyExc_OverflowError)) {  // dropout_seed has 64 bits
      PyErr_Clear();
      argument.value.integer = static_cast<std::int64_t>(PyLong_AsUnsignedLongLong(value));
    }
  }
  if (PyErr_Occurred()) {
    refuse_with_cause("argument " + std::string(shown) + " is of type " + type_name(value) + ", a number (" +
                      (info.kind == Kind::real ? "float" : "int") + ") would work: ");
    return false;
  }
  ++count_;
  return true;
}

bool Arguments::stream(PyObject* wanted, void** stream) const {
  *stream = nullptr;
  if (wanted && wanted != Py_None) {
    *stream = PyLong_AsVoidPtr(wanted);
    if (!PyErr_Occurred()) return true;
    refuse_with_cause("stream is of type " + type_name(wanted) +
                      ", a CUDA stream's address as int would work: ");
    return false;
  }
  return !first_ || current_stream(*first_, stream);
}

}  // namespace flashjit::python
