#include "cache/signature.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <algorithm>
#include <cerrno>
#include <ctime>
#include <sstream>

#include "cache/file.hpp"
#include "cache/trust.hpp"
#include "codegen/base/error.hpp"
#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

constexpr std::string_view before_time = R"({"signed": ")", before_key = R"(", "key": ")",
                           before_value = R"(", "signature": ")", after_value = "\"}\n";
constexpr std::string_view some_time = "2026-11-26T05:00:00Z";
static_assert(signature_line_size == before_time.size() + some_time.size() + before_key.size() +
                                         public_key_digits + before_value.size() + signature_digits +
                                         after_value.size());
constexpr std::size_t largest_trust_file = std::size_t{1} << 20;

bool is_time(std::string_view text) {
  for (std::size_t i = 0; i < some_time.size(); ++i) {
    const bool digit = some_time[i] >= '0' && some_time[i] <= '9';
    if (digit ? text[i] < '0' || text[i] > '9' : text[i] != some_time[i]) return false;
  }
  return true;
}

[[noreturn]] void refuse(const std::string& place, const std::string& what) {
  throw Error(ErrorCode::cache_failed, place + ": " + what);
}

// Spaces around an item of a file, and a comment after it, do not count.
std::string_view trimmed(std::string_view text) {
  text = text.substr(0, text.find('#'));
  const std::size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

}  // namespace

bool is_hex(std::string_view text, std::size_t size) {
  return text.size() == size && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_key_name(std::string_view text) {
  return !text.empty() && text.size() <= 64 && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
                  c == '_' || c == '-';
         });
}

std::string to_line(const Signature& signature) {
  std::string line;
  for (const std::string_view part :
       {before_time, std::string_view(signature.time), before_key, std::string_view(signature.key),
        before_value, std::string_view(signature.value), after_value})
    line += part;
  return line;
}

std::optional<Signature> parse_signature(std::string_view line) {
  if (line.size() != signature_line_size) return std::nullopt;
  const auto take = [&](std::size_t size) {
    const std::string_view part = line.substr(0, size);
    line.remove_prefix(size);
    return part;
  };
  Signature found;
  if (take(before_time.size()) != before_time) return std::nullopt;
  found.time = take(some_time.size());
  if (take(before_key.size()) != before_key) return std::nullopt;
  found.key = take(public_key_digits);
  if (take(before_value.size()) != before_value) return std::nullopt;
  found.value = take(signature_digits);
  if (line != after_value || !is_time(found.time) || !is_hex(found.key, public_key_digits) ||
      !is_hex(found.value, signature_digits))
    return std::nullopt;
  return found;
}

SignedBytes split_signature(std::string_view bytes) {
  if (bytes.size() >= signature_line_size) {
    const std::size_t at = bytes.size() - signature_line_size;
    if (parse_signature(bytes.substr(at))) return {bytes.substr(0, at), bytes.substr(at)};
  }
  return {bytes, {}};
}

std::string signed_message(std::string_view name, std::string_view time, std::string_view body) {
  std::string message = "flashjit 1\n";
  message.reserve(message.size() + name.size() + time.size() + body.size() + 2);
  message += name;
  message += '\n';
  message += time;
  message += '\n';
  message += body;
  return message;
}

Trust Trust::parse(std::string_view list) {
  Trust trust;
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(':'));
    list.remove_prefix(std::min(item.size() + 1, list.size()));
    if (item.find('/') != std::string_view::npos)
      trust.add_file(std::string(item));
    else if (!item.empty())
      trust.add(item, "the list of trusted keys");
  }
  for (const auto& [key, name] : trust.revoked_) trust.names_.erase(key);
  return trust;
}

void Trust::add(std::string_view item, const std::string& place) {
  const bool revokes = item.starts_with('-');
  const std::string_view pair = item.substr(revokes ? 1 : 0);
  const std::size_t equals = pair.find('=');
  const std::string_view name = pair.substr(0, equals);
  const std::string_view key = equals == std::string_view::npos ? "" : pair.substr(equals + 1);
  if (!is_key_name(name) || !is_hex(key, public_key_digits))
    refuse(place, in_quotes(item) + " is no key: NAME=KEY would be one, with a name of up to 64 letters, " +
                      "digits, '.', '_' and '-' and the 64 hexadecimal digits that flashjit cache keygen " +
                      "prints; -NAME=KEY revokes it, and a file of keys is a path with a slash");
  (revokes ? revoked_ : names_).emplace(key, name);
}

void Trust::add_file(const std::string& path) {
  const std::string place = "file of trusted keys " + path;
  const File file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status;
  if (!file || ::fstat(file.get(), &status) != 0) refuse(place, error_text(errno));
  if (!S_ISREG(status.st_mode)) refuse(place, "not a regular file");
  if (const std::string reason = flashjit::distrust(status); !reason.empty())
    refuse(place, reason + ", and could trust keys of their own; run chmod go-w on it");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size > largest_trust_file) refuse(place, "larger than a list of keys");
  std::string text(size, '\0');
  if (!read_fully(file.get(), text.data(), size)) refuse(place, errno ? error_text(errno) : "ends early");
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (const std::string_view item = trimmed(line); !item.empty()) add(item, place);
  }
}

std::string Trust::distrust(const std::string& key) const {
  if (const auto found = revoked_.find(key); found != revoked_.end())
    return "signed by key " + found->second + ", which is revoked";
  if (!names_.contains(key)) return "signed by the unknown key " + key;
  return {};
}

std::string why_not_signed(std::string_view name, std::string_view bytes, const Verifier& verifier) {
  const std::string asks = "the folder asks for signatures, and ";
  if (!verifier) return asks + "here they are not checked";
  const std::string reason = verifier(name, bytes);
  return reason.empty() ? "" : asks + "it is " + reason;
}

bool fit_for_signed(std::string_view name, std::string& bytes, const Verifier& verifier, const Signer& signer,
                    std::string* why) {
  std::string reason;
  if (split_signature(bytes).line.empty() && !signer) {
    reason =
        "the folder asks for signatures, and there is no key to sign with: FLASHJIT_SIGNING_KEY names its "
        "file";
  } else {
    try {
      if (split_signature(bytes).line.empty()) bytes += signer(name, bytes);
      reason = why_not_signed(name, bytes, verifier);
    } catch (const Error& error) {
      reason = error.message();
    }
  }
  if (why && !reason.empty()) *why = reason;
  return reason.empty();
}

std::string signing_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &parts))};
}

}  // namespace flashjit
