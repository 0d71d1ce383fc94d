#include "tools/command/tune_report.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>

#include "codegen/arguments/table.hpp"
#include "runtime/device.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/tune/mask_tables.hpp"
#include "runtime/tune/race.hpp"
#include "tools/command/peak_rates.hpp"
#include "tools/command/svg.hpp"
#include "tools/command/tune_reason.hpp"
#include "tools/command/workload.hpp"

namespace flashjit::command {
namespace {

double ms_of(const TuneRecord& record, const KernelConfig& config) {
  const TuneCandidate* candidate = candidate_of(record, config);
  return candidate ? median_ms(*candidate) : std::numeric_limits<double>::infinity();
}

// JSON has no infinity.
Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

constexpr char page_head[] = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>flashjit tune</title>
<style>
:root { color-scheme: light dark; --bar: #9aa5b1; --chosen: #2f9e44; --heuristic: #1c7ed6; --dropped: #d0d5da; }
@media (prefers-color-scheme: dark) { :root { --bar: #7b8794; --dropped: #4a5561; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
code { font-size: 0.85em; overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { padding: 0.15rem 0.9rem 0.15rem 0; text-align: left; }
svg { width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.3em; }
</style></head><body>
)";

const char* colour(const TuneRecord& record, const TuneCandidate& candidate) {
  if (candidate.config == record.chosen) return "var(--chosen)";
  if (candidate.config == record.heuristic) return "var(--heuristic)";
  return candidate.verdict == Verdict::measured ? "var(--bar)" : "var(--dropped)";
}

std::string line(double x1, double y1, double x2, double y2, const std::string& more) {
  return "<line x1=\"" + coordinate(x1) + "\" y1=\"" + coordinate(y1) + "\" x2=\"" + coordinate(x2) +
         "\" y2=\"" + coordinate(y2) + "\" " + more + "/>\n";
}
std::string label(double x, double y, const std::string& words, const std::string& more = "") {
  return "<text x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" " + more + ">" + escaped(words) +
         "</text>\n";
}
constexpr char centred[] = "text-anchor=\"middle\"", at_end[] = "text-anchor=\"end\"";
constexpr char grid[] = "stroke=\"var(--dropped)\"", pen[] = "stroke=\"currentColor\"";

// A bar for each candidate, fastest first: its median, and a line from its fastest to its slowest sample.
std::string candidates_chart(const TunedShape& tuned) {
  const TuneRecord& record = tuned.result.record;
  std::vector<const TuneCandidate*> measured;
  for (const TuneCandidate& c : record.candidates) {
    if (!c.samples_ms.empty()) measured.push_back(&c);
  }
  std::sort(measured.begin(), measured.end(),
            [](const TuneCandidate* a, const TuneCandidate* b) { return median_ms(*a) < median_ms(*b); });
  constexpr int row = 20, width = 720, top = 22;
  const int left = tuned.target.is_cuda() ? 310 : 140, bars = width - left - 100;
  const int bottom = top + row * static_cast<int>(measured.size());
  // The axis ends at three times the fastest: one slow candidate would leave the others no room. What is
  // longer ends in an arrow.
  const double longest = std::min(median_ms(*measured.back()), 3 * median_ms(*measured.front())) * 1.05;
  const auto x = [&](double ms) { return left + std::min(ms / longest, 1.0) * bars; };
  const auto arrow = [&](double ms, double y) {
    if (ms <= longest) return std::string();
    const std::string end = coordinate(left + bars), middle = coordinate(y + 9.5);
    return "<path d=\"M" + end + ' ' + coordinate(y + 4.5) + " L" + coordinate(left + bars + 6) + ' ' +
           middle + " L" + end + ' ' + coordinate(y + 14.5) + "\" fill=\"none\" stroke=\"currentColor\"/>\n";
  };
  std::ostringstream svg;
  svg << "<svg viewBox=\"0 0 " << width << ' ' << bottom + 42
      << "\" role=\"img\" aria-label=\"milliseconds of each config\">\n"
      << label(left - 8, 14, tuned.target.is_cuda() ? "config" : "block_m x block_n", at_end);
  for (const double ms : ticks(longest, 6)) {
    if (ms > longest) break;
    svg << line(x(ms), top, x(ms), bottom + 4, grid) << label(x(ms), bottom + 18, tick_label(ms), centred);
  }
  svg << label(left + bars / 2.0, bottom + 36, "milliseconds a launch (shorter is faster)", centred);
  for (std::size_t i = 0; i < measured.size(); ++i) {
    const TuneCandidate& c = *measured[i];
    const double ms = median_ms(c), y = top + static_cast<double>(i) * row;
    const auto [least, most] = std::minmax_element(c.samples_ms.begin(), c.samples_ms.end());
    svg << "<g><title>"
        << escaped(to_text(c.config, tuned.target) + ": " + number(ms) + " ms, " +
                   std::to_string(c.samples_ms.size()) + " samples from " + number(*least) + " to " +
                   number(*most) + " ms; " + to_string(c.verdict) + (c.reason.empty() ? "" : ": " + c.reason))
        << "</title>" << label(left - 8, y + 13, to_text(c.config, tuned.target), at_end) << "<rect x=\""
        << left << "\" y=\"" << coordinate(y + 3) << "\" width=\"" << coordinate(x(ms) - left)
        << "\" height=\"" << row - 5 << "\" fill=\"" << colour(record, c) << "\"/>"
        << line(x(*least), y + 9.5, x(*most), y + 9.5, pen) << arrow(std::max(ms, *most), y)
        << label(std::max(x(ms), x(*most)) + (std::max(ms, *most) > longest ? 12 : 6), y + 13,
                 number(ms) + " ms")
        << "</g>\n";
  }
  svg << "</svg>\n";
  return svg.str();
}

// Both configs under the roof that the device's peak and its memory make; both axes are logarithmic.
std::string roofline_chart(const TunedShape& tuned) {
  constexpr double left = 70, right = 710, top = 26, bottom = 190;
  const Peak& peak = *tuned.peak;
  const double intensity = tuned.intensity(), ridge = peak.tflops / peak.bandwidth;
  const auto tflops = [&](double ms) { return tuned.work.flops / ms * 1e-9; };
  const double chosen = tflops(tuned.chosen_ms()), heuristic = tflops(tuned.heuristic_ms());
  const double least = std::min({chosen, heuristic, tuned.roof_tflops()}) / 3;
  const double first = std::max(std::min(intensity, ridge) / 10, least / peak.bandwidth);
  const double last = std::max(intensity, ridge) * 10;
  const auto x = [&](double value) {
    return left + std::log(value / first) / std::log(last / first) * (right - left);
  };
  const auto y = [&](double value) {
    return std::max(bottom - std::log(value / least) / std::log(peak.tflops / least) * (bottom - top), 8.0);
  };
  std::ostringstream svg;
  svg << "<svg viewBox=\"0 0 720 236\" role=\"img\" aria-label=\"roofline\">\n";
  for (const double value : powers_of_ten(first, last))
    svg << line(x(value), top, x(value), bottom + 4, grid)
        << label(x(value), bottom + 18, tick_label(value), centred);
  for (const double value : powers_of_ten(least, peak.tflops))
    svg << line(left - 4, y(value), right, y(value), grid)
        << label(left - 8, y(value) + 4, tick_label(value), at_end);
  svg << line(left, bottom, right, bottom, pen) << line(left, top, left, bottom, pen)
      << label((left + right) / 2, bottom + 38, "arithmetic intensity: FLOP for each byte of the tensors",
               centred)
      << label(16, (top + bottom) / 2, "TFLOP/s",
               std::string(centred) + " transform=\"rotate(-90 16 " + coordinate((top + bottom) / 2) + ")\"")
      << "<polyline points=\"" << coordinate(x(first)) << ',' << coordinate(y(peak.bandwidth * first)) << ' '
      << coordinate(x(ridge)) << ',' << coordinate(y(peak.tflops)) << ' ' << coordinate(x(last)) << ','
      << coordinate(y(peak.tflops)) << "\" fill=\"none\" stroke=\"currentColor\" stroke-width=\"2\"/>\n"
      << line(x(intensity), y(tuned.roof_tflops()), x(intensity), bottom,
              "stroke=\"var(--bar)\" stroke-dasharray=\"3 3\"")
      << "<circle cx=\"" << coordinate(x(intensity)) << "\" cy=\"" << coordinate(y(heuristic))
      << "\" r=\"7\" fill=\"none\" stroke=\"var(--heuristic)\" stroke-width=\"3\"/>\n<circle cx=\""
      << coordinate(x(intensity)) << "\" cy=\"" << coordinate(y(chosen))
      << "\" r=\"5\" fill=\"var(--chosen)\"/>\n"
      << label(right, y(peak.tflops) - 8, "arithmetic: " + number(peak.tflops) + " TFLOP/s", at_end)
      << label(left + 8, 14, "memory: " + number(peak.bandwidth) + " TB/s") << "</svg>\n<p>"
      << escaped("The chosen config reaches " + number(chosen) + " TFLOP/s at " + number(intensity) +
                 " FLOP a byte: " + number(100 * chosen / tuned.roof_tflops()) + "% of what the device's " +
                 (intensity < ridge ? "memory" : "arithmetic") + " allows (" + peak.source + ").")
      << "</p>\n";
  return svg.str();
}

void write_shape(std::ostream& page, const TunedShape& tuned) {
  const TuneRecord& record = tuned.result.record;
  page << "<h2>" << escaped(to_text(record.shape)) << ", " << escaped(tuned.target.str())
       << "</h2>\n<p><code>" << escaped(tuned.spec.to_json()) << "</code></p>\n";
  if (record.candidates.empty() || record.candidates.front().samples_ms.empty()) {
    page << "<p>Nothing was measured.</p>\n";
    return;
  }
  page << "<table><tr><th></th><th>config</th><th>ms</th><th>TFLOP/s</th></tr>\n";
  for (const auto& [name, config] :
       {std::pair("chosen", record.chosen), std::pair("heuristic", record.heuristic)}) {
    const double ms = ms_of(record, config);
    page << "<tr><td><span class=\"key\" style=\"background: var(--" << name << ")\"></span>" << name
         << "</td><td>" << escaped(to_text(config, tuned.target)) << "</td><td>" << number(ms) << "</td><td>"
         << number(tuned.work.flops / ms * 1e-9) << "</td></tr>\n";
  }
  page << "</table>\n<p>" << escaped(why_chosen(record, tuned.target)) << "</p>\n";
  if (tuned.peak && tuned.work.flops > 0) page << roofline_chart(tuned);
  page << candidates_chart(tuned);
  for (const TuneCandidate& c : record.candidates) {
    if (c.verdict != Verdict::wrong && c.verdict != Verdict::failed) continue;
    page << "<p>" << escaped(to_text(c.config, tuned.target)) << ": " << to_string(c.verdict) << ": "
         << escaped(c.reason) << "</p>\n";
  }
}

}  // namespace

double TunedShape::chosen_ms() const {
  return ms_of(result.record, result.record.chosen);
}
double TunedShape::heuristic_ms() const {
  return ms_of(result.record, result.record.heuristic);
}
double TunedShape::spread_percent() const {
  const TuneCandidate* const candidate = candidate_of(result.record, result.record.chosen);
  if (!candidate || candidate->samples_ms.empty()) return 0;
  std::vector<double> samples = candidate->samples_ms;
  std::sort(samples.begin(), samples.end());
  return flashjit::spread_percent(samples);
}
double TunedShape::gain_percent() const {
  return std::isfinite(chosen_ms()) && std::isfinite(heuristic_ms())
             ? 100 * (1 - chosen_ms() / heuristic_ms())
             : 0;
}
const char* TunedShape::state() const {
  return !result.measured ? "known" : result.record.complete ? "measured" : "not finished";
}

std::optional<Peak> peak_of(const Engine& engine, int num_threads) {
  if (engine.device().kind == Device::Kind::cpu) {
    const int threads = num_threads > 0 ? num_threads : available_cpus();
    Peak best{.bandwidth = measure_read_bandwidth(threads),
              .source = "measured: float32 multiply-adds in registers and reads of memory, " +
                        std::to_string(threads) + (threads == 1 ? " thread" : " threads")};
    for (int i = 0; i < 20; ++i) {  // other processes may disturb some measurements
      best.tflops =
          std::max(best.tflops, measure_fma_tflops(engine.target().vector_bytes(), threads, Clock::wall));
    }
    return best;
  }
  // Dense products with float32 accumulation; SXM boards unless the name says otherwise. The first sheet
  // whose name is part of the device's name counts.
  struct Sheet {
    const char* name;
    double tflops, bandwidth;
  };
  constexpr Sheet sheets[] = {
      {"GH200", 989, 4.0},      {"H200 NVL", 835, 4.8},        {"H200", 989, 4.8},  {"H100 NVL", 835, 3.9},
      {"H100 PCIe", 756, 2.0},  {"H100", 989, 3.35},           {"B200", 2250, 8.0}, {"L40S", 362, 0.864},
      {"A100 80GB", 312, 1.94}, {"A100-SXM4-80GB", 312, 2.04}, {"A100", 312, 1.56}};
  const std::string model = device_model(engine.device());
  for (const Sheet& sheet : sheets) {
    if (model.find(sheet.name) != std::string::npos)
      return Peak{sheet.tflops, sheet.bandwidth, std::string("data sheet: ") + sheet.name};
  }
  return std::nullopt;
}

Work tuned_work(const AttentionSpec& spec, const Shape& shape) {
  MaskTables tables = typical_tables(spec, shape);
  const Shape sized = with_totals(shape, tables);
  AttentionArgs args;
  for (MaskTable& table : tables) args.*table.argument = table.view();
  set_typical_numbers(spec, shape, args);
  double bytes = 0;
  for (const flashjit::Argument& argument : arguments) {
    if ((argument.role_in(spec) != Role::input && argument.role_in(spec) != Role::output) ||
        !has_argument(spec, argument))
      continue;
    const std::vector<std::int64_t> sizes = argument.layout.sizes(spec, sized);
    args.*argument.tensor() = Tensor::contiguous(nullptr, argument.dtype(spec), {}, sizes);
    double elements = 1;
    for (const std::int64_t size : sizes) elements *= static_cast<double>(size);
    bytes += elements * static_cast<double>(size_of(argument.dtype(spec)));
  }
  return {.flops = customary_flops(spec, args), .bytes = bytes};
}

std::string to_text(const Shape& s) {
  const std::string keys = s.seqlen_k == s.seqlen_q ? "" : "/" + std::to_string(s.seqlen_k);
  return std::to_string(s.batch) + " x " + std::to_string(s.seqlen_q) + keys + ", heads " +
         std::to_string(s.num_heads_q) + "/" + std::to_string(s.num_heads_kv);
}

Json tuned_json(const TunedShape& tuned) {
  const TuneRecord& record = tuned.result.record;
  Json candidates = Json::array();
  for (const TuneCandidate& c : record.candidates) {
    candidates.push_back({{"config", config_json(c.config)},
                          {"verdict", to_string(c.verdict)},
                          {"reason", c.reason},
                          {"ms", number_or_null(median_ms(c))},
                          {"samples_ms", c.samples_ms}});
  }
  return {{"spec", Json::parse(tuned.spec.to_json())},
          {"target", tuned.target.str()},
          {"shape", shape_json(record.shape)},
          {"bucket", shape_json(record.key.bucket)},
          {"state", tuned.state()},
          {"complete", record.complete},
          {"chosen", config_json(record.chosen)},
          {"heuristic", config_json(record.heuristic)},
          {"chosen_ms", number_or_null(tuned.chosen_ms())},
          {"heuristic_ms", number_or_null(tuned.heuristic_ms())},
          {"gain_percent", tuned.gain_percent()},
          {"spread_percent", tuned.spread_percent()},
          {"warning", tuned.result.warning},
          {"tflops", number_or_null(tuned.tflops())},
          {"intensity", tuned.intensity()},
          {"roof_tflops", tuned.peak ? number_or_null(tuned.roof_tflops()) : Json()},
          {"peak_share", tuned.peak ? number_or_null(tuned.tflops() / tuned.peak->tflops) : Json()},
          {"path", tuned.result.path},
          {"note", tuned.result.note},
          {"candidates", candidates}};
}

void write_tune_report(const std::string& file, const std::string& device,
                       const std::vector<TunedShape>& shapes, const std::vector<Rejection>& rejected) {
  std::ofstream page(file);
  page
      << page_head << "<h1>flashjit tune</h1>\n<p>" << escaped(device) << "; flashjit " << version()
      << ". A bar is the median of a config's samples, which take turns; the line on it spans all of them. A "
         "pale bar is a config that dropped out early. Another config replaces the heuristic one only if it "
         "is "
         "faster beyond noise in rounds after the selection.</p>\n";
  for (const TunedShape& shape : shapes) write_shape(page, shape);
  if (!rejected.empty()) {
    page << "<h2>Not tried</h2>\n<table>\n";
    for (const Rejection& r : rejected) {
      page << "<tr><td>" << escaped(to_text(r.config, shapes.front().target)) << "</td><td>"
           << escaped(r.reason) << "</td></tr>\n";
    }
    page << "</table>\n";
  }
  page << "</body></html>\n";
  page.close();
  if (!page)
    throw Error(ErrorCode::invalid_argument, "the report '" + file + "' cannot be written: " +
                                                 std::strerror(errno) + "; the results themselves are kept");
}

}  // namespace flashjit::command
