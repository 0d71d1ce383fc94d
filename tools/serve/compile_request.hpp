// A request for a kernel as it comes over the network: the text that compile_request_text() writes
// (runtime/build.hpp), from anybody.
#pragma once

#include <string_view>

#include "cache/key.hpp"
#include "codegen/families/kernel_source.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit::serve {

inline constexpr std::size_t most_request_bytes = 512 << 10;

struct CompileRequest {
  AttentionSpec spec;  // validated
  KernelSource source;
  CacheKey key;  // request_key() of both
};

// Throws Error: invalid_argument if the text is no request, invalid_spec and unsupported as the functions of
// specs do, not_prebuilt if the asker's flashjit makes another text of the spec than this one.
CompileRequest parse_compile_request(std::string_view text);

}  // namespace flashjit::serve
