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

static_assert(FLASHJIT_LAYOUT_BEST == static_cast<int>(flashjit::SequenceLayout::best));

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
    if (layout < FLASHJIT_LAYOUT_CONTIGUOUS || layout > FLASHJIT_LAYOUT_BEST)
      flashjit::refuse_argument("layout is ", layout, ", which is not a flashjit_layout");
    flashjit_parallel*& made = require(parallel, "parallel");
    const flashjit::AttentionSpec& s = require(spec, "spec").spec;
    flashjit::ParallelAttention attention(require(engine, "engine").engine, s, shape_of(whole),
                                          static_cast<flashjit::SequenceLayout>(layout),
                                          require(group, "group").group);
    made = new flashjit_parallel{s, s.for_op(flashjit::Operation::backward), std::move(attention)};
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

}  // extern "C"
