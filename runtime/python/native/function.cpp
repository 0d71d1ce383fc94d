#include "function.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <vector>

#include "autograd.hpp"
#include "errors.hpp"
#include "objects.hpp"

namespace flashjit::python {
namespace {

constexpr std::size_t most_names = 64;
constexpr std::int64_t most_rows = std::int64_t{1} << 30;

// All that decides the spec, beside what a Function was made for.
struct Key {
  std::uint64_t given = 0;  // bit i: argument i
  std::int32_t device_kind = 0, device_index = 0;
  std::int32_t head_dim = 0, head_dim_v = 0;
  std::int8_t out_dtype = -1;
  std::int8_t dtypes[most_names] = {};
  bool operator==(const Key&) const = default;
};

struct Entry {
  Key key;
  Ref engine, spec;
  flashjit_dtype o_dtype = FLASHJIT_FP32;
  ArgumentInfo infos[most_names];
  // The kernel of the last call: a get for other sizes may compile, and so takes place without the GIL.
  flashjit_shape shape{};
  const flashjit_kernel* kernel = nullptr;
  std::size_t workspace_bytes = 0;
};

struct FunctionState {
  Ref make;                // make(device, dtypes, head_dim, head_dim_v, out_dtype) -> (engine, spec, o_dtype)
  std::vector<Ref> names;  // of arguments, interned
  std::vector<std::string> shown;  // the names in messages
  std::vector<Kind> kinds;         // those that the names tell
  bool writes_o = false, writes_lse = false, heads_first = false;
  int head_dim_v = 0;         // not 0: v is as many first columns of k, and no argument
  std::uint64_t swapped = 0;  // bit i: argument i is [batch, heads, seqlen, head_dim]
  int q = -1, k = -1, v = -1, k_new = -1, cu_seqlens_q = -1, max_seqlen_q = -1, max_seqlen_k = -1,
      page_table = -1, slots = -1, from_slots = -1;
  std::uint64_t sources = 0;  // bit i: rows are copied from argument i
  Differentiable differentiable;
  std::vector<std::unique_ptr<Entry>> entries;  // never removed: a call uses them without the GIL
};
struct FunctionObject {
  PyObject_HEAD FunctionState* state;
};
PyTypeObject* function_type;

// The arguments of one call.
struct Call {
  const FunctionState& f;
  PyObject* const* values;
  const Tensor* tensors[most_names];  // where the bit is set
  union Own {
    Own() {}
    ~Own() {}
    Tensor all[most_names];
  } own;
  std::uint64_t read = 0, owned = 0;  // bit i: argument i is a tensor; it was read here
  std::uint64_t wants = 0;            // PyTorch wants a gradient by it
  int grad_enabled = -1;              // unknown

