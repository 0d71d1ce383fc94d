#include "cache/key.hpp"

#include "cache/bytes.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

// Far more than any key has, and few enough to compare each label with all labels before it.
constexpr std::uint32_t max_fields = 1024;

}  // namespace

CacheKey& CacheKey::add(std::string_view label, std::string_view value) {
  if (find(label)) {
    throw Error(ErrorCode::internal, "cache key: field '" + std::string(label) + "' was given twice");
  }
  fields_.push_back({std::string(label), std::string(value)});
  return *this;
}

const std::string* CacheKey::find(std::string_view label) const {
  for (const CacheKeyField& field : fields_) {
    if (field.label == label) return &field.value;
  }
  return nullptr;
}

std::string CacheKey::digest() const {
  return flashjit::digest(serialized());
}

std::string CacheKey::serialized() const {
  std::string bytes;
  put_u32(bytes, static_cast<std::uint32_t>(fields_.size()));
  for (const CacheKeyField& field : fields_) {
    put_text(bytes, field.label);
    put_text(bytes, field.value);
  }
  return bytes;
}

std::optional<CacheKey> CacheKey::parse(std::string_view bytes) {
  CacheKey key;
  ByteReader reader(bytes);
  const std::uint32_t count = reader.u32();
  if (count > max_fields) return std::nullopt;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::string_view label = reader.text();
    const std::string_view value = reader.text();
    if (!reader.ok() || key.find(label)) return std::nullopt;
    key.add(label, value);
  }
  if (!reader.ok() || !reader.at_end()) return std::nullopt;
  return key;
}

std::string explain_difference(const CacheKey& a, const CacheKey& b) {
  std::string lines;
  const auto line = [&lines](const std::string& label, const std::string* left, const std::string* right) {
    lines += label + ": " + (left ? *left : "(absent)") + " | " + (right ? *right : "(absent)") + "\n";
  };
  for (const CacheKeyField& field : a.fields()) {
    const std::string* other = b.find(field.label);
    if (!other || *other != field.value) line(field.label, &field.value, other);
  }
  for (const CacheKeyField& field : b.fields()) {
    if (!a.find(field.label)) line(field.label, nullptr, &field.value);
  }
  if (lines.empty() && a != b) lines = "the same fields in another order\n";
  return lines;
}

}  // namespace flashjit
