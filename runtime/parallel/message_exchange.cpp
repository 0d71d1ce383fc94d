#include "runtime/parallel/message_exchange.hpp"

#include <utility>

#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {

void MessageExchange::pass(const CopyStep& step) {
  if (step.to == rank_) {
    for (const RankCopy& each : step.sends) copy(each.to, each.from);
    if (!step.receives.empty()) arrives(rank_);
    return;
  }
  std::size_t used = 0;
  // The tensor itself if its bytes are contiguous.
  const auto as_message = [&](const Tensor& t, std::vector<Message>& messages) {
    const std::vector<std::int64_t> sizes(t.shape.begin(), t.shape.begin() + t.rank);
    std::size_t bytes = size_of(t.dtype);
    for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
    Tensor contiguous = t;
    if (const std::vector<Block> blocks = blocks_of(t, t);
        bytes > 0 && (blocks.size() > 1 || blocks[0].height > 1)) {
      if (used + bytes > packed_bytes_)
        throw Error(ErrorCode::internal, "a step copies more bytes than its exchange was made for");
      contiguous = Tensor::contiguous(packed() + used, t.dtype, device_, sizes);
      used += bytes;
    }
    if (bytes > 0) messages.push_back({static_cast<std::byte*>(contiguous.data), bytes});
    return contiguous;
  };
  std::vector<Message> sends, receives;
  std::vector<std::pair<Tensor, Tensor>> unpacked;
  for (const RankCopy& each : step.sends)
    if (const Tensor t = as_message(each.from, sends); t.data != each.from.data) copy(t, each.from);
  for (const Tensor& place : step.receives)
    if (const Tensor t = as_message(place, receives); t.data != place.data) unpacked.emplace_back(place, t);
  if (!sends.empty() || !receives.empty()) exchange(step.to, sends, step.from, receives);
  for (const auto& [to, from] : unpacked) copy(to, from);
  if (!step.receives.empty()) arrives(step.from);
}

}  // namespace flashjit
