/* flashjit: attention kernels from specs, at run time. This is the C interface, for use from any language.
   flashjit.hpp is the C++ interface; codegen/arguments/attention_args.hpp says more about each argument.

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
   flashjit_last_error_detail() then say more on the calling thread. Outputs are written only on success.
   All functions may be called from several threads at once. The caller must not destroy an object that
   another thread is using, and must not use an engine's kernels after the engine is destroyed.

   A host's floating-point state (rounding, traps, denormal numbers as zeros) changes no result, and is as it
   was after each call. In a child made by fork() engines for CPUs work, those for GPUs refuse, since CUDA
   does not survive fork(), and all may be destroyed. */
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

/* Changes only if a program built against an older header would break; see flashjit_abi_version(). */
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
  FLASHJIT_NOT_PREBUILT = 10,
  FLASHJIT_CANCELLED = 11,     /* a compilation, by compile_cancelled */
  FLASHJIT_LIMIT_EXCEEDED = 12 /* a compilation, by compile_seconds or compile_bytes */
};

/* Describe this thread's last failed call. Valid until its next failed call; empty before any. */
FLASHJIT_C_API const char* flashjit_last_error_message(void);
FLASHJIT_C_API const char* flashjit_last_error_detail(void);

typedef enum {
  FLASHJIT_FP32 = 0,
  FLASHJIT_FP16 = 1,
  FLASHJIT_BF16 = 2,
  FLASHJIT_INT32 = 3,
  FLASHJIT_INT64 = 4,
  FLASHJIT_INT8 = 5,
  FLASHJIT_UINT8 = 6,
  FLASHJIT_FP8_E4M3 = 7, /* E4M3FN: largest value 448, no infinity */
  FLASHJIT_FP8_E5M2 = 8
} flashjit_dtype;
typedef enum { FLASHJIT_CPU = 0, FLASHJIT_CUDA = 1 } flashjit_device_kind;

#define FLASHJIT_MAX_RANK 6

/* A tensor in the caller's memory. Strides count elements. A sequence has at most 2^30 rows or keys. */
typedef struct {
  void* data;
  int32_t dtype;       /* flashjit_dtype */
  int32_t device_kind; /* flashjit_device_kind */
  int32_t device_index;
  int32_t rank;
  int64_t shape[FLASHJIT_MAX_RANK];
  int64_t strides[FLASHJIT_MAX_RANK];
} flashjit_tensor;

/* The arguments of a launch; codegen/arguments/attention_args.hpp has their shapes and meaning. Later
   versions append ids. A launch gives each id at most once. */
