// The memory layout of XLA's interface for foreign functions (version 0), by which JAX calls kernels, as far
// as it is used here. Structures begin with their size; later versions append members.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashjit::python::xla {

enum DataType : std::int32_t {
  pred = 1,
  s8 = 2,
  s32 = 4,
  s64 = 5,
  u8 = 6,
  u32 = 8,
  f16 = 10,
  f32 = 11,
  bf16 = 16
};
enum ErrorCode : std::int32_t { invalid_argument = 3, internal = 13 };
enum AttributeType : std::int32_t { string = 4 };

struct Error;
struct Context;

struct Extension {
  static constexpr std::int32_t metadata = 1;
  std::size_t size;
  std::int32_t type;
  Extension* next;
};
struct Version {
  std::size_t size;
  Extension* extensions;
  int major, minor;
};
// A call that asks what the handler is has it as an extension.
struct MetadataExtension {
  Extension base;
  struct Metadata {
    std::size_t size;
    Version version;
    std::uint32_t traits;
  }* metadata;
};

struct Buffer {
  std::size_t size;
  Extension* extensions;
  std::int32_t dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};
struct Text {
  const char* data;
  std::size_t size;
};
struct Values {  // arguments or results
  std::size_t size;
  Extension* extensions;
  std::int64_t count;
  std::int32_t* types;  // buffers alone
  Buffer** values;
};
struct Attributes {
  std::size_t size;
  Extension* extensions;
  std::int64_t count;
  std::int32_t* types;
  Text** names;
  void** values;
};

struct ErrorArguments {
  std::size_t size;
  Extension* extensions;
  const char* message;
  std::int32_t code;
};
struct StreamArguments {
  std::size_t size;
  Extension* extensions;
  Context* context;
  void* stream;  // out
};
struct AllocateArguments {
  std::size_t size;
  Extension* extensions;
  Context* context;
  std::size_t bytes, alignment;
  void* data;  // out
};
struct FreeArguments {
  std::size_t size;
  Extension* extensions;
  Context* context;
  std::size_t bytes;
  void* data;
};
struct DeviceArguments {
  std::size_t size;
  Extension* extensions;
  Context* context;
  std::int32_t ordinal;  // out
};

struct Api {
  std::size_t size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArguments*);
  void *get_error, *destroy_error, *register_handler;
  Error* (*stream)(StreamArguments*);
  void *register_type, *get_context, *set_state, *get_state;
  Error* (*allocate)(AllocateArguments*);  // memory of the device, for work of the stream until it is freed
  Error* (*free)(FreeArguments*);
  void *schedule, *threads, *create_future, *set_available, *set_error, *run_id;
  Error* (*device_ordinal)(DeviceArguments*);
};

struct Call {
  std::size_t size;
  Extension* extensions;
  const Api* api;
  Context* context;
  std::int32_t stage;
  Values arguments, results;
  Attributes attributes;
};

}  // namespace flashjit::python::xla
