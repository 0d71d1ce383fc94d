// The CPU target that this machine's CPU and its operating system allow.
#pragma once

#include <string>

#include "codegen/base/target.hpp"

namespace flashjit {

// Asks the operating system to let this process use AMX's tiles. Returns 0, or the errno of its refusal.
using RequestAmx = int (*)();
int request_amx();

struct CpuTarget {
  Target target;
  std::string note;  // why AMX is not used although the CPU has it
};

// The best target of this CPU, without AMX if the operating system refuses it. Asks
// again at each call: a refusal may pass. A grant is permanent, and makes signal
// stacks that are set up later need more room. Throws like Target::native().
CpuTarget cpu_target(Target native = Target::native(), RequestAmx request = request_amx);

}  // namespace flashjit