typedef enum {
  FLASHJIT_ARG_Q = 1,                      /* tensor */
  FLASHJIT_ARG_K = 2,                      /* tensor; append_kv and copy_kv write it */
  FLASHJIT_ARG_V = 3,                      /* tensor; append_kv and copy_kv write it */
  FLASHJIT_ARG_O = 4,                      /* tensor, written; backward reads it */
  FLASHJIT_ARG_LSE = 5,                    /* tensor, written; backward reads it */
  FLASHJIT_ARG_CU_SEQLENS_Q = 6,           /* tensor */
  FLASHJIT_ARG_CU_SEQLENS_K = 7,           /* tensor */
  FLASHJIT_ARG_MAX_SEQLEN_Q = 8,           /* integer */
  FLASHJIT_ARG_MAX_SEQLEN_K = 9,           /* integer */
  FLASHJIT_ARG_SOFTMAX_SCALE = 10,         /* real */
  FLASHJIT_ARG_WORKSPACE = 11,             /* tensor */
  FLASHJIT_ARG_SEQLENS_Q = 12,             /* tensor */
  FLASHJIT_ARG_SEQLENS_K = 13,             /* tensor */
  FLASHJIT_ARG_WINDOW_LEFT = 14,           /* integer */
  FLASHJIT_ARG_WINDOW_RIGHT = 15,          /* integer */
  FLASHJIT_ARG_NUM_SINKS = 16,             /* integer */
  FLASHJIT_ARG_BLOCK_OFFSETS = 17,         /* tensor; make_block_lists writes it */
  FLASHJIT_ARG_BLOCK_INDICES = 18,         /* tensor; make_block_lists writes it */
  FLASHJIT_ARG_BLOCK_BITMASK_OF = 19,      /* tensor; make_block_lists writes it */
  FLASHJIT_ARG_BLOCK_BITMASKS = 20,        /* tensor; make_block_lists writes it */
  FLASHJIT_ARG_TREE_BITS = 21,             /* tensor */
  FLASHJIT_ARG_PREFIX_LENGTHS = 22,        /* tensor */
  FLASHJIT_ARG_DROPOUT_P = 23,             /* real */
  FLASHJIT_ARG_DROPOUT_SEED = 24,          /* integer; all 64 bits are used */
  FLASHJIT_ARG_DROPOUT_OFFSET = 25,        /* integer; all 64 bits are used */
  FLASHJIT_ARG_DROPOUT_SEED_TENSOR = 26,   /* tensor */
  FLASHJIT_ARG_DROPOUT_OFFSET_TENSOR = 27, /* tensor */
  FLASHJIT_ARG_PARTS_O = 28,               /* tensor */
  FLASHJIT_ARG_PARTS_LSE = 29,             /* tensor */
  FLASHJIT_ARG_PAGE_TABLE = 30,            /* tensor */
  FLASHJIT_ARG_DO = 31,                    /* tensor */
  FLASHJIT_ARG_DLSE = 32,                  /* tensor */
  FLASHJIT_ARG_DQ = 33,                    /* tensor, written */
  FLASHJIT_ARG_DK = 34,                    /* tensor, written */
  FLASHJIT_ARG_DV = 35,                    /* tensor, written */
  FLASHJIT_ARG_SINK_LOGITS = 36,           /* tensor */
  FLASHJIT_ARG_K_SCALE = 37,               /* tensor; append_kv and copy_kv write those of tokens */
  FLASHJIT_ARG_V_SCALE = 38,               /* tensor; append_kv and copy_kv write those of tokens */
  FLASHJIT_ARG_K_NEW = 39,                 /* tensor */
  FLASHJIT_ARG_V_NEW = 40,                 /* tensor */
  FLASHJIT_ARG_SLOTS = 41,                 /* tensor */
  FLASHJIT_ARG_APPEND_POSITIONS = 42,      /* tensor */
  FLASHJIT_ARG_Q_OUT = 43,                 /* tensor, written */
  FLASHJIT_ARG_ROTARY_POSITIONS = 44,      /* tensor */
  FLASHJIT_ARG_ROTARY_COS = 45,            /* tensor */
  FLASHJIT_ARG_ROTARY_SIN = 46,            /* tensor */
  FLASHJIT_ARG_ROTARY_BASE = 47,           /* real */
  FLASHJIT_ARG_ROTARY_SCALE = 48,          /* real */
  FLASHJIT_ARG_D_SINK_LOGITS = 49,         /* tensor, written */
  FLASHJIT_ARG_K_FROM = 50,                /* tensor */
  FLASHJIT_ARG_V_FROM = 51,                /* tensor */
  FLASHJIT_ARG_K_SCALE_FROM = 52,          /* tensor */
  FLASHJIT_ARG_V_SCALE_FROM = 53,          /* tensor */
  FLASHJIT_ARG_FROM_SLOTS = 54,            /* tensor */
  FLASHJIT_ARG_TO_SLOTS = 55,              /* tensor */
  FLASHJIT_ARG_ROW_OFFSET = 56,            /* tensor */
  FLASHJIT_ARG_KEY_OFFSET = 57,            /* tensor */
  FLASHJIT_ARG_K_GATHERED = 58,            /* tensor */
  FLASHJIT_ARG_V_GATHERED = 59,            /* tensor */
  FLASHJIT_ARG_EARLY_ROWS = 60,            /* integer */
  FLASHJIT_ARG_LATE_KEYS = 61,             /* integer */
  FLASHJIT_ARG_ARRIVED = 62,               /* tensor */
  FLASHJIT_ARG_SPARE_MULTIPROCESSORS = 63  /* integer */
} flashjit_argument_id;

/* Tables and scalars that a spec declares for its formulas have the ids from here on, in the order of their
   names; flashjit_spec_argument() finds them. A table is a tensor, an fp32 scalar a real, an int32 scalar an
   integer. A backward writes the gradient of a table with "grad", the tensor d_<name>. */
