// Exchanges of ranks that are GPUs of any hosts: they send and receive over NCCL, whose kernels take a few
// multiprocessors.
#pragma once

#include <cstddef>
#include <memory>

#include "runtime/parallel/nccl.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {

// All ranks call it, and wait for each other. The communicator outlives the exchange.
std::shared_ptr<Exchange> make_nccl_exchange(const NcclCommunicator& comm, std::size_t bytes,
                                             std::size_t bytes_of_step);

}  // namespace flashjit
