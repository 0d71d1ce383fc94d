#include "autograd.hpp"

#include <algorithm>
#include <utility>

#include "errors.hpp"
#include "function.hpp"
#include "node.hpp"

namespace flashjit::python {
namespace {

constexpr std::size_t most_arguments =
    128;  // of a backward: those of a call, and what it reads and writes more

PyObject* interned(const char* text) {
  return PyUnicode_InternFromString(text);
}

struct Names {
  PyObject* apply = interned("apply");
  PyObject* call = interned("call");
  PyObject* forward = interned("forward");
  PyObject* backward = interned("backward");
  PyObject* placing = interned("placing");
  PyObject* empty_like = interned("empty_like");
  PyObject* more_gradients = interned("more_gradients");
  PyObject* returned = interned("returned");
  PyObject* to_save = interned("to_save");
  PyObject* saved_tensors = interned("saved_tensors");
  PyObject* materialize_grads = interned("materialize_grads");
};
const Names& names() {
  static const Names all;
  return all;
}

PyObject* not_implemented() {
  return Ref::borrowed(Py_NotImplemented).release();
}

// A tuple of the places whose bits are set.
PyObject* places_of(std::uint64_t bits) {
  const Ref places(PyList_New(0));
  for (unsigned i = 0; places && bits >> i != 0; ++i) {
    if (!(bits >> i & 1)) continue;
    const Ref place(PyLong_FromUnsignedLong(i));
    if (!place || PyList_Append(places.get(), place.get()) != 0) return nullptr;
  }
  return places ? PyList_AsTuple(places.get()) : nullptr;
}

// A function of flashjit.torch.
Ref function_of_torch(const char* name) {
  const Ref module(PyImport_ImportModule("flashjit.torch"));
  return Ref(module ? PyObject_GetAttrString(module.get(), name) : nullptr);
}

// The arguments of a Function's call, one after the other.
struct Values {
  PyObject* all[most_arguments];
  std::size_t count = 0;
  void add(PyObject* value) {
    if (count < most_arguments) all[count++] = value;
  }
  void add_tuple(PyObject* tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) add(PyTuple_GetItem(tuple, i));
  }
  void add_list(PyObject* list) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) add(PyList_GetItem(list, i));
  }
  // A tuple of them. It is new and filled at once: gc.get_objects() of another thread finds a tuple that is
  // not, and a tuple that somebody else has cannot be filled.
  PyObject* tuple() const {
    PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(count));
    for (std::size_t i = 0; made && i < count; ++i)
      PyTuple_SetItem(made, static_cast<Py_ssize_t>(i), Ref::borrowed(all[i]).release());
    return made;
  }
};

// The arguments of the function of autograd that runs now: PyTorch looks at each argument of it in turn, for
// several times as long as this takes.
struct Recording {
  PyObject* made;  // (o, lse): what the kernel has written already
  PyObject* call;  // (kind, numbers, returns_lse)
};
thread_local const Recording* recording;

// forward(ctx, *tensors) -> o, or if the call says so (o, lse)
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!recording) return refuse("flashjit's function of autograd is called by flashjit.attention alone");
  PyObject *const ctx = args[0], *const made = recording->made, *const call = recording->call;
  Values kept;
  kept.add_tuple(made);
  for (Py_ssize_t i = 1; i < count; ++i) kept.add(args[i]);
  const Ref saved(kept.tuple());
  if (!saved || PyObject_SetAttr(ctx, names().call, call) != 0 ||
      PyObject_SetAttr(ctx, names().to_save, saved.get()) != 0 ||
      PyObject_SetAttr(ctx, names().materialize_grads, Py_False) != 0)
    return nullptr;
  const bool returns_lse = PyTuple_GetItem(call, 2) == Py_True;
  return Ref::borrowed(returns_lse ? made : PyTuple_GetItem(made, 0)).release();
}

// Runs the forward of tensors that were read, and gives them and its outputs to PyTorch's autograd. The
// kernel runs first: PyTorch's function would hide from it what was read.
PyObject* recorded(PyObject* function, PyObject* apply, PyObject* call, const Values& tensors,
                   const Tensor* const* read) {
  Values values = tensors;
  values.add_tuple(PyTuple_GetItem(call, 1));
  const Tensor* all[most_arguments] = {};
  std::copy_n(read, tensors.count, all);
  const Ref made(call_function(function, values.all, values.count, all)), arguments(tensors.tuple());
  if (!made || !arguments) return nullptr;
  const Recording mine = {made.get(), call};
  const Recording* const before = std::exchange(recording, &mine);
  PyObject* const result = PyObject_Call(apply, arguments.get(), nullptr);
  recording = before;
  return result;
}

