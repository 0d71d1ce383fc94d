#include "cache/key.hpp"

#include <gtest/gtest.h>
#include <random>
#include <set>

#include "codegen/base/digest.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

TEST(Digest, KnownValues) {
  // XXH3_128bits, seed 0, from the reference implementation's command: printf '' | xxhsum -H2.
  EXPECT_EQ(digest(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest("abc"), "06b05ab6733a618578af5f94892f3950");
  EXPECT_EQ(digest(std::string(1, '\0')).size(), digest_size);
}

TEST(CacheKey, EveryFieldChangesTheDigest) {
  CacheKey base;
  for (int i = 0; i < 8; ++i) base.add("label" + std::to_string(i), "value" + std::to_string(i));
  std::set<std::string> digests = {base.digest()};
  for (int changed = 0; changed < 8; ++changed) {
    CacheKey value, label, missing;
    for (int i = 0; i < 8; ++i) {
      const std::string l = "label" + std::to_string(i), v = "value" + std::to_string(i);
      value.add(l, i == changed ? v + "'" : v);
      label.add(i == changed ? l + "'" : l, v);
      if (i != changed) missing.add(l, v);
    }
    digests.insert({value.digest(), label.digest(), missing.digest()});
  }
  EXPECT_EQ(digests.size(), 1u + 3 * 8);
}

TEST(CacheKey, LengthsKeepFieldsApart) {
  const auto digest_of = [](std::initializer_list<CacheKeyField> fields) {
    CacheKey key;
    for (const CacheKeyField& field : fields) key.add(field.label, field.value);
    return key.digest();
  };
  EXPECT_NE(digest_of({{"ab", "c"}}), digest_of({{"a", "bc"}}));
  EXPECT_NE(digest_of({{"a", ""}, {"b", ""}}), digest_of({{"a", "b"}}));
  EXPECT_NE(digest_of({{"a", "b"}, {"c", "d"}}), digest_of({{"c", "d"}, {"a", "b"}}));
  EXPECT_NE(digest_of({{"a", std::string("\0", 1)}}), digest_of({{"a", ""}}));
  EXPECT_NE(digest_of({}), digest_of({{"", ""}}));
}

TEST(CacheKey, LabelsAreUnique) {
  CacheKey key;
  key.add("spec", "1");
  EXPECT_THROW(key.add("spec", "2"), Error);
}

TEST(CacheKey, SerializedRoundTrip) {
  CacheKey key;
  key.add("spec", "{}").add("empty", "").add("bytes", std::string("\0\xff\n", 3));
  EXPECT_EQ(CacheKey::parse(key.serialized()), key);
  EXPECT_EQ(CacheKey::parse(CacheKey().serialized()), CacheKey());
}

TEST(CacheKey, ParseRefusesWhatIsNotAKey) {
  CacheKey key;
  key.add("a", "b").add("c", "d");
  const std::string good = key.serialized();
  for (std::size_t size = 0; size < good.size(); ++size)
    EXPECT_FALSE(CacheKey::parse(good.substr(0, size))) << size;
  EXPECT_FALSE(CacheKey::parse(good + '\0'));
  std::string twice = good;
  twice[good.find('c')] = 'a';  // the same label again
  EXPECT_FALSE(CacheKey::parse(twice));
  // Counts and lengths far beyond the bytes are refused without allocating for them.
  EXPECT_FALSE(CacheKey::parse("\xff\xff\xff\xff"));
  EXPECT_FALSE(CacheKey::parse(std::string("\1\0\0\0\xff\xff\xff\xff", 8)));
  EXPECT_FALSE(CacheKey::parse(std::string("\1\0\0\0\1\0\0\0a\xff\xff\xff\x7f", 13)));
}

// Parsing compares labels with one another, so many of them in an untrusted file must not take long.
TEST(CacheKey, ParseRefusesMoreFieldsThanAnyKeyHas) {
  const auto key_of = [](int fields) {
    CacheKey key;
    for (int i = 0; i < fields; ++i) key.add(std::to_string(i), "");
    return key;
  };
  EXPECT_EQ(CacheKey::parse(key_of(1024).serialized()), key_of(1024));
  EXPECT_FALSE(CacheKey::parse(key_of(1025).serialized()));
}

TEST(CacheKey, ExplainDifference) {
  CacheKey a, b;
  a.add("spec", "x").add("compiler", "nvrtc 13.0").add("only a", "1");
  b.add("spec", "x").add("compiler", "nvrtc 12.9").add("only b", "2");
  EXPECT_EQ(explain_difference(a, b),
            "compiler: nvrtc 13.0 | nvrtc 12.9\nonly a: 1 | (absent)\nonly b: (absent) | 2\n");
  EXPECT_EQ(explain_difference(a, a), "");
  CacheKey ab, ba;
  ab.add("a", "").add("b", "");
  ba.add("b", "").add("a", "");
  EXPECT_NE(explain_difference(ab, ba), "");
}

}  // namespace
}  // namespace flashjit
