// flashjit: attention kernels from specs, at run time. The C++ interface; flashjit.h is the C one.
//
//   flashjit::Engine engine({.device = "cuda:0"});
//   auto spec = flashjit::AttentionSpec::from_json(R"({"op": "forward", "dtype": "bf16", "head_dim": 128})");
//   const flashjit::Kernel& kernel = engine.get(spec, {.batch = 2, .seqlen_q = 4096, .seqlen_k = 4096,
//                                                      .num_heads_q = 32, .num_heads_kv = 8});
//   kernel.launch({.q = q, .k = k, .v = v, .o = o, .lse = lse}, stream);
//
// Every failure is a flashjit::Error. All functions may be called from several threads at once; destroying
// what another thread uses, or an engine whose kernels are used afterwards, is the caller's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/tune_record.hpp"
#include "codegen/attention_args.hpp"
#include "codegen/error.hpp"
#include "codegen/shape.hpp"
#include "codegen/spec.hpp"
#include "codegen/target.hpp"

namespace flashjit {

// A CUstream / cudaStream_t; null is the default stream. CPU kernels take null only and return when done.
using Stream = void*;

// Runs body(context, begin, end) over disjoint ranges that cover [0, count), on any threads, and returns when
// all are done. What a host application passes to make CPU kernels run on its own threads.
using ParallelFor = std::function<void(
    std::int64_t count, void (*body)(void* context, std::int64_t begin, std::int64_t end), void* context)>;

enum class Origin { memory, disk, compiled };
FLASHJIT_API const char* to_string(Origin) noexcept;

// Who chose a kernel's config.
enum class ConfigSource {
  heuristic,    // nobody: there is no tune record for the spec, the device and the shape's bucket()
  record,       // a tune record
  first_guess,  // a tune record made under another driver, compiler, flashjit version or number of threads
  pinned,       // the spec, which leaves no choice
};
FLASHJIT_API const char* to_string(ConfigSource) noexcept;

// One of the device functions that a launch runs one after the other. The numbers are of GPU kernels.
struct StepInfo {
  std::string entry;      // its symbol
  int registers = 0;      // per thread
  int spill_bytes = 0;    // per thread, stores and loads
  int shared_memory = 0;  // bytes of a block, static and dynamic
};

struct KernelInfo {
  AttentionSpec spec;
  Target target;
  KernelConfig config;
  std::string key;         // cache key of the entry, 32 hexadecimal digits
  std::string path;        // the entry's file; empty if it is not on disk
  std::string cache_note;  // why it is not on disk, or why a file there was not used; empty: all is well
  std::string compiler;    // name, version and build
  std::string log;
  ConfigSource config_source = ConfigSource::heuristic;
  std::string config_note;  // the record's file; of a first guess also what differs from where it was made;
                            // why a record that is there was not used
  Origin origin = Origin::compiled;  // where this engine got it from
  std::vector<StepInfo> steps;       // in the order of a launch
  int registers = 0;                 // the most of any step, as the next two
  int spill_bytes = 0;
  int shared_memory = 0;
  double compile_ms = 0;  // when it was compiled
  double get_ms = 0;      // this engine's time from spec to launchable
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
  // Bytes that args.workspace must hold; 0 for a forward. What serves the largest batch, seqlen_q and
  // seqlen_k serves every smaller launch.
  std::size_t workspace_bytes(const Shape& shape) const;
  // Checks the arguments, then launches. Allocates nothing, once the threads of a CPU have the kernel's
  // scratch: each takes it the first time, as much for any lengths, and keeps it until it ends. On a GPU
  // asynchronous and capturable in a CUDA graph. On a CPU work for several threads wakes them under a mutex,
  // held for a few instructions; numbers below 2^-126 are zeros meanwhile, and threads have their own mode
  // back after.
  void launch(const AttentionArgs& args, Stream stream = nullptr) const;
  // Allocates what it returns.
  PreparedLaunch prepare(const AttentionArgs& args) const;

  struct Impl;
  explicit Kernel(std::unique_ptr<Impl>);