// attend_recorded((kind, numbers, returns_lse), *tensors) -> what the call returns, which autograd knows
PyObject* attend_recorded(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PyObject* const kind = PyTuple_GetItem(args[0], 0);
  const Ref function(PyObject_GetAttr(kind, names().forward)), apply(PyObject_GetAttr(kind, names().apply));
  if (!function || !apply) return nullptr;
  Values tensors;
  std::vector<Tensor> own(static_cast<std::size_t>(count - 1));
  const Tensor* read[most_arguments] = {};
  for (std::size_t i = 0; i < own.size(); ++i) {
    tensors.add(args[i + 1]);
    if (!own[i].read(args[i + 1], "of PyTorch")) return nullptr;
    read[i] = &own[i];
  }
  if (PyTuple_GetItem(args[0], 2) != Py_True && has_node(kind)) {
    Values values = tensors;
    values.add_tuple(PyTuple_GetItem(args[0], 1));
    Ref made(call_with_node(kind, function.get(), values.all, values.count, read));
    if (made.get() != Py_NotImplemented) return made.release();
  }
  return recorded(function.get(), apply.get(), args[0], tensors, read);
}

// The gradients that each tensor wants, by `placing`, of those that the kernel has written.
PyObject* placed(PyObject* written, PyObject* placing) {
  Values gradients;
  for (Py_ssize_t i = 0; i < PyTuple_Size(placing); ++i) {
    PyObject* const from = PyTuple_GetItem(placing, i);
    gradients.add(from == Py_None ? Py_None : PyTuple_GetItem(written, PyLong_AsSsize_t(from)));
  }
  return gradients.tuple();
}

Ref like(PyObject* empty_like, PyObject* tensors, Py_ssize_t place) {
  PyObject* const one = PyTuple_GetItem(tensors, place);
  return Ref(one ? PyObject_CallFunctionObjArgs(empty_like, one, nullptr) : nullptr);
}

// A tuple of tensors for what the backward writes, in the order of its arguments.
Ref gradients_to_write(PyObject* kind, PyObject* tensors) {
  const Ref empty_like(PyObject_GetAttr(kind, names().empty_like)),
      more(PyObject_GetAttr(kind, names().more_gradients));
  if (!empty_like || !more) return {};
  const Ref made[] = {like(empty_like.get(), tensors, 0), like(empty_like.get(), tensors, 1),
                      like(empty_like.get(), tensors, 2)};
  if (!made[0] || !made[1] || !made[2]) return {};
  Values written;
  for (const Ref& one : made) written.add(one.get());
  if (more.get() == Py_None) return Ref(written.tuple());
  const Ref others(PyObject_CallFunctionObjArgs(more.get(), tensors, nullptr));
  if (!others) return {};
  written.add_tuple(others.get());
  return Ref(written.tuple());
}

// Runs the backward: a tuple of what the kernel has written, in the order of its arguments.
Ref written_by_backward(PyObject* kind, PyObject* numbers, PyObject* tensors, PyObject* o, PyObject* lse,
                        PyObject* of_o, PyObject* of_lse) {
  PyObject* const q = PyTuple_GetItem(tensors, 0);
  Tensor given, like;
  if (!q || !like.read(q, "q") || (of_o != Py_None && !given.read(of_o, "do"))) return {};
  Ref readable = Ref::borrowed(of_o), rows = Ref::borrowed(of_lse);
  if (of_o == Py_None || !is_readable(given.get(), like.get())) {
    const Ref make(function_of_torch("_readable"));
    readable = Ref(make ? PyObject_CallFunctionObjArgs(make.get(), of_o, o, q, nullptr) : nullptr);
    if (!readable) return {};
  }
  if (of_lse != Py_None) {
    rows = Ref(PyObject_CallMethod(of_lse, "contiguous", nullptr));
    if (!rows) return {};
  }
  Ref written = gradients_to_write(kind, tensors);
  const Ref function(PyObject_GetAttr(kind, names().backward));
  if (!written || !function) return {};
  Values values;
  for (PyObject* const some : {tensors, numbers}) values.add_tuple(some);
  for (PyObject* const one : {o, lse, readable.get(), rows.get()}) values.add(one);
  values.add_tuple(written.get());
  const Ref done(call_function(function.get(), values.all, values.count));
  return done ? std::move(written) : Ref();
}

// gradients(kind, numbers, tensors, o, lse, do, dlse) -> those that are written, in the order of the
// arguments
PyObject* gradients(PyObject*, PyObject* const* args, Py_ssize_t) {
  return written_by_backward(args[0], args[1], args[2], args[3], args[4], args[5], args[6]).release();
}

