#include "cache/remote_cache.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "cache/file.hpp"
#include "cache/folder.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::size_t most_misses = 65536;
constexpr const char* counts_file = "remote";
constexpr int most_lost_answers = 3;
constexpr milliseconds lost_answer_pause{500}, longest_sleep{50};

std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number)
    number = static_cast<std::uint64_t>(steady_clock::now().time_since_epoch().count());
  return number;
}

// In [0, 1).
double random_share() {
  return static_cast<double>(random_number() >> 11) / 9007199254740992.0;
}

std::string lease_name(const std::string& name) {
  return "lease/" + name;
}

bool read_counts(int file, RemoteCounts& counts) {
  char text[128] = "";
  const ssize_t size = ::pread(file, text, sizeof text - 1, 0);
  std::istringstream numbers(std::string(text, size > 0 ? static_cast<std::size_t>(size) : 0));
  RemoteCounts found;
  if (!(numbers >> found.hits >> found.misses >> found.stored >> found.refused >> found.failed)) return false;
  counts = found;
  return true;
}

}  // namespace

RemoteCounts remote_counts(const std::string& folder) {
  RemoteCounts counts;
  const File file(
      ::open((folder + "/" + counts_file).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file) read_counts(file.get(), counts);
  return counts;
}

struct RemoteCache::Server {
  RemoteAddress address;
  std::unique_ptr<RemoteStore> store;  // opened at the first question
  steady_clock::time_point rests_until{};
  int failures = 0;
  std::string why;  // of the last failure
};

// State that a forked child makes anew. Changes under `mutex`, except for the counts.
struct RemoteCache::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Server> servers;
  std::unordered_map<std::string, steady_clock::time_point> misses;  // until when
  struct Item {
    std::string name, bytes;
    bool sign = false;
    std::string token;  // of a lease to give back, in place of something to store
  };
  std::deque<Item> queue;
  std::uint64_t queued = 0;  // octets
  bool busy = false, ends = false;
  std::thread writer;
  std::atomic<std::uint64_t> hits{0}, misses_seen{0}, stored{0}, refused{0}, failed{0};
};

RemoteCache::RemoteCache(Options options)
    : options_(std::move(options)), state_([this] {
        auto state = std::make_unique<State>();
        for (const RemoteAddress& address : options_.stores) {
          state->servers.emplace_back();
          state->servers.back().address = address;
        }
        return state;
      }) {}

RemoteCache::~RemoteCache() {
  if (!state_.is_ours()) return;
  State& state = state_.get();
  flush(options_.limits.flush);
  {
    const std::lock_guard lock(state.mutex);
    state.ends = true;
    state.changed.notify_all();
  }
  if (state.writer.joinable()) state.writer.join();
  save_counts(state);
}

bool RemoteCache::may_store(const std::string& name) const {
  if (!options_.signer) return false;
  const Server* const server = server_for(name, {});
  return server && !server->address.read_only && !(server->store && server->store->makes());
}

// Rendezvous hashing: of the stores that answer, the one whose digest with the name is greatest. If one is
// lost, only its names move.
std::vector<RemoteCache::Server*> RemoteCache::servers_for(const std::string& name, const Note& note) const {
  State& state = state_.get();
  const std::lock_guard lock(state.mutex);
  std::vector<std::pair<std::string, Server*>> ranked;
  const auto now = steady_clock::now();
  for (Server& server : state.servers) {
    if (now < server.rests_until) {
      if (note) note("remote store " + server.address.url + " is not asked for a while: " + server.why);
      continue;
    }
    ranked.emplace_back(digest(server.address.url + "\n" + name), &server);
  }
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Server*> servers;
  for (const auto& [rank, server] : ranked) servers.push_back(server);
  return servers;
}

RemoteCache::Server* RemoteCache::server_for(const std::string& name, const Note& note) const {
  const std::vector<Server*> servers = servers_for(name, note);
  return servers.empty() ? nullptr : servers.front();
}

Answer RemoteCache::ask(const std::string& name, const Note& note,
                        const std::function<Answer(RemoteStore& store, std::string& why)>& question) const {
  return ask(server_for(name, note), note, question);
}

