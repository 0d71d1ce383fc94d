#include "runtime/build_id.hpp"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "cache/file.hpp"

namespace flashjit {
namespace {

// Reads `count` items; returns none if the file ends before.
template <class T>
std::vector<T> read_at(const File& file, std::uint64_t offset, std::size_t count) {
  std::vector<T> items(count);
  const std::size_t bytes = count * sizeof(T);
  if (::pread(file.get(), items.data(), bytes, static_cast<off_t>(offset)) != static_cast<ssize_t>(bytes))
    items.clear();
  return items;
}

}  // namespace

// Reads sections, not segments: PyPI's wheels are edited after
// linking, which moves the section and leaves the segment empty.
std::string build_id(const std::string& path) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto headers = read_at<ElfW(Ehdr)>(file, 0, 1);
  if (headers.empty() || std::memcmp(headers[0].e_ident, ELFMAG, SELFMAG) != 0) return {};
  for (const ElfW(Shdr) & section : read_at<ElfW(Shdr)>(file, headers[0].e_shoff, headers[0].e_shnum)) {
    constexpr std::size_t id_begin = sizeof(ElfW(Nhdr)) + 4;  // after the name "GNU"
    if (section.sh_type != SHT_NOTE || section.sh_size < id_begin || section.sh_size > 4096) continue;
    const auto bytes = read_at<unsigned char>(file, section.sh_offset, section.sh_size);
    if (bytes.empty()) continue;
    ElfW(Nhdr) note;
    std::memcpy(&note, bytes.data(), sizeof note);
    if (note.n_type != NT_GNU_BUILD_ID || note.n_namesz != 4 || note.n_descsz > bytes.size() - id_begin)
      continue;
    std::string hex;
    for (std::size_t i = id_begin; i < id_begin + note.n_descsz; ++i) {
      hex += "0123456789abcdef"[bytes[i] >> 4];
      hex += "0123456789abcdef"[bytes[i] & 15];
    }
    return hex;
  }
  return {};
}

}  // namespace flashjit
