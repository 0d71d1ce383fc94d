// flashjit: attention kernels from specs, at run time. This
// is the C++ interface; flashjit.h is the C interface.
//
//   flashjit::Engine engine({.device = "cuda:0"});
//   auto spec = flashjit::AttentionSpec::from_json(R"({"op": "forward", "dtype": "bf16", "head_dim": 128})");
//   const flashjit::Kernel& kernel = engine.get(spec, {.batch = 2, .seqlen_q = 4096, .seqlen_k = 4096,
//                                                      .num_heads_q = 32, .num_heads_kv = 8});
//   kernel.launch({.q = q, .k = k, .v = v, .o = o, .lse = lse}, stream);
//
// Every failure is a flashjit::Error. All functions may be called from several
// threads at once. The caller must not destroy an object that another thread is
// using, and must not use an engine's kernels after the engine is destroyed.
//
// A host's floating-point state (rounding, traps, denormal numbers as zeros) changes no
// result, and is as it was after each call. In a child made by fork() engines for CPUs work, those
// for GPUs refuse, since CUDA does not survive fork(), and all may be destroyed.
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
#include "codegen/arguments/attention_args.hpp"
#include "codegen/base/error.hpp"
#include "codegen/base/shape.hpp"
#include "codegen/base/target.hpp"
#include "codegen/spec/spec.hpp"
#include "compile_limits.hpp"
#include "kernel_event.hpp"

namespace flashjit {

// A CUstream or cudaStream_t; null is the default stream. CPU
// kernels take only null, and have finished when the launch returns.
using Stream = void*;

// Runs body(context, begin, end) over disjoint ranges that cover [0, count), on any threads, and
// returns when all are done. A host application passes one to make CPU kernels run on its own threads.
using ParallelFor = std::function<void(
    std::int64_t count, void (*body)(void* context, std::int64_t begin, std::int64_t end), void* context)>;

enum class Origin { memory, disk, compiled, remote };
FLASHJIT_API const char* to_string(Origin) noexcept;

// The source of a kernel's config.
enum class ConfigSource {
  heuristic,    // the default; there is no tune record for the spec, the device and the shape's bucket()
  record,       // a tune record
  first_guess,  // a tune record made under another driver, compiler, flashjit version or number of threads
  pinned,       // the spec's pins leave no choice
};
FLASHJIT_API const char* to_string(ConfigSource) noexcept;

// One step of a launch: a device function. The numbers are those of GPU kernels; 0 on a CPU.
struct StepInfo {
  std::string function;   // extern "C" name
  int registers = 0;      // per thread
  int spill_bytes = 0;    // per thread, stores plus loads
  int shared_memory = 0;  // bytes per block, static plus dynamic
};

struct KernelInfo {
  AttentionSpec spec;
  Target target;
  KernelConfig config;
  std::string cache_key;  // digest of the cache entry's key, 32 hexadecimal digits
  std::string path;       // the entry's file; empty if it is not on disk
  // Why it is not on disk, why an existing file was not used, or what a store failed at; empty: none of
  // these.
  std::string cache_note;
  std::string compiler;  // name, version and build of the compiler
  std::string log;
  ConfigSource config_source = ConfigSource::heuristic;
  // The tune record's file; for a first guess also the differences between
  // its environment and this one; or why an existing record was not used.
  std::string config_note;
  Origin origin = Origin::compiled;  // where this engine got the kernel from
  std::vector<StepInfo> steps;       // in the order of a launch
  // The largest value of any step.
  int registers = 0;
  int spill_bytes = 0;
  int shared_memory = 0;
  double compile_ms = 0;  // duration of the compilation, when it was compiled
  double get_ms = 0;      // from spec to launchable kernel, in this engine
};

FLASHJIT_API std::string to_json(const KernelInfo&);

// Arguments that were checked and encoded once, for many launches on the same tensors.
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

// A loaded kernel. It lives as long as its engine.
class FLASHJIT_API Kernel {
 public:
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel();

