// The history of the service: counts for machines, the last events for people, lines for a log.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace flashjit::serve {

struct CompileEvent {
  std::string time;  // UTC
  std::string client, target, spec, name;
  double seconds = 0;  // of the compile; its wait in the queue is not in it
  std::string result;  // "compiled", "found", "fetched", or an error's code
  std::string message, log;
};

struct RefusedEvent {
  std::string time, client;
  int status = 0;
  std::string why;
};

// The state at the moment.
struct Gauges {
  std::size_t queued = 0, running = 0, connections = 0, pending = 0, objects = 0, object_bytes = 0;
  std::uint64_t malformed = 0, memory = 0, nursery_memory = 0;
  unsigned nurseries = 0;
  bool stopping = false;
  std::vector<std::pair<std::string, std::string>> jobs;  // spec and state of those queued and running
};

class History {
 public:
  void note_request(std::string_view method, int status) { ++requests_[{std::string(method), status}]; }
  void note_hit() { ++hits_; }
  void note_compile(CompileEvent event);
  void note_refused(RefusedEvent event);
  // The usual time of a compile.
  double mean_seconds() const;

  // Text of Prometheus' exposition format.
  std::string metrics(const Gauges& now) const;
  // A page of HTML.
  std::string page(const Gauges& now, const std::string& what) const;

 private:
  struct Times {
    std::uint64_t count = 0;
    double seconds = 0, longest = 0;
  };
  std::map<std::pair<std::string, int>, std::uint64_t> requests_;
  std::map<std::pair<std::string, std::string>, std::uint64_t> results_;  // by target and result
  std::map<std::string, Times> times_;                                    // by target
  std::uint64_t hits_ = 0;
  std::deque<CompileEvent> compiles_;
  std::deque<RefusedEvent> refused_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace flashjit::serve
