// Fuzzes archives as they are, and with the checksums of their headers
// corrected, so that the code behind the checksums is reached.
#include "cache/archive.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

namespace {

void read_all(const std::string& archive) {
  std::size_t at = 0;
  const ByteSource read = [&](char* to, std::size_t count) {
    if (count > archive.size() - at) return false;
    if (count > 0) std::memcpy(to, archive.data() + at, count);
    at += count;
    return true;
  };
  read_archive(read, [](const ArchiveMember& member, const ByteSource& content) {
    FUZZ_CHECK(member.name.size() <= 256);
    std::string bytes(std::min<std::uint64_t>(member.size, 4096), '\0');
    if (content(bytes.data(), bytes.size()))
      FUZZ_CHECK(!content(bytes.data(), member.size - bytes.size() + 1));
  });
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string archive(fuzz::text_of(data, size));
  read_all(archive);
  for (std::size_t block = 0; block + 512 <= archive.size(); block += 512) {
    if (archive.compare(block + 257, 5, "ustar") != 0) continue;
    std::fill_n(archive.begin() + static_cast<std::ptrdiff_t>(block) + 148, 8, ' ');
    unsigned sum = 0;
    for (std::size_t i = 0; i < 512; ++i) sum += static_cast<unsigned char>(archive[block + i]);
    char text[8];
    std::snprintf(text, sizeof text, "%06o", sum & 0777777);
    archive.replace(block + 148, 7, text, 7);
  }
  read_all(archive);
  return 0;
}
