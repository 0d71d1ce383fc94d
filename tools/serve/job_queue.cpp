#include "tools/serve/job_queue.hpp"

#include <algorithm>

namespace flashjit::serve {

std::size_t JobQueue::queued_of(const std::string& client) const {
  const auto found = clients_.find(client);
  return found == clients_.end() ? 0 : found->second.waiting;
}

JobQueue::Added JobQueue::room_for(const std::string& client) const {
  if (queued_of(client) >= limits_.queued_of_client) return Added::client_full;
  return queued() >= limits_.queued ? Added::full : Added::yes;
}

JobQueue::Added JobQueue::add(const std::string& id, const std::string& client) {
  const auto known = jobs_.find(id);
  if (known == jobs_.end()) {
    if (const Added room = room_for(client); room != Added::yes) return room;
  } else if (!known->second.runs_for.empty() || known->second.clients.contains(client)) {
    return Added::yes;
  } else if (queued_of(client) >= limits_.queued_of_client) {
    return Added::client_full;
  }
  jobs_[id].clients.insert(client);
  if (!clients_.contains(client)) turns_.push_back(client);
  Client& asks = clients_[client];
  asks.queued.push_back(id);
  ++asks.waiting;
  return Added::yes;
}

std::optional<std::string> JobQueue::start() {
  if (running_ >= limits_.running) return std::nullopt;
  for (std::size_t i = 0; i < turns_.size(); ++i) {
    const std::string name = turns_.front();
    turns_.pop_front();
    turns_.push_back(name);
    Client& client = clients_.at(name);
    const auto is_over = [&](const std::string& id) {
      const auto job = jobs_.find(id);
      return job == jobs_.end() || !job->second.runs_for.empty() || !job->second.clients.contains(name);
    };
    while (!client.queued.empty() && is_over(client.queued.front())) client.queued.pop_front();
    if (client.queued.empty() || client.running >= limits_.running_of_client) continue;
    std::string id = std::move(client.queued.front());
    client.queued.pop_front();
    Job& job = jobs_.at(id);
    job.runs_for = name;
    ++client.running;
    ++running_;
    for (const std::string& other : job.clients) --clients_.at(other).waiting;
    return id;
  }
  return std::nullopt;
}

void JobQueue::remove(const std::string& id) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return;
  const Job job = std::move(found->second);
  jobs_.erase(found);
  if (!job.runs_for.empty()) {
    --clients_.at(job.runs_for).running;
    --running_;
  }
  for (const std::string& client : job.clients) {
    if (job.runs_for.empty()) {
      Client& asks = clients_.at(client);
      --asks.waiting;
      std::erase(asks.queued, id);
    }
    forget_if_idle(client);
  }
}

void JobQueue::forget_if_idle(const std::string& client) {
  const auto found = clients_.find(client);
  if (found == clients_.end() || found->second.waiting != 0 || found->second.running != 0) return;
  clients_.erase(found);
  std::erase(turns_, client);
}

}  // namespace flashjit::serve
