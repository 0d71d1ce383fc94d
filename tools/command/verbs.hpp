// The verbs of the command. Each verb has one function, in the file of its name. The function declares the
// verb's options and returns the function that runs it.
#pragma once

#include <functional>

#include "tools/command/arguments.hpp"

namespace flashjit::command {

struct Verb {
  Arguments arguments;
  std::function<int()> run;  // the exit code; called after parsing, if arguments.parsed(); may throw Error
};

Verb add_doctor(const Arguments& parent);
Verb add_render(const Arguments& parent);
Verb add_compile(const Arguments& parent);
Verb add_generate(const Arguments& parent);
Verb add_mask(const Arguments& parent);
Verb add_run(const Arguments& parent);
Verb add_bench(const Arguments& parent);
Verb add_audit(const Arguments& parent);
Verb add_bits(const Arguments& parent);
Verb add_prebuild(const Arguments& parent);
Verb add_serve(const Arguments& parent);
Verb add_tune(const Arguments& parent);
Verb add_cache(const Arguments& parent);
Verb add_reference(const Arguments& parent);
Verb add_completion(const Arguments& parent);

}  // namespace flashjit::command