Answer RemoteCache::ask(Server* server, const Note& note,
                        const std::function<Answer(RemoteStore& store, std::string& why)>& question) const {
  if (!server) return Answer::failed;
  State& state = state_.get();
  std::string why;
  Answer answer = Answer::failed;
  try {
    RemoteStore* store = nullptr;
    {
      const std::lock_guard lock(state.mutex);
      if (!server->store) server->store = options_.open(server->address);
      store = server->store.get();
    }
    answer = question(*store, why);
  } catch (const Error& error) {
    why = error.message();
  }
  const std::lock_guard lock(state.mutex);
  if (answer != Answer::failed) {
    server->failures = 0;
    server->rests_until = {};
    return answer;
  }
  ++state.failed;
  const auto rest = std::min(options_.limits.first_rest * (1 << std::min(server->failures, 16)),
                             options_.limits.longest_rest);
  ++server->failures;
  server->rests_until =
      steady_clock::now() +
      milliseconds(static_cast<std::int64_t>(static_cast<double>(rest.count()) * (0.5 + random_share())));
  server->why = why;
  if (note) note("remote store " + server->address.url + ": " + why);
  return answer;
}

RemoteCache::Got RemoteCache::get(const std::string& name, const Note& note, bool again) {
  State& state = state_.get();
  if (!again) {
    const std::lock_guard lock(state.mutex);
    const auto missed = state.misses.find(name);
    if (missed != state.misses.end() && steady_clock::now() < missed->second) return {Answer::no};
  }
  Got got;
  got.answer =
      ask(name, note, [&](RemoteStore& store, std::string& why) { return store.get(name, got.bytes, why); });
  if (got.answer == Answer::failed) return got;
  if (got.answer == Answer::yes) {
    const std::string reason = options_.verifier(name, got.bytes);
    if (reason.empty()) {
      ++state.hits;
      return got;
    }
    ++state.refused;
    if (note) note("what a remote store has as " + name + " is " + reason);
    got = {Answer::no};
  }
  ++state.misses_seen;
  const std::lock_guard lock(state.mutex);
  if (state.misses.size() >= most_misses) state.misses.clear();
  state.misses[name] = steady_clock::now() + options_.limits.miss;
  return got;
}

RemoteCache::Got RemoteCache::get_request(const std::string& pointer,
                                          const std::function<std::string(const std::string&)>& name_of,
                                          const Note& note) {
  State& state = state_.get();
  {
    const std::lock_guard lock(state.mutex);
    const auto missed = state.misses.find(pointer);
    if (missed != state.misses.end() && steady_clock::now() < missed->second) return {Answer::no};
  }
  std::string entry;
  const Answer answer = ask(
      pointer, note, [&](RemoteStore& store, std::string& why) { return store.get(pointer, entry, why); });
  if (answer == Answer::yes && is_hex(entry, digest_size)) return get(name_of(entry), note);
  if (answer == Answer::yes && note) note("what a remote store has as " + pointer + " is no digest");
  if (answer == Answer::failed) return {};
  ++state.misses_seen;
  const std::lock_guard lock(state.mutex);
  state.misses[pointer] = steady_clock::now() + options_.limits.miss;
  return {Answer::no};
}

namespace {

// The message of an error that a store gives as JSON, or else its text.
std::string message_of(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  const bool is_error = json.is_object() && json.contains("error") && json["error"].is_object();
  const auto message = is_error ? json["error"].find("message") : json.end();
  return is_error && message != json["error"].end() && message->is_string() ? message->get<std::string>()
                                                                            : text.substr(0, 200);
}

}  // namespace

