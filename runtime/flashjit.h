/* flashjit: attention kernels from specs, at run time. The C interface, for any other language; flashjit.hpp
   is the C++ one, and says more on shapes and meaning.

     flashjit_engine* engine;
     flashjit_spec* spec;
     const flashjit_kernel* kernel;
     flashjit_engine_options options = {sizeof options, "cuda:0"};
     flashjit_engine_create(&options, &engine);
     flashjit_spec_create("{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 128}", &spec);
     flashjit_shape shape = {sizeof shape, 2, 4096, 4096, 32, 8};
     flashjit_engine_get(engine, spec, &shape, &kernel);
     flashjit_argument args[] = {{FLASHJIT_ARG_Q, {.tensor = &q}}, ...};
     flashjit_kernel_launch(kernel, args, 5, stream);

   Every function that can fail returns FLASHJIT_OK or an error code; flashjit_last_error_message() and
   flashjit_last_error_detail() then say more, on the thread that called. Outputs are written only on success.
   All functions may be called from several threads at once; destroying what another thread uses, or an engine
   whose kernels are used afterwards, is the caller's error. */
#ifndef FLASHJIT_H
#define FLASHJIT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FLASHJIT_C_API __attribute__((visibility("default")))
#else
#define FLASHJIT_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes only if a program built against an older header would break; compare with flashjit_abi_version().
 */
#define FLASHJIT_ABI_VERSION 2
FLASHJIT_C_API int32_t flashjit_abi_version(void);
/* "major.minor.patch" */
FLASHJIT_C_API const char* flashjit_version(void);

typedef int32_t flashjit_status;
enum {
  FLASHJIT_OK = 0,
  FLASHJIT_INVALID_SPEC = 1,
  FLASHJIT_UNSUPPORTED = 2,
  FLASHJIT_INVALID_ARGUMENT = 3,
  FLASHJIT_TARGET_UNAVAILABLE = 4,
  FLASHJIT_COMPILER_UNAVAILABLE = 5,
  FLASHJIT_COMPILE_FAILED = 6,
  FLASHJIT_CACHE_FAILED = 7,
  FLASHJIT_DEVICE_FAILED = 8,
  FLASHJIT_INTERNAL = 9,
  FLASHJIT_NOT_PREBUILT = 10
};

/* Of this thread's last failed call; valid until its next one. Empty before any. */
FLASHJIT_C_API const char* flashjit_last_error_message(void);
FLASHJIT_C_API const char* flashjit_last_error_detail(void);

typedef enum {
  FLASHJIT_FP32 = 0,
  FLASHJIT_FP16 = 1,
  FLASHJIT_BF16 = 2,
  FLASHJIT_INT32 = 3,
  FLASHJIT_INT64 = 4
} flashjit_dtype;
typedef enum { FLASHJIT_CPU = 0, FLASHJIT_CUDA = 1 } flashjit_device_kind;

#define FLASHJIT_MAX_RANK 6

/* Borrowed memory; strides in elements. A sequence has at most 2^30 rows or keys. */
typedef struct {
  void* data;
  int32_t dtype;       /* flashjit_dtype */
  int32_t device_kind; /* flashjit_device_kind */
  int32_t device_index;
  int32_t rank;
  int64_t shape[FLASHJIT_MAX_RANK];
  int64_t strides[FLASHJIT_MAX_RANK];
} flashjit_tensor;

/* Ids are only ever appended. An id is given at most once; what is not given is absent. */
typedef enum {
  FLASHJIT_ARG_Q = 1,                      /* tensor */
  FLASHJIT_ARG_K = 2,                      /* tensor */
  FLASHJIT_ARG_V = 3,                      /* tensor */
  FLASHJIT_ARG_O = 4,                      /* tensor */
  FLASHJIT_ARG_LSE = 5,                    /* tensor */
  FLASHJIT_ARG_CU_SEQLENS_Q = 6,           /* tensor */
  FLASHJIT_ARG_CU_SEQLENS_K = 7,           /* tensor */
  FLASHJIT_ARG_MAX_SEQLEN_Q = 8,           /* integer */
  FLASHJIT_ARG_MAX_SEQLEN_K = 9,           /* integer */
  FLASHJIT_ARG_SOFTMAX_SCALE = 10,         /* real */
  FLASHJIT_ARG_WORKSPACE = 11,             /* tensor */
  FLASHJIT_ARG_SEQLENS_Q = 12,             /* tensor; with this and all that follow, see flashjit.hpp */
  FLASHJIT_ARG_SEQLENS_K = 13,             /* tensor */
  FLASHJIT_ARG_WINDOW_LEFT = 14,           /* integer */
  FLASHJIT_ARG_WINDOW_RIGHT = 15,          /* integer */
  FLASHJIT_ARG_NUM_SINKS = 16,             /* integer */
  FLASHJIT_ARG_BLOCK_OFFSETS = 17,         /* tensor */
  FLASHJIT_ARG_BLOCK_INDICES = 18,         /* tensor */
  FLASHJIT_ARG_BLOCK_BITMASK_OF = 19,      /* tensor */
  FLASHJIT_ARG_BLOCK_BITMASKS = 20,        /* tensor */
  FLASHJIT_ARG_TREE_BITS = 21,             /* tensor */
  FLASHJIT_ARG_PREFIX_LENGTHS = 22,        /* tensor */
  FLASHJIT_ARG_DROPOUT_P = 23,             /* real */
  FLASHJIT_ARG_DROPOUT_SEED = 24,          /* integer, of which all 64 bits count */
  FLASHJIT_ARG_DROPOUT_OFFSET = 25,        /* integer, of which all 64 bits count */
  FLASHJIT_ARG_DROPOUT_SEED_TENSOR = 26,   /* tensor */
  FLASHJIT_ARG_DROPOUT_OFFSET_TENSOR = 27, /* tensor */
  FLASHJIT_ARG_PARTS_O = 28,               /* tensor */
  FLASHJIT_ARG_PARTS_LSE = 29              /* tensor */
} flashjit_argument_id;

typedef struct {
  int32_t id; /* flashjit_argument_id */
  union {
    const flashjit_tensor* tensor;
    int64_t integer;
    double real;
  } value;
} flashjit_argument;

/* The sizes of a problem: at least 0, and query heads a multiple of key heads, of which there is at least
   one. Later sizes are appended; what is 0 has its default. */
typedef struct {
  size_t struct_size; /* sizeof(flashjit_shape) */
  int32_t batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv;
  int32_t page_size;        /* keys of a page; 0: contiguous */
  int64_t total_q, total_k; /* packed rows and keys of all sequences; 0: batch * seqlen */
} flashjit_shape;

typedef struct flashjit_engine flashjit_engine;
typedef struct flashjit_spec flashjit_spec;
typedef struct flashjit_kernel flashjit_kernel; /* the engine's; valid until it is destroyed */
typedef struct flashjit_request flashjit_request;
typedef struct flashjit_prepared flashjit_prepared;

/* Runs body over disjoint ranges that cover [0, count), on any threads; returns when all are done. */
typedef void (*flashjit_parallel_for)(void* user, int64_t count,
                                      void (*body)(void* context, int64_t begin, int64_t end), void* context);

/* What an engine does for a spec and sizes that it has not been asked for before. */
typedef enum {
  FLASHJIT_POLICY_HEURISTIC = 0,         /* a tune record's config, else the heuristic one */
  FLASHJIT_POLICY_TUNE_ON_FIRST_USE = 1, /* tunes where there is no record made here */
  FLASHJIT_POLICY_REQUIRE_PREBUILT = 2   /* never compiles: FLASHJIT_NOT_PREBUILT */
} flashjit_policy;

/* What is zero or null has its default. */
typedef struct {
  size_t struct_size;    /* sizeof(flashjit_engine_options) */
  const char* device;    /* "cpu" (default) or "cuda:N" */
  const char* target;    /* default: the device's best */
  const char* cache_dir; /* default: FLASHJIT_CACHE_DIR, else ~/.cache/flashjit; "": no disk cache */
  int32_t num_threads;   /* CPU kernels; default: as many as this process may use; at most 8192 */
  flashjit_parallel_for
      parallel_for; /* CPU kernels run on it, work cut for num_threads, not on the engine's threads */
  void* parallel_for_user;
  const char* cache_path;   /* read-only folders of prebuilt kernels, searched before cache_dir, separated by
                               colons; default: FLASHJIT_CACHE_PATH; "": none */
  uint64_t cache_max_bytes; /* of cache_dir; default: FLASHJIT_CACHE_MAX_BYTES, else 1 GiB */
  int32_t policy;           /* flashjit_policy */
  double tune_seconds;      /* of tune_on_first_use: the most that tuning may take; default: 30 */
} flashjit_engine_options;

/* options may be null. */
FLASHJIT_C_API flashjit_status flashjit_engine_create(const flashjit_engine_options* options,
                                                      flashjit_engine** engine);
FLASHJIT_C_API void flashjit_engine_destroy(flashjit_engine* engine);

/* From the JSON form of a spec. */
FLASHJIT_C_API flashjit_status flashjit_spec_create(const char* json, flashjit_spec** spec);
FLASHJIT_C_API void flashjit_spec_destroy(flashjit_spec* spec);

/* Compiles or loads on first use; afterwards takes no lock and allocates nothing. */
FLASHJIT_C_API flashjit_status flashjit_engine_get(flashjit_engine* engine, const flashjit_spec* spec,
                                                   const flashjit_shape* shape,
                                                   const flashjit_kernel** kernel);

/* The same in the background. Destroying a request does not cancel it; destroying the engine waits for it.
   FLASHJIT_DEVICE_FAILED where the system gives no thread. */
FLASHJIT_C_API flashjit_status flashjit_engine_get_async(flashjit_engine* engine, const flashjit_spec* spec,
                                                         const flashjit_shape* shape,
                                                         flashjit_request** request);
