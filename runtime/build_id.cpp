#include "runtime/build_id.hpp"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <vector>

namespace flashjit {
namespace {

template <class T>
std::vector<T> read_at(std::ifstream& file, std::uint64_t offset, std::size_t count) {
  std::vector<T> items(count);
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(items.data()), static_cast<std::streamsize>(count * sizeof(T)));
  return items;
}

}  // namespace

// Sections rather than segments: PyPI's wheels are edited after linking, which moves the section and leaves
// the segment empty.
std::string build_id(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const ElfW(Ehdr) header = read_at<ElfW(Ehdr)>(file, 0, 1)[0];
  if (!file || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return {};
  for (const ElfW(Shdr) & section : read_at<ElfW(Shdr)>(file, header.e_shoff, header.e_shnum)) {
    constexpr std::size_t id_begin = sizeof(ElfW(Nhdr)) + 4;  // after the name "GNU"
    if (!file || section.sh_type != SHT_NOTE || section.sh_size < id_begin || section.sh_size > 4096)
      continue;
    const auto bytes = read_at<unsigned char>(file, section.sh_offset, section.sh_size);
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
