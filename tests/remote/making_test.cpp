// Stores that compile, in memory: what is believed, waited for and given up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "tests/remote/memory_store.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

struct Answered {
  Making making;
  std::string bytes{}, why{};
  milliseconds pause{0};
};

// Says what it is told to, in order, and then that it goes on.
struct Script {
  bool makes = true;
  std::deque<Answered> answers;
  int asked = 0, taken = 0;
};

class ScriptedStore : public RemoteStore {
 public:
  explicit ScriptedStore(Script& script) : script_(script) {}
  Answer get(const std::string&, std::string&, std::string&) override { return Answer::no; }
  Answer put(const std::string&, std::string_view, std::string&) override {
    return ++script_.taken, Answer::yes;
  }
  Answer exists(const std::string&, std::string&) override { return Answer::no; }
  Answer lease(const std::string&, const std::string&, milliseconds, std::string&) override {
    return ++script_.taken, Answer::yes;
  }
  bool makes() const override { return script_.makes; }
  Making make(const std::string& request, std::string& bytes, milliseconds& pause,
              std::string& why) override {
    EXPECT_EQ(request, "the request");
    ++script_.asked;
    if (script_.answers.empty()) return Making::going_on;
    const Answered answer = script_.answers.front();
    script_.answers.pop_front();
    bytes = answer.bytes;
    why = answer.why;
    pause = answer.pause;
    return answer.making;
  }

 private:
  Script& script_;
};

class RemoteMaking : public ::testing::Test {
 protected:
  RemoteMaking() {
    RemoteLimits limits;
    limits.fetch.patience = milliseconds(300);
    options =
        RemoteCache::Options{parse_remotes("http://a http://b"),
                             [this](const RemoteAddress& address) {
                               return std::make_unique<ScriptedStore>(address.url == "http://a" ? a : b);
                             },
                             verifier(Trust::parse(key.trusted())),
                             key.sign(),
                             "",
                             limits};
    a.makes = false;
  }
  RemoteCache::Made make(RemoteCache& cache, bool patient = true, const std::function<bool()>& goes_on = {}) {
    const auto name_of = [](const std::string& bytes) {
      CacheEntry found;
      return decode_entry(bytes, found).empty() ? DiskCache::name(found.key) : std::string();
    };
    return cache.make(
        "v3/request", "the request", name_of, patient, [this](const std::string& why) { note += why + "\n"; },
        goes_on);
  }

  const NamedKey key{"service"};
  const std::string good = bytes_of(signed_by(key, some_entry("code")));
  Script a, b;  // b compiles
  RemoteCache::Options options;
  std::string note;
};

TEST_F(RemoteMaking, WaitsForTheStoreThatCompiles) {
  b.answers = {
      {Making::going_on}, {Making::busy, {}, {}, milliseconds(20)}, {Making::going_on}, {Making::made, good}};
  RemoteCache cache(options);
  const RemoteCache::Made made = make(cache);
  EXPECT_TRUE(made.asked);
  EXPECT_EQ(made.got.bytes, good);
  EXPECT_EQ(b.asked, 4);
  EXPECT_EQ(a.asked, 0);
  EXPECT_EQ(note, "");
}

TEST_F(RemoteMaking, NobodyCompiles) {
  b.makes = false;
  RemoteCache cache(options);
  EXPECT_FALSE(make(cache).asked);
  EXPECT_EQ(b.asked, 0);
}

TEST_F(RemoteMaking, BelievesWhatATrustedKeyHasSigned) {
  const NamedKey other("other");
  for (const std::string& bad : {bytes_of(some_entry("code")), bytes_of(signed_by(other, some_entry("code"))),
                                 good.substr(0, good.size() - 1), std::string("nonsense"), std::string()}) {
    b.answers = {{Making::made, bad}};
    RemoteCache cache(options);
    EXPECT_NE(make(cache).got.answer, Answer::yes);
    EXPECT_THAT(note, HasSubstr("made what is"));
    note.clear();
  }
}

TEST_F(RemoteMaking, SaysWhyAStoreRefuses) {
  b.answers = {{Making::refused, {}, R"({"error": {"code": "x", "message": "no such dtype"}})"}};
  RemoteCache cache(options);
  EXPECT_NE(make(cache).got.answer, Answer::yes);
  EXPECT_THAT(note, HasSubstr("http://b does not make the kernel: no such dtype"));
  for (const char* text : {"<html>", "[]", R"({"error": 1})", R"({"error": {"message": 1}})", ""}) {
    b.answers = {{Making::refused, {}, text}};
    note.clear();
    make(cache);
    EXPECT_THAT(note, HasSubstr(std::string("does not make the kernel: ") + text));
  }
}

TEST_F(RemoteMaking, IsBounded) {
  RemoteCache cache(options);
  EXPECT_NE(make(cache).got.answer, Answer::yes);  // goes on for ever
  EXPECT_THAT(note, HasSubstr("within 300 ms"));
  note.clear();
  b.answers = {{Making::busy, {}, {}, milliseconds(60'000)}};
  EXPECT_NE(make(cache).got.answer, Answer::yes);
  EXPECT_THAT(note, HasSubstr("within 300 ms"));
  note.clear();
  b.answers = {{Making::busy, {}, {}, milliseconds(1)}};
  EXPECT_NE(make(cache, false).got.answer, Answer::yes);
  EXPECT_THAT(note, HasSubstr("is busy"));
  b.asked = 0;
  EXPECT_NE(make(cache, true, [] { return false; }).got.answer, Answer::yes);
  EXPECT_EQ(b.asked, 1);
}

TEST_F(RemoteMaking, OneLostAnswerIsNoReasonToGiveUpWhatIsBeingMade) {
  options.limits.fetch.patience = milliseconds(5000);
  RemoteCache cache(options);
  b.answers = {{Making::going_on}, {Making::failed, {}, "late"}, {Making::made, good}};
  EXPECT_EQ(make(cache).got.bytes, good);
  // A store that never answered is given up at once.
  RemoteCache another(options);
  b.answers = {{Making::failed, {}, "late"}, {Making::made, good}};
  EXPECT_NE(make(another).got.answer, Answer::yes);
  // It is not asked again for a while.
  EXPECT_THAT(note, HasSubstr("http://b: late"));
  b.asked = 0;
  EXPECT_NE(make(another).got.answer, Answer::yes);
  EXPECT_EQ(b.asked, 0);
}

// Neither leases nor objects go to a store that compiles.
TEST_F(RemoteMaking, IsNotWrittenTo) {
  options.stores = parse_remotes("http://b");
  RemoteCache cache(options);
  const CacheEntry entry = some_entry("code");
  const std::string name = DiskCache::name(entry.key);
  b.answers = {{Making::refused, {}, "no"}};
  const RemoteCache::Fetched fetched =
      cache.fetch(name, cache.fetch_limits(), {}, {}, {}, [&] { return make(cache); });
  EXPECT_NE(fetched.got.answer, Answer::yes);
  EXPECT_FALSE(fetched.lease.held());
  EXPECT_FALSE(cache.may_store(name));
  cache.put(name, bytes_of(entry));
  EXPECT_TRUE(cache.flush(milliseconds(5000)));
  EXPECT_EQ(b.taken, 0);
}

}  // namespace
}  // namespace flashjit::testing
