/* The binary interface between the core library and the plugin for remote stores and signatures
   (libflashjit-remote.so). It is plain C, so that neither side depends on the other's C++ runtime. The plugin
   exports one function, flashjit_remote_plugin. All functions are thread-safe and do not throw. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHJIT_REMOTE_PLUGIN_ABI 2

/* Octets in the plugin's memory, data null if there are none; free_text frees them. */
typedef struct {
  char* data;
  size_t size;
} flashjit_remote_text;

/* One store, which any number of threads use. */
typedef struct flashjit_remote_store flashjit_remote_store;

typedef struct {
  const char* url;     /* scheme://host[:port][/path] */
  const char* token;   /* "": none; "user:password", or a password (Redis) or bearer token (HTTP) */
  const char* ca_file; /* certificates that TLS trusts; "": the system's */
  int32_t answer_ms;   /* until the answer to a request that sends no object begins, connecting included */
  int32_t timeout_ms;  /* of a whole request */
  uint64_t max_bytes;  /* a larger object is refused */
} flashjit_remote_options;

enum {
  FLASHJIT_REMOTE_YES = 0,    /* found, stored, taken */
  FLASHJIT_REMOTE_NO = 1,     /* not there; held by another */
  FLASHJIT_REMOTE_FAILED = 2, /* the text says why */
  FLASHJIT_REMOTE_LATER = 3   /* of make: not yet */
};

typedef struct {
  uint32_t abi_version;

  /* Connects to nothing yet. Null, with the reason in `why`, if the URL cannot be used. */
  flashjit_remote_store* (*open)(const flashjit_remote_options* options, flashjit_remote_text* why);
  void (*close)(flashjit_remote_store* store);
  /* These return one of the values above. `name` is a path of [A-Za-z0-9._/-]. */
  int32_t (*get)(flashjit_remote_store* store, const char* name, flashjit_remote_text* bytes,
                 flashjit_remote_text* why);
  int32_t (*put)(flashjit_remote_store* store, const char* name, const char* bytes, size_t size,
                 flashjit_remote_text* why);
  int32_t (*exists)(flashjit_remote_store* store, const char* name, flashjit_remote_text* why);
  /* Takes the lease of that name for ttl_ms, or, with 0, gives back what `token` has taken. */
  int32_t (*lease)(flashjit_remote_store* store, const char* name, const char* token, uint32_t ttl_ms,
                   flashjit_remote_text* why);
  /* 1 if an answer has said that the store compiles what it lacks, else 0. */
  int32_t (*makes)(flashjit_remote_store* store);
  /* Asks for the kernel that `request` describes, and waits for half of answer_ms. NO: refused, and the text
     is the store's. LATER: it is being made, or, with a pause above 0, the store is busy. */
  int32_t (*make)(flashjit_remote_store* store, const char* request, size_t size, flashjit_remote_text* bytes,
                  uint32_t* pause_ms, flashjit_remote_text* why);

  /* Ed25519. A key pair is made from 32 octets of secret seed; with a null message only the public key is
     written. Return 0 if all went well. */
  int32_t (*random_seed)(unsigned char seed[32]);
  int32_t (*sign)(const unsigned char seed[32], const char* message, size_t size,
                  unsigned char public_key[32], unsigned char signature[64]);
  int32_t (*verify)(const unsigned char public_key[32], const char* message, size_t size,
                    const unsigned char signature[64]);

  void (*free_text)(flashjit_remote_text* text);
} flashjit_remote_plugin_api;

/* The plugin's functions; null if it has another ABI version or cannot start. */
const flashjit_remote_plugin_api* flashjit_remote_plugin(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
