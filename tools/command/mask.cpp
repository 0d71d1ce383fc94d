// flashjit mask: draws which tiles a mask keeps, as text or as an SVG picture.
#include <fstream>
#include <iostream>
#include <memory>

#include "codegen/spec/mask_rules.hpp"
#include "runtime/arguments/checks.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/mask_picture.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/command/workload.hpp"
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

// A drawing visits every pair, about 10 ns each, and holds every tile in memory.
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

std::string subtitle_of(const DrawingOptions& options, const Shape& shape, const verify::Sequence& sequence,
                        const AttentionArgs& args) {
  std::string text = std::to_string(shape.seqlen_q) + " query rows x " + std::to_string(shape.seqlen_k) +
                     " keys, in tiles of " + std::to_string(options.tile_m) + " x " +
                     std::to_string(options.tile_n);
  const auto add = [&](const char* name, std::optional<std::int64_t> value) {
    if (value) text += std::string("; ") + name + " " + std::to_string(*value);
  };
  add("window_left", args.window_left);
  add("window_right", args.window_right);
  add("num_sinks", args.num_sinks);
  if (args.seqlens_q) add("seqlens_q", sequence.seqlen_q);
  if (args.seqlens_k) add("seqlens_k", sequence.seqlen_k);
  if (shape.batch > 1) add("batch entry", options.entry);
  if (options.head > 0) add("query head", options.head);
  return text;
}

MaskPicture draw(const DrawingOptions& options) {
  AttentionSpec spec = read_spec(options.spec);
  options.masks.check({spec});
  spec.paged = false;
  spec.varlen = false;                    // the drawing is of one sequence, as long as the options say
  std::erase_if(spec.mask, is_of_masks);  // such lists change nothing
  const Shape shape = options.shape.shape(spec);
  check_shape(spec, shape);
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
  const NamedValues named = named_values(spec, shape, options.masks.named);
  std::vector<NamedArgument> names = named.scalars;
  for (const auto& [name, tensor] : named.tables) names.emplace_back(name, tensor.view());
  args.named = names;

  const verify::Sequence sequence = verify::sequences_of(spec, args)[static_cast<std::size_t>(options.entry)];
  MaskPicture picture{.title = mask_text(spec),
                      .subtitle = subtitle_of(options, shape, sequence, args),
                      .tile_m = options.tile_m,
                      .tile_n = options.tile_n,
                      .rows = shape.seqlen_q,
                      .keys = shape.seqlen_k,
                      .tiles = {}};
  const verify::SeenKeys sees(spec, args);
  constexpr int most_with_pairs = 256;
  if (std::max(shape.seqlen_q, shape.seqlen_k) <= most_with_pairs)
    picture.pairs.assign(static_cast<std::size_t>(shape.seqlen_q),
                         std::string(static_cast<std::size_t>(shape.seqlen_k), '.'));
  const auto tiles = static_cast<std::size_t>((shape.seqlen_k + options.tile_n - 1) / options.tile_n);
  std::vector<char> seen(static_cast<std::size_t>(shape.seqlen_k));
  for (int row = 0; row < shape.seqlen_q; row += options.tile_m) {
    const int rows = std::min(options.tile_m, shape.seqlen_q - row);
    std::vector<std::int64_t> kept(tiles);
    for (int i = row; i < row + rows; ++i) {
      sees.row(sequence, options.head, i, 0, seen);
      for (std::size_t key = 0; key < seen.size(); ++key) {
        if (!seen[key]) continue;
        ++kept[key / static_cast<std::size_t>(options.tile_n)];
        if (!picture.pairs.empty()) picture.pairs[static_cast<std::size_t>(i)][key] = '#';
      }
    }
    std::string& line = picture.tiles.emplace_back();
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const int keys = std::min(options.tile_n, shape.seqlen_k - static_cast<int>(tile) * options.tile_n);
      const bool all = kept[tile] == std::int64_t{rows} * keys;
      line += static_cast<char>(kept[tile] == 0 ? MaskPicture::skipped
                                : all           ? MaskPicture::full
                                                : MaskPicture::partial);
      picture.kept += kept[tile];
    }
  }
  return picture;
}

int show(const DrawingOptions& options) {
  const MaskPicture picture = draw(options);
  if (!options.svg.empty()) {
    std::ofstream file(options.svg);
    file << to_svg(picture);
    if (!file.flush()) throw Error(ErrorCode::invalid_argument, options.svg + " cannot be written");
  }
  if (options.json) {
    print_json({{"tile_m", picture.tile_m},
                {"tile_n", picture.tile_n},
                {"skipped", picture.count(MaskPicture::skipped)},
                {"partial", picture.count(MaskPicture::partial)},
                {"full", picture.count(MaskPicture::full)},
                {"kept", picture.kept_share()},
                {"computed", picture.computed_share()},
                {"tiles", picture.tiles}});
  } else {
    std::cout << (options.svg.empty() ? to_text(picture) : summary(picture) + "\n");
  }
  return exit_ok;
}

}  // namespace

Verb add_mask(const Arguments& parent) {
  const Arguments app =
      parent.add_subcommand("mask", "Draw which tiles of the score matrix a spec's mask keeps");
  const auto options = std::make_shared<DrawingOptions>();
  add_spec(app, options->spec);
  options->shape.add(app);
  options->masks.add(app);
  app.add_option("--tile-m", options->tile_m, "Query rows of a tile").between(1, 1024).capture_default_str();
  app.add_option("--tile-n", options->tile_n, "Keys of a tile").between(1, 1024).capture_default_str();
  app.add_option("--entry", options->entry, "Batch entry").at_least(0).capture_default_str();
  app.add_option("--head", options->head, "Query head").at_least(0).capture_default_str();
  app.add_option("--seed", options->seed, "Seed of the generated lengths, lists and trees")
      .capture_default_str();
  app.add_option("--svg", options->svg, "Write an SVG picture to this file instead of text");
  add_output(app, options->json);
  app.footer(
      "A kernel skips some tiles, computes others whole, and tests every pair of the rest. Up to 256 rows "
      "and\n"
      "keys the SVG picture also shows the kept pairs of the tested tiles.\n"
      "For the same options, run and bench generate the same lengths, block lists and trees.\n\n"
      "Examples:\n"
      "  flashjit mask '{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 64, \"mask\": [\"causal\", "
      "\"block_sparse\"]}' --seqlen-q 4096\n"
      "  flashjit mask spec.json --seqlen-q 2048 --window-left 500 --tile-n 64 --svg mask.svg\n");
  return {app, [options] { return show(*options); }};
}

}  // namespace flashjit::command
