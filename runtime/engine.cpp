#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <sstream>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "cache/environment.hpp"
#include "cache/fork.hpp"
#include "codegen/base/float_state.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/build.hpp"
#include "runtime/compile_watch.hpp"
#include "runtime/cpu/amx.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/event_files.hpp"
#include "runtime/executable.hpp"
#include "runtime/flashjit.hpp"
#include "runtime/kernel.hpp"
#include "runtime/kernel_table.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/tune/environment.hpp"
#include "runtime/tune/records.hpp"

namespace flashjit {
namespace {

// The target of FLASHJIT_TARGET for devices of that kind: it names at most one for CPUs and one for GPUs,
// with a comma between them.
std::string target_of_environment(Device::Kind kind) {
  std::istringstream names(environment_variable(Variable::target));
  for (std::string name; std::getline(names, name, ',');) try {
      if (Target::parse(name).is_cuda() == (kind == Device::Kind::cuda)) return name;
    } catch (const Error& error) {
      throw Error(error.code(), "FLASHJIT_TARGET: " + error.message());
    }
  return {};
}

Target choose_target(Device device, std::string wanted) {
  const bool is_given = !wanted.empty();
  if (!is_given) wanted = target_of_environment(device.kind);
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::target_unavailable, (is_given ? "target " : "FLASHJIT_TARGET: target ") +
                                                   Target::parse(wanted).str() + " " + why);
  };
  if (device.kind == Device::Kind::cpu) {
    const auto [native, note] = cpu_target();
    if (wanted.empty() || wanted == "native") return native;
    const Target target = Target::parse(wanted);
    if (target.is_cuda())
      refuse("does not run on device \"cpu\": ask for device \"cuda:N\", or for target " + native.str());
    if (!native.runs(target))
      refuse((note.empty() ? "needs instructions that this CPU lacks" : "does not run: " + note) +
             "; it runs " + native.str());
    return target;
  }
  const CudaDevice gpu = cuda_device(device.index);
  const Target best = Target::for_compute_capability(gpu.major, gpu.minor);
  if (wanted.empty()) return best;
  const Target target = Target::parse(wanted);
  if (!target.runs_on(gpu.major, gpu.minor))
    refuse("does not run on " + device.str() + " (" + gpu.name + ", compute capability " +
           std::to_string(gpu.major) + "." + std::to_string(gpu.minor) + "); it runs " + best.str());
  return target;
}

}  // namespace

using KernelFuture = std::shared_future<const Kernel*>;

// A kernel that another thread promises. In a forked child, which has no such thread, waiting for it ends
// with an exception.
class Promise {
 public:
  Promise() {
    const std::lock_guard lock(process_mutex());
    all().push_front(this);
    place_ = all().begin();
  }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;
  ~Promise() {
    const std::lock_guard lock(process_mutex());
    all().erase(place_);
  }

  KernelFuture future() { return promise_.get_future().share(); }
  void keep(const std::function<const Kernel*()>& make) {
    const Kernel* kernel = nullptr;
    std::exception_ptr failure;
    try {
      kernel = make();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(process_mutex());
    kept_ = true;
    if (failure)
      promise_.set_exception(failure);
    else
      promise_.set_value(kernel);
  }

 private:
  // All of this process, under process_mutex().
  static std::list<Promise*>& all() {
    static auto& promises = *new std::list<Promise*>;
    return promises;
  }
  static void break_all() {
    for (Promise* const promise : all())
      if (!promise->kept_)
        promise->promise_.set_exception(std::make_exception_ptr(
            Error(ErrorCode::device_failed,
                  "this process was forked while its parent made the kernel, which goes on only there: "
                  "call get, which makes it here")));
    all().clear();
  }
  static const int registered_;

  std::promise<const Kernel*> promise_;
  bool kept_ = false;
  std::list<Promise*>::iterator place_;
};
const int Promise::registered_ = (all(), ::pthread_atfork(nullptr, nullptr, &break_all));

// The threads of get_async. Changes under process_mutex(), but for its end.
struct Background {
  struct Task {
    std::thread thread;
    KernelFuture future;
  };
  std::list<Task> tasks;

  ~Background() {
    for (Task& task : tasks) task.thread.join();
  }
};

struct ConfigChoice {
  KernelConfig config;
  ConfigSource source = ConfigSource::heuristic;
  std::string note{};
  std::string compiler{};  // the compiler that a record was measured with
};

struct Engine::Impl {
  const EngineOptions options;
  const Device device;
  const Target own_target;
  const OpenedCache cache;
  const TuneStore records;
  const TuneEnvironment environment;
  const EventFiles event_files;
  std::optional<PerProcess<ThreadPool>> pool;  // absent on a GPU, and if the host brings its own threads
  ParallelFor parallel_for;
  int num_threads = 0;  // threads of parallel_for; a host's are taken to be as many as it could have

