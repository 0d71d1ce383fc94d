// Libraries that others could have changed are refused before they are opened.
#include "runtime/library_file.hpp"

#include <gmock/gmock.h>
#include <sys/xattr.h>

#include "codegen/base/error.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/llvm/plugin_client.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class LibraryFile : public ::testing::Test {
 protected:
  LibraryFile() {
    if (::geteuid() == 0) ::chmod(scratch_.path().c_str(), 0755);  // other users must be able to enter
    ::setenv("FLASHJIT_TEST_MARK", mark().c_str(), 1);
  }
  ~LibraryFile() override {
    for (const char* name : {"FLASHJIT_TEST_MARK", "FLASHJIT_NVRTC", "FLASHJIT_LLVM_PLUGIN"})
      ::unsetenv(name);
  }

  std::string mark() const { return scratch_ / "mark"; }
  bool code_has_run() const { return fs::exists(mark()); }

  // A copy of the marking library.
  std::string library(const std::string& name, mode_t mode) const {
    const std::string path = scratch_ / name;
    fs::create_directories(fs::path(path).parent_path());
    fs::copy_file(FLASHJIT_MARKING_LIBRARY, path);
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }

  static std::string refusal(const std::string& path) {
    std::string why;
    const std::string trusted = trusted_library(path, &why);
    EXPECT_EQ(trusted.empty(), !why.empty());
    return why;
  }

  // The message and detail of the error that the function throws.
  template <class Function>
  static std::string failure(Function function) {
    try {
      function();
      return {};
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::compiler_unavailable);
      return error.message() + error.detail();
    }
  }
  static std::string nvrtc_failure() {
    return failure([] { open_nvrtc(nvrtc_candidates()); });
  }

  const Scratch scratch_;
};

TEST_F(LibraryFile, PluginsThatOthersMayWriteAreNotRun) {
  const std::string path = library("plugin.so", 0757);
  ::setenv("FLASHJIT_LLVM_PLUGIN", path.c_str(), 1);
  EXPECT_THAT(failure(llvm_plugin), AllOf(HasSubstr(path), HasSubstr("others may write to it (mode 0757)"),
                                          HasSubstr("chmod go-w")));
  EXPECT_FALSE(code_has_run());
  ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  EXPECT_THAT(failure(llvm_plugin), HasSubstr("is not a flashjit plugin"));
  EXPECT_TRUE(code_has_run());
}

TEST_F(LibraryFile, NvrtcThatOthersMayWriteIsNotRun) {
  const std::string path = library("libnvrtc.so.13", 0757);
  for (const std::string& chosen : {path, scratch_.path()}) {
    ::setenv("FLASHJIT_NVRTC", chosen.c_str(), 1);
    EXPECT_THAT(nvrtc_failure(), AllOf(HasSubstr(path), HasSubstr("others may write to it (mode 0757)")));
    EXPECT_FALSE(code_has_run());
  }
  ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  EXPECT_EQ(nvrtc_failure(), "");
  EXPECT_TRUE(code_has_run());
}

// NVRTC would open its second library by itself.
TEST_F(LibraryFile, NvrtcIsRefusedWithItsOtherHalf) {
  ::setenv("FLASHJIT_NVRTC", library("libnvrtc.so.13", 0755).c_str(), 1);
  const std::string builtins = library("libnvrtc-builtins.so.13.0", 0757);
  EXPECT_THAT(nvrtc_failure(), AllOf(HasSubstr(builtins), HasSubstr("others may write to it")));
}

TEST_F(LibraryFile, TheSearchGoesOnAfterARefusal) {
  const std::string bad = library("bad.so", 0757), missing = scratch_ / "missing.so";
  EXPECT_THAT(failure([&] { open_nvrtc({bad, missing}); }),
              AllOf(HasSubstr(bad + ": refused"), HasSubstr(missing + ": cannot open")));
  EXPECT_EQ(failure([&] { open_nvrtc({bad, library("good.so", 0755)}); }), "");
}

TEST_F(LibraryFile, AnNvrtcThatCannotBeEndedRefusesLimits) {
  const std::shared_ptr<const Compiler> nvrtc = open_nvrtc({library("libnvrtc.so.13", 0755)});
  const auto refused = [&](const CompileLimits& limits) {
    try {
      nvrtc->check(limits);
      return false;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_THAT(error.message(), AllOf(HasSubstr("NVRTC 13.0"), HasSubstr("no nvrtcSetFlowCallback"),
                                         HasSubstr("FLASHJIT_NVRTC")));
      return true;
    }
  };
  EXPECT_FALSE(refused({}));
  EXPECT_TRUE(refused({.seconds = 1e6}));
  EXPECT_TRUE(refused({.cancelled = [] { return false; }}));
}

TEST_F(LibraryFile, FoldersCountToo) {
  const std::string path = library("folder/library.so", 0755);
  ASSERT_EQ(refusal(path), "");
  ASSERT_EQ(::chmod((scratch_ / "folder").c_str(), 0777), 0);
  EXPECT_THAT(refusal(path), HasSubstr("others may write to it (mode 0777)"));
  ASSERT_EQ(::chmod((scratch_ / "folder").c_str(), 01777), 0);  // like /tmp
  EXPECT_EQ(refusal(path), "");

  const std::string below = library("all/below/library.so", 0755);
  ASSERT_EQ(::chmod((scratch_ / "all").c_str(), 0777), 0);
  EXPECT_THAT(refusal(below), HasSubstr("folder " + (scratch_ / "all") + ": others may write to it"));
}

