// Which launches compute a rank's rows, in which order. Keys of other ranks arrive while the first launches
// run; in a backward the gradients of their keys leave while the last ones run.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/parallel/layout.hpp"

namespace flashjit {

// Chunks [first, end) of the whole, in the order of the sequence. A launch sees them as one sequence of keys.
struct ChunkRun {
  int first = 0, end = 0;
  bool has(int chunk) const { return first <= chunk && chunk < end; }
  bool operator==(const ChunkRun&) const = default;
};

// Rows of a rank that lie side by side in the whole and in its tensors.
struct RowPiece {
  int first = 0;       // in the rank's tensors
  SequenceChunk rows;  // of the whole
};

struct ScheduledLaunch {
  int piece = 0, pieces = 1;               // the first piece, and how many side by side
  ChunkRun keys;                           // of this rank's chunks if `own`, else of the whole's
  bool own = false;                        // of keys of this rank alone, where they lie
  int row_position = 0, key_position = 0;  // that masks take for the first ones
};

// Keys of a chunk that go to the gathered keys of a rank, from the chunk's owner.
struct SentKeys {
  int chunk, to;
  SequenceChunk keys;  // of the whole
  bool operator==(const SentKeys&) const = default;
  // By chunks, then by readers.
  bool operator<(const SentKeys& other) const {
    return chunk != other.chunk ? chunk < other.chunk : to < other.to;
  }
};

// Whether masks ask, in this layout of several ranks, only which key comes after which row. Then the keys of
// a rank are, for its own rows, as if they were a sequence of their own, and its rows see all keys of
// another's chunk, or none.
bool by_order(const AttentionSpec& spec, SequenceLayout layout, int size);

// Both passes have these.
struct Exchanged {
  std::vector<SentKeys> sent;  // of all chunks, in their order
  int unseen = 0;              // chunks of keys of other ranks that no row of this rank sees
};

struct BackwardSchedule : Exchanged {
  std::vector<RowPiece> pieces;
  std::vector<ScheduledLaunch> launches;
};

// Rows of partial results have places in a room of their own.
struct ForwardLaunch {
  SequenceChunk rows;  // in the rank's tensors
  SequenceChunk keys;  // the same if `own`, else in the gathered keys of the whole
  bool own;
  int row_position, key_position;          // that masks take for the first ones
  std::int64_t place = whole_result;       // of the first row, if its result is partial
  static constexpr int whole_result = -1;  // it goes to the rank's tensors
};
struct RowMerge {
  SequenceChunk rows;
  std::int64_t place, step;  // of the first row in the first part, and from a part to the next
  int parts;
  std::size_t after;  // so many launches
};
struct ForwardSchedule : Exchanged {
  std::vector<ForwardLaunch> launches;
  std::vector<RowMerge> merges;
};

// A forward of causal masks in layout zigzag whose kernel takes keys of two pairs of tensors: one launch. The
// keys of a rank are, for its own rows, as if they were a sequence of their own; rows see all keys of other
// chunks, or none. So chunks of others come before them in any order, those first that only the rows of the
// rank's second chunk see.
struct GatheredSchedule {
  int early_rows, late_keys;  // the rows of the first chunk, and the keys that they do not see
  int keys;                   // of others
  // In the order in which they are sent, which is that in which tiles read them: from the last place down.
  struct Placed {
    int chunk, place;  // of its first key among the gathered ones
  };
  std::vector<Placed> chunks;
};
GatheredSchedule gathered_schedule(int seqlen, int rank, int size);

// The whole's division: chunk c of the keys is at place place_of[c] of rank owner_of[c]'s chunks.
struct KeyChunks {
  std::vector<SequenceChunk> chunks;
  std::vector<int> owner_of, place_of;
};
KeyChunks key_chunks(SequenceLayout layout, int seqlen_k, int size);

// Positions at which rows and keys of a chunk may be cut, beside its middle: few, so that the device has them
// before a launch.
int cut_unit(int length);

// Places that partial results of a rank's rows need at most.
std::int64_t places_of_parts(const AttentionSpec& spec, const Shape& whole, SequenceLayout layout, int size);

// In the order of launches.
ForwardSchedule forward_schedule(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole,
                                 SequenceLayout layout, int rank, int size);
// When a rank computes with its own keys: while those of others arrive, while the gradients of others' keys
// leave, or some at both times. Masks that ask for more than the order of keys have the last alone.
enum class OwnKeys { first, last, around };
// Takes keys of others with as many rows as it can.
BackwardSchedule backward_schedule(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole,
                                   SequenceLayout layout, int rank, int size, OwnKeys when);

}  // namespace flashjit
