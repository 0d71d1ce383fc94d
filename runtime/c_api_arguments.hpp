// The functions of the C interface share these: handles, errors, sizes and arguments.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "codegen/arguments/table.hpp"
#include "codegen/base/float_state.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"

struct flashjit_engine {
  flashjit::Engine engine;
};
struct flashjit_spec {
  flashjit::AttentionSpec spec;
};

namespace flashjit::c_api {

// Keeps the message and detail for this thread.
flashjit_status fail(ErrorCode code, const char* message, const char* detail = "") noexcept;

// Runs a function that may throw, and converts exceptions to a status.
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

// `name` is the beginning of the message, in one part or several.
template <class T, class... Name>
T& require(T* pointer, const Name&... name) {
  if (!pointer) refuse_argument(name..., " is a null pointer");
  return *pointer;
}

inline const Kernel& kernel_of(const flashjit_kernel* kernel) {
  return *reinterpret_cast<const Kernel*>(&require(kernel, "kernel"));
}
inline const flashjit_kernel* handle_of(const Kernel& kernel) {
  return reinterpret_cast<const flashjit_kernel*>(&kernel);
}

// The struct as the caller's header knew it; later fields are
// zero. `first_end`: where the field after struct_size ends.
template <class Struct>
Struct known_part(const Struct& given, std::size_t first_end, const char* type) {
  if (given.struct_size < first_end || given.struct_size > sizeof given)
    refuse_argument(type, "'s struct_size is ", given.struct_size, ", it must be sizeof(", type,
                    "), which is ", sizeof given, " in flashjit ", flashjit::version());
  Struct known{};
  std::memcpy(&known, &given, given.struct_size);
  return known;
}

inline flashjit::Shape shape_of(const flashjit_shape* shape) {
  constexpr std::size_t first_end = offsetof(flashjit_shape, batch) + sizeof shape->batch;
  const flashjit_shape s = known_part(require(shape, "shape"), first_end, "flashjit_shape");
  return {s.batch, s.seqlen_q, s.seqlen_k, s.num_heads_q, s.num_heads_kv, s.page_size, s.total_q, s.total_k};
}

inline flashjit_tensor c_tensor(const flashjit::Tensor& tensor) {
  flashjit_tensor t = {tensor.data,
                       static_cast<int32_t>(tensor.dtype),
                       static_cast<int32_t>(tensor.device.kind),
                       tensor.device.index,
                       tensor.rank,
                       {},
                       {}};
  std::copy_n(tensor.shape.begin(), tensor.rank, t.shape);
  std::copy_n(tensor.strides.begin(), tensor.rank, t.strides);
  return t;
}

// `name` is the argument's, for messages.
inline flashjit::Tensor tensor_of(const flashjit_tensor* given, std::string_view name) {
  const flashjit_tensor& t = require(given, "argument ", name, "'s tensor");
  const auto wrong = [&](const char* field, int value, const char* allowed) {
    refuse_argument("argument ", name, "'s tensor has ", field, " ", value, ", which is not ", allowed);
  };
  if (t.dtype < FLASHJIT_FP32 || t.dtype > FLASHJIT_FP8_E5M2) wrong("dtype", t.dtype, "a flashjit_dtype");
  if (t.device_kind < FLASHJIT_CPU || t.device_kind > FLASHJIT_CUDA)
    wrong("device_kind", t.device_kind, "a flashjit_device_kind");
  if (t.rank < 1 || t.rank > FLASHJIT_MAX_RANK) wrong("rank", t.rank, "between 1 and 6");
  flashjit::Tensor tensor{.data = t.data,
                          .dtype = static_cast<flashjit::DType>(t.dtype),
                          .device = {static_cast<flashjit::Device::Kind>(t.device_kind), t.device_index},
                          .rank = t.rank};
  std::copy(t.shape, t.shape + t.rank, tensor.shape.begin());
  std::copy(t.strides, t.strides + t.rank, tensor.strides.begin());
  return tensor;
}

inline void set(std::optional<flashjit::Tensor>& member, const flashjit_argument& arg, const char* name) {
  member = tensor_of(arg.value.tensor, name);
}
inline void set(std::optional<int>& member, const flashjit_argument& arg, const char* name) {
  if (arg.value.integer < 0 || arg.value.integer > std::numeric_limits<int>::max())
    refuse_argument("argument ", name, " is ", arg.value.integer, ", it must be between 0 and 2147483647");
  member = static_cast<int>(arg.value.integer);
}
inline void set(std::optional<float>& member, const flashjit_argument& arg, const char*) {
  member = static_cast<float>(arg.value.real);
}
inline void set(std::optional<double>& member, const flashjit_argument& arg, const char*) {
  member = arg.value.real;
}
inline void set(std::optional<std::uint64_t>& member, const flashjit_argument& arg, const char*) {
  member = static_cast<std::uint64_t>(arg.value.integer);
}

// The arguments of a launch. Those of declared names lie here, so that nothing is allocated.
class Arguments {
 public:
  // `spec`: null for calls without named arguments.
  Arguments(const flashjit_argument* args, size_t count, const AttentionSpec* spec) {
    const flashjit::DefaultSseState state;
    if (count) require(args, "args");
    flashjit::ArgumentSet given = 0;
    for (size_t i = 0; i < count; ++i) {
      const flashjit_argument& arg = args[i];
      if (arg.id >= flashjit::first_named_id && spec) {
        add_named(arg, i, *spec);
        continue;
      }
      const flashjit::Argument* const known = flashjit::find_argument(arg.id);
      if (!known)
        refuse_argument("argument id ", arg.id, " at position ", i, " is not known to flashjit ",
                        flashjit::version(), ": ids are those of flashjit_argument_id");
      if (given & bit_of(*known))
        refuse_argument("argument ", known->name, " at position ", i, " was given before: give it once");
      given |= bit_of(*known);
      std::visit([&](auto member) { set(args_.*member, arg, known->name); }, known->member);
    }
    args_.named = {named_.all, named_count_};
  }
  Arguments(const Arguments&) = delete;

