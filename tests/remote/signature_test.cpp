// Signatures of entries and records, lists of trusted keys, and folders that ask for signatures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <functional>
#include <random>

#include "cache/bundle.hpp"
#include "cache/tune_store.hpp"
#include "tests/remote/keys.hpp"

namespace flashjit::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.message();
  }
  return {};
}

TEST(Signature, TheLineHasOneForm) {
  const Signature signature{"2026-11-26T05:00:00Z", std::string(64, 'a'), std::string(128, '0')};
  const std::string line = to_line(signature);
  ASSERT_EQ(line.size(), signature_line_size);
  ASSERT_TRUE(parse_signature(line));
  EXPECT_EQ(to_line(*parse_signature(line)), line);
  for (std::size_t i = 0; i < line.size(); ++i) {
    for (const char wrong : {'~', '/', ':'}) {  // the last two stand beside the digits
      std::string other = line;
      other[i] = wrong;
      EXPECT_EQ(parse_signature(other).has_value(), line[i] == wrong) << i;
    }
  }
  EXPECT_EQ(split_signature("body" + line).body, "body");
  EXPECT_EQ(split_signature("body" + line).line, line);
  EXPECT_THAT(std::string(split_signature(line.substr(1)).line), IsEmpty());
}

// The first key of RFC 8032, section 7.1.
TEST(Signature, KeysAreEd25519) {
  Scratch folder;
  write_file(folder / "key", "secret rfc=9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60\n");
  ASSERT_EQ(::chmod((folder / "key").c_str(), 0600), 0);
  EXPECT_EQ(read_signing_key(folder / "key").public_key,
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
}

TEST(Signature, SecretKeysAreKept) {
  const NamedKey key("ci");
  EXPECT_THAT(error_of([&] { make_signing_key(key.path(), "again"); }), HasSubstr("never overwritten"));
  ASSERT_EQ(::chmod(key.path().c_str(), 0640), 0);
  EXPECT_THAT(error_of([&] { read_signing_key(key.path()); }), HasSubstr("others may read it"));
  ASSERT_EQ(::chmod(key.path().c_str(), 0600), 0);
  const std::string text = read_file(key.path());
  for (const std::string& bad : {text.substr(1), text.substr(0, 40), text + "x", std::string("secret =\n")}) {
    write_file(key.path(), bad);
    const std::string message = error_of([&] { read_signing_key(key.path()); });
    EXPECT_THAT(message, HasSubstr("is no signing key"));
    EXPECT_THAT(message, Not(HasSubstr(text.substr(12, 16))));
  }
}

TEST(Trust, ListsAndFiles) {
  const std::string a(64, 'a'), b(64, 'b');
  const Trust both = Trust::parse("first=" + a + ":second=" + b);
  EXPECT_THAT(both.distrust(a), IsEmpty());
  EXPECT_THAT(both.distrust(std::string(64, 'c')), HasSubstr("unknown key ccc"));
  Scratch folder;
  write_file(folder / "trust", "# the fleet's\n  first=" + a + "  # until 2027\n\n-second=" + b + "\n");
  for (const std::string& list :
       {folder / "trust" + ":second=" + b, "second=" + b + ":" + folder / "trust"}) {
    const Trust trust = Trust::parse(list);
    EXPECT_THAT(trust.distrust(a), IsEmpty());
    EXPECT_THAT(trust.distrust(b), HasSubstr("key second, which is revoked"));
    EXPECT_THAT(trust.names(), ElementsAre(Pair(a, "first")));
    EXPECT_THAT(trust.revoked(), ElementsAre(Pair(b, "second")));
  }
  EXPECT_THAT(Trust::parse(std::string(64, 'n') + "=" + a).distrust(a), IsEmpty());
  for (const std::string& bad :
       {"first=" + a + "0", std::string("first"), "=" + a, std::string("-"), "fi rst=" + a,
        "first=" + std::string(64, 'A'), "--first=" + a, std::string(65, 'n') + "=" + a})
    EXPECT_THAT(error_of([&] { Trust::parse(bad); }), HasSubstr("is no key")) << bad;
  EXPECT_THAT(error_of([&] { Trust::parse(folder / "missing"); }), HasSubstr("No such file"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of([&] { Trust::parse(folder / "pipe"); }), HasSubstr("not a regular file"));
  write_file(folder / "large", "# ");
  std::filesystem::resize_file(folder / "large", (1 << 20) + 1);
  EXPECT_THAT(error_of([&] { Trust::parse(folder / "large"); }), HasSubstr("larger than a list of keys"));
  ASSERT_EQ(::chmod((folder / "trust").c_str(), 0666), 0);
  EXPECT_THAT(error_of([&] { Trust::parse(folder / "trust"); }), HasSubstr("others may write to it"));
}

// Nothing but the bytes, the name and the time that a trusted key signed.
TEST(Signature, VerifiesNothingElse) {
  const NamedKey key("ci"), stranger("stranger"), fired("fired");
  const Verifier verify =
      verifier(Trust::parse(key.trusted() + ":" + fired.trusted() + ":" + fired.revoked()));
  const CacheEntry entry = signed_by(key, some_entry(std::string(4096, 'c')));
  const std::string name = DiskCache::name(entry.key), good = bytes_of(entry);
  ASSERT_THAT(verify(name, good), IsEmpty());

  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    std::string bad = good;
    bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    ASSERT_THAT(verify(name, bad), Not(IsEmpty())) << i;
  }
  for (std::size_t size = 0; size < good.size(); size += 97)
    ASSERT_THAT(verify(name, good.substr(0, size)), Not(IsEmpty())) << size;
  EXPECT_THAT(verify(name + "x", good), HasSubstr("not what key ci has signed"));
  EXPECT_THAT(verify(name, bytes_of(some_entry("code"))), HasSubstr("not signed"));
  EXPECT_THAT(verify(name, bytes_of(signed_by(stranger, entry))), HasSubstr("unknown key"));
  EXPECT_THAT(verify(name, bytes_of(signed_by(fired, some_entry("code")))), HasSubstr("revoked"));
  // Other code, with checksums that are right, and the signature of the first.
  CacheEntry other = some_entry("other code");
  other.signature = entry.signature;
  EXPECT_THAT(verify(name, bytes_of(other)), HasSubstr("not what key ci has signed"));
}

struct SigningFolder {
  SigningFolder() {
    disk.use_signatures(verifier(Trust::parse(key.trusted())), {});
    records.use_signatures(disk.verifier(), {});
    write_file(folder / "signed", "");
  }
  const NamedKey key{"ci"};
  Scratch folder;
  DiskCache disk{folder.path()};
  TuneStore records{folder.path()};
};

TEST(FolderThatAsks, TakesAndGivesWhatIsSigned) {
  SigningFolder test;
  std::string why;
  CacheEntry entry = some_entry("code");
  EXPECT_FALSE(test.disk.publish(entry, &why));
  EXPECT_THAT(why, HasSubstr("FLASHJIT_SIGNING_KEY"));
  entry = signed_by(test.key, entry);
  ASSERT_TRUE(test.disk.publish(entry, &why)) << why;
  EXPECT_EQ(test.disk.lookup(entry.key)->signature, entry.signature);

  CacheEntry forged = some_entry("forged");
  forged.signature = entry.signature;
  EXPECT_FALSE(test.disk.publish(forged, &why));
  EXPECT_THAT(why, HasSubstr("not what key ci has signed"));
  for (const std::string& bytes : {bytes_of(forged), bytes_of(some_entry("unsigned"))}) {
    write_file(test.disk.path(entry.key), bytes);
    EXPECT_FALSE(test.disk.lookup(entry.key, &why));
    EXPECT_THAT(why, HasSubstr("the folder asks for signatures"));
  }

  const DiskCache without(test.folder.path());
  write_file(test.disk.path(entry.key), bytes_of(entry));
  EXPECT_FALSE(without.lookup(entry.key, &why));
  EXPECT_THAT(why, HasSubstr("here they are not checked"));

  test.disk.use_signatures(test.disk.verifier(), test.key.sign());
  EXPECT_TRUE(test.disk.publish(some_entry("code", "x86-64-v4"), &why)) << why;
  EXPECT_TRUE(test.disk.lookup(some_entry("", "x86-64-v4").key, &why)) << why;
}

TEST(FolderThatAsks, HoldsForRecordsAndBundles) {
  SigningFolder test;
  std::string why;
  TuneRecord record{.key = {"a spec", "x86-64-v3", "A CPU", {1, 16, 16, 1, 1}},
                    .chosen = {},
                    .heuristic = {},
                    .shape = {1, 16, 16, 1, 1},
                    .environment = {},
                    .candidates = {}};
  EXPECT_FALSE(test.records.publish(record, &why));
  const std::string line = test.key.sign()(TuneStore::name(record.key), to_json(record));
  ASSERT_TRUE(test.records.publish(record, &why, line)) << why;
  ASSERT_TRUE(test.records.lookup(record.key, {}, &why)) << why;
  EXPECT_EQ(test.records.lookup(record.key, {})->signature, line);
  ASSERT_TRUE(test.disk.publish(signed_by(test.key, some_entry("code"))));

  std::string archive;
  const Exported out = export_bundle(test.disk, [&](const char* from, std::size_t size) {
    archive.append(from, size);
    return true;
  });
  EXPECT_EQ(out.records, 1u);
  const auto import = [&](const std::string& bytes, const DiskCache& to) {
    std::size_t at = 0;
    return import_bundle(to, [&](char* into, std::size_t size) {
      if (size > bytes.size() - at) return false;
      bytes.copy(into, size, at);
      at += size;
      return true;
    });
  };
  SigningFolder strangers;
  EXPECT_EQ(import(archive, strangers.disk).records, 0u) << "another key is trusted there";
  Scratch plain;
  EXPECT_EQ(import(archive, DiskCache(plain.path())).records, 1u);
  EXPECT_EQ(TuneStore(plain.path()).lookup(record.key, {})->signature, line);

  record.complete = true;
  write_file(test.records.path(record.key), to_json(record) + line);
  EXPECT_FALSE(test.records.lookup(record.key, {}, &why));
  EXPECT_THAT(why, HasSubstr("not what key ci has signed"));
  EXPECT_THAT(test.records.list().at(0).damage, HasSubstr("not what key ci has signed"));
}

}  // namespace
}  // namespace flashjit::testing
