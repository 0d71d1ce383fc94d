// The bytes of one entry's file.
//
//   entry    = head checksum(head) payload
//   head     = magic version key_size metadata_size payload_size checksum(payload) key metadata
//   magic    = "FLASHJIT"
//   version  = u32                 entry_format_version; also names the folder, so versions never meet
//   *_size   = u32                 bytes; together with the fixed parts exactly the size of the file
//   checksum = 32 octets           digest() of what is named: 128-bit XXH3, hexadecimal
//   key      = key_size octets     Key::serialized()
//   metadata = metadata_size octets  JSON text
//   payload  = payload_size octets   machine code
//
// u32 is little-endian. The head vouches for the payload through the checksum inside it, so a listing can
// trust key and metadata without reading the payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "cache/key.hpp"

namespace flashjit {

inline constexpr std::uint32_t entry_format_version = 3;

struct CacheEntry {
  Key key;
  std::string metadata;  // JSON text, for people and for `cache ls`
  std::string payload;   // machine code
};

// Nothing, with the reason in `why`, for an entry beyond the limits (key 1 MiB, metadata 16 MiB, payload 256
// MiB).
std::optional<std::string> encode_entry(const CacheEntry& entry, std::string& why);

// Fills `to` with the next `size` bytes; false if there are fewer.
using ByteSource = std::function<bool(char* to, std::size_t size)>;

// Reads an entry out of a file of `file_size` bytes that nobody vouches for. Returns what is wrong with it,
// or nothing and the entry. Allocates no more than the limits above, and only after the sizes were found to
// add up. Without `with_payload` the payload is neither read nor checked.
std::string decode_entry(std::uint64_t file_size, const ByteSource& read, bool with_payload,
                         CacheEntry& entry);

}  // namespace flashjit
