// The objects that the service gives, by name as in any store (cache/remote_store.hpp): signed entries and
// tune records of a cache folder, and which entry of a request is newest. Those used last are in memory.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "cache/signature.hpp"

namespace flashjit::serve {

using Bytes = std::shared_ptr<const std::string>;

class ObjectCache {
 public:
  // Signs what the folder has unsigned, and gives nothing that `verifier` does not accept.
  ObjectCache(std::string folder, Verifier verifier, Signer signer, std::size_t most_bytes);

  // Null if there is no such object.
  Bytes get(const std::string& name);
  // The digest of the newest entry of the request; empty if there is none.
  std::string newest(const std::string& request_digest);
  // The entry was published in the folder, or could not be: it is given from memory then, for a while.
  void add(const std::string& name, std::string bytes);

  std::size_t bytes() const { return bytes_; }
  std::size_t objects() const { return objects_.size(); }

 private:
  struct Object {
    Bytes bytes;
    std::list<std::string>::iterator use;
    std::chrono::steady_clock::time_point marked;  // when its file was said to be used
  };
  Bytes read(const std::string& name);
  Bytes keep(const std::string& name, std::string bytes);
  void mark_used(const std::string& name) const;
  void look_again();

  const std::string folder_;
  const Verifier verifier_;
  const Signer signer_;
  const std::size_t most_bytes_;
  std::size_t bytes_ = 0;
  std::list<std::string> uses_;  // names, those used last in front
  std::unordered_map<std::string, Object> objects_;
  std::unordered_map<std::string, std::string> newest_;  // digests of entries by those of requests
  timespec listed_{};                                    // the folder's time when it was listed
  std::chrono::steady_clock::time_point looked_{};
};

}  // namespace flashjit::serve
