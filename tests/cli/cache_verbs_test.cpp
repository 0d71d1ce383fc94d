// The actions of flashjit cache: layers, size limit, archives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

const std::string other_than_small = R"({"op": "forward", "dtype": "fp32", "head_dim": 32})";

// A layer with one kernel, and a folder with another.
struct Layered {
  Layered() {
    builder({"compile", small_spec});
    flashjit.environment["FLASHJIT_CACHE_PATH"] = builder.cache();
    flashjit({"compile", other_spec});
  }
  const std::string other_spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 24})";
  CommandLine builder, flashjit;
};

TEST(CacheLayers, AreShown) {
  const Layered test;
  const std::string layer = std::filesystem::canonical(test.builder.cache());
  const nlohmann::json rows = test.flashjit({"cache", "ls", "--json"}).json();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_TRUE(rows[0]["layer"].get<bool>());
  EXPECT_FALSE(rows[1]["layer"].get<bool>());
  // The specs are as short as possible.
  EXPECT_THAT(test.flashjit({"cache", "ls"}).out,
              AllOf(HasSubstr(layer + ", read-only"),
                    HasSubstr(R"({"op": "forward", "dtype": "fp32", "head_dim": 24})"),
                    HasSubstr(R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"]})")));

  const nlohmann::json stat = test.flashjit({"cache", "stat", "--json"}).json();
  EXPECT_EQ(stat["entries"], 1);
  EXPECT_EQ(stat["max_bytes"], 1 << 30);
  EXPECT_EQ(stat["layers"][0]["folder"], layer);
  EXPECT_THAT(test.flashjit({"cache", "stat"}).out, HasSubstr("read-only: 1 entries"));

  EXPECT_EQ(test.flashjit({"cache", "path", "--json"}).json()["layers"], nlohmann::json::array({layer}));
  EXPECT_EQ(test.flashjit({"cache", "verify", "--json"}).json()["entries"], 2);

  const nlohmann::json found = test.flashjit({"cache", "explain", "--spec", small_spec, "--json"}).json();
  EXPECT_TRUE(found["found"].get<bool>());
  EXPECT_THAT(found["path"].get<std::string>(), ::testing::StartsWith(layer));
}

TEST(CacheLayers, ExplainNeedsNoCompiler) {
  Layered test;
  test.flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = test.flashjit.missing("plugin.so");
  for (const std::string& spec : {small_spec, test.other_spec})
    EXPECT_TRUE(test.flashjit({"cache", "explain", "--spec", spec, "--json"}).json()["found"].get<bool>());
}

TEST(CacheSignatures, AFolderThatAsksServesWhatTrustedKeysSigned) {
  CommandLine flashjit;
  flashjit({"compile", small_spec});
  const std::string key = flashjit.folder() + "/ci.key", trust = flashjit.folder() + "/trust";
  const std::string ci = flashjit({"cache", "keygen", key, "--name", "ci"}).out;
  ASSERT_THAT(ci, ::testing::StartsWith("ci="));
  const std::string item = ci.substr(0, ci.find('\n'));
  EXPECT_EQ(flashjit({"cache", "trust", item, "--file", trust}).out, ci);
  flashjit.environment["FLASHJIT_TRUST"] = trust;
  EXPECT_EQ(flashjit({"cache", "trust", "--json"}).json()[0]["name"], "ci");
  EXPECT_EQ(flashjit({"cache", "sign"}).exit_code, 3);
  EXPECT_EQ(flashjit({"cache", "sign", "--key", key, "--ask", "--json"}).json()["signed_entries"], 1);
  EXPECT_EQ(flashjit({"cache", "sign", "--key", key, "--json"}).json()["signed_entries"], 0);

  const auto origin = [&] { return flashjit({"compile", small_spec, "--json"}).json()["origin"]; };
  EXPECT_EQ(origin(), "disk");
  EXPECT_EQ(flashjit({"cache", "verify"}).exit_code, 0);
  flashjit.environment["FLASHJIT_REMOTE_PLUGIN"] = flashjit.missing("plugin.so");
  EXPECT_EQ(origin(), "compiled");
  EXPECT_THAT(flashjit({"cache", "verify"}).err, HasSubstr("could not be opened"));
  flashjit.environment.erase("FLASHJIT_REMOTE_PLUGIN");
  flashjit({"cache", "trust", "--file", trust, "--", "-" + item});
  EXPECT_EQ(origin(), "compiled");
  EXPECT_THAT(flashjit({"cache", "verify"}).err, HasSubstr("key ci, which is revoked"));
}

