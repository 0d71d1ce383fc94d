// What a tuner chose for a spec on a device, and why. Plain data.
#pragma once

#include <string>
#include <vector>

// Installed: found without a search path.
#include "../codegen/config.hpp"
#include "../codegen/shape.hpp"

namespace flashjit {

// What a record is found by.
struct TuneKey {
  std::string spec;    // AttentionSpec::to_json() of a validated spec, with its pins
  std::string target;  // Target::str()
  std::string device;  // what its maker calls it: "NVIDIA H200"
  Shape bucket;        // bucket() of the shapes that the record is for
  bool operator==(const TuneKey&) const = default;
};

// What a measurement depends on beside its key. What is empty or 0 is not known, and compares as equal.
struct TuneEnvironment {
  std::string driver{};    // the driver's CUDA version; empty on a CPU
  std::string compiler{};  // Compiler::identity(), as in the keys of entries
  std::string flashjit{};  // version()
  int num_threads = 0;     // of CPU kernels
  bool operator==(const TuneEnvironment&) const = default;
};

// In which fields two environments differ: "driver 12.9, here 13.0"; empty if in none.
std::string difference(const TuneEnvironment& measured, const TuneEnvironment& here);

enum class Verdict {
  measured,  // to the end
  dropped,   // well behind the best
  wrong,     // its output differed from the heuristic config's
  failed,    // could not be compiled, loaded or run
};
FLASHJIT_API const char* to_string(Verdict) noexcept;

struct TuneCandidate {
  KernelConfig config;
  Verdict verdict = Verdict::measured;
  std::string reason{};              // of every other verdict
  std::vector<double> samples_ms{};  // of one launch each; samples of the same position are of the same round
  bool operator==(const TuneCandidate&) const = default;
};

struct TuneRecord {
  TuneKey key;
  KernelConfig chosen;
  KernelConfig heuristic;  // the untuned choice: candidates.front()
  Shape shape;             // that was measured
  bool complete = false;   // false: ended early, by its budget or its user
  TuneEnvironment environment;
  std::vector<TuneCandidate> candidates;
  bool operator==(const TuneRecord&) const = default;
};

// Strict JSON, one line, with a checksum.
FLASHJIT_API std::string to_json(const TuneRecord& record);

}  // namespace flashjit
