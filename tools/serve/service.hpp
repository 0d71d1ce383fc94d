// The compile service: signed entries by name as any HTTP store gives them, and by POST what is not there.
//
//   GET, HEAD /v3/REQUEST-ENTRY.kernel, /v3/REQUEST, /tune/...   as cache/remote.md says
//   POST /compile?wait_ms=N         200 and the entry; 202 while it is made: ask again; 429, 503 with
//                                   Retry-After; an error otherwise
//   GET /healthz, /metrics, /       for machines and people
//
// A GET of what is not there says by Accept-Post that a POST would make it. Errors are JSON as the command's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tools/serve/clients.hpp"
#include "tools/serve/history.hpp"
#include "tools/serve/http_server.hpp"
#include "tools/serve/job_queue.hpp"
#include "tools/serve/maker.hpp"
#include "tools/serve/object_cache.hpp"

namespace flashjit::serve {

struct ServiceOptions {
  OpenedCache cache;  // with a folder and a signer, unless it is read-only
  Clients clients{};
  ChildLimits child{};
  QueueLimits queue{};
  HttpLimits http{};
  bool read_only = false;                         // compiles nothing
  std::chrono::milliseconds stop{10'000};         // for compiles that run when the service is to stop
  std::chrono::milliseconds grace{3'000};         // a compile that nobody has asked for so long is ended
  std::chrono::milliseconds failures{60'000};     // how long a failed compile is not tried again
  std::size_t memory = std::size_t{16} << 20;     // octets of objects in memory
  std::function<void(const std::string&)> log{};  // gets lines of JSON
};

class Service {
 public:
  explicit Service(ServiceOptions options);
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;
  ~Service();

  // Serves at sockets that listen, until SIGTERM or SIGINT.
  void run(const std::vector<int>& sockets);

 private:
  struct Job;
  struct Workers;
  using Json = std::map<std::string, std::string>;

  void handle(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange);
  HttpAnswer object(std::string_view path, bool& hit);
  void compile(const HttpRequest& request, std::string_view query, const std::string& client,
               const std::shared_ptr<Exchange>& exchange);
  void remember(std::string body, const std::string& id);
  void wait(const std::shared_ptr<Job>& job, std::chrono::milliseconds time,
            const std::shared_ptr<Exchange>& exchange);
  void start_jobs();
  void end_job(const std::shared_ptr<Job>& job, const Made* made, const Error* error);
  void end_unwanted();
  void stop();
  void stop_when_idle();
  Gauges gauges() const;
  HttpAnswer failure(const Error& error) const;
  HttpAnswer busy(int status, const std::string& why) const;
  void refuse(std::string_view method, const std::shared_ptr<Exchange>& exchange, const std::string& client,
              HttpAnswer answer, const std::string& why);
  void log(const char* event, const Json& fields) const;

  ServiceOptions options_;
  History history_;
  ObjectCache objects_;
  std::unique_ptr<Maker> maker_;  // null if the service is read-only
  JobQueue queue_;
  HttpServer server_;
  std::map<std::string, std::shared_ptr<Job>> jobs_;  // by the digest of the request
  struct Failure {
    Error error;
    std::chrono::steady_clock::time_point until;
  };
  std::map<std::string, Failure> failures_;
  std::unordered_map<std::string, std::string> ids_;  // digests of requests that were read, by their texts
  std::size_t ids_bytes_ = 0;
  bool stopping_ = false;
  std::chrono::steady_clock::time_point stop_by_{};
  std::unique_ptr<Workers> workers_;
};

}  // namespace flashjit::serve