 private:
  std::unique_ptr<Impl> impl_;
};

// What an engine does for a (spec, shape bucket) that it has not been asked for before.
enum class Policy {
  heuristic,          // takes the tune record's config, else the heuristic one; never measures by itself
  tune_on_first_use,  // tunes first where there is no record made here: seconds. One of all processes on a
                      // cache_dir does, the others wait and get the same config
  require_prebuilt,   // as heuristic, but never compiles: what is not in a cache folder is not_prebuilt
};

// As many CPUs as Linux on x86-64 runs on: more threads would only wait for each other.
inline constexpr int max_num_threads = 8192;

struct EngineOptions {
  std::string device = "cpu";  // "cpu" or "cuda:N"
  std::string target{};        // empty: the device's best
  std::optional<std::string>
      cache_dir{};  // absent: FLASHJIT_CACHE_DIR, else ~/.cache/flashjit; empty: no disk cache
  std::optional<std::string>
      cache_path{};  // absent: FLASHJIT_CACHE_PATH; read-only folders of prebuilt kernels that are
                     // searched before cache_dir, separated by colons; empty: none
  std::uint64_t cache_max_bytes = 0;  // of cache_dir; 0: FLASHJIT_CACHE_MAX_BYTES, else 1 GiB
  int num_threads = 0;         // CPU kernels; 0: as many as this process may use; at most max_num_threads
  ParallelFor parallel_for{};  // CPU kernels run on it, work cut for num_threads, not on the engine's threads
  Policy policy = Policy::heuristic;
  double tune_seconds = 30;  // tune_on_first_use: the most that tuning may take
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
  // The same on a thread of the engine. The engine waits for it before it ends. Throws device_failed where
  // the system gives no thread.
  std::shared_future<const Kernel*> get_async(const AttentionSpec& spec, const Shape& shape);

  const Target& target() const noexcept;
  Device device() const noexcept;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// Merges partial results of attention, each over keys of its own, into the result over all keys: parts_o and
// parts_lse into o and, if it is given, lse (FlashDecoding, Dao et al. 2023). The number of parts is free,
// parts without keys (lse -inf) count as nothing, and a merge of merges is a merge. o may have another dtype
// than parts_o, which is float32 or o's dtype. The same as a launch of the spec {"op": "merge", ...}, which
// this makes of the tensors: the first launch for a dtype and head_dim compiles or loads its kernel.
FLASHJIT_API void merge(Engine& engine, const AttentionArgs& args, Stream stream = nullptr);

// For any target, on any machine: compiles (or finds on disk) without loading.
FLASHJIT_API KernelInfo compile(const AttentionSpec& spec, const Target& target, const Shape& shape,
                                const std::optional<std::string>& cache_dir = {},
                                const std::optional<std::string>& cache_path = {});

struct TuneOptions {
  EngineOptions engine{};       // where is measured, and in which cache_dir records are kept
  double budget_seconds = 120;  // for all shapes together; 0: as long as it takes
  int jobs = 0;                 // candidates compiled at once; 0: as many as this process has CPUs
  bool again = false;           // measure anew what has a record already
  bool resume = true;           // go on with a record whose budget ended early; else it is as good as any
};

enum class TuneStage { waiting, building, checking, measuring };  // waiting: for another process's result
FLASHJIT_API const char* to_string(TuneStage) noexcept;

struct TuneProgress {
  std::size_t shape_index = 0, num_shapes = 1;
  Shape shape{};
  TuneStage stage = TuneStage::waiting;
  int done = 0, total = 0;  // candidates built or checked; rounds measured
  int candidates = 0;       // still in
  KernelConfig best{};      // while measuring, with the median milliseconds of a launch
  double best_ms = 0, heuristic_ms = 0;
  double seconds_left = 0;  // of the budget; infinite without one
};
// Called often, on the thread that called tune(); false ends the tuning with what there is.
using TuneCallback = std::function<bool(const TuneProgress&)>;

struct TuneResult {
  TuneRecord record;
  std::string path;       // the record's file; empty if it is not on disk
  std::string note;       // why it is not there, or why a file there was not used
  bool measured = false;  // false: there was a record already
};

// Measures every config worth trying for the spec at each of the shapes, and keeps what it chose for the
// shape's bucket() as a record, which engines of all processes on that cache_dir then use. The heuristic
// config stays unless another is faster beyond noise, and computes the same. Ended early, it keeps the
// samples it has, and the next call goes on from them. Others are kept off neither the device nor the CPUs:
// measure on an idle machine.
FLASHJIT_API std::vector<TuneResult> tune(const AttentionSpec& spec, const std::vector<Shape>& shapes,
                                          const TuneOptions& options = {}, const TuneCallback& progress = {});

// Version of the library, "major.minor.patch".
FLASHJIT_API const char* version() noexcept;

}  // namespace flashjit
