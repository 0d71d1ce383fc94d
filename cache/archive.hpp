// Plain tar archives (POSIX ustar): what `tar tf` lists.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cache/entry_format.hpp"

namespace flashjit {

// Takes bytes; false where they could not be written.
using ByteSink = std::function<bool(const char* from, std::size_t size)>;

// Appends a regular file. The same members in the same order give the same bytes: no times, no owners.
// False for a name that the format cannot hold (100 octets, or 155 of folders before them), or if the sink
// fails.
bool write_member(const ByteSink& sink, std::string_view name, std::string_view content);
bool write_archive_end(const ByteSink& sink);

struct ArchiveMember {
  std::string name;
  char type = '0';  // '0' a regular file, '1' and '2' links, '5' a folder, 'x' and 'g' extended headers, ...
  std::uint64_t size = 0;
};

// Reads an archive that nobody vouches for, front to back, and gives each member to `visit`, with a source of
// its content that ends where it does. Returns what is wrong with the archive, or nothing.
std::string read_archive(
    const ByteSource& read,
    const std::function<void(const ArchiveMember& member, const ByteSource& content)>& visit);

}  // namespace flashjit
