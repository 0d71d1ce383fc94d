#include "objects.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "errors.hpp"

namespace flashjit::python {

PyTypeObject *engine_type, *spec_type;

namespace {

PyTypeObject *kernel_type, *prepared_type;

// The arguments that an operation's launches write, by name.
struct Operation {
  const char* name;
  std::vector<std::string> written;
};
const Operation operations[] = {
    {"forward", {"o", "lse"}},
    {"decode", {"o", "lse", "q_out"}},
    {"merge", {"o", "lse"}},
    {"append_kv", {"k", "v", "q_out"}},
    {"copy_kv", {"k", "v", "k_scale", "v_scale"}},
    {"backward", {"dq", "dk", "dv", "d_sink_logits"}},
    {"make_block_lists", {"block_offsets", "block_indices", "block_bitmask_of", "block_bitmasks"}},
};

// ---- engine ----

// A Ctrl-C ends what an engine compiles or tunes on the main thread, which is the one that runs signal
// handlers.
int32_t is_interrupted(void*) {
  if (::syscall(SYS_gettid) != ::getpid()) return 0;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_Occurred() || PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

// None: null.
bool text_or_none(PyObject* value, const char* name, const char** text) {
  *text = nullptr;
  if (!value || value == Py_None) return true;
  *text = PyUnicode_Check(value) ? text_of(value) : nullptr;
  if (!*text) refuse(std::string(name) + " is of type " + type_name(value) + ", a str would work");
  return *text != nullptr;
}

PyObject* engine_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  const char* names[] = {"device",       "target",      "cache_dir",    "cache_path",      "cache_max_bytes",
                         "num_threads",  "policy",      "tune_seconds", "compile_seconds", "compile_bytes",
                         "cache_remote", "cache_trust", "signing_key",  "store_configs",   nullptr};
  PyObject *device = nullptr, *target = nullptr, *cache_dir = nullptr, *cache_path = nullptr,
           *policy = nullptr, *cache_remote = nullptr, *cache_trust = nullptr, *signing_key = nullptr;
  int store_configs = 0;
  unsigned long long cache_max_bytes = 0, compile_bytes = 0;
  double tune_seconds = 0, compile_seconds = 0;
  int num_threads = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O$OOOKiOddKOOOp:Engine", const_cast<char**>(names),
                                   &device, &target, &cache_dir, &cache_path, &cache_max_bytes, &num_threads,
                                   &policy, &tune_seconds, &compile_seconds, &compile_bytes, &cache_remote,
                                   &cache_trust, &signing_key, &store_configs))
    return refuse_with_cause("the engine's options cannot be read: ");
  flashjit_engine_options options{};
  options.struct_size = sizeof options;
  const char* policy_text = nullptr;
  if (!text_or_none(device, "device", &options.device) || !text_or_none(target, "target", &options.target) ||
      !text_or_none(cache_dir, "cache_dir", &options.cache_dir) ||
      !text_or_none(cache_path, "cache_path", &options.cache_path) ||
      !text_or_none(cache_remote, "cache_remote", &options.cache_remote) ||
      !text_or_none(cache_trust, "cache_trust", &options.cache_trust) ||
      !text_or_none(signing_key, "signing_key", &options.signing_key) ||
      !text_or_none(policy, "policy", &policy_text))
    return nullptr;
  constexpr const char* policies[] = {"heuristic", "tune_on_first_use", "require_prebuilt"};
  options.policy = policy_text ? -1 : FLASHJIT_POLICY_HEURISTIC;
  for (int i = 0; i < 3 && policy_text; ++i)
    if (std::strcmp(policy_text, policies[i]) == 0) options.policy = i;
  if (options.policy < 0)
    return refuse("policy is '" + std::string(policy_text) +
                  "': heuristic, tune_on_first_use or require_prebuilt would work");
  options.cache_max_bytes = cache_max_bytes;
  options.num_threads = num_threads;
  options.tune_seconds = tune_seconds;
  options.compile_seconds = compile_seconds;
  options.compile_bytes = compile_bytes;
  options.store_configs = store_configs;
  options.compile_cancelled = is_interrupted;

