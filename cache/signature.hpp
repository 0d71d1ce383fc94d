// Who made an entry or a tune record: a line of text after its bytes, and the keys that are trusted.
//
//   {"signed": "2026-11-26T05:00:00Z", "key": "<64 hexadecimal digits>", "signature": "<128 digits>"}\n
//
// The signature is Ed25519's (RFC 8032) over signed_message(): the name under which the bytes are stored, the
// time, and the bytes themselves. The line has a fixed size, so bytes without one stay what they were. The
// arithmetic is a plugin's (runtime/remote/); this folder only knows the functions.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace flashjit {

struct Signature {
  std::string time;   // UTC, "2026-11-26T05:00:00Z": the order of texts is the order of times
  std::string key;    // the public key, 64 lower-case hexadecimal digits
  std::string value;  // 128 lower-case hexadecimal digits
};

inline constexpr std::size_t public_key_digits = 64, signature_digits = 128;

std::string to_line(const Signature& signature);
inline constexpr std::size_t signature_line_size = 255;  // octets
// Nothing unless the text is exactly what to_line() returns for some signature.
std::optional<Signature> parse_signature(std::string_view line);

// Bytes, and the signature's line after them; empty if they end in none.
struct SignedBytes {
  std::string_view body, line;
};
SignedBytes split_signature(std::string_view bytes);

// The octets that are signed. `name` is the path in a cache folder: "v3/REQUEST-ENTRY.kernel".
std::string signed_message(std::string_view name, std::string_view time, std::string_view body);

// Whether `text` consists of `size` lower-case hexadecimal digits.
bool is_hex(std::string_view text, std::size_t size);

// A key's name: up to 64 letters, digits, '.', '_' and '-', no '-' first.
bool is_key_name(std::string_view text);

// The public keys that FLASHJIT_TRUST and the options list.
class Trust {
 public:
  // Items between colons, or, in a file, on lines of their own: NAME=KEY trusts a key, -NAME=KEY revokes it,
  // which outweighs any item that trusts it. An item with a slash is a file of items, which only this
  // process's user or root may be able to change; there '#' begins a comment. Throws cache_failed.
  static Trust parse(std::string_view list);

  bool empty() const { return names_.empty(); }
  const std::map<std::string, std::string>& names() const { return names_; }      // by key; not revoked
  const std::map<std::string, std::string>& revoked() const { return revoked_; }  // names by key
  // Why nothing that this key signed is used; empty if it is trusted.
  std::string distrust(const std::string& key) const;

 private:
  void add(std::string_view item, const std::string& place);
  void add_file(const std::string& path);
  std::map<std::string, std::string> names_, revoked_;
};

// Says what is wrong with the signature of the bytes of that name; empty if a trusted key has signed them.
using Verifier = std::function<std::string(std::string_view name, std::string_view bytes)>;
// The line for the bytes of that name, which end in none. Throws cache_failed without a usable key.
using Signer = std::function<std::string(std::string_view name, std::string_view body)>;

// Why the bytes do not count in a folder that asks for signatures; empty if they do.
std::string why_not_signed(std::string_view name, std::string_view bytes, const Verifier& verifier);
// Makes bytes fit for such a folder: signs them, unless they are signed, and checks the signature. Returns
// false with the reason in *why.
bool fit_for_signed(std::string_view name, std::string& bytes, const Verifier& verifier, const Signer& signer,
                    std::string* why);

// The present time as in Signature::time.
std::string signing_time();

}  // namespace flashjit
