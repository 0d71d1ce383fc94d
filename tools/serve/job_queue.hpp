// Which compile is next: limits, and turns among clients. Knows no clock, no process and no network.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace flashjit::serve {

struct QueueLimits {
  std::size_t running = 2;             // compiles at once
  std::size_t running_of_client = 2;   // of one client
  std::size_t queued = 1000;           // compiles that wait
  std::size_t queued_of_client = 200;  // of one client
};

// A job is known by its id. Clients that ask for the same job share it: it is run at the first turn that one
// of them has. Clients take turns, however many jobs each of them has.
class JobQueue {
 public:
  explicit JobQueue(const QueueLimits& limits) : limits_(limits) {}

  enum class Added { yes, full, client_full };
  // Adds the client to those who ask for the job, which is queued if it is new.
  Added add(const std::string& id, const std::string& client);
  // Whether a new job of the client would be refused.
  Added room_for(const std::string& client) const;
  // The job to run now, if there is one and limits allow it.
  std::optional<std::string> start();
  // The job has ended, or is not wanted any more.
  void remove(const std::string& id);

  bool has(const std::string& id) const { return jobs_.contains(id); }
  std::size_t queued() const { return jobs_.size() - running_; }
  std::size_t running() const { return running_; }
  // How many wait before the job, if all turns were of its client.
  std::size_t queued_of(const std::string& client) const;
  const QueueLimits& limits() const { return limits_; }

 private:
  struct Client {
    std::deque<std::string> queued;  // also of jobs that another client's turn has started
    std::size_t waiting = 0;         // of these, that are not started
    std::size_t running = 0;
  };
  struct Job {
    std::set<std::string> clients;
    std::string runs_for;  // whose turn started it; empty: none yet
  };
  void forget_if_idle(const std::string& client);

  const QueueLimits limits_;
  std::map<std::string, Job> jobs_;
  std::map<std::string, Client> clients_;
  std::deque<std::string> turns_;  // each client of clients_ once
  std::size_t running_ = 0;
};

}  // namespace flashjit::serve
