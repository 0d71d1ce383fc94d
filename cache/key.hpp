// What identifies an entry: labelled, length-prefixed fields and the digest of them all.
#pragma once

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
  Key& add(std::string_view label, std::string_view value);
  const std::vector<KeyField>& fields() const { return fields_; }
  // 32 hexadecimal digits over labels, values and their lengths.
  std::string digest() const;
  bool operator==(const Key&) const = default;

 private:
  std::vector<KeyField> fields_;
};

}  // namespace flashjit