  const KernelInfo& info() const noexcept;
  // info() as JSON text.
  const std::string& info_json() const noexcept;
  // The bytes that args.workspace must have. A forward may be launched without: where few
  // rows see many keys, it is then slower. The size for the largest batch, seqlen_q and
  // seqlen_k serves every smaller launch, too.
  std::size_t workspace_bytes(const Shape& shape) const;
  // Checks the arguments, then launches. Throws invalid_argument or device_failed.
  // On a GPU the launch is asynchronous, can be captured in a CUDA graph and allocates nothing.
  // On a CPU each thread allocates the kernel's scratch at its first launch and keeps it until the
  // thread ends; its size does not depend on lengths. Nothing else is allocated. Work for several
  // threads wakes them under a mutex that is held for a few instructions. During the launch numbers
  // below 2^-126 count as zeros; afterwards each thread has its own floating-point mode again.
  void launch(const AttentionArgs& args, Stream stream = nullptr) const;
  // Checks and encodes the arguments once; allocates the result. Throws invalid_argument.
  PreparedLaunch prepare(const AttentionArgs& args) const;

  struct Impl;
  explicit Kernel(std::unique_ptr<Impl>);

 private:
  std::unique_ptr<Impl> impl_;
};

// An engine's behaviour when it is asked for a (spec, shape bucket) for the first time.
enum class Policy {
  heuristic,  // takes a tune record's config, else the heuristic one; never measures
  // Tunes first if there is no record made here, which takes seconds. One of all
  // processes on a cache_dir tunes; the others wait and get the same config.
  tune_on_first_use,
  require_prebuilt,  // like heuristic, but throws not_prebuilt instead of compiling
};

// The most CPUs that Linux on x86-64 supports: more threads would only wait for each other.
inline constexpr int max_num_threads = 8192;

struct EngineOptions {
  std::string device = "cpu";  // "cpu" or "cuda:N"
  // Empty: the one of FLASHJIT_TARGET for such a device, else the best. A kernel that no folder has and that
  // is not compiled here may be one of a lesser target that the device runs; KernelInfo says so.
  std::string target{};
  // Absent: FLASHJIT_CACHE_DIR, else flashjit in XDG_CACHE_HOME or ~/.cache. Empty: no disk cache.
  std::optional<std::string> cache_dir{};
  // Read-only folders of prebuilt kernels, separated by colons, searched before cache_dir.
  // Absent: FLASHJIT_CACHE_PATH. Empty: none.
  std::optional<std::string> cache_path{};
  std::uint64_t cache_max_bytes = 0;  // limit of cache_dir; 0: FLASHJIT_CACHE_MAX_BYTES, else 1 GiB
  int num_threads = 0;  // for CPU kernels; 0: as many as this process may use; at most max_num_threads
  // CPU kernels run on it instead of the engine's threads, with work divided for num_threads.
  ParallelFor parallel_for{};
  Policy policy = Policy::heuristic;
  double tune_seconds = 30;  // the most seconds that tune_on_first_use may take for a kernel; 0: no limit
  CompileLimits compile{};
  // Told what get() compiled, loaded, waited for or missed.
  KernelCallback on_kernel{};
  // Files that are told the same: a line of JSON for each event, and a manifest of the specs and shapes,
  // which `flashjit prebuild` takes. Absent: FLASHJIT_LOG and FLASHJIT_RECORD. Empty: none.
  std::optional<std::string> log{}, record{};
  // Stores over the network, searched after cache_dir: URLs of the schemes http, https, redis and rediss,
  // spaces between them (cache/remote.md). Absent: FLASHJIT_CACHE_REMOTE. Empty: none.
  std::optional<std::string> cache_remote{};
  // Public keys: from a store, only what one of them has signed is used. NAME=KEY, -NAME=KEY for a revoked
  // one, and files of such lines, colons between them. Absent: FLASHJIT_TRUST.
  std::optional<std::string> cache_trust{};
  // The file of the secret key that signs what is stored. Absent: FLASHJIT_SIGNING_KEY. Empty: nothing is
  // stored.
  std::optional<std::string> signing_key{};
  // Takes configs only from stores and layers, so that all engines that use them run the same: a tune record,
  // else the heuristic config if its kernel is there. Where there is neither, tune_on_first_use tunes and
  // stores; any other policy throws not_prebuilt.
  bool store_configs = false;
};

class FLASHJIT_API Engine {
 public:
  explicit Engine(EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The kernel for the spec at sizes like `shape`. The first call compiles or loads it; later calls take
  // no lock and allocate nothing. The reference is valid for the engine's life. Throws errors of any code.
  const Kernel& get(const AttentionSpec& spec, const Shape& shape);
  // get() on a thread of the engine. The engine's destructor waits
  // for it. Throws device_failed if the system gives no thread. In a forked
  // child, which lacks the thread, waiting throws device_failed; get() begins anew.
  std::shared_future<const Kernel*> get_async(const AttentionSpec& spec, const Shape& shape);

  const Target& target() const noexcept;
  Device device() const noexcept;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// Merges partial results of attention, each over keys of its own, into the result over all keys:
// parts_o and parts_lse into o and, if it is given, lse (FlashDecoding, Dao et al. 2023). Any
// number of parts is allowed; parts without keys (lse -inf) count as nothing; merged results may
// be merged again. parts_o is float32 or of o's dtype. A float32 lse has lost its last bits where scores
// are far from 0: semantics.md says from which lse on that outweighs o's own rounding. The function derives a
// spec of op merge from the tensors and launches its kernel; the first merge of a dtype and head_dim compiles
// or loads it. Throws invalid_argument, and all errors of Engine::get().
FLASHJIT_API void merge(Engine& engine, const AttentionArgs& args, Stream stream = nullptr);

// Compiles a kernel, or finds it on disk, without loading it: for any target,
// on any machine. `cache_dir`, `cache_path` and `limits` are those of EngineOptions.
FLASHJIT_API KernelInfo compile(const AttentionSpec& spec, const Target& target, const Shape& shape,
                                const std::optional<std::string>& cache_dir = {},
                                const std::optional<std::string>& cache_path = {},
                                const CompileLimits& limits = {});

struct TuneOptions {
  EngineOptions engine{};       // the device to measure on, and the cache_dir of the records
  double budget_seconds = 120;  // for all shapes together; 0: no limit
  int jobs = 0;                 // candidates compiled at once; 0: one for each CPU that this process may use
  bool again = false;           // measure even if there is a record already
  bool resume = true;  // continue a record whose budget ended early; false: such a record is as good as any
};

enum class TuneStage { waiting, building, checking, measuring };  // waiting: for another process's result
FLASHJIT_API const char* to_string(TuneStage) noexcept;

struct TuneProgress {
  std::size_t shape_index = 0, num_shapes = 1;
  Shape shape{};
  TuneStage stage = TuneStage::waiting;
  int done = 0, total = 0;  // candidates built or checked, or rounds measured
  int candidates = 0;       // candidates not yet dropped
  KernelConfig best{};      // while measuring; the times are medians, in milliseconds of a launch
  double best_ms = 0, heuristic_ms = 0;
  double seconds_left = 0;  // left of the budget; infinite without a budget
};
// Called often, on the thread that called tune(). Returning
// false ends the tuning and keeps the results so far.
using TuneCallback = std::function<bool(const TuneProgress&)>;

struct TuneResult {
  TuneRecord record;
  std::string path;       // the record's file; empty if it is not on disk
  std::string note;       // why it is not on disk, or why an existing file was not used
  bool measured = false;  // false: the record existed already
  // Why the samples decide little: other programs disturbed the machine. Empty: they agree.
  std::string warning{};
};

// Measures every config worth trying for the spec at each of the shapes. Keeps the choice for each
// shape's bucket() as a record, which the engines of all processes on that cache_dir then use. The
// heuristic config stays unless another is faster beyond noise and computes the same. If tuning
// ends early, the samples so far are kept and the next call continues from them. Other programs
// are kept off neither the device nor the CPUs, so measure on an idle machine. Throws
// invalid_argument for options or shapes that cannot be measured, and all errors of Engine::get().
FLASHJIT_API std::vector<TuneResult> tune(const AttentionSpec& spec, const std::vector<Shape>& shapes,
                                          const TuneOptions& options = {}, const TuneCallback& progress = {});

// Version of the library, "major.minor.patch".
FLASHJIT_API const char* version() noexcept;

}  // namespace flashjit
