// The command's exit codes and its reports of failures.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "codegen/base/error.hpp"

namespace flashjit::command {

constexpr int exit_ok = 0;
// Codes 1 to 12 are those of flashjit::ErrorCode.
constexpr int exit_verification_failed = 20;  // the kernel ran, but its result is outside the bound
constexpr int exit_verification_undecided =
    21;  // the kernel ran, but NaN or infinity hides whether its result is right
constexpr int exit_interrupted = 130;   // Ctrl-C; tune keeps its samples
constexpr int exit_usage = 64;          // the command line is wrong
constexpr int exit_output_failed = 74;  // standard output could not be written

// The list above as text for --help.
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
