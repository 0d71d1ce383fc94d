#include "tools/command/speed_picture.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "tools/command/report.hpp"
#include "tools/command/svg.hpp"
#include "tools/verify/input_file.hpp"

namespace flashjit::command {
namespace {

struct LineStyle {
  const char *colour, *dashes;
};
// The first is for this run.
constexpr LineStyle line_styles[] = {{"#c62828", "none"},    {"#1565c0", "7 3"}, {"#616161", "2 3"},
                                     {"#2e7d32", "9 3 2 3"}, {"#6a1b9a", "4 2"}, {"#ef6c00", "12 3"}};

using Line = std::map<int, double>;  // seqlen: TFLOP/s

struct Panel {
  AttentionSpec spec;
  std::map<std::string, Line> lines;  // of each run
};

std::string panel_title(const AttentionSpec& spec) {
  std::string title = std::string(to_string(spec.dtype)) + ", head_dim " + std::to_string(spec.head_dim);
  if (spec.head_dim_v != 0 && spec.head_dim_v != spec.head_dim)
    title += "/" + std::to_string(spec.head_dim_v);
  title += ", " + mask_text(spec);
  if (spec.dropout) title += ", dropout";
  if (spec.varlen) title += ", varlen";
  return title;
}

}  // namespace

std::vector<SpeedRow> read_speed_rows(const std::string& path) {
  std::ifstream file = verify::open_input(path, "--baseline is a file that 'flashjit bench --json' printed");
  const Json json = Json::parse(file, nullptr, false);
  const auto refuse = [&](const std::string& why) -> void {
    throw Error(ErrorCode::invalid_argument,
                path + ": " + why + "; a file that 'flashjit bench --json' printed would work");
  };
  if (!json.is_object() || !json.contains("rows") || !json["rows"].is_array()) refuse("it has no \"rows\"");
  std::string about;
  for (const char* name : {"model", "target"})
    if (json.contains(name) && json[name].is_string())
      about += (about.empty() ? "" : ", ") + json[name].get<std::string>();
  std::vector<SpeedRow> rows;
  for (const Json& row : json["rows"]) {
    const auto has = [&](const char* name, bool right) {
      if (!right) refuse(std::string("a row has no ") + name);
    };
    has("\"spec\"", row.is_object() && row.contains("spec") && row["spec"].is_object());
    has("\"seqlen_q\"", row.contains("seqlen_q") && row["seqlen_q"].is_number_integer());
    has("\"tflops\"", row.contains("tflops") && row["tflops"].is_number());
    const std::string name = row.contains("name") && row["name"].is_string()
                                 ? row["name"].get<std::string>()
                                 : std::filesystem::path(path).stem().string();
    rows.push_back({name + (about.empty() ? "" : " (" + about + ")"),
                    AttentionSpec::from_json(row["spec"].dump()), row["seqlen_q"].get<int>(),
                    row["tflops"].get<double>()});
  }
  return rows;
}

bool same_panel(const AttentionSpec& a, const AttentionSpec& b) {
  AttentionSpec first = a.validated(), second = b.validated();
  first.config = second.config = {};
  first.lse = second.lse;
  return first == second;
}

std::string speed_svg(const std::string& title, const std::string& run, const std::vector<SpeedRow>& rows) {
  std::vector<Panel> panels;
  const auto panel_of = [&](const AttentionSpec& spec) {
    return std::find_if(panels.begin(), panels.end(),
                        [&](const Panel& panel) { return same_panel(panel.spec, spec); });
  };
  for (const SpeedRow& row : rows)
    if (row.run == run && panel_of(row.spec) == panels.end()) panels.push_back({row.spec, {}});
  std::vector<std::string> runs = {run};
  double most = 0;
  for (const SpeedRow& row : rows) {
    const auto panel = panel_of(row.spec);
    if (panel == panels.end() || row.seqlen_q < 1 || !std::isfinite(row.tflops)) continue;
    double& tflops = panel->lines[row.run][row.seqlen_q];
    tflops = std::max(tflops, row.tflops);
    most = std::max(most, tflops);
    if (std::find(runs.begin(), runs.end(), row.run) == runs.end()) runs.push_back(row.run);
  }
  const double unit = most < 1 ? 1000 : 1;  // of a TFLOP/s
  const char* const unit_name = most < 1 ? "GFLOP/s" : "TFLOP/s";
  const std::vector<double> values = ticks(most > 0 ? most * unit : 1, 5);

  const bool two_columns = panels.size() > 1;
  constexpr double left = 74, gap = 46, bottom_margin = 62;
  const double width = two_columns ? 230 : 500, height = two_columns ? 160 : 280;
  const auto title_of = [&](const Panel& panel) {
    return wrapped(panel_title(panel.spec), " ", two_columns ? 30 : 66);
  };
  std::size_t title_lines = 1;
  for (const Panel& panel : panels) title_lines = std::max(title_lines, title_of(panel).size());
  const double more_titles = 16.0 * static_cast<double>(title_lines - 1);
  const std::vector<std::string> heading = wrapped(title, " ", 58);
  const double legend = 26 + 22.0 * static_cast<double>(heading.size());
  const double top = legend + 21.0 * static_cast<double>(runs.size()) + 36 + more_titles;
  const double row_height = height + bottom_margin + 26 + more_titles;
  const double lines_of_panels = two_columns ? std::ceil(static_cast<double>(panels.size()) / 2) : 1;
  const double all = top + lines_of_panels * row_height - 20 - more_titles;

  std::ostringstream svg;
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"600\" height=\"" << coordinate(all)
      << "\" viewBox=\"0 0 600 " << coordinate(all)
      << "\" font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"#222\" role=\"img\">\n<title>"
      << escaped(title) << "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
  const auto text = [&](double x, double y, const std::string& words, const std::string& more = "") {
    svg << "<text x=\"" << coordinate(x) << "\" y=\"" << coordinate(y) << '"' << more << '>' << escaped(words)
        << "</text>\n";
  };
  const auto stroke = [](const LineStyle& style) {
    return std::string(" stroke=\"") + style.colour + "\" stroke-width=\"2\" stroke-dasharray=\"" +
           style.dashes + "\"";
  };
  const auto style_of = [&](const std::string& name) {
    const auto at = std::find(runs.begin(), runs.end(), name) - runs.begin();
    return line_styles[static_cast<std::size_t>(at) % std::size(line_styles)];
  };
  for (std::size_t i = 0; i < heading.size(); ++i)
    text(20, 30 + 22.0 * static_cast<double>(i), heading[i], " font-size=\"17\" font-weight=\"bold\"");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const double y = legend + 21.0 * static_cast<double>(i) + 6;
    svg << "<path d=\"M20 " << coordinate(y - 4) << "h34\" fill=\"none\"" << stroke(style_of(runs[i]))
        << "/>\n";
    text(62, y, runs[i], " font-size=\"14\"");
  }

