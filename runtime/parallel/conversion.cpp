// Tensors from one layout to another. Each rank sends every other what both have of the whole.
#include <algorithm>
#include <utility>

#include "runtime/arguments/checks.hpp"
#include "runtime/parallel.hpp"
#include "runtime/parallel/room.hpp"
#include "runtime/parallel/tensor_parts.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {
namespace {

// Rows and heads of the whole.
struct Part {
  std::int64_t row, rows, head, heads;
};
// Rows and heads that a sender's and a receiver's parts have in common, in an order that both know.
struct CommonPart {
  std::size_t of_sender, of_receiver;
  Part both;
};
std::vector<CommonPart> common_parts(const std::vector<Part>& of_sender,
                                     const std::vector<Part>& of_receiver) {
  std::vector<CommonPart> all;
  for (std::size_t i = 0; i < of_sender.size(); ++i)
    for (std::size_t k = 0; k < of_receiver.size(); ++k) {
      const Part &a = of_sender[i], &b = of_receiver[k];
      Part both{std::max(a.row, b.row), std::min(a.row + a.rows, b.row + b.rows), std::max(a.head, b.head),
                std::min(a.head + a.heads, b.head + b.heads)};
      both.rows -= both.row, both.heads -= both.head;
      if (both.rows > 0 && both.heads > 0) all.push_back({i, k, both});
    }
  return all;
}

}  // namespace

struct LayoutConversion::Impl {
  static constexpr int rows_dim = 1, heads_dim = 2;

  const std::shared_ptr<Transport> transport;
  const Device device;
  const DType dtype;
  const std::vector<std::int64_t> whole;
  const SequenceLayout before, after;
  std::shared_ptr<Exchange> exchange;

  std::int64_t heads() const { return whole.size() > heads_dim ? whole[heads_dim] : 1; }
  // The whole's parts that a rank has, one after the other in its rows.
  std::vector<Part> parts(SequenceLayout layout, int rank) const {
    const int seqlen = static_cast<int>(whole[rows_dim]), size = transport->size();
    if (layout == SequenceLayout::heads) return {{0, seqlen, rank * (heads() / size), heads() / size}};
    std::vector<Part> made;
    for (const SequenceChunk& chunk : sequence_chunks(layout, seqlen, rank, size))
      made.push_back({chunk.begin, chunk.length, 0, heads()});
    return made;
  }
  std::vector<std::int64_t> own_sizes(SequenceLayout layout) const {
    std::vector<std::int64_t> sizes = whole;
    if (layout == SequenceLayout::heads)
      sizes[heads_dim] /= transport->size();
    else
      sizes[rows_dim] /= transport->size();
    return sizes;
  }
  // The rows of `all[i]` that `wanted` has. The rank's tensor has the parts `all`.
  Tensor slice(const Tensor& t, const std::vector<Part>& all, std::size_t i, const Part& wanted) const {
    std::int64_t at = wanted.row - all[i].row;
    for (std::size_t before_it = 0; before_it < i; ++before_it) at += all[before_it].rows;
    const Tensor of_rows = part_of(t, rows_dim, at, wanted.rows);
    return t.rank > heads_dim ? part_of(of_rows, heads_dim, wanted.head - all[i].head, wanted.heads)
                              : of_rows;
  }

