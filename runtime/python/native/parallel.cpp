#include "parallel.hpp"

#include <cstring>
#include <memory>

#include "errors.hpp"
#include "objects.hpp"

namespace flashjit::python {
namespace {

PyTypeObject *group_type, *parallel_type, *conversion_type;

constexpr const char* layouts[] = {"contiguous", "zigzag", "heads", "best"};

bool layout_of(const char* name, std::int32_t* layout) {
  for (std::int32_t i = 0; i < 4; ++i)
    if (std::strcmp(layouts[i], name) == 0) {
      *layout = i;
      return true;
    }
  refuse("layout is '" + std::string(name) + "': contiguous, zigzag, heads or best would work");
  return false;
}

// Calls `function` while other Python threads run. False with an exception.
template <class Function>
bool call(const Function& function) {
  flashjit_status status = FLASHJIT_OK;
  {
    const WithoutGil released;
    status = function();
  }
  if (status != FLASHJIT_OK) raise_last(status);
  return status == FLASHJIT_OK;
}

// ---- group ----

struct GroupObject {
  PyObject_HEAD flashjit_group* group;
};

PyObject* group_object(flashjit_group* group) {
  PyObject* const self = new_object(group_type);
  if (self)
    as<GroupObject>(self)->group = group;
  else
    flashjit_group_destroy(group);
  return self;
}
void group_dealloc(PyObject* self) {
  if (flashjit_group* const group = as<GroupObject>(self)->group) {
    const WithoutGil released;  // it ends its threads
    flashjit_group_destroy(group);
  }
  free_object(self);
}

PyObject* groups_of_threads(PyObject*, PyObject* args) {
  int size = 0;
  if (!PyArg_ParseTuple(args, "i:of_threads", &size)) return refuse_with_cause("a group of threads: ");
  std::vector<flashjit_group*> made(size > 0 ? static_cast<std::size_t>(size) : 1);
  if (!call([&] { return flashjit_groups_of_threads(size, made.data()); })) return nullptr;
  Ref ranks(PyList_New(size));
  for (int rank = 0; rank < size; ++rank) {
    PyObject* const one = group_object(made[static_cast<std::size_t>(rank)]);
    if (!ranks || !one || PyList_SetItem(ranks.get(), rank, one) != 0) ranks = Ref();
  }
  return ranks.release();
}
PyObject* group_name(PyObject*, PyObject* args) {
  int size = 0;
  if (!PyArg_ParseTuple(args, "i:name_of_processes", &size)) return refuse_with_cause("a group's name: ");
  char name[FLASHJIT_GROUP_NAME];
  return call([&] { return flashjit_group_name(size, name); }) ? PyUnicode_FromString(name) : nullptr;
}
PyObject* group_of_processes(PyObject*, PyObject* args) {
  const char* name = nullptr;
  int rank = 0, size = 0;
  if (!PyArg_ParseTuple(args, "sii:of_processes", &name, &rank, &size))
    return refuse_with_cause("a group of processes: ");
  flashjit_group* group = nullptr;
  return call([&] { return flashjit_group_of_processes(name, rank, size, &group); }) ? group_object(group)
                                                                                     : nullptr;
}
PyObject* group_of_nccl(PyObject*, PyObject* args) {
  PyObject* address = nullptr;
  if (!PyArg_ParseTuple(args, "O:of_nccl", &address)) return refuse_with_cause("a group of NCCL: ");
  void* const comm = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return refuse_with_cause("comm, an ncclComm_t's address as int: ");
  flashjit_group* group = nullptr;
  return call([&] { return flashjit_group_of_nccl(comm, &group); }) ? group_object(group) : nullptr;
}

PyObject* group_rank(PyObject* self, void* which) {
  std::int32_t rank = 0, size = 0;
  flashjit_group_rank(as<GroupObject>(self)->group, &rank, &size);
  return PyLong_FromLong(which ? size : rank);
}
PyObject* group_maps_memory(PyObject* self, void*) {
  std::int32_t maps_memory = 0;
  flashjit_group_transport(as<GroupObject>(self)->group, &maps_memory, nullptr);
  return PyBool_FromLong(maps_memory);
}
PyObject* group_transport_reason(PyObject* self, void*) {
  const char* reason = "";
  flashjit_group_transport(as<GroupObject>(self)->group, nullptr, &reason);
  return PyUnicode_FromString(reason);
}
PyObject* group_fail(PyObject* self, PyObject* args) {
  const char* why = nullptr;
  if (!PyArg_ParseTuple(args, "s:fail", &why)) return refuse_with_cause("why a rank fails: ");
  flashjit_group_fail(as<GroupObject>(self)->group, why);
  Py_RETURN_NONE;
}
PyObject* group_check(PyObject* self, PyObject*) {
  if (!call([&] { return flashjit_group_check(as<GroupObject>(self)->group); })) return nullptr;
  Py_RETURN_NONE;
}

// Tells the other ranks of the pending exception, which stays.
void tell_exception(PyObject* group) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref text(value ? PyObject_Str(value) : nullptr);
  const char* const why = text ? text_of(text.get()) : nullptr;
  PyErr_Clear();
  flashjit_group_fail(as<GroupObject>(group)->group, why ? why : "an exception");
  PyErr_Restore(type, value, trace);
}

// ---- attention ----

struct ParallelState {
  flashjit_parallel* parallel = nullptr;  // null: closed
  Ref engine, spec, group;
  SpecState gradients;
  bool used = false;  // other ranks wait for its end

