// The keys of a kernel.
#pragma once

#include <string_view>

#include "cache/key.hpp"
#include "codegen/kernel_source.hpp"
#include "codegen/spec.hpp"

namespace flashjit {

// What was asked for and the source that answers it: spec, target, config, steps, and the digests of the
// rendered text and of each header it reaches. Needs no compiler. `spec` is validated; its pins are left out,
// since the config says what came of them.
Key request_key(const AttentionSpec& spec, const KernelSource& source);

// The request, and everything else that decides the machine code and how it is stored: compile options, the
// compiler's identity, the entry format's version.
Key entry_key(const Key& request, std::string_view options, std::string_view compiler_identity);

// The request in an entry's key.
Key request_of(const Key& entry);

}  // namespace flashjit
