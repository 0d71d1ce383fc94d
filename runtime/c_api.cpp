#include <cstring>
#include <limits>
#include <string>

#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"

using flashjit::AttentionArgs;
using flashjit::AttentionSpec;
using flashjit::Error;
using flashjit::ErrorCode;
using flashjit::Kernel;

struct flashjit_engine {
  flashjit::Engine engine;
};
struct flashjit_spec {
  AttentionSpec spec;
};
struct flashjit_request {
  std::shared_future<const Kernel*> future;
};
struct flashjit_prepared {
  flashjit::PreparedLaunch launch;
};

namespace {

thread_local std::string last_message, last_detail;

flashjit_status fail(ErrorCode code, const char* message, const char* detail = "") noexcept {
  try {
    last_message = message;
    last_detail = detail;
  } catch (...) {  // no memory for the text: the code must do
    last_message.clear();
    last_detail.clear();
  }
  return static_cast<flashjit_status>(code);
}

// Runs what may throw behind a C function.
template <class Function>
flashjit_status guarded(Function&& function) noexcept {
  try {
    function();
    return FLASHJIT_OK;
  } catch (const Error& e) {
    return fail(e.code(), e.what(), e.detail().c_str());
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::device_failed, "the host is out of memory");
  } catch (const std::exception& e) {
    return fail(ErrorCode::internal, e.what());
  } catch (...) {
    return fail(ErrorCode::internal, "an exception of unknown type");
  }
}

template <class T>
T& require(T* pointer, const char* name) {
  if (!pointer) throw Error(ErrorCode::invalid_argument, std::string(name) + " is a null pointer");
  return *pointer;
}

const Kernel& kernel_of(const flashjit_kernel* kernel) {
  return *reinterpret_cast<const Kernel*>(&require(kernel, "kernel"));
}
const flashjit_kernel* handle_of(const Kernel& kernel) {
  return reinterpret_cast<const flashjit_kernel*>(&kernel);
}

flashjit::Shape shape_of(const flashjit_shape* shape) {
  const flashjit_shape& s = require(shape, "shape");
  return {s.batch, s.seqlen_q, s.seqlen_k, s.num_heads_q, s.num_heads_kv};
}

flashjit::Tensor tensor_of(const flashjit_argument& arg) {
  const std::string name = "the tensor of argument id " + std::to_string(arg.id);
  const flashjit_tensor& t = require(arg.value.tensor, name.c_str());
  const auto wrong = [&](const char* field, int value, const char* allowed) {
    throw Error(ErrorCode::invalid_argument,
                name + " has " + field + " " + std::to_string(value) + ", which is not " + allowed);
  };
  if (t.dtype < FLASHJIT_FP32 || t.dtype > FLASHJIT_INT32) wrong("dtype", t.dtype, "a flashjit_dtype");
  if (t.device_kind < FLASHJIT_CPU || t.device_kind > FLASHJIT_CUDA)
    wrong("device_kind", t.device_kind, "a flashjit_device_kind");
  if (t.rank < 1 || t.rank > 4) wrong("rank", t.rank, "between 1 and 4");
  flashjit::Tensor tensor{.data = t.data,
                          .dtype = static_cast<flashjit::DType>(t.dtype),
                          .device = {static_cast<flashjit::Device::Kind>(t.device_kind), t.device_index},
                          .rank = t.rank};
  std::copy(t.shape, t.shape + t.rank, tensor.shape.begin());
  std::copy(t.strides, t.strides + t.rank, tensor.strides.begin());
  return tensor;
}

int integer_of(const flashjit_argument& arg) {
  if (arg.value.integer < 0 || arg.value.integer > std::numeric_limits<int>::max())
    throw Error(ErrorCode::invalid_argument, "argument id " + std::to_string(arg.id) + " is " +
                                                 std::to_string(arg.value.integer) +
                                                 ", it must be between 0 and 2147483647");
  return static_cast<int>(arg.value.integer);
}

AttentionArgs args_of(const flashjit_argument* args, size_t count) {
  if (count) require(args, "args");
  AttentionArgs a;
  for (size_t i = 0; i < count; ++i) {
    const flashjit_argument& arg = args[i];
    switch (arg.id) {
      case FLASHJIT_ARG_Q:
        a.q = tensor_of(arg);
        break;
      case FLASHJIT_ARG_K:
        a.k = tensor_of(arg);
        break;
      case FLASHJIT_ARG_V:
        a.v = tensor_of(arg);
        break;
      case FLASHJIT_ARG_O:
        a.o = tensor_of(arg);
        break;
      case FLASHJIT_ARG_LSE:
        a.lse = tensor_of(arg);
        break;
      case FLASHJIT_ARG_CU_SEQLENS_Q:
        a.cu_seqlens_q = tensor_of(arg);
        break;
      case FLASHJIT_ARG_CU_SEQLENS_K:
        a.cu_seqlens_k = tensor_of(arg);
        break;
      case FLASHJIT_ARG_MAX_SEQLEN_Q:
        a.max_seqlen_q = integer_of(arg);
        break;
      case FLASHJIT_ARG_MAX_SEQLEN_K:
        a.max_seqlen_k = integer_of(arg);
        break;
      case FLASHJIT_ARG_SOFTMAX_SCALE:
        a.softmax_scale = static_cast<float>(arg.value.real);
        break;
      case FLASHJIT_ARG_WORKSPACE:
        a.workspace = tensor_of(arg);
        break;
      default:
        throw Error(ErrorCode::invalid_argument, "argument id " + std::to_string(arg.id) + " at position " +
                                                     std::to_string(i) + " is not known to flashjit " +
                                                     flashjit::version() +
                                                     ": ids are those of flashjit_argument_id");
    }
  }
  return a;
}