  flashjit_engine* engine = nullptr;
  flashjit_status status = FLASHJIT_OK;
  {
    const WithoutGil released;
    status = flashjit_engine_create(&options, &engine);
    // NVRTC before 12.8 cannot be interrupted; it can be used without.
    if (status == FLASHJIT_UNSUPPORTED && compile_seconds == 0 && compile_bytes == 0) {
      options.compile_cancelled = nullptr;
      status = flashjit_engine_create(&options, &engine);
    }
  }
  if (status != FLASHJIT_OK) return raise_last(status);
  PyObject* const self = new_object(type);
  if (!self) {
    flashjit_engine_destroy(engine);
    return nullptr;
  }
  as<EngineObject>(self)->engine = engine;
  return self;
}

void engine_dealloc(PyObject* self) {
  if (flashjit_engine* const engine = as<EngineObject>(self)->engine) {
    const WithoutGil released;  // it ends its threads
    flashjit_engine_destroy(engine);
  }
  free_object(self);
}

PyObject* engine_get(PyObject* self, PyObject* args, PyObject* keywords) {
  const char* names[] = {"spec",         "batch",     "seqlen_q", "seqlen_k", "num_heads_q",
                         "num_heads_kv", "page_size", "total_q",  "total_k",  nullptr};
  PyObject* spec = nullptr;
  flashjit_shape shape{};
  shape.struct_size = sizeof shape;
  shape.batch = shape.seqlen_q = shape.seqlen_k = shape.num_heads_q = 1;
  shape.num_heads_kv = -1;
  long long total_q = 0, total_k = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!|$iiiiiiLL:get", const_cast<char**>(names), spec_type,
                                   &spec, &shape.batch, &shape.seqlen_q, &shape.seqlen_k, &shape.num_heads_q,
                                   &shape.num_heads_kv, &shape.page_size, &total_q, &total_k))
    return refuse_with_cause("the sizes of a get cannot be read: ");
  if (shape.num_heads_kv < 0) shape.num_heads_kv = shape.num_heads_q;
  shape.total_q = total_q;
  shape.total_k = total_k;
  const flashjit_kernel* kernel = nullptr;
  flashjit_status status = FLASHJIT_OK;
  {
    const WithoutGil released;
    status = flashjit_engine_get(as<EngineObject>(self)->engine, as<SpecObject>(spec)->state->spec, &shape,
                                 &kernel);
  }
  if (status != FLASHJIT_OK) return raise_last(status);
  if (PyErr_Occurred()) return nullptr;  // interrupted while it tuned
  PyObject* const made = new_object(kernel_type);
  if (!made) return nullptr;
  Py_INCREF(self);
  Py_INCREF(spec);
  as<KernelObject>(made)->kernel = kernel;
  as<KernelObject>(made)->engine = self;
  as<KernelObject>(made)->spec = spec;
  return made;
}

// merge(stream, o, parts_o, parts_lse, lse)
PyObject* engine_merge(PyObject* self, PyObject* args) {
  PyObject *stream_object, *o, *parts_o, *parts_lse, *lse;
  if (!PyArg_ParseTuple(args, "OOOOO:merge", &stream_object, &o, &parts_o, &parts_lse, &lse)) return nullptr;
  Arguments arguments;
  if (!arguments.add({FLASHJIT_ARG_PARTS_O}, "parts_o", parts_o) ||
      !arguments.add({FLASHJIT_ARG_PARTS_LSE}, "parts_lse", parts_lse) ||
      !arguments.add({FLASHJIT_ARG_O, Kind::tensor, true}, "out", o) ||
      (lse != Py_None && !arguments.add({FLASHJIT_ARG_LSE, Kind::tensor, true}, "lse", lse)))
    return nullptr;
  void* stream = nullptr;
  if (!arguments.stream(stream_object, &stream)) return nullptr;
  flashjit_status status = FLASHJIT_OK;
  {
    const WithoutGil released;
    status = flashjit_merge(as<EngineObject>(self)->engine, arguments.data(), arguments.size(), stream);
  }
  if (status != FLASHJIT_OK) return raise_last(status);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// ---- spec ----

PyObject* spec_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  if (keywords && PyDict_Size(keywords) > 0)
    return refuse("Spec takes one argument: JSON text or a dict of fields");
  PyObject* given = nullptr;
  if (!PyArg_ParseTuple(args, "O:Spec", &given)) return refuse_with_cause("");
  auto state = std::make_unique<SpecState>();
  const Ref json(PyImport_ImportModule("json"));
  if (!json) return nullptr;
  state->text = PyUnicode_Check(given) ? Ref::borrowed(given)
                                       : Ref(PyObject_CallMethod(json.get(), "dumps", "O", given));
  const char* const text = state->text ? text_of(state->text.get()) : nullptr;
  if (!text) return refuse_with_cause("a spec is JSON text or a dict of its fields: ");
  if (const flashjit_status status = flashjit_spec_create(text, &state->spec); status != FLASHJIT_OK)
    return raise_last(status);
  state->fields = Ref(PyObject_CallMethod(json.get(), "loads", "O", state->text.get()));
  if (!state->fields) return nullptr;
  const char* const op = text_of(PyDict_GetItemString(state->fields.get(), "op"));
  for (const Operation& one : operations)
    if (op && std::strcmp(one.name, op) == 0) state->written = one.written;
  // Other operations ignore "grad".
  PyObject *table = nullptr, *declared = nullptr;
  Py_ssize_t place = 0;
  if (PyObject* const tables = PyDict_GetItemString(state->fields.get(), "tables"))
    while (PyDict_Next(tables, &place, &table, &declared))
      if (PyDict_GetItemString(declared, "grad") == Py_True)
        if (const char* const name = text_of(table)) state->written.push_back("d_" + std::string(name));
  if (PyDict_GetItemString(state->fields.get(), "append") == Py_True)
    state->written.insert(state->written.end(), {"k", "v"});
  PyObject* const self = new_object(type);
  if (self) as<SpecObject>(self)->state = state.release();
  return self;
}

