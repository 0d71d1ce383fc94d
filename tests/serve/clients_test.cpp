// Tokens, and the names of those who have them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "codegen/base/error.hpp"
#include "tests/cache/support.hpp"
#include "tools/serve/clients.hpp"

namespace flashjit::serve {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class TokensFile : public ::testing::Test {
 protected:
  Clients of(const std::string& text, mode_t mode = 0600) const {
    testing::write_file(path, text);
    ::chmod(path.c_str(), mode);
    return Clients::of_file(path);
  }
  std::string refusal(const std::string& text, mode_t mode = 0600) const {
    try {
      of(text, mode);
    } catch (const Error& error) {
      return error.message();
    }
    return "not refused";
  }

  const testing::Scratch folder;
  const std::string path = folder / "tokens";
};

TEST_F(TokensFile, NamesWhoHasAToken) {
  const Clients clients = of("# hosts\nfarm=0123456789abcdef\nlab=fedcba9876543210\n");
  EXPECT_EQ(clients.name("Bearer 0123456789abcdef", "::1"), "farm");
  EXPECT_EQ(clients.name("Bearer fedcba9876543210", "::1"), "lab");
  // lab:fedcba9876543210, farm:fedcba9876543210
  EXPECT_EQ(clients.name("Basic bGFiOmZlZGNiYTk4NzY1NDMyMTA=", "::1"), "lab");
  EXPECT_EQ(clients.name("Basic ZmFybTpmZWRjYmE5ODc2NTQzMjEw", "::1"), std::nullopt);
  for (const char* other : {"", "Bearer ", "Bearer 0123456789abcde", "Bearer 0123456789abcdeg",
                            "Bearer 0123456789abcdef0", "0123456789abcdef", "Basic ####", "Basic"})
    EXPECT_EQ(clients.name(other, "::1"), std::nullopt) << other;
}

TEST_F(TokensFile, WithoutTokensAClientIsAnAddress) {
  EXPECT_EQ(Clients().name("Bearer x", "10.0.0.1"), "10.0.0.1");
  EXPECT_EQ(Clients().name("", ""), "local");
}

TEST_F(TokensFile, IsRefusedIfOthersReadItOrItSaysNothingAndIsNeverShown) {
  EXPECT_THAT(refusal("farm=0123456789abcdef\n", 0644), HasSubstr("chmod o-r"));
  EXPECT_THAT(refusal("# nobody\n"), HasSubstr("nobody could ask"));
  for (const char* line : {"farm=tooshort", "0123456789abcdef0123", "a b=0123456789abcdef0123"})
    EXPECT_THAT(refusal("ok=0123456789abcdef\n" + std::string(line) + "\n"),
                AllOf(HasSubstr("line 2"), Not(HasSubstr("0123")), Not(HasSubstr("tooshort"))));
}

}  // namespace
}  // namespace flashjit::serve
