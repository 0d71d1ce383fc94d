// Little-endian numbers and length-prefixed text, as stored in entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace flashjit {

inline void put_u32(std::string& out, std::uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) out += static_cast<char>(value >> shift);
}

inline void put_text(std::string& out, std::string_view text) {
  put_u32(out, static_cast<std::uint32_t>(text.size()));
  out += text;
}

// Reads untrusted bytes front to back. After a read beyond
// the end, ok() is false and every read returns nothing.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  std::string_view take(std::size_t size) {
    ok_ = ok_ && size <= rest_.size();
    if (!ok_) return {};
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  std::uint32_t u32() {
    std::uint32_t value = 0;
    int shift = 0;
    for (const char byte : take(4)) {
      value |= static_cast<std::uint32_t>(static_cast<unsigned char>(byte)) << shift;
      shift += 8;
    }
    return value;
  }
  std::string_view text() { return take(u32()); }

  bool ok() const { return ok_; }
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace flashjit
