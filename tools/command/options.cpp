#include "tools/command/options.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

namespace flashjit::command {
namespace {

// Without a description: --help says N, not N:NONNEGATIVE.
const CLI::Validator any_size = CLI::Validator(CLI::NonNegativeNumber).description("");

std::string read_all(std::istream& in) {
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

CLI::Option* add_spec(CLI::App& app, std::string& argument) {
  return app.add_option("SPEC", argument, "A file, '-' for standard input, or the JSON text itself")
      ->required();
}

AttentionSpec read_spec(const std::string& argument) {
  if (argument == "-") return AttentionSpec::from_json(read_all(std::cin));
  const std::size_t start = argument.find_first_not_of(" \t\r\n");
  if (start != std::string::npos && argument[start] == '{') return AttentionSpec::from_json(argument);
  const bool is_folder = std::filesystem::is_directory(argument);
  std::ifstream file(argument, std::ios::binary);
  if (!file || is_folder) {
    throw Error(ErrorCode::invalid_argument,
                "spec file '" + argument + "' cannot be read: " + std::strerror(is_folder ? EISDIR : errno) +
                    "; SPEC is a file, '-' for standard input, or the JSON text itself");
  }
  try {
    return AttentionSpec::from_json(read_all(file));
  } catch (const Error& error) {
    throw Error(error.code(), argument + ": " + error.message(), error.detail());
  }
}

void ShapeOptions::add(CLI::App& app) {
  app.add_option("--batch", batch, "Sequences")->check(any_size)->type_name("N")->capture_default_str();
  app.add_option("--seqlen-q", seqlen_q, "Query rows of a sequence; varlen: of the longest")
      ->check(any_size)
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--seqlen-k", seqlen_k, "Keys of a sequence [--seqlen-q]")->check(any_size)->type_name("N");
  app.add_option("--heads-q", heads_q, "Query heads")->check(any_size)->type_name("N")->capture_default_str();
  app.add_option("--heads-kv", heads_kv, "Key and value heads [--heads-q]")->check(any_size)->type_name("N");
}

Shape ShapeOptions::shape() const {
  return {.batch = batch,
          .seqlen_q = seqlen_q,
          .seqlen_k = seqlen_k.value_or(seqlen_q),
          .num_heads_q = heads_q,
          .num_heads_kv = heads_kv.value_or(heads_q)};
}

void DeviceOptions::add(CLI::App& app) {
  app.add_option("--device", device, "\"cpu\" or \"cuda:N\"")->capture_default_str();
  app.add_option("--target", target, "Compile for this instead of the device's best");
  app.add_option("--num-threads", num_threads, "Threads of a CPU kernel; 0: as many as this process may use")
      ->check(any_size)
      ->type_name("N")
      ->capture_default_str();
  add_cache_dir(app, cache_dir);
}

EngineOptions DeviceOptions::engine() const {
  return {.device = device,
          .target = target,
          .cache_dir = cache_dir,
          .num_threads = num_threads,
          .parallel_for = {}};
}

void add_json(CLI::App& app, bool& json) {
  app.add_flag("--json", json, "Print one JSON value instead of text");
}

void add_cache_dir(CLI::App& app, std::optional<std::string>& cache_dir) {
  app.add_option("--cache-dir", cache_dir,
                 "Cache folder [FLASHJIT_CACHE_DIR, else ~/.cache/flashjit]; \"\" for none");
}

}  // namespace flashjit::command
