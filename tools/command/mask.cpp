// flashjit mask: what a mask keeps of each tile, as text or as a picture.
#include <fstream>
#include <iostream>
#include <memory>

#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/random_masks.hpp"

namespace flashjit::command {
namespace {

struct DrawingOptions {
  std::string spec;
  ShapeOptions shape;
  MaskOptions masks;
  int tile_m = 128, tile_n = 128;
  int entry = 0, head = 0;
  std::uint64_t seed = 1;
  std::string svg;
  bool json = false;
};

// The tiles of one batch entry and head.
struct Drawing {
  enum Tile : char { skipped = '.', partial = '+', full = '#' };
  int tile_m, tile_n, rows, keys;
  std::vector<std::string> tiles;  // a line for every row of tiles
  std::int64_t kept = 0, counts[3] = {};

  double share() const {
    const double all = static_cast<double>(rows) * keys;
    return all > 0 ? static_cast<double>(kept) / all : 0;
  }
  std::int64_t count(Tile tile) const { return counts[tile == skipped ? 0 : tile == partial ? 1 : 2]; }
  // Of all pairs, those in tiles that are not skipped: what a kernel of such tiles computes.
  double computed() const {
    const std::int64_t all = counts[0] + counts[1] + counts[2];
    return all > 0 ? static_cast<double>(counts[1] + counts[2]) / static_cast<double>(all) : 0;
  }
};

// Every pair is looked at, some 10 ns each, and every tile is kept.
void require_drawable(const DrawingOptions& options, const Shape& shape) {
  const auto require = [](const char* what, std::optional<std::int64_t> size, std::int64_t most) {
    if (size && *size <= most) return;
    throw Error(ErrorCode::invalid_argument, std::string("a drawing has at most ") + std::to_string(most) +
                                                 " " + what + (size ? ", not " + std::to_string(*size) : "") +
                                                 ": shorter sequences or larger tiles would work");
  };
  constexpr int longest = 1 << 20;
  require("batch entries times heads", product_of({shape.batch, shape.num_heads_q}), 1 << 16);
  require("query rows", shape.seqlen_q, longest);
  require("keys", shape.seqlen_k, longest);
  require("pairs of rows and keys", product_of({shape.seqlen_q, shape.seqlen_k}), std::int64_t{1} << 32);
  const std::int64_t tiles_m = (shape.seqlen_q + options.tile_m - 1) / options.tile_m,
                     tiles_n = (shape.seqlen_k + options.tile_n - 1) / options.tile_n;
  require("tiles", tiles_m * tiles_n, 1 << 22);
}

Drawing draw(const DrawingOptions& options) {
  AttentionSpec spec = read_spec(options.spec);
  spec.varlen = false;  // one sequence, of the lengths given
  const Shape shape = options.shape.shape();
  require_drawable(options, shape);
  if (options.entry >= shape.batch || options.head >= shape.num_heads_q)
    throw Error(ErrorCode::invalid_argument, "there is no batch entry " + std::to_string(options.entry) +
                                                 " with head " + std::to_string(options.head) +
                                                 "; give --batch and --heads-q");
  verify::MaskData data = options.masks.generate(spec, shape, options.seed);
  AttentionArgs args;
  args.q = Tensor{.rank = 4, .shape = {shape.batch, shape.seqlen_q, shape.num_heads_q, spec.head_dim}};
  args.k = Tensor{.rank = 4, .shape = {shape.batch, shape.seqlen_k, shape.num_heads_kv, spec.head_dim}};
  for (MaskTable& table : data.tables) args.*table.argument = table.view();
  data.set_sizes(args);

  const verify::Sequence sequence = verify::sequences_of(spec, args)[static_cast<std::size_t>(options.entry)];
  Drawing drawing{options.tile_m, options.tile_n, shape.seqlen_q, shape.seqlen_k, {}};
  for (int row = 0; row < shape.seqlen_q; row += options.tile_m) {
    const int rows = std::min(options.tile_m, shape.seqlen_q - row);
    std::string& line = drawing.tiles.emplace_back();
    for (int key = 0; key < shape.seqlen_k; key += options.tile_n) {
      const int keys = std::min(options.tile_n, shape.seqlen_k - key);
      std::int64_t kept = 0;
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < keys; ++j)
          kept += verify::sees(spec, args, sequence, options.head, row + i, key + j);
      const bool all = kept == std::int64_t{rows} * keys;
      line += static_cast<char>(kept == 0 ? Drawing::skipped : all ? Drawing::full : Drawing::partial);
      ++drawing.counts[kept == 0 ? 0 : all ? 2 : 1];
      drawing.kept += kept;
    }
  }
  return drawing;
}

// A square of at most 8 pixels a tile: grey, nothing; dark, all; between, some.
void write_svg(const Drawing& drawing, const std::string& path) {
  constexpr int size = 8;
  std::ofstream file(path);
  const std::size_t columns = drawing.tiles.empty() ? 0 : drawing.tiles.front().size();
  file << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << columns * size << "\" height=\""
       << drawing.tiles.size() * size << "\">\n<rect width=\"100%\" height=\"100%\" fill=\"#eee\"/>\n";
  for (std::size_t i = 0; i < drawing.tiles.size(); ++i) {
    for (std::size_t j = 0; j < columns; ++j) {
      const char tile = drawing.tiles[i][j];
      if (tile == Drawing::skipped) continue;
      file << "<rect x=\"" << j * size << "\" y=\"" << i * size << "\" width=\"" << size - 1 << "\" height=\""
           << size - 1 << "\" fill=\"" << (tile == Drawing::full ? "#246" : "#7ac") << "\"/>\n";
    }
  }
  file << "</svg>\n";
  if (!file.flush()) throw Error(ErrorCode::invalid_argument, path + " cannot be written");
}

int show(const DrawingOptions& options) {
  const Drawing drawing = draw(options);
  if (!options.svg.empty()) write_svg(drawing, options.svg);
  const std::int64_t skipped = drawing.count(Drawing::skipped), partial = drawing.count(Drawing::partial),
                     full = drawing.count(Drawing::full);
  if (options.json) {
    print_json({{"tile_m", drawing.tile_m},
                {"tile_n", drawing.tile_n},
                {"skipped", skipped},
                {"partial", partial},
                {"full", full},
                {"kept", drawing.share()},
                {"computed", drawing.computed()},
                {"tiles", drawing.tiles}});
    return exit_ok;
  }
  if (options.svg.empty())
    for (const std::string& line : drawing.tiles) std::cout << line << '\n';
  std::cout << drawing.rows << " rows x " << drawing.keys << " keys in tiles of " << drawing.tile_m << " x "
            << drawing.tile_n << ": " << skipped << " skipped (.), " << partial << " partial (+), " << full
            << " full (#)\n"
            << number(100 * drawing.share()) << "% of all pairs are kept, "
            << number(100 * drawing.computed()) << "% of the tiles computed\n";
  return exit_ok;
}

}  // namespace

