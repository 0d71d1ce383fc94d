#include "runtime/parallel/schedule.hpp"

#include <algorithm>
#include <utility>

namespace flashjit {
namespace {

using Seen = std::vector<char>;  // of each chunk of keys

// The chunks of a zigzag, or halves of the only chunk: while the first is computed with the rank's own keys,
// the others' arrive.
std::vector<RowPiece> pieces_of(SequenceLayout layout, int seqlen, int rank, int size) {
  std::vector<RowPiece> pieces;
  int first = 0;
  for (const SequenceChunk& chunk : sequence_chunks(layout, seqlen, rank, size)) {
    const int halves = layout != SequenceLayout::zigzag && size > 1 && chunk.length % 2 == 0 ? 2 : 1;
    const int length = chunk.length / halves;
    for (int i = 0; i < halves; ++i, first += length)
      pieces.push_back({first, {chunk.begin + i * length, length}});
  }
  return pieces;
}

class Scheduler {
 public:
  Scheduler(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole, SequenceLayout layout,
            int rank, int size)
      : rank_(rank),
        in_order_(by_order(spec, layout, size)),
        keys_(key_chunks(layout, whole.seqlen_k, size)) {
    for (int other = 0; other < size; ++other) {
      const std::vector<RowPiece> pieces = pieces_of(layout, whole.seqlen_q, other, size);
      std::vector<Seen> seen;
      for (const RowPiece& piece : pieces) {
        Seen& own = seen.emplace_back();
        for (const SequenceChunk& chunk : keys_.chunks) own.push_back(may_see(spec, args, piece.rows, chunk));
      }
      for (int c = 0; c < count(); ++c) {
        if (keys_.owner_of[at(c)] == other) continue;
        const bool any = std::any_of(seen.begin(), seen.end(), [&](const Seen& own) { return own[at(c)]; });
        if (any) made_.sent.push_back({c, other, keys_.chunks[at(c)]});
        if (!any && other == rank) ++made_.unseen;
      }
      if (other == rank) made_.pieces = pieces, seen_ = std::move(seen);
    }
    std::sort(made_.sent.begin(), made_.sent.end());
  }

  BackwardSchedule backward(OwnKeys when) {
    if (in_order_)
      in_order(when);
    else
      by_positions();
    return std::move(made_);
  }

 private:
  // Keys of ranks before this one are seen by all its rows, those between its chunks by the upper ones.
  void in_order(OwnKeys when) {
    const int length = keys_.chunks[0].length, upper = count() - 1 - rank_;
    if (length == 0) return;
    const auto own = [&](int piece, int pieces, int chunks) {
      made_.launches.push_back({piece, pieces, {0, chunks}, true, piece * length, 0});
    };
    if (when == OwnKeys::first) own(0, 2, 2);
    if (when == OwnKeys::around) own(0, 1, 1);
    // The ranks after this one send first.
    if (const ChunkRun between{rank_ + 1, upper}; between.first < between.end)
      made_.launches.push_back({1, 1, between, false, upper * length, between.first * length});
    if (rank_ > 0) made_.launches.push_back({0, 2, {0, rank_}, false, rank_ * length, 0});
    if (when == OwnKeys::around) own(1, 1, 2);
    if (when == OwnKeys::last) own(0, 2, 2);
  }

  void by_positions() {
    add(0, 1, own_alone(seen_[0]));
    bool together = true;  // all rows, side by side, with the same keys of others
    for (int piece = 1; piece < num_pieces(); ++piece) {
      const RowPiece &before = made_.pieces[at(piece - 1)], &own = made_.pieces[at(piece)];
      together = together && before.rows.begin + before.rows.length == own.rows.begin &&
                 others_alone(seen_[at(piece)]) == others_alone(seen_[0]);
    }
    if (together)
      add(0, num_pieces(), others_alone(seen_[0]));
    else
      for (int piece = num_pieces() - 1; piece >= 0; --piece) add(piece, 1, others_alone(seen_[at(piece)]));
    for (int piece = 1; piece < num_pieces(); ++piece) add(piece, 1, own_alone(seen_[at(piece)]));
  }

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  int count() const { return static_cast<int>(keys_.chunks.size()); }
  int num_pieces() const { return static_cast<int>(made_.pieces.size()); }
  bool is_own(int chunk) const { return keys_.owner_of[at(chunk)] == rank_; }

  Seen own_alone(Seen seen) const {
    for (int c = 0; c < count(); ++c) seen[at(c)] = seen[at(c)] && is_own(c);
    return seen;
  }
  Seen others_alone(Seen seen) const {
    for (int c = 0; c < count(); ++c) seen[at(c)] = seen[at(c)] && !is_own(c);
    return seen;
  }
  // A launch for each run of chunks side by side.
  void add(int piece, int pieces, const Seen& seen) {
    for (int c = 0; c < count(); ++c) {
      if (!seen[at(c)]) continue;
      ChunkRun run{c, c};
      bool own = true;
      for (; run.end < count() && seen[at(run.end)]; ++run.end) own = own && is_own(run.end);
      const int place = own ? keys_.place_of[at(c)] : c;
      made_.launches.push_back({piece,
                                pieces,
                                {place, place + run.end - c},
                                own,
                                made_.pieces[at(piece)].rows.begin,
                                keys_.chunks[at(c)].begin});
      c = run.end;
    }
  }

  const int rank_;
  const bool in_order_;
  const KeyChunks keys_;
  std::vector<Seen> seen_;  // by each piece of this rank's rows
  BackwardSchedule made_;
};

}  // namespace

KeyChunks key_chunks(SequenceLayout layout, int seqlen_k, int size) {
  KeyChunks all;
  const std::size_t count =
      static_cast<std::size_t>(size) * sequence_chunks(layout, seqlen_k, 0, size).size();
  all.chunks.resize(count);
  all.owner_of.resize(count);
  all.place_of.resize(count);
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<SequenceChunk> own = sequence_chunks(layout, seqlen_k, rank, size);
    for (std::size_t i = 0; i < own.size(); ++i) {
      // If the whole has no keys, all chunks begin at 0, and any order is right.
      const std::size_t c = layout == SequenceLayout::zigzag && i == 1
                                ? count - 1 - static_cast<std::size_t>(rank)
                                : static_cast<std::size_t>(rank);
      all.chunks[c] = own[i];
      all.owner_of[c] = rank;
      all.place_of[c] = static_cast<int>(i);
    }
  }
  return all;
}

BackwardSchedule backward_schedule(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole,
                                   SequenceLayout layout, int rank, int size, OwnKeys when) {
  return Scheduler(spec, args, whole, layout, rank, size).backward(when);
}

}  // namespace flashjit
