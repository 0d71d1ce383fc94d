// An event says what an engine did for a kernel that it was asked for and did not have in memory.
#pragma once

#include <functional>
#include <string>

#include "codegen/base/error.hpp"
#include "codegen/base/shape.hpp"
#include "codegen/base/target.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

struct KernelEvent {
  enum class Kind {
    waiting,   // another process builds the kernel; the thread waits for it, at most a minute
    loaded,    // found on disk, or in memory for another shape
    compiled,  // compiled, since no folder had it
    failed,    // get() throws
  };
  Kind kind = Kind::loaded;
  AttentionSpec spec;
  Shape shape;
  Target target;       // of the kernel; of the engine if there is none
  double ms = 0;       // since get() began
  std::string path;    // the kernel's file; empty: none
  std::string reason;  // failed: the error's message; else what is unusual: an entry that was not used, the
                       // kernel of a lesser target, a config that is a first guess. Empty: nothing
};
FLASHJIT_API const char* to_string(KernelEvent::Kind) noexcept;

// Called on the thread that called get(), several at once. It must not use the engine. What it throws is
// ignored.
using KernelCallback = std::function<void(const KernelEvent&)>;

}  // namespace flashjit