// Options as far as the caller's header knew them.
flashjit::EngineOptions options_of(const flashjit_engine_options* given) {
  flashjit::EngineOptions options;
  if (!given) return options;
  if (given->struct_size < sizeof given->struct_size || given->struct_size > sizeof *given)
    throw Error(ErrorCode::invalid_argument, "struct_size is " + std::to_string(given->struct_size) +
                                                 ", it must be sizeof(flashjit_engine_options), which is " +
                                                 std::to_string(sizeof *given) + " in flashjit " +
                                                 flashjit::version());
  flashjit_engine_options o{};
  std::memcpy(&o, given, given->struct_size);
  if (o.device) options.device = o.device;
  if (o.target) options.target = o.target;
  if (o.cache_dir) options.cache_dir = o.cache_dir;
  options.num_threads = o.num_threads;
  if (o.parallel_for)
    options.parallel_for = [run = o.parallel_for, user = o.parallel_for_user](
                               std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                               void* context) { run(user, count, body, context); };
  return options;
}

}  // namespace

extern "C" {

int32_t flashjit_abi_version(void) {
  return FLASHJIT_ABI_VERSION;
}
const char* flashjit_version(void) {
  return flashjit::version();
}
const char* flashjit_last_error_message(void) {
  return last_message.c_str();
}
const char* flashjit_last_error_detail(void) {
  return last_detail.c_str();
}

flashjit_status flashjit_engine_create(const flashjit_engine_options* options, flashjit_engine** engine) {
  return guarded([&] {
    flashjit_engine*& created = require(engine, "engine");
    created = new flashjit_engine{flashjit::Engine(options_of(options))};
  });
}
void flashjit_engine_destroy(flashjit_engine* engine) {
  delete engine;
}

flashjit_status flashjit_spec_create(const char* json, flashjit_spec** spec) {
  return guarded([&] {
    flashjit_spec*& created = require(spec, "spec");
    created = new flashjit_spec{AttentionSpec::from_json(&require(json, "json"))};
  });
}
void flashjit_spec_destroy(flashjit_spec* spec) {
  delete spec;
}

flashjit_status flashjit_engine_get(flashjit_engine* engine, const flashjit_spec* spec,
                                    const flashjit_shape* shape, const flashjit_kernel** kernel) {
  return guarded([&] {
    const flashjit_kernel*& found = require(kernel, "kernel");
    found = handle_of(require(engine, "engine").engine.get(require(spec, "spec").spec, shape_of(shape)));
  });
}

flashjit_status flashjit_engine_get_async(flashjit_engine* engine, const flashjit_spec* spec,
                                          const flashjit_shape* shape, flashjit_request** request) {
  return guarded([&] {
    flashjit_request*& created = require(request, "request");
    created = new flashjit_request{
        require(engine, "engine").engine.get_async(require(spec, "spec").spec, shape_of(shape))};
  });
}
int32_t flashjit_request_ready(const flashjit_request* request) {
  return request && request->future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}
flashjit_status flashjit_request_wait(const flashjit_request* request, const flashjit_kernel** kernel) {
  return guarded([&] {
    const flashjit_kernel*& found = require(kernel, "kernel");
    found = handle_of(*require(request, "request").future.get());
  });
}
void flashjit_request_destroy(flashjit_request* request) {
  delete request;
}

flashjit_status flashjit_kernel_info(const flashjit_kernel* kernel, const char** json) {
  return guarded([&] { require(json, "json") = kernel_of(kernel).info_json().c_str(); });
}

flashjit_status flashjit_kernel_workspace(const flashjit_kernel* kernel, const flashjit_argument* args,
                                          size_t num_args, size_t* bytes) {
  return guarded(
      [&] { require(bytes, "bytes") = kernel_of(kernel).workspace_bytes(args_of(args, num_args)); });
}

flashjit_status flashjit_kernel_launch(const flashjit_kernel* kernel, const flashjit_argument* args,
                                       size_t num_args, void* stream) {
  return guarded([&] { kernel_of(kernel).launch(args_of(args, num_args), stream); });
}

flashjit_status flashjit_kernel_prepare(const flashjit_kernel* kernel, const flashjit_argument* args,
                                        size_t num_args, flashjit_prepared** prepared) {
  return guarded([&] {
    flashjit_prepared*& created = require(prepared, "prepared");
    created = new flashjit_prepared{kernel_of(kernel).prepare(args_of(args, num_args))};
  });
}
flashjit_status flashjit_prepared_launch(const flashjit_prepared* prepared, void* stream) {
  return guarded([&] { require(prepared, "prepared").launch.launch(stream); });
}
void flashjit_prepared_destroy(flashjit_prepared* prepared) {
  delete prepared;
}

}  // extern "C"