#define FLASHJIT_FIRST_NAMED_ARG 4096

typedef struct {
  int32_t id; /* flashjit_argument_id, or of a declared name */
  union {
    const flashjit_tensor* tensor;
    int64_t integer;
    double real;
  } value;
} flashjit_argument;

/* The sizes of a problem, all at least 0. num_heads_q is a multiple of num_heads_kv, which is 0 only where
   num_heads_q is, too. Later versions append sizes; a later size of 0 means its default. */
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
typedef struct flashjit_workspace flashjit_workspace;
typedef struct flashjit_step flashjit_step;
typedef struct flashjit_group flashjit_group; /* a rank's place in a group */
typedef struct flashjit_parallel flashjit_parallel;
typedef struct flashjit_conversion flashjit_conversion;

/* Runs body over disjoint ranges that cover [0, count), on any threads; returns when all are done. */
typedef void (*flashjit_parallel_for)(void* user, int64_t count,
                                      void (*body)(void* context, int64_t begin, int64_t end), void* context);

/* An engine's behaviour when it is asked for a spec and sizes for the first time. */
typedef enum {
  FLASHJIT_POLICY_HEURISTIC = 0,         /* a tune record's config, else the heuristic one */
  FLASHJIT_POLICY_TUNE_ON_FIRST_USE = 1, /* tunes if there is no record made here */
  FLASHJIT_POLICY_REQUIRE_PREBUILT = 2   /* never compiles: FLASHJIT_NOT_PREBUILT */
} flashjit_policy;

/* What an engine did for a kernel that it was asked for and did not have in memory. */
typedef enum {
  FLASHJIT_KERNEL_WAITING = 0, /* another process builds it; the thread waits for it, at most a minute */
  FLASHJIT_KERNEL_LOADED = 1,  /* found on disk, or in memory for another shape */
  FLASHJIT_KERNEL_COMPILED = 2,
  FLASHJIT_KERNEL_FAILED = 3 /* flashjit_engine_get() fails */
} flashjit_kernel_event_kind;

/* Valid during the call. Later versions append members. */
typedef struct {
  size_t struct_size;
  int32_t kind;     /* flashjit_kernel_event_kind */
  const char* spec; /* JSON */
  flashjit_shape shape;
  const char* target; /* of the kernel; of the engine if there is none */
  double ms;          /* since flashjit_engine_get() began */
  const char* path;   /* the kernel's file; "": none */
  const char* reason; /* why it failed, or what is unusual; "": nothing */
} flashjit_kernel_event;

/* A member that is zero or null has its default. */
typedef struct {
  size_t struct_size;    /* sizeof(flashjit_engine_options) */
  const char* device;    /* "cpu" (default) or "cuda:N" */
  const char* target;    /* default: the one of FLASHJIT_TARGET for such a device, else its best */
  const char* cache_dir; /* default: FLASHJIT_CACHE_DIR, else flashjit in XDG_CACHE_HOME or ~/.cache;
                              "": no disk cache */
  int32_t num_threads;   /* for CPU kernels; default: as many as this process may use; at most 8192 */
  /* CPU kernels run on it instead of the engine's threads, with work divided for num_threads */
  flashjit_parallel_for parallel_for;
  void* parallel_for_user;  /* the first argument of parallel_for */
  const char* cache_path;   /* read-only folders of prebuilt kernels, searched before cache_dir, separated by
                               colons; default: FLASHJIT_CACHE_PATH; "": none */
  uint64_t cache_max_bytes; /* limit of cache_dir; default: FLASHJIT_CACHE_MAX_BYTES, else 1 GiB */
  int32_t policy;           /* flashjit_policy */
  double tune_seconds; /* the most that tune_on_first_use takes for a kernel; default: 30; infinity: any */
  /* Limits of each compilation (compile_limits.hpp); default: none. A GPU's compiler cannot limit its
     memory, and before NVRTC 12.8 nothing: FLASHJIT_UNSUPPORTED. */
  double compile_seconds;
  uint64_t compile_bytes; /* of the compiler's memory */
  /* Asked often by threads that compile, tune on first use or wait for another process that does, several at
     once: 1 cancels that. It must not use an engine. */
  int32_t (*compile_cancelled)(void* user);
  void* compile_cancelled_user; /* the argument of compile_cancelled */
  /* Called on the threads that get kernels, several at once. It must not use the engine. */
  void (*on_kernel)(void* user, const flashjit_kernel_event* event);
  void* on_kernel_user; /* the first argument of on_kernel */
  /* Files that are told the same: a line of JSON for each event, and a manifest of the specs and shapes,
     which `flashjit prebuild` takes. Default: FLASHJIT_LOG and FLASHJIT_RECORD; "": none. */
  const char* log;
  const char* record;
  /* Stores over the network, searched after cache_dir: URLs of the schemes http, https, redis and rediss,
     spaces between them. Default: FLASHJIT_CACHE_REMOTE; "": none. */
  const char* cache_remote;
  /* Public keys: from a store, only what one of them has signed is used. NAME=KEY, -NAME=KEY for a revoked
     one, and files of such lines, colons between them. Default: FLASHJIT_TRUST. */
  const char* cache_trust;
  const char*
      signing_key; /* the file of the secret key that signs what is stored; default: FLASHJIT_SIGNING_KEY;
                      "": nothing is stored */
  /* 1: configs come only from stores and layers, so that all engines that use them run the same: a tune
     record, else the heuristic config if its kernel is there. Where there is neither,
     FLASHJIT_POLICY_TUNE_ON_FIRST_USE tunes and stores; any other policy gives FLASHJIT_NOT_PREBUILT. */
  int32_t store_configs;
} flashjit_engine_options;

