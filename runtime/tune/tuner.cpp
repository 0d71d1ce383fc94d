// tune(). For each shape, candidates are built on all cores, checked
// against the heuristic config and raced; the result is kept as a record.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "cache/tune_store.hpp"
#include "codegen/base/float_state.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/build.hpp"
#include "runtime/compiler.hpp"
#include "runtime/jobs.hpp"
#include "runtime/tune/environment.hpp"
#include "runtime/tune/race.hpp"
#include "runtime/tune/records.hpp"
#include "runtime/tune/trial.hpp"

namespace flashjit {
namespace {

using namespace std::chrono_literals;
using Seconds = std::chrono::duration<double>;

// How long a record that was measured for seconds may take to reach a store.
constexpr std::chrono::milliseconds remote_flush{5000};
using std::chrono::steady_clock;

// The time budget and the user's callback, which is called only on the thread that made the budget.
class Budget {
 public:
  Budget(double seconds, const TuneCallback& callback)
      : end_(seconds > 0 && seconds < 1e9
                 ? steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(Seconds(seconds))
                 : steady_clock::time_point::max()),
        callback_(callback) {}

  double seconds_left() const {
    if (end_ == steady_clock::time_point::max()) return std::numeric_limits<double>::infinity();
    return Seconds(end_ - steady_clock::now()).count();
  }
  // Gives the next shape this share of the time that is left.
  void set_share(double share) {
    if (std::isfinite(seconds_left())) stop_at_ = seconds_left() * (1 - share);
  }
  double share_left() const { return seconds_left() - stop_at_; }
  void extend(steady_clock::duration by) {
    if (std::isfinite(seconds_left())) end_ += by;
  }
  bool cancelled() const { return cancelled_; }
  // False if the user has cancelled.
  bool ask(TuneProgress& progress) {
    progress.seconds_left = std::max(seconds_left(), 0.0);
    if (!cancelled_ && callback_) cancelled_ = !callback_(progress);
    return !cancelled_;
  }
  // False if the user has cancelled or the share is used up.
  bool go_on(TuneProgress& progress) { return ask(progress) && share_left() > 0; }

 private:
  steady_clock::time_point end_;
  double stop_at_ = 0;
  const TuneCallback& callback_;
  bool cancelled_ = false;
};

TuneEnvironment environment_with_compiler(const EngineOptions& options, const Target& target) {
  TuneEnvironment environment = tune_environment(options);
  try {
    environment.compiler = compiler_for(target)->identity();
  } catch (const Error& error) {  // all candidates may be prebuilt
    if (error.code() != ErrorCode::compiler_unavailable) throw;
  }
  return environment;
}

// Candidates are compiled whatever the policy of later engines, and are not what an application asked for.
EngineOptions untuned(EngineOptions options) {
  options.policy = Policy::heuristic;
  options.on_kernel = {};
  options.log = options.record = "";
  return options;
}

class Tuner {
 public:
  Tuner(const TrialFactory& make_trial, const AttentionSpec& spec, const TuneOptions& options,
        const TuneCallback& callback)
      : make_trial_(make_trial),
        spec_(spec),
        options_(options),
        engine_(untuned(options.engine)),
        cache_(open_cache(options.engine.cache_dir, options.engine.cache_path, options.engine.cache_max_bytes,
                          store_options(options.engine))),
        store_(tune_store(cache_)),
        environment_(environment_with_compiler(options.engine, engine_.target())),
        budget_(options.budget_seconds, callback) {}

  TuneResult tune(const Shape& shape, std::size_t index, std::size_t count) {
    progress_ = {.shape_index = index, .num_shapes = count, .shape = shape};
    budget_.set_share(1 / static_cast<double>(count - index));
    const TuneKey key = tune_key(spec_, engine_.target(), engine_.device(), shape);
    const KeyLock lock = wait_for_lock(key);

    TuneResult result;
    std::optional<TuneStore::Found> found = find_record(store_, cache_, key, environment_, &result.note);
    RemoteCache::Lease lease;
    if (cache_.remote && !suffices(found)) lease = wait_for_lease(key, found, result.note);
    if (suffices(found)) {
      result.record = std::move(found->record);
      result.path = std::move(found->path);
      result.warning = noise_warning(result.record.candidates);
      return result;
    }
    result.measured = true;
    result.record = measure(key, shape, found && !options_.again ? &found->record : nullptr);
    result.warning = noise_warning(result.record.candidates);
    if (result.record.candidates.front().samples_ms.empty()) return result;  // there is nothing to keep
    if (store_.publish(result.record, &result.note)) result.path = store_.path(key);
    if (cache_.remote) {
      cache_.remote->put(TuneStore::name(key), to_json(result.record));
      cache_.remote->flush(remote_flush);
    }
    if (found && found->bundled) result.note = "a bundle's record is used instead: " + found->path;
    return result;
  }

  bool cancelled() const { return budget_.cancelled(); }

