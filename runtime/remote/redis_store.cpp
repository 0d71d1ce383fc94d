// Redis and what speaks its protocol: objects are strings, a lease is a key that expires. hiredis writes
// commands and reads replies; the connection is our own, since Debian 12's hiredis has no TLS.
#include <hiredis/hiredis.h>
#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "runtime/remote/connection.hpp"
#include "runtime/remote/pool.hpp"
#include "runtime/remote/store.hpp"
#include "runtime/remote/url.hpp"

namespace flashjit::remote_plugin {
namespace {

using Reply = std::unique_ptr<redisReply, void (*)(redisReply*)>;
using Reader = std::unique_ptr<redisReader, void (*)(redisReader*)>;

// Deletes the lease only if it is still the one that was taken.
constexpr std::string_view give_back_script =
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

constexpr std::size_t small_command = 4096;  // octets

struct Limits {
  Deadline answer, all;
};

struct Session {
  Session(const Url& url, const TlsContext& tls, Deadline deadline)
      : connection(url.host, url.port, tls, deadline), reader(::redisReaderCreate(), &::redisReaderFree) {
    if (!reader) throw std::bad_alloc();
  }
  Connection connection;
  Reader reader;
};

class RedisStore : public Store {
 public:
  explicit RedisStore(const Options& options)
      : options_(options), url_(parse_url(options.url, {{"redis", "6379"}, {"rediss", "6379"}})) {
    const std::size_t slash = url_.path.find('/', 1);
    database_ = url_.path.size() > 1 ? url_.path.substr(1, slash - 1) : "0";
    if (database_.empty() || database_.find_first_not_of("0123456789") != std::string::npos)
      throw Failure("the path of a Redis URL is /DATABASE or /DATABASE/PREFIX, with a number");
    if (slash != std::string::npos) prefix_ = url_.path.substr(slash + 1) + ":";
    if (url_.scheme == "rediss") tls_ = tls_context(options.ca_file);
  }

  bool get(const std::string& name, std::string& bytes) override {
    const Reply reply = command({"GET", prefix_ + name});
    if (reply->type == REDIS_REPLY_NIL) return false;
    if (reply->type != REDIS_REPLY_STRING) throw Failure("GET gives no string");
    bytes.assign(reply->str, reply->len);
    return true;
  }
  void put(const std::string& name, std::string_view bytes) override {
    command({"SET", prefix_ + name, bytes});
  }
  bool exists(const std::string& name) override { return command({"EXISTS", prefix_ + name})->integer > 0; }
  bool lease(const std::string& name, const std::string& token, std::chrono::milliseconds ttl) override {
    const std::string key = prefix_ + name;
    if (ttl.count() == 0) return command({"EVAL", give_back_script, "1", key, token})->integer > 0;
    return command({"SET", key, token, "NX", "PX", std::to_string(ttl.count())})->type != REDIS_REPLY_NIL;
  }

 private:
  struct Word {
    explicit(false) Word(const char* text) : bytes(text) {}
    explicit(false) Word(std::string_view text) : bytes(text) {}
    explicit(false) Word(const std::string& text) : bytes(text) {}
    std::string_view bytes;
  };
  using Words = std::initializer_list<Word>;

  Reply command(Words words) {
    const auto start = std::chrono::steady_clock::now();
    const Limits limits{start + options_.answer, start + options_.timeout};
    if (std::unique_ptr<Session> idle = sessions_.take()) try {
        return finish(std::move(idle), words, limits);
      } catch (const Failure&) {  // the server may have closed it long ago, and the others with it
        sessions_.clear();
        if (std::chrono::steady_clock::now() >= limits.answer) throw;
      }
    return finish(connect(limits), words, limits);
  }

  std::unique_ptr<Session> connect(const Limits& limits) {
    auto session = std::make_unique<Session>(url_, tls_, limits.answer);
    if (const std::size_t colon = options_.token.find(':'); colon != std::string::npos)
      ask(*session, {"AUTH", options_.token.substr(0, colon), options_.token.substr(colon + 1)}, limits);
    else if (!options_.token.empty())
      ask(*session, {"AUTH", options_.token}, limits);
    if (database_ != "0") ask(*session, {"SELECT", database_}, limits);
    return session;
  }

  Reply finish(std::unique_ptr<Session> session, Words words, const Limits& limits) {
    Reply reply = ask(*session, words, limits);
    sessions_.give_back(std::move(session));
    return reply;
  }

  // Throws what the server refuses, too; the session then is not used again.
  Reply ask(Session& session, Words words, const Limits& limits) const {
    std::vector<const char*> arguments;
    std::vector<std::size_t> sizes;
    for (const Word& word : words) {
      arguments.push_back(word.bytes.data());
      sizes.push_back(word.bytes.size());
    }
    char* text = nullptr;
    const int size =
        ::redisFormatCommandArgv(&text, static_cast<int>(words.size()), arguments.data(), sizes.data());
    if (size < 0) throw std::bad_alloc();
    const std::unique_ptr<char, void (*)(char*)> freed(text, [](char* p) { ::redisFreeCommand(p); });
    session.connection.send({text, static_cast<std::size_t>(size)}, limits.all);
    // A large object on its way to the server holds up the answer.
    const bool is_small = static_cast<std::size_t>(size) < small_command;

    for (std::size_t received = 0;;) {
      void* found = nullptr;
      if (::redisReaderGetReply(session.reader.get(), &found) != REDIS_OK)
        throw Failure(std::string("not Redis's protocol: ") + session.reader->errstr);
      if (found) {
        Reply reply(static_cast<redisReply*>(found), [](redisReply* r) { ::freeReplyObject(r); });
        if (reply->type == REDIS_REPLY_ERROR)
          throw Failure("it says: " + printable({reply->str, static_cast<std::size_t>(reply->len)}));
        return reply;
      }
      const std::string_view bytes =
          session.connection.receive(received == 0 && is_small ? limits.answer : limits.all);
      received += bytes.size();
      if (received > options_.max_bytes) throw Failure("the object is larger than any entry");
      if (::redisReaderFeed(session.reader.get(), bytes.data(), bytes.size()) != REDIS_OK)
        throw std::bad_alloc();
    }
  }

  const Options options_;
  const Url url_;
  std::string database_, prefix_ = "flashjit:";
  TlsContext tls_;
  Pool<Session> sessions_;
};

}  // namespace

std::unique_ptr<Store> redis_store(const Options& options) {
  return std::make_unique<RedisStore>(options);
}

}  // namespace flashjit::remote_plugin
