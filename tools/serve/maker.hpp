// The way to an entry that the service does not have: the folder under its lock, stores, a child that
// compiles. Blocks, so it runs on threads of its own.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "runtime/build.hpp"
#include "tools/serve/compile_request.hpp"
#include "tools/serve/nursery.hpp"

namespace flashjit::serve {

struct Made {
  std::string name;    // of the entry: "v3/REQUEST-ENTRY.kernel"
  std::string bytes;   // signed
  std::string how;     // "compiled", "found", "fetched"
  std::string note;    // what failed on the way, such as a full disk
  std::string log;     // the compiler's
  double seconds = 0;  // of the compile
};

class Maker {
 public:
  // `cache` has a folder, and a signer.
  Maker(OpenedCache cache, const ChildLimits& limits) : cache_(std::move(cache)), nursery_(limits) {}

  const OpenedCache& cache() const { return cache_; }
  const Nursery& nursery() const { return nursery_; }
  // `text` is the request's. Throws Error.
  Made make(const CompileRequest& request, const std::string& text, const std::atomic<bool>& cancelled);

 private:
  const OpenedCache cache_;
  Nursery nursery_;
};

}  // namespace flashjit::serve
