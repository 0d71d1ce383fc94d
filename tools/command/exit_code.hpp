// The command's exit codes and its reports of failures.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "codegen/base/error.hpp"

namespace flashjit::command {

constexpr int exit_ok = 0;
// Codes from 1 on are those of flashjit::ErrorCode.
constexpr int exit_verification_failed = 20;
constexpr int exit_verification_undecided = 21;
constexpr int exit_usage = 64;
constexpr int exit_output_failed = 74;
constexpr int exit_interrupted = 130;

struct ExitCode {
  int code;
  const char* name;
  const char* meaning;
};
// Every code of the command, the library's included, ascending.
std::vector<ExitCode> exit_codes();

// The codes as text for --help.
std::string exit_code_help();

// {"error": {code, exit_code, message, detail}}
nlohmann::ordered_json to_json(const Error& error);

// Prints one message to stderr, as the JSON above if `json`. Returns the exit code.
int report_error(const Error& error, bool json);
int report_usage_error(const std::string& message, bool json);
// Flushes standard output. If that fails and `exit_code` is a success, reports the error and returns its
// code; otherwise returns `exit_code`.
int finish_output(int exit_code, bool json);

}  // namespace flashjit::command
