// `flashjit audit` takes its counters from ncu, whose part a script plays.
#include "tools/command/device_counters.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "codegen/base/error.hpp"

namespace flashjit::command {
namespace {

using ::testing::HasSubstr;

// As ncu 2025.3 prints two kernels, among what the program and ncu itself say.
constexpr const char* two_kernels =
    R"csv(==PROF== Connected to process 12 (/usr/bin/flashjit)
==PROF== Profiling "flashjit_forward": 0%....50%....100% - 1 pass
said, by the program
"ID","Process ID","Kernel Name","Block Size","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","byte","byte"
"0","12","flashjit_forward(Params<1, 2>)","(384, 1, 1)","1,000","200"
"1","12","flashjit_forward(Params<1, 2>)","(384, 1, 1)","1,001.5","20"
)csv";

TEST(DeviceCounters, KernelsAreAddedUp) {
  const CountedBytes counted = read_counts(two_kernels);
  EXPECT_EQ(counted.kernels, 2);
  EXPECT_EQ(counted.read, 2001.5);
  EXPECT_EQ(counted.written, 220);
  EXPECT_EQ(read_counts("==ERROR== nothing\n\"a\",\"1\",\"2\"\n").kernels, 0);
}

class StandIn : public ::testing::Test {
 protected:
  StandIn() : folder_((std::filesystem::temp_directory_path() / "flashjit-ncu-XXXXXX").string()) {
    if (!mkdtemp(folder_.data())) ADD_FAILURE() << "cannot make " << folder_;
  }
  ~StandIn() override { std::filesystem::remove_all(folder_); }

  std::string ncu(const std::string& script) {
    const std::string path = folder_ + "/ncu";
    std::ofstream(path) << "#!/bin/sh\n" << script << '\n';
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  Error refusal(const std::string& script) {
    try {
      count_device_bytes(ncu(script), {"true"});
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "not refused";
    return {ErrorCode::internal, ""};
  }

  std::string folder_;
};

TEST_F(StandIn, WordsReachTheProgramUnchanged) {
  const std::string said = folder_ + "/said";
  const CountedBytes counted = count_device_bytes(
      ncu("for word; do echo \"$word\"; done >" + said + "; cat <<'END'\n" + two_kernels + "END"),
      {"/a program", "{\"op\": \"forward\"}", "it's", "$HOME"});
  EXPECT_EQ(counted.kernels, 2);
  std::stringstream words;
  words << std::ifstream(said).rdbuf();
  EXPECT_THAT(words.str(), HasSubstr("off\n"));
  EXPECT_TRUE(words.str().ends_with("\n/a program\n{\"op\": \"forward\"}\nit's\n$HOME\n")) << words.str();
}

TEST_F(StandIn, RefusalsSayWhy) {
  const Error of_host =
      refusal("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1");
  EXPECT_EQ(of_host.code(), ErrorCode::device_failed);
  EXPECT_THAT(of_host.message(), HasSubstr("lets nobody but root read the counters"));
  const Error failed = refusal("echo '==ERROR== Failed to find metric' >&2; exit 3");
  EXPECT_THAT(failed.message(), HasSubstr("exit code 3"));
  EXPECT_THAT(failed.detail(), HasSubstr("Failed to find metric"));
  // It succeeded, but no kernel ran.
  EXPECT_THAT(refusal("echo '==WARNING== No kernels were profiled.'").detail(), HasSubstr("No kernels"));
}

TEST_F(StandIn, IsFoundOnThePath) {
  const std::string path = std::getenv("PATH");
  const std::string found = ncu("exit 0");
  ::setenv("PATH", (folder_ + ":" + path).c_str(), 1);
  EXPECT_EQ(find_ncu(), found);
  ::setenv("PATH", path.c_str(), 1);
}

}  // namespace
}  // namespace flashjit::command