// forward_of_operator(text, tensors, integers, reals) -> (o, lse); the lists are the dispatcher's
PyObject* forward_of_operator(PyObject*, PyObject* const* args, Py_ssize_t) {
  const Ref kind = kind_of_text(args[0]);
  const Ref function(kind ? PyObject_GetAttr(kind.get(), names().forward) : nullptr);
  if (!function) return nullptr;
  Values values;
  for (int i = 1; i < 4; ++i) values.add_list(args[i]);
  Ref made(call_function(function.get(), values.all, values.count));
  if (!made || PyTuple_Check(made.get())) return made.release();
  const Ref with_lse(function_of_torch("_with_empty_lse"));
  return with_lse ? PyObject_CallFunctionObjArgs(with_lse.get(), made.get(), nullptr) : nullptr;
}

// backward_of_operator(text, tensors, integers, reals, o, lse, do, dlse) -> the gradients that are asked for
PyObject* backward_of_operator(PyObject*, PyObject* const* args, Py_ssize_t) {
  const Ref kind = kind_of_text(args[0]);
  Values of_numbers, of_tensors;
  of_tensors.add_list(args[1]);
  for (int i = 2; i < 4; ++i) of_numbers.add_list(args[i]);
  const Ref numbers(of_numbers.tuple()), tensors(of_tensors.tuple());
  if (!kind || !numbers || !tensors) return nullptr;
  const Ref written =
      written_by_backward(kind.get(), numbers.get(), tensors.get(), args[4], args[5], args[6], args[7]);
  const Ref places(PyObject_GetAttr(kind.get(), names().returned)), returned(PyList_New(0));
  if (!written || !places || !returned) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(places.get()); ++i) {
    PyObject* const one = PyTuple_GetItem(written.get(), PyLong_AsSsize_t(PyTuple_GetItem(places.get(), i)));
    if (!one || PyList_Append(returned.get(), one) != 0) return nullptr;
  }
  return Ref::borrowed(returned.get()).release();
}

// ctx.apply(do, dlse=None) -> (*gradients of the tensors)
PyObject* apply_backward(PyObject* ctx, PyObject* const* args, Py_ssize_t count) {
  PyObject *const of_o = args[0], *const of_lse = count > 1 ? args[1] : Py_None;
  const Ref call(PyObject_GetAttr(ctx, names().call)), saved(PyObject_GetAttr(ctx, names().saved_tensors));
  if (!call || !saved) return nullptr;
  PyObject *const kind = PyTuple_GetItem(call.get(), 0), *const numbers = PyTuple_GetItem(call.get(), 1);
  PyObject *const o = PyTuple_GetItem(saved.get(), 0), *const lse = PyTuple_GetItem(saved.get(), 1);
  const Ref tensors(PyTuple_GetSlice(saved.get(), 2, PyTuple_Size(saved.get())));
  const Framework* const framework = framework_of(o, "o");
  const Ref records(framework ? PyObject_CallNoArgs(framework->is_grad_enabled) : nullptr);
  if (!tensors || !records) return nullptr;
  if (records.get() == Py_True) {
    const Ref operators(function_of_torch("_backward_of_graph"));
    return operators ? PyObject_CallFunctionObjArgs(operators.get(), kind, numbers, of_o, of_lse, o, lse,
                                                    tensors.get(), nullptr)
                     : nullptr;
  }
  const Ref written = written_by_backward(kind, numbers, tensors.get(), o, lse, of_o, of_lse);
  const Ref placing(PyObject_GetAttr(kind, names().placing));
  return written && placing ? placed(written.get(), placing.get()) : nullptr;
}

// backward(ctx, do, dlse=None)
PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return apply_backward(args[0], args + 1, count - 1);
}

// method_of(type) -> a method "apply" of that type, which runs the backward. PyTorch's own would look for
// what it calls in each call.
PyObject* method_of(PyObject*, PyObject* type) {
  static PyMethodDef method{"apply",
                            reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(apply_backward)),
                            METH_FASTCALL, nullptr};
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &method);
}

PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(forward)), METH_FASTCALL, nullptr},
    {"attend_recorded", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend_recorded)),
     METH_FASTCALL, nullptr},
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(backward)), METH_FASTCALL,
     nullptr},
    {"gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gradients)), METH_FASTCALL,
     nullptr},
    {"method_of", method_of, METH_O, nullptr},
    {"forward_of_operator", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(forward_of_operator)),
     METH_FASTCALL, nullptr},
    {"backward_of_operator",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(backward_of_operator)), METH_FASTCALL,
     nullptr},
    {}};

}  // namespace

