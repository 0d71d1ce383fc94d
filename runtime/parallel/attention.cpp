// The object of a rank: its arguments are checked here, and computed as its layout has it.
#include <exception>
#include <utility>

#include "runtime/arguments/checks.hpp"
#include "runtime/parallel/layout.hpp"
#include "runtime/parallel/rank_attention.hpp"

namespace flashjit {

std::shared_ptr<Exchange> open_exchange(const RankTask& task, std::size_t bytes) {
  std::shared_ptr<Exchange> exchange = task.transport->exchange(task.engine.device(), bytes, num_boxes);
  exchange->begin(nullptr);
  for (int step = 1; step < task.size(); ++step) exchange->post(task.after(step), freed);
  return exchange;
}

struct ParallelAttention::Impl {
  const ChosenLayout chosen;
  const RankTask task;
  const std::unique_ptr<RankAttention> attention;
  mutable bool prepared[2] = {};
  mutable Steps steps;

  Impl(Engine& engine, const AttentionSpec& spec, const Shape& whole, SequenceLayout layout,
       const ParallelGroup& group)
      : chosen(choose_layout(spec.validated(), whole, layout, group.size())),
        task{.engine = engine,
             .transport = group.transport(),
             .whole = whole,
             .spec = spec.validated(),
             .gradients = spec.for_op(Operation::backward),
             .layout = chosen.layout},
        attention(chosen.layout == SequenceLayout::heads ? attention_by_heads(task)
                                                         : attention_by_sequence(task)) {}
  // Others write into this rank's memory until all have come here.
  ~Impl() {
    if (!prepared[0] && !prepared[1]) return;
    try {
      attention->finish();
      task.transport->gather({});
    } catch (const std::exception&) {
      // A rank has failed, and none writes any more.
    }
  }

  void prepare(bool backward) const {
    task.transport->require_alive();
    if (std::exchange(prepared[backward], true)) return;
    attention->prepare(backward);
    task.transport->gather({});
  }

  // Runs a rank's work, and tells the others if it fails.
  template <class Work>
  void guard(const Work& work) const {
    try {
      work();
    } catch (const Error& error) {
      task.transport->fail(error.message());
      throw;
    } catch (...) {
      task.transport->fail("out of memory, or an error of another kind");
      throw;
    }
  }

