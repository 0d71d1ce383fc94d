// Attention of a rank's share of the heads over the whole sequence: all-to-all over heads (DeepSpeed-Ulysses,
// Jacobs et al. 2023). Each rank gets its heads of all rows, computes them, and sends results back to the
// ranks of their rows.
#include <array>
#include <utility>

#include "runtime/parallel/rank_attention.hpp"
#include "runtime/parallel/room.hpp"
#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {
namespace {

constexpr TensorMember inputs[] = {&AttentionArgs::q,   &AttentionArgs::k,   &AttentionArgs::v,
                                   &AttentionArgs::o,   &AttentionArgs::lse, &AttentionArgs::d_o,
                                   &AttentionArgs::dlse},
                       results[] = {&AttentionArgs::o, &AttentionArgs::lse, &AttentionArgs::dq,
                                    &AttentionArgs::dk, &AttentionArgs::dv};

// The dimensions of the sequence and of heads.
std::array<int, 2> dims_of(TensorMember member) {
  const bool numbers = member == &AttentionArgs::lse || member == &AttentionArgs::dlse;
  return numbers ? std::array{2, 1} : std::array{1, 2};
}

class ByHeads : public RankAttention {
 public:
  explicit ByHeads(const RankTask& task) : task_(task), of_heads_(task.whole) {
    of_heads_.num_heads_q /= task.size();
    of_heads_.num_heads_kv /= task.size();
  }

  std::size_t workspace_bytes(bool backward) const override {
    Room room(task_.engine.device());
    take(room, results_of(backward), of_heads_, backward);
    room.take_workspace(kernel(backward).workspace_bytes(of_heads_));
    return room.used();
  }
  void prepare(bool backward) override {
    kernel(backward);
    std::shared_ptr<Exchange>& exchange = exchanges_[backward];
    if (exchange) return;
    Room count(task_.engine.device());
    take_arrivals(count, backward);
    exchange = open_exchange(*task_.transport, task_.engine.device(), count.used(),
                             count.used() / static_cast<std::size_t>(task_.size()));
  }
  void finish() override {
    for (const std::shared_ptr<Exchange>& exchange : exchanges_)
      if (exchange) exchange->finish();
  }
  ParallelAttention::Steps forward(const AttentionArgs& args, Stream stream) override {
    return compute(args, false, stream);
  }
  ParallelAttention::Steps backward(const AttentionArgs& args, Stream stream) override {
    return compute(args, true, stream);
  }

 private:
  using Members = std::vector<TensorMember>;
  static Members inputs_of(bool backward) {
    return backward ? Members(std::begin(inputs), std::end(inputs)) : Members(inputs, inputs + 3);
  }
  static Members results_of(bool backward) {
    return backward ? Members(results + 2, std::end(results)) : Members(results, results + 2);
  }
  const AttentionSpec& spec(bool backward) const { return backward ? task_.gradients : task_.spec; }
  const Kernel& kernel(bool backward) const { return task_.engine.get(spec(backward), of_heads_); }

  // Tensors of these sizes.
  AttentionArgs take(Room& room, const Members& members, const Shape& shape, bool backward) const {
    AttentionArgs args;
    for (const TensorMember member : members) {
      const Argument& argument = argument_of(member);
      const std::vector<std::int64_t> sizes = argument.layout.sizes(spec(backward), shape);
      args.*member = room.take(argument.dtype(spec(backward)), sizes);
    }
    return args;
  }
  // The tensors that come from other ranks: inputs of this rank's heads, and results of its rows.
  struct Arrivals {
    AttentionArgs in, out;
  };
  Arrivals take_arrivals(Room& room, bool backward) const {
    Shape of_rows = task_.whole;
    of_rows.seqlen_q = task_.own_rows();
    of_rows.seqlen_k = task_.own_keys();
    const AttentionArgs in = take(room, inputs_of(backward), of_heads_, backward);
    return {in, take(room, results_of(backward), of_rows, backward)};
  }
  // A rank's share of a dimension.
  Tensor share(const Tensor& t, int dim, int rank) const {
    const std::int64_t count = t.shape[static_cast<std::size_t>(dim)] / task_.size();
    return part_of(t, dim, rank * count, count);
  }

  ParallelAttention::Steps compute(const AttentionArgs& args, bool backward, Stream stream) const {
    Exchange& exchange = *exchanges_[backward];
    Room room(args.workspace, workspace_bytes(backward), task_.engine.device()),
        arena(task_.engine.device(), exchange.memory());
    const Arrivals arrivals = take_arrivals(arena, backward);
    const AttentionArgs made = take(room, results_of(backward), of_heads_, backward);
    AttentionArgs launch = args;
    launch.workspace = room.take_workspace(kernel(backward).workspace_bytes(of_heads_));
    exchange.begin(stream);
    for (int step = 0; step < task_.size(); ++step) {
      CopyStep copies{task_.after(step), task_.after(task_.size() - step), sent};
      for (const TensorMember member : inputs_of(backward)) {
        if (!(args.*member)) continue;
        const auto [rows, heads] = dims_of(member);
        const Tensor& in = *(arrivals.in.*member);
        copies.sends.push_back({share(in, rows, task_.own()), share(*(args.*member), heads, copies.to)});
        copies.receives.push_back(share(in, rows, copies.from));
      }
      exchange.pass(copies);
    }
    for (int step = 0; step < task_.size(); ++step) exchange.wait(task_.after(step), sent, stream);
    for (const TensorMember member : inputs_of(backward))
      if (args.*member) launch.*member = arrivals.in.*member;
    for (const TensorMember member : results_of(backward)) launch.*member = made.*member;
    kernel(backward).launch(launch, stream);
    exchange.begin(stream);
    for (int step = 0; step < task_.size(); ++step) {
      CopyStep copies{task_.after(step), task_.after(task_.size() - step), returned};
      for (const TensorMember member : results_of(backward)) {
        const auto [rows, heads] = dims_of(member);
        const Tensor& out = *(arrivals.out.*member);
        copies.sends.push_back({share(out, heads, task_.own()), share(*(made.*member), rows, copies.to)});
        copies.receives.push_back(share(out, heads, copies.from));
      }
      exchange.pass(copies);
    }
    for (int step = 0; step < task_.size(); ++step) exchange.wait(task_.after(step), returned, stream);
    exchange.begin(stream);
    for (const TensorMember member : results_of(backward))
      exchange.copy(*(args.*member), *(arrivals.out.*member));
    for (int step = 1; step < task_.size(); ++step) exchange.release(task_.after(step), Box::freed);
    exchange.end(stream);
    return {1, 0};
  }

  const RankTask task_;
  Shape of_heads_;                                      // of a launch: a rank's share of the heads
  std::array<std::shared_ptr<Exchange>, 2> exchanges_;  // of a forward, and of a backward
};

}  // namespace

std::unique_ptr<RankAttention> attention_by_heads(const RankTask& task) {
  return std::make_unique<ByHeads>(task);
}

}  // namespace flashjit
