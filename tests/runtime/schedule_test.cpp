// Which launches a rank of several makes, and what ranks send each other.
#include "runtime/parallel/schedule.hpp"

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

namespace flashjit {
namespace {

constexpr Shape whole{.batch = 1, .seqlen_q = 64, .seqlen_k = 64, .num_heads_q = 1, .num_heads_kv = 1};

AttentionSpec with_masks(std::vector<Mask> mask) {
  return AttentionSpec{.head_dim = 32, .mask = std::move(mask)}.validated();
}

std::string span(int begin, int length) {
  return std::to_string(begin) + "-" + std::to_string(begin + length);
}
std::string span(const SequenceChunk& chunk) {
  return span(chunk.begin, chunk.length);
}

// "rows of the whole x chunks of keys", or in brackets of the rank's own tensors.
std::string text(const BackwardSchedule& schedule) {
  std::string all;
  for (const ScheduledLaunch& launch : schedule.launches) {
    const SequenceChunk &first = schedule.pieces[static_cast<std::size_t>(launch.piece)].rows,
                        &last =
                            schedule.pieces[static_cast<std::size_t>(launch.piece + launch.pieces - 1)].rows;
    const std::string keys = span(launch.keys.first, launch.keys.end - launch.keys.first);
    all += (all.empty() ? "" : ", ") + span(first.begin, last.begin + last.length - first.begin) + " x " +
           (launch.own ? "[" + keys + "]" : keys);
  }
  return all;
}
// "the rank's rows x keys", in brackets its own, "to" the place of a part; merges as "rows of parts from
// place by step".
std::string text(const ForwardSchedule& schedule) {
  std::string all;
  std::size_t merged = 0;
  for (std::size_t i = 0; i < schedule.launches.size(); ++i) {
    const ForwardLaunch& launch = schedule.launches[i];
    all += (all.empty() ? "" : ", ") + span(launch.rows) + " x " +
           (launch.own ? "[" + span(launch.keys) + "]" : span(launch.keys));
    if (launch.place >= 0) all += " to " + std::to_string(launch.place);
    for (; merged < schedule.merges.size() && schedule.merges[merged].after == i + 1; ++merged) {
      const RowMerge& merge = schedule.merges[merged];
      all += ", " + span(merge.rows) + " of " + std::to_string(merge.parts) + " from " +
             std::to_string(merge.place) + " by " + std::to_string(merge.step);
    }
  }
  return all;
}
// "row position/key position" of each launch.
template <class Schedule>
std::string positions(const Schedule& schedule) {
  std::string all;
  for (const auto& launch : schedule.launches)
    all += (all.empty() ? "" : ", ") + std::to_string(launch.row_position) + "/" +
           std::to_string(launch.key_position);
  return all;
}
// "keys > rank".
std::string sent(const Exchanged& schedule) {
  std::string all;
  for (const SentKeys& keys : schedule.sent)
    all += (all.empty() ? "" : ", ") + span(keys.keys) + " > " + std::to_string(keys.to);
  return all;
}

using Layout = SequenceLayout;

// "early rows/late keys/keys:", then the chunks and their places in the order of arrival.
std::string text(const GatheredSchedule& schedule) {
  std::string all = std::to_string(schedule.early_rows) + "/" + std::to_string(schedule.late_keys) + "/" +
                    std::to_string(schedule.keys) + ":";
  for (const auto& [chunk, place] : schedule.chunks)
    all += " " + std::to_string(chunk) + " at " + std::to_string(place);
  return all;
}

// Chunk c of eight has keys 8 c to 8 c + 7; rank 1 has chunks 1 and 6. The rows of chunk 1 see chunk 0 alone
// of others, those of chunk 6 chunks 2 to 5, too.
TEST(Schedule, GatheredKeys) {
  EXPECT_EQ(text(gathered_schedule(64, 0, 2)), "16/32/32: 2 at 16 1 at 0");
  EXPECT_EQ(text(gathered_schedule(64, 1, 2)), "16/0/16: 0 at 0");
  EXPECT_EQ(text(gathered_schedule(64, 0, 4)), "8/48/48: 4 at 40 3 at 32 5 at 24 2 at 16 6 at 8 1 at 0");
  EXPECT_EQ(text(gathered_schedule(64, 1, 4)), "8/32/40: 0 at 32 4 at 24 3 at 16 5 at 8 2 at 0");
  EXPECT_EQ(text(gathered_schedule(64, 3, 4)), "8/0/24: 2 at 16 1 at 8 0 at 0");
  EXPECT_EQ(text(gathered_schedule(0, 1, 2)), "0/0/0: 0 at 0");
}

// Chunk c of four has rows 16 c to 16 c + 15.
TEST(Schedule, CausalZigzagOfTwoRanks) {
  const AttentionSpec spec = with_masks({CausalMask{}});
  const ForwardSchedule first = forward_schedule(spec, {}, whole, Layout::zigzag, 0, 2),
                        second = forward_schedule(spec, {}, whole, Layout::zigzag, 1, 2);
  EXPECT_EQ(text(first), "0-16 x [0-16], 16-32 x [0-32] to 0, 16-32 x 16-48 to 16, 16-32 of 2 from 0 by 16");
  EXPECT_EQ(positions(first), "0/0, 16/0, 48/16");
  EXPECT_EQ(text(second), "0-32 x [0-32] to 0, 0-32 x 0-16 to 32, 0-32 of 2 from 0 by 32");
  EXPECT_EQ(positions(second), "0/0, 16/0");
  EXPECT_EQ(sent(second), "0-16 > 1, 16-32 > 0, 32-48 > 0");
  EXPECT_EQ(second.unseen, 1);
  EXPECT_EQ(places_of_parts(spec, whole, Layout::zigzag, 2), 64);
}

// A rank's rows are named by their first and last ones. Two chunks of its own are one sequence of keys.
TEST(Schedule, BackwardOfCausalZigzag) {
  const AttentionSpec spec = with_masks({CausalMask{}});
  const auto of = [&](int rank, int size, OwnKeys when) {
    return backward_schedule(spec, {}, whole, Layout::zigzag, rank, size, when);
  };
  EXPECT_EQ(text(of(0, 2, OwnKeys::first)), "0-64 x [0-2], 48-64 x 1-3");
  EXPECT_EQ(positions(of(0, 2, OwnKeys::first)), "0/0, 48/16");
  EXPECT_EQ(text(of(0, 2, OwnKeys::last)), "48-64 x 1-3, 0-64 x [0-2]");
  EXPECT_EQ(text(of(0, 2, OwnKeys::around)), "0-16 x [0-1], 48-64 x 1-3, 48-64 x [0-2]");
  EXPECT_EQ(positions(of(0, 2, OwnKeys::around)), "0/0, 48/16, 16/0");
  const BackwardSchedule second = of(1, 2, OwnKeys::around);
  EXPECT_EQ(text(second), "16-32 x [0-1], 16-48 x 0-1, 32-48 x [0-2]");
  EXPECT_EQ(positions(second), "0/0, 16/0, 16/0");
  EXPECT_EQ(sent(second), "0-16 > 1, 16-32 > 0, 32-48 > 0");
  EXPECT_EQ(second.unseen, 1);
  EXPECT_EQ(text(of(1, 4, OwnKeys::last)), "48-56 x 2-6, 8-56 x 0-1, 8-56 x [0-2]");
  EXPECT_EQ(positions(of(1, 4, OwnKeys::last)), "48/16, 8/0, 0/0");
}

// Chunk c of eight has rows 8 c to 8 c + 7; rank 1 has chunks 1 and 6.
TEST(Schedule, CausalZigzagOfFourRanks) {
  const AttentionSpec spec = with_masks({CausalMask{}});
  const ForwardSchedule second = forward_schedule(spec, {}, whole, Layout::zigzag, 1, 4);
  EXPECT_EQ(text(second),
            "0-16 x [0-16] to 0, 8-16 x 16-48 to 40, 0-16 x 0-8 to 16, 0-8 of 2 from 0 by 16, "
            "8-16 of 3 from 8 by 16");
  EXPECT_EQ(positions(second), "0/0, 48/16, 8/0");
  EXPECT_EQ(places_of_parts(spec, whole, Layout::zigzag, 4), 48);
}

// Positions tell: the first rows are computed with this rank's keys, the others with all at once.
TEST(Schedule, CausalZigzagWithDropout) {
  AttentionSpec spec = with_masks({CausalMask{}});
  spec.dropout = true;
  EXPECT_EQ(text(forward_schedule(spec, {}, whole, Layout::zigzag, 0, 2)), "0-16 x [0-16], 16-32 x 0-64");
  const ForwardSchedule second = forward_schedule(spec, {}, whole, Layout::zigzag, 1, 2);
  EXPECT_EQ(text(second), "0-16 x [0-16] to 0, 0-16 x 0-16 to 16, 0-16 of 2 from 0 by 16, 16-32 x 0-48");
  EXPECT_EQ(positions(second), "16/16, 16/0, 32/0");
  EXPECT_EQ(sent(second), "0-16 > 0, 0-16 > 1, 16-32 > 0, 16-32 > 1, 32-48 > 0, 32-48 > 1, 48-64 > 0");
  const BackwardSchedule backward = backward_schedule(spec, {}, whole, Layout::zigzag, 1, 2, OwnKeys::first);
  EXPECT_EQ(text(backward), "16-32 x [0-1], 16-48 x 0-1, 32-48 x [0-2]");
  EXPECT_EQ(positions(backward), "16/16, 16/0, 32/16");
}

TEST(Schedule, EveryKeySeenByContiguousRanks) {
  const AttentionSpec spec = with_masks({});
  EXPECT_EQ(text(forward_schedule(spec, {}, whole, Layout::contiguous, 1, 4)),
            "0-8 x [0-16] to 0, 0-8 x 0-16 to 8, 0-8 x 32-64 to 16, 0-8 of 3 from 0 by 8, 8-16 x 0-64");
  EXPECT_EQ(places_of_parts(spec, whole, Layout::contiguous, 4), 24);
  EXPECT_EQ(text(backward_schedule(spec, {}, whole, Layout::contiguous, 1, 4, OwnKeys::around)),
            "16-24 x [0-1], 16-32 x 0-1, 16-32 x 2-4, 24-32 x [0-1]");
  EXPECT_EQ(text(forward_schedule(spec, {}, whole, Layout::contiguous, 0, 1)), "0-64 x [0-64]");
}

// Rows 32 to 47 see keys 27 to 47 and the first 4.
TEST(Schedule, WindowsSendAndLaunchWhatIsSeen) {
  AttentionArgs args;
  args.window_left = 5, args.window_right = 0;
  const AttentionSpec window = with_masks({SlidingWindowMask{}});
  const ForwardSchedule without = forward_schedule(window, args, whole, Layout::contiguous, 2, 4);
  EXPECT_EQ(text(without), "0-8 x [0-16] to 0, 0-8 x 16-32 to 8, 0-8 of 2 from 0 by 8, 8-16 x [0-16]");
  EXPECT_EQ(sent(without), "0-16 > 1, 16-32 > 2, 32-48 > 3");
  args.num_sinks = 4;
  const ForwardSchedule sinks =
      forward_schedule(with_masks({SlidingWindowMask{.sinks = true}}), args, whole, Layout::contiguous, 2, 4);
  EXPECT_EQ(text(sinks),
            "0-8 x [0-16] to 0, 0-8 x 0-32 to 8, 0-8 of 2 from 0 by 8, 8-16 x 0-16 to 0, 8-16 x [0-16] to 8, "
            "8-16 of 2 from 0 by 8");
}

// A rank sends only the keys of long chunks that are seen: rows 4,096 to 4,695 see keys from 3,496 on.
TEST(Schedule, WindowsCutChunks) {
  AttentionArgs args;
  args.window_left = 600, args.window_right = 0;
  Shape longer = whole;
  longer.seqlen_q = longer.seqlen_k = 8192;
  const ForwardSchedule schedule =
      forward_schedule(with_masks({SlidingWindowMask{}}), args, longer, Layout::contiguous, 1, 2);
  EXPECT_EQ(text(schedule), "768-4096 x [0-4096], 0-768 x 3328-4864");
  EXPECT_EQ(positions(schedule), "4864/4096, 4096/3328");
  EXPECT_EQ(sent(schedule), "3328-4096 > 1, 4096-4864 > 1");
}

// Rows without keys are written, by a launch of keys that they do not see.
TEST(Schedule, RowsWithoutKeys) {
  AttentionArgs args;
  args.window_left = -20, args.window_right = 60;
  const ForwardSchedule schedule =
      forward_schedule(with_masks({SlidingWindowMask{}}), args, whole, Layout::contiguous, 3, 4);
  EXPECT_EQ(text(schedule), "0-16 x [0-16]");
}

}  // namespace
}  // namespace flashjit
