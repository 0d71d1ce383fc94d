// What `flashjit tune` found, as rows and as a page.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "codegen/search_space.hpp"
#include "runtime/flashjit.hpp"
#include "tools/command/report.hpp"

namespace flashjit::command {

// The best that the device does in a spec's dtype.
struct Peak {
  double tflops = 0;
  std::string source;  // "measured: ...", "data sheet: ..."
};
// Measured on a CPU; a GPU's from its maker's data sheet, for dense products of 16-bit numbers. Nothing for a
// GPU that is not known.
std::optional<Peak> peak_of(const Engine& engine, int num_threads);

// One shape of one spec.
struct TunedShape {
  AttentionSpec spec;
  Target target;
  TuneResult result;
  double flops = 0;  // of a launch
  std::optional<Peak> peak;

  double chosen_ms() const;  // medians; infinite where nothing was measured
  double heuristic_ms() const;
  // Of the heuristic config's time, how many per cent the chosen one saves.
  double gain_percent() const;
  double tflops() const { return flops / chosen_ms() * 1e-9; }
  // "chosen", "not finished", "known"
  const char* state() const;
};

// Floating-point operations of a launch at that shape on the tensors that the tuner measures with, as is
// customary: 2 (head_dim + head_dim_v) for each query head and pair that the mask keeps.
double tuned_flops(const AttentionSpec& spec, const Shape& shape);

// "2 x 4096, heads 32/8": batch, seqlen, heads.
std::string to_text(const Shape& shape);

Json tuned_json(const TunedShape& tuned);

// A page that needs nothing else: for each shape every candidate as a bar, chosen against heuristic, and how
// far both are from the device's peak. Throws invalid_argument where the file cannot be written.
void write_tune_report(const std::string& file, const std::string& device,
                       const std::vector<TunedShape>& shapes, const std::vector<Rejection>& rejected);

}  // namespace flashjit::command
