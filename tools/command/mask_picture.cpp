#include "tools/command/mask_picture.hpp"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "tools/command/report.hpp"
#include "tools/command/svg.hpp"

namespace flashjit::command {
namespace {

using Tile = MaskPicture::Tile;

struct Style {
  Tile tile;
  const char *id, *name, *colour, *block;
};
constexpr Style styles[] = {{Tile::full, "full", "kept whole", "#1f4e79", "█"},
                            {Tile::partial, "partial", "tested per element", "#a9cdef", "▒"},
                            {Tile::skipped, "skipped", "skipped", "#ededed", "·"}};
constexpr char kept_pair[] = "#2f76b8";  // inside a partial tile

// Path data of the cells of that kind, neighbours in a row joined. A cell is `height` rows of `width` keys.
std::string path_of(const std::vector<std::string>& lines, char kind, int height, int width,
                    const MaskPicture& picture) {
  std::ostringstream path;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    const int top = static_cast<int>(i) * height, bottom = std::min(top + height, picture.rows);
    for (std::size_t begin = 0; (begin = line.find(kind, begin)) != std::string::npos;) {
      const std::size_t end = std::min(line.find_first_not_of(kind, begin), line.size());
      const int left = static_cast<int>(begin) * width;
      const int right = std::min(static_cast<int>(end) * width, picture.keys);
      path << 'M' << left << ' ' << top << 'h' << right - left << 'v' << bottom - top << 'h' << left - right
           << 'z';
      begin = end;
    }
  }
  return path.str();
}

// The kept pairs that lie in partial tiles.
std::vector<std::string> pairs_of_partial_tiles(const MaskPicture& picture) {
  std::vector<std::string> pairs = picture.pairs;
  for (std::size_t row = 0; row < pairs.size(); ++row) {
    const std::string& tiles = picture.tiles[row / static_cast<std::size_t>(picture.tile_m)];
    for (std::size_t key = 0; key < pairs[row].size(); ++key)
      if (tiles[key / static_cast<std::size_t>(picture.tile_n)] != Tile::partial) pairs[row][key] = '.';
  }
  return pairs;
}

// Positions on an axis that get a label: ends of tiles, at most eight or so, and the axis's end.
std::vector<int> labelled(int size, int tile) {
  std::int64_t step = tile;
  while (size / step > 8) step *= 2;
  std::vector<int> positions;
  for (std::int64_t at = 0; at < size; at += step) positions.push_back(static_cast<int>(at));
  if (positions.size() > 1 && size - positions.back() < step * 2 / 3) positions.pop_back();
  positions.push_back(size);
  return positions;
}

std::string tiles_text(std::int64_t count) {
  return std::to_string(count) + (count == 1 ? " tile" : " tiles");
}

}  // namespace

std::int64_t MaskPicture::count(Tile tile) const {
  std::int64_t sum = 0;
  for (const std::string& line : tiles) sum += std::count(line.begin(), line.end(), tile);
  return sum;
}

double MaskPicture::kept_share() const {
  const double all = static_cast<double>(rows) * keys;
  return all > 0 ? static_cast<double>(kept) / all : 0;
}

double MaskPicture::computed_share() const {
  const std::int64_t computed = count(full) + count(partial), all = computed + count(skipped);
  return all > 0 ? static_cast<double>(computed) / static_cast<double>(all) : 0;
}

std::string summary(const MaskPicture& picture) {
  return number(100 * picture.kept_share()) + "% of all pairs are kept; " +
         number(100 * picture.computed_share()) + "% of the tiles are computed";
}

