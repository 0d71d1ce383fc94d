// Exchanges of ranks that are GPUs of one host, in processes or threads. They write into each other's memory
// by copy engines, which take no multiprocessor from the kernels that run meanwhile, and tell each other by
// memory operations of streams, which a CUDA graph can hold.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/parallel/transport.hpp"

namespace flashjit {

class CudaExchanges {
 public:
  // Transport::gather of the group.
  using Gather = std::function<std::vector<std::string>(const std::string& own)>;
  // `has_failed` is asked again and again, by a thread of its own: once a rank has failed, what waits for
  // others on this GPU ends.
  CudaExchanges(int device, int rank, int size, Gather gather, const std::function<bool()>& has_failed);
  ~CudaExchanges();

  // Every rank calls it with the same number. Throws unsupported if a rank cannot reach another's memory.
  std::shared_ptr<Exchange> open(std::size_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit
