// Fuzzes entry files as they are. No mutation passes their
// checksums, so keys and metadata are fuzzed separately.
#include <cstring>

#include "cache/kernel_entry.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

namespace {

std::string decode(std::string_view file, CacheEntry& entry) {
  std::size_t at = 0;
  const auto read = [&](char* to, std::size_t count) {
    if (count > file.size() - at) return false;
    if (count > 0) std::memcpy(to, file.data() + at, count);
    at += count;
    return true;
  };
  return decode_entry(file.size(), read, true, entry);
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes = fuzz::text_of(data, size);
  CacheEntry entry;
  std::string why;
  if (decode(bytes, entry).empty()) FUZZ_CHECK(encode_entry(entry, why) == bytes);

  if (const auto key = CacheKey::parse(bytes)) FUZZ_CHECK(key->serialized() == bytes);
  // The last quarter is the payload, so that a seed of metadata can be followed by one.
  const CacheEntry made{CacheKey().add("spec", "s"), std::string(bytes.substr(0, size - size / 4)),
                        std::string(bytes.substr(size - size / 4))};
  const auto file = encode_entry(made, why);
  FUZZ_CHECK(file && decode(*file, entry).empty() && entry.metadata == made.metadata);
  if (const auto kernel = unpack_kernel(made)) FUZZ_CHECK(!kernel->steps.empty());
  return 0;
}
