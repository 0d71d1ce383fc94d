// 128-bit content digest (XXH3). Not a defence against forgery: whoever can write the cache can run code
// anyway, which is why cache/ refuses folders that others can write to.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace flashjit {

inline constexpr std::size_t digest_size = 32;

// `digest_size` lower-case hexadecimal digits.
std::string digest(std::string_view bytes);

}  // namespace flashjit