 private:
  // Waits until no other process tunes this key. The other process may take
  // as long as we may; our waiting does not count against the budget. The
  // wait is limited, so that a stopped process does not stop others for good.
  KeyLock wait_for_lock(const TuneKey& key) {
    if (!cache_.disk) return {};
    progress_.stage = TuneStage::waiting;
    const Seconds patience(options_.budget_seconds > 0 ? 2 * options_.budget_seconds + 60 : 600);
    for (const auto start = steady_clock::now();;) {
      const auto asked = steady_clock::now();
      KeyLock lock = cache_.disk->lock(cache_key(key), 200ms);
      const auto now = steady_clock::now();
      // lock() returns at once if the folder has no locks.
      if (lock.held() || now - asked < 200ms || now - start > patience || !budget_.ask(progress_)) {
        budget_.extend(now - start);
        return lock;
      }
    }
  }

  // Whether measuring again would change nothing.
  bool suffices(const std::optional<TuneStore::Found>& found) const {
    return !options_.again && found && found->is_current() &&
           (found->bundled || found->record.complete || !options_.resume);
  }

  // One of all hosts that share the stores tunes. The others wait for its record as those on one folder do.
  RemoteCache::Lease wait_for_lease(const TuneKey& key, std::optional<TuneStore::Found>& found,
                                    std::string& note) {
    using std::chrono::milliseconds;
    const double patience = options_.budget_seconds > 0 ? 2 * options_.budget_seconds + 60 : 600;
    FetchLimits limits = cache_.remote->fetch_limits();
    limits.lease = limits.patience =
        milliseconds(static_cast<std::int64_t>(std::min(patience, 3600.0) * 1000));
    const auto start = steady_clock::now();
    progress_.stage = TuneStage::waiting;
    RemoteCache::Fetched fetched = cache_.remote->fetch(
        TuneStore::name(key), limits,
        [&](const std::string& why) { note += (note.empty() ? "" : "; ") + why; },
        [&] { return budget_.ask(progress_); },
        [&](const RemoteCache::Got& got) {
          RemoteRecord theirs = take_record(got, key, environment_, store_, &note);
          if (theirs.found && theirs.found->is_current()) found = std::move(theirs.found);
          return suffices(found);
        });
    budget_.extend(steady_clock::now() - start);
    return std::move(fetched.lease);
  }

  TuneRecord measure(const TuneKey& key, const Shape& shape, const TuneRecord* before) {
    TuneRecord record{.key = key,
                      .chosen = {},
                      .heuristic = heuristic_config(spec_, engine_.target(), key.bucket),
                      .shape = shape,
                      .environment = environment_,
                      .candidates = {}};
    record.chosen = record.heuristic;
    if (before && resumes(*before, record)) {
      record.candidates = before->candidates;
    } else {
      // Candidates nearest to the heuristic config, which is the first, are the likeliest to win.
      std::vector<KernelConfig> space = search_space(spec_, engine_.target(), shape);
      const auto rank = [&](const KernelConfig& config) {
        return std::pair(distance(config, record.heuristic), config);
      };
      std::sort(space.begin(), space.end(),
                [&](const KernelConfig& a, const KernelConfig& b) { return rank(a) < rank(b); });
      for (const KernelConfig& config : space) record.candidates.push_back({.config = config});
    }
    const std::unique_ptr<Trial> trial = make_trial_(engine_, spec_, shape);
    const bool all_built = build(*trial, record.candidates);
    if (budget_.cancelled() || !check(*trial, record.candidates)) return record;
    record.complete = run_race(*trial, record.candidates) && all_built;
    record.chosen = record.candidates[winner(record.candidates)].config;
    return record;
  }

  // Whether measuring can continue from the samples of an unfinished record.
  bool resumes(const TuneRecord& before, const TuneRecord& record) const {
    return !before.complete && before.shape == record.shape && before.heuristic == record.heuristic &&
           difference(before.environment, environment_).empty() && !before.candidates.empty() &&
           before.candidates.front().config == record.heuristic &&
           before.candidates.front().verdict == Verdict::measured &&
           before.candidates.size() == search_space(spec_, engine_.target(), record.shape).size();
  }