  ~ParallelState() { close(); }
  // Waits for the other ranks if it was used.
  void close() {
    flashjit_parallel* const ended = std::exchange(parallel, nullptr);
    if (!ended) return;
    const WithoutGil released;
    flashjit_parallel_destroy(ended);
  }
};
struct ParallelObject {
  PyObject_HEAD ParallelState* state;
};

// ParallelAttention(engine, spec, group, layout, batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv)
PyObject* parallel_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *engine = nullptr, *spec = nullptr, *group = nullptr;
  const char* name = nullptr;
  flashjit_shape whole{};
  whole.struct_size = sizeof whole;
  std::int32_t layout = 0;
  if (!PyArg_ParseTuple(args, "O!O!O!siiiii:ParallelAttention", engine_type, &engine, spec_type, &spec,
                        group_type, &group, &name, &whole.batch, &whole.seqlen_q, &whole.seqlen_k,
                        &whole.num_heads_q, &whole.num_heads_kv))
    return refuse_with_cause("ParallelAttention: ");
  if (!layout_of(name, &layout)) {
    tell_exception(group);
    return nullptr;
  }
  auto state = std::make_unique<ParallelState>();
  state->engine = Ref::borrowed(engine);
  state->spec = Ref::borrowed(spec);
  state->group = Ref::borrowed(group);
  const SpecState& forward = *as<SpecObject>(spec)->state;
  if (!call([&] {
        return flashjit_parallel_create(as<EngineObject>(engine)->engine, forward.spec, &whole, layout,
                                        as<GroupObject>(group)->group, &state->parallel);
      }))
    return nullptr;
  const char* const text = text_of(forward.text.get());
  if (!text) return nullptr;
  if (const flashjit_status status = flashjit_spec_create_for_op(text, "backward", &state->gradients.spec);
      status != FLASHJIT_OK)
    return raise_last(status);
  state->gradients.fields = Ref::borrowed(forward.fields.get());
  state->gradients.written = {"dq", "dk", "dv"};
  PyObject* const self = new_object(type);
  if (self) as<ParallelObject>(self)->state = state.release();
  return self;
}
void parallel_dealloc(PyObject* self) {
  if (ParallelState* const state = as<ParallelObject>(self)->state) {
    // Without this the end would wait for ranks that wait for this one.
    if (state->parallel && state->used)
      flashjit_group_fail(as<GroupObject>(state->group.get())->group,
                          "it dropped a ParallelAttention that was in use; a with statement, or close() on "
                          "every rank, would work");
    delete state;
  }
  free_object(self);
}

