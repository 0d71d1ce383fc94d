// flashjit: attention kernels from specs, at run time. The C++ interface; flashjit.h is the C one.
//
//   flashjit::Engine engine({.device = "cuda:0"});
//   auto spec = flashjit::AttentionSpec::from_json(R"({"op": "forward", "dtype": "bf16", "head_dim": 128})");
//   const flashjit::Kernel& kernel = engine.get(spec, {.batch = 2, .seqlen_q = 4096, .seqlen_k = 4096,
//                                                      .num_heads_q = 32, .num_heads_kv = 8});
//   kernel.launch({.q = q, .k = k, .v = v, .o = o, .lse = lse}, stream);
//
// Every failure is a flashjit::Error. All functions may be called from several threads at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/error.hpp"
#include "codegen/shape.hpp"
#include "codegen/spec.hpp"
#include "codegen/target.hpp"

namespace flashjit {

struct Device {
  enum class Kind { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  // "cpu" or "cuda:N" ("cuda" is "cuda:0").
  static FLASHJIT_API Device parse(std::string_view text);
  std::string str() const { return kind == Kind::cpu ? "cpu" : "cuda:" + std::to_string(index); }
  bool operator==(const Device&) const = default;
};

// Borrowed memory. Strides in elements; the last dimension of q, k, v, o must be contiguous.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::bf16;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> strides{};

  // Row-major tensor of that shape.
  static FLASHJIT_API Tensor contiguous(void* data, DType dtype, Device device,
                                        std::initializer_list<std::int64_t> shape);
};

// What one launch computes on. q, k, v, o: [batch, seqlen, heads, head_dim], or with varlen packed
// [total, heads, head_dim]. Later operations add fields.
struct AttentionArgs {
  std::optional<Tensor> q{}, k{}, v{}, o{};
  std::optional<Tensor> lse{};  // float32 [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q];
                                // natural logarithm; -inf for a row with nothing to attend to
  std::optional<Tensor> cu_seqlens_q{};  // int32 [batch + 1], on the kernel's device; varlen only
  std::optional<Tensor> cu_seqlens_k{};  // int32 [batch + 1]
  int max_seqlen_q = 0;                  // varlen: no sequence is longer; 0: total_q
  int max_seqlen_k = 0;
  std::optional<float> softmax_scale{};  // default 1 / sqrt(head_dim); finite, > 0
  std::optional<Tensor> workspace{};  // Kernel::workspace_bytes() bytes, contents undefined before and after
};

// A CUstream / cudaStream_t; null is the default stream. CPU kernels take null only and return when done.
using Stream = void*;

// Runs body(context, begin, end) over disjoint ranges that cover [0, count), on any threads, and returns when
// all are done. What a host application passes to make CPU kernels run on its own threads.
using ParallelFor = std::function<void(
    std::int64_t count, void (*body)(void* context, std::int64_t begin, std::int64_t end), void* context)>;

enum class Origin { memory, disk, compiled };
FLASHJIT_API const char* to_string(Origin) noexcept;

struct KernelInfo {
  AttentionSpec spec;
  Target target;
  KernelConfig config;
  std::string key;         // cache key of the entry, 32 hexadecimal digits
  std::string path;        // the entry's file; empty if it is not on disk
  std::string cache_note;  // why it is not on disk, or why a file there was not used; empty: all is well
  std::string compiler;    // name, version and build
  std::string log;
  Origin origin = Origin::compiled;  // where this engine got it from
  int registers = 0;                 // cuda: per thread
  int spill_bytes = 0;               // cuda: per thread, stores and loads
  int shared_memory = 0;             // cuda: bytes of a block, static and dynamic
  double compile_ms = 0;             // when it was compiled
  double get_ms = 0;                 // this engine's time from spec to launchable
};

FLASHJIT_API std::string to_json(const KernelInfo&);

// Arguments checked and encoded once for many launches on the same tensors.
class FLASHJIT_API PreparedLaunch {
 public:
  PreparedLaunch(PreparedLaunch&&) noexcept;
  PreparedLaunch& operator=(PreparedLaunch&&) noexcept;
  ~PreparedLaunch();
  void launch(Stream stream = nullptr) const;

 private:
  friend class Kernel;
  struct Impl;
  explicit PreparedLaunch(std::unique_ptr<Impl>);
  std::unique_ptr<Impl> impl_;
};

// Loaded machine code. Lives as long as its engine.
class FLASHJIT_API Kernel {
 public:
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel();

  const KernelInfo& info() const noexcept;
  // The same as JSON text.
  const std::string& info_json() const noexcept;
  // Bytes that args.workspace must hold; 0 for a forward.
  std::size_t workspace_bytes(const AttentionArgs& args) const;
  // Checks the arguments, then launches. Allocates nothing; on a GPU asynchronous and capturable in a CUDA
  // graph.
  void launch(const AttentionArgs& args, Stream stream = nullptr) const;
  PreparedLaunch prepare(const AttentionArgs& args) const;

  struct Impl;
  explicit Kernel(std::unique_ptr<Impl>);

 private:
  std::unique_ptr<Impl> impl_;
};

struct EngineOptions {
  std::string device = "cpu";  // "cpu" or "cuda:N"
  std::string target{};        // empty: the device's best
  std::optional<std::string>
      cache_dir{};             // absent: FLASHJIT_CACHE_DIR, else ~/.cache/flashjit; empty: no disk cache
  int num_threads = 0;         // CPU kernels; 0: as many as this process may use
  ParallelFor parallel_for{};  // CPU kernels run on it instead of the engine's own threads
};

class FLASHJIT_API Engine {
 public:
  explicit Engine(EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The kernel for the spec at sizes like `shape`, compiled or loaded if this is the first time. The
  // reference is valid for the engine's life. In memory already: no lock, no allocation.
  const Kernel& get(const AttentionSpec& spec, const Shape& shape);
  // The same on a thread of the engine. The engine waits for it before it ends.
  std::shared_future<const Kernel*> get_async(const AttentionSpec& spec, const Shape& shape);

  const Target& target() const noexcept;
  Device device() const noexcept;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// For any target, on any machine: compiles (or finds on disk) without loading.
FLASHJIT_API KernelInfo compile(const AttentionSpec& spec, const Target& target, const Shape& shape,
                                const std::optional<std::string>& cache_dir = {});

// Version of the library, "major.minor.patch".
FLASHJIT_API const char* version() noexcept;

}  // namespace flashjit
