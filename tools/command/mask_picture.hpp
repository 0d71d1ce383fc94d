// Drawings of a mask: an SVG file, and text for a terminal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashjit::command {

// The mask of one batch entry and query head, cut into tiles.
struct MaskPicture {
  // A kernel does not compute a skipped tile, tests every pair of a partial one, and none of a full one.
  enum Tile : char { skipped = '.', partial = '+', full = '#' };

  std::string title;     // the spec's mask: "causal and padding"
  std::string subtitle;  // sizes, and the mask's run-time arguments
  int tile_m, tile_n;    // query rows and keys of a tile
  int rows, keys;
  std::vector<std::string> tiles;  // a string of Tile for every row of tiles
  // '#' for a kept pair, '.' for another: a string for every query row. Empty for large masks, whose pairs
  // would be smaller than a pixel.
  std::vector<std::string> pairs = {};
  std::int64_t kept = 0;  // pairs

  std::int64_t count(Tile tile) const;
  double kept_share() const;      // of all pairs
  double computed_share() const;  // of all tiles: those that are not skipped
};

// A picture 600 pixels wide with its own white background, readable on dark pages too.
std::string to_svg(const MaskPicture& picture);
// The same in block characters, two columns a tile where that fits into 80 columns.
std::string to_text(const MaskPicture& picture);
// "50.1% of all pairs are kept; 66.7% of the tiles are computed"
std::string summary(const MaskPicture& picture);

}  // namespace flashjit::command
