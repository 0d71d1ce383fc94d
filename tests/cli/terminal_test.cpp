// A terminal gets nothing wider than itself, and no escape sequences. --quiet leaves out the rest.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/cli/command_line.hpp"
#include "tests/cli/on_terminal.hpp"

namespace flashjit::cli_test {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Terminal, TablesAreNoWiderThanIt) {
  const CommandLine flashjit;
  ASSERT_EQ(flashjit({"compile", small_spec}).exit_code, 0);
  for (const unsigned short columns : {80, 200}) {
    OnTerminal compile(flashjit, {"compile", small_spec}, columns);
    const std::string& shown = compile.wait();
    EXPECT_EQ(compile.exit_code(), 0);
    EXPECT_LE(widest_line(shown), columns);
    EXPECT_THAT(shown, Not(HasSubstr("\033")));
    EXPECT_EQ(shown.find("-----") != std::string::npos, columns == 200) << shown;
    EXPECT_THAT(shown, HasSubstr("spill bytes"));
  }
  EXPECT_THAT(flashjit({"compile", small_spec}).out, HasSubstr("-----"));  // a pipe has no width
}

TEST(Quiet, LeavesErrorsAlone) {
  const CommandLine flashjit;
  const std::vector<std::string> command = {"compile", small_spec, "--cache-dir", ""};
  EXPECT_THAT(flashjit(command).err, HasSubstr("there is no cache folder"));
  const Outcome quiet = flashjit(command + std::vector<std::string>{"--quiet"});
  EXPECT_EQ(quiet.err, "");
  EXPECT_THAT(quiet.out, HasSubstr("compiled"));
  EXPECT_THAT(flashjit({"compile", "{}", "--quiet"}).err, HasSubstr("invalid_spec"));
}

}  // namespace
}  // namespace flashjit::cli_test
