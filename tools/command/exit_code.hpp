// What the command's exit code means, and how a failure is reported.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "codegen/error.hpp"

namespace flashjit::command {

constexpr int exit_ok = 0;
// 1 to 10: flashjit::ErrorCode.
constexpr int exit_verification_failed = 20;  // the kernel ran, its result is outside the bound
constexpr int exit_verification_undecided =
    21;                                 // the kernel ran, nobody can tell whether its result is right
constexpr int exit_interrupted = 130;   // Ctrl-C; tune kept what it had
constexpr int exit_usage = 64;          // the command line itself
constexpr int exit_output_failed = 74;  // standard output took not all that was printed

// The list above, for --help.
std::string exit_code_help();

// {"error": {code, exit_code, message, detail}}
nlohmann::ordered_json to_json(const Error& error);

// One message on stderr, `json`: as above. Returns the exit code.
int report_error(const Error& error, bool json);
int report_usage_error(const std::string& message, bool json);
// Flushes standard output. `exit_code` where it took everything or that code is a failure already; else
// reports the error.
int finish_output(int exit_code, bool json);

}  // namespace flashjit::command
