// Plain tar archives (POSIX ustar), which `tar tf` can list.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cache/entry_format.hpp"

namespace flashjit {

// Takes bytes; returns false if they could not be written.
using ByteSink = std::function<bool(const char* from, std::size_t size)>;

// Appends a regular file. The same members in the same order give the same
// bytes: times and owners are left out. Returns false if the sink fails or the
// format cannot hold the name (100 octets, after up to 155 octets of folders).
bool write_member(const ByteSink& sink, std::string_view name, std::string_view content);
bool write_archive_end(const ByteSink& sink);

struct ArchiveMember {
  std::string name;
  char type = '0';  // '0' a regular file, '1' and '2' links, '5' a folder, 'x' and 'g' extended headers, ...
  std::uint64_t size = 0;
};

// Reads an untrusted archive front to back. Calls `visit` for each member with a source that ends
// where the member's content ends. Returns what is wrong with the archive; empty if nothing is.
std::string read_archive(
    const ByteSource& read,
    const std::function<void(const ArchiveMember& member, const ByteSource& content)>& visit);

}  // namespace flashjit