void spec_dealloc(PyObject* self) {
  delete as<SpecObject>(self)->state;
  free_object(self);
}

PyObject* spec_json(PyObject* self, void*) {
  return Ref::borrowed(as<SpecObject>(self)->state->text.get()).release();
}

// ---- kernel ----

void kernel_dealloc(PyObject* self) {
  Py_XDECREF(as<KernelObject>(self)->spec);
  Py_XDECREF(as<KernelObject>(self)->engine);
  free_object(self);
}

PyObject* kernel_info(PyObject* self, void*) {
  const char* text = nullptr;
  if (const flashjit_status status = flashjit_kernel_info(as<KernelObject>(self)->kernel, &text);
      status != FLASHJIT_OK)
    return raise_last(status);
  const Ref json(PyImport_ImportModule("json"));
  return json ? PyObject_CallMethod(json.get(), "loads", "s", text) : nullptr;
}

PyObject* kernel_workspace(PyObject* self, PyObject* args, PyObject* keywords) {
  const char* names[] = {"batch",     "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv",
                         "page_size", "total_q",  "total_k",  nullptr};
  flashjit_shape shape{};
  shape.struct_size = sizeof shape;
  shape.batch = shape.seqlen_q = shape.seqlen_k = shape.num_heads_q = 1;
  shape.num_heads_kv = -1;
  long long total_q = 0, total_k = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$iiiiiiLL:workspace_bytes", const_cast<char**>(names),
                                   &shape.batch, &shape.seqlen_q, &shape.seqlen_k, &shape.num_heads_q,
                                   &shape.num_heads_kv, &shape.page_size, &total_q, &total_k))
    return refuse_with_cause("the sizes of a workspace cannot be read: ");
  if (shape.num_heads_kv < 0) shape.num_heads_kv = shape.num_heads_q;
  shape.total_q = total_q;
  shape.total_k = total_k;
  std::size_t bytes = 0;
  const flashjit_status status = flashjit_kernel_workspace(as<KernelObject>(self)->kernel, &shape, &bytes);
  return status == FLASHJIT_OK ? PyLong_FromSize_t(bytes) : raise_last(status);
}

PyObject* kernel_launch(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const KernelObject& kernel = *as<KernelObject>(self);
  Arguments arguments;
  PyObject* wanted = nullptr;
  void* stream = nullptr;
  if (!read_arguments(*as<SpecObject>(kernel.spec)->state, args, count, names, arguments, &wanted, nullptr) ||
      !arguments.stream(wanted, &stream))
    return nullptr;
  flashjit_status status = FLASHJIT_OK;
  {
    const WithoutGil released;
    status = flashjit_kernel_launch(kernel.kernel, arguments.data(), arguments.size(), stream);
  }
  if (status != FLASHJIT_OK) return raise_last(status);
  Py_RETURN_NONE;
}