  const AttentionArgs& get() const { return args_; }

 private:
  void add_named(const flashjit_argument& arg, size_t position, const AttentionSpec& spec) {
    const flashjit::Declared declared = declared_at(spec, arg.id - flashjit::first_named_id);
    if (!declared)
      refuse_argument("argument id ", arg.id, " at position ", position,
                      " is none of the spec: flashjit_spec_argument() has the ids of its ",
                      count_of_names(spec), " tables, gradients and scalars");
    if (named_count_ == most_named)
      refuse_argument("argument ", declared.name(), " was given before: give it once");
    const std::string_view name = name_of(declared, named_count_);
    flashjit::NamedArgument* const named = &named_.all[named_count_++];
    if (declared.table) {
      std::construct_at(named, name, tensor_of(arg.value.tensor, name));
    } else if (declared.scalar->dtype == flashjit::DType::int32) {
      std::construct_at(named, name, arg.value.integer);
    } else {
      std::construct_at(named, name, arg.value.real);
    }
  }

  // The name of a gradient, which stands nowhere, is made here.
  std::string_view name_of(const flashjit::Declared& declared, std::size_t place) {
    if (!declared.gradient) return declared.table ? declared.table->name : declared.scalar->name;
    char* const to = names_[place];
    const int size = std::snprintf(to, sizeof names_[place], "d_%s", declared.table->name.c_str());
    return {to, static_cast<std::size_t>(size)};
  }

  static constexpr std::size_t most_named = 2 * flashjit::most_tables + flashjit::most_scalars;
  // A union: names that a launch does not have are not initialised, and so cost nothing.
  union Room {
    Room() {}
    flashjit::NamedArgument all[most_named];
  };

  AttentionArgs args_;
  Room named_;
  std::size_t named_count_ = 0;
  char names_[most_named][flashjit::longest_name + 3];
};

}  // namespace flashjit::c_api