  // Builds the candidates, those nearest to the heuristic config first. Returns false if some were left out
  // because half of the time was used, a limit ended their compilation or the user cancelled.
  bool build(Trial& trial, std::vector<TuneCandidate>& candidates) {
    std::vector<TuneCandidate*> todo;
    for (TuneCandidate& c : candidates) {
      if (c.verdict == Verdict::measured) todo.push_back(&c);
    }
    progress_.stage = TuneStage::building;
    progress_.total = progress_.candidates = static_cast<int>(todo.size());
    const double enough_left = budget_.share_left() / 2;
    std::vector<char> decided(todo.size());  // whether it is known which of them can be built
    const auto build_one = [&](std::size_t i) {
      try {
        trial.build(todo[i]->config);
        decided[i] = true;
      } catch (const std::exception& error) {  // a candidate that cannot be built does not win
        const auto* const ours = dynamic_cast<const Error*>(&error);
        if (ours && ours->code() == ErrorCode::cancelled) throw;
        // Under another limit it may be built.
        decided[i] = !(ours && ours->code() == ErrorCode::limit_exceeded);
        todo[i]->verdict = Verdict::failed;
        todo[i]->reason = error.what();
      }
    };
    run_jobs(todo.size(), options_.jobs, build_one, [&](std::size_t built) {
      progress_.done = static_cast<int>(built);
      const bool more = budget_.go_on(progress_) && budget_.share_left() > enough_left;
      return more || built == 0;  // builds at least the heuristic config
    });
    if (TuneCandidate& first = candidates.front(); first.verdict == Verdict::failed) {
      trial.build(first.config);  // throws, unless less is against it now
      first.verdict = Verdict::measured;
      decided.front() = true;
    }
    std::set<KernelConfig> left_out;
    for (std::size_t i = 0; i < todo.size(); ++i) {
      if (!decided[i]) left_out.insert(todo[i]->config);
    }
    return std::erase_if(candidates, [&](const TuneCandidate& c) { return left_out.contains(c.config); }) ==
           0;
  }

  // Checks the candidates. Returns false if the time was used up before all were checked.
  bool check(Trial& trial, std::vector<TuneCandidate>& candidates) {
    progress_.stage = TuneStage::checking;
    progress_.done = 0;
    for (TuneCandidate& c : candidates) {
      if (c.verdict != Verdict::measured) continue;
      if (!budget_.go_on(progress_)) return false;
      try {
        c.reason = trial.check(c.config);
        if (!c.reason.empty()) c.verdict = Verdict::wrong;
      } catch (const Error& error) {
        c.verdict = Verdict::failed;
        c.reason = error.message();
      }
      if (&c == &candidates.front() && c.verdict != Verdict::measured) {
        throw Error(ErrorCode::internal, "the heuristic config " + to_json(c.config) + " of " +
                                             spec_.to_json() + " cannot be measured: " + c.reason);
      }
      ++progress_.done;
    }
    return true;
  }

  bool run_race(Trial& trial, std::vector<TuneCandidate>& candidates) {
    progress_.stage = TuneStage::measuring;
    progress_.total = race_rounds;
    return race(candidates, {.sample_ms = [&](const KernelConfig& c) { return trial.sample_ms(c); },
                             .go_on =
                                 [&] {
                                   describe_race(candidates);
                                   return budget_.go_on(progress_);
                                 }});
  }

  void describe_race(const std::vector<TuneCandidate>& candidates) {
    progress_.done = race_rounds;
    progress_.heuristic_ms = median_ms(candidates.front());
    progress_.best_ms = std::numeric_limits<double>::infinity();
    progress_.candidates = 0;
    for (const TuneCandidate& c : candidates) {
      if (c.verdict != Verdict::measured) continue;
      ++progress_.candidates;
      progress_.done = std::min(progress_.done, static_cast<int>(c.samples_ms.size()));
      if (const double ms = median_ms(c); ms < progress_.best_ms) {
        progress_.best_ms = ms;
        progress_.best = c.config;
      }
    }
  }

  const TrialFactory& make_trial_;
  const AttentionSpec spec_;
  const TuneOptions& options_;
  Engine engine_;
  const OpenedCache cache_;
  const TuneStore store_;
  const TuneEnvironment environment_;
  Budget budget_;
  TuneProgress progress_;
};

}  // namespace

std::vector<TuneResult> tune_with(const TrialFactory& make_trial, const AttentionSpec& spec,
                                  const std::vector<Shape>& shapes, const TuneOptions& options,
                                  const TuneCallback& progress) {
  const DefaultFloatState state;
  if (!(options.budget_seconds >= 0) || options.jobs < 0)
    throw Error(ErrorCode::invalid_argument, "a budget of " + std::to_string(options.budget_seconds) +
                                                 " seconds and " + std::to_string(options.jobs) +
                                                 " jobs: neither may be negative, 0 is no limit");
  Tuner tuner(make_trial, spec.validated(), options, progress);
  std::vector<TuneResult> results;
  for (std::size_t i = 0; i < shapes.size() && !tuner.cancelled(); ++i) {
    results.push_back(tuner.tune(shapes[i], i, shapes.size()));
  }
  return results;
}

std::vector<TuneResult> tune(const AttentionSpec& spec, const std::vector<Shape>& shapes,
                             const TuneOptions& options, const TuneCallback& progress) {
  return tune_with(
      [](Engine& engine, const AttentionSpec& valid, const Shape& shape) -> std::unique_ptr<Trial> {
        return std::make_unique<DeviceTrial>(engine, valid, shape);
      },
      spec, shapes, options, progress);
}

}  // namespace flashjit
