// What `flashjit tune` found, as rows and as a page.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "codegen/search_space.hpp"
#include "runtime/flashjit.hpp"
#include "tools/command/report.hpp"

namespace flashjit::command {

// The best that the device does in a spec's dtype, and how fast it reads its memory.
struct Peak {
  double tflops = 0, bandwidth = 0;  // bandwidth: TB/s
  std::string source;                // "measured: ...", "data sheet: ..."
};
// Measured on a CPU; a GPU's from its maker's data sheet, for dense products of 16-bit numbers. Nothing for a
// GPU that is not known.
std::optional<Peak> peak_of(const Engine& engine, int num_threads);

// What a launch has to do at least.
struct Work {
  double flops = 0;
  double bytes = 0;  // each of the tensors once
};
// At that shape, on the tensors that the tuner measures with. flops are, as is customary, 2 (head_dim +
// head_dim_v) for each query head and pair that the mask keeps.
Work tuned_work(const AttentionSpec& spec, const Shape& shape);

// One shape of one spec.
struct TunedShape {
  AttentionSpec spec;
  Target target;
  TuneResult result;
  Work work;
  std::optional<Peak> peak;

  double chosen_ms() const;  // medians; infinite where nothing was measured
  double heuristic_ms() const;
  // Of the heuristic config's time, how many per cent the chosen one saves.
  double gain_percent() const;
  double tflops() const { return work.flops / chosen_ms() * 1e-9; }
  // FLOPs for each byte: where the shape is on the roofline. With `peak`: what that allows.
  double intensity() const { return work.flops / work.bytes; }
  double roof_tflops() const { return std::min(peak->tflops, peak->bandwidth * intensity()); }
  // "chosen", "not finished", "known"
  const char* state() const;
};

// "2 x 4096, heads 32/8": batch, seqlen, heads.
std::string to_text(const Shape& shape);

// One sentence: which config was chosen, by how much it won, and in what it differs from the heuristic one.
std::string why_chosen(const TunedShape& tuned);

Json tuned_json(const TunedShape& tuned);

// A page that needs nothing else: for each shape chosen against heuristic, both on the device's roofline
// (Williams, Waterman, Patterson 2009), and every candidate as a bar. Throws invalid_argument where the file
// cannot be written.
void write_tune_report(const std::string& file, const std::string& device,
                       const std::vector<TunedShape>& shapes, const std::vector<Rejection>& rejected);

}  // namespace flashjit::command