// Null with an exception once it is closed.
ParallelState* state_of(PyObject* self) {
  ParallelState* const state = as<ParallelObject>(self)->state;
  return state->parallel ? state : refuse("this ParallelAttention was closed; another one would work");
}

PyObject* parallel_layout(PyObject* self, void* wants_reason) {
  const ParallelState* const state = state_of(self);
  std::int32_t layout = 0;
  const char* reason = nullptr;
  if (!state) return nullptr;
  flashjit_parallel_layout(state->parallel, &layout, &reason);
  return PyUnicode_FromString(wants_reason ? reason : layouts[layout]);
}
bool read_op(PyObject* args, const char* function, std::int32_t* backward) {
  const char* op = "forward";
  if (!PyArg_ParseTuple(args, "|s", &op)) {
    refuse_with_cause(function);
    return false;
  }
  *backward = std::strcmp(op, "backward") == 0;
  if (*backward || std::strcmp(op, "forward") == 0) return true;
  refuse("op is '" + std::string(op) + "': forward or backward would work");
  return false;
}
PyObject* parallel_workspace_bytes(PyObject* self, PyObject* args) {
  const ParallelState* const state = state_of(self);
  std::int32_t backward = 0;
  std::size_t bytes = 0;
  if (!state || !read_op(args, "workspace_bytes: ", &backward) ||
      !call([&] { return flashjit_parallel_workspace(state->parallel, backward, &bytes); }))
    return nullptr;
  return PyLong_FromSize_t(bytes);
}
PyObject* parallel_prepare(PyObject* self, PyObject* args) {
  ParallelState* const state = state_of(self);
  std::int32_t backward = 0;
  if (!state || !read_op(args, "prepare: ", &backward)) return nullptr;
  state->used = true;
  if (!call([&] { return flashjit_parallel_prepare(state->parallel, backward); })) return nullptr;
  Py_RETURN_NONE;
}
PyObject* launch(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names, bool backward) {
  ParallelState* const state = state_of(self);
  if (!state) return nullptr;
  const Ref alive = Ref::borrowed(self);
  Arguments arguments;
  PyObject* wanted = nullptr;
  void* stream = nullptr;
  SpecState& spec = backward ? state->gradients : *as<SpecObject>(state->spec.get())->state;
  state->used = true;
  if (!read_arguments(spec, args, count, names, arguments, &wanted, nullptr) ||
      !arguments.stream(wanted, &stream)) {
    tell_exception(state->group.get());
    return nullptr;
  }
  const auto run = backward ? flashjit_parallel_backward : flashjit_parallel_forward;
  if (!call([&] { return run(state->parallel, arguments.data(), arguments.size(), stream); })) return nullptr;
  Py_RETURN_NONE;
}
PyObject* parallel_forward(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return launch(self, args, count, names, false);
}
PyObject* parallel_backward(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return launch(self, args, count, names, true);
}
PyObject* parallel_close(PyObject* self, PyObject*) {
  as<ParallelObject>(self)->state->close();
  Py_RETURN_NONE;
}

// ---- conversion ----

struct ConversionState {
  flashjit_conversion* conversion = nullptr;  // null: closed
  Ref engine, group;

  ~ConversionState() { close(); }
  void close() {
    flashjit_conversion* const ended = std::exchange(conversion, nullptr);
    if (!ended) return;
    const WithoutGil released;
    flashjit_conversion_destroy(ended);
  }
};
struct ConversionObject {
  PyObject_HEAD ConversionState* state;
};

