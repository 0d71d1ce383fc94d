// Groups of threads whose ranks do not reach each other's memory, as those of an NCCL communicator between
// hosts. Messages must be received as they were sent: a step ends once both have come, and another rank's
// message of another size fails the group.
#pragma once

#include <vector>

#include "runtime/parallel.hpp"

namespace flashjit::testing_support {

// Each thread takes its own.
std::vector<ParallelGroup> message_group(int size);

}  // namespace flashjit::testing_support