  void check() const {
    if (whole.size() < 2 || whole.size() > Tensor::max_rank)
      refuse_argument("a tensor of the whole has rank ", whole.size(), ", it must be 2 to ", Tensor::max_rank,
                      ": [batch, seqlen, ...]");
    for (const std::int64_t size : whole)
      if (size < 0 || size > INT32_MAX) refuse_argument("a size of the whole is ", size);
    for (const SequenceLayout layout : {before, after})
      if (layout != SequenceLayout::heads)
        parts(layout, transport->rank());
      else if (whole.size() <= heads_dim || whole[heads_dim] % transport->size() != 0)
        refuse_argument("layout heads divides dimension 2 of [batch, seqlen, heads, ...] among ",
                        transport->size(), " ranks; a multiple of ", transport->size(), " would work");
  }
  void require_own(const char* name, const Tensor& t, SequenceLayout layout) const {
    const std::vector<std::int64_t> sizes = own_sizes(layout);
    if (t.dtype != dtype || t.rank != static_cast<int>(sizes.size()))
      refuse_argument(name, " is of dtype ", to_string(t.dtype), " and rank ", t.rank, ", it must be ",
                      to_string(dtype), " of rank ", sizes.size());
    require_memory(name, t, device);
    for (std::size_t i = 0; i < sizes.size(); ++i)
      require_shape(name, t, static_cast<int>(i), sizes[i], "the rank's share of the whole");
    if (sizes.back() > 1 && t.strides[sizes.size() - 1] != 1)
      refuse_argument(name, "'s last dimension has stride ", t.strides[sizes.size() - 1], ", it must be 1");
  }

  void convert(const Tensor& from, const Tensor& to, Stream stream) const {
    require_own("from", from, before);
    require_own("to", to, after);
    transport->require_alive();
    const Tensor arrived = Room(device, exchange->memory()).take(dtype, own_sizes(after));
    const int own = transport->rank(), size = transport->size();
    const std::vector<Part> mine = parts(before, own), wanted = parts(after, own);
    exchange->begin(stream);
    std::vector<int> senders;
    for (int step = 0; step < size; ++step) {
      CopyStep copies{(own + step) % size, (own + size - step) % size, sent};
      const std::vector<Part> theirs = parts(after, copies.to);
      for (const auto& [i, k, both] : common_parts(mine, theirs))
        copies.sends.push_back({slice(arrived, theirs, k, both), slice(from, mine, i, both)});
      for (const auto& [i, k, both] : common_parts(parts(before, copies.from), wanted))
        copies.receives.push_back(slice(arrived, wanted, k, both));
      if (!copies.receives.empty()) senders.push_back(copies.from);
      exchange->pass(copies);
    }
    for (const int rank : senders) exchange->wait(rank, sent, stream);
    exchange->begin(stream);
    exchange->copy(to, arrived);
    for (const int rank : senders)
      if (rank != own) exchange->release(rank, Box::freed);
    exchange->end(stream);
  }
};

LayoutConversion::LayoutConversion(Engine& engine, const ParallelGroup& group, DType dtype,
                                   const std::vector<std::int64_t>& whole, SequenceLayout before,
                                   SequenceLayout after)
    : impl_(new Impl{group.transport(), engine.device(), dtype, whole, before, after, {}}) {
  std::string work = std::string("a tensor of ") + to_string(dtype) + " [";
  for (const std::int64_t size : whole) work += std::to_string(size) + ", ";
  work += std::string("] from ") + to_string(before) + " to " + to_string(after);
  make_together(*impl_->transport, work, [&] {
    impl_->transport->require_device(engine.device());
    impl_->check();
  });
  run_together(*impl_->transport, [&] {
    Room count(impl_->device);
    count.take(dtype, impl_->own_sizes(after));
    impl_->exchange = open_exchange(*impl_->transport, impl_->device, count.used(), count.used());
  });
}
LayoutConversion::LayoutConversion(LayoutConversion&&) noexcept = default;
LayoutConversion::~LayoutConversion() {
  if (impl_ && impl_->exchange) end_together(*impl_->transport, [&] { impl_->exchange->finish(); });
}

std::vector<std::int64_t> LayoutConversion::own_sizes(SequenceLayout layout) const {
  return impl_->own_sizes(layout);
}
void LayoutConversion::convert(const Tensor& from, const Tensor& to, Stream stream) const {
  run_together(*impl_->transport, [&] { impl_->convert(from, to, stream); });
}

}  // namespace flashjit
