// Options that several verbs share.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "runtime/flashjit.hpp"

namespace flashjit::command {

// The positional SPEC: a file, '-' for standard input, or the JSON text itself.
CLI::Option* add_spec(CLI::App& app, std::string& argument);
// Throws invalid_argument for a file that cannot be read, invalid_spec for what it says.
AttentionSpec read_spec(const std::string& argument);

struct ShapeOptions {
  int batch = 1;
  int seqlen_q = 1024;
  std::optional<int> seqlen_k;  // seqlen_q
  int heads_q = 8;
  std::optional<int> heads_kv;  // heads_q

  void add(CLI::App& app);
  Shape shape() const;
};

struct DeviceOptions {
  std::string device = "cpu";
  std::string target;
  std::optional<std::string> cache_dir;
  int num_threads = 0;

  void add(CLI::App& app);
  EngineOptions engine() const;
};

void add_json(CLI::App& app, bool& json);
void add_cache_dir(CLI::App& app, std::optional<std::string>& cache_dir);

}  // namespace flashjit::command
