#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "codegen/arguments/table.hpp"
#include "codegen/base/float_state.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/c_api_arguments.hpp"
#include "runtime/dropout.hpp"
#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"
#include "runtime/masks.hpp"
#include "runtime/workspace.hpp"
#include "runtime/wrap.hpp"

using namespace flashjit::c_api;
using flashjit::AttentionSpec;
using flashjit::Error;
using flashjit::ErrorCode;
using flashjit::Kernel;
using flashjit::refuse_argument;

struct flashjit_request {
  std::shared_future<const Kernel*> future;
};
struct flashjit_tables {
  flashjit::MaskTables tables;
};
struct flashjit_prepared {
  flashjit::PreparedLaunch launch;
};
struct flashjit_workspace {
  flashjit::Workspace workspace;
};
struct flashjit_step {
  flashjit::EngineStep step;
};

static_assert(FLASHJIT_MAX_RANK == flashjit::Tensor::max_rank);
static_assert(FLASHJIT_FIRST_NAMED_ARG == flashjit::first_named_id);

namespace {

thread_local std::string last_message, last_detail;

}  // namespace

flashjit_status flashjit::c_api::fail(ErrorCode code, const char* message, const char* detail) noexcept {
  try {
    last_message = message;
    last_detail = detail;
  } catch (...) {  // no memory for the text: only the code is reported
    last_message.clear();
    last_detail.clear();
  }
  return static_cast<flashjit_status>(code);
}

namespace {

flashjit::EngineOptions options_of(const flashjit_engine_options* given) {
  flashjit::EngineOptions options;
  if (!given) return options;
  constexpr std::size_t first_end = offsetof(flashjit_engine_options, device) + sizeof given->device;
  const auto o = known_part(*given, first_end, "flashjit_engine_options");
  if (o.device) options.device = o.device;
  if (o.target) options.target = o.target;
  if (o.cache_dir) options.cache_dir = o.cache_dir;
  if (o.cache_path) options.cache_path = o.cache_path;
  options.cache_max_bytes = o.cache_max_bytes;
  options.num_threads = o.num_threads;
  if (o.policy < FLASHJIT_POLICY_HEURISTIC || o.policy > FLASHJIT_POLICY_REQUIRE_PREBUILT)
    refuse_argument("policy is ", o.policy, ", which is not a flashjit_policy");
  options.policy = static_cast<flashjit::Policy>(o.policy);
  if (o.tune_seconds != 0) options.tune_seconds = o.tune_seconds;
  options.compile.seconds = o.compile_seconds;
  options.compile.bytes = o.compile_bytes;
  if (o.compile_cancelled)
    options.compile.cancelled = [asked = o.compile_cancelled, user = o.compile_cancelled_user] {
      return asked(user) != 0;
    };
  if (o.log) options.log = o.log;
  if (o.record) options.record = o.record;
  if (o.cache_remote) options.cache_remote = o.cache_remote;
  if (o.cache_trust) options.cache_trust = o.cache_trust;
  if (o.signing_key) options.signing_key = o.signing_key;
  options.store_configs = o.store_configs != 0;
  if (o.on_kernel)
    options.on_kernel = [told = o.on_kernel, user = o.on_kernel_user](const flashjit::KernelEvent& event) {
      const std::string spec = event.spec.to_json(), target = event.target.str();
      const flashjit::Shape& s = event.shape;
      const flashjit_kernel_event shown = {sizeof shown,
                                           static_cast<int32_t>(event.kind),
                                           spec.c_str(),
                                           {sizeof shown.shape, s.batch, s.seqlen_q, s.seqlen_k,
                                            s.num_heads_q, s.num_heads_kv, s.page_size, s.total_q, s.total_k},
                                           target.c_str(),
                                           event.ms,
                                           event.path.c_str(),
                                           event.reason.c_str()};
      told(user, &shown);
    };
  if (o.parallel_for)
    options.parallel_for = [run = o.parallel_for, user = o.parallel_for_user](
                               std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                               void* context) { run(user, count, body, context); };
  return options;
}

using Ints = std::span<const std::int32_t>;

Ints ints(const std::int32_t* values, std::int64_t count, const char* name) {
  if (count <= 0) return {};
  return {&require(values, name), static_cast<std::size_t>(count)};
}

// The block sizes and lengths that a C caller gave, as the builders of tables take them.
struct BlockLists {
  flashjit::BlockSparseMask mask;
  flashjit::BlockListShape shape;
  std::int64_t count = 0;  // number of lists

