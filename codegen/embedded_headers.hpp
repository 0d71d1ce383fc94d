// The headers of templates/, part of the library (written by embed_headers.cmake).
#pragma once

#include <span>

#include "codegen/families/kernel_source.hpp"

namespace flashjit {

// Sorted by name.
std::span<const EmbeddedHeader> embedded_headers();

}  // namespace flashjit
