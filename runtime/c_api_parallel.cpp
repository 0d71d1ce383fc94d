// The C interface of attention over several ranks.
#include <memory>
#include <utility>

#include "runtime/c_api_arguments.hpp"
#include "runtime/parallel.hpp"

using namespace flashjit::c_api;

struct flashjit_group {
  flashjit::ParallelGroup group;
};
struct flashjit_parallel {
  flashjit::AttentionSpec spec, gradients;
  flashjit::ParallelAttention attention;
};

struct flashjit_conversion {
  flashjit::LayoutConversion conversion;
};

static_assert(FLASHJIT_LAYOUT_BEST == static_cast<int>(flashjit::SequenceLayout::best));

namespace {

flashjit::SequenceLayout layout_of(int32_t layout) {
  if (layout < FLASHJIT_LAYOUT_CONTIGUOUS || layout > FLASHJIT_LAYOUT_BEST)
    flashjit::refuse_argument("layout is ", layout, ", which is not a flashjit_layout");
  return static_cast<flashjit::SequenceLayout>(layout);
}

}  // namespace

extern "C" {

flashjit_status flashjit_groups_of_threads(int32_t size, flashjit_group** ranks) {
  return guarded([&] {
    std::vector<flashjit::ParallelGroup> made = flashjit::ParallelGroup::of_threads(size);
    flashjit_group** const to = &require(ranks, "ranks");
    std::vector<std::unique_ptr<flashjit_group>> all;
    for (flashjit::ParallelGroup& one : made)
      all.push_back(std::make_unique<flashjit_group>(flashjit_group{std::move(one)}));
    for (std::size_t i = 0; i < all.size(); ++i) to[i] = all[i].release();
  });
}
flashjit_status flashjit_group_of_nccl(void* comm, flashjit_group** group) {
  return guarded([&] {
    flashjit_group*& made = require(group, "group");
    made = new flashjit_group{flashjit::ParallelGroup::of_nccl(comm)};
  });
}
flashjit_status flashjit_group_name(int32_t size, char name[FLASHJIT_GROUP_NAME]) {
  return guarded([&] {
    char* const to = &require(name, "name");
    const std::string made = flashjit::ParallelGroup::name_of_processes(size);
    to[made.copy(to, FLASHJIT_GROUP_NAME - 1)] = 0;
  });
}
flashjit_status flashjit_group_of_processes(const char* name, int32_t rank, int32_t size,
                                            flashjit_group** group) {
  return guarded([&] {
    flashjit_group*& made = require(group, "group");
    made = new flashjit_group{flashjit::ParallelGroup::of_processes(&require(name, "name"), rank, size)};
  });
}
flashjit_status flashjit_group_rank(const flashjit_group* group, int32_t* rank, int32_t* size) {
  return guarded([&] {
    const flashjit::ParallelGroup& of = require(group, "group").group;
    if (rank) *rank = of.rank();
    if (size) *size = of.size();
  });
}
flashjit_status flashjit_group_transport(const flashjit_group* group, int32_t* maps_memory,
                                         const char** reason) {
  return guarded([&] {
    const flashjit::ParallelGroup& of = require(group, "group").group;
    if (maps_memory) *maps_memory = of.maps_memory();
    if (reason) *reason = of.transport_reason().c_str();
  });
}
flashjit_status flashjit_group_fail(const flashjit_group* group, const char* why) {
  return guarded([&] { require(group, "group").group.fail(&require(why, "why")); });
}
flashjit_status flashjit_group_check(const flashjit_group* group) {
  return guarded([&] { require(group, "group").group.require_alive(); });
}
void flashjit_group_destroy(flashjit_group* group) {
  delete group;
}

flashjit_status flashjit_parallel_create(flashjit_engine* engine, const flashjit_spec* spec,
                                         const flashjit_shape* whole, int32_t layout,
                                         const flashjit_group* group, flashjit_parallel** parallel) {
  return guarded([&] {
    flashjit_parallel*& made = require(parallel, "parallel");
    const flashjit::AttentionSpec& s = require(spec, "spec").spec;
    flashjit::ParallelAttention attention(require(engine, "engine").engine, s, shape_of(whole),
                                          layout_of(layout), require(group, "group").group);
    made = new flashjit_parallel{s, s.for_op(flashjit::Operation::backward), std::move(attention)};
  });
}
flashjit_status flashjit_sequence_chunks(int32_t layout, int32_t seqlen, int32_t rank, int32_t size,
                                         int32_t begins[2], int32_t* count, int32_t* length) {
  return guarded([&] {
    const std::vector<flashjit::SequenceChunk> chunks =
        flashjit::sequence_chunks(layout_of(layout), seqlen, rank, size);
    for (std::size_t i = 0; i < chunks.size(); ++i) (&require(begins, "begins"))[i] = chunks[i].begin;
    require(count, "count") = static_cast<int32_t>(chunks.size());
    require(length, "length") = chunks[0].length;
  });
}
flashjit_status flashjit_parallel_layout(const flashjit_parallel* parallel, int32_t* layout,
                                         const char** reason) {
  return guarded([&] {
    const flashjit::ParallelAttention& p = require(parallel, "parallel").attention;
    if (layout) *layout = static_cast<int32_t>(p.layout());
    if (reason) *reason = p.layout_reason().c_str();
  });
}
flashjit_status flashjit_parallel_workspace(const flashjit_parallel* parallel, int32_t backward,
                                            size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes") = require(parallel, "parallel")
                                  .attention.workspace_bytes(backward ? flashjit::Operation::backward
                                                                      : flashjit::Operation::forward);
  });
}
flashjit_status flashjit_parallel_prepare(const flashjit_parallel* parallel, int32_t backward) {
  return guarded([&] {
    require(parallel, "parallel")
        .attention.prepare(backward ? flashjit::Operation::backward : flashjit::Operation::forward);
  });
}
flashjit_status flashjit_parallel_forward(const flashjit_parallel* parallel, const flashjit_argument* args,
                                          size_t num_args, void* stream) {
  return guarded([&] {
    const flashjit_parallel& p = require(parallel, "parallel");
    p.attention.forward(Arguments(args, num_args, &p.spec).get(), stream);
  });
}
flashjit_status flashjit_parallel_backward(const flashjit_parallel* parallel, const flashjit_argument* args,
                                           size_t num_args, void* stream) {
  return guarded([&] {
    const flashjit_parallel& p = require(parallel, "parallel");
    p.attention.backward(Arguments(args, num_args, &p.gradients).get(), stream);
  });
}
void flashjit_parallel_destroy(flashjit_parallel* parallel) {
  delete parallel;
}

flashjit_status flashjit_conversion_create(flashjit_engine* engine, const flashjit_group* group,
                                           const flashjit_tensor* whole, int32_t before, int32_t after,
                                           flashjit_conversion** conversion) {
  return guarded([&] {
    flashjit_conversion*& made = require(conversion, "conversion");
    const flashjit::Tensor t = tensor_of(whole, "whole");
    made = new flashjit_conversion{{require(engine, "engine").engine,
                                    require(group, "group").group,
                                    t.dtype,
                                    {t.shape.begin(), t.shape.begin() + t.rank},
                                    layout_of(before),
                                    layout_of(after)}};
  });
}
flashjit_status flashjit_conversion_run(const flashjit_conversion* conversion, const flashjit_tensor* from,
                                        const flashjit_tensor* to, void* stream) {
  return guarded([&] {
    require(conversion, "conversion")
        .conversion.convert(tensor_of(from, "from"), tensor_of(to, "to"), stream);
  });
}
void flashjit_conversion_destroy(flashjit_conversion* conversion) {
  delete conversion;
}

}  // extern "C"
