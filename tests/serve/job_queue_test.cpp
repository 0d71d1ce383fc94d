// Whose turn it is, and who is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tools/serve/job_queue.hpp"

namespace flashjit::serve {
namespace {

using Added = JobQueue::Added;
using ::testing::ElementsAre;

// Starts and ends all that is queued, one job at a time.
std::vector<std::string> order_of(JobQueue& queue) {
  std::vector<std::string> order;
  while (const std::optional<std::string> id = queue.start()) {
    order.push_back(*id);
    queue.remove(*id);
  }
  return order;
}

TEST(JobQueue, ClientsTakeTurnsHoweverMuchTheyAsk) {
  JobQueue queue({.running = 1});
  for (const char* id : {"a1", "a2", "a3", "a4"}) EXPECT_EQ(queue.add(id, "a"), Added::yes);
  for (const char* id : {"b1", "b2"}) EXPECT_EQ(queue.add(id, "b"), Added::yes);
  EXPECT_EQ(queue.add("c1", "c"), Added::yes);
  EXPECT_THAT(order_of(queue), ElementsAre("a1", "b1", "c1", "a2", "b2", "a3", "a4"));
  EXPECT_EQ(queue.queued(), 0u);
}

TEST(JobQueue, EqualJobsRunOnceAtTheFirstTurnOfAnyClient) {
  JobQueue queue({.running = 1});
  queue.add("first", "a");
  queue.add("shared", "a");
  queue.add("shared", "b");
  EXPECT_EQ(queue.queued(), 2u);
  EXPECT_THAT(order_of(queue), ElementsAre("first", "shared"));
  EXPECT_EQ(queue.start(), std::nullopt);

  // Running already: nothing is queued again.
  queue.add("shared", "a");
  EXPECT_EQ(queue.start(), "shared");
  EXPECT_EQ(queue.add("shared", "b"), Added::yes);
  EXPECT_EQ(queue.queued(), 0u);
  queue.remove("shared");
  EXPECT_EQ(queue.start(), std::nullopt);
}

TEST(JobQueue, RunsNoMoreThanItsLimits) {
  JobQueue queue({.running = 3, .running_of_client = 2});
  for (const char* id : {"a1", "a2", "a3"}) queue.add(id, "a");
  EXPECT_EQ(queue.start(), "a1");
  EXPECT_EQ(queue.start(), "a2");
  EXPECT_EQ(queue.start(), std::nullopt);  // two of one client
  for (const char* id : {"b1", "b2"}) queue.add(id, "b");
  EXPECT_EQ(queue.start(), "b1");
  EXPECT_EQ(queue.start(), std::nullopt);  // three in all
  queue.remove("a1");
  EXPECT_EQ(queue.start(), "a3");
  EXPECT_EQ(queue.running(), 3u);
}

TEST(JobQueue, RefusesBeyondItsLimitsAndTakesAgainAfterwards) {
  JobQueue queue({.running = 1, .queued = 3, .queued_of_client = 2});
  queue.add("a1", "a");
  queue.add("a2", "a");
  EXPECT_EQ(queue.add("a3", "a"), Added::client_full);
  EXPECT_EQ(queue.room_for("a"), Added::client_full);
  EXPECT_EQ(queue.add("a1", "a"), Added::yes);  // has it already
  EXPECT_EQ(queue.add("b1", "b"), Added::yes);
  EXPECT_EQ(queue.add("c1", "c"), Added::full);
  EXPECT_EQ(queue.add("b1", "c"), Added::yes);  // no further job
  EXPECT_EQ(queue.add("b1", "a"), Added::client_full);
  EXPECT_EQ(queue.start(), "a1");
  EXPECT_EQ(queue.add("c1", "c"), Added::yes);
  queue.remove("a2");  // not wanted any more
  EXPECT_EQ(queue.queued_of("a"), 0u);
  EXPECT_EQ(queue.add("a3", "a"), Added::yes);
}

}  // namespace
}  // namespace flashjit::serve
