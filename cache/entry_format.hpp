// The bytes of one entry's file.
//
//   entry    = head checksum(head) payload [signature]
//   head     = magic version key_size metadata_size payload_size checksum(payload) key metadata
//   magic    = "FLASHJIT"
//   version  = u32                     entry_format_version, which also names the folder
//   *_size   = u32                     bytes; the parts, and a signature, are exactly the size of the file
//   checksum = 32 octets               digest() of the named part: 128-bit XXH3, hexadecimal
//   key      = key_size octets         CacheKey::serialized()
//   metadata = metadata_size octets    JSON text
//   payload  = payload_size octets     machine code
//   signature = a line of fixed size   signature.hpp: who made all before it; most entries have none
//
// u32 is little-endian. The head holds the payload's checksum and has a checksum
// of its own, so a listing can trust key and metadata without reading the payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "cache/key.hpp"

namespace flashjit {

inline constexpr std::uint32_t entry_format_version = 3;

struct CacheEntry {
  CacheKey key;
  std::string metadata;  // JSON text, for people and for `cache ls`
  std::string payload;   // machine code
  // The line of signature.hpp, which decode_entry() reads and does not judge; empty: none.
  std::string signature{};
};

// The entry's bytes; nothing, with the reason in `why`, if the entry
// is beyond the limits (key 1 MiB, metadata 16 MiB, payload 256 MiB).
std::optional<std::string> encode_entry(const CacheEntry& entry, std::string& why);

// Fills `to` with the next `size` bytes; returns false if there are fewer.
using ByteSource = std::function<bool(char* to, std::size_t size)>;

// Reads an entry from an untrusted file of `file_size` bytes. Returns what is wrong with it,
// or an empty text and the entry. Allocates no more than the limits above, and only after the
// sizes were found to add up. Without `with_payload` neither payload nor signature is read.
std::string decode_entry(std::uint64_t file_size, const ByteSource& read, bool with_payload,
                         CacheEntry& entry);

// The same of bytes in memory.
std::string decode_entry(std::string_view bytes, CacheEntry& entry);

}  // namespace flashjit