/* `options` may be null. */
FLASHJIT_C_API flashjit_status flashjit_engine_create(const flashjit_engine_options* options,
                                                      flashjit_engine** engine);
FLASHJIT_C_API void flashjit_engine_destroy(flashjit_engine* engine);

/* Reads the JSON form of a spec. */
FLASHJIT_C_API flashjit_status flashjit_spec_create(const char* json, flashjit_spec** spec);
/* Reads it as the spec of another operation on the same problem, "backward" or "decode" of a forward's. What
   has no meaning for that operation is left out (AttentionSpec::for_op of codegen/spec/spec.hpp says what).
 */
FLASHJIT_C_API flashjit_status flashjit_spec_create_for_op(const char* json, const char* op,
                                                           flashjit_spec** spec);
FLASHJIT_C_API void flashjit_spec_destroy(flashjit_spec* spec);
/* The id of an argument of the spec's launches: of a table or scalar that it declares, or of one of
   flashjit_argument_id by its lower-case name, such as "q". */
FLASHJIT_C_API flashjit_status flashjit_spec_argument(const flashjit_spec* spec, const char* name,
                                                      int32_t* id);

/* The kernel for the spec at these sizes. The first call compiles or loads it; later calls take no lock and
   allocate nothing. */
FLASHJIT_C_API flashjit_status flashjit_engine_get(flashjit_engine* engine, const flashjit_spec* spec,
                                                   const flashjit_shape* shape,
                                                   const flashjit_kernel** kernel);

/* flashjit_engine_get() in the background. Destroying a request does not cancel it; destroying the engine
   waits for it. Fails with FLASHJIT_DEVICE_FAILED if the system gives no thread. In a forked child, which
   lacks the thread, waiting fails so, too; flashjit_engine_get() begins anew. */
FLASHJIT_C_API flashjit_status flashjit_engine_get_async(flashjit_engine* engine, const flashjit_spec* spec,
                                                         const flashjit_shape* shape,
                                                         flashjit_request** request);
FLASHJIT_C_API int32_t flashjit_request_ready(const flashjit_request* request); /* 1 or 0 */
FLASHJIT_C_API flashjit_status flashjit_request_wait(const flashjit_request* request,
                                                     const flashjit_kernel** kernel);
FLASHJIT_C_API void flashjit_request_destroy(flashjit_request* request);

/* Mask tables in host memory, made from the formats that applications use (runtime/masks.hpp says more). */
typedef struct flashjit_tables flashjit_tables;
typedef struct {
  int32_t block_m, block_n, per_head; /* the spec's block_sparse */
  int32_t batch, heads;               /* heads: 1 unless per_head */
  int32_t seqlen_q, seqlen_k;
} flashjit_block_lists;
/* How many blocks lists of this shape name at most: the elements of block_indices and block_bitmask_of that
   op make_block_lists writes to. */