// ---- prepared ----

struct PreparedState {
  flashjit_prepared* prepared = nullptr;
  Ref kernel;
  Arguments arguments;
  std::vector<Ref> kept;  // the tensors, until no launch will read them
  ~PreparedState() { flashjit_prepared_destroy(prepared); }
};
struct PreparedObject {
  PyObject_HEAD PreparedState* state;
};

PyObject* kernel_prepare(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const KernelObject& kernel = *as<KernelObject>(self);
  auto state = std::make_unique<PreparedState>();
  state->kernel = Ref::borrowed(self);
  if (!read_arguments(*as<SpecObject>(kernel.spec)->state, args, count, names, state->arguments, nullptr,
                      &state->kept))
    return nullptr;
  const flashjit_status status = flashjit_kernel_prepare(kernel.kernel, state->arguments.data(),
                                                         state->arguments.size(), &state->prepared);
  if (status != FLASHJIT_OK) return raise_last(status);
  PyObject* const made = new_object(prepared_type);
  if (made) as<PreparedObject>(made)->state = state.release();
  return made;
}

PyObject* prepared_launch(PyObject* self, PyObject* args, PyObject* keywords) {
  const char* names[] = {"stream", nullptr};
  PyObject* wanted = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:launch", const_cast<char**>(names), &wanted))
    return refuse_with_cause("a prepared launch takes only a stream: ");
  const PreparedState& state = *as<PreparedObject>(self)->state;
  void* stream = nullptr;
  if (!state.arguments.stream(wanted, &stream)) return nullptr;
  flashjit_status status = FLASHJIT_OK;
  {
    const WithoutGil released;
    status = flashjit_prepared_launch(state.prepared, stream);
  }
  if (status != FLASHJIT_OK) return raise_last(status);
  Py_RETURN_NONE;
}

void prepared_dealloc(PyObject* self) {
  delete as<PreparedObject>(self)->state;
  free_object(self);
}

PyMethodDef engine_methods[] = {{"get", function(engine_get), METH_VARARGS | METH_KEYWORDS,
                                 "get($self, spec, /, *, batch=1, seqlen_q=1, seqlen_k=1, num_heads_q=1, "
                                 "num_heads_kv=num_heads_q, page_size=0, "
                                 "total_q=0, total_k=0)\n\nThe Kernel for the Spec at sizes like these; the "
                                 "first call compiles or loads it."},
                                {"_merge", engine_merge, METH_VARARGS, nullptr},
                                {}};