TEST_F(LibraryFile, LinksLeadToWhatIsChecked) {
  const std::string path = library("folder/library.so", 0755);
  fs::create_symlink(path, scratch_ / "link.so");
  std::string why;
  EXPECT_EQ(trusted_library(scratch_ / "link.so", &why), fs::canonical(path).string());
  ASSERT_EQ(::chmod(path.c_str(), 0757), 0);
  EXPECT_THAT(refusal(scratch_ / "link.so"), HasSubstr("others may write"));
}

TEST_F(LibraryFile, WhatIsNoFileIsSaidSo) {
  EXPECT_THAT(refusal(scratch_ / "missing.so"), HasSubstr("No such file"));
  EXPECT_THAT(refusal(scratch_.path()), HasSubstr("not a regular file"));
}

TEST_F(LibraryFile, OwnersAndGroups) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving files to another user takes root";
  const std::string path = library("folder/library.so", 0755);
  ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  EXPECT_THAT(refusal(path), HasSubstr("belongs to user 65534"));
  ASSERT_EQ(::chown(path.c_str(), 0, 65534), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0775), 0);
  EXPECT_THAT(refusal(path), HasSubstr("others may write to it (mode 0775)"));
  ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);  // the owner's private group, as umask 002 leaves it
  EXPECT_EQ(refusal(path), "");
  // An ACL for one more user shows the same mode.
  constexpr unsigned char acl[] = {2,  0, 0, 0,                           // version
                                   1,  0, 7, 0, 0xff, 0xff, 0xff, 0xff,   // user::rwx
                                   2,  0, 6, 0, 0xfe, 0xff, 0,    0,      // user:65534:rw-
                                   4,  0, 5, 0, 0xff, 0xff, 0xff, 0xff,   // group::r-x
                                   16, 0, 7, 0, 0xff, 0xff, 0xff, 0xff,   // mask::rwx
                                   32, 0, 5, 0, 0xff, 0xff, 0xff, 0xff};  // other::r-x
  if (::setxattr(path.c_str(), "system.posix_acl_access", acl, sizeof acl, 0) == 0) {
    EXPECT_THAT(refusal(path), HasSubstr("others may write to it"));
  }
}

// A set-user-id program trusts no variable of its caller.
TEST_F(LibraryFile, SetUserIdProgramsIgnoreTheirCallersEnvironment) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving a program to another user takes root";
  constexpr uid_t owner = 65534, caller = 12345;
  const std::string program = scratch_ / "program", output = scratch_ / "output";
  const std::string nvrtc = library("cuda/lib64/libnvrtc.so.13", 0755), plugin = library("plugin.so", 0755);
  fs::copy_file(FLASHJIT_OPEN_LIBRARIES, program);
  ASSERT_EQ(::chown(program.c_str(), owner, owner), 0);

  // Every user may leave marks.
  ASSERT_EQ(::mkdir((scratch_ / "marks").c_str(), 0), 0);
  ASSERT_EQ(::chmod((scratch_ / "marks").c_str(), 0777), 0);
  const std::string made = scratch_ / "marks/mark";
  const auto run = [&](mode_t mode) {
    EXPECT_EQ(::chmod(program.c_str(), mode), 0);
    const std::vector<std::string> variables = {
        "FLASHJIT_LLVM_PLUGIN=" + plugin,   "FLASHJIT_NVRTC=" + nvrtc,     "CUDA_HOME=" + (scratch_ / "cuda"),
        "CUDA_PATH=" + (scratch_ / "cuda"), "FLASHJIT_CACHE_DIR=/callers", "FLASHJIT_CACHE_PATH=/callers",
        "FLASHJIT_TEST_MARK=" + made};
    std::vector<char*> environment;
    for (const std::string& variable : variables) environment.push_back(const_cast<char*>(variable.c_str()));
    environment.push_back(nullptr);
    EXPECT_TRUE(child_succeeded(start_child([&] {
      FLASHJIT_CHECK(std::freopen(output.c_str(), "w", stdout));
      FLASHJIT_CHECK(::setgroups(0, nullptr) == 0 && ::setgid(caller) == 0 && ::setuid(caller) == 0);
      ::execle(program.c_str(), program.c_str(), nullptr, environment.data());
      return false;
    })));
    return read_file(output);
  };
  EXPECT_THAT(run(0755), AllOf(HasSubstr("secure 0"), HasSubstr(scratch_.path()), HasSubstr("/callers")));
  ASSERT_TRUE(fs::remove(made)) << "without the bit the caller's libraries are opened";
  const std::string printed = run(04755);
  if (printed.find("secure 1") == std::string::npos) GTEST_SKIP() << "set-user-id bits have no effect here";
  EXPECT_THAT(printed, AllOf(Not(HasSubstr("callers")), Not(HasSubstr("candidate " + (scratch_ / "cuda"))),
                             Not(HasSubstr(plugin)), Not(HasSubstr(nvrtc))));
  EXPECT_FALSE(fs::exists(made));
}

}  // namespace
}  // namespace flashjit::testing