FLASHJIT_C_API flashjit_status flashjit_most_listed_blocks(const flashjit_block_lists* lists,
                                                           int64_t* blocks);
/* `seen`: [batch, heads, seqlen_q, seqlen_k] bytes, nonzero if the row sees the key. */
FLASHJIT_C_API flashjit_status flashjit_block_sparse_from_dense(const flashjit_block_lists* lists,
                                                                const uint8_t* seen,
                                                                flashjit_tables** tables);
/* `offsets`: where each list of [batch, heads, query blocks] begins in `columns`, and the end of the last
   one. `columns`: key blocks, which are seen whole. */
FLASHJIT_C_API flashjit_status flashjit_block_sparse_from_csr(const flashjit_block_lists* lists,
                                                              const int32_t* offsets, const int32_t* columns,
                                                              flashjit_tables** tables);
/* FlexAttention's BlockMask: counts are [batch, heads, query blocks], indices [batch, heads, query blocks,
   columns]. Within the blocks of kv_indices the spec's other masks decide. The full_ arrays may be null. */
FLASHJIT_C_API flashjit_status flashjit_block_sparse_from_flex(const flashjit_block_lists* lists,
                                                               int32_t columns, const int32_t* kv_num_blocks,
                                                               const int32_t* kv_indices,
                                                               const int32_t* full_kv_num_blocks,
                                                               const int32_t* full_kv_indices,
                                                               flashjit_tables** tables);
/* Rows see the keys of their own segment. The ids are [batch, seqlen_q] and [batch, seqlen_k]. */
FLASHJIT_C_API flashjit_status flashjit_document_mask(const flashjit_block_lists* lists,
                                                      const int32_t* segment_ids_q,
                                                      const int32_t* segment_ids_k, flashjit_tables** tables);
/* `parents`: [batch, tokens], the index of an earlier token; -1 for a root. */
FLASHJIT_C_API flashjit_status flashjit_tree_from_parents(const int32_t* parents, int32_t batch,
                                                          int32_t tokens, flashjit_tables** tables);
/* Returns 1 and the argument's table, in memory of `tables`; returns 0 if the argument is to be left out. */
FLASHJIT_C_API int32_t flashjit_tables_get(const flashjit_tables* tables, int32_t argument_id,
                                           flashjit_tensor* tensor);
FLASHJIT_C_API void flashjit_tables_destroy(flashjit_tables* tables);

/* Computes which weights a kernel with dropout keeps (runtime/dropout.hpp says more). `keep`: [batch,
   num_heads_q, seqlen_q, seqlen_k] bytes in host memory, set to 1 for kept and 0 for dropped. */
FLASHJIT_C_API flashjit_status flashjit_dropout_mask(double p, uint64_t seed, uint64_t offset,
                                                     const flashjit_shape* shape, uint8_t* keep);

/* Facts about the kernel as JSON text: target, config, key, origin, registers, times and more. The text is
   valid as long as the kernel. */
FLASHJIT_C_API flashjit_status flashjit_kernel_info(const flashjit_kernel* kernel, const char** json);
/* The bytes that FLASHJIT_ARG_WORKSPACE must have. A forward may be launched without: where few rows see many
   keys, it is then slower. The size for the largest batch, seqlen_q and seqlen_k serves every smaller launch,
   too. */
FLASHJIT_C_API flashjit_status flashjit_kernel_workspace(const flashjit_kernel* kernel,
                                                         const flashjit_shape* shape, size_t* bytes);
/* `stream`: a CUstream or cudaStream_t; null for the default stream and for CPU kernels. Allocates nothing,
   except that each CPU thread allocates the kernel's scratch once and keeps it. */
FLASHJIT_C_API flashjit_status flashjit_kernel_launch(const flashjit_kernel* kernel,
                                                      const flashjit_argument* args, size_t num_args,
                                                      void* stream);
