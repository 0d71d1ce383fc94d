// The stores behind the plugin's C interface. For use inside libflashjit-remote.so only.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flashjit::remote_plugin {

struct Options {
  std::string url, token, ca_file;
  std::chrono::milliseconds answer{};   // until the answer to a request that sends no object begins
  std::chrono::milliseconds timeout{};  // of a whole request
  std::size_t max_bytes = 0;
};

// A refusal of a store or the network, in words.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// All functions may be called by several threads at once. They throw Failure.
class Store {
 public:
  virtual ~Store() = default;
  // False: there is no such object.
  virtual bool get(const std::string& name, std::string& bytes) = 0;
  virtual void put(const std::string& name, std::string_view bytes) = 0;
  virtual bool exists(const std::string& name) = 0;
  // Takes the lease, or with ttl 0 gives back one of that token. False: another has it.
  virtual bool lease(const std::string& name, const std::string& token, std::chrono::milliseconds ttl) = 0;
  virtual bool makes() const { return false; }
  struct Made {
    enum { yes, refused, later } answer = refused;
    std::string text = {};  // the entry; why it is refused
    std::chrono::milliseconds pause{0};
  };
  virtual Made make(const std::string&) { return {}; }
};

// http, https.
std::unique_ptr<Store> http_store(const Options& options);
// redis, rediss.
std::unique_ptr<Store> redis_store(const Options& options);

}  // namespace flashjit::remote_plugin