PyType_Slot engine_slots[] = {{Py_tp_new, reinterpret_cast<void*>(engine_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(engine_dealloc)},
                              {Py_tp_methods, engine_methods},
                              {0, nullptr}};
PyType_Spec engine_spec = {"flashjit._native.Engine", sizeof(EngineObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, engine_slots};

PyGetSetDef spec_getters[] = {{"json", spec_json, nullptr, "The spec's JSON text, as it was given.", nullptr},
                              {}};
PyType_Slot spec_slots[] = {{Py_tp_new, reinterpret_cast<void*>(spec_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(spec_dealloc)},
                            {Py_tp_getset, spec_getters},
                            {0, nullptr}};
PyType_Spec spec_spec = {"flashjit._native.Spec", sizeof(SpecObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, spec_slots};

PyMethodDef kernel_methods[] = {
    {"launch", function(kernel_launch), METH_FASTCALL | METH_KEYWORDS,
     "launch($self, /, *, stream=None, **arguments)\n\nRuns the kernel on tensors and numbers by their "
     "names. On a GPU "
     "it is asynchronous, on the framework's current stream unless stream, the address of a CUDA stream, is "
     "given."},
    {"prepare", function(kernel_prepare), METH_FASTCALL | METH_KEYWORDS,
     "prepare($self, /, **arguments)\n\nChecks and encodes the arguments once, for many launches. The result "
     "keeps the "
     "tensors alive."},
    {"workspace_bytes", function(kernel_workspace), METH_VARARGS | METH_KEYWORDS,
     "workspace_bytes($self, /, *, batch=1, seqlen_q=1, seqlen_k=1, num_heads_q=1, num_heads_kv=num_heads_q, "
     "page_size=0, total_q=0, total_k=0)\n\nThe bytes that the argument workspace must have."},
    {}};
PyGetSetDef kernel_getters[] = {
    {"info", kernel_info, nullptr, "Facts about the kernel: target, config, key, origin, registers, times.",
     nullptr},
    {}};
char kernel_doc[] = "A loaded kernel, of Engine.get. It keeps its engine alive.";
PyType_Slot kernel_slots[] = {{Py_tp_doc, kernel_doc},
                              {Py_tp_dealloc, reinterpret_cast<void*>(kernel_dealloc)},
                              {Py_tp_methods, kernel_methods},
                              {Py_tp_getset, kernel_getters},
                              {0, nullptr}};
PyType_Spec kernel_spec = {"flashjit.Kernel", sizeof(KernelObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, kernel_slots};

PyMethodDef prepared_methods[] = {
    {"launch", function(prepared_launch), METH_VARARGS | METH_KEYWORDS,
     "launch($self, /, stream=None)\n\nRuns the kernel on the tensors that were prepared."},
    {}};
char prepared_doc[] =
    "Arguments that were checked and encoded once, of Kernel.prepare. It keeps their tensors alive.";
PyType_Slot prepared_slots[] = {{Py_tp_doc, prepared_doc},
                                {Py_tp_dealloc, reinterpret_cast<void*>(prepared_dealloc)},
                                {Py_tp_methods, prepared_methods},
                                {0, nullptr}};
PyType_Spec prepared_spec = {"flashjit.Prepared", sizeof(PreparedObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, prepared_slots};

}  // namespace

bool read_arguments(SpecState& spec, PyObject* const* args, Py_ssize_t count, PyObject* names,
                    Arguments& arguments, PyObject** stream, std::vector<Ref>* kept) {
  if (count > 0) {
    refuse("a launch takes its arguments by name, such as q=tensor");
    return false;
  }
  const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GetItem(names, i);
    if (args[i] == Py_None) continue;  // as if it were left out
    if (stream && PyUnicode_CompareWithASCIIString(name, "stream") == 0) {
      *stream = args[i];
      continue;
    }
    const NamedInfo* const known = spec.find(name);
    if (!known) return false;
    const std::string text = known->text;  // reading a tensor may run code that grows the list
    const ArgumentInfo info = known->info;
    if (!arguments.add(info, text.c_str(), args[i])) return false;
    if (kept) kept->push_back(Ref::borrowed(args[i]));
  }
  return true;
}

int add_type(PyObject* module, PyType_Spec* spec, PyTypeObject** type) {
  *type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(spec));
  return *type ? PyModule_AddType(module, *type) : -1;
}

SpecState::~SpecState() {
  for (const NamedInfo& name : names) Py_DECREF(name.name);
  flashjit_spec_destroy(spec);
}

const NamedInfo* SpecState::find(PyObject* name) {
  for (const NamedInfo& known : names)
    if (known.name == name) return &known;
  const char* const wanted = text_of(name);
  if (!wanted) return nullptr;
  for (const NamedInfo& known : names)
    if (known.text == wanted) return &known;
  NamedInfo found{.name = name, .text = wanted, .info = {}};
  if (const flashjit_status status = flashjit_spec_argument(spec, wanted, &found.info.id);
      status != FLASHJIT_OK)
    return raise_last(status);
  if (found.info.id < FLASHJIT_FIRST_NAMED_ARG) {
    found.info.kind = kind_of(wanted);
  } else if (PyObject* const scalars = PyDict_GetItemString(fields.get(), "scalars")) {
    if (PyObject* const dtype = PyDict_GetItemString(scalars, wanted))
      found.info.kind = PyUnicode_CompareWithASCIIString(dtype, "int32") == 0 ? Kind::integer : Kind::real;
  }
  if (found.text == "softcap" && found.info.id >= FLASHJIT_FIRST_NAMED_ARG) found.info.kind = Kind::real;
  found.info.written = std::find(written.begin(), written.end(), found.text) != written.end();
  Py_INCREF(name);
  names.push_back(std::move(found));
  return &names.back();
}

int add_objects(PyObject* module) {
  if (add_type(module, &engine_spec, &engine_type) < 0 || add_type(module, &spec_spec, &spec_type) < 0 ||
      add_type(module, &kernel_spec, &kernel_type) < 0 ||
      add_type(module, &prepared_spec, &prepared_type) < 0)
    return -1;
  return 0;
}

}  // namespace flashjit::python
