// The picture of `flashjit bench --svg`: speed over sequence length, of this run and of recorded ones.
#pragma once

#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::command {

// A measured kernel. Rows with equal runs and specs are one line of the picture.
struct SpeedRow {
  std::string run;  // a line's name in the legend
  AttentionSpec spec;
  int seqlen_q;
  double tflops;
};

// The rows of a recorded run: a file that `bench --json` printed, or one with such rows, as
// tests/peers/compare.py
// --json writes. A row needs "spec", "seqlen_q" and "tflops"; its "name", else the file's name, names the
// line. Throws invalid_argument for another file.
std::vector<SpeedRow> read_speed_rows(const std::string& path);

// Whether both specs belong into one panel: they compute the same. Configs and lse may differ.
bool same_panel(const AttentionSpec& a, const AttentionSpec& b);

// Panels for the specs of the rows whose run is `run`, in their order; other rows are drawn where they fit.
// A row counts if it is the fastest of its line at its length. 600 pixels wide, with its own white
// background.
std::string speed_svg(const std::string& title, const std::string& run, const std::vector<SpeedRow>& rows);

}  // namespace flashjit::command
