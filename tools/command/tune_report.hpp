// The results of `flashjit tune` as JSON and as an HTML page.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "codegen/families/search_space.hpp"
#include "runtime/flashjit.hpp"
#include "tools/command/report.hpp"

namespace flashjit::command {

// The device's peak rate in a spec's dtype, and the rate at which it reads its memory.
struct Peak {
  double tflops = 0, bandwidth = 0;  // bandwidth: TB/s
  std::string source;                // "measured: ...", "data sheet: ..."
};
// A CPU's peak is measured. A GPU's comes from its maker's data sheet, for dense products of 16-bit numbers;
// absent for an unknown GPU.
std::optional<Peak> peak_of(const Engine& engine, int num_threads);

// The least work of a launch.
struct Work {
  double flops = 0;
  double bytes = 0;  // of every tensor, once
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
  // Half the distance between the quartiles of the chosen config's samples, in per cent of their median.
  double spread_percent() const;
  // The share of the heuristic config's time that the chosen config saves, in per cent.
  double gain_percent() const;
  double tflops() const { return work.flops / chosen_ms() * 1e-9; }
  // FLOPs for each byte: the shape's place on the roofline. roof_tflops() is the roof there; it needs `peak`.
  double intensity() const { return work.flops / work.bytes; }
  double roof_tflops() const { return std::min(peak->tflops, peak->bandwidth * intensity()); }
  // "chosen", "not finished", "known"
  const char* state() const;
};

// "2 x 4096, heads 32/8": batch, seqlen, heads.
std::string to_text(const Shape& shape);

Json tuned_json(const TunedShape& tuned);

// A page that needs nothing else: for each shape chosen against heuristic, both on the device's roofline
// (Williams, Waterman, Patterson 2009), and every candidate as a bar. Throws invalid_argument where the file
// cannot be written.
void write_tune_report(const std::string& file, const std::string& device,
                       const std::vector<TunedShape>& shapes, const std::vector<Rejection>& rejected);

}  // namespace flashjit::command