RemoteCache::Made RemoteCache::make(const std::string& pointer, const std::string& request,
                                    const std::function<std::string(const std::string&)>& name_of,
                                    bool patient, const Note& note, const std::function<bool()>& goes_on) {
  Made result;
  State& state = state_.get();
  const auto tell = [&](const Server& server, const std::string& what) {
    if (note) note("remote store " + server.address.url + " " + what);
  };
  const auto deadline = steady_clock::now() + options_.limits.fetch.patience;
  for (Server* const server : servers_for(pointer, {})) {
    // One that never was asked for anything has not said whether it compiles.
    if (!server->store)
      ask(server, note, [&](RemoteStore& store, std::string& why) { return store.exists(pointer, why); });
    if (!server->store || !server->store->makes()) continue;
    result.asked = true;
    int failures = 0;
    for (bool is_known = false;;) {
      Making making = Making::failed;
      std::string bytes, text;
      milliseconds pause{0};
      ask(server, note, [&](RemoteStore& store, std::string& why) {
        making = store.make(request, bytes, pause, why);
        text = why;
        return making == Making::failed ? Answer::failed : Answer::yes;
      });
      if (making == Making::made) {
        const std::string name = name_of(bytes);
        const std::string reason = name.empty() ? "no entry" : options_.verifier(name, bytes);
        if (reason.empty()) {
          ++state.hits;
          const std::lock_guard lock(state.mutex);
          state.misses.erase(pointer);
          result.got = {Answer::yes, std::move(bytes)};
          return result;
        }
        ++state.refused;
        tell(*server, "made what is " + reason);
        break;
      }
      if (making == Making::refused) {
        tell(*server, "does not make the kernel: " + message_of(text));
        break;
      }
      // An answer that is late once is no reason to give up what it makes.
      if (making == Making::failed && (!is_known || ++failures > most_lost_answers)) break;
      if (making == Making::busy && !patient) {
        tell(*server, "is busy");
        break;
      }
      is_known = true;
      if (making == Making::failed) pause = lost_answer_pause;
      if (steady_clock::now() + pause >= deadline) {
        tell(*server, "has not made the kernel within " +
                          std::to_string(options_.limits.fetch.patience.count()) + " ms");
        break;
      }
      for (const auto end = steady_clock::now() + pause; steady_clock::now() < end;)
        if (goes_on && !goes_on())
          return result;
        else
          std::this_thread::sleep_for(std::min(pause, longest_sleep));
      if (goes_on && !goes_on()) return result;
    }
  }
  return result;
}

RemoteCache::Fetched RemoteCache::fetch(const std::string& name, const FetchLimits& limits, const Note& note,
                                        const std::function<bool()>& goes_on,
                                        const std::function<bool(const Got&)>& accepts,
                                        const std::function<Made()>& make) {
  FetchPlan plan(limits, may_store(name));
  Fetched fetched;
  const std::string token = std::to_string(random_number());
  bool was_made = false;
  for (;;) switch (plan.step()) {
      case FetchPlan::Step::get:
        fetched.got = get(name, note, true);
        if (fetched.got.answer == Answer::yes && accepts && !accepts(fetched.got)) fetched.got = {Answer::no};
        if (fetched.got.answer == Answer::failed)
          plan.give_up();
        else
          plan.answer(fetched.got.answer == Answer::yes);
        if (make && fetched.got.answer == Answer::no && !std::exchange(was_made, true)) {
          Made made = make();
          fetched.got = std::move(made.got);
          if (made.asked) return fetched;
        }
        break;
      case FetchPlan::Step::lease: {
        const bool takes = may_store(name);
        const Answer answer = ask(name, note, [&](RemoteStore& store, std::string& why) {
          return takes ? store.lease(lease_name(name), token, limits.lease, why)
                       : store.exists(lease_name(name), why);
        });
        if (answer == Answer::failed)
          plan.give_up();
        else
          plan.answer((answer == Answer::yes) == takes);
        if (plan.leased() && answer == Answer::yes) {
          fetched.lease.cache_ = this;
          fetched.lease.name_ = name;
          fetched.lease.token_ = token;
        }
        break;
      }
      case FetchPlan::Step::wait: {
        if (goes_on && !goes_on()) return fetched;
        const milliseconds pause = plan.pause(random_share());
        std::this_thread::sleep_for(pause);
        plan.waited(pause);
        if (plan.step() == FetchPlan::Step::make && note)
          note("another host has the lease of " + name + " for more than " +
               std::to_string(limits.patience.count()) + " ms");
        break;
      }
      case FetchPlan::Step::use:
        fetched.lease = {};
        return fetched;
      case FetchPlan::Step::make:
        return fetched;
    }
}

RemoteCache::Lease::~Lease() {
  if (cache_) cache_->enqueue(name_, {}, false, token_);
}

RemoteCache::Lease RemoteCache::lease_now(const std::string& name, milliseconds time) {
  Lease lease;
  lease.token_ = std::to_string(random_number());
  lease.name_ = name;
  if (ask(name, {}, [&](RemoteStore& store, std::string& why) {
        return store.lease(lease_name(name), lease.token_, time, why);
      }) == Answer::yes)
    lease.cache_ = this;
  return lease;
}