  Call(const FunctionState& function, PyObject* const* given) : f(function), values(given) {}
  Call(const Call&) = delete;
  ~Call() {
    for (std::size_t i = 0; owned >> i != 0; ++i)
      if (owned >> i & 1) std::destroy_at(&own.all[i]);
  }
  const flashjit_tensor* tensor(int i) const {
    return i >= 0 && read >> i & 1 ? &tensors[i]->get() : nullptr;
  }
};

// Whether it is a number of Python or a scalar of NumPy.
bool is_number(PyObject* value) {
  return PyLong_Check(value) || PyFloat_Check(value) || (PyNumber_Check(value) && !is_tensor(value));
}

enum class Read { done, failed, left_to_framework };

// Reads the tensors but for those that were read already, and what decides the spec.
Read read(Call& call, const Tensor* const* given, PyObject* out, const Tensor* out_tensor, Key& key) {
  const FunctionState& f = call.f;
  for (std::size_t i = 0; i < f.names.size(); ++i) {
    PyObject* const value = call.values[i];
    if (value == Py_None) continue;
    const std::uint64_t bit = std::uint64_t{1} << i;
    key.given |= bit;
    if (given && given[i]) {
      call.tensors[i] = given[i];
      call.read |= bit;
      key.dtypes[i] = static_cast<std::int8_t>(given[i]->get().dtype);
      continue;
    }
    if (f.kinds[i] != Kind::tensor || is_number(value)) {
      key.dtypes[i] = given_number(value);
      continue;
    }
    Tensor& tensor = *std::construct_at(&call.own.all[i]);
    call.tensors[i] = &tensor;
    call.read |= bit;
    call.owned |= bit;
    const char* const shown = f.shown[i].c_str();
    const Framework* const framework = framework_of(value, shown);
    if (!framework) return Read::failed;
    const bool may_leave = f.differentiable.is_possible() && framework->is_grad_enabled != Py_None;
    if (may_leave && !framework->has_memory) return Read::left_to_framework;
    const int wanted = tensor.read(value, shown) ? tensor.wants_gradient(value, &call.grad_enabled) : -1;
    if (may_leave && wanted < 0) {
      PyErr_Clear();
      return Read::left_to_framework;
    }
    if (wanted > 0) call.wants |= bit;
    if (wanted > 0 && !may_leave) refuse_gradient(shown);
    if (wanted != 0 && !may_leave) return Read::failed;
    if (f.swapped >> i & 1) tensor.put_rows_first();
    key.dtypes[i] = static_cast<std::int8_t>(tensor.get().dtype);
  }
  if (out != Py_None) key.out_dtype = static_cast<std::int8_t>(out_tensor->get().dtype);
  return Read::done;
}

bool fits(std::int64_t size, std::int32_t* to) {
  *to = static_cast<std::int32_t>(size);
  return size >= 0 && size <= std::numeric_limits<std::int32_t>::max();
}

// The number that bounds a packed length, else the total.
bool longest(const Call& call, int place, std::int64_t total, std::int32_t* length) {
  if (place >= 0 && call.values[place] != Py_None) {
    const long long given = PyLong_AsLongLong(call.values[place]);
    if (given == -1 && PyErr_Occurred()) {
      refuse_with_cause("argument " + call.f.shown[static_cast<std::size_t>(place)] + " is no int: ");
      return false;
    }
    total = given;
  }
  return fits(std::min(total, most_rows), length);
}

// The shape of a copy of rows from slots of caches.
bool shape_of_copy(const Call& call, flashjit_shape& shape) {
  const FunctionState& f = call.f;
  const flashjit_tensor *const k = call.tensor(f.k), *const slots = call.tensor(f.from_slots);
  const char* wrong = nullptr;
  shape.batch = 1;
  if (!k || k->rank != 4)
    wrong =
        "argument k is no cache: [batch, seqlen, heads, head_dim] or [num_pages, page_size, heads, head_dim] "
        "would work";
  else if (!slots || slots->rank != 1)
    wrong = "argument from_slots is no list of slots: int64 [rows] would work";
  else if (!fits(slots->shape[0], &shape.seqlen_q) || !fits(k->shape[1], &shape.seqlen_k) ||
           !fits(k->shape[2], &shape.num_heads_q) || !fits(k->shape[2], &shape.num_heads_kv))
    wrong = "sizes of the tensors are beyond 2147483647";
  if (wrong) refuse(wrong);
  return !wrong;
}

// Whether a launch uses its workspace. A copy does if its sources share memory with what it writes.
bool needs_workspace(const Call& call) {
  if (call.f.sources == 0) return true;
  for (std::size_t i = 0; i < call.f.names.size(); ++i)
    for (std::size_t j = 0; j < call.f.names.size(); ++j) {
      const flashjit_tensor *const source = call.tensor(static_cast<int>(i)), *const other = call.tensor(
                                                                                  static_cast<int>(j));
      if (call.f.sources >> i & 1 && !(call.f.sources >> j & 1) && source && other &&
          share_addresses(*source, *other))
        return true;
    }
  return false;
}

bool shape_of(const Call& call, flashjit_shape& shape) {
  const FunctionState& f = call.f;
  shape = {};
  shape.struct_size = sizeof shape;
  if (f.from_slots >= 0) return shape_of_copy(call, shape);
  const int rows_at = call.tensor(f.q) ? f.q : f.k_new;
  const flashjit_tensor* const rows = call.tensor(rows_at);
  const flashjit_tensor* const k = call.tensor(f.k);
  const auto wrong = [&](int place, const char* wanted) {
    const auto at = static_cast<std::size_t>(place);
    const flashjit_tensor* const t = call.tensor(place);
    refuse("argument " + f.shown[at] +
           (t ? " has " + std::to_string(t->rank) + " dimensions" : std::string(" is missing")) + ": " +
           wanted + " would work");
    return false;
  };
  const bool paged = call.tensor(f.page_table) != nullptr;
  const bool packed =
      call.tensor(f.cu_seqlens_q) != nullptr || (call.tensor(f.slots) && rows && rows->rank == 3);
  if (!rows || rows->rank != (packed ? 3 : 4))
    return wrong(rows_at < 0 ? f.q : rows_at,
                 packed ? "packed [total, heads, head_dim]"
                        : "[batch, seqlen, heads, head_dim], or packed [total, heads, "
                          "head_dim] with cu_seqlens_q,");
  if (!k || (k->rank != 4 && !(k->rank == 3 && packed && !paged)))
    return wrong(f.k, paged ? "pages [num_pages, page_size, heads, head_dim]"
                            : "[batch, seqlen, heads, head_dim], or packed [total, heads, head_dim] with "
                              "cu_seqlens_k,");
  bool right = true;
  if (packed) {
    const flashjit_tensor* const starts = call.tensor(f.cu_seqlens_q);
    shape.batch = 1;
    if (starts) right = fits(std::max<std::int64_t>(starts->shape[0] - 1, 0), &shape.batch);
    shape.total_q = rows->shape[0];
    right = right && longest(call, f.max_seqlen_q, shape.total_q, &shape.seqlen_q);
  } else {
    right = fits(rows->shape[0], &shape.batch) && fits(rows->shape[1], &shape.seqlen_q);
  }
  right = right && fits(rows->shape[rows->rank - 2], &shape.num_heads_q) &&
          fits(k->shape[k->rank - 2], &shape.num_heads_kv);
  if (paged) {
    const flashjit_tensor& table = *call.tensor(f.page_table);
    right = right && fits(k->shape[1], &shape.page_size) &&
            fits(std::min(table.shape[table.rank - 1] * k->shape[1], most_rows), &shape.seqlen_k);
  } else if (k->rank == 3) {
    shape.total_k = k->shape[0];
    right = right && longest(call, f.max_seqlen_k, shape.total_k, &shape.seqlen_k);
  } else {
    right = right && fits(k->shape[1], &shape.seqlen_k);
  }
  if (!right && !PyErr_Occurred()) refuse("sizes of the tensors are beyond 2147483647");
  return right;
}

bool is_same(const flashjit_shape& a, const flashjit_shape& b) {
  return a.batch == b.batch && a.seqlen_q == b.seqlen_q && a.seqlen_k == b.seqlen_k &&
         a.num_heads_q == b.num_heads_q && a.num_heads_kv == b.num_heads_kv && a.page_size == b.page_size &&
         a.total_q == b.total_q && a.total_k == b.total_k;
}

std::optional<flashjit_dtype> dtype_named(const char* name) {
  for (int i = FLASHJIT_FP32; i <= FLASHJIT_FP8_E5M2; ++i)
    if (std::strcmp(dtype_name(i), name) == 0) return static_cast<flashjit_dtype>(i);
  return {};
}

// The entry that calls with these dtypes, dims and arguments have in common. For the first one Python
// writes the spec and takes the engine. Null with an exception.
Entry* entry_for(FunctionState& f, const Key& key) {
  for (const auto& one : f.entries)
    if (one->key == key) return one.get();
  const Ref dtypes(PyDict_New());
  if (!dtypes) return nullptr;
  for (std::size_t i = 0; i < f.names.size(); ++i) {
    if (!(key.given >> i & 1)) continue;
    const Given given = key.dtypes[i];
    const Ref text(PyUnicode_FromString(given >= 0            ? dtype_name(given)
                                        : given == given_real ? "float"
                                                              : "int"));
    if (!text || PyDict_SetItem(dtypes.get(), f.names[i].get(), text.get()) != 0) return nullptr;
  }
  const std::string device =
      key.device_kind == FLASHJIT_CUDA ? "cuda:" + std::to_string(key.device_index) : std::string("cpu");
  const Ref made(PyObject_CallFunction(f.make.get(), "sOiiz", device.c_str(), dtypes.get(), key.head_dim,
                                       key.head_dim_v,
                                       key.out_dtype < 0 ? nullptr : dtype_name(key.out_dtype)));
  PyObject *engine = nullptr, *spec = nullptr;
  const char* o_dtype = nullptr;
  if (!made || !PyArg_ParseTuple(made.get(), "O!O!s", engine_type, &engine, spec_type, &spec, &o_dtype))
    return nullptr;
  auto entry = std::make_unique<Entry>();
  entry->key = key;
  entry->engine = Ref::borrowed(engine);
  entry->spec = Ref::borrowed(spec);
  entry->o_dtype = dtype_named(o_dtype).value_or(FLASHJIT_FP32);
  SpecState& state = *reinterpret_cast<SpecObject*>(spec)->state;
  for (std::size_t i = 0; i < f.names.size(); ++i) {
    if (!(key.given >> i & 1)) continue;
    const NamedInfo* const info = state.find(f.names[i].get());
    if (!info) return nullptr;
    entry->infos[i] = info->info;
  }
  f.entries.push_back(std::move(entry));
  return f.entries.back().get();
}

// The kernel for the shape, and the bytes of its workspace.
bool kernel_for(Entry& entry, const flashjit_shape& shape, const flashjit_kernel** kernel,
                std::size_t* bytes) {
  if (!entry.kernel || !is_same(entry.shape, shape)) {
    flashjit_status status = FLASHJIT_OK;
    const flashjit_kernel* found = nullptr;
    std::size_t needed = 0;
    flashjit_engine* const engine = reinterpret_cast<EngineObject*>(entry.engine.get())->engine;
    const flashjit_spec* const spec = reinterpret_cast<SpecObject*>(entry.spec.get())->state->spec;
    {
      const WithoutGil released;
      status = flashjit_engine_get(engine, spec, &shape, &found);
      if (status == FLASHJIT_OK) status = flashjit_kernel_workspace(found, &shape, &needed);
    }
    if (status != FLASHJIT_OK) {
      raise_last(status);
      return false;
    }
    if (PyErr_Occurred()) return false;  // interrupted while it tuned
    entry.shape = shape;
    entry.kernel = found;
    entry.workspace_bytes = needed;
  }
  *kernel = entry.kernel;
  *bytes = entry.workspace_bytes;
  return true;
}

// A tensor that the call makes or was given to write.
struct Output {
  Ref object;
  Tensor tensor;
  bool allocate_like(const Call& call, const std::int64_t* shape, int rank, flashjit_dtype dtype,
                     const char* name) {
    const auto q = static_cast<std::size_t>(call.f.q >= 0 ? call.f.q : call.f.k);
    object = Ref(allocate(*call.tensors[q], call.values[q], shape, rank, dtype));
    return object && tensor.read(object.get(), name);
  }
  // The caller's object: in its framework's form.
  PyObject* finished(const Framework& framework) {
    if (framework.finish == Py_None) return object.release();
    return PyObject_CallFunctionObjArgs(framework.finish, object.get(), nullptr);
  }
};

bool refused(const std::string& why) {
  refuse(why);
  return false;
}

// Takes the kernel for a call, and all of its launch but what the outputs say.
bool plan_call(FunctionState& f, const Call& call, Key& key, Launch& launch) {
  flashjit_shape shape;
  if (!shape_of(call, shape)) return false;
  const flashjit_tensor& k = *call.tensor(f.k);
  const flashjit_tensor* const q = call.tensor(f.q);
  const flashjit_tensor* const v = call.tensor(f.v);
  if (!v && f.v >= 0 && !f.head_dim_v)
    return refused("argument v is missing: a tensor like k, or head_dim_v, would work");
  // A cache's rows may be bytes of another format.
  const flashjit_tensor* const k_new = call.tensor(f.k_new);
  const flashjit_tensor& head = q ? *q : k_new ? *k_new : k;
  key.device_kind = head.device_kind;
  key.device_index = head.device_index;
  key.head_dim = static_cast<std::int32_t>(head.shape[head.rank - 1]);
  key.head_dim_v = v              ? static_cast<std::int32_t>(v->shape[v->rank - 1])
                   : f.head_dim_v ? f.head_dim_v
                                  : key.head_dim;

  Entry* const entry = entry_for(f, key);
  if (!entry || !kernel_for(*entry, shape, &launch.kernel, &launch.workspace_bytes)) return false;
  launch.spec = entry->spec.get();
  if (launch.workspace_bytes > 0 && !needs_workspace(call)) launch.workspace_bytes = 0;
  for (std::size_t i = 0; i < f.names.size(); ++i) {
    if (!(key.given >> i & 1)) continue;
    const ArgumentInfo& info = entry->infos[i];
    const char* const shown = f.shown[i].c_str();
    const bool is_read = call.read >> i & 1;
    if (!is_read && info.kind == Kind::tensor)
      return refused("argument " + f.shown[i] + " is a number: a tensor would work");
    if (!(is_read && info.kind == Kind::tensor ? launch.arguments.add(info, shown, *call.tensors[i])
                                               : launch.arguments.add(info, shown, call.values[i])))
      return false;
  }
  if (!f.writes_o) return true;
  launch.o_dtype = entry->o_dtype;
  launch.o_rank = q->rank;
  std::copy(q->shape, q->shape + q->rank, launch.o_sizes);
  launch.o_sizes[q->rank - 1] = key.head_dim_v;
  if (f.heads_first && q->rank == 4) std::swap(launch.o_sizes[1], launch.o_sizes[2]);
  const bool packed = q->rank != 4;
  const std::int64_t rows[] = {q->shape[packed ? 1 : 0], q->shape[packed ? 0 : 2], q->shape[1]};
  std::copy_n(rows, q->rank - 1, launch.lse_sizes);
  return true;
}

PyObject* run(FunctionState& f, PyObject* stream_object, PyObject* out, PyObject* const* values,
              const Tensor* const* given) {
  Call call(f, values);
  Key key;
  Output o, lse, workspace;
  if (out != Py_None) {
    o.object = Ref::borrowed(out);
    if (!o.tensor.read(out, "out") || !o.tensor.has_no_gradient(out, "out")) return nullptr;
    if (f.heads_first) o.tensor.put_rows_first();
  }
  const Read done = read(call, given, out, &o.tensor, key);
  if (done == Read::left_to_framework) return Ref::borrowed(Py_NotImplemented).release();
  if (done == Read::failed) return nullptr;
  if (call.wants != 0 && f.head_dim_v)
    return refuse(
        "a tensor of PyTorch requires a gradient, which a call with head_dim_v has none of: "
        "v=k[..., :head_dim_v] instead, or a call under torch.no_grad(), would work");
  if (call.wants != 0 && call.tensor(f.q) && call.tensor(f.k) && call.tensor(f.v)) {
    if (out != Py_None || stream_object != Py_None) return Ref::borrowed(Py_NotImplemented).release();
    const Framework& framework = call.tensors[std::countr_zero(call.wants)]->framework();
    return f.differentiable.call({values, call.tensors, f.names.size(), key.given, call.read, call.wants},
                                 f.writes_lse, framework);
  }
  Launch launch;
  if (!plan_call(f, call, key, launch)) return nullptr;
  Arguments& arguments = launch.arguments;
  if (f.writes_o) {
    if (out == Py_None) {
      if (!o.allocate_like(call, launch.o_sizes, launch.o_rank, launch.o_dtype, "out")) return nullptr;
      if (f.heads_first) o.tensor.put_rows_first();
    }
    if (!arguments.add({FLASHJIT_ARG_O, Kind::tensor, true}, "out", o.tensor)) return nullptr;
    if (f.writes_lse &&
        (!lse.allocate_like(call, launch.lse_sizes, launch.o_rank - 1, FLASHJIT_FP32, "lse") ||
         !arguments.add({FLASHJIT_ARG_LSE, Kind::tensor, true}, "lse", lse.tensor)))
      return nullptr;
  }
  if (launch.workspace_bytes > 0) {
    const auto bytes = static_cast<std::int64_t>(launch.workspace_bytes);
    if (!workspace.allocate_like(call, &bytes, 1, FLASHJIT_UINT8, "workspace") ||
        !arguments.add({FLASHJIT_ARG_WORKSPACE, Kind::tensor, true}, "workspace", workspace.tensor))
      return nullptr;
  }
  if (!arguments.stream(stream_object, &launch.stream)) return nullptr;
  flashjit_status status = FLASHJIT_OK;
  {
    const WithoutGil released;
    status = flashjit_kernel_launch(launch.kernel, arguments.data(), arguments.size(), launch.stream);
  }
  if (status != FLASHJIT_OK) return raise_last(status);
  if (!f.writes_o) Py_RETURN_NONE;
  const Framework& framework = call.tensors[static_cast<std::size_t>(f.q)]->framework();
  Ref result(out == Py_None ? o.finished(framework) : o.object.release());
  if (!result || !f.writes_lse) return result.release();
  const Ref rows(lse.finished(framework));
  return rows ? PyTuple_Pack(2, result.get(), rows.get()) : nullptr;
}

}  // namespace

PyObject* call_function(PyObject* function, PyObject* const* values, std::size_t count,
                        const Tensor* const* read) {
  FunctionState& f = *reinterpret_cast<FunctionObject*>(function)->state;
  if (count != f.names.size())
    return raise(FLASHJIT_INTERNAL, "a call has " + std::to_string(count) + " arguments");
  return run(f, Py_None, Py_None, values, read);
}

bool plan_launch(PyObject* function, PyObject* const* values, std::size_t count, const Tensor* const* read,
                 Launch& launch) {
  FunctionState& f = *reinterpret_cast<FunctionObject*>(function)->state;
  if (count != f.names.size()) return refused("a call has " + std::to_string(count) + " arguments");
  Call call(f, values);
  Key key;
  return python::read(call, read, Py_None, nullptr, key) == Read::done && plan_call(f, call, key, launch) &&
         launch.arguments.stream(Py_None, &launch.stream);
}

bool plan_function(PyObject* function, const std::vector<Given>& given, const flashjit_tensor& q,
                   const flashjit_tensor& v, Planned& planned) {
  FunctionState& f = *reinterpret_cast<FunctionObject*>(function)->state;
  if (given.size() != f.names.size())
    return refused("a call has " + std::to_string(given.size()) + " arguments");
  Key key;
  key.device_kind = q.device_kind;
  key.device_index = q.device_index;
  key.head_dim = static_cast<std::int32_t>(q.shape[q.rank - 1]);
  key.head_dim_v = static_cast<std::int32_t>(v.shape[v.rank - 1]);
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (given[i] == not_given) continue;
    key.given |= std::uint64_t{1} << i;
    key.dtypes[i] = given[i];
  }
  const Entry* const entry = entry_for(f, key);
  if (!entry) return false;
  planned.engine_object = Ref::borrowed(entry->engine.get());
  planned.spec_object = Ref::borrowed(entry->spec.get());
  planned.engine = reinterpret_cast<EngineObject*>(entry->engine.get())->engine;
  planned.spec = reinterpret_cast<SpecObject*>(entry->spec.get())->state->spec;
  planned.o_dtype = entry->o_dtype;
  planned.infos.assign(entry->infos, entry->infos + given.size());
  return true;
}

