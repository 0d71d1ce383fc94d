// The verbs of the command. Each is one function, in the file of its name, that declares the verb's options
// and gives back what runs it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace flashjit::command {

struct Verb {
  CLI::App* app;
  std::function<int()> run;  // the exit code; called after parsing, if app->parsed(); may throw Error
};

Verb add_doctor(CLI::App& parent);
Verb add_render(CLI::App& parent);
Verb add_compile(CLI::App& parent);
Verb add_generate(CLI::App& parent);
Verb add_mask(CLI::App& parent);
Verb add_run(CLI::App& parent);
Verb add_bench(CLI::App& parent);
Verb add_prebuild(CLI::App& parent);
Verb add_tune(CLI::App& parent);
Verb add_cache(CLI::App& parent);

}  // namespace flashjit::command
