// The command with a real store: prebuild --push on one host, pull and run on another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cli/command_line.hpp"
#include "tests/remote/servers.hpp"

namespace flashjit::cli_test {
namespace {

using ::flashjit::testing::RedisServer;
using ::testing::HasSubstr;

TEST(RemoteCommand, PushesPullsAndLooks) {
  if (!::flashjit::testing::is_installed("redis-server"))
    GTEST_SKIP() << "redis-server is not installed: tools/setup test";
  const RedisServer server;
  CommandLine builder, host;
  const std::string key = builder.folder() + "/ci.key";
  std::string item = builder({"cache", "keygen", key, "--name", "ci"}).out;
  item.pop_back();
  CommandLine another;
  for (CommandLine* one : {&builder, &host, &another}) {
    one->environment["FLASHJIT_TRUST"] = item;
    one->environment["FLASHJIT_CACHE_REMOTE"] = server.url();
  }
  builder.environment["FLASHJIT_SIGNING_KEY"] = key;

  EXPECT_THAT(builder({"doctor"}).out, HasSubstr("trusts ci; stores what ci signs"));
  EXPECT_THAT(host({"doctor"}).out, HasSubstr("trusts ci; read only"));
  const Outcome built =
      builder({"prebuild", small_spec, "--target", "native", "-o", builder.folder() + "/kernels", "--push"});
  EXPECT_EQ(built.exit_code, 0) << built.err;
  EXPECT_THAT(built.out, HasSubstr("pushed"));

  EXPECT_EQ(host({"compile", small_spec, "--json"}).json()["origin"], "remote");
  EXPECT_EQ(host({"cache", "stat", "--json"}).json()["remote"]["hits"], 1);
  EXPECT_GE(another({"cache", "pull", "--json"}).json()["entries"], 1);
  another.environment.erase("FLASHJIT_CACHE_REMOTE");
  EXPECT_EQ(another({"compile", small_spec, "--json"}).json()["origin"], "disk");
}

}  // namespace
}  // namespace flashjit::cli_test
