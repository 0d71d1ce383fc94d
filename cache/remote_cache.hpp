// The stores over the network behind the folders: what is asked of them, what of their answers is believed,
// and what a store that is down, slow, full or lying may cost.
//
// Objects have the names of files in a cache folder. One more kind is "v3/REQUEST", which holds the digest of
// the request's newest entry, for hosts without a compiler: it is not signed, since what it leads to is.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/fetch_plan.hpp"
#include "cache/fork.hpp"
#include "cache/key.hpp"
#include "cache/remote_store.hpp"
#include "cache/signature.hpp"

namespace flashjit {

struct RemoteLimits {
  FetchLimits fetch{};
  std::chrono::milliseconds miss{30'000};  // how long an object that was not there is not asked for again
  // A store that failed is not asked again for a while, which doubles with each failure.
  std::chrono::milliseconds first_rest{1000}, longest_rest{60'000};
  std::chrono::milliseconds flush{1000};  // how long the end waits for what is not stored yet
  std::uint64_t queued = std::uint64_t{64}
                         << 20;  // octets that wait to be stored; what comes then is dropped
};

// How often something happened.
struct RemoteCounts {
  std::uint64_t hits = 0, misses = 0, stored = 0, refused = 0, failed = 0;
};
// The counts of all processes on a cache folder.
RemoteCounts remote_counts(const std::string& folder);

class RemoteCache {
 public:
  struct Options {
    std::vector<RemoteAddress> stores;
    OpenStore open;
    Verifier verifier;
    Signer signer;       // empty: nothing is stored
    std::string folder;  // where counts are kept; empty: nowhere
    RemoteLimits limits{};
  };
  explicit RemoteCache(Options options);
  RemoteCache(const RemoteCache&) = delete;
  RemoteCache& operator=(const RemoteCache&) = delete;
  // Stores what is queued, for at most `flush` and the request that is under way.
  ~RemoteCache();

  const std::vector<RemoteAddress>& stores() const { return options_.stores; }
  // Whether this host may store objects of that name.
  bool may_store(const std::string& name) const;

  // Why something was not used goes to it, in words.
  using Note = std::function<void(const std::string& why)>;

  struct Got {
    Answer answer = Answer::failed;
    std::string bytes{};  // with the line of the signature
  };
  // The object, if a trusted key has signed it under that name. One that was not there a moment ago is not
  // asked for again, unless `again`.
  Got get(const std::string& name, const Note& note, bool again = false);
  // The newest entry of the request, for `name_of` turns the digests of request and entry to a name.
  Got get_request(const std::string& pointer, const std::function<std::string(const std::string&)>& name_of,
                  const Note& note);

  // The right to make an object for all hosts; given back, after what was put before, when it is destroyed.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept {
      std::swap(cache_, other.cache_);
      std::swap(name_, other.name_);
      std::swap(token_, other.token_);
      return *this;
    }
    ~Lease();
    bool held() const { return cache_ != nullptr; }

   private:
    friend class RemoteCache;
    RemoteCache* cache_ = nullptr;
    std::string name_, token_;
  };
  // The outcome of asking the stores that compile.
  struct Made {
    bool asked = false;  // there is such a store
    Got got{};
  };
  // Has a store that compiles make the entry that `request` describes (compile_request_text()), and waits for
  // it, at most the patience of the limits. A store that is busy is waited for, too, if `patient`. The
  // request is known by its pointer; `name_of` says which entry bytes are, empty: none. `goes_on` is asked
  // before each further question.
  Made make(const std::string& pointer, const std::string& request,
            const std::function<std::string(const std::string& bytes)>& name_of, bool patient,
            const Note& note, const std::function<bool()>& goes_on);

  struct Fetched {
    Got got;
    Lease lease;  // held, if the caller is to make the object
  };
  // Gets the object, or the lease to make it. While another host has the lease, it is waited for, at most
  // `limits.patience` long; the caller then makes the object without. `goes_on` is asked before each wait. An
  // object that `accepts` does not accept counts as missing. `make` is called where the object is missing; if
  // a store was asked to make it, nobody takes a lease.
  Fetched fetch(const std::string& name, const FetchLimits& limits, const Note& note,
                const std::function<bool()>& goes_on = {},
                const std::function<bool(const Got&)>& accepts = {}, const std::function<Made()>& make = {});
  const FetchLimits& fetch_limits() const { return options_.limits.fetch; }

  // Signs and stores the object, unless its bytes have a signature, on a thread of its own. Does nothing
  // without a key to sign with.
  void put(const std::string& name, std::string bytes);
  // Stores `text` as it is.
  void put_pointer(const std::string& name, std::string text);
  // Waits until all that was put is stored, at most that long. Returns whether it is.
  bool flush(std::chrono::milliseconds limit);
  // put() and flush(), with the reason if it fails.
  Answer put_now(const std::string& name, std::string bytes, std::string& why);
  Answer exists(const std::string& name, std::string& why);
  Lease lease_now(const std::string& name, std::chrono::milliseconds time);

 private:
  struct State;
  struct Server;
  // The stores that answer, the one to which the name belongs first.
  std::vector<Server*> servers_for(const std::string& name, const Note& note) const;
  Server* server_for(const std::string& name, const Note& note) const;
  Answer ask(Server* server, const Note& note,
             const std::function<Answer(RemoteStore& store, std::string& why)>& question) const;
  Answer ask(const std::string& name, const Note& note,
             const std::function<Answer(RemoteStore& store, std::string& why)>& question) const;
  void enqueue(std::string name, std::string bytes, bool sign, std::string token);
  void work(State& state);
  void save_counts(State& state);

  const Options options_;
  mutable PerProcess<State> state_;
};

}  // namespace flashjit
