#include "cache/entry_format.hpp"

#include "cache/bytes.hpp"
#include "cache/signature.hpp"
#include "codegen/base/digest.hpp"

namespace flashjit {
namespace {

constexpr std::string_view magic = "FLASHJIT";
constexpr std::size_t fixed_size = magic.size() + 4 * sizeof(std::uint32_t) + digest_size;
constexpr std::uint64_t max_key_size = std::uint64_t{1} << 20;
constexpr std::uint64_t max_metadata_size = std::uint64_t{16} << 20;
constexpr std::uint64_t max_payload_size = std::uint64_t{256} << 20;

}  // namespace

std::optional<std::string> encode_entry(const CacheEntry& entry, std::string& why) {
  const std::string key = entry.key.serialized();
  if (key.size() > max_key_size || entry.metadata.size() > max_metadata_size ||
      entry.payload.size() > max_payload_size) {
    why = "the entry is larger than the format allows";
    return std::nullopt;
  }
  std::string bytes;
  bytes.reserve(fixed_size + key.size() + entry.metadata.size() + digest_size + entry.payload.size() +
                entry.signature.size());
  bytes += magic;
  put_u32(bytes, entry_format_version);
  put_u32(bytes, static_cast<std::uint32_t>(key.size()));
  put_u32(bytes, static_cast<std::uint32_t>(entry.metadata.size()));
  put_u32(bytes, static_cast<std::uint32_t>(entry.payload.size()));
  bytes += digest(entry.payload);
  bytes += key;
  bytes += entry.metadata;
  bytes += digest(bytes);
  bytes += entry.payload;
  bytes += entry.signature;
  return bytes;
}

std::string decode_entry(std::uint64_t file_size, const ByteSource& read, bool with_payload,
                         CacheEntry& entry) {
  if (file_size == 0) return "empty file";
  if (file_size < fixed_size + digest_size)
    return "too short for an entry (" + std::to_string(file_size) + " bytes)";
  std::string head(fixed_size, '\0');
  if (!read(head.data(), head.size())) return "ends early";

  ByteReader fixed(head);
  if (fixed.take(magic.size()) != magic) return "not a flashjit entry";
  if (const std::uint32_t version = fixed.u32(); version != entry_format_version) {
    return "format version " + std::to_string(version) + " instead of " +
           std::to_string(entry_format_version);
  }
  const std::uint64_t key_size = fixed.u32(), metadata_size = fixed.u32(), payload_size = fixed.u32();
  const std::string payload_checksum(fixed.take(digest_size));
  const std::uint64_t parts = fixed_size + key_size + metadata_size + digest_size + payload_size;
  if (key_size > max_key_size || metadata_size > max_metadata_size || payload_size > max_payload_size ||
      (parts != file_size && parts + signature_line_size != file_size)) {
    return "the sizes in its header do not add up to its " + std::to_string(file_size) + " bytes";
  }

  head.resize(fixed_size + key_size + metadata_size);
  std::string checksum(digest_size, '\0');
  if (!read(head.data() + fixed_size, head.size() - fixed_size) || !read(checksum.data(), checksum.size())) {
    return "ends early";
  }
  if (digest(head) != checksum) return "the checksum of header, key and metadata does not match";
  std::optional<CacheKey> key = CacheKey::parse(std::string_view(head).substr(fixed_size, key_size));
  if (!key) return "malformed key";
  entry.key = std::move(*key);
  entry.metadata = head.substr(fixed_size + key_size);
  entry.payload.clear();
  entry.signature.clear();
  if (!with_payload) return {};

  entry.payload.resize(payload_size);
  if (!read(entry.payload.data(), payload_size)) return "ends early";
  if (digest(entry.payload) != payload_checksum) return "the checksum of the payload does not match";
  if (parts == file_size) return {};
  entry.signature.resize(signature_line_size);
  if (!read(entry.signature.data(), signature_line_size)) return "ends early";
  if (!parse_signature(entry.signature)) return "what follows the payload is no signature";
  return {};
}

std::string decode_entry(std::string_view bytes, CacheEntry& entry) {
  std::string_view left = bytes;
  const auto read = [&](char* to, std::size_t size) {
    if (size > left.size()) return false;
    left.copy(to, size);
    left.remove_prefix(size);
    return true;
  };
  return decode_entry(bytes.size(), read, true, entry);
}

}  // namespace flashjit