Ref kind_of_text(PyObject* text) {
  static PyObject* const known = PyDict_New();
  PyObject* const found = PyDict_GetItemWithError(known, text);
  if (found || PyErr_Occurred()) return Ref::borrowed(found);
  const Ref make(function_of_torch("_kind"));
  Ref kind(make ? PyObject_CallFunctionObjArgs(make.get(), text, nullptr) : nullptr);
  return kind && PyDict_SetItem(known, text, kind.get()) == 0 ? std::move(kind) : Ref();
}

const Differentiable::Known* Differentiable::kind_of(const Seen& seen, std::uint64_t integers) {
  for (const auto& one : known_)
    if (one->seen == seen) return one.get();
  const Ref places[] = {Ref(places_of(seen.tensors)), Ref(places_of(integers)), Ref(places_of(seen.reals)),
                        Ref(places_of(seen.wants))};
  if (!places[0] || !places[1] || !places[2] || !places[3]) return nullptr;
  auto made = std::make_unique<Known>();
  made->seen = seen;
  made->kind =
      Ref(PyObject_CallFunctionObjArgs(make_.get(), places[0].get(), places[1].get(), places[2].get(),
                                       places[3].get(), seen.deterministic ? Py_True : Py_False, nullptr));
  if (!made->kind) return nullptr;
  if (made->kind.get() != Py_NotImplemented) {
    made->forward = Ref(PyObject_GetAttr(made->kind.get(), names().forward));
    made->apply = Ref(PyObject_GetAttr(made->kind.get(), names().apply));
    if (!made->forward || !made->apply) return nullptr;
    made->has_node = has_node(made->kind.get());
  }
  known_.push_back(std::move(made));
  return known_.back().get();
}

PyObject* Differentiable::call(const GivenArguments& arguments, bool returns_lse,
                               const Framework& framework) {
  PyObject* const* const values = arguments.values;
  Seen seen{.given = arguments.given, .tensors = arguments.tensors, .wants = arguments.wants};
  std::uint64_t integers = 0;
  Values of_kind[3];  // tensors, integers, reals
  const Tensor* read[most_arguments];
  for (std::size_t i = 0; seen.given >> i != 0; ++i) {
    const std::uint64_t bit = std::uint64_t{1} << i;
    if (!(seen.given & bit)) continue;
    if (seen.tensors & bit) {
      if (arguments.read[i]->framework().is_grad_enabled != framework.is_grad_enabled)
        return not_implemented();
      read[of_kind[0].count] = arguments.read[i];
      of_kind[0].add(values[i]);
    } else if (PyLong_Check(values[i])) {
      integers |= bit;
      of_kind[1].add(values[i]);
    } else if (PyFloat_Check(values[i])) {
      seen.reals |= bit;
      of_kind[2].add(values[i]);
    } else {
      return not_implemented();
    }
  }
  const Ref deterministic(PyObject_CallNoArgs(framework.is_deterministic));
  if (!deterministic) return nullptr;
  seen.deterministic = deterministic.get() == Py_True;
  const Known* const known = kind_of(seen, integers);
  if (!known) return nullptr;
  if (!known->forward) return not_implemented();
  for (std::size_t i = 0; i < of_kind[2].count; ++i) of_kind[1].add(of_kind[2].all[i]);
  if (known->has_node && !returns_lse) {
    Values all = of_kind[0];
    for (std::size_t i = 0; i < of_kind[1].count; ++i) all.add(of_kind[1].all[i]);
    for (std::size_t i = of_kind[0].count; i < all.count; ++i) read[i] = nullptr;
    Ref made(call_with_node(known->kind.get(), known->forward.get(), all.all, all.count, read));
    if (made.get() != Py_NotImplemented) return made.release();
  }
  const Ref numbers(of_kind[1].tuple());
  const Ref call(numbers ? PyTuple_Pack(3, known->kind.get(), numbers.get(), returns_lse ? Py_True : Py_False)
                         : nullptr);
  return call ? recorded(known->forward.get(), known->apply.get(), call.get(), of_kind[0], read) : nullptr;
}

int Differentiable::traverse(visitproc visit, void* arg) const {
  Py_VISIT(make_.get());
  for (const auto& one : known_) {
    Py_VISIT(one->kind.get());
    Py_VISIT(one->forward.get());
    Py_VISIT(one->apply.get());
  }
  return 0;
}

int add_autograd(PyObject* module) {
  return PyModule_AddFunctions(module, methods);
}

}  // namespace flashjit::python
