// A tune record: the config that a tuner chose for a spec on a device, and why. Plain data.
#pragma once

#include <string>
#include <vector>

// This header is installed, so it includes by relative paths.
#include "../codegen/base/shape.hpp"
#include "../codegen/spec/config.hpp"

namespace flashjit {

// The key that identifies a record.
struct TuneKey {
  std::string spec;    // AttentionSpec::to_json() of a validated spec, with its pins
  std::string target;  // Target::str()
  std::string device;  // the device's product name: "NVIDIA H200"
  Shape bucket;        // bucket() of the record's shapes
  bool operator==(const TuneKey&) const = default;
};

// Everything besides the key that a measurement depends on.
// An empty or zero field is unknown and equals any value.
struct TuneEnvironment {
  std::string driver{};    // the driver's CUDA version; empty on a CPU
  std::string compiler{};  // Compiler::identity(), as in the keys of entries
  std::string flashjit{};  // version()
  int num_threads = 0;     // of CPU kernels
  bool operator==(const TuneEnvironment&) const = default;
};

// The fields in which two environments differ: "driver 12.9, here 13.0"; empty if there are none.
std::string difference(const TuneEnvironment& measured, const TuneEnvironment& here);

enum class Verdict {
  measured,  // in every round
  dropped,   // not in every round: it was well behind the best
  wrong,     // its output differed from the heuristic config's
  failed,    // could not be compiled, loaded or run
};
FLASHJIT_API const char* to_string(Verdict) noexcept;

struct TuneCandidate {
  KernelConfig config;
  Verdict verdict = Verdict::measured;
  std::string reason{};  // for every other verdict
  // Milliseconds of one launch each; samples at the same position are of the same round.
  std::vector<double> samples_ms{};
  bool operator==(const TuneCandidate&) const = default;
};

struct TuneRecord {
  TuneKey key;
  KernelConfig chosen;
  KernelConfig heuristic;  // the untuned choice: candidates.front()
  Shape shape;             // the shape that was measured
  bool complete = false;   // false: the budget or the user ended the measurement early
  TuneEnvironment environment;
  std::vector<TuneCandidate> candidates;
  bool operator==(const TuneRecord&) const = default;
};

// The record as strict JSON with a checksum, on one line.
FLASHJIT_API std::string to_json(const TuneRecord& record);

}  // namespace flashjit
