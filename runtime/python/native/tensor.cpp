#include "tensor.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace flashjit::python {
namespace {

using dlpack::ExchangeApi;

struct Names {
  PyObject* exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  PyObject* dlpack = PyUnicode_InternFromString("__dlpack__");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* kind = PyUnicode_InternFromString("kind");
  PyObject* no_arguments = PyTuple_New(0);
  PyObject* on_cpu = Py_BuildValue("{s:(ii)}", "max_version", 1, 2);
  PyObject* on_gpu = Py_BuildValue("{s:(ii),s:i}", "max_version", 1, 2, "stream", -1);  // do not synchronise
};
const Names& names() {
  static const Names all;
  return all;
}

// The type's table of functions, if it has one of a version known here.
const ExchangeApi* exchange_api(PyObject* type) {
  const Ref capsule(PyObject_GetAttr(type, names().exchange));
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  const void* table = PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api");
  if (!table) PyErr_Clear();
  while (table && static_cast<const ExchangeApi*>(table)->version.major > 1)
    table = static_cast<const ExchangeApi*>(table)->previous;
  const auto* const api = static_cast<const ExchangeApi*>(table);
  return api && api->version.major == 1 && api->tensor_from_object ? api : nullptr;
}

std::unique_ptr<Framework> look_at(PyObject* type, const char* name) {
  auto made = std::make_unique<Framework>();
  made->type = type;
  made->api = exchange_api(type);
  if (!made->api && !PyObject_HasAttr(type, names().dlpack)) {
    const Ref type_text(PyObject_GetAttrString(type, "__name__"));
    const char* const text = type_text ? text_of(type_text.get()) : nullptr;
    if (!text) PyErr_Clear();
    refuse("argument " + std::string(name) + " is of type " + (text ? text : "unknown") +
           ", which is no tensor: a tensor of PyTorch, CuPy, JAX or NumPy, or another with __dlpack__, would "
           "work");
    return nullptr;
  }
  const Ref module(PyImport_ImportModule("flashjit._frameworks"));
  if (!module) return nullptr;
  const Ref facts(PyObject_CallMethod(module.get(), "facts_of", "O", type));
  int is_numpy = 0, has_memory = 0;
  if (!facts || !PyArg_ParseTuple(facts.get(), "ppOOOOOO!", &is_numpy, &has_memory, &made->is_grad_enabled,
                                  &made->is_deterministic, &made->allocate, &made->finish,
                                  &made->current_stream, &PyTuple_Type, &made->watching))
    return nullptr;
  made->is_numpy = is_numpy != 0;
  made->has_memory = has_memory != 0;
  for (PyObject* const kept : {made->type, made->is_grad_enabled, made->is_deterministic, made->allocate,
                               made->finish, made->current_stream, made->watching})
    Py_INCREF(kept);
  return made;
}

// Under the GIL. Entries stay, so that pointers to them stay valid.
std::vector<std::unique_ptr<Framework>>& frameworks() {
  static auto& all = *new std::vector<std::unique_ptr<Framework>>;
  return all;
}
const Framework* find_framework(PyObject* object) {
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  for (const auto& one : frameworks())
    if (one->type == type) return one.get();
  return nullptr;
}

struct KnownType {
  std::uint8_t code, bits;
  std::int32_t dtype;
  const char* name;
};
constexpr KnownType known_types[] = {{dlpack::real, 32, FLASHJIT_FP32, "fp32"},
                                     {dlpack::real, 16, FLASHJIT_FP16, "fp16"},
                                     {dlpack::bfloat, 16, FLASHJIT_BF16, "bf16"},
                                     {dlpack::signed_integer, 32, FLASHJIT_INT32, "int32"},
                                     {dlpack::signed_integer, 64, FLASHJIT_INT64, "int64"},
                                     {dlpack::signed_integer, 8, FLASHJIT_INT8, "int8"},
                                     {dlpack::unsigned_integer, 8, FLASHJIT_UINT8, "uint8"},
                                     {dlpack::boolean, 8, FLASHJIT_UINT8, "uint8"},
                                     {dlpack::float8_e4m3fn, 8, FLASHJIT_FP8_E4M3, "fp8_e4m3"},
                                     {dlpack::float8_e5m2, 8, FLASHJIT_FP8_E5M2, "fp8_e5m2"}};

// NumPy's DLPack has no dtypes of ml_dtypes: their bits are taken as those of another dtype. Returns the view
// of the bits and the dtype; no view and no exception for other dtypes.
Ref bits_of(PyObject* array, std::int32_t* dtype) {
  const Ref type(PyObject_GetAttr(array, names().dtype));
  const Ref kind(type ? PyObject_GetAttr(type.get(), names().kind) : nullptr);
  if (kind && PyUnicode_CompareWithASCIIString(kind.get(), "V") != 0) return {};
  const Ref name(kind ? PyObject_GetAttrString(type.get(), "name") : nullptr);  // slow
  const char* const text = name ? text_of(name.get()) : nullptr;
  if (!text) {
    PyErr_Clear();
    return {};
  }
  constexpr struct {
    const char* name;
    const char* bits;
    std::int32_t dtype;
  } extended[] = {{"bfloat16", "float16", FLASHJIT_BF16},
                  {"float8_e4m3fn", "int8", FLASHJIT_FP8_E4M3},
                  {"float8_e5m2", "int8", FLASHJIT_FP8_E5M2}};
  for (const auto& one : extended) {
    if (std::strcmp(text, one.name) != 0) continue;
    *dtype = one.dtype;
    return Ref(PyObject_CallMethod(array, "view", "s", one.bits));
  }
  return {};
}

// As NumPy calls it: "float64". DLPack's codes 0 to 6.
std::string name_of(dlpack::DataType dtype) {
  constexpr const char* kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string bits = std::to_string(dtype.bits);
  return dtype.code < std::size(kinds) ? kinds[dtype.code] + bits
                                       : bits + " bits with DLPack's code " + std::to_string(dtype.code);
}

void set_allocation_error(void* said, const char* kind, const char* message) {
  *static_cast<std::string*>(said) = std::string(": ") + kind + ": " + message;
}

}  // namespace

