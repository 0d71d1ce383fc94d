// A fleet whose stores are in memory.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache/remote_cache.hpp"
#include "tests/remote/keys.hpp"

namespace flashjit::testing {

using std::chrono::milliseconds;

// The objects of any number of stores in memory, and whether they answer.
struct Server {
  std::mutex mutex;
  std::map<std::string, std::string> objects, leases;
  std::atomic<bool> down{false}, full{false};
  std::atomic<int> questions{0};
  std::atomic<milliseconds> lease_time{};  // that the last one to ask for a lease asked for
};

class MemoryStore : public RemoteStore {
 public:
  explicit MemoryStore(Server& server) : server_(server) {}

  Answer get(const std::string& name, std::string& bytes, std::string& why) override {
    if (!asked(why)) return Answer::failed;
    const std::lock_guard lock(server_.mutex);
    const auto found = server_.objects.find(name);
    if (found == server_.objects.end()) return Answer::no;
    bytes = found->second;
    return Answer::yes;
  }
  Answer put(const std::string& name, std::string_view bytes, std::string& why) override {
    if (!asked(why)) return Answer::failed;
    if (server_.full) {
      why = "full";
      return Answer::failed;
    }
    const std::lock_guard lock(server_.mutex);
    server_.objects[name] = bytes;
    return Answer::yes;
  }
  Answer exists(const std::string& name, std::string& why) override {
    if (!asked(why)) return Answer::failed;
    const std::lock_guard lock(server_.mutex);
    return server_.objects.contains(name) || server_.leases.contains(name) ? Answer::yes : Answer::no;
  }
  Answer lease(const std::string& name, const std::string& token, milliseconds ttl,
               std::string& why) override {
    if (!asked(why)) return Answer::failed;
    const std::lock_guard lock(server_.mutex);
    if (ttl.count() != 0) server_.lease_time = ttl;
    if (ttl.count() != 0) return server_.leases.emplace(name, token).second ? Answer::yes : Answer::no;
    const auto found = server_.leases.find(name);
    if (found != server_.leases.end() && found->second == token) server_.leases.erase(found);
    return Answer::yes;
  }

 private:
  bool asked(std::string& why) {
    ++server_.questions;
    if (server_.down) why = "down";
    return !server_.down;
  }
  Server& server_;
};

struct Fleet {
  explicit Fleet(int count = 1) : servers(static_cast<std::size_t>(count)) {}

  RemoteCache::Options options(bool signs, bool read_only = false) {
    RemoteCache::Options given;
    for (std::size_t i = 0; i < servers.size(); ++i)
      given.stores.push_back({"redis://store" + std::to_string(i), read_only});
    given.open = [this](const RemoteAddress& address) {
      return std::make_unique<MemoryStore>(servers[static_cast<std::size_t>(address.url.back() - '0')]);
    };
    given.verifier = verifier(Trust::parse(key.trusted() + ":" + fired.trusted() + ":" + fired.revoked()));
    if (signs) given.signer = key.sign();
    given.limits.fetch.first_pause = milliseconds(1);
    given.limits.fetch.longest_pause = milliseconds(5);
    return given;
  }

  const NamedKey key{"ci"}, fired{"fired"}, stranger{"stranger"};
  std::vector<Server> servers;
};

}  // namespace flashjit::testing
