// The object of a rank: its arguments are checked here, and computed as its layout has it.
#include <utility>

#include "runtime/arguments/checks.hpp"
#include "runtime/parallel/layout.hpp"
#include "runtime/parallel/rank_attention.hpp"

namespace flashjit {

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
    if (prepared[0] || prepared[1]) end_together(*task.transport, [&] { attention->finish(); });
  }

  void prepare(bool backward) const {
    task.transport->require_alive();
    if (std::exchange(prepared[backward], true)) return;
    attention->prepare(backward);
    task.transport->gather({});
  }

  Shape own_shape() const {
    Shape shape = task.whole;
    shape.seqlen_q = task.own_rows();
    shape.seqlen_k = task.own_keys();
    return shape;
  }
  // Before a rank sends anything of them.
  void check(const AttentionArgs& args, const AttentionSpec& spec,
             std::initializer_list<TensorMember> members) const {
    for (const TensorMember member : members) {
      const Argument& argument = argument_of(member);
      if (!argument.required && !(args.*member) && member != &AttentionArgs::lse) continue;
      const Tensor& t = require(argument, spec, args, task.engine.device());
      const std::vector<std::int64_t> sizes = argument.layout.sizes(spec, own_shape());
      for (std::size_t i = 0; i < sizes.size(); ++i)
        require_shape(argument.name, t, static_cast<int>(i), sizes[i], "the rank's share of the whole");
      const std::int64_t stride = t.strides[sizes.size() - 1];
      if (sizes.size() == 4 && sizes[3] > 1 && stride != 1)
        refuse_argument(argument.name, "'s last dimension has stride ", stride, ", it must be 1");
    }
  }
  void check_forward(const AttentionArgs& args) const {
    using Args = AttentionArgs;
    check(args, task.spec, {&Args::q, &Args::k, &Args::v, &Args::o, &Args::lse});
  }
  void check_backward(const AttentionArgs& args) const {
    using Args = AttentionArgs;
    check(args, task.gradients,
          {&Args::q, &Args::k, &Args::v, &Args::o, &Args::lse, &Args::d_o, &Args::dlse, &Args::dq, &Args::dk,
           &Args::dv});
  }
};

ParallelAttention::ParallelAttention(Engine& engine, const AttentionSpec& spec, const Shape& whole,
                                     SequenceLayout layout, const ParallelGroup& group) {
  const std::string said = spec.to_json() + ", batch " + std::to_string(whole.batch) + ", seqlens " +
                           std::to_string(whole.seqlen_q) + "/" + std::to_string(whole.seqlen_k) +
                           ", heads " + std::to_string(whole.num_heads_q) + "/" +
                           std::to_string(whole.num_heads_kv) + ", layout " + to_string(layout) +
                           (engine.target().is_cuda() ? ", target " + engine.target().str() : ", CPUs");
  make_together(*group.transport(), said, [&] {
    group.transport()->require_device(engine.device());
    check_shape(spec, whole);
    impl_ = std::make_unique<Impl>(engine, spec, whole, layout, group);
  });
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
  return impl_->own_shape();
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
  run_together(*impl_->task.transport, [&] { impl_->prepare(backward); });
}
void ParallelAttention::forward(const AttentionArgs& args, Stream stream) const {
  run_together(*impl_->task.transport, [&] {
    impl_->check_forward(args);
    impl_->prepare(false);
    impl_->steps = impl_->attention->forward(args, stream);
  });
}
void ParallelAttention::backward(const AttentionArgs& args, Stream stream) const {
  run_together(*impl_->task.transport, [&] {
    impl_->check_backward(args);
    impl_->prepare(true);
    impl_->steps = impl_->attention->backward(args, stream);
  });
}
ParallelAttention::Steps ParallelAttention::last_steps() const noexcept {
  return impl_->steps;
}

}  // namespace flashjit