// LayoutConversion(engine, group, dtype, sizes, before, after)
PyObject* conversion_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *engine = nullptr, *group = nullptr, *sizes = nullptr;
  const char *dtype = nullptr, *names[2] = {};
  if (!PyArg_ParseTuple(args, "O!O!sO!ss:LayoutConversion", engine_type, &engine, group_type, &group, &dtype,
                        &PyTuple_Type, &sizes, &names[0], &names[1]))
    return refuse_with_cause("LayoutConversion: ");
  std::int32_t before = 0, after = 0;
  flashjit_tensor whole{};
  while (whole.dtype <= FLASHJIT_FP8_E5M2 && std::strcmp(dtype_name(whole.dtype), dtype) != 0) ++whole.dtype;
  whole.rank = static_cast<std::int32_t>(PyTuple_Size(sizes));
  for (int i = 0; i < whole.rank && i < FLASHJIT_MAX_RANK; ++i)
    whole.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
  if (PyErr_Occurred()) {
    refuse_with_cause("LayoutConversion: ");
  } else if (layout_of(names[0], &before)) {
    layout_of(names[1], &after);
  }
  if (PyErr_Occurred()) {
    tell_exception(group);
    return nullptr;
  }
  auto state = std::make_unique<ConversionState>();
  state->engine = Ref::borrowed(engine);
  state->group = Ref::borrowed(group);
  if (!call([&] {
        return flashjit_conversion_create(as<EngineObject>(engine)->engine, as<GroupObject>(group)->group,
                                          &whole, before, after, &state->conversion);
      }))
    return nullptr;
  PyObject* const self = new_object(type);
  if (self) as<ConversionObject>(self)->state = state.release();
  return self;
}
void conversion_dealloc(PyObject* self) {
  if (ConversionState* const state = as<ConversionObject>(self)->state) {
    if (state->conversion)
      flashjit_group_fail(as<GroupObject>(state->group.get())->group,
                          "it dropped a LayoutConversion; a with statement, or close() on every rank, would "
                          "work");
    delete state;
  }
  free_object(self);
}
// convert(from, to, stream)
PyObject* conversion_convert(PyObject* self, PyObject* args) {
  const ConversionState& state = *as<ConversionObject>(self)->state;
  if (!state.conversion) return refuse("this LayoutConversion was closed; another one would work");
  PyObject *from = nullptr, *to = nullptr, *wanted = nullptr;
  if (!PyArg_ParseTuple(args, "OOO:convert", &from, &to, &wanted)) return nullptr;
  const Ref alive = Ref::borrowed(self);
  Arguments arguments;
  void* stream = nullptr;
  if (!arguments.add({}, "from", from) || !arguments.add({.written = true}, "to", to) ||
      !arguments.stream(wanted, &stream)) {
    tell_exception(state.group.get());
    return nullptr;
  }
  const flashjit_argument* const both = arguments.data();
  if (!call([&] {
        return flashjit_conversion_run(state.conversion, both[0].value.tensor, both[1].value.tensor, stream);
      }))
    return nullptr;
  Py_RETURN_NONE;
}
PyObject* conversion_close(PyObject* self, PyObject*) {
  as<ConversionObject>(self)->state->close();
  Py_RETURN_NONE;
}

// sequence_chunks(layout, seqlen, rank, size) -> [slice]
PyObject* sequence_chunks(PyObject*, PyObject* args) {
  const char* name = nullptr;
  int seqlen = 0, rank = 0, size = 0;
  if (!PyArg_ParseTuple(args, "siii:sequence_chunks", &name, &seqlen, &rank, &size))
    return refuse_with_cause("sequence_chunks: ");
  std::int32_t layout = 0, begins[2] = {}, count = 0, length = 0;
  if (!layout_of(name, &layout) ||
      !call([&] { return flashjit_sequence_chunks(layout, seqlen, rank, size, begins, &count, &length); }))
    return nullptr;
  Ref chunks(PyList_New(count));
  for (int i = 0; chunks && i < count; ++i) {
    const Ref begin(PyLong_FromLong(begins[i])), end(PyLong_FromLong(begins[i] + length));
    PyObject* const chunk = begin && end ? PySlice_New(begin.get(), end.get(), nullptr) : nullptr;
    if (!chunk || PyList_SetItem(chunks.get(), i, chunk) != 0) return nullptr;
  }
  return chunks.release();
}