  KernelTable table;
  // Every (spec, config) that was ever asked for. All callers share the future of a kernel that is being
  // built. A forked child begins anew what its parent was building. Both under process_mutex().
  struct Build {
    KernelFuture kernel;
    std::uint32_t of = forks();
    bool goes_on() const {
      return of == forks() || kernel.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }
  };
  std::map<std::tuple<std::string, Target, KernelConfig, ConfigSource>, Build> builds;
  std::vector<std::unique_ptr<Kernel>> kernels;
  PerProcess<std::mutex> tuning;  // held by the one tuning under way: tunings share the device
  std::optional<PerProcess<Background>> background{std::in_place};

  explicit Impl(EngineOptions given)
      : options(std::move(given)),
        device(Device::parse(options.device)),
        own_target(choose_target(device, options.target)),
        cache(open_cache(options.cache_dir, options.cache_path, options.cache_max_bytes,
                         store_options(options))),
        records(tune_store(cache)),
        environment(tune_environment(options)),
        event_files(options.log, options.record) {
    if (options.num_threads < 0 || options.num_threads > max_num_threads)
      throw Error(ErrorCode::invalid_argument, "num_threads is " + std::to_string(options.num_threads) +
                                                   ": 0 is all CPUs, otherwise it is a count up to " +
                                                   std::to_string(max_num_threads));
    if (!(options.tune_seconds >= 0))
      throw Error(ErrorCode::invalid_argument, "tune_seconds is " + std::to_string(options.tune_seconds) +
                                                   ": it must be at least 0; infinity is no limit");
    if (options.policy != Policy::require_prebuilt) check_limits(options.compile, own_target);
    if (device.kind != Device::Kind::cpu) return;
    num_threads = options.num_threads ? options.num_threads : available_cpus();
    if (options.parallel_for) {
      parallel_for = options.parallel_for;
      return;
    }
    pool.emplace([n = num_threads] { return std::make_unique<ThreadPool>(n); });
    parallel_for = [p = &*pool](std::int64_t count, ThreadPool::Body body, void* context) {
      p->get().run(count, body, context);
    };
  }

  // Its threads use everything else.
  ~Impl() { background.reset(); }

  // Tells the host and the files what becomes of one get().
  class KernelNews {
   public:
    KernelNews(const Impl& engine, const AttentionSpec& spec, const Shape& shape)
        : engine_(engine), spec_(spec), shape_(shape) {}

    void tell(KernelEvent::Kind kind, const Target& target, const std::string& path,
              const std::string& reason) const noexcept {
      if (!engine_.options.on_kernel && !engine_.event_files.any()) return;
      try {
        const double ms =
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
        const KernelEvent event{kind, spec_, shape_, target, ms, path, reason};
        engine_.event_files.write(event);
        if (engine_.options.on_kernel) engine_.options.on_kernel(event);
      } catch (...) {  // of the host's function
      }
    }

    mutable bool made = false;  // by this get(), and not by an earlier one of another shape

   private:
    const Impl& engine_;
    const AttentionSpec& spec_;
    const Shape& shape_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  };

  const Kernel& get(const AttentionSpec& spec, const Shape& shape) {
    check_shape(spec, shape);
    const Shape b = bucket(shape);
    if (const Kernel* kernel = table.find(spec, b)) return *kernel;
    const DefaultFloatState state;
    const AttentionSpec valid = spec.validated();
    const KernelNews news(*this, valid, shape);
    const Kernel* kernel = nullptr;
    try {
      kernel = make_or_find(valid, shape, news);
    } catch (const Error& error) {
      news.tell(KernelEvent::Kind::failed, own_target, "", error.message());
      throw;
    }
    const KernelInfo& info = kernel->info();
    const bool compiled = info.origin == Origin::compiled && news.made;
    news.tell(compiled ? KernelEvent::Kind::compiled : KernelEvent::Kind::loaded, info.target, info.path,
              reason_of(info));
    table.insert(spec, b, kernel);
    return *kernel;
  }

  // Says what is unusual about a kernel.
  static std::string reason_of(const KernelInfo& info) {
    std::string reason = info.cache_note;
    if (info.config_source == ConfigSource::first_guess)
      reason += (reason.empty() ? "" : "; ") + info.config_note;
    return reason;
  }

  const Kernel* make_or_find(const AttentionSpec& spec, const Shape& shape, const KernelNews& news) {
    try {
      return build_once(spec, own_target, choose_config(spec, own_target, shape), true, news);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_prebuilt && error.code() != ErrorCode::compiler_unavailable) throw;
      for (const Target& lesser : own_target.lesser()) try {
          return build_once(spec, lesser, choose_config(spec, lesser, shape), false, news);
        } catch (const Error&) {  // has no such kernel, or no folder has it
        }
      throw;
    }
  }