  void require_own(const char* name, const std::optional<Tensor>& t, std::vector<std::int64_t> sizes) const {
    if (!t) refuse_argument(name, " is missing");
    if (t->rank != static_cast<int>(sizes.size()))
      refuse_argument(name, " has rank ", t->rank, ", it must be ", sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i)
      require_shape(name, *t, static_cast<int>(i), sizes[i], "the rank's share of the whole");
    if (t->shape[sizes.size() - 1] > 1 && t->strides[sizes.size() - 1] != 1 && sizes.size() == 4)
      refuse_argument(name, "'s last dimension has stride ", t->strides[sizes.size() - 1], ", it must be 1");
  }
  void check_forward(const AttentionArgs& args) const {
    require_own("q", args.q, {task.batch(), task.own_rows(), task.whole.num_heads_q, task.spec.head_dim});
    require_own("k", args.k, {task.batch(), task.own_keys(), task.whole.num_heads_kv, task.spec.head_dim});
    require_own("v", args.v, {task.batch(), task.own_keys(), task.whole.num_heads_kv, task.spec.head_dim_v});
    require_own("o", args.o, {task.batch(), task.own_rows(), task.whole.num_heads_q, task.spec.head_dim_v});
    require_own("lse", args.lse, {task.batch(), task.whole.num_heads_q, task.own_rows()});
  }
  void check_backward(const AttentionArgs& args) const {
    check_forward(args);
    require_own("do", args.d_o,
                {task.batch(), task.own_rows(), task.whole.num_heads_q, task.spec.head_dim_v});
    if (args.dlse) require_own("dlse", args.dlse, {task.batch(), task.whole.num_heads_q, task.own_rows()});
    require_own("dq", args.dq, {task.batch(), task.own_rows(), task.whole.num_heads_q, task.spec.head_dim});
    require_own("dk", args.dk, {task.batch(), task.own_keys(), task.whole.num_heads_kv, task.spec.head_dim});
    require_own("dv", args.dv,
                {task.batch(), task.own_keys(), task.whole.num_heads_kv, task.spec.head_dim_v});
  }
};

ParallelAttention::ParallelAttention(Engine& engine, const AttentionSpec& spec, const Shape& whole,
                                     SequenceLayout layout, const ParallelGroup& group) {
  // Told to all before anything is refused, so that no rank waits for one that has refused.
  const std::string said = spec.to_json() + ", batch " + std::to_string(whole.batch) + ", seqlens " +
                           std::to_string(whole.seqlen_q) + "/" + std::to_string(whole.seqlen_k) +
                           ", heads " + std::to_string(whole.num_heads_q) + "/" +
                           std::to_string(whole.num_heads_kv) + ", layout " + to_string(layout) +
                           (engine.device().kind == Device::Kind::cuda ? ", GPUs" : ", CPUs");
  const std::vector<std::string> all = group.transport()->gather(said);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      refuse_argument("the ranks of a group were given different work: rank 0 ", all[0], "; rank ", rank, " ",
                      all[rank], "; the same on all ranks would work");
  std::string refusal;
  std::exception_ptr thrown;
  try {
    group.transport()->require_device(engine.device());
    check_shape(spec, whole);
    impl_ = std::make_unique<Impl>(engine, spec, whole, layout, group);
  } catch (const std::exception& error) {
    refusal = error.what();
    thrown = std::current_exception();
  }
  const std::vector<std::string> refusals = group.transport()->gather(refusal);
  if (thrown) std::rethrow_exception(thrown);
  for (std::size_t rank = 0; rank < refusals.size(); ++rank)
    if (!refusals[rank].empty())
      throw Error(ErrorCode::device_failed,
                  "rank " + std::to_string(rank) + " of the group refused the work: " + refusals[rank]);
}
ParallelAttention::ParallelAttention(ParallelAttention&&) noexcept = default;
ParallelAttention::~ParallelAttention() = default;

SequenceLayout ParallelAttention::layout() const noexcept {
  return impl_->chosen.layout;
}
const std::string& ParallelAttention::layout_reason() const noexcept {
  return impl_->chosen.reason;
}
Shape ParallelAttention::own_shape() const noexcept {
  Shape shape = impl_->task.whole;
  shape.seqlen_q = impl_->task.own_rows();
  shape.seqlen_k = impl_->task.own_keys();
  return shape;
}

namespace {

bool is_backward(Operation op) {
  if (const OperationInfo& info = info_of(op); info.attends && !info.few_rows) return info.writes_gradients;
  refuse_argument("op ", to_string(op), " has no launch over several ranks; forward or backward would work");
}

}  // namespace

std::size_t ParallelAttention::workspace_bytes(Operation op) const {
  return impl_->attention->workspace_bytes(is_backward(op));
}
void ParallelAttention::prepare(Operation op) const {
  const bool backward = is_backward(op);
  impl_->guard([&] { impl_->prepare(backward); });
}
void ParallelAttention::forward(const AttentionArgs& args, Stream stream) const {
  impl_->guard([&] {
    impl_->check_forward(args);
    impl_->prepare(false);
    impl_->steps = impl_->attention->forward(args, stream);
  });
}
void ParallelAttention::backward(const AttentionArgs& args, Stream stream) const {
  impl_->guard([&] {
    impl_->check_backward(args);
    impl_->prepare(true);
    impl_->steps = impl_->attention->backward(args, stream);
  });
}
ParallelAttention::Steps ParallelAttention::last_steps() const noexcept {
  return impl_->steps;
}

}  // namespace flashjit
