#include <algorithm>
#include <cstdint>
#include <utility>

#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "runtime/parallel/schedule.hpp"

namespace flashjit {
namespace {

int end_of(const SequenceChunk& chunk) {
  return chunk.begin + chunk.length;
}
std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

// Whether masks, scores and dropout only ask whether a key lies after a row, whatever their positions are.
bool asks_order_alone(const AttentionSpec& spec) {
  const bool causal = std::all_of(spec.mask.begin(), spec.mask.end(),
                                  [](const Mask& mask) { return std::holds_alternative<CausalMask>(mask); });
  return causal && !spec.mask.empty() && !spec.dropout && !formulas_read(spec, FormulaName::row) &&
         !formulas_read(spec, FormulaName::key) && !formulas_read(spec, FormulaName::position);
}
// The forward of one rank.
class Forward {
 public:
  Forward(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole, SequenceLayout layout,
          int rank, int size)
      : spec_(spec),
        args_(args),
        rank_(rank),
        size_(size),
        chunks_(sequence_chunks(layout, whole.seqlen_q, rank, size)),
        keys_(key_chunks(layout, whole.seqlen_k, size)) {
    if (by_order(spec, layout, size))
      in_order();
    else
      by_positions();
  }
  ForwardSchedule made;

 private:
  // ---- masks that ask for order alone ----

  // A first launch takes all that needs this rank's keys alone.
  void in_order() {
    const int length = keys_.chunks[0].length, upper = 2 * size_ - 1 - rank_;
    if (length == 0) return;
    // Keys of ranks before this one are seen by all its rows, those between its chunks by the upper ones.
    const SequenceChunk before{0, rank_ * length},
        between{(rank_ + 1) * length, (upper - rank_ - 1) * length};
    const bool all = before.length > 0;
    if (!all) add_own({0, length}, {0, length}, ForwardLaunch::whole_result);
    const SequenceChunk merged = all ? SequenceChunk{0, 2 * length} : SequenceChunk{length, length};
    add_own(merged, {0, 2 * length}, between.length > 0 || all ? 0 : ForwardLaunch::whole_result);
    const std::int64_t step = merged.length;
    // The ranks after this one send first.
    if (between.length > 0)
      made.launches.push_back({{length, length},
                               between,
                               false,
                               upper * length,
                               between.begin,
                               (all ? 2 : 1) * step + length - merged.begin});
    if (all) made.launches.push_back({merged, before, false, rank_ * length, 0, step});
    const std::size_t after = made.launches.size();
    const auto merge = [&](const SequenceChunk& rows, int parts) {
      if (parts > 1) made.merges.push_back({rows, rows.begin - merged.begin, step, parts, after});
    };
    if (all && between.length > 0) {
      merge({0, length}, 2);
      merge({length, length}, 3);
    } else {
      merge(merged, all || between.length > 0 ? 2 : 1);
    }
  }
  void add_own(const SequenceChunk& rows, const SequenceChunk& keys, std::int64_t place) {
    made.launches.push_back({rows, keys, true, rows.begin, keys.begin, place});
  }

  // ---- others ----

  // Rows side by side that lie side by side in the whole, too.
  struct Segment {
    int first;  // in the rank's tensors
    SequenceChunk rows;
  };
  using Keys = std::vector<std::pair<SequenceChunk, bool>>;  // of the whole, and whether all are this rank's

