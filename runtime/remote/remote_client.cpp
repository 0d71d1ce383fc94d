#include "runtime/remote/remote_client.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "cache/environment.hpp"
#include "cache/file.hpp"
#include "cache/fork.hpp"
#include "cache/trust.hpp"
#include "codegen/base/error.hpp"
#include "runtime/remote/plugin_client.hpp"

namespace flashjit {
namespace {

// A larger object is no entry: the limits of its parts together.
constexpr std::uint64_t largest_object = std::uint64_t{280} << 20;

class PluginStore : public RemoteStore {
 public:
  PluginStore(const flashjit_remote_plugin_api& plugin, flashjit_remote_store* store)
      : plugin_(plugin), store_(store) {}
  ~PluginStore() override { plugin_.close(store_); }

  Answer get(const std::string& name, std::string& bytes, std::string& why) override {
    flashjit_remote_text found{}, reason{};
    const int status = plugin_.get(store_, name.c_str(), &found, &reason);
    bytes = take_text(plugin_, found);
    return answer(status, reason, why);
  }
  Answer put(const std::string& name, std::string_view bytes, std::string& why) override {
    flashjit_remote_text reason{};
    return answer(plugin_.put(store_, name.c_str(), bytes.data(), bytes.size(), &reason), reason, why);
  }
  Answer exists(const std::string& name, std::string& why) override {
    flashjit_remote_text reason{};
    return answer(plugin_.exists(store_, name.c_str(), &reason), reason, why);
  }
  Answer lease(const std::string& name, const std::string& token, std::chrono::milliseconds ttl,
               std::string& why) override {
    flashjit_remote_text reason{};
    return answer(
        plugin_.lease(store_, name.c_str(), token.c_str(), static_cast<std::uint32_t>(ttl.count()), &reason),
        reason, why);
  }

  bool makes() const override { return plugin_.makes(store_) == 1; }
  Making make(const std::string& request, std::string& bytes, std::chrono::milliseconds& pause,
              std::string& why) override {
    flashjit_remote_text found{}, reason{};
    std::uint32_t pause_ms = 0;
    const int status = plugin_.make(store_, request.data(), request.size(), &found, &pause_ms, &reason);
    bytes = take_text(plugin_, found);
    why = take_text(plugin_, reason);
    pause = std::chrono::milliseconds(pause_ms);
    switch (status) {
      case FLASHJIT_REMOTE_YES:
        return Making::made;
      case FLASHJIT_REMOTE_NO:
        return Making::refused;
      case FLASHJIT_REMOTE_LATER:
        return pause_ms == 0 ? Making::going_on : Making::busy;
      default:
        return Making::failed;
    }
  }

 private:
  Answer answer(int status, flashjit_remote_text& reason, std::string& why) const {
    why = take_text(plugin_, reason);
    return status == FLASHJIT_REMOTE_YES  ? Answer::yes
           : status == FLASHJIT_REMOTE_NO ? Answer::no
                                          : Answer::failed;
  }

  const flashjit_remote_plugin_api& plugin_;
  flashjit_remote_store* const store_;
};

// The token is never shown.
std::string remote_token() {
  if (std::string token = environment_variable(Variable::remote_token); !token.empty()) return token;
  const std::string path = environment_variable(Variable::remote_token_file);
  if (path.empty()) return {};
  const auto refuse = [&](const std::string& reason) -> void {
    throw Error(ErrorCode::cache_failed, "FLASHJIT_REMOTE_TOKEN_FILE " + path + ": " + reason);
  };
  const File file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status;
  if (!file || ::fstat(file.get(), &status) != 0) refuse(error_text(errno));
  if (!S_ISREG(status.st_mode) || status.st_size > 65536) refuse("not a file of one token");
  if (const std::string reason = distrust(status); !reason.empty()) refuse(reason);
  if (status.st_mode & S_IROTH) refuse("everybody may read it; run chmod o-r on it");
  std::string token(static_cast<std::size_t>(status.st_size), '\0');
  if (!read_fully(file.get(), token.data(), token.size())) refuse(errno ? error_text(errno) : "ends early");
  while (token.ends_with('\n') || token.ends_with('\r')) token.pop_back();
  return token;
}

}  // namespace

std::unique_ptr<RemoteStore> open_remote_store(const RemoteAddress& address) {
  const flashjit_remote_plugin_api& plugin = remote_plugin();
  const std::string token = remote_token(), ca_file = environment_variable(Variable::remote_ca);
  const flashjit_remote_options options{address.url.c_str(),
                                        token.c_str(),
                                        ca_file.c_str(),
                                        static_cast<std::int32_t>(address.answer.count()),
                                        static_cast<std::int32_t>(address.timeout.count()),
                                        largest_object};
  flashjit_remote_text why{};
  flashjit_remote_store* const store = plugin.open(&options, &why);
  const std::string reason = take_text(plugin, why);
  if (!store) throw Error(ErrorCode::cache_failed, reason.empty() ? "out of memory" : reason);
  return std::make_unique<PluginStore>(plugin, store);
}

std::shared_ptr<RemoteCache> remote_cache(const std::optional<std::string>& list, const Verifier& verifier,
                                          const Signer& signer, const std::string& keys,
                                          const std::string& folder) {
  const std::string text = list ? *list : environment_variable(Variable::cache_remote);
  std::vector<RemoteAddress> stores = parse_remotes(text);
  if (stores.empty()) return nullptr;
  auto made = std::make_shared<RemoteCache>(
      RemoteCache::Options{std::move(stores), open_remote_store, verifier, signer, folder});
  static auto& all = *new std::map<std::string, std::weak_ptr<RemoteCache>>;
  const std::lock_guard lock(process_mutex());
  std::weak_ptr<RemoteCache>& place = all[text + "\n" + keys + "\n" + folder];
  if (std::shared_ptr<RemoteCache> known = place.lock()) return known;
  place = made;
  return made;
}

}  // namespace flashjit