/* Checks and encodes the arguments once, for many launches. */
FLASHJIT_C_API flashjit_status flashjit_kernel_prepare(const flashjit_kernel* kernel,
                                                       const flashjit_argument* args, size_t num_args,
                                                       flashjit_prepared** prepared);
/* Merges the partial results FLASHJIT_ARG_PARTS_O and _PARTS_LSE into _O and, if it is given, _LSE. The first
   merge of a dtype and head_dim compiles or loads its kernel. Where |lse| is 2^15 or more (o bf16) or 2^12 or
   more (fp16), the rounding of lse to float32 changes o by more than o's own rounding. */
FLASHJIT_C_API flashjit_status flashjit_merge(flashjit_engine* engine, const flashjit_argument* args,
                                              size_t num_args, void* stream);
FLASHJIT_C_API flashjit_status flashjit_prepared_launch(const flashjit_prepared* prepared, void* stream);
FLASHJIT_C_API void flashjit_prepared_destroy(flashjit_prepared* prepared);

/* A DLTensor of DLPack 1.x as a tensor of the same memory, which it does not keep. */
FLASHJIT_C_API flashjit_status flashjit_tensor_from_dlpack(const void* dl_tensor, flashjit_tensor* tensor);
/* __cuda_array_interface__, or NumPy's __array_interface__ with a CPU as device: the address of "data",
   "typestr", and "shape" and "strides" of `rank` numbers; strides count bytes, null for None. */
FLASHJIT_C_API flashjit_status flashjit_tensor_from_array_interface(void* data, const char* typestr,
                                                                    int32_t rank, const int64_t* shape,
                                                                    const int64_t* byte_strides,
                                                                    int32_t device_kind, int32_t device_index,
                                                                    flashjit_tensor* tensor);

/* Memory of the engine's device that one launch at a time may use as its workspace, aligned for every kernel.
   It must outlast launches, prepared launches and CUDA graphs that use it, and may outlast the engine. */
FLASHJIT_C_API flashjit_status flashjit_workspace_create(const flashjit_engine* engine, size_t bytes,
                                                         flashjit_workspace** workspace);
/* FLASHJIT_ARG_WORKSPACE. */
FLASHJIT_C_API flashjit_status flashjit_workspace_tensor(const flashjit_workspace* workspace,
                                                         flashjit_tensor* tensor);
FLASHJIT_C_API void flashjit_workspace_destroy(flashjit_workspace* workspace);

/* The launches of one step of a serving loop, on tensors that stay where they are (EngineStep of
   runtime/workspace.hpp). Lengths, positions and page tables are read again at each launch. */
FLASHJIT_C_API flashjit_status flashjit_step_create(const flashjit_engine* engine, flashjit_step** step);
/* Adds a launch of a kernel of the engine. Without FLASHJIT_ARG_WORKSPACE the step keeps one for sizes up to
   `largest`. */
FLASHJIT_C_API flashjit_status flashjit_step_add(flashjit_step* step, const flashjit_kernel* kernel,
                                                 const flashjit_argument* args, size_t count,
                                                 const flashjit_shape* largest);
FLASHJIT_C_API flashjit_status flashjit_step_launch(const flashjit_step* step, void* stream);
FLASHJIT_C_API void flashjit_step_destroy(flashjit_step* step);

/* Attention over several ranks, each with a part of the sequence (runtime/parallel.hpp says more). */
typedef enum {
  FLASHJIT_LAYOUT_CONTIGUOUS = 0,
  FLASHJIT_LAYOUT_ZIGZAG = 1,
  FLASHJIT_LAYOUT_HEADS = 2,
  FLASHJIT_LAYOUT_BEST = 3
} flashjit_layout;
/* Makes a group of `size` threads of this process: `ranks` has room for so many pointers, one for each. */
FLASHJIT_C_API flashjit_status flashjit_groups_of_threads(int32_t size, flashjit_group** ranks);
/* Makes the name of a group of `size` processes of this host. One of them makes it and tells it to the
 * others. */
enum { FLASHJIT_GROUP_NAME = 64 };
FLASHJIT_C_API flashjit_status flashjit_group_name(int32_t size, char name[FLASHJIT_GROUP_NAME]);
/* This process's rank of the group. All ranks call it, and wait for each other. */
FLASHJIT_C_API flashjit_status flashjit_group_of_processes(const char* name, int32_t rank, int32_t size,
                                                           flashjit_group** group);
