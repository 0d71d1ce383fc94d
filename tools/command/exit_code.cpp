#include "tools/command/exit_code.hpp"

#include <cerrno>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cache/file.hpp"
#include "codegen/base/error_table.hpp"

namespace flashjit::command {
namespace {

using Json = nlohmann::ordered_json;

Json error_json(const std::string& code, int exit_code, const std::string& message,
                const std::string& detail) {
  const Json error = {{"code", code}, {"exit_code", exit_code}, {"message", message}, {"detail", detail}};
  return {{"error", error}};
}

int report(const std::string& code, int exit_code, const std::string& message, const std::string& detail,
           bool json) {
  if (json) {
    std::cerr
        << error_json(code, exit_code, message, detail).dump(2, ' ', false, Json::error_handler_t::replace)
        << '\n';
  } else {
    std::cerr << "flashjit: " << code << ": " << message << '\n';
    if (!detail.empty()) std::cerr << detail << (detail.ends_with('\n') ? "" : "\n");
  }
  return exit_code;
}

}  // namespace

std::vector<ExitCode> exit_codes() {
  std::vector<ExitCode> codes = {{exit_ok, "success", "the verb did what it was asked"}};
  for (const ErrorInfo& row : error_table)
    codes.push_back({static_cast<int>(row.code), row.name, row.meaning});
  for (const ExitCode& own : {
           ExitCode{exit_verification_failed, "verification_failed", "the result is outside the error bound"},
           ExitCode{exit_verification_undecided, "verification_undecided",
                    "NaN or infinity hides whether the result is right"},
           ExitCode{exit_usage, "usage", "the command line is wrong"},
           ExitCode{exit_output_failed, "output_failed", "standard output could not be written"},
           ExitCode{exit_interrupted, "interrupted", "Ctrl-C; tune keeps its samples"},
       })
    codes.push_back(own);
  return codes;
}

std::string exit_code_help() {
  std::string text = "Exit codes:\n";
  for (const ExitCode& code : exit_codes()) {
    const std::string number = std::to_string(code.code);
    text += std::string(4 - number.size(), ' ') + number + "  " + code.name + ": " + code.meaning + '\n';
  }
  return text;
}

Json to_json(const Error& error) {
  return error_json(to_string(error.code()), static_cast<int>(error.code()), error.message(), error.detail());
}

int report_error(const Error& error, bool json) {
  return report(to_string(error.code()), static_cast<int>(error.code()), error.message(), error.detail(),
                json);
}

int report_usage_error(const std::string& message, bool json) {
  return report("usage", exit_usage, message, "", json);
}

int finish_output(int exit_code, bool json) {
  errno = 0;
  std::cout.flush();
  if (std::cout || exit_code != exit_ok) return exit_code;
  return report("output_failed", exit_output_failed,
                "standard output could not be written" + (errno ? ": " + error_text(errno) : std::string()),
                "", json);
}

}  // namespace flashjit::command
