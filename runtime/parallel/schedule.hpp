// Which launches compute a rank's rows, in which order. Keys of other ranks arrive while the first launch
// runs; in a backward the gradients of their keys leave while the last ones run.
#pragma once

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
  int piece = 0, pieces = 1;  // the first piece, and how many side by side
  ChunkRun keys;
  bool own = false;  // of keys of this rank alone, where they lie
};

struct Schedule {
  std::vector<RowPiece> pieces;
  std::vector<ScheduledLaunch> launches;
  std::vector<std::vector<int>> receivers;  // of each chunk of keys: the other ranks that see it
  std::vector<int> senders;                 // other ranks whose keys this rank sees
  int unseen = 0;                           // chunks of keys of other ranks that no row of this rank sees
};

// The whole's division: chunk c of the keys is at place place_of[c] of rank owner_of[c]'s chunks.
struct KeyChunks {
  std::vector<SequenceChunk> chunks;
  std::vector<int> owner_of, place_of;
};
KeyChunks key_chunks(SequenceLayout layout, int seqlen_k, int size);

// In the order of launches. A forward computes a later piece of rows with all its keys at once. A backward
// takes keys of others with as many rows as it can, after a first launch and before the last ones.
Schedule forward_schedule(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole,
                          SequenceLayout layout, int rank, int size);
Schedule backward_schedule(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole,
                           SequenceLayout layout, int rank, int size);

}  // namespace flashjit