/* This process's rank of an ncclComm_t. All ranks call it, and wait for each other for at most five minutes.
 * The communicator stays the caller's, outlives the group, and is aborted by its owner once it has failed. */
FLASHJIT_C_API flashjit_status flashjit_group_of_nccl(void* comm, flashjit_group** group);
/* Either may be null. */
FLASHJIT_C_API flashjit_status flashjit_group_rank(const flashjit_group* group, int32_t* rank, int32_t* size);
/* 1 if ranks reach each other's memory, 0 if they send and receive; and why. Either may be null. The text is
 * valid as long as the group. */
FLASHJIT_C_API flashjit_status flashjit_group_transport(const flashjit_group* group, int32_t* maps_memory,
                                                        const char** reason);
/* Makes waiting and later calls of all ranks fail with this text: for a rank that cannot go on. */
FLASHJIT_C_API flashjit_status flashjit_group_fail(const flashjit_group* group, const char* why);
/* FLASHJIT_DEVICE_FAILED once a rank's call has failed or its process has ended: ask after waiting for a
 * stream. */
FLASHJIT_C_API flashjit_status flashjit_group_check(const flashjit_group* group);
FLASHJIT_C_API void flashjit_group_destroy(flashjit_group* group);
/* Every rank calls this, and the functions below, in the same order, with a forward's spec and the sizes of
   all ranks together. `layout`: a flashjit_layout. The engine outlives the object. */
FLASHJIT_C_API flashjit_status flashjit_parallel_create(flashjit_engine* engine, const flashjit_spec* spec,
                                                        const flashjit_shape* whole, int32_t layout,
                                                        const flashjit_group* group,
                                                        flashjit_parallel** parallel);
/* The chunks of a rank: where each begins, and how many rows each has. `begins` has room for two. */
FLASHJIT_C_API flashjit_status flashjit_sequence_chunks(int32_t layout, int32_t seqlen, int32_t rank,
                                                        int32_t size, int32_t begins[2], int32_t* count,
                                                        int32_t* length);
/* The layout, and why it is that one; either may be null. The text is valid as long as the object. */
FLASHJIT_C_API flashjit_status flashjit_parallel_layout(const flashjit_parallel* parallel, int32_t* layout,
                                                        const char** reason);
/* The bytes that FLASHJIT_ARG_WORKSPACE must have, aligned to 64. `backward`: 0 for a forward. */
FLASHJIT_C_API flashjit_status flashjit_parallel_workspace(const flashjit_parallel* parallel,
                                                           int32_t backward, size_t* bytes);
/* Loads the kernels of a launch and makes the memory that ranks write into; otherwise the first launch does.
 */
FLASHJIT_C_API flashjit_status flashjit_parallel_prepare(const flashjit_parallel* parallel, int32_t backward);
FLASHJIT_C_API flashjit_status flashjit_parallel_forward(const flashjit_parallel* parallel,
                                                         const flashjit_argument* args, size_t num_args,
                                                         void* stream);
FLASHJIT_C_API flashjit_status flashjit_parallel_backward(const flashjit_parallel* parallel,
                                                          const flashjit_argument* args, size_t num_args,
                                                          void* stream);
FLASHJIT_C_API void flashjit_parallel_destroy(flashjit_parallel* parallel);
/* Moves tensors from one layout to another. `whole` gives dtype, rank and sizes of all ranks together,
   [batch, seqlen, ...]. Of FLASHJIT_LAYOUT_HEADS, as here, a rank has all rows of its share of dimension 2.
 */
FLASHJIT_C_API flashjit_status flashjit_conversion_create(flashjit_engine* engine,
                                                          const flashjit_group* group,
                                                          const flashjit_tensor* whole, int32_t before,
                                                          int32_t after, flashjit_conversion** conversion);
FLASHJIT_C_API flashjit_status flashjit_conversion_run(const flashjit_conversion* conversion,
                                                       const flashjit_tensor* from, const flashjit_tensor* to,
                                                       void* stream);
FLASHJIT_C_API void flashjit_conversion_destroy(flashjit_conversion* conversion);

#ifdef __cplusplus
}
#endif

#endif
