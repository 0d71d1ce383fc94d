#include "cache/tune_store.hpp"

#include <algorithm>
#include <cerrno>

#include "cache/folder.hpp"
#include "codegen/base/digest.hpp"

namespace flashjit {
namespace {

constexpr std::string_view record_suffix = ".json";
constexpr std::size_t largest_file = std::size_t{4} << 20;

std::string record_name(const TuneKey& key) {
  return cache_key(key).digest() + std::string(record_suffix);
}

bool is_record_name(std::string_view name) {
  return name.size() == digest_size + record_suffix.size() && name.ends_with(record_suffix) &&
         name.find_first_not_of("0123456789abcdef") == digest_size;
}

// "NVIDIA H200" -> "nvidia-h200". Two devices may share a folder, since keys hold the full name.
std::string slug(std::string_view device) {
  std::string text;
  for (const char c : device.substr(0, 64)) {
    const bool is_digit = c >= '0' && c <= '9', is_upper = c >= 'A' && c <= 'Z';
    if (is_digit || is_upper || (c >= 'a' && c <= 'z')) {
      text += static_cast<char>(is_upper ? c - 'A' + 'a' : c);
    } else if (!text.empty() && text.back() != '-') {
      text += '-';
    }
  }
  while (!text.empty() && text.back() == '-') text.pop_back();
  return text.empty() ? "device" : text;
}

File open_tune(const std::string& folder, bool create, std::string* why) {
  const File parent = open_cache_folder(folder, create, why);
  return parent ? open_folder(parent.get(), "tune", create, why) : File();
}

File open_device(const std::string& folder, const std::string& device, bool create, std::string* why) {
  const File tune = open_tune(folder, create, why);
  return tune ? open_folder(tune.get(), slug(device), create, why) : File();
}

std::string path_in(const std::string& folder, const TuneKey& key) {
  return folder + "/" + TuneStore::name(key);
}

Finding read_record(int file, const struct stat& status, std::optional<TuneRecord>& record,
                    std::string& signature) {
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size > largest_file) return {"larger than a tune record", true};
  std::string text(size, '\0'), damage;
  if (!read_fully(file, text.data(), size)) {
    return errno == 0 ? Finding{"ends early", true} : Finding{error_text(errno), false};
  }
  const SignedBytes parts = split_signature(text);
  signature = parts.line;
  record = parse_tune_record(parts.body, damage);
  return {damage, !record};
}

}  // namespace

CacheKey cache_key(const TuneKey& key) {
  const Shape& b = key.bucket;
  CacheKey result;
  result.add("tune", std::to_string(tune_format_version));
  result.add("spec", key.spec).add("target", key.target).add("device", key.device);
  std::string sizes;
  for (const int size : {b.batch, b.seqlen_q, b.seqlen_k, b.num_heads_q, b.num_heads_kv})
    sizes += std::to_string(size) + " ";
  result.add("bucket", sizes);
  if (b.page_size) result.add("page_size", std::to_string(b.page_size));  // contiguous kernels' keys lack it
  return result;
}

std::optional<TuneStore::Found> TuneStore::lookup(const TuneKey& key, const TuneEnvironment& here,
                                                  std::string* why) const {
  tell(why, {});
  const std::string name = record_name(key);
  const auto find = [&](const std::string& folder, bool bundled) -> std::optional<Found> {
    const File device = folder.empty() ? File() : open_device(folder, key.device, false, why);
    std::optional<TuneRecord> record;
    std::string signature;
    const auto read = [&](int file, const struct stat& status) -> Finding {
      Finding finding = read_record(file, status, record, signature);
      if (record && record->key != key) return {"holds the record of another key", true};
      if (record && asks_for_signatures(device.get(), "../.."))
        finding.reason = why_not_signed(TuneStore::name(key), to_json(*record) + signature, verifier_);
      return finding;
    };
    std::string damage;
    if (!device || !read_file(device.get(), name, !bundled, read, &damage)) {
      if (!damage.empty()) tell(why, std::move(damage));
      return std::nullopt;
    }
    std::string first_guess = difference(record->environment, here);
    return Found{std::move(*record), path_in(folder, key), bundled, std::move(first_guess),
                 std::move(signature)};
  };
  for (const std::string& layer : layers_) {
    if (std::optional<Found> found = find(layer, true)) return found;
  }
  return find(folder_, false);
}

std::string TuneStore::name(const TuneKey& key) {
  return "tune/" + slug(key.device) + "/" + record_name(key);
}

std::string TuneStore::path(const TuneKey& key) const {
  return folder_.empty() ? std::string() : path_in(folder_, key);
}

bool TuneStore::publish(const TuneRecord& record, std::string* why, const std::string& signature) const {
  std::string reason = "there is no cache folder";
  const File device = folder_.empty() ? File() : open_device(folder_, record.key.device, true, &reason);
  std::string bytes = to_json(record) + signature;
  if (device &&
      (!asks_for_signatures(device.get(), "../..") ||
       fit_for_signed(name(record.key), bytes, verifier_, signer_, &reason)) &&
      publish_file(device.get(), record_name(record.key), bytes, &reason))
    return true;
  tell(why, "cannot store the tune record: " + reason);
  return false;
}

std::vector<TuneStore::Listing> TuneStore::list() const {
  std::vector<Listing> listings;
  const auto add = [&](const std::string& folder, bool bundled) {
    const File tune = folder.empty() ? File() : open_tune(folder, false, nullptr);
    if (!tune) return;
    const std::size_t first = listings.size();
    for (const std::string& device_name : names_in(tune.get())) {
      const File device = open_folder(tune.get(), device_name, false, nullptr);
      if (!device) continue;
      for (const std::string& name : names_in(device.get())) {
        if (!is_record_name(name)) continue;
        Listing item{folder + "/tune/" + device_name + "/" + name, bundled, {}, {}, {}};
        const auto read = [&](int file, const struct stat& status) {
          return read_record(file, status, item.record, item.signature);
        };
        const std::optional<Finding> finding = inspect_file(device.get(), name, read);
        if (!finding) continue;
        item.damage = finding->reason;
        if (item.record &&
            (record_name(item.record->key) != name || slug(item.record->key.device) != device_name)) {
          item.record.reset();
          item.damage = "holds the record of another key";
        }
        if (item.record && asks_for_signatures(device.get(), "../..")) {
          item.damage = why_not_signed(TuneStore::name(item.record->key),
                                       to_json(*item.record) + item.signature, verifier_);
          if (!item.damage.empty()) item.record.reset();
        }
        listings.push_back(std::move(item));
      }
    }
    std::sort(listings.begin() + static_cast<std::ptrdiff_t>(first), listings.end(),
              [](const Listing& a, const Listing& b) { return a.path < b.path; });
  };
  for (const std::string& layer : layers_) add(layer, true);
  add(folder_, false);
  return listings;
}

}  // namespace flashjit
