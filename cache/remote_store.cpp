#include "cache/remote_store.hpp"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "codegen/base/error.hpp"
#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

constexpr int max_milliseconds = 600'000;

[[noreturn]] void refuse_remote(const std::string& what) {
  throw Error(ErrorCode::cache_failed,
              "the list of remote stores (FLASHJIT_CACHE_REMOTE, cache_remote): " + what);
}

std::chrono::milliseconds milliseconds_of(std::string_view text, const std::string& attribute) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > max_milliseconds)
    refuse_remote(in_quotes(attribute) + " has no number of milliseconds from 1 to " +
                  std::to_string(max_milliseconds));
  return std::chrono::milliseconds(value);
}

RemoteAddress parse_remote(const std::string& item) {
  const std::size_t hash = item.find('#');
  RemoteAddress address{item.substr(0, hash)};
  const std::size_t colon = std::min(address.url.find("://"), address.url.size());
  const std::string scheme = address.url.substr(0, colon);
  // Whatever stands before '@' may be a secret, so nothing of the URL is shown.
  if (address.url.find('@') != std::string::npos)
    refuse_remote("a URL of scheme " + in_quotes(scheme) +
                  " has a user or a password in it; FLASHJIT_REMOTE_TOKEN, or a file that "
                  "FLASHJIT_REMOTE_TOKEN_FILE names, takes user:password");
  if (colon == address.url.size() ||
      (scheme != "http" && scheme != "https" && scheme != "redis" && scheme != "rediss"))
    refuse_remote(
        in_quotes(address.url) +
        " is no store: http://HOST/PATH, https://HOST/PATH, redis://HOST:PORT/DATABASE and rediss:// are");
  while (address.url.ends_with('/')) address.url.pop_back();
  std::istringstream attributes(hash == std::string::npos ? std::string() : item.substr(hash + 1));
  for (std::string attribute; std::getline(attributes, attribute, ',');) {
    const std::string name = attribute.substr(0, attribute.find('='));
    const std::string value = attribute.substr(std::min(name.size() + 1, attribute.size()));
    if (attribute == "read_only")
      address.read_only = true;
    else if (name == "answer_ms")
      address.answer = milliseconds_of(value, attribute);
    else if (name == "timeout_ms")
      address.timeout = milliseconds_of(value, attribute);
    else
      refuse_remote(in_quotes(attribute) + " of " + address.url +
                    " is none of read_only, answer_ms=N and timeout_ms=N");
  }
  return address;
}

}  // namespace

std::vector<RemoteAddress> parse_remotes(const std::string& text) {
  std::vector<RemoteAddress> stores;
  std::istringstream items(text);
  for (std::string item; items >> item;) stores.push_back(parse_remote(item));
  return stores;
}

}  // namespace flashjit
