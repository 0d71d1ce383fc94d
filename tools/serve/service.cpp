#include "tools/serve/service.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <list>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "codegen/base/digest.hpp"
#include "codegen/base/float_state.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit::serve {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds longest_wait{60'000}, tick{200}, stop_tick{20}, last_answers{2'000};
constexpr std::size_t most_ids_bytes = 1 << 20, most_failures = 1000;

Bytes text(std::string content) {
  return std::make_shared<const std::string>(std::move(content));
}

int status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return 400;
    case ErrorCode::not_prebuilt:
      return 409;
    case ErrorCode::invalid_spec:
    case ErrorCode::unsupported:
    case ErrorCode::compile_failed:
    case ErrorCode::limit_exceeded:
      return 422;
    case ErrorCode::compiler_unavailable:
      return 501;
    case ErrorCode::cancelled:
      return 503;
    default:
      return 500;
  }
}

HttpAnswer error_answer(int status, const char* code, const std::string& message,
                        const std::string& detail = {}) {
  nlohmann::ordered_json error = {{"code", code}, {"message", message}};
  if (!detail.empty()) error["detail"] = detail;
  HttpAnswer answer;
  answer.status = status;
  answer.body = text(nlohmann::ordered_json{{"error", error}}.dump(
                         2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                     "\n");
  return answer;
}

HttpAnswer page(std::string_view type, std::string content, int status = 200) {
  return {status, type, {{"Cache-Control", "no-store"}}, text(std::move(content))};
}

milliseconds wait_of(std::string_view query) {
  constexpr std::string_view name = "wait_ms=";
  int value = 0;
  if (query.starts_with(name))
    std::from_chars(query.data() + name.size(), query.data() + query.size(), value);
  return std::clamp(milliseconds(value), milliseconds(0), longest_wait);
}

std::uint64_t resident_bytes() {
  std::uint64_t pages = 0, resident = 0;
  if (std::FILE* const file = std::fopen("/proc/self/statm", "re")) {
    if (std::fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

// A request that is being made, or waits for that.
struct Service::Job {
  std::string id, body, client, spec;
  std::shared_ptr<const CompileRequest> request;
  std::atomic<bool> cancelled{false};
  bool runs = false;
  std::list<std::shared_ptr<Exchange>> waiting;
  steady_clock::time_point wanted{};  // when somebody last asked
};

// Threads that make.
struct Service::Workers {
  explicit Workers(std::size_t count) {
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    for (std::size_t i = 0; i < count; ++i) threads.emplace_back([this] { work(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Workers() {
    {
      const std::lock_guard lock(mutex);
      ends = true;
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
  void add(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex);
      tasks.push_back(std::move(task));
    }
    changed.notify_one();
  }
  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return ends || !tasks.empty(); });
      if (tasks.empty()) return;
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool ends = false;
  std::vector<std::thread> threads;
};

Service::Service(ServiceOptions options)
    : options_(std::move(options)),
      objects_(options_.cache.disk->folder(), options_.cache.verifier, options_.cache.signer,
               options_.memory),
      maker_(options_.read_only ? nullptr : std::make_unique<Maker>(options_.cache, options_.child)),
      queue_(options_.queue),
      server_(options_.http, [this](const HttpRequest& request, const std::shared_ptr<Exchange>& exchange) {
        try {
          handle(request, exchange);
        } catch (const std::exception& error) {  // no memory
          exchange->answer(error_answer(500, "internal", error.what()));
        }
      }) {}

Service::~Service() = default;

void Service::log(const char* event, const Json& fields) const {
  if (!options_.log) return;
  nlohmann::ordered_json line = {{"time", signing_time()}, {"event", event}};
  for (const auto& [name, value] : fields) line[name] = value;
  options_.log(line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void Service::run(const std::vector<int>& sockets) {
  if (maker_) workers_ = std::make_unique<Workers>(options_.queue.running);
  std::string places;
  for (const int socket : sockets) {
    places += (places.empty() ? "" : " ") + place_of(socket);
    server_.add_listener(socket);
  }
  log("start", {{"version", version()},
                {"listen", places},
                {"folder", options_.cache.disk->folder()},
                {"mode", maker_ ? "compiles" : "read only"}});
  server_.on_signal([this](int) { stopping_ ? server_.stop() : stop(); });
  end_unwanted();
  server_.run();
  for (const auto& [id, job] : jobs_) job->cancelled = true;
  workers_.reset();
  log("stop", {});
}

// ---- requests ----

void Service::handle(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange) {
  const std::size_t mark = std::min(request.path.find('?'), request.path.size());
  const std::string_view path = request.path.substr(0, mark);
  const std::string_view query = request.path.substr(std::min(mark + 1, request.path.size()));
  const bool reads = request.method == "GET" || request.method == "HEAD";
  const auto answer = [&](HttpAnswer content) {
    history_.note_request(request.method, content.status);
    exchange->answer(std::move(content));
  };
  if (reads && path == "/healthz")
    return answer(page("text/plain", stopping_ ? "stopping\n" : "ok\n", stopping_ ? 503 : 200));
  const std::optional<std::string> client = options_.clients.name(request.authorization, request.address);
  if (!client) {
    HttpAnswer content = error_answer(401, "unauthorized", "a token that this service knows is needed");
    content.headers.emplace_back("WWW-Authenticate", "Bearer, Basic realm=\"flashjit\"");
    return refuse(request.method, exchange, request.address, std::move(content), "no token that is known");
  }
  if (reads) {
    if (path == "/metrics") return answer(page("text/plain; version=0.0.4", history_.metrics(gauges())));
    if (path == "/")
      return answer(
          page("text/html; charset=utf-8",
               history_.page(gauges(), std::string("Version ") + version() + ", folder " +
                                           options_.cache.disk->folder() + (maker_ ? "." : ", read only."))));
    bool hit = false;
    HttpAnswer content = object(path, hit);
    if (hit) history_.note_hit();
    return answer(std::move(content));
  }
  if (request.method == "POST" && path == "/compile") return compile(request, query, *client, exchange);
  HttpAnswer content = error_answer(request.method == "POST" ? 404 : 405, "invalid_argument",
                                    "this service answers GET and HEAD of objects, and POST of /compile");
  if (content.status == 405) content.headers.emplace_back("Allow", "GET, HEAD, POST");
  answer(std::move(content));
}

HttpAnswer Service::object(std::string_view path, bool& hit) {
  const std::string name(path.substr(std::min<std::size_t>(1, path.size())));
  const std::size_t slash = name.find('/');
  HttpAnswer answer{200, "application/octet-stream"};
  if (slash != std::string::npos && name.size() == slash + 1 + digest_size) {
    const std::string request = name.substr(slash + 1);
    if (std::string entry = is_hex(request, digest_size) ? objects_.newest(request) : ""; !entry.empty())
      if (DiskCache::name(request, entry).starts_with(name.substr(0, slash + 1)))
        answer.body = text(std::move(entry));
  } else {
    answer.body = objects_.get(name);
  }
  hit = answer.body != nullptr;
  if (hit) return answer;
  answer = error_answer(404, "not_prebuilt", "there is no such object");
  if (maker_ && !stopping_) answer.headers.emplace_back("Accept-Post", "application/json");
  return answer;
}

// A hit needs no more of a request. A whole one takes some ten times the memory.
void Service::remember(std::string body, const std::string& id) {
  const std::size_t bytes = body.size() + id.size();
  if (ids_bytes_ + bytes > most_ids_bytes) {
    ids_.clear();
    ids_bytes_ = 0;
  }
  ids_bytes_ += bytes;
  ids_[std::move(body)] = id;
}

void Service::compile(const HttpRequest& request, std::string_view query, const std::string& client,
                      const std::shared_ptr<Exchange>& exchange) {
  const auto refuse_for = [&](HttpAnswer answer, const std::string& why) {
    refuse(request.method, exchange, client, std::move(answer), why);
  };
  if (stopping_) return refuse_for(busy(503, "this service is stopping"), "stopping");
  const auto no_room = [&](JobQueue::Added added) {
    const bool full = added == JobQueue::Added::full;
    refuse_for(busy(full ? 503 : 429, full ? "too many compiles wait here"
                                           : "too many compiles of client " + client + " wait here"),
               full ? "the queue is full" : "the client's queue is full");
  };
  std::shared_ptr<const CompileRequest> asked;
  // Reading a spec costs more than any answer from memory, so the client must have room for the compile.
  const auto read = [&] {
    const JobQueue::Added room = queue_.room_for(client);
    if (room != JobQueue::Added::yes) {
      no_room(room);
      return false;
    }
    try {
      asked = std::make_shared<const CompileRequest>(parse_compile_request(request.body));
    } catch (const Error& error) {
      refuse_for(failure(error), error.message());
      return false;
    }
    return true;
  };
  std::string body(request.body), id;
  if (const auto known = ids_.find(body); known != ids_.end()) {
    id = known->second;
  } else {
    if (!read()) return;
    id = asked->key.digest();
    remember(std::move(body), id);
  }
  if (const std::string entry = objects_.newest(id); !entry.empty())
    if (Bytes bytes = objects_.get(DiskCache::name(id, entry))) {
      history_.note_hit();
      history_.note_request("POST", 200);
      return exchange->answer({200, "application/octet-stream", {}, std::move(bytes)});
    }
  if (!maker_)
    return refuse_for(
        error_answer(403, "not_prebuilt", "this service compiles nothing, and does not have the kernel"),
        "read only");
  if (const auto failed = failures_.find(id); failed != failures_.end()) {
    if (steady_clock::now() < failed->second.until)
      return refuse_for(failure(failed->second.error), failed->second.error.message());
    failures_.erase(failed);
  }
  if (!asked && !jobs_.contains(id) && !read()) return;
  if (const JobQueue::Added added = queue_.add(id, client); added != JobQueue::Added::yes)
    return no_room(added);
  std::shared_ptr<Job>& job = jobs_[id];
  if (!job) {
    job = std::make_shared<Job>();
    job->id = id;
    job->body = request.body;
    job->client = client;
    job->spec = asked->spec.to_json();
    job->request = std::move(asked);
  }
  wait(job, wait_of(query), exchange);
  start_jobs();
}

void Service::wait(const std::shared_ptr<Job>& job, milliseconds time,
                   const std::shared_ptr<Exchange>& exchange) {
  job->wanted = steady_clock::now();
  job->waiting.push_back(exchange);
  // Holds neither for longer than they live.
  const std::weak_ptr<Job> of = job;
  const std::weak_ptr<Exchange> who = exchange;
  const auto leave = [of, who] {
    const auto kept = of.lock();
    const auto waits = who.lock();
    if (!kept || !waits ||
        std::find(kept->waiting.begin(), kept->waiting.end(), waits) == kept->waiting.end())
      return std::shared_ptr<Exchange>();
    kept->waiting.remove(waits);
    kept->wanted = steady_clock::now();
    return waits;
  };
  exchange->on_gone = [leave] { leave(); };
  server_.after(time, [this, leave, of] {
    if (const auto waits = leave()) {
      history_.note_request("POST", 202);
      HttpAnswer answer;
      answer.status = 202;
      answer.body = text(of.lock()->runs ? "{\"state\": \"compiling\"}\n" : "{\"state\": \"queued\"}\n");
      waits->answer(std::move(answer));
    }
  });
}

// ---- jobs ----

void Service::start_jobs() {
  while (!stopping_) {
    const std::optional<std::string> id = queue_.start();
    if (!id) return;
    const std::shared_ptr<Job> job = jobs_.at(*id);
    job->runs = true;
    workers_->add([this, job] {
      std::shared_ptr<const Made> made;
      std::shared_ptr<const Error> error;
      try {
        made = std::make_shared<const Made>(maker_->make(*job->request, job->body, job->cancelled));
      } catch (const Error& failed) {
        error = std::make_shared<const Error>(failed);
      } catch (const std::exception& failed) {
        error = std::make_shared<const Error>(ErrorCode::internal, failed.what());
      }
      server_.call([this, job, made, error] { end_job(job, made.get(), error.get()); });
    });
  }
}

void Service::end_job(const std::shared_ptr<Job>& job, const Made* made, const Error* error) {
  queue_.remove(job->id);
  jobs_.erase(job->id);
  HttpAnswer answer{200, "application/octet-stream"};
  CompileEvent event{
      signing_time(), job->client, job->request->source.target.str(), job->spec, "", 0, "", "", ""};
  if (made) {
    objects_.add(made->name, made->bytes);
    answer.body = objects_.get(made->name);
    if (!answer.body) answer.body = text(made->bytes);
    event.name = made->name;
    event.seconds = made->seconds;
    event.result = made->how;
    event.message = made->note;
    event.log = made->log;
  } else {
    answer = error->code() == ErrorCode::cancelled ? busy(503, error->message()) : failure(*error);
    event.result = to_string(error->code());
    event.message = error->message();
    event.log = error->detail();
    if (error->code() == ErrorCode::compile_failed || error->code() == ErrorCode::limit_exceeded) {
      if (failures_.size() >= most_failures) failures_.clear();
      failures_.insert_or_assign(job->id, Failure{*error, steady_clock::now() + options_.failures});
    }
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3f", event.seconds);
  log("compile", {{"client", event.client},
                  {"target", event.target},
                  {"spec", event.spec},
                  {"name", event.name},
                  {"seconds", seconds},
                  {"result", event.result},
                  {"message", event.message}});
  history_.note_compile(std::move(event));
  for (const auto& exchange : std::exchange(job->waiting, {})) {
    history_.note_request("POST", answer.status);
    exchange->answer(answer);
  }
  start_jobs();
}

void Service::end_unwanted() {
  const auto now = steady_clock::now();
  std::vector<std::shared_ptr<Job>> unwanted;
  for (const auto& [id, job] : jobs_)
    if (job->waiting.empty() && now - job->wanted > options_.grace) unwanted.push_back(job);
  for (const auto& job : unwanted) {
    job->cancelled = true;
    if (job->runs) continue;
    const Error error(ErrorCode::cancelled, "nobody waits for it any more");
    end_job(job, nullptr, &error);
  }
  server_.after(tick, [this] { end_unwanted(); });
}

// ---- the end ----

void Service::stop() {
  stopping_ = true;
  stop_by_ = steady_clock::now() + options_.stop;
  server_.drain();
  std::vector<std::shared_ptr<Job>> queued;
  for (const auto& [id, job] : jobs_)
    if (!job->runs) queued.push_back(job);
  const Error error(ErrorCode::cancelled, "this service is stopping");
  for (const auto& job : queued) end_job(job, nullptr, &error);
  stop_when_idle();
}

void Service::stop_when_idle() {
  const auto now = steady_clock::now();
  if (jobs_.empty() && (server_.connections() == 0 || now > stop_by_ + last_answers)) return server_.stop();
  if (now > stop_by_)
    for (const auto& [id, job] : jobs_) job->cancelled = true;
  server_.after(stop_tick, [this] { stop_when_idle(); });
}

// ---- answers ----

HttpAnswer Service::failure(const Error& error) const {
  return error_answer(status_of(error.code()), to_string(error.code()), error.message(), error.detail());
}

HttpAnswer Service::busy(int status, const std::string& why) const {
  const double jobs = static_cast<double>(queue_.queued() + queue_.running() + 1);
  const double seconds = history_.mean_seconds() * jobs / static_cast<double>(queue_.limits().running);
  HttpAnswer answer = error_answer(status, "limit_exceeded", why);
  answer.headers.emplace_back("Retry-After",
                              std::to_string(std::clamp(static_cast<int>(std::ceil(seconds)), 1, 60)));
  return answer;
}

void Service::refuse(std::string_view method, const std::shared_ptr<Exchange>& exchange,
                     const std::string& client, HttpAnswer answer, const std::string& why) {
  history_.note_request(method, answer.status);
  history_.note_refused({signing_time(), client, answer.status, why});
  log("refuse", {{"client", client}, {"status", std::to_string(answer.status)}, {"why", why}});
  exchange->answer(std::move(answer));
}

Gauges Service::gauges() const {
  Gauges now{queue_.queued(),
             queue_.running(),
             server_.connections(),
             server_.pending(),
             objects_.objects(),
             objects_.bytes(),
             server_.malformed(),
             resident_bytes(),
             maker_ ? maker_->nursery().memory() : 0,
             maker_ ? maker_->nursery().started() : 0,
             stopping_,
             {}};
  for (const auto& [id, job] : jobs_) now.jobs.emplace_back(job->spec, job->runs ? "running" : "queued");
  return now;
}

}  // namespace flashjit::serve
