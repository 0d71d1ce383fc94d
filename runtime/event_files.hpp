// The files of EngineOptions::log and record.
#pragma once

#include <optional>
#include <string>

#include "runtime/kernel_event.hpp"

namespace flashjit {

// The log gets a line for each event, a JSON object. The record is a manifest of the specs and shapes of all
// events, which `flashjit prebuild` takes. Many processes may share either file.
class EventFiles {
 public:
  // Absent: the environment's. Empty: none. Throws invalid_argument if a file cannot be written, or is no
  // manifest.
  EventFiles(const std::optional<std::string>& log, const std::optional<std::string>& record);

  bool any() const { return !log_.empty() || !record_.empty(); }
  // A file that cannot be written any more is passed over: no kernel fails for it.
  void write(const KernelEvent& event) const noexcept;

 private:
  std::string log_, record_;
};

}  // namespace flashjit