void RemoteCache::put(const std::string& name, std::string bytes) {
  if (may_store(name)) enqueue(name, std::move(bytes), true, {});
}

void RemoteCache::put_pointer(const std::string& name, std::string text) {
  if (may_store(name)) enqueue(name, std::move(text), false, {});
}

Answer RemoteCache::put_now(const std::string& name, std::string bytes, std::string& why) {
  const Note note = [&](const std::string& text) { why += (why.empty() ? "" : "; ") + text; };
  State& state = state_.get();
  const bool is_signed = !split_signature(bytes).line.empty();
  const Answer answer = ask(
      name, note, [&](RemoteStore& store, std::string& reason) { return store.put(name, bytes, reason); });
  if (answer == Answer::yes && is_signed) ++state.stored;
  const std::lock_guard lock(state.mutex);
  state.misses.erase(name);
  return answer;
}

Answer RemoteCache::exists(const std::string& name, std::string& why) {
  return ask(
      name, [&](const std::string& text) { why += (why.empty() ? "" : "; ") + text; },
      [&](RemoteStore& store, std::string& reason) { return store.exists(name, reason); });
}

void RemoteCache::enqueue(std::string name, std::string bytes, bool sign, std::string token) {
  State& state = state_.get();
  const std::lock_guard lock(state.mutex);
  if (state.queued + bytes.size() > options_.limits.queued) {
    ++state.failed;
    return;
  }
  if (!state.writer.joinable()) {
    // The host's signals stay its own.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      state.writer = std::thread([this, &state] { work(state); });
    } catch (const std::system_error&) {  // without a thread nothing is stored
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!state.writer.joinable()) {
      ++state.failed;
      return;
    }
  }
  state.queued += bytes.size();
  state.queue.push_back({std::move(name), std::move(bytes), sign, std::move(token)});
  state.changed.notify_all();
}

void RemoteCache::work(State& state) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return state.ends || !state.queue.empty(); });
    if (state.ends) return;
    State::Item item = std::move(state.queue.front());
    state.queue.pop_front();
    state.queued -= item.bytes.size();
    state.busy = true;
    lock.unlock();
    if (!item.token.empty()) {
      ask(item.name, {}, [&](RemoteStore& store, std::string& why) {
        return store.lease(lease_name(item.name), item.token, milliseconds(0), why);
      });
    } else {
      std::string why;
      const bool sign = item.sign && split_signature(item.bytes).line.empty();
      if (!sign || fit_for_signed(item.name, item.bytes, options_.verifier, options_.signer, &why))
        put_now(item.name, std::move(item.bytes), why);
      else
        ++state.refused;
    }
    lock.lock();
    state.busy = false;
    if (state.queue.empty()) state.changed.notify_all();
  }
}

bool RemoteCache::flush(milliseconds limit) {
  State& state = state_.get();
  std::unique_lock lock(state.mutex);
  return state.changed.wait_for(lock, limit, [&] { return state.queue.empty() && !state.busy; });
}

void RemoteCache::save_counts(State& state) {
  const RemoteCounts here{state.hits.exchange(0), state.misses_seen.exchange(0), state.stored.exchange(0),
                          state.refused.exchange(0), state.failed.exchange(0)};
  if (options_.folder.empty() || here.hits + here.misses + here.stored + here.refused + here.failed == 0)
    return;
  const File folder = open_cache_folder(options_.folder, true, nullptr);
  const File file(folder ? ::openat(folder.get(), counts_file,
                                    O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600)
                         : -1);
  if (!file || ::flock(file.get(), LOCK_EX) != 0) return;
  RemoteCounts counts;
  read_counts(file.get(), counts);
  std::ostringstream text;
  text << counts.hits + here.hits << ' ' << counts.misses + here.misses << ' ' << counts.stored + here.stored
       << ' ' << counts.refused + here.refused << ' ' << counts.failed + here.failed << '\n';
  const std::string line = text.str();
  if (::pwrite(file.get(), line.data(), line.size(), 0) == static_cast<ssize_t>(line.size()))
    (void)!::ftruncate(file.get(), static_cast<off_t>(line.size()));
}

}  // namespace flashjit