const char* dtype_name(std::int32_t dtype) {
  for (const KnownType& known : known_types)
    if (known.dtype == dtype) return known.name;
  return "unknown";
}

bool share_addresses(const flashjit_tensor& a, const flashjit_tensor& b) {
  // The addresses from the first byte to behind the last; a tensor without elements has none.
  const auto range_of = [](const flashjit_tensor& t) {
    std::int64_t before = 0, after = 1;  // in elements
    for (int i = 0; i < t.rank; ++i) {
      if (t.shape[i] == 0) return std::pair{static_cast<char*>(nullptr), static_cast<char*>(nullptr)};
      (t.strides[i] < 0 ? before : after) += (t.shape[i] - 1) * t.strides[i];
    }
    std::int64_t bytes = 8;
    for (const KnownType& known : known_types)
      if (known.dtype == t.dtype) bytes = known.bits / 8;
    return std::pair{static_cast<char*>(t.data) + before * bytes, static_cast<char*>(t.data) + after * bytes};
  };
  const auto [a_begin, a_end] = range_of(a);
  const auto [b_begin, b_end] = range_of(b);
  return a_begin < b_end && b_begin < a_end;
}

bool is_readable(const flashjit_tensor& gradient, const flashjit_tensor& q) {
  if (gradient.dtype != q.dtype || reinterpret_cast<std::uintptr_t>(gradient.data) % 16 != 0) return false;
  std::int64_t elements = 1;
  bool is_contiguous = true;
  for (int i = gradient.rank - 1; i >= 0; --i) {
    is_contiguous = is_contiguous && (gradient.shape[i] == 1 || gradient.strides[i] == elements);
    elements *= gradient.shape[i];
  }
  if (is_contiguous) return true;
  const auto* const outer = gradient.strides + gradient.rank - 1;
  return *outer == 1 && std::all_of(gradient.strides, outer, [](auto stride) { return stride % 8 == 0; });
}

const Framework* framework_of(PyObject* object, const char* name) {
  if (const Framework* const known = find_framework(object)) return known;
  std::unique_ptr<Framework> made = look_at(reinterpret_cast<PyObject*>(Py_TYPE(object)), name);
  if (!made) return nullptr;
  frameworks().push_back(std::move(made));
  return frameworks().back().get();
}

