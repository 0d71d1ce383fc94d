// The memory layout of DLPack 1.x, by which array frameworks exchange tensors, as far as it is used here.
#pragma once

#include <cstdint>

namespace flashjit::python::dlpack {

enum DeviceType : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3, cuda_managed = 13 };
enum TypeCode : std::uint8_t {
  signed_integer = 0,
  unsigned_integer = 1,
  real = 2,
  bfloat = 4,
  boolean = 6,
  float8_e4m3fn = 10,
  float8_e5m2 = 12
};

struct Version {
  std::uint32_t major, minor;
};
struct Device {
  std::int32_t type, index;
};
struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t rank;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null before version 1.2: row-major
  std::uint64_t byte_offset;
};

// The contents of a capsule "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};
// The contents of a capsule "dltensor_versioned".
struct ManagedTensorVersioned {
  static constexpr std::uint64_t read_only = 1;
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// A framework's functions, in the capsule "dlpack_exchange_api" that its tensor type has as
// __dlpack_c_exchange_api__. They return 0, or -1 with a Python exception, and do not synchronise.
struct ExchangeApi {
  Version version;
  const void* previous;
  int (*allocate)(Tensor* like, ManagedTensorVersioned** made, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_from_object)(void* object, ManagedTensorVersioned** tensor);
  int (*object_from_managed)(ManagedTensorVersioned* tensor, void** object);
  int (*tensor_from_object)(void* object, Tensor* tensor);  // borrows the object's memory; may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** stream);
};

}  // namespace flashjit::python::dlpack