TEST(CacheRemote, VerbsSayWhatIsMissing) {
  CommandLine flashjit;
  flashjit({"compile", small_spec});
  EXPECT_THAT(flashjit({"cache", "push"}).err, HasSubstr("flashjit cache keygen makes a key"));
  EXPECT_THAT(flashjit({"cache", "pull"}).err, HasSubstr("FLASHJIT_TRUST lists the keys"));
  const std::string key = flashjit.folder() + "/ci.key";
  std::string item = flashjit({"cache", "keygen", key, "--name", "ci"}).out;
  item.pop_back();
  flashjit.environment["FLASHJIT_SIGNING_KEY"] = key;
  flashjit.environment["FLASHJIT_TRUST"] = item;
  EXPECT_THAT(flashjit({"cache", "push"}).err, HasSubstr("give --remote URL, or set FLASHJIT_CACHE_REMOTE"));
  EXPECT_THAT(flashjit({"cache", "push", "--remote", "ftp://a"}).err, HasSubstr("is no store"));
  const std::string nowhere = "redis://127.0.0.1:1";
  EXPECT_THAT(flashjit({"cache", "push", "--remote", nowhere}).err, HasSubstr("cannot connect"));
  flashjit.environment["FLASHJIT_CACHE_REMOTE"] = nowhere;
  EXPECT_EQ(flashjit({"cache", "pull"}).exit_code, 7);
  EXPECT_EQ(flashjit({"cache", "sync"}).exit_code, 7);
  EXPECT_THAT(flashjit({"doctor"}).out, HasSubstr("missing  remote " + nowhere + ": cannot connect"));
  EXPECT_EQ(flashjit({"compile", other_than_small, "--json"}).json()["origin"], "compiled");
  EXPECT_GE(flashjit({"cache", "stat", "--json"}).json()["remote"]["failed"], 1);
}

TEST(CacheSize, GcRemovesAndTheEnvironmentCaps) {
  CommandLine flashjit;
  for (const char* dim : {"16", "24", "32"})
    flashjit({"compile", std::string(R"({"op": "forward", "dtype": "fp32", "head_dim": )") + dim + "}"});
  EXPECT_EQ(flashjit({"cache", "gc", "--max-bytes", "1", "--json"}).json()["removed_entries"], 0)
      << "all were used a moment ago";
  for (const auto& item : std::filesystem::directory_iterator(flashjit.cache() + "/v3")) {
    std::filesystem::last_write_time(item.path(),
                                     std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  }
  EXPECT_THAT(flashjit({"cache", "gc", "--max-bytes", "1"}).out, HasSubstr("3 entries of"));
  EXPECT_EQ(flashjit({"cache", "stat", "--json"}).json()["entries"], 0);
  const Outcome not_a_number = flashjit({"cache", "gc", "--max-bytes", "1k"});
  EXPECT_EQ(not_a_number.exit_code, 64);
  EXPECT_THAT(not_a_number.err, HasSubstr("--max-bytes: \"1k\" is not a whole number of 1 or more"));
  flashjit.environment["FLASHJIT_CACHE_MAX_BYTES"] = "a lot";
  const Outcome wrong = flashjit({"compile", small_spec});
  EXPECT_EQ(wrong.exit_code, 7);
  EXPECT_THAT(wrong.err, AllOf(HasSubstr("FLASHJIT_CACHE_MAX_BYTES"), HasSubstr("1073741824")));
}

// A misspelt folder is an error, not a new empty cache.
TEST(CacheFolder, OneThatIsNotThereIsNotMade) {
  const CommandLine flashjit;
  const std::string typo = flashjit.folder() + "/kernls";
  for (const char* action : {"ls", "stat", "verify", "gc", "clear", "path"}) {
    const Outcome outcome = flashjit({"cache", action, "--cache-dir", typo});
    EXPECT_EQ(outcome.exit_code, 7) << action;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("kernls"), HasSubstr("No such file"))) << action;
  }
  EXPECT_EQ(flashjit({"cache", "export", flashjit.folder() + "/x.tar", "--cache-dir", typo}).exit_code, 7);
  EXPECT_FALSE(std::filesystem::exists(flashjit.folder() + "/x.tar"));
  EXPECT_FALSE(std::filesystem::exists(typo));
}

// Layers are looked at without a folder to write to, as where kernels are deployed.
TEST(CacheLayers, NeedNoFolderToWriteTo) {
  const CommandLine builder;
  builder({"compile", small_spec, "--target", "x86-64-v3"});
  CommandLine flashjit;
  flashjit.environment = {{"FLASHJIT_CACHE_PATH", builder.cache()},
                          {"FLASHJIT_CACHE_DIR", ""},
                          {"XDG_CACHE_HOME", ""},
                          {"HOME", ""}};
  EXPECT_TRUE(flashjit({"cache", "stat", "--json"}).json()["folder"].is_null());
  EXPECT_EQ(flashjit({"cache", "stat", "--json"}).json()["layers"][0]["entries"], 1);
  EXPECT_EQ(flashjit({"cache", "ls", "--json"}).json().size(), 1u);
  EXPECT_EQ(flashjit({"cache", "verify", "--json"}).json()["entries"], 1);
  for (const char* action : {"stat", "ls", "verify", "path"})
    EXPECT_EQ(flashjit({"cache", action}).exit_code, 0) << action;
  // A folder that is named and missing is empty, and is not made.
  flashjit.environment["FLASHJIT_CACHE_DIR"] = flashjit.cache();
  EXPECT_EQ(flashjit({"cache", "stat", "--json"}).json()["entries"], 0);
  EXPECT_EQ(flashjit({"prebuild", small_spec, "--target", "x86-64-v3", "--check"}).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(flashjit.cache()));
}