PyMethodDef group_methods[] = {
    {"check", group_check, METH_NOARGS,
     "check($self, /)\n\nRaises DeviceFailedError once a rank's call has failed or its process has ended. "
     "With GPUs, ask after waiting for a stream."},
    {"fail", group_fail, METH_VARARGS,
     "fail($self, why, /)\n\nMakes waiting and later calls of all ranks raise DeviceFailedError with this "
     "text: for a rank that cannot go on."},
    {}};
PyGetSetDef group_getters[] = {
    {"rank", group_rank, nullptr, "This rank, from 0.", nullptr},
    {"size", group_rank, nullptr, "The number of ranks.", const_cast<char*>("size")},
    {"maps_memory", group_maps_memory, nullptr,
     "Whether ranks reach each other's memory. Others send and receive.", nullptr},
    {"transport_reason", group_transport_reason, nullptr, "Why they do, or do not.", nullptr},
    {}};
char group_doc[] = "A rank's place among those that compute together.";
PyType_Slot group_slots[] = {{Py_tp_doc, group_doc},
                             {Py_tp_dealloc, reinterpret_cast<void*>(group_dealloc)},
                             {Py_tp_methods, group_methods},
                             {Py_tp_getset, group_getters},
                             {0, nullptr}};
PyType_Spec group_spec = {"flashjit.parallel.Group", sizeof(GroupObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, group_slots};

PyMethodDef parallel_methods[] = {
    {"workspace_bytes", parallel_workspace_bytes, METH_VARARGS,
     "workspace_bytes($self, op='forward', /)\n\nThe bytes that the argument workspace must have."},
    {"prepare", parallel_prepare, METH_VARARGS,
     "prepare($self, op='forward', /)\n\nLoads the kernels of a forward or a backward, and makes the memory "
     "that ranks write into. All ranks call it; otherwise the first launch does."},
    {"forward", function(parallel_forward), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"backward", function(parallel_backward), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"close", parallel_close, METH_NOARGS,
     "close($self, /)\n\nWaits until all ranks close theirs. The end of a with statement calls it."},
    {}};
PyGetSetDef parallel_getters[] = {
    {"layout", parallel_layout, nullptr, "The layout: contiguous, zigzag or heads.", nullptr},
    {"layout_reason", parallel_layout, nullptr, "Why it is that one.", const_cast<char*>("reason")},
    {}};
PyType_Slot parallel_slots[] = {{Py_tp_new, reinterpret_cast<void*>(parallel_new)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(parallel_dealloc)},
                                {Py_tp_methods, parallel_methods},
                                {Py_tp_getset, parallel_getters},
                                {0, nullptr}};
PyType_Spec parallel_spec = {"flashjit._native.ParallelAttention", sizeof(ParallelObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, parallel_slots};

PyMethodDef conversion_methods[] = {
    {"_convert", conversion_convert, METH_VARARGS, nullptr},
    {"close", conversion_close, METH_NOARGS,
     "close($self, /)\n\nWaits until all ranks close theirs. The end of a with statement calls it."},
    {}};
PyType_Slot conversion_slots[] = {{Py_tp_new, reinterpret_cast<void*>(conversion_new)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(conversion_dealloc)},
                                  {Py_tp_methods, conversion_methods},
                                  {0, nullptr}};
PyType_Spec conversion_spec = {"flashjit._native.LayoutConversion", sizeof(ConversionObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, conversion_slots};

PyMethodDef functions[] = {{"groups_of_threads", groups_of_threads, METH_VARARGS, nullptr},
                           {"group_name", group_name, METH_VARARGS, nullptr},
                           {"group_of_processes", group_of_processes, METH_VARARGS, nullptr},
                           {"group_of_nccl", group_of_nccl, METH_VARARGS, nullptr},
                           {"sequence_chunks", sequence_chunks, METH_VARARGS, nullptr},
                           {}};

}  // namespace

int add_parallel(PyObject* module) {
  if (add_type(module, &group_spec, &group_type) < 0 ||
      add_type(module, &parallel_spec, &parallel_type) < 0 ||
      add_type(module, &conversion_spec, &conversion_type) < 0)
    return -1;
  return PyModule_AddFunctions(module, functions);
}

}  // namespace flashjit::python