std::string to_svg(const MaskPicture& picture) {
  constexpr double width = 600, left = 84, plot = 480, least = 60;
  const int rows = picture.rows, keys = picture.keys;
  // Rows and keys have one scale, unless a side would be too narrow to see.
  const double scale = plot / std::max({rows, keys, 1});
  const double scale_x = std::max(scale, least / std::max(keys, 1));
  const double scale_y = std::max(scale, least / std::max(rows, 1));
  const double plot_width = keys * scale_x, plot_height = rows * scale_y;

  const std::vector<std::string> title = wrapped(picture.title, " ", 42);
  const std::vector<std::string> subtitle = wrapped(picture.subtitle, "; ", 60);
  const double top =
      20 + 24.0 * static_cast<double>(title.size()) + 20.0 * static_cast<double>(subtitle.size()) + 54;
  const double height = top + plot_height + 84;

  std::ostringstream svg;
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << coordinate(height)
      << "\" viewBox=\"0 0 " << width << ' ' << coordinate(height)
      << "\" font-family=\"system-ui, sans-serif\" font-size=\"15\" fill=\"#222\" role=\"img\">\n<title>"
      << escaped(picture.title) << "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
  const auto text = [&](double x, double y, const std::string& words, const std::string& more = "") {
    svg << "<text x=\"" << coordinate(x) << "\" y=\"" << coordinate(y) << '"' << more << '>' << escaped(words)
        << "</text>\n";
  };
  double y = 10;
  for (const std::string& line : title) text(20, y += 24, line, " font-size=\"19\" font-weight=\"bold\"");
  for (const std::string& line : subtitle) text(20, y += 20, line, " fill=\"#555\"");

  const std::string centred = " text-anchor=\"middle\"";
  text(left + plot_width / 2, top - 28, "keys", centred);
  for (const int at : labelled(keys, picture.tile_n))
    text(left + at * scale_x, top - 8, std::to_string(at), centred + " font-size=\"13\"");
  const std::string middle = coordinate(top + plot_height / 2);
  text(22, top + plot_height / 2, "query rows", centred + " transform=\"rotate(-90 22 " + middle + ")\"");
  for (const int at : labelled(rows, picture.tile_m))
    text(left - 8, top + at * scale_y + 4, std::to_string(at), " text-anchor=\"end\" font-size=\"13\"");

  char scales[64];
  std::snprintf(scales, sizeof scales, "%.5f %.5f", scale_x, scale_y);
  svg << "<g transform=\"translate(" << left << ' ' << coordinate(top) << ") scale(" << scales
      << ")\" shape-rendering=\"crispEdges\">\n";
  const auto path = [&](const char* id, const char* colour, const std::string& data) {
    if (!data.empty()) svg << "<path id=\"" << id << "\" fill=\"" << colour << "\" d=\"" << data << "\"/>\n";
  };
  for (const Style& style : styles)
    path(style.id, style.colour, path_of(picture.tiles, style.tile, picture.tile_m, picture.tile_n, picture));
  path("pairs", kept_pair, path_of(pairs_of_partial_tiles(picture), '#', 1, 1, picture));
  svg << "</g>\n";
  // White lines between tiles that are large enough to tell apart.
  if (picture.tile_m * scale_y >= 5 && picture.tile_n * scale_x >= 5) {
    svg << "<path stroke=\"#fff\" d=\"";
    for (int row = picture.tile_m; row < rows; row += picture.tile_m)
      svg << 'M' << left << ' ' << coordinate(top + row * scale_y) << 'h' << coordinate(plot_width);
    for (int key = picture.tile_n; key < keys; key += picture.tile_n)
      svg << 'M' << coordinate(left + key * scale_x) << ' ' << coordinate(top) << 'v'
          << coordinate(plot_height);
    svg << "\"/>\n";
  }
  svg << "<rect x=\"" << left << "\" y=\"" << coordinate(top) << "\" width=\"" << coordinate(plot_width)
      << "\" height=\"" << coordinate(plot_height) << "\" fill=\"none\" stroke=\"#888\"/>\n";

  const double legend = top + plot_height + 38;
  constexpr double columns[] = {20, 205, 440};
  for (std::size_t i = 0; i < std::size(styles); ++i) {
    const Style& style = styles[i];
    const std::string square = coordinate(columns[i]);
    svg << "<rect x=\"" << square << "\" y=\"" << coordinate(legend - 13)
        << "\" width=\"16\" height=\"16\" fill=\"" << style.colour << "\" stroke=\"#888\"/>\n";
    // The picture shows the kept pairs of partial tiles, and so does this square.
    if (style.tile == Tile::partial && !picture.pairs.empty())
      svg << "<path fill=\"" << kept_pair << "\" d=\"M" << square << ' ' << coordinate(legend - 13)
          << "v16h16z\"/>\n";
    text(columns[i] + 24, legend, style.name + (": " + std::to_string(picture.count(style.tile))));
  }
  text(20, legend + 28, summary(picture), " fill=\"#555\"");
  svg << "</svg>\n";
  return svg.str();
}

std::string to_text(const MaskPicture& picture) {
  std::ostringstream out;
  out << picture.title << '\n' << picture.subtitle << "\n\n";
  const std::string rows_title = "query rows";
  const auto tile_m = static_cast<std::size_t>(picture.tile_m);
  const auto tile_n = static_cast<std::size_t>(picture.tile_n);
  const std::size_t margin = rows_title.size() + 2;
  const std::size_t columns = picture.tiles.empty() ? 0 : picture.tiles.front().size();
  const std::size_t width = margin + 2 * columns <= 80 ? 2 : 1;
  const auto repeated = [&](const char* block) {
    std::string cell;
    for (std::size_t i = 0; i < width; ++i) cell += block;
    return cell;
  };

  // Labels of the keys, each above its tile's first column and a space or more from the next.
  std::size_t step = 1;
  const std::string largest = std::to_string((std::max<std::size_t>(columns, 1) - 1) * tile_n);
  while (step * width < largest.size() + 1) step *= 2;
  std::string labels;
  for (std::size_t j = 0; j < columns; j += step) {
    labels.resize(j * width, ' ');
    labels += std::to_string(j * tile_n);
  }
  out << std::string(margin, ' ') << "keys\n" << rows_title << "  " << labels << '\n';
  for (std::size_t i = 0; i < picture.tiles.size(); ++i) {
    const std::string label = std::to_string(i * tile_m);
    out << std::string(margin - 2 - std::min(label.size(), margin - 2), ' ') << label << "  ";
    for (const char tile : picture.tiles[i])
      for (const Style& style : styles)
        if (tile == style.tile) out << repeated(style.block);
    out << '\n';
  }
  out << '\n';
  for (const Style& style : styles)
    out << (&style == styles ? "" : "   ") << repeated(style.block) << ' ' << style.name << ": "
        << tiles_text(picture.count(style.tile));
  out << '\n' << summary(picture) << '\n';
  return out.str();
}

}  // namespace flashjit::command