FLASHJIT_C_API int32_t flashjit_request_ready(const flashjit_request* request); /* 1 or 0 */
FLASHJIT_C_API flashjit_status flashjit_request_wait(const flashjit_request* request,
                                                     const flashjit_kernel** kernel);
FLASHJIT_C_API void flashjit_request_destroy(flashjit_request* request);

/* Tables for masks in host memory, made from what applications have (runtime/masks.hpp says more). */
typedef struct flashjit_tables flashjit_tables;
typedef struct {
  int32_t block_m, block_n, per_head; /* the spec's block_sparse */
  int32_t batch, heads;               /* heads: 1 unless per_head */
  int32_t seqlen_q, seqlen_k;
} flashjit_block_lists;
/* seen: [batch, heads, seqlen_q, seqlen_k] bytes; not 0: seen. */
FLASHJIT_C_API flashjit_status flashjit_block_sparse_from_dense(const flashjit_block_lists* lists,
                                                                const uint8_t* seen,
                                                                flashjit_tables** tables);
/* offsets: one for each list, [batch, heads, query blocks], and the end; columns: key blocks, seen whole. */
FLASHJIT_C_API flashjit_status flashjit_block_sparse_from_csr(const flashjit_block_lists* lists,
                                                              const int32_t* offsets, const int32_t* columns,
                                                              flashjit_tables** tables);
/* FlexAttention's BlockMask: counts [batch, heads, query blocks], indices [..., columns]. Other masks of the
   spec decide within the blocks of kv_indices. The full ones may be null. */
FLASHJIT_C_API flashjit_status flashjit_block_sparse_from_flex(const flashjit_block_lists* lists,
                                                               int32_t columns, const int32_t* kv_num_blocks,
                                                               const int32_t* kv_indices,
                                                               const int32_t* full_kv_num_blocks,
                                                               const int32_t* full_kv_indices,
                                                               flashjit_tables** tables);
/* Rows see the keys of their own segment: ids [batch, seqlen_q] and [batch, seqlen_k]. */
FLASHJIT_C_API flashjit_status flashjit_document_mask(const flashjit_block_lists* lists,
                                                      const int32_t* segment_ids_q,
                                                      const int32_t* segment_ids_k, flashjit_tables** tables);
/* parents: [batch, tokens]; -1 for a root, else a token before. */
FLASHJIT_C_API flashjit_status flashjit_tree_from_parents(const int32_t* parents, int32_t batch,
                                                          int32_t tokens, flashjit_tables** tables);
/* The table for that argument, in memory of `tables`. 1 if there is one, else 0: leave the argument out. */
FLASHJIT_C_API int32_t flashjit_tables_get(const flashjit_tables* tables, int32_t argument_id,
                                           flashjit_tensor* tensor);
FLASHJIT_C_API void flashjit_tables_destroy(flashjit_tables* tables);

/* Which weights a kernel with dropout keeps (runtime/dropout.hpp says more): keep is [batch, num_heads_q,
   seqlen_q, seqlen_k] bytes in host memory, 1 for kept and 0 for dropped. */
FLASHJIT_C_API flashjit_status flashjit_dropout_mask(double p, uint64_t seed, uint64_t offset,
                                                     const flashjit_shape* shape, uint8_t* keep);

/* JSON text: target, config, key, origin, registers, times ... Valid as long as the kernel. */
FLASHJIT_C_API flashjit_status flashjit_kernel_info(const flashjit_kernel* kernel, const char** json);
/* Bytes that FLASHJIT_ARG_WORKSPACE must hold: what serves the largest batch, seqlen_q and seqlen_k serves
   every smaller launch. */
FLASHJIT_C_API flashjit_status flashjit_kernel_workspace(const flashjit_kernel* kernel,
                                                         const flashjit_shape* shape, size_t* bytes);
/* stream: a CUstream or cudaStream_t; null for the default stream and for CPU kernels. Allocates nothing,
   once the threads of a CPU have the kernel's scratch: each takes it the first time and keeps it. */
FLASHJIT_C_API flashjit_status flashjit_kernel_launch(const flashjit_kernel* kernel,
                                                      const flashjit_argument* args, size_t num_args,
                                                      void* stream);
/* Checks and encodes the arguments once for many launches. */
FLASHJIT_C_API flashjit_status flashjit_kernel_prepare(const flashjit_kernel* kernel,
                                                       const flashjit_argument* args, size_t num_args,
                                                       flashjit_prepared** prepared);
/* Merges partial results: FLASHJIT_ARG_PARTS_O and _PARTS_LSE into _O and, if it is given, _LSE. The first
   launch of a dtype and head_dim compiles or loads its kernel. */
FLASHJIT_C_API flashjit_status flashjit_merge(flashjit_engine* engine, const flashjit_argument* args,
                                              size_t num_args, void* stream);
FLASHJIT_C_API flashjit_status flashjit_prepared_launch(const flashjit_prepared* prepared, void* stream);
FLASHJIT_C_API void flashjit_prepared_destroy(flashjit_prepared* prepared);

#ifdef __cplusplus
}
#endif

#endif
