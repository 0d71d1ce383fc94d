// The plugin's C interface. Signatures are libsodium's.
#include "runtime/remote/plugin.h"

#include <sodium.h>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "runtime/remote/store.hpp"

using flashjit::remote_plugin::Failure;
using flashjit::remote_plugin::Options;
using flashjit::remote_plugin::Store;

struct flashjit_remote_store {
  std::unique_ptr<Store> store;
};

namespace {

void set_text(flashjit_remote_text* to, std::string_view text) {
  to->data = static_cast<char*>(std::malloc(text.size() + 1));
  to->size = to->data ? text.size() : 0;
  if (to->data) std::memcpy(to->data, text.data(), text.size());
}

// The result of `ask`, which returns whether the answer is yes.
template <class Ask>
int32_t answer(flashjit_remote_text* why, Ask ask) noexcept {
  try {
    return ask() ? FLASHJIT_REMOTE_YES : FLASHJIT_REMOTE_NO;
  } catch (const Failure& failure) {
    set_text(why, failure.what());
  } catch (const std::bad_alloc&) {
    set_text(why, "out of memory");
  } catch (const std::exception& error) {
    set_text(why, error.what());
  }
  return FLASHJIT_REMOTE_FAILED;
}

flashjit_remote_store* open_store(const flashjit_remote_options* given, flashjit_remote_text* why) {
  std::unique_ptr<Store> store;
  answer(why, [&] {
    const Options options{given->url,
                          given->token,
                          given->ca_file,
                          std::chrono::milliseconds(given->answer_ms),
                          std::chrono::milliseconds(given->timeout_ms),
                          static_cast<std::size_t>(given->max_bytes)};
    const std::string scheme = options.url.substr(0, options.url.find("://"));
    if (scheme == "http" || scheme == "https")
      store = flashjit::remote_plugin::http_store(options);
    else if (scheme == "redis" || scheme == "rediss")
      store = flashjit::remote_plugin::redis_store(options);
    else
      throw Failure("scheme " + scheme + " is none of http, https, redis and rediss");
    return true;
  });
  return store ? new (std::nothrow) flashjit_remote_store{std::move(store)} : nullptr;
}

void close_store(flashjit_remote_store* store) {
  delete store;
}

int32_t get(flashjit_remote_store* store, const char* name, flashjit_remote_text* bytes,
            flashjit_remote_text* why) {
  return answer(why, [&] {
    std::string found;
    if (!store->store->get(name, found)) return false;
    set_text(bytes, found);
    if (!bytes->data) throw std::bad_alloc();
    return true;
  });
}

int32_t put(flashjit_remote_store* store, const char* name, const char* bytes, size_t size,
            flashjit_remote_text* why) {
  return answer(why, [&] {
    store->store->put(name, {bytes, size});
    return true;
  });
}

int32_t exists(flashjit_remote_store* store, const char* name, flashjit_remote_text* why) {
  return answer(why, [&] { return store->store->exists(name); });
}

int32_t lease(flashjit_remote_store* store, const char* name, const char* token, uint32_t ttl_ms,
              flashjit_remote_text* why) {
  return answer(why, [&] { return store->store->lease(name, token, std::chrono::milliseconds(ttl_ms)); });
}

int32_t makes(flashjit_remote_store* store) {
  return store->store->makes() ? 1 : 0;
}

int32_t make(flashjit_remote_store* store, const char* request, size_t size, flashjit_remote_text* bytes,
             uint32_t* pause_ms, flashjit_remote_text* why) {
  Store::Made made;
  const int32_t status = answer(why, [&] {
    made = store->store->make(std::string(request, size));
    if (made.answer == Store::Made::yes) {
      set_text(bytes, made.text);
      if (!bytes->data) throw std::bad_alloc();
    }
    return made.answer == Store::Made::yes;
  });
  if (status != FLASHJIT_REMOTE_NO) return status;
  *pause_ms = static_cast<uint32_t>(made.pause.count());
  if (made.answer == Store::Made::later) return FLASHJIT_REMOTE_LATER;
  set_text(why, made.text);
  return FLASHJIT_REMOTE_NO;
}

int32_t random_seed(unsigned char seed[32]) {
  randombytes_buf(seed, 32);
  return 0;
}

int32_t sign(const unsigned char seed[32], const char* message, size_t size, unsigned char public_key[32],
             unsigned char signature[64]) {
  unsigned char secret[crypto_sign_SECRETKEYBYTES];
  int status = crypto_sign_seed_keypair(public_key, secret, seed);
  if (status == 0 && message)
    status = crypto_sign_detached(signature, nullptr, reinterpret_cast<const unsigned char*>(message), size,
                                  secret);
  sodium_memzero(secret, sizeof secret);
  return status;
}

int32_t verify(const unsigned char public_key[32], const char* message, size_t size,
               const unsigned char signature[64]) {
  return crypto_sign_verify_detached(signature, reinterpret_cast<const unsigned char*>(message), size,
                                     public_key);
}

void free_text(flashjit_remote_text* text) {
  std::free(text->data);
  *text = {nullptr, 0};
}

constexpr flashjit_remote_plugin_api api = {FLASHJIT_REMOTE_PLUGIN_ABI,
                                            open_store,
                                            close_store,
                                            get,
                                            put,
                                            exists,
                                            lease,
                                            makes,
                                            make,
                                            random_seed,
                                            sign,
                                            verify,
                                            free_text};

}  // namespace

extern "C" __attribute__((visibility("default"))) const flashjit_remote_plugin_api* flashjit_remote_plugin(
    uint32_t abi_version) {
  return abi_version == FLASHJIT_REMOTE_PLUGIN_ABI && sodium_init() >= 0 ? &api : nullptr;
}
