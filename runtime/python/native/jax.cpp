#include "jax.hpp"

#include <charconv>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/flashjit.h"
#include "xla_ffi.hpp"

namespace flashjit::python {
namespace {

struct Failure {
  std::string message;
  std::int32_t code = xla::invalid_argument;
  xla::Error* error = nullptr;  // XLA's own, which says all
};

void require(flashjit_status status) {
  if (status != FLASHJIT_OK) throw Failure{flashjit_last_error_message()};
}

// The attribute `call`: a line of the names of arguments, one of those of results, one of numbers
// (name=i5 or name=r0.5), and the spec.
struct Kind {
  flashjit_spec* spec = nullptr;
  std::vector<std::string> names;  // of arguments and results
  std::vector<std::int32_t> ids;
  std::vector<flashjit_argument> numbers;
  bool packed = false;
  std::int32_t max_seqlen_q = 0, max_seqlen_k = 0;  // 0: not given

  explicit Kind(std::string_view text) {
    const auto line = [&] {
      const std::size_t end = text.find('\n');
      const std::string_view found = text.substr(0, end);
      text.remove_prefix(end == text.npos ? text.size() : end + 1);
      return found;
    };
    const auto each_word = [](std::string_view words, const auto& take) {
      while (!words.empty()) {
        const std::size_t end = words.find(' ');
        if (end != 0) take(std::string(words.substr(0, end)));
        words.remove_prefix(end == words.npos ? words.size() : end + 1);
      }
    };
    const std::string_view arguments = line(), results = line(), values = line();
    require(flashjit_spec_create(std::string(text).c_str(), &spec));
    const auto id_of = [&](const std::string& name) {
      std::int32_t id = 0;
      require(flashjit_spec_argument(spec, name.c_str(), &id));
      return id;
    };
    for (const std::string_view some : {arguments, results})
      each_word(some, [&](std::string name) {
        ids.push_back(id_of(name));
        packed = packed || name == "cu_seqlens_q";
        names.push_back(std::move(name));
      });
    each_word(values, [&](const std::string& word) {
      const std::size_t equals = word.find('=');
      if (equals == word.npos) throw Failure{"a number is written as '" + word + "'"};
      const std::string name = word.substr(0, equals);
      const char *const digits = word.c_str() + equals + 2, *const end = word.c_str() + word.size();
      flashjit_argument number{.id = id_of(name), .value = {}};
      if (word[equals + 1] == 'r')
        std::from_chars(digits, end, number.value.real);
      else
        std::from_chars(digits, end, number.value.integer);
      if (number.id == FLASHJIT_ARG_MAX_SEQLEN_Q)
        max_seqlen_q = static_cast<std::int32_t>(number.value.integer);
      if (number.id == FLASHJIT_ARG_MAX_SEQLEN_K)
        max_seqlen_k = static_cast<std::int32_t>(number.value.integer);
      numbers.push_back(number);
    });
  }
  Kind(const Kind&) = delete;
  ~Kind() { flashjit_spec_destroy(spec); }
};

// Kinds of calls and engines live as long as the process: XLA may call at any time.
struct Shared {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Kind>, std::less<>> kinds;
  std::map<std::string, flashjit_engine*> engines;
};
Shared& shared() {
  static Shared& all = *new Shared;
  return all;
}

const Kind& kind_of(std::string_view text) {
  const std::scoped_lock lock(shared().mutex);
  const auto known = shared().kinds.find(text);
  if (known != shared().kinds.end()) return *known->second;
  return *shared().kinds.emplace(text, std::make_unique<Kind>(text)).first->second;
}

flashjit_engine* engine_of(const std::string& device) {
  const std::scoped_lock lock(shared().mutex);
  flashjit_engine*& engine = shared().engines[device];
  if (!engine) {
    flashjit_engine_options options{};
    options.struct_size = sizeof options;
    options.device = device.c_str();
    require(flashjit_engine_create(&options, &engine));
  }
  return engine;
}

flashjit_tensor tensor_of(const xla::Buffer& buffer, const std::string& name, std::int32_t device_kind,
                          std::int32_t device_index) {
  flashjit_tensor t{};
  t.data = buffer.data;
  t.device_kind = device_kind;
  t.device_index = device_index;
  if (buffer.rank > FLASHJIT_MAX_RANK)
    throw Failure{"argument " + name + " has " + std::to_string(buffer.rank) +
                  " dimensions: at most 6 would work"};
  t.rank = static_cast<std::int32_t>(buffer.rank);
  std::int64_t elements = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = buffer.dims[i];
    t.strides[i] = elements;
    elements *= buffer.dims[i];
  }
  constexpr struct {
    std::int32_t xla, dtype;
  } dtypes[] = {{xla::f32, FLASHJIT_FP32},  {xla::f16, FLASHJIT_FP16},  {xla::bf16, FLASHJIT_BF16},
                {xla::s32, FLASHJIT_INT32}, {xla::s64, FLASHJIT_INT64}, {xla::s8, FLASHJIT_INT8},
                {xla::u8, FLASHJIT_UINT8},  {xla::pred, FLASHJIT_UINT8}};
  for (const auto& one : dtypes)
    if (one.xla == buffer.dtype) {
      t.dtype = one.dtype;
      return t;
    }
  if (buffer.dtype == xla::u32 && t.rank == 1 && t.shape[0] == 2) {  // a key of JAX: 64 bits
    t.dtype = FLASHJIT_INT64;
    t.shape[0] = 1;
    return t;
  }
  throw Failure{"argument " + name + " has XLA's dtype " + std::to_string(buffer.dtype) +
                ": fp32, fp16, bf16, int32, int64, int8 and uint8 would work"};
}

// Memory for one launch.
class Workspace {
 public:
  Workspace(const xla::Call& call, bool on_gpu, std::size_t bytes)
      : call_(call), on_gpu_(on_gpu), bytes_(bytes) {
    if (bytes == 0) return;
    if (!on_gpu) {
      memory_ = data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    } else {
      // XLA's allocator on GPUs refuses an alignment of 256, which a workspace has.
      constexpr std::size_t taken = 16, needed = 256;
      bytes_ += needed;
      xla::AllocateArguments wanted{sizeof wanted, nullptr, call.context, bytes_, taken, nullptr};
      if (xla::Error* const error = call.api->allocate(&wanted)) throw Failure{"", xla::internal, error};
      memory_ = wanted.data;
      std::size_t room = bytes_;
      if ((data_ = memory_)) std::align(needed, bytes, data_, room);
    }
    if (!data_)
      throw Failure{"no memory for a workspace of " + std::to_string(bytes) + " bytes", xla::internal};
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() {
    if (!on_gpu_) {
      std::free(memory_);
    } else if (memory_) {
      xla::FreeArguments done{sizeof done, nullptr, call_.context, bytes_, memory_};
      call_.api->free(&done);
    }
  }
  void* data() const { return data_; }

 private:
  const xla::Call& call_;
  bool on_gpu_;
  std::size_t bytes_;
  void *memory_ = nullptr, *data_ = nullptr;
};

void launch(const xla::Call& call, bool on_gpu) {
  std::string_view text;
  for (std::int64_t i = 0; i < call.attributes.count; ++i) {
    const xla::Text& name = *call.attributes.names[i];
    if (std::string_view(name.data, name.size) != "call" || call.attributes.types[i] != xla::string) continue;
    const auto& value = *static_cast<const xla::Text*>(call.attributes.values[i]);
    text = {value.data, value.size};
  }
  const Kind& kind = kind_of(text);
  const auto arguments = static_cast<std::size_t>(call.arguments.count);
  const auto buffers = arguments + static_cast<std::size_t>(call.results.count);
  if (buffers != kind.names.size()) throw Failure{"a call names other arguments than it has", xla::internal};

  xla::DeviceArguments device{sizeof device, nullptr, call.context, 0};
  xla::StreamArguments stream{sizeof stream, nullptr, call.context, nullptr};
  if (on_gpu) {
    if (call.api->size >= offsetof(xla::Api, device_ordinal) + sizeof(void*))
      if (xla::Error* const error = call.api->device_ordinal(&device))
        throw Failure{"", xla::internal, error};
    if (xla::Error* const error = call.api->stream(&stream)) throw Failure{"", xla::internal, error};
  }
  const std::int32_t device_kind = on_gpu ? FLASHJIT_CUDA : FLASHJIT_CPU;
  std::vector<flashjit_tensor> tensors(buffers);
  std::vector<flashjit_argument> all = kind.numbers;
  const flashjit_tensor *q = nullptr, *k = nullptr, *starts = nullptr;
  for (std::size_t i = 0; i < buffers; ++i) {
    const xla::Buffer& buffer =
        i < arguments ? *call.arguments.values[i] : *call.results.values[i - arguments];
    tensors[i] = tensor_of(buffer, kind.names[i], device_kind, device.ordinal);
    if (kind.ids[i] == FLASHJIT_ARG_Q) q = &tensors[i];
    if (kind.ids[i] == FLASHJIT_ARG_K) k = &tensors[i];
    if (kind.ids[i] == FLASHJIT_ARG_CU_SEQLENS_Q) starts = &tensors[i];
    all.push_back({.id = kind.ids[i], .value = {.tensor = &tensors[i]}});
  }
  if (!q || !k || q->rank != (kind.packed ? 3 : 4) || k->rank != q->rank)
    throw Failure{
        "q and k are not [batch, seqlen, heads, head_dim], nor [total, heads, head_dim] with cu_seqlens_q"};

  flashjit_shape shape{};
  shape.struct_size = sizeof shape;
  const auto size = [](std::int64_t given) { return static_cast<std::int32_t>(given); };
  shape.num_heads_q = size(q->shape[q->rank - 2]);
  shape.num_heads_kv = size(k->shape[k->rank - 2]);
  if (kind.packed) {
    shape.batch = size(starts->shape[0] - 1);
    shape.total_q = q->shape[0];
    shape.total_k = k->shape[0];
    shape.seqlen_q = kind.max_seqlen_q > 0 ? kind.max_seqlen_q : size(q->shape[0]);
    shape.seqlen_k = kind.max_seqlen_k > 0 ? kind.max_seqlen_k : size(k->shape[0]);
  } else {
    shape.batch = size(q->shape[0]);
    shape.seqlen_q = size(q->shape[1]);
    shape.seqlen_k = size(k->shape[1]);
  }
  flashjit_engine* const engine =
      engine_of(on_gpu ? "cuda:" + std::to_string(device.ordinal) : std::string("cpu"));
  const flashjit_kernel* kernel = nullptr;
  std::size_t bytes = 0;
  require(flashjit_engine_get(engine, kind.spec, &shape, &kernel));
  require(flashjit_kernel_workspace(kernel, &shape, &bytes));
  const Workspace workspace(call, on_gpu, bytes);
  flashjit_tensor room{};
  if (bytes > 0) {
    room.data = workspace.data();
    room.dtype = FLASHJIT_UINT8;
    room.device_kind = device_kind;
    room.device_index = device.ordinal;
    room.rank = 1;
    room.shape[0] = static_cast<std::int64_t>(bytes);
    room.strides[0] = 1;
    all.push_back({.id = FLASHJIT_ARG_WORKSPACE, .value = {.tensor = &room}});
  }
  require(flashjit_kernel_launch(kernel, all.data(), all.size(), stream.stream));
}

xla::Error* handle(xla::Call* call, bool on_gpu) {
  if (call->extensions && call->extensions->type == xla::Extension::metadata) {
    auto& metadata = *reinterpret_cast<xla::MetadataExtension*>(call->extensions)->metadata;
    metadata.version.major = 0;
    metadata.version.minor = call->api->version.minor;
    metadata.traits = 0;
    return nullptr;
  }
  Failure failure;
  try {
    launch(*call, on_gpu);
    return nullptr;
  } catch (const Failure& one) {
    failure = one;
  } catch (const std::exception& error) {
    failure = {error.what(), xla::internal};
  }
  if (failure.error) return failure.error;
  xla::ErrorArguments said{sizeof said, nullptr, failure.message.c_str(), failure.code};
  return call->api->create_error(&said);
}

xla::Error* handle_cpu(xla::Call* call) {
  return handle(call, false);
}
xla::Error* handle_cuda(xla::Call* call) {
  return handle(call, true);
}

// xla_handlers() -> capsules of the functions that run calls on CPUs and on CUDA devices
PyObject* xla_handlers(PyObject*, PyObject*) {
  const Ref cpu(PyCapsule_New(reinterpret_cast<void*>(handle_cpu), nullptr, nullptr));
  const Ref cuda(PyCapsule_New(reinterpret_cast<void*>(handle_cuda), nullptr, nullptr));
  return cpu && cuda ? PyTuple_Pack(2, cpu.get(), cuda.get()) : nullptr;
}

PyMethodDef methods[] = {{"xla_handlers", xla_handlers, METH_NOARGS, nullptr}, {}};

}  // namespace

int add_jax(PyObject* module) {
  return PyModule_AddFunctions(module, methods);
}

}  // namespace flashjit::python