Verb add_mask(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("mask", "Draw what a spec's mask keeps");
  const auto options = std::make_shared<DrawingOptions>();
  add_spec(app, options->spec);
  options->shape.add(app);
  options->masks.add(app);
  app.add_option("--tile-m", options->tile_m, "Query rows of a tile").between(1, 1024).capture_default_str();
  app.add_option("--tile-n", options->tile_n, "Keys of a tile").between(1, 1024).capture_default_str();
  app.add_option("--entry", options->entry, "Batch entry").at_least(0).capture_default_str();
  app.add_option("--head", options->head, "Query head").at_least(0).capture_default_str();
  app.add_option("--seed", options->seed, "Of generated lengths, lists and trees").capture_default_str();
  app.add_option("--svg", options->svg, "Write a picture to this file instead");
  add_json(app, options->json);
  app.footer(
      "Lengths, block lists and trees are those that run and bench generate for the same options.\n\n"
      "Examples:\n"
      "  flashjit mask '{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 64, \"mask\": [\"causal\", "
      "\"block_sparse\"]}' --seqlen-q 4096\n"
      "  flashjit mask spec.json --seqlen-q 2048 --window-left 500 --tile-n 64 --svg mask.svg\n");
  return {app, [options] { return show(*options); }};
}

}  // namespace flashjit::command