  explicit BlockLists(const flashjit_block_lists* given) {
    const flashjit_block_lists& l = require(given, "lists");
    mask = {.block_m = l.block_m, .block_n = l.block_n, .per_head = l.per_head != 0};
    shape = {.batch = l.batch, .heads = l.heads, .seqlen_q = l.seqlen_q, .seqlen_k = l.seqlen_k};
    count = flashjit::count_block_lists(mask, shape);
  }
};

template <class Make>
flashjit_status make_tables(flashjit_tables** tables, Make&& make) {
  return guarded([&] {
    flashjit_tables*& created = require(tables, "tables");
    created = new flashjit_tables{make()};
  });
}

}  // namespace

extern "C" {

int32_t flashjit_abi_version(void) {
  return FLASHJIT_ABI_VERSION;
}
const char* flashjit_version(void) {
  return flashjit::version();
}
const char* flashjit_last_error_message(void) {
  return last_message.c_str();
}
const char* flashjit_last_error_detail(void) {
  return last_detail.c_str();
}

flashjit_status flashjit_engine_create(const flashjit_engine_options* options, flashjit_engine** engine) {
  return guarded([&] {
    flashjit_engine*& created = require(engine, "engine");
    created = new flashjit_engine{flashjit::Engine(options_of(options))};
  });
}
void flashjit_engine_destroy(flashjit_engine* engine) {
  delete engine;
}

flashjit_status flashjit_spec_create(const char* json, flashjit_spec** spec) {
  return guarded([&] {
    flashjit_spec*& created = require(spec, "spec");
    created = new flashjit_spec{AttentionSpec::from_json(&require(json, "json"))};
  });
}
flashjit_status flashjit_spec_create_for_op(const char* json, const char* op, flashjit_spec** spec) {
  return guarded([&] {
    flashjit_spec*& created = require(spec, "spec");
    const flashjit::Operation wanted = flashjit::operation_named(&require(op, "op"));
    created = new flashjit_spec{AttentionSpec::from_json(&require(json, "json"), wanted)};
  });
}
void flashjit_spec_destroy(flashjit_spec* spec) {
  delete spec;
}
flashjit_status flashjit_spec_argument(const flashjit_spec* spec, const char* name, int32_t* id) {
  return guarded([&] {
    const AttentionSpec& s = require(spec, "spec").spec;
    const std::string_view wanted = &require(name, "name");
    int32_t& found = require(id, "id");
    if (const int place = place_of_name(s, wanted); place >= 0) {
      found = flashjit::first_named_id + place;
      return;
    }
    for (const flashjit::Argument& argument : flashjit::arguments)
      if (wanted == argument.name && has_argument(s, argument)) {
        found = argument.id;
        return;
      }
    refuse_argument("name ", flashjit::in_quotes(wanted),
                    " is no argument of the spec: neither a table or scalar that it declares, nor one of "
                    "flashjit_argument_id that its launches have");
  });
}

flashjit_status flashjit_engine_get(flashjit_engine* engine, const flashjit_spec* spec,
                                    const flashjit_shape* shape, const flashjit_kernel** kernel) {
  return guarded([&] {
    const flashjit_kernel*& found = require(kernel, "kernel");
    found = handle_of(require(engine, "engine").engine.get(require(spec, "spec").spec, shape_of(shape)));
  });
}

flashjit_status flashjit_engine_get_async(flashjit_engine* engine, const flashjit_spec* spec,
                                          const flashjit_shape* shape, flashjit_request** request) {
  return guarded([&] {
    flashjit_request*& created = require(request, "request");
    created = new flashjit_request{
        require(engine, "engine").engine.get_async(require(spec, "spec").spec, shape_of(shape))};
  });
}
int32_t flashjit_request_ready(const flashjit_request* request) {
  return request && request->future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}
flashjit_status flashjit_request_wait(const flashjit_request* request, const flashjit_kernel** kernel) {
  return guarded([&] {
    const flashjit_kernel*& found = require(kernel, "kernel");
    found = handle_of(*require(request, "request").future.get());
  });
}
void flashjit_request_destroy(flashjit_request* request) {
  delete request;
}

flashjit_status flashjit_kernel_info(const flashjit_kernel* kernel, const char** json) {
  return guarded([&] { require(json, "json") = kernel_of(kernel).info_json().c_str(); });
}

flashjit_status flashjit_kernel_workspace(const flashjit_kernel* kernel, const flashjit_shape* shape,
                                          size_t* bytes) {
  return guarded([&] { require(bytes, "bytes") = kernel_of(kernel).workspace_bytes(shape_of(shape)); });
}

flashjit_status flashjit_kernel_launch(const flashjit_kernel* kernel, const flashjit_argument* args,
                                       size_t num_args, void* stream) {
  return guarded([&] {
    const Kernel& k = kernel_of(kernel);
    k.launch(Arguments(args, num_args, &k.info().spec).get(), stream);
  });
}

flashjit_status flashjit_kernel_prepare(const flashjit_kernel* kernel, const flashjit_argument* args,
                                        size_t num_args, flashjit_prepared** prepared) {
  return guarded([&] {
    flashjit_prepared*& created = require(prepared, "prepared");
    const Kernel& k = kernel_of(kernel);
    created = new flashjit_prepared{k.prepare(Arguments(args, num_args, &k.info().spec).get())};
  });
}
flashjit_status flashjit_merge(flashjit_engine* engine, const flashjit_argument* args, size_t num_args,
                               void* stream) {
  return guarded([&] {
    flashjit::merge(require(engine, "engine").engine, Arguments(args, num_args, nullptr).get(), stream);
  });
}
flashjit_status flashjit_prepared_launch(const flashjit_prepared* prepared, void* stream) {
  return guarded([&] { require(prepared, "prepared").launch.launch(stream); });
}
void flashjit_prepared_destroy(flashjit_prepared* prepared) {
  delete prepared;
}

flashjit_status flashjit_tensor_from_dlpack(const void* dl_tensor, flashjit_tensor* tensor) {
  // A DLTensor has these members in this order.
  return guarded([&] {
    const auto* const given = static_cast<const flashjit::DlpackTensor*>(dl_tensor);
    require(tensor, "tensor") = c_tensor(flashjit::wrap_dlpack(require(given, "dl_tensor")));
  });
}
flashjit_status flashjit_tensor_from_array_interface(void* data, const char* typestr, int32_t rank,
                                                     const int64_t* shape, const int64_t* byte_strides,
                                                     int32_t device_kind, int32_t device_index,
                                                     flashjit_tensor* tensor) {
  return guarded([&] {
    const std::size_t count = rank > 0 ? static_cast<std::size_t>(rank) : 0;
    if (device_kind != FLASHJIT_CPU && device_kind != FLASHJIT_CUDA)
      refuse_argument("device_kind ", device_kind, " is not a flashjit_device_kind");
    require(tensor, "tensor") = c_tensor(flashjit::wrap_array_interface(
        reinterpret_cast<std::uintptr_t>(data), &require(typestr, "typestr"),
        {count ? &require(shape, "shape") : nullptr, count}, {byte_strides, byte_strides ? count : 0},
        {static_cast<flashjit::Device::Kind>(device_kind), device_index}));
  });
}

flashjit_status flashjit_workspace_create(const flashjit_engine* engine, size_t bytes,
                                          flashjit_workspace** workspace) {
  return guarded([&] {
    require(workspace, "workspace") =
        new flashjit_workspace{flashjit::Workspace(require(engine, "engine").engine.device(), bytes)};
  });
}
flashjit_status flashjit_workspace_tensor(const flashjit_workspace* workspace, flashjit_tensor* tensor) {
  return guarded(
      [&] { require(tensor, "tensor") = c_tensor(require(workspace, "workspace").workspace.tensor()); });
}
void flashjit_workspace_destroy(flashjit_workspace* workspace) {
  delete workspace;
}

flashjit_status flashjit_step_create(const flashjit_engine* engine, flashjit_step** step) {
  return guarded([&] {
    require(step, "step") = new flashjit_step{flashjit::EngineStep(require(engine, "engine").engine)};
  });
}
flashjit_status flashjit_step_add(flashjit_step* step, const flashjit_kernel* kernel,
                                  const flashjit_argument* args, size_t count,
                                  const flashjit_shape* largest) {
  return guarded([&] {
    const Kernel& k = kernel_of(kernel);
    require(step, "step").step.add(k, Arguments(args, count, &k.info().spec).get(), shape_of(largest));
  });
}
flashjit_status flashjit_step_launch(const flashjit_step* step, void* stream) {
  return guarded([&] { require(step, "step").step.launch(stream); });
}
void flashjit_step_destroy(flashjit_step* step) {
  delete step;
}

flashjit_status flashjit_most_listed_blocks(const flashjit_block_lists* lists, int64_t* blocks) {
  return guarded([&] {
    const BlockLists given(lists);
    require(blocks, "blocks") = flashjit::most_listed_blocks(given.mask, given.shape);
  });
}
flashjit_status flashjit_block_sparse_from_dense(const flashjit_block_lists* lists, const uint8_t* seen,
                                                 flashjit_tables** tables) {
  return make_tables(tables, [&] {
    const BlockLists l(lists);
    const auto pairs =
        flashjit::product_of({l.shape.batch, l.shape.heads, l.shape.seqlen_q, l.shape.seqlen_k});
    if (pairs != 0) require(seen, "seen");
    // If the number of pairs does not fit 64 bits, the builder says so.
    return flashjit::block_sparse_from_dense(l.mask, l.shape,
                                             {seen, static_cast<std::size_t>(pairs.value_or(0))});
  });
}
flashjit_status flashjit_block_sparse_from_csr(const flashjit_block_lists* lists, const int32_t* offsets,
                                               const int32_t* columns, flashjit_tables** tables) {
  return make_tables(tables, [&] {
    const BlockLists l(lists);
    const Ints starts = ints(offsets, l.count + 1, "offsets");
    return flashjit::block_sparse_from_csr(l.mask, l.shape, starts, ints(columns, starts.back(), "columns"));
  });
}
flashjit_status flashjit_block_sparse_from_flex(const flashjit_block_lists* lists, int32_t columns,
                                                const int32_t* kv_num_blocks, const int32_t* kv_indices,
                                                const int32_t* full_kv_num_blocks,
                                                const int32_t* full_kv_indices, flashjit_tables** tables) {
  return make_tables(tables, [&] {
    const BlockLists l(lists);
    const std::int64_t indices = l.count * columns, full = full_kv_num_blocks ? l.count : 0;
    return flashjit::block_sparse_from_flex(
        l.mask, l.shape,
        {.kv_num_blocks = ints(kv_num_blocks, l.count, "kv_num_blocks"),
         .kv_indices = ints(kv_indices, indices, "kv_indices"),
         .full_kv_num_blocks = ints(full_kv_num_blocks, full, "full_kv_num_blocks"),
         .full_kv_indices = ints(full_kv_indices, full > 0 ? indices : 0, "full_kv_indices")});
  });
}
flashjit_status flashjit_document_mask(const flashjit_block_lists* lists, const int32_t* segment_ids_q,
                                       const int32_t* segment_ids_k, flashjit_tables** tables) {
  return make_tables(tables, [&] {
    const BlockLists l(lists);
    const std::int64_t batch = l.shape.batch;
    return flashjit::document_mask(l.mask, ints(segment_ids_q, batch * l.shape.seqlen_q, "segment_ids_q"),
                                   ints(segment_ids_k, batch * l.shape.seqlen_k, "segment_ids_k"),
                                   l.shape.batch);
  });
}
flashjit_status flashjit_tree_from_parents(const int32_t* parents, int32_t batch, int32_t tokens,
                                           flashjit_tables** tables) {
  return make_tables(tables, [&] {
    return flashjit::tree_from_parents(ints(parents, std::int64_t{batch} * tokens, "parents"), batch);
  });
}
int32_t flashjit_tables_get(const flashjit_tables* tables, int32_t argument_id, flashjit_tensor* tensor) {
  if (!tables || !tensor) return 0;
  const flashjit::Argument* const argument = flashjit::find_argument(argument_id);
  for (const flashjit::MaskTable& table : tables->tables) {
    if (!argument || argument->tensor() != table.argument) continue;
    // Callers only read the table, but the type flashjit_tensor has no const pointer.
    const flashjit::Tensor t = table.view(const_cast<std::int32_t*>(table.values.data()), {});
    *tensor = {.data = t.data,
               .dtype = FLASHJIT_INT32,
               .device_kind = FLASHJIT_CPU,
               .device_index = 0,
               .rank = t.rank,
               .shape = {},
               .strides = {}};
    std::copy(t.shape.begin(), t.shape.begin() + t.rank, tensor->shape);
    std::copy(t.strides.begin(), t.strides.begin() + t.rank, tensor->strides);
    return 1;
  }
  return 0;
}
void flashjit_tables_destroy(flashjit_tables* tables) {
  delete tables;
}

flashjit_status flashjit_dropout_mask(double p, uint64_t seed, uint64_t offset, const flashjit_shape* shape,
                                      uint8_t* keep) {
  return guarded([&] {
    const flashjit::Shape s = shape_of(shape);
    const std::size_t elements = flashjit::dropout_mask_size(s);
    if (elements > 0) require(keep, "keep");
    flashjit::dropout_mask({.p = p, .seed = seed, .offset = offset}, s, {keep, elements});
  });
}

}  // extern "C"
