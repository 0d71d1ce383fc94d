// What this machine's CPU and the kernel together let us run.
#pragma once

#include <string>

#include "codegen/target.hpp"

namespace flashjit {

// Asks the kernel, for this process, for the state of AMX's tiles. 0, or the errno of its refusal.
using RequestAmx = int (*)();
int request_amx();

struct CpuTarget {
  Target target;
  std::string note;  // why AMX, which the CPU has, is left out
};

// The best target of this CPU; that without AMX where it is refused. Asks anew each time: a refusal may pass.
// A grant does not, and asks more of signal stacks that are set up later. Throws as Target::native().
CpuTarget cpu_target(Target native = Target::native(), RequestAmx request = request_amx);

}  // namespace flashjit
