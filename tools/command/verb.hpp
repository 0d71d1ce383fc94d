// A verb of the command: one function that declares its options and gives back what runs it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace flashjit::command {

struct Verb {
  CLI::App* app;
  std::function<int()> run;  // the exit code; called after parsing, if app->parsed()
};

}  // namespace flashjit::command