  // Rows that need this rank's keys alone come first. If there are none, the first rows are computed with
  // this rank's keys before those with others'. The rest sees all its keys at once.
  void by_positions() {
    std::vector<Segment> near, far;
    int first = 0;
    for (const SequenceChunk& chunk : chunks_) {
      const SequenceChunk reached = rows_that_see_others(chunk);
      const auto add = [&](std::vector<Segment>& to, int begin, int end) {
        if (begin < end) to.push_back({first + begin - chunk.begin, {begin, end - begin}});
      };
      add(near, chunk.begin, reached.begin);
      add(far, reached.begin, end_of(reached));
      add(near, end_of(reached), end_of(chunk));
      first += chunk.length;
    }
    unite(near);
    if (near.empty() && chunks_.size() == 1 && !far.empty() && far[0].rows.length % 2 == 0) {
      const int half = far[0].rows.length / 2;
      far = {{0, {far[0].rows.begin, half}}, {half, {far[0].rows.begin + half, half}}};
    }
    for (const Segment& segment : near) add(segment, seen_by(segment.rows, true, false));
    for (std::size_t i = 0; i < far.size(); ++i) {
      if (i > 0 || !near.empty()) {
        add(far[i], seen_by(far[i].rows, true, true));
        continue;
      }
      Keys keys = seen_by(far[i].rows, true, false);
      for (const auto& run : seen_by(far[i].rows, false, true)) keys.push_back(run);
      add(far[i], keys);
    }
  }
  // Makes one of neighbours that see a run of this rank's keys together.
  void unite(std::vector<Segment>& segments) const {
    for (std::size_t i = 1; i < segments.size();) {
      Segment& before = segments[i - 1];
      const SequenceChunk together{before.rows.begin, before.rows.length + segments[i].rows.length};
      if (end_of(before.rows) == segments[i].rows.begin &&
          before.first + before.rows.length == segments[i].first &&
          seen_by(together, true, false).size() == 1) {
        before.rows = together;
        segments.erase(segments.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }

  // Windows see parts of chunks, which are looked at by cells.
  int cell_of(const SequenceChunk& chunk) const {
    return find_mask<SlidingWindowMask>(spec_.mask) ? cut_unit(chunk.length) : std::max(chunk.length, 1);
  }
  // From the first cell that passes to the last one.
  template <class Test>
  SequenceChunk cells(const SequenceChunk& chunk, const Test& test) const {
    int begin = -1, end = 0;
    for (int from = 0, cell = cell_of(chunk); from < chunk.length; from += cell) {
      const int length = std::min(cell, chunk.length - from);
      if (!test(SequenceChunk{chunk.begin + from, length})) continue;
      if (begin < 0) begin = from;
      end = from + length;
    }
    return begin < 0 ? SequenceChunk{chunk.begin, 0} : SequenceChunk{chunk.begin + begin, end - begin};
  }
  SequenceChunk rows_that_see_others(const SequenceChunk& rows) const {
    return cells(rows, [&](const SequenceChunk& cell) {
      for (std::size_t c = 0; c < keys_.chunks.size(); ++c)
        if (keys_.owner_of[c] != rank_ && may_see(spec_, args_, cell, keys_.chunks[c])) return true;
      return false;
    });
  }
  // Keys that rows see, of this rank, of others, or of both.
  Keys seen_by(const SequenceChunk& rows, bool of_own, bool of_others) const {
    Keys runs;
    for (std::size_t c = 0; c < keys_.chunks.size(); ++c) {
      const bool own = keys_.owner_of[c] == rank_;
      if (own ? !of_own : !of_others) continue;
      const SequenceChunk seen = cells(
          keys_.chunks[c], [&](const SequenceChunk& cell) { return may_see(spec_, args_, rows, cell); });
      if (seen.length == 0) continue;
      if (!runs.empty() && end_of(runs.back().first) == seen.begin) {
        runs.back().first.length += seen.length;
        runs.back().second = runs.back().second && own;
      } else {
        runs.emplace_back(seen, own);
      }
    }
    return runs;
  }

  void add(const Segment& segment, Keys keys) {
    if (segment.rows.length == 0) return;
    // Rows that see no key are written, too.
    if (keys.empty()) keys.emplace_back(keys_.chunks[at(rank_)], true);
    const SequenceChunk rows{segment.first, segment.rows.length};
    std::int64_t place = 0;
    for (const auto& [seen, own] : keys) {
      const SequenceChunk read = own ? SequenceChunk{own_place(seen.begin), seen.length} : seen;
      made.launches.push_back({rows, read, own, segment.rows.begin, seen.begin,
                               keys.size() == 1 ? ForwardLaunch::whole_result : place});
      place += rows.length;
    }
    if (keys.size() > 1)
      made.merges.push_back({rows, 0, rows.length, static_cast<int>(keys.size()), made.launches.size()});
  }
  int own_place(int key) const {
    for (std::size_t c = 0; c < keys_.chunks.size(); ++c) {
      const SequenceChunk& chunk = keys_.chunks[c];
      if (keys_.owner_of[c] == rank_ && chunk.begin <= key && (key < end_of(chunk) || chunk.length == 0))
        return keys_.place_of[c] * chunk.length + key - chunk.begin;
    }
    return 0;
  }

  const AttentionSpec& spec_;
  const AttentionArgs& args_;
  const int rank_, size_;
  const std::vector<SequenceChunk> chunks_;  // of rows
  const KeyChunks keys_;
};

}  // namespace

bool by_order(const AttentionSpec& spec, SequenceLayout layout, int size) {
  return size > 1 && layout == SequenceLayout::zigzag && asks_order_alone(spec);
}

GatheredSchedule gathered_schedule(int seqlen, int rank, int size) {
  const int length = seqlen / (2 * size);
  GatheredSchedule made{.early_rows = length,
                        .late_keys = 2 * (size - 1 - rank) * length,
                        .keys = (2 * (size - 1) - rank) * length,
                        .chunks = {}};
  int place = made.keys;
  const auto add = [&](int chunk) { made.chunks.push_back({chunk, place -= length}); };
  for (int owner = rank - 1; owner >= 0; --owner) add(owner);
  for (int owner = size - 1; owner > rank; --owner) add(2 * size - 1 - owner), add(owner);
  return made;
}

int cut_unit(int length) {
  constexpr int most_cells = 16, rows_of_tile = 128;
  const auto up = [](int n, int to) { return (n + to - 1) / to; };
  return std::max(up(length, most_cells * rows_of_tile), 1) * rows_of_tile;
}

std::int64_t places_of_parts(const AttentionSpec& spec, const Shape& whole, SequenceLayout layout, int size) {
  const std::int64_t rows = whole.seqlen_q / size;
  if (size == 1) return 0;
  if (by_order(spec, layout, size)) return (size == 2 ? 2 : 3) * rows;
  const auto* window = find_mask<SlidingWindowMask>(spec.mask);
  const int intervals = window && window->sinks ? 2 : 1;  // of keys that a row sees
  const bool zigzag = layout == SequenceLayout::zigzag;
  // A rank's chunks divide them.
  const int runs = zigzag ? std::min(intervals + 4, 2 * size) : std::min(intervals + 2, size);
  const bool halves = zigzag || rows % 2 == 0;
  return std::max(runs * (halves ? rows / 2 : rows), intervals > 1 ? 2 * rows : 0);
}

ForwardSchedule forward_schedule(const AttentionSpec& spec, const AttentionArgs& args, const Shape& whole,
                                 SequenceLayout layout, int rank, int size) {
  const KeyChunks keys = key_chunks(layout, whole.seqlen_k, size);
  ForwardSchedule schedule;
  for (int reader = 0; reader < size; ++reader) {
    ForwardSchedule of_reader = Forward(spec, args, whole, layout, reader, size).made;
    for (std::size_t c = 0; c < keys.chunks.size(); ++c) {
      int begin = end_of(keys.chunks[c]), end = keys.chunks[c].begin;
      for (const ForwardLaunch& launch : of_reader.launches) {
        const int from = std::max(launch.keys.begin, keys.chunks[c].begin),
                  to = std::min(end_of(launch.keys), end_of(keys.chunks[c]));
        if (launch.own || from >= to) continue;
        begin = std::min(begin, from), end = std::max(end, to);
      }
      if (begin < end)
        schedule.sent.push_back({static_cast<int>(c), reader, {begin, end - begin}});
      else if (reader == rank && keys.owner_of[c] != rank)
        ++schedule.unseen;
    }
    if (reader == rank) {
      schedule.launches = std::move(of_reader.launches);
      schedule.merges = std::move(of_reader.merges);
    }
  }
  std::sort(schedule.sent.begin(), schedule.sent.end());
  return schedule;
}

}  // namespace flashjit
