#include "runtime/remote/url.hpp"

#include <algorithm>

#include "runtime/remote/store.hpp"

namespace flashjit::remote_plugin {

Url parse_url(const std::string& text, const std::map<std::string, std::string>& ports) {
  Url url;
  const std::size_t colon = text.find("://");
  url.scheme = text.substr(0, colon);
  const std::string rest = colon == std::string::npos ? "" : text.substr(colon + 3);
  const std::size_t slash = rest.find('/');
  std::string place = rest.substr(0, slash);
  if (slash != std::string::npos) url.path = rest.substr(slash);
  while (url.path.ends_with('/')) url.path.pop_back();
  const bool brackets = place.starts_with('[');  // an address of IPv6
  const std::size_t end = brackets ? place.find(']') : place.find(':');
  url.host = brackets ? place.substr(1, end == std::string::npos ? end : end - 1) : place.substr(0, end);
  if (const std::size_t port = place.find(':', end == std::string::npos ? place.size() : end);
      port != std::string::npos)
    url.port = place.substr(port + 1);
  if (const auto usual = ports.find(url.scheme); url.port.empty() && usual != ports.end())
    url.port = usual->second;
  if (url.host.empty() || url.port.empty() || url.port.find_first_not_of("0123456789") != std::string::npos)
    throw Failure("is no URL of the form scheme://host:port/path");
  return url;
}

std::string printable(std::string_view text) {
  std::string result(text.substr(0, 200));
  std::replace_if(result.begin(), result.end(), [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
  return result;
}

}  // namespace flashjit::remote_plugin
