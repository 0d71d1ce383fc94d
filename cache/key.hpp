// The identity of an entry: labelled, length-prefixed fields, and the digest of all of them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit {

struct CacheKeyField {
  std::string label, value;
  bool operator==(const CacheKeyField&) const = default;
};

class CacheKey {
 public:
  // Labels are unique within a key: throws internal if one is given twice.
  CacheKey& add(std::string_view label, std::string_view value);
  const std::vector<CacheKeyField>& fields() const { return fields_; }
  // The value of the field; null if there is none.
  const std::string* find(std::string_view label) const;
  // 32 hexadecimal digits over labels, values and their lengths.
  std::string digest() const;

  // The bytes that are hashed and stored: the number of fields, then for each field the label and the value,
  // each after its length. All numbers are 32-bit little-endian. Different keys have different bytes.
  std::string serialized() const;
  // Nothing unless the bytes are exactly those that serialized() returns for some key of up to 1024 fields.
  static std::optional<CacheKey> parse(std::string_view bytes);

  bool operator==(const CacheKey&) const = default;

 private:
  std::vector<CacheKeyField> fields_;
};

// The fields in which two keys differ, one line each ("compiler: nvrtc 13.0 | nvrtc 12.9"); empty for equal
// keys.
std::string explain_difference(const CacheKey& a, const CacheKey& b);

}  // namespace flashjit