  ConfigChoice choose_config(const AttentionSpec& spec, const Target& target, const Shape& shape) {
    ConfigChoice choice{.config = heuristic_config(spec, target, bucket(shape))};
    if (!spec.config.empty() && search_space(spec, target).size() == 1) {
      choice.source = ConfigSource::pinned;
      return choice;
    }
    if (options.store_configs) return config_of_stores(spec, target, shape, std::move(choice));
    const TuneKey key = tune_key(spec, target, device, shape);
    std::optional<TuneStore::Found> found = find_record(records, cache, key, environment, &choice.note);
    const bool may_tune = options.policy == Policy::tune_on_first_use && target == own_target &&
                          !(found && found->is_current());
    // A prebuilt kernel is to be used: a layer without a record has chosen the heuristic config.
    if ((may_tune || found) && !(found && found->bundled)) {
      if (const std::string path = find_prebuilt(spec, target, choice.config, cache.layers); !path.empty()) {
        choice.note = path + " is prebuilt";
        return choice;
      }
    }
    if (may_tune) {
      TuneResult result = tune_now(spec, shape);
      found = {.record = std::move(result.record), .path = std::move(result.path)};
    }
    return by_record(spec, target, std::move(choice), std::move(found));
  }

  // The record's choice, if it fits the target; otherwise `choice`.
  ConfigChoice by_record(const AttentionSpec& spec, const Target& target, ConfigChoice choice,
                         std::optional<TuneStore::Found> found) const {
    if (!found) return choice;
    if (std::string reason = misfit(spec, target, found->record.chosen); !reason.empty()) {
      choice.note = found->path + " is not used: " + std::move(reason);
      return choice;
    }
    choice = {.config = found->record.chosen,
              .source = ConfigSource::record,
              .note = std::move(found->path),
              .compiler = std::move(found->record.environment.compiler)};
    if (!found->first_guess.empty()) mark_first_guess(choice.source, choice.note, found->first_guess);
    return choice;
  }

  // EngineOptions::store_configs.
  ConfigChoice config_of_stores(const AttentionSpec& spec, const Target& target, const Shape& shape,
                                ConfigChoice choice) {
    const TuneKey key = tune_key(spec, target, device, shape);
    const auto refuse = [&](const std::string& why) -> void {
      throw Error(
          ErrorCode::not_prebuilt,
          "no store has a config for " + spec.to_json() + " on " + key.device +
              (why.empty() ? "" : " (" + why + ")") +
              ", and store_configs takes it from nowhere else; where a key signs for the store, flashjit "
              "tune puts one there, and prebuild --push the heuristic one");
    };
    if (std::optional<TuneStore::Found> found = records.lookup(key, environment); found && found->bundled)
      return by_record(spec, target, std::move(choice), std::move(found));
    if (const std::string path = find_prebuilt(spec, target, choice.config, cache.layers); !path.empty()) {
      choice.note = path + " is prebuilt";
      return choice;
    }
    if (!cache.remote) refuse("there is no remote store");
    std::string why;
    const auto ask = [&] {
      RemoteRecord asked = remote_record(*cache.remote, key, environment, records, &why, true);
      if (asked.answer == Answer::failed) refuse(why);
      return std::move(asked.found);
    };
    std::optional<TuneStore::Found> found = ask();
    if (!found && options.policy == Policy::tune_on_first_use && target == own_target) {
      tune_now(spec, shape);
      found = ask();
    }
    if (found) return by_record(spec, target, std::move(choice), std::move(found));
    if (stored_remotely(spec, target, choice.config, *cache.remote, why) != Answer::yes) refuse(why);
    choice.note = "a remote store has the kernel";
    return choice;
  }

  static void mark_first_guess(ConfigSource& source, std::string& note, const std::string& difference) {
    note += (source == ConfigSource::record ? ": " : "; ") + difference;
    source = ConfigSource::first_guess;
  }

  TuneResult tune_now(const AttentionSpec& spec, const Shape& shape) {
    const std::lock_guard lock(tuning.get());
    bool cancelled = false;
    const auto goes_on = [&](const TuneProgress&) {
      cancelled = cancelled || (options.compile.cancelled && options.compile.cancelled());
      return !cancelled;
    };
    TuneResult result =
        tune(spec, {shape}, {.engine = options, .budget_seconds = options.tune_seconds, .resume = false},
             goes_on)
            .front();
    if (cancelled) throw Error(ErrorCode::cancelled, "tuning on first use was cancelled");
    return result;
  }

