#include "runtime/parallel/gathered_forward.hpp"

#include <algorithm>
#include <utility>

#include "codegen/families/kernel_family.hpp"
#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {
namespace {

constexpr int sequence_dim = 1;
constexpr int flags_of_place = Exchange::flags_for_each;  // half of those of two ranks

}  // namespace

std::unique_ptr<GatheredForward> GatheredForward::make(const RankTask& task) {
  const auto is_causal = [](const Mask& mask) { return std::holds_alternative<CausalMask>(mask); };
  AttentionSpec spec = task.spec;
  // A tile of more ranks would wait for the keys of all of them before its block of the grid has much else to
  // do (tests/bench/parallel.md).
  if (!task.transport->maps_memory() || task.layout != SequenceLayout::zigzag || task.size() != 2 ||
      task.own_keys() == 0 || spec.mask.empty() ||
      !std::all_of(spec.mask.begin(), spec.mask.end(), is_causal))
    return nullptr;
  // The whole has as many rows as keys, so both alignments are one.
  spec.mask = {CausalMask{}};
  spec.gathered = true;
  try {
    spec = spec.validated();
  } catch (const Error&) {
    return nullptr;
  }
  if (!why_unsupported(spec, task.engine.target()).empty()) return nullptr;
  return std::unique_ptr<GatheredForward>(new GatheredForward(task, std::move(spec)));
}

GatheredForward::GatheredForward(const RankTask& task, AttentionSpec spec)
    : task_(task),
      spec_(std::move(spec)),
      keys_(key_chunks(task.layout, task.whole.seqlen_k, task.size())),
      shape_(task.whole) {
  shape_.seqlen_q = task.own_rows();
}

const Kernel& GatheredForward::kernel() const {
  return task_.engine.get(spec_, shape_);
}
std::size_t GatheredForward::workspace_bytes() const {
  return kernel().workspace_bytes(shape_);
}

// A kernel waits for half a chunk at a time, unless copies of halves would be short.
int GatheredForward::piece_keys() const {
  const int length = keys_.chunks[0].length;
  return length % 2 == 0 && length >= 4096 ? length / 2 : length;
}

// In the order in which ranks read keys: the rank after this one needs them first, and of a chunk the last
// piece. Memory is mapped, so nothing is told to receive.
void GatheredForward::send(const AttentionArgs& args, Exchange& exchange, const Tensor& all_k,
                           const Tensor& all_v, bool second, Stream stream) const {
  const int piece = piece_keys(), first_flag = second ? flags_of_place : 0;
  exchange.begin(stream);
  for (int step = 1; step < task_.size(); ++step) {
    CopyStep copies{task_.after(step), task_.after(task_.size() - step),
                    second ? Box::sent_to_second : Box::sent};
    for (const auto& [chunk, place] :
         gathered_schedule(task_.whole.seqlen_k, copies.to, task_.size()).chunks) {
      const auto c = static_cast<std::size_t>(chunk);
      if (keys_.owner_of[c] != task_.own()) continue;
      const int length = keys_.chunks[c].length, own = keys_.place_of[c] * length;
      for (int at = length - piece; at >= 0; at -= piece) {
        copies.sends.push_back({part_of(all_k, sequence_dim, place + at, piece),
                                part_of(*args.k, sequence_dim, own + at, piece)});
        copies.sends.push_back({part_of(all_v, sequence_dim, place + at, piece),
                                part_of(*args.v, sequence_dim, own + at, piece),
                                first_flag + (place + at) / piece});
      }
    }
    exchange.pass(copies);
  }
}

void GatheredForward::forward(const AttentionArgs& args, const std::optional<Tensor>& workspace,
                              Exchange& exchange, const Tensor& all_k, const Tensor& all_v, bool second,
                              Stream stream) const {
  const GatheredSchedule schedule = gathered_schedule(task_.whole.seqlen_k, task_.own(), task_.size());
  send(args, exchange, all_k, all_v, second, stream);
  AttentionArgs of_launch = args;
  of_launch.workspace = workspace;
  of_launch.k_gathered = part_of(all_k, sequence_dim, 0, schedule.keys);
  of_launch.v_gathered = part_of(all_v, sequence_dim, 0, schedule.keys);
  of_launch.early_rows = schedule.early_rows;
  of_launch.late_keys = schedule.late_keys;
  const int pieces = schedule.keys / piece_keys(), first_flag = second ? flags_of_place : 0;
  of_launch.arrived = exchange.flags(first_flag, pieces);
  std::vector<int> senders;
  for (const auto& [chunk, place] : schedule.chunks)
    if (const int from = keys_.owner_of[static_cast<std::size_t>(chunk)];
        std::find(senders.begin(), senders.end(), from) == senders.end())
      senders.push_back(from);
  // Without flags the launch waits for all of them. Otherwise their boxes are only made ready for the next
  // time.
  const auto wait = [&] {
    for (const int from : senders) exchange.wait(from, second ? Box::sent_to_second : Box::sent, stream);
  };
  if (!of_launch.arrived) wait();
  kernel().launch(of_launch, stream);
  if (of_launch.arrived) {
    wait();
    exchange.lower(first_flag, pieces, stream);
  }
  for (const int from : senders) exchange.release(from, second ? Box::freed_second : Box::freed, stream);
  exchange.end(stream);
}

}  // namespace flashjit
