// scheme://host[:port][/path], and nothing else that a URL may have.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace flashjit::remote_plugin {

struct Url {
  std::string scheme, host, port;
  std::string path;  // empty, or begins with '/'
};

// `ports` has the default port of each scheme. Throws Failure.
Url parse_url(const std::string& text, const std::map<std::string, std::string>& ports);

// A server's words, fit for a message: one line of at most 200 characters.
std::string printable(std::string_view text);

}  // namespace flashjit::remote_plugin
