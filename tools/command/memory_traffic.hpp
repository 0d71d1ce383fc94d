// A model of the bytes that forward and backward on a CPU move between a cache and what lies behind it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit::command {

// A cache in which any line may have any place, and which replaces the line that was used longest ago. A line
// that is written is not read before, since kernels write whole lines.
class CacheModel {
 public:
  static constexpr std::int64_t line = 64;  // bytes

  // A cache of `capacity` bytes, before a memory of `memory` bytes.
  CacheModel(std::int64_t capacity, std::int64_t memory);
  // All lines of the bytes, the lowest first.
  void read(std::int64_t address, std::int64_t bytes) { use(address, bytes, true, false); }
  void write(std::int64_t address, std::int64_t bytes) { use(address, bytes, false, true); }
  void update(std::int64_t address, std::int64_t bytes) { use(address, bytes, true, true); }
  // Writes the lines of these bytes back that were written and are still in the cache.
  void write_back(std::int64_t address, std::int64_t bytes);

  std::int64_t bytes_read() const { return line * lines_read_; }
  std::int64_t bytes_written() const { return line * lines_written_; }

 private:
  struct Line {
    std::int32_t newer = absent, older = absent;  // neighbours in the order of use
    bool dirty = false;
  };
  static constexpr std::int32_t absent = -1, last = -2;  // last: no such neighbour

  void use(std::int64_t address, std::int64_t bytes, bool read, bool written);
  void use_line(std::int32_t number, bool read, bool written);
  void unlink(Line& at);

  std::int64_t places_, used_ = 0;
  std::int32_t newest_ = last, oldest_ = last;
  std::vector<Line> lines_;
  std::int64_t lines_read_ = 0, lines_written_ = 0;
};

// How the forward goes through its tensors: for each head, for each tile from the last rows on, for each
// block of keys that some row of the tile sees.
struct ForwardWalk {
  int tile_rows, packed_heads;  // rows of a tile; query heads whose rows share it
  int block_n;                  // keys of a block
  // Blocks of K and V of a head that stay packed in scratch for its next tiles. 0: keys are used in place.
  int packed_blocks;
  std::int64_t packed_block, scratch;  // bytes of one, and of the scratch of a tile beside these

  // Lines that the walk uses at most.
  double lines_used(const AttentionSpec& spec, const Shape& shape) const;
};

// How the backward goes through them: for each row, what it makes of O and dO; for each key/value head, for
// each block of keys, for each unit of rows that sees the block, in order, of each query head that shares the
// keys; and dQ, which is a sum in the workspace until then.
struct BackwardWalk {
  int unit_rows;         // rows of a unit
  int block_n;           // keys of a block
  std::int64_t scratch;  // bytes of a block and its unit
  std::int64_t dq_row;   // bytes of a row of sums

  double lines_used(const AttentionSpec& spec, const Shape& shape) const;
};

// Whether rows [first, first + rows) of a query head see any of the keys of a block.
using SeesBlock = std::function<bool(int batch, int head, int first, int rows, int block)>;

struct MovedBytes {
  std::int64_t read = 0, written = 0;  // bytes
};
// The traffic of one thread for each cache, all of which are empty at first; scratch that is left in a cache
// is never written back. The last one is the least possible: of the tensors alone, each line once.
// The tensors are dense, and lie one after the other.
std::vector<MovedBytes> forward_traffic(const AttentionSpec& spec, const Shape& shape,
                                        const ForwardWalk& walk, const SeesBlock& sees,
                                        const std::vector<std::int64_t>& capacities);
std::vector<MovedBytes> backward_traffic(const AttentionSpec& spec, const Shape& shape,
                                         const BackwardWalk& walk, const SeesBlock& sees,
                                         const std::vector<std::int64_t>& capacities);

}  // namespace flashjit::command
