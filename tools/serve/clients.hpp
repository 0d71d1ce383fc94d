// Who asks: the tokens that the service accepts, and their names.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit::serve {

class Clients {
 public:
  // Without tokens everybody may ask, and a client is an address.
  Clients() = default;
  // A file of lines NAME=TOKEN, which others may not read; '#' begins a comment. Throws Error(cache_failed).
  static Clients of_file(const std::string& path);

  bool any() const { return !tokens_.empty(); }
  // The client's name, by an Authorization header: "Bearer TOKEN", or Basic with NAME:TOKEN. Nothing if it is
  // not allowed.
  std::optional<std::string> name(std::string_view authorization, const std::string& address) const;

 private:
  struct Token {
    std::string name, value;
  };
  std::vector<Token> tokens_;
};

}  // namespace flashjit::serve
