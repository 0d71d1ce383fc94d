#include "tools/serve/clients.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <cerrno>
#include <sstream>

#include "cache/file.hpp"
#include "cache/signature.hpp"
#include "cache/trust.hpp"
#include "codegen/base/error.hpp"

namespace flashjit::serve {
namespace {

constexpr std::size_t least_token = 16;

// Takes the same time wherever they differ.
bool are_equal(std::string_view a, std::string_view b) {
  unsigned difference = a.size() != b.size();
  for (std::size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned char>(a[i]) ^
                  static_cast<unsigned char>(b[i % std::max<std::size_t>(b.size(), 1)]);
  return difference == 0;
}

std::string from_base64(std::string_view text) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string octets;
  unsigned bits = 0;
  int count = 0;
  for (const char c : text) {
    const std::size_t value = digits.find(c);
    if (value == std::string_view::npos) break;
    bits = bits << 6 | static_cast<unsigned>(value);
    if ((count += 6) >= 8) octets += static_cast<char>(bits >> (count -= 8) & 255);
  }
  return octets;
}

}  // namespace

Clients Clients::of_file(const std::string& path) {
  const auto refuse = [&](const std::string& why) -> void {
    throw Error(ErrorCode::cache_failed, "file of tokens " + path + ": " + why);
  };
  const File file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status;
  if (!file || ::fstat(file.get(), &status) != 0) refuse(error_text(errno));
  if (!S_ISREG(status.st_mode) || status.st_size > 1 << 20) refuse("not a file of tokens");
  if (const std::string reason = distrust(status); !reason.empty()) refuse(reason);
  if (status.st_mode & S_IROTH) refuse("everybody may read it; run chmod o-r on it");
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  if (!read_fully(file.get(), text.data(), text.size())) refuse(errno ? error_text(errno) : "ends early");
  Clients clients;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.empty() || line.starts_with('#')) continue;
    const std::size_t equals = std::min(line.find('='), line.size());
    Token token{line.substr(0, equals), line.substr(std::min(equals + 1, line.size()))};
    // The line may hold a secret, so it is not shown.
    if (!is_key_name(token.name) || token.value.size() < least_token)
      refuse("line " + std::to_string(number) + " is not NAME=TOKEN with a token of " +
             std::to_string(least_token) + " characters or more");
    clients.tokens_.push_back(std::move(token));
  }
  if (!clients.any()) refuse("has no token, so nobody could ask");
  return clients;
}

std::optional<std::string> Clients::name(std::string_view authorization, const std::string& address) const {
  if (!any()) return address.empty() ? "local" : address;
  std::string given_name, value;
  if (authorization.starts_with("Bearer ")) {
    value = authorization.substr(7);
  } else if (authorization.starts_with("Basic ")) {
    const std::string both = from_base64(authorization.substr(6));
    const std::size_t colon = std::min(both.find(':'), both.size());
    given_name = both.substr(0, colon);
    value = both.substr(std::min(colon + 1, both.size()));
  }
  const Token* found = nullptr;
  for (const Token& token : tokens_)
    if (are_equal(value, token.value) && (given_name.empty() || given_name == token.name)) found = &token;
  return found ? std::optional(found->name) : std::nullopt;
}

}  // namespace flashjit::serve
