// A store over the network, as this folder knows it, and the text that names several. The plugin for remote
// stores (runtime/remote/) has the schemes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit {

// A store's answer. `no`: there is no such object, or another has the lease.
enum class Answer { yes, no, failed };

// The answer of a store that compiles to a request for a kernel. `going_on`: ask again. `busy`: ask again
// after a pause. `refused`: never ask that again.
enum class Making { made, going_on, busy, refused, failed };

// One server. Names are paths in a cache folder, such as "v3/REQUEST-ENTRY.kernel". Every call ends within
// the store's limits of time; one that failed says why in *why. Any number of threads call at once.
class RemoteStore {
 public:
  virtual ~RemoteStore() = default;
  virtual Answer get(const std::string& name, std::string& bytes, std::string& why) = 0;
  virtual Answer put(const std::string& name, std::string_view bytes, std::string& why) = 0;
  virtual Answer exists(const std::string& name, std::string& why) = 0;
  // Takes the lease for `ttl`, or, with 0, gives back what `token` has taken.
  virtual Answer lease(const std::string& name, const std::string& token, std::chrono::milliseconds ttl,
                       std::string& why) = 0;
  // Whether an answer has said that the store compiles what it lacks. Such a store takes no objects.
  virtual bool makes() const { return false; }
  // Asks for the entry that `request` describes (compile_request_text(), runtime/build.hpp). Returns after
  // half of the address's `answer` at the latest, also while the entry is being made.
  virtual Making make(const std::string& request, std::string& bytes, std::chrono::milliseconds& pause,
                      std::string& why) {
    (void)request, (void)bytes, (void)pause;
    why = "this store compiles nothing";
    return Making::refused;
  }
};

struct RemoteAddress {
  std::string url;  // without user and password
  bool read_only = false;
  // Until the answer to a request that sends no object begins, connecting included.
  std::chrono::milliseconds answer{200};
  std::chrono::milliseconds timeout{2000};  // for a whole request
  bool operator==(const RemoteAddress&) const = default;
};

// Opens a store without connecting to it. Throws Error.
using OpenStore = std::function<std::unique_ptr<RemoteStore>(const RemoteAddress& address)>;

// The stores that a text names, spaces between them: URL, or URL#ATTRIBUTE,ATTRIBUTE with read_only,
// answer_ms=N and timeout_ms=N. Throws cache_failed for another scheme than http, https, redis and rediss,
// for a user or password in a URL, and for other attributes.
std::vector<RemoteAddress> parse_remotes(const std::string& text);

}  // namespace flashjit