// Damage beyond an entry's head counts in every verb.
TEST(CacheVerify, StatReadsWholeEntries) {
  const CommandLine flashjit;
  flashjit({"compile", small_spec, "--target", "x86-64-v3"});
  for (const auto& item : std::filesystem::directory_iterator(flashjit.cache() + "/v3"))
    if (item.path().extension() == ".kernel") {
      std::fstream file(item.path(), std::ios::binary | std::ios::in | std::ios::out);
      file.seekp(-20, std::ios::end);
      file << "damaged";
    }
  EXPECT_EQ(flashjit({"cache", "stat", "--json"}).json()["damaged"], 1);
  EXPECT_EQ(flashjit({"cache", "verify", "--json"}).exit_code, 7);
  EXPECT_THAT(flashjit({"doctor"}).out, HasSubstr("1 damaged"));
}

TEST(CacheVerify, ReadsTuneRecordsToo) {
  const CommandLine flashjit;
  const std::string one_config =
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "config": {"block_m": 48, "block_n": 64}})";
  const nlohmann::json tuned = flashjit({"tune", one_config, "--seqlens", "40", "--json"}).json();
  EXPECT_EQ(flashjit({"cache", "stat", "--json"}).json()["tune_records"], 1);
  EXPECT_EQ(flashjit({"cache", "verify", "--json"}).json()["tune_records"], 1);
  const std::string path = tuned["shapes"][0]["path"];
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  const Outcome outcome = flashjit({"cache", "verify"});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_THAT(outcome.out, HasSubstr("0 of 1 tune records are whole"));
  EXPECT_THAT(outcome.err, HasSubstr("damaged: " + path));
}

TEST(Compile, SaysOnceThatNothingIsKept) {
  const CommandLine flashjit;
  const Outcome outcome =
      flashjit({"compile", small_spec, "--target", "x86-64-v3,native", "--cache-dir", ""});
  EXPECT_EQ(outcome.exit_code, 0);
  // stderr may also tell about a long compile.
  const std::string note = "flashjit: cache: there is no cache folder\n";
  const std::size_t first = outcome.err.find(note);
  ASSERT_NE(first, std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.find(note, first + 1), std::string::npos) << outcome.err;
}

TEST(Bench, StartMeasuresTheFirstResult) {
  const CommandLine flashjit;
  flashjit({"prebuild", small_spec, "--target", "native", "-o", flashjit.folder() + "/bundle"});
  const nlohmann::json start =
      flashjit({"bench", small_spec, "--start", "--cache-dir", "", "--cache-path",
                flashjit.folder() + "/bundle", "--threads", "2", "--rounds", "3", "--json"})
          .json();
  EXPECT_EQ(start["origin"], "disk");
  EXPECT_EQ(start["context_ms"], 0);
  for (const char* name :
       {"engine_ms", "get_ms", "launch_ms", "first_result_ms", "warm_ms", "hot_ns", "hot_ns_together"})
    EXPECT_GT(start[name].get<double>(), 0) << name;
  EXPECT_EQ(flashjit({"bench", small_spec, small_spec, "--start"}).exit_code, 3);
}

TEST(CacheArchive, ExportAndImport) {
  const CommandLine builder, flashjit;
  builder({"compile", small_spec});
  const std::string archive = builder.folder() + "/kernels.tar";
  EXPECT_EQ(builder({"cache", "export", archive, "--json"}).json()["entries"], 1);
  EXPECT_EQ(builder({"cache", "export", "-"}).out, [&] {
    std::ifstream file(archive, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }());
  EXPECT_EQ(flashjit({"cache", "import", archive, "--json"}).json()["entries"], 1);
  EXPECT_EQ(flashjit({"compile", small_spec, "--json"}).json()["origin"], "disk");
}

TEST(CacheArchive, WhatIsNoArchiveIsRefused) {
  const CommandLine flashjit;
  Outcome outcome = flashjit({"cache", "import", flashjit.file("x.tar", std::string(10240, 'x'))});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_THAT(outcome.err, HasSubstr("not a ustar archive"));
  EXPECT_EQ(flashjit({"cache", "import", flashjit.missing("x.tar")}).exit_code, 3);
  EXPECT_EQ(flashjit({"cache", "export", flashjit.missing("x.tar")}).exit_code, 3);
  outcome = flashjit({"cache", "export", "/dev/full"});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_THAT(outcome.err, HasSubstr("No space left on device"));
  outcome = flashjit({"cache", "import", flashjit.folder()});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_THAT(outcome.err, HasSubstr("Is a directory"));
}

}  // namespace
}  // namespace flashjit::cli_test