bool is_tensor(PyObject* object) {
  return find_framework(object) || PyObject_HasAttr(object, names().dlpack);
}

bool Tensor::read(PyObject* object, const char* name) {
  framework_ = framework_of(object, name);
  if (!framework_) return false;
  if (framework_->api) {
    dlpack::Tensor tensor;
    if (framework_->api->tensor_from_object(object, &tensor) != 0) {
      refuse_with_cause("argument " + std::string(name) + ": ");
      return false;
    }
    return take(tensor, name);
  }
  return read_capsule(object, name);
}

bool Tensor::read_capsule(PyObject* object, const char* name) {
  const auto failed = [&] {
    refuse_with_cause("argument " + std::string(name) + " cannot be taken by DLPack: ");
    return false;
  };
  bool on_cpu = framework_->is_numpy;
  if (!on_cpu) {
    const Ref device(PyObject_CallMethod(object, "__dlpack_device__", nullptr));
    int kind = 0, index = 0;
    if (!device || !PyArg_ParseTuple(device.get(), "ii", &kind, &index)) return failed();
    on_cpu = kind == dlpack::cpu || kind == dlpack::cuda_host;
  }
  std::int32_t dtype = -1;
  Ref bits;
  if (framework_->is_numpy) {
    bits = bits_of(object, &dtype);
    if (dtype >= 0 && !bits) return failed();
  }
  const Ref method(PyObject_GetAttr(bits ? bits.get() : object, names().dlpack));
  if (!method) return failed();
  capsule_ = Ref(PyObject_Call(method.get(), names().no_arguments, on_cpu ? names().on_cpu : names().on_gpu));
  if (!capsule_ && on_cpu && PyErr_ExceptionMatches(PyExc_TypeError)) {  // older than DLPack 1.0
    PyErr_Clear();
    capsule_ = Ref(PyObject_Call(method.get(), names().no_arguments, nullptr));
  }
  if (!capsule_) return failed();
  // A capsule that nobody consumes frees its tensor when it dies.
  if (PyCapsule_IsValid(capsule_.get(), "dltensor_versioned")) {
    const auto* const managed = static_cast<const dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule_.get(), "dltensor_versioned"));
    read_only_ = managed->flags & dlpack::ManagedTensorVersioned::read_only;
    if (!take(managed->tensor, name)) return false;
  } else {
    const auto* const managed =
        static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule_.get(), "dltensor"));
    if (!managed) return failed();
    if (!take(managed->tensor, name)) return false;
  }
  if (dtype >= 0) tensor_.dtype = dtype;
  return true;
}

bool Tensor::take(const dlpack::Tensor& tensor, const char* name) {
  const auto wrong = [&](const std::string& what) {
    refuse("argument " + std::string(name) + " " + what);
    return false;
  };
  switch (tensor.device.type) {
    case dlpack::cpu:
    case dlpack::cuda_host:
      tensor_.device_kind = FLASHJIT_CPU;
      break;
    case dlpack::cuda:
    case dlpack::cuda_managed:
      tensor_.device_kind = FLASHJIT_CUDA;
      tensor_.device_index = tensor.device.index;
      break;
    default:
      return wrong("is on a device of DLPack's type " + std::to_string(tensor.device.type) +
                   ": the CPU or a CUDA device would work");
  }
  tensor_.dtype = -1;
  for (const KnownType& known : known_types)
    if (tensor.dtype.code == known.code && tensor.dtype.bits == known.bits && tensor.dtype.lanes == 1)
      tensor_.dtype = known.dtype;
  if (tensor_.dtype < 0)
    return wrong("has dtype " + name_of(tensor.dtype) +
                 ", which flashjit does not have: fp32, fp16, bf16, int32, int64, int8, uint8, fp8_e4m3 and "
                 "fp8_e5m2 would work");
  if (tensor.rank > FLASHJIT_MAX_RANK)
    return wrong("has " + std::to_string(tensor.rank) + " dimensions: at most 6 would work");
  tensor_.rank = tensor.rank;
  std::int64_t elements = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor_.shape[i] = tensor.shape[i];
    tensor_.strides[i] = tensor.strides ? tensor.strides[i] : elements;
    elements *= tensor.shape[i];
  }
  if (tensor.rank == 0) {  // a number in memory
    tensor_.rank = 1;
    tensor_.shape[0] = tensor_.strides[0] = 1;
  }
  tensor_.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return true;
}

