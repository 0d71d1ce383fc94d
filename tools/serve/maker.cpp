#include "tools/serve/maker.hpp"

#include <chrono>
#include <optional>
#include <utility>

#include "cache/entry_format.hpp"
#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "runtime/compiler.hpp"

namespace flashjit::serve {

Made Maker::make(const CompileRequest& request, const std::string& text, const std::atomic<bool>& cancelled) {
  const DiskCache& disk = *cache_.disk;
  const auto compiler = compiler_for(request.source.target);
  const CacheKey key = entry_key(request.key, compiler->options(request.source), compiler->identity());
  Made made{DiskCache::name(key), {}, {}, {}, {}, 0};
  const auto note = [&](const std::string& why) {
    if (!why.empty() && made.note.find(why) == std::string::npos)
      made.note += (made.note.empty() ? "" : "; ") + why;
  };
  const auto publish = [&] {
    std::string why;
    if (!disk.publish_bytes(key, made.bytes, Flush::no, &why)) note(why);
  };
  // Whether the bytes are an entry of the key, signed or not; signs them.
  const auto accept = [&](std::string bytes) -> std::string {
    CacheEntry entry;
    if (std::string damage = decode_entry(bytes, entry); !damage.empty()) return damage;
    if (entry.key != key) return "holds another key";
    std::string why;
    if (!fit_for_signed(made.name, bytes, cache_.verifier, cache_.signer, &why)) return why;
    std::optional<StoredKernel> stored = unpack_kernel(std::move(entry));
    if (!stored) return "is no kernel";
    made.log = std::move(stored->compiled.log);
    made.bytes = std::move(bytes);
    return {};
  };
  const auto find = [&] {
    std::string why;
    const std::optional<CacheEntry> entry = disk.lookup(key, &why);
    note(why);
    if (!entry) return false;
    std::optional<std::string> bytes = encode_entry(*entry, why);
    if (bytes) why = accept(std::move(*bytes));
    note(why);
    if (!made.bytes.empty()) made.how = "found";
    return !made.bytes.empty();
  };

  if (find()) return made;
  std::string why;
  const KeyLock lock = disk.lock(key, std::chrono::minutes(1), &why, [&] { return cancelled.load(); });
  note(why);
  if (find()) return made;
  RemoteCache::Lease lease;
  if (cache_.remote) {
    RemoteCache::Fetched fetched =
        cache_.remote->fetch(made.name, cache_.remote->fetch_limits(), note, [&] { return !cancelled; });
    lease = std::move(fetched.lease);
    if (fetched.got.answer == Answer::yes) note(accept(std::move(fetched.got.bytes)));
    if (!made.bytes.empty()) {
      made.how = "fetched";
      publish();
      return made;
    }
  }
  const auto start = std::chrono::steady_clock::now();
  std::string bytes = nursery_.compile(text, cancelled);
  made.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (const std::string damage = accept(std::move(bytes)); !damage.empty())
    throw Error(ErrorCode::compile_failed, "what the process that compiles made " + damage);
  made.how = "compiled";
  publish();
  if (cache_.remote) {
    cache_.remote->put(made.name, made.bytes);
    cache_.remote->put_pointer(DiskCache::request_name(request.key), key.digest());
  }
  return made;
}

}  // namespace flashjit::serve
