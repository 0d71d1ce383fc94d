// What identifies an entry: labelled, length-prefixed fields and the digest of them all.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flashjit {

struct KeyField {
  std::string label, value;
  bool operator==(const KeyField&) const = default;
};

class Key {
 public:
  // Labels are unique within a key: throws internal when one is given twice.
  Key& add(std::string_view label, std::string_view value);
  const std::vector<KeyField>& fields() const { return fields_; }
  // The value of that field; null if there is none.
  const std::string* find(std::string_view label) const;
  // 32 hexadecimal digits over labels, values and their lengths.
  std::string digest() const;

  // The form that is hashed and stored: number of fields, then for each the label and the value, each
  // preceded by its length; all numbers 32-bit little-endian. No two keys share it.
  std::string serialized() const;
  // Nothing if the bytes are not exactly what serialized() gives for some key of up to 1024 fields.
  static std::optional<Key> parse(std::string_view bytes);

  bool operator==(const Key&) const = default;

 private:
  std::vector<KeyField> fields_;
};

// The fields in which two keys differ, one line each ("compiler: nvrtc 13.0 | nvrtc 12.9"); empty for equal
// keys.
std::string explain_difference(const Key& a, const Key& b);

}  // namespace flashjit