namespace {

// call(function, stream, out, *arguments in the order of the function's names)
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  FunctionState& f = *reinterpret_cast<FunctionObject*>(args[0])->state;
  if (count != static_cast<Py_ssize_t>(f.names.size()) + 3)
    return raise(FLASHJIT_INTERNAL, "a call has " + std::to_string(count) + " arguments");
  return run(f, args[1], args[2], args + 3, nullptr);
}

PyObject* function_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *make = nullptr, *names = nullptr, *shown = nullptr, *differentiable = nullptr;
  int writes_o = 0, writes_lse = 0, heads_first = 0, head_dim_v = 0;
  if (!PyArg_ParseTuple(args, "OO!O!ppO|pi", &make, &PyTuple_Type, &names, &PyTuple_Type, &shown, &writes_o,
                        &writes_lse, &differentiable, &heads_first, &head_dim_v))
    return nullptr;
  auto state = std::make_unique<FunctionState>();
  state->make = Ref::borrowed(make);
  state->writes_o = writes_o != 0;
  state->writes_lse = writes_lse != 0;
  state->heads_first = heads_first != 0;
  state->head_dim_v = head_dim_v;
  state->differentiable = Differentiable(differentiable);
  const Py_ssize_t count = PyTuple_Size(names);
  if (count > static_cast<Py_ssize_t>(most_names))
    return refuse("a call takes at most " + std::to_string(most_names) + " arguments");
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = Ref::borrowed(PyTuple_GetItem(names, i)).release();
    PyUnicode_InternInPlace(&name);
    state->names.emplace_back(name);
    const char* const text = text_of(name);
    const char* const visible = text_of(PyTuple_GetItem(shown, i));
    if (!text || !visible) return nullptr;
    state->shown.emplace_back(visible);
    state->kinds.push_back(kind_of(text));
    struct {
      const char* name;
      int FunctionState::* place;
    } constexpr places[] = {{"q", &FunctionState::q},
                            {"k", &FunctionState::k},
                            {"v", &FunctionState::v},
                            {"k_new", &FunctionState::k_new},
                            {"cu_seqlens_q", &FunctionState::cu_seqlens_q},
                            {"max_seqlen_q", &FunctionState::max_seqlen_q},
                            {"max_seqlen_k", &FunctionState::max_seqlen_k},
                            {"page_table", &FunctionState::page_table},
                            {"slots", &FunctionState::slots},
                            {"from_slots", &FunctionState::from_slots}};
    for (const auto& place : places)
      if (std::strcmp(text, place.name) == 0) (*state).*place.place = static_cast<int>(i);
    if (std::string_view(text).ends_with("_from")) state->sources |= std::uint64_t{1} << i;
    if (heads_first)
      for (const char* const swapped : {"q", "k", "v", "o", "do", "dq", "dk", "dv"})
        if (std::strcmp(text, swapped) == 0) state->swapped |= std::uint64_t{1} << i;
  }
  PyObject* const self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self) reinterpret_cast<FunctionObject*>(self)->state = state.release();
  return self;
}

int function_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (const FunctionState* const state = reinterpret_cast<FunctionObject*>(self)->state) {
    Py_VISIT(state->make.get());
    if (const int visited = state->differentiable.traverse(visit, arg)) return visited;
    for (const auto& entry : state->entries) {
      Py_VISIT(entry->engine.get());
      Py_VISIT(entry->spec.get());
    }
  }
  return 0;
}

int function_clear(PyObject* self) {
  FunctionState* const state = std::exchange(reinterpret_cast<FunctionObject*>(self)->state, nullptr);
  delete state;
  return 0;
}

void function_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  function_clear(self);
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(function_new)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(function_dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void*>(function_traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(function_clear)},
                       {0, nullptr}};
PyType_Spec function_spec = {"flashjit._native.Function", sizeof(FunctionObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr}, {}};

}  // namespace

int add_function(PyObject* module) {
  function_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&function_spec));
  if (!function_type || PyModule_AddType(module, function_type) < 0) return -1;
  return PyModule_AddFunctions(module, methods);
}

}  // namespace flashjit::python
