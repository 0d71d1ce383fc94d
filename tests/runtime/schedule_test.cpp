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

// "rows of the whole x chunks of keys", in brackets where they lie in the rank's own tensors.
std::string text(const Schedule& schedule) {
  std::string all;
  for (const ScheduledLaunch& launch : schedule.launches) {
    const SequenceChunk &first = schedule.pieces[static_cast<std::size_t>(launch.piece)].rows,
                        &last =
                            schedule.pieces[static_cast<std::size_t>(launch.piece + launch.pieces - 1)].rows;
    const std::string keys = std::to_string(launch.keys.first) + "-" + std::to_string(launch.keys.end);
    all += (all.empty() ? "" : ", ") + std::to_string(first.begin) + "-" +
           std::to_string(last.begin + last.length) + " x " + (launch.own ? "[" + keys + "]" : keys);
  }
  return all;
}

using Layout = SequenceLayout;

// Chunk c of four has rows 16 c to 16 c + 15.
TEST(Schedule, CausalZigzagOfTwoRanks) {
  const AttentionSpec spec = with_masks({CausalMask{}});
  EXPECT_EQ(text(forward_schedule(spec, {}, whole, Layout::zigzag, 0, 2)), "0-16 x [0-1], 48-64 x 0-4");
  EXPECT_EQ(text(forward_schedule(spec, {}, whole, Layout::zigzag, 1, 2)),
            "16-32 x [1-2], 16-32 x 0-1, 32-48 x 0-3");
  EXPECT_EQ(text(backward_schedule(spec, {}, whole, Layout::zigzag, 0, 2)),
            "0-16 x [0-1], 48-64 x 1-3, 48-64 x [0-1], 48-64 x [3-4]");
  EXPECT_EQ(text(backward_schedule(spec, {}, whole, Layout::zigzag, 1, 2)),
            "16-32 x [1-2], 16-48 x 0-1, 32-48 x [1-3]");
  const Schedule schedule = forward_schedule(spec, {}, whole, Layout::zigzag, 1, 2);
  EXPECT_EQ(schedule.receivers, (std::vector<std::vector<int>>{{1}, {0}, {0}, {}}));
  EXPECT_EQ(schedule.senders, std::vector<int>{0});
  EXPECT_EQ(schedule.unseen, 1);
}

TEST(Schedule, EveryKeySeenByContiguousRanks) {
  const AttentionSpec spec = with_masks({});
  EXPECT_EQ(text(forward_schedule(spec, {}, whole, Layout::contiguous, 1, 4)),
            "16-24 x [1-2], 16-24 x 0-1, 16-24 x 2-4, 24-32 x 0-4");
  EXPECT_EQ(text(backward_schedule(spec, {}, whole, Layout::contiguous, 1, 4)),
            "16-24 x [1-2], 16-32 x 0-1, 16-32 x 2-4, 24-32 x [1-2]");
  EXPECT_EQ(text(forward_schedule(spec, {}, whole, Layout::contiguous, 0, 1)), "0-64 x [0-1]");
}

// Rows 32 to 47 see keys 27 to 47 and the first 4.
TEST(Schedule, WindowsSendAndLaunchWhatIsSeen) {
  AttentionArgs args;
  args.window_left = 5, args.window_right = 0;
  const AttentionSpec window = with_masks({SlidingWindowMask{}});
  const Schedule without = forward_schedule(window, args, whole, Layout::contiguous, 2, 4);
  EXPECT_EQ(text(without), "32-40 x [2-3], 32-40 x 1-2, 40-48 x [2-3]");
  EXPECT_EQ(without.receivers, (std::vector<std::vector<int>>{{1}, {2}, {3}, {}}));
  EXPECT_EQ(without.senders, std::vector<int>{1});
  args.num_sinks = 4;
  const Schedule sinks =
      forward_schedule(with_masks({SlidingWindowMask{.sinks = true}}), args, whole, Layout::contiguous, 2, 4);
  EXPECT_EQ(text(sinks), "32-40 x [2-3], 32-40 x 0-2, 40-48 x 0-1, 40-48 x [2-3]");
  EXPECT_EQ(sinks.receivers[0], (std::vector<int>{1, 2, 3}));
}

// Rows without keys are written, by a launch of keys that they do not see.
TEST(Schedule, RowsWithoutKeys) {
  AttentionArgs args;
  args.window_left = -20, args.window_right = 60;
  const Schedule schedule =
      forward_schedule(with_masks({SlidingWindowMask{}}), args, whole, Layout::contiguous, 3, 4);
  EXPECT_EQ(text(schedule), "48-56 x [3-4], 56-64 x [3-4]");
}

}  // namespace
}  // namespace flashjit
