// Why a tuner chose a config, in words.
#pragma once

#include <string>

#include "cache/tune_record.hpp"
#include "codegen/base/target.hpp"

namespace flashjit::command {

// The candidate with that config; null if there is none.
const TuneCandidate* candidate_of(const TuneRecord& record, const KernelConfig& config);

// One sentence: which config was chosen, by how much it won, and in what it differs from the heuristic
// config.
std::string why_chosen(const TuneRecord& record, const Target& target);

}  // namespace flashjit::command