  const Kernel* build_once(const AttentionSpec& spec, const Target& target, const ConfigChoice& choice,
                           bool may_compile, const KernelNews& news) {
    const std::tuple name(spec.to_json(), target, choice.config, choice.source);
    std::promise<const Kernel*> promise;
    {
      std::unique_lock lock(process_mutex());
      if (const auto found = builds.find(name); found != builds.end() && found->second.goes_on()) {
        const KernelFuture other = found->second.kernel;
        lock.unlock();
        return other.get();
      }
      builds[name] = {promise.get_future().share()};
    }
    try {
      std::unique_ptr<Kernel> kernel = make(spec, target, choice, may_compile, news);
      news.made = true;
      const Kernel* loaded = kernel.get();
      {
        const std::lock_guard lock(process_mutex());
        kernels.push_back(std::move(kernel));
      }
      promise.set_value(loaded);
      return loaded;
    } catch (...) {
      {
        const std::lock_guard lock(process_mutex());
        builds.erase(name);  // the next attempt may succeed
      }
      promise.set_exception(std::current_exception());
      throw;
    }
  }

  std::unique_ptr<Kernel> make(const AttentionSpec& spec, const Target& target, const ConfigChoice& choice,
                               bool may_compile, const KernelNews& news) const {
    const auto start = std::chrono::steady_clock::now();
    auto kernel = std::make_unique<Kernel::Impl>();
    kernel->device = device;
    const auto load = [&](const std::string& code, const std::vector<Step>& steps) {
      kernel->executable = device.kind == Device::Kind::cuda
                               ? load_cuda(device.index, code, steps)
                               : load_cpu(parallel_for, num_threads, code, steps);
    };
    BuiltKernel built =
        build_kernel(spec, target, choice.config, cache,
                     may_compile && options.policy != Policy::require_prebuilt, load, options.compile, [&] {
                       news.tell(KernelEvent::Kind::waiting, target, "",
                                 "another process builds the kernel; it is waited for, at most a minute");
                     });
    if (target != own_target)
      built.info.cache_note = "the kernel is for " + target.str() + ", since no folder has it for " +
                              own_target.str() + " and it is not compiled" +
                              (built.info.cache_note.empty() ? "" : "; " + built.info.cache_note);
    built.info.config_source = choice.source;
    built.info.config_note = choice.note;
    // The compiler that made the code is known only now. A record made with another one is a first guess.
    if (const std::string differs =
            difference({.compiler = choice.compiler}, {.compiler = built.compiler_identity});
        !differs.empty()) {
      mark_first_guess(built.info.config_source, built.info.config_note, differs);
    }
    kernel->info = std::move(built.info);
    kernel->info.get_ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    kernel->info_json = to_json(kernel->info);
    return std::make_unique<Kernel>(std::move(kernel));
  }
};

Engine::Engine(EngineOptions options) {
  const DefaultFloatState state;
  impl_ = std::make_unique<Impl>(std::move(options));
}
Engine::~Engine() = default;

const Kernel& Engine::get(const AttentionSpec& spec, const Shape& shape) {
  return impl_->get(spec, shape);
}

std::shared_future<const Kernel*> Engine::get_async(const AttentionSpec& spec, const Shape& shape) {
  check_shape(spec, shape);
  if (const Kernel* kernel = impl_->table.find(spec, bucket(shape))) {
    std::promise<const Kernel*> ready;
    ready.set_value(kernel);
    return ready.get_future().share();
  }
  // Nothing may throw once the thread has begun.
  std::list<Background::Task>& tasks = impl_->background->get().tasks;
  std::list<Background::Task> begun(1), ended;
  Background::Task& task = begun.front();
  try {
    const auto promise = std::make_shared<Promise>();
    task.future = promise->future();
    const SignalsBlocked of_the_host;
    task.thread = std::thread([promise, impl = impl_.get(), spec, shape] {
      promise->keep([&] { return &impl->get(spec, shape); });
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::device_failed,
                std::string("get_async: the system gives no more threads (") + error.what() +
                    "): call get, which uses the caller's thread, "
                    "or allow more (ulimit -u, or the container's limit of processes)");
  }
  const KernelFuture future = task.future;
  {
    const std::lock_guard lock(process_mutex());
    for (auto it = tasks.begin(); it != tasks.end();) {
      const auto next = std::next(it);
      if (it->future.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
        ended.splice(ended.end(), tasks, it);
      it = next;
    }
    tasks.splice(tasks.end(), begun);
  }
  for (Background::Task& one : ended) one.thread.join();
  return future;
}

const Target& Engine::target() const noexcept {
  return impl_->own_target;
}
Device Engine::device() const noexcept {
  return impl_->device;
}

}  // namespace flashjit
