#include "cache/archive.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>

namespace flashjit {
namespace {

constexpr std::size_t block_size = 512;
constexpr std::uint64_t max_member_size = std::uint64_t{1} << 33;  // the limit of 11 octal digits

// The ustar header block of IEEE Std 1003.1 (pax). A text
// ends at a zero byte or fills its field; numbers are octal.
struct Header {
  char name[100];
  char mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8];
  char type;
  char link_name[100];
  char magic[6], version[2];
  char user[32], group[32];
  char device_major[8], device_minor[8];
  char prefix[155];
  char unused[12];
};
static_assert(sizeof(Header) == block_size);

template <std::size_t n>
std::string text(const char (&field)[n]) {
  return {field, ::strnlen(field, n)};
}

template <std::size_t n>
void put_octal(char (&field)[n], std::uint64_t value) {
  for (std::size_t i = n - 1; i-- > 0; value >>= 3) field[i] = static_cast<char>('0' + (value & 7));
}

// The octal number of a field; its digits end at a space, a zero byte or the field's end.
template <std::size_t n>
std::optional<std::uint64_t> octal(const char (&field)[n]) {
  std::uint64_t value = 0;
  std::size_t i = 0;
  while (i < n && field[i] == ' ') ++i;
  if (i == n || field[i] < '0' || field[i] > '7') return std::nullopt;
  for (; i < n && field[i] >= '0' && field[i] <= '7'; ++i)
    value = value << 3 | static_cast<unsigned>(field[i] - '0');
  if (i < n && field[i] != ' ' && field[i] != '\0') return std::nullopt;
  return value;
}

// The sum of all octets, with spaces in place of the checksum.
std::uint64_t checksum(Header header) {
  std::memset(header.checksum, ' ', sizeof header.checksum);
  std::array<unsigned char, block_size> octets;
  std::memcpy(octets.data(), &header, block_size);
  std::uint64_t sum = 0;
  for (const unsigned char octet : octets) sum += octet;
  return sum;
}

constexpr std::size_t padding(std::uint64_t size) {
  return static_cast<std::size_t>((block_size - size % block_size) % block_size);
}

}  // namespace

bool write_member(const ByteSink& sink, std::string_view name, std::string_view content) {
  Header header{};
  if (name.size() > sizeof header.name) {
    const std::size_t slash = name.find('/', name.size() - sizeof header.name - 1);
    if (slash == std::string_view::npos || slash > sizeof header.prefix) return false;
    name.copy(header.prefix, slash);
    name.remove_prefix(slash + 1);
  }
  if (name.empty() || content.size() >= max_member_size) return false;
  name.copy(header.name, sizeof header.name);
  put_octal(header.mode, 0644);
  put_octal(header.uid, 0);
  put_octal(header.gid, 0);
  put_octal(header.size, content.size());
  put_octal(header.mtime, 0);
  header.type = '0';
  std::memcpy(header.magic, "ustar", sizeof header.magic);
  std::memset(header.version, '0', sizeof header.version);
  put_octal(header.checksum, checksum(header));
  constexpr std::array<char, block_size> zeros{};
  return sink(reinterpret_cast<const char*>(&header), sizeof header) &&
         sink(content.data(), content.size()) && sink(zeros.data(), padding(content.size()));
}

bool write_archive_end(const ByteSink& sink) {
  constexpr std::array<char, 2 * block_size> zeros{};
  return sink(zeros.data(), zeros.size());
}

std::string read_archive(
    const ByteSource& read,
    const std::function<void(const ArchiveMember& member, const ByteSource& content)>& visit) {
  for (;;) {
    Header header;
    if (!read(reinterpret_cast<char*>(&header), sizeof header)) return "the archive ends early";
    if (static constexpr Header zeros{}; std::memcmp(&header, &zeros, sizeof header) == 0) return {};
    if (std::memcmp(header.magic, "ustar", 5) != 0) return "not a ustar archive";
    if (octal(header.checksum) != checksum(header)) return "the checksum of a member's header does not match";
    const std::optional<std::uint64_t> size = octal(header.size);
    if (!size || *size >= max_member_size) return "the size of a member is malformed";

    ArchiveMember member{text(header.name), header.type ? header.type : '0', *size};
    if (header.prefix[0]) member.name = text(header.prefix) + "/" + member.name;
    std::uint64_t left = *size;
    const ByteSource content = [&](char* to, std::size_t count) {
      if (count > left || !read(to, count)) return false;
      left -= count;
      return true;
    };
    visit(member, content);
    std::array<char, block_size> skipped;
    for (left += padding(*size); left > 0;) {
      const std::size_t count = std::min<std::uint64_t>(left, skipped.size());
      if (!read(skipped.data(), count)) return "the archive ends early";
      left -= count;
    }
  }
}

}  // namespace flashjit
