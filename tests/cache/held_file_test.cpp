// Files whose locks say that their process is at work.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cache/fork.hpp"
#include "tests/cache/support.hpp"

namespace flashjit::testing {
namespace {

// In any order of opening and closing, a child finds those closed that its parent still has, and no others.
TEST(HeldFile, AChildClosesThoseThatAreOpen) {
  const Scratch folder;
  for (int without = 0; without < 4; ++without) {
    std::vector<std::unique_ptr<HeldFile>> files;
    for (int i = 0; i < 4; ++i)
      files.push_back(std::make_unique<HeldFile>(
          [&] { return ::open((folder / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600); }));
    files.erase(files.begin() + without);
    const File other(::open((folder / "file").c_str(), O_RDONLY | O_CLOEXEC));
    std::vector<int> descriptors;
    for (const auto& file : files) {
      EXPECT_TRUE(file->is_ours());
      descriptors.push_back(file->get());
    }
    EXPECT_TRUE(child_succeeded(start_child([&] {
      for (const int descriptor : descriptors) FLASHJIT_CHECK(::fcntl(descriptor, F_GETFD) == -1);
      for (const auto& file : files) FLASHJIT_CHECK(!file->is_ours());
      FLASHJIT_CHECK(::fcntl(other.get(), F_GETFD) != -1);
      return true;
    }))) << without;
    for (const int descriptor : descriptors) EXPECT_NE(::fcntl(descriptor, F_GETFD), -1);
  }
}

}  // namespace
}  // namespace flashjit::testing