  const std::string centred = " text-anchor=\"middle\"", at_end = " text-anchor=\"end\"";
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const Panel& panel = panels[i];
    const double x0 = left + (two_columns && i % 2 == 1 ? width + gap : 0);
    const std::size_t row = two_columns ? i / 2 : 0;
    const double y0 = top + static_cast<double>(row) * row_height;
    std::map<int, bool> seqlens;
    for (const auto& [name, line] : panel.lines)
      for (const auto& [seqlen, tflops] : line) seqlens[seqlen] = true;
    const double first = seqlens.empty() ? 1 : std::log(seqlens.begin()->first);
    const double range = seqlens.empty() ? 0 : std::log(seqlens.rbegin()->first) - first;
    // A single length is drawn in the middle.
    const auto x = [&](int seqlen) {
      return x0 + (range > 0 ? 12 + (std::log(seqlen) - first) / range * (width - 24) : width / 2);
    };
    const auto y = [&](double value) { return y0 + height - value / values.back() * height; };
    const std::vector<std::string> titles = title_of(panel);
    for (std::size_t line = 0; line < titles.size(); ++line)
      text(x0 + width / 2, y0 - 10 - 16.0 * static_cast<double>(titles.size() - 1 - line), titles[line],
           centred + " font-weight=\"bold\"");
    for (const double value : values) {
      svg << "<path stroke=\"#ddd\" d=\"M" << coordinate(x0) << ' ' << coordinate(y(value)) << 'h'
          << coordinate(width) << "\"/>\n";
      text(x0 - 6, y(value) + 4, tick_label(value), at_end);
    }
    double taken = -100;  // up to there labels of lengths
    for (const auto& [seqlen, present] : seqlens) {
      const std::string label = std::to_string(seqlen);
      const double half = 4.2 * static_cast<double>(label.size());
      if (x(seqlen) - half < taken) continue;
      taken = x(seqlen) + half + 4;
      text(x(seqlen), y0 + height + 17, label, centred);
    }
    text(x0 + width / 2, y0 + height + 36, "seqlen (logarithmic)", centred);
    if (!two_columns || i % 2 == 0) {
      const std::string middle = coordinate(y0 + height / 2);
      text(20, y0 + height / 2, unit_name, centred + " transform=\"rotate(-90 20 " + middle + ")\"");
    }
    svg << "<rect x=\"" << coordinate(x0) << "\" y=\"" << coordinate(y0) << "\" width=\"" << width
        << "\" height=\"" << height << "\" fill=\"none\" stroke=\"#888\"/>\n";
    for (const auto& [name, line] : panel.lines) {
      const LineStyle style = style_of(name);
      std::string points;
      for (const auto& [seqlen, tflops] : line)
        points += (points.empty() ? "" : " ") + coordinate(x(seqlen)) + "," + coordinate(y(tflops * unit));
      svg << "<polyline points=\"" << points << "\" fill=\"none\"" << stroke(style) << "/>\n";
      for (const auto& [seqlen, tflops] : line)
        svg << "<circle cx=\"" << coordinate(x(seqlen)) << "\" cy=\"" << coordinate(y(tflops * unit))
            << "\" r=\"3.5\" fill=\"" << style.colour << "\"><title>"
            << escaped(name + ", seqlen " + std::to_string(seqlen) + ": " + number(tflops * unit) + " " +
                       unit_name)
            << "</title></circle>\n";
    }
  }
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace flashjit::command