int Tensor::wants_gradient(PyObject* object, int* enabled) const {
  if (framework_->is_grad_enabled == Py_None) return 0;
  if (*enabled < 0) {
    const Ref said(PyObject_CallNoArgs(framework_->is_grad_enabled));
    if (!said) return -1;
    *enabled = said.get() == Py_True;
  }
  if (*enabled == 0) return 0;
  const Ref wanted(PyObject_GetAttr(object, names().requires_grad));
  return wanted ? wanted.get() == Py_True : -1;
}

void Tensor::put_rows_first() {
  if (tensor_.rank != 4) return;
  std::swap(tensor_.shape[1], tensor_.shape[2]);
  std::swap(tensor_.strides[1], tensor_.strides[2]);
}

bool Tensor::has_no_gradient(PyObject* object, const char* name) const {
  int enabled = -1;
  const int wanted = wants_gradient(object, &enabled);
  if (wanted > 0) refuse_gradient(name);
  return wanted == 0;
}

void refuse_gradient(const char* name) {
  refuse("argument " + std::string(name) +
         " requires a gradient, and this function computes none: a call under torch.no_grad(), or with " +
         name + ".detach(), would work; flashjit.attention computes gradients of its inputs");
}

PyObject* allocate(const Tensor& like, PyObject* like_object, const std::int64_t* shape, int rank,
                   flashjit_dtype dtype) {
  const Framework& framework = like.framework();
  const flashjit_tensor& source = like.get();
  if (framework.api) {
    std::int64_t sizes[FLASHJIT_MAX_RANK] = {}, strides[FLASHJIT_MAX_RANK] = {};
    std::int64_t elements = 1;
    for (int i = rank - 1; i >= 0; --i) {
      sizes[i] = shape[i];
      strides[i] = elements;
      elements *= shape[i];
    }
    dlpack::Tensor wanted{.data = nullptr,
                          .device = {source.device_kind == FLASHJIT_CUDA ? dlpack::cuda : dlpack::cpu,
                                     source.device_kind == FLASHJIT_CUDA ? source.device_index : 0},
                          .rank = rank,
                          .dtype = {0, 0, 1},
                          .shape = sizes,
                          .strides = strides,
                          .byte_offset = 0};
    for (const KnownType& known : known_types)
      if (known.dtype == dtype && known.code != dlpack::boolean) wanted.dtype = {known.code, known.bits, 1};
    dlpack::ManagedTensorVersioned* made = nullptr;
    void* object = nullptr;
    std::string said;
    if (framework.api->allocate(&wanted, &made, &said, set_allocation_error) != 0 ||
        framework.api->object_from_managed(made, &object) != 0) {
      if (!PyErr_Occurred()) raise(FLASHJIT_DEVICE_FAILED, "allocating an output failed" + said);
      return nullptr;
    }
    return static_cast<PyObject*>(object);
  }
  const Ref sizes(PyTuple_New(rank));
  if (!sizes) return nullptr;
  for (int i = 0; i < rank; ++i) {
    PyObject* const size = PyLong_FromLongLong(shape[i]);
    if (!size || PyTuple_SetItem(sizes.get(), i, size) != 0) return nullptr;
  }
  return PyObject_CallFunction(framework.allocate, "OOs", like_object, sizes.get(), dtype_name(dtype));
}

bool current_stream(const Tensor& tensor, void** stream) {
  const flashjit_tensor& t = tensor.get();
  *stream = nullptr;
  if (t.device_kind != FLASHJIT_CUDA) return true;
  const Framework& framework = tensor.framework();
  if (framework.api) {
    if (framework.api->current_stream(dlpack::cuda, t.device_index, stream) == 0) return true;
    if (!PyErr_Occurred()) raise(FLASHJIT_DEVICE_FAILED, "the framework did not tell its current stream");
    return false;
  }
  const Ref handle(PyObject_CallFunction(framework.current_stream, "i", t.device_index));
  if (!handle) return false;
  *stream = PyLong_AsVoidPtr(handle.get());
  return *stream || !PyErr_Occurred();
}

}  // namespace flashjit::python
