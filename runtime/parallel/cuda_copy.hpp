// Copies of tensors between places that a GPU reaches, by copy engines.
#pragma once

#include "runtime/cuda/driver.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

// Enqueues a copy between tensors of one dtype and one shape.
void enqueue_copy(const cuda::Context& context, const Tensor& to, const Tensor& from, Stream stream);

// The driver loads the code of a copy on the device at its first use, which may have to wait for the device.
// Enqueues such copies within 128 bytes of memory.
void load_copies(const cuda::Context& context, void* memory, Stream stream);

}  // namespace flashjit
