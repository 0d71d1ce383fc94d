// The schedule of each rank: which launches compute its rows, and how their results become one.
#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>

#include "runtime/arguments/checks.hpp"
#include "runtime/parallel/layout.hpp"
#include "runtime/parallel/tensor_parts.hpp"
#include "runtime/parallel/transport.hpp"

namespace flashjit {
namespace {

using Chunks = std::vector<SequenceChunk>;

// Takes tensors from the caller's workspace, one after the other. Without memory it counts.
class Room {
 public:
  Room() = default;
  Room(const std::optional<Tensor>& workspace, std::size_t needed, Device device) : device_(device) {
    if (needed == 0) return;
    const std::size_t given =
        workspace ? static_cast<std::size_t>(workspace->shape[0]) * size_of(workspace->dtype) : 0;
    if (!workspace || !workspace->data || given < needed)
      refuse_argument("workspace has ", given, " bytes, the launch needs ", needed,
                      ", as workspace_bytes() says");
    if (reinterpret_cast<std::uintptr_t>(workspace->data) % alignment)
      refuse_argument("workspace's data pointer is not aligned to ", alignment, " bytes");
    data_ = static_cast<std::byte*>(workspace->data);
  }
  Tensor take(DType dtype, std::initializer_list<std::int64_t> sizes) {
    std::size_t bytes = size_of(dtype);
    for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
    return Tensor::contiguous(take(bytes), dtype, device_, sizes);
  }
  std::optional<Tensor> take_workspace(std::size_t bytes) {
    if (bytes == 0) return std::nullopt;
    return Tensor::contiguous(take(bytes), DType::uint8, device_, {static_cast<std::int64_t>(bytes)});
  }
  std::size_t used() const { return used_; }

 private:
  static constexpr std::size_t alignment = 64;
  void* take(std::size_t bytes) {
    std::byte* const at = data_ ? data_ + used_ : nullptr;
    used_ += (bytes + alignment - 1) / alignment * alignment;
    return at;
  }
  std::byte* data_ = nullptr;
  std::size_t used_ = 0;
  Device device_{};
};

// The dimension of the sequence.
constexpr int rows_dim = 1, lse_dim = 2;

}  // namespace

struct ParallelAttention::Impl {
  Engine& engine;
  const std::shared_ptr<Transport> transport;
  const Shape whole;
  const AttentionSpec spec, gradients;             // as the caller has them
  AttentionSpec part, whole_rows, part_gradients;  // of shards: a partial result, the only one, gradients
  ChosenLayout chosen;
  std::vector<Chunks> rows, keys;  // of each rank
  std::vector<std::vector<std::int64_t>> row_offsets, key_offsets;
  mutable Steps steps;

  Impl(Engine& on, const AttentionSpec& given, const Shape& sizes, SequenceLayout layout,
       const ParallelGroup& group)
      : engine(on),
        transport(group.transport()),
        whole(sizes),
        spec(given.validated()),
        gradients(given.for_op(Operation::backward)) {
    transport->require_device(engine.device());
    chosen = choose_layout(spec, whole, layout, transport->size());
    part = spec;
    part.offsets = true;
    whole_rows = part = part.validated();
    part.o_dtype = DType::fp32;
    part = part.validated();
    part_gradients = gradients;
    part_gradients.offsets = true;
    part_gradients.grad_dtype = DType::fp32;
    part_gradients = part_gradients.validated();
    for (int rank = 0; rank < transport->size(); ++rank) {
      rows.push_back(sequence_chunks(chosen.layout, whole.seqlen_q, rank, transport->size()));
      keys.push_back(sequence_chunks(chosen.layout, whole.seqlen_k, rank, transport->size()));
      const auto begins = [](const Chunks& chunks) {
        std::vector<std::int64_t> offsets;
        for (const SequenceChunk& chunk : chunks) offsets.push_back(chunk.begin);
        return offsets;
      };
      row_offsets.push_back(begins(rows.back()));
      key_offsets.push_back(begins(keys.back()));
    }
  }

  std::size_t own() const { return static_cast<std::size_t>(transport->rank()); }
  bool by_heads() const { return chosen.layout == SequenceLayout::heads; }
  std::int64_t batch() const { return whole.batch; }
  int head_dim_v() const { return spec.head_dim_v; }
  // A rank's share of the heads, and the sizes of a launch of them.
  Shape of_heads() const {
    Shape shape = whole;
    shape.num_heads_q /= transport->size();
    shape.num_heads_kv /= transport->size();
    return shape;
  }
  Shape of_chunks() const {
    Shape shape = whole;
    shape.seqlen_q = rows[0][0].length;
    shape.seqlen_k = keys[0][0].length;
    return shape;
  }
  int own_rows() const { return whole.seqlen_q / transport->size(); }
  int own_keys() const { return whole.seqlen_k / transport->size(); }

  Tensor offset(std::vector<std::int64_t>& of, std::size_t chunk) const {
    return {.data = &of[chunk],
            .dtype = DType::int64,
            .device = engine.device(),
            .rank = 1,
            .shape = {batch()},
            .strides = {0}};
  }
  // What masks, scores and dropout read, at the places of a pair of chunks.
  AttentionArgs common(const AttentionArgs& args, std::size_t row_chunk, std::size_t peer,
                       std::size_t key_chunk) const {
    AttentionArgs own_args = args;
    own_args.workspace.reset();
    auto& self = const_cast<Impl&>(*this);
    own_args.row_offset = offset(self.row_offsets[own()], row_chunk);
    own_args.key_offset = offset(self.key_offsets[peer], key_chunk);
    return own_args;
  }

  // Runs a rank's work, and tells the others if it fails.
  template <class Work>
  void guard(const Work& work) const {
    try {
      work();
    } catch (const Error& error) {
      transport->fail(error.message());
      throw;
    } catch (...) {
      transport->fail("out of memory, or an error of another kind");
      throw;
    }
  }

  void require_own(const char* name, const std::optional<Tensor>& t, std::vector<std::int64_t> sizes) const {
    if (!t) refuse_argument(name, " is missing");
    if (t->rank != static_cast<int>(sizes.size()))
      refuse_argument(name, " has rank ", t->rank, ", it must be ", sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i)
      require_shape(name, *t, static_cast<int>(i), sizes[i], "the rank's share of the whole");
  }
  void check_forward(const AttentionArgs& args) const {
    require_own("q", args.q, {batch(), own_rows(), whole.num_heads_q, spec.head_dim});
    require_own("k", args.k, {batch(), own_keys(), whole.num_heads_kv, spec.head_dim});
    require_own("v", args.v, {batch(), own_keys(), whole.num_heads_kv, head_dim_v()});
    require_own("o", args.o, {batch(), own_rows(), whole.num_heads_q, head_dim_v()});
    require_own("lse", args.lse, {batch(), whole.num_heads_q, own_rows()});
  }
  void check_backward(const AttentionArgs& args) const {
    check_forward(args);
    require_own("do", args.d_o, {batch(), own_rows(), whole.num_heads_q, head_dim_v()});
    if (args.dlse) require_own("dlse", args.dlse, {batch(), whole.num_heads_q, own_rows()});
    require_own("dq", args.dq, {batch(), own_rows(), whole.num_heads_q, spec.head_dim});
    require_own("dk", args.dk, {batch(), own_keys(), whole.num_heads_kv, spec.head_dim});
    require_own("dv", args.dv, {batch(), own_keys(), whole.num_heads_kv, head_dim_v()});
  }

  // Pairs of one row chunk of this rank and chunks of keys, in the order of launches: this rank's own first.
  struct Pair {
    std::size_t peer, key_chunk;
  };
  std::vector<Pair> pairs_of(const AttentionArgs& args, std::size_t row_chunk) const {
    std::vector<Pair> pairs;
    const std::size_t size = rows.size();
    for (std::size_t step = 0; step < size; ++step) {
      const std::size_t peer = (own() + step) % size;
      for (std::size_t chunk = 0; chunk < keys[peer].size(); ++chunk) {
        if (may_see(spec, args, rows[own()][row_chunk], keys[peer][chunk]))
          pairs.push_back({peer, chunk});
        else
          ++steps.skipped;
      }
    }
    if (pairs.empty()) pairs.push_back({own(), row_chunk});  // writes rows without keys
    return pairs;
  }

  // Partial results of a row chunk: two that are merged, and the merged one. Parts of a merge lie side by
  // side, and it writes to the third place.
  struct Partials {
    Tensor o, lse;  // [3, ...]
    Partials(const Impl& of, Room& room, int length)
        : o(room.take(DType::fp32, {3, of.batch(), length, of.whole.num_heads_q, of.head_dim_v()})),
          lse(room.take(DType::fp32, {3, of.batch(), of.whole.num_heads_q, length})) {}
  };

  std::size_t forward_bytes() const {
    Room room;
    if (by_heads()) {
      take_heads(room, Operation::forward);
      room.take_workspace(engine.get(spec, of_heads()).workspace_bytes(of_heads()));
      return room.used();
    }
    const Partials partials(*this, room, rows[0][0].length);
    room.take_workspace(std::max(engine.get(part, of_chunks()).workspace_bytes(of_chunks()),
                                 engine.get(whole_rows, of_chunks()).workspace_bytes(of_chunks())));
    return room.used();
  }

  void forward(const AttentionArgs& args, Stream stream) const {
    steps = {};
    check_forward(args);
    Room room(args.workspace, forward_bytes(), engine.device());
    if (by_heads()) return forward_by_heads(args, room, stream);
    const Partials partials(*this, room, rows[0][0].length);
    const Kernel &of_part = engine.get(part, of_chunks()), &of_whole = engine.get(whole_rows, of_chunks());
    const std::optional<Tensor> workspace = room.take_workspace(
        std::max(of_part.workspace_bytes(of_chunks()), of_whole.workspace_bytes(of_chunks())));
    const Tensor shown[] = {*args.k, *args.v};
    transport->publish(shown, stream);
    for (std::size_t chunk = 0; chunk < rows[own()].size(); ++chunk) {
      const std::vector<Pair> pairs = pairs_of(args, chunk);
      const int length = rows[own()][chunk].length;
      const auto first = static_cast<std::int64_t>(chunk) * length;
      const Tensor o = part_of(*args.o, rows_dim, first, length),
                   lse = part_of(*args.lse, lse_dim, first, length);
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        const Pair& pair = pairs[i];
        const auto key = static_cast<std::int64_t>(pair.key_chunk) * keys[pair.peer][0].length;
        AttentionArgs launch = common(args, chunk, pair.peer, pair.key_chunk);
        launch.q = part_of(*args.q, rows_dim, first, length);
        launch.k = part_of(transport->fetch(static_cast<int>(pair.peer), 0, stream), rows_dim, key,
                           keys[pair.peer][0].length);
        launch.v = part_of(transport->fetch(static_cast<int>(pair.peer), 1, stream), rows_dim, key,
                           keys[pair.peer][0].length);
        launch.workspace = workspace;
        ++steps.launched;
        if (pairs.size() == 1) {
          launch.o = o, launch.lse = lse;
          of_whole.launch(launch, stream);
          break;
        }
        // The first result lies in place 0, and all others in place 1; merged ones in places 2 and 0 by
        // turns.
        launch.o = at_of(partials.o, 0, i == 0 ? 0 : 1);
        launch.lse = at_of(partials.lse, 0, i == 0 ? 0 : 1);
        of_part.launch(launch, stream);
        if (i == 0) continue;
        const bool last = i + 1 == pairs.size();
        const std::int64_t before = i % 2 == 1 ? 0 : 1,
                           after = i % 2 == 1 ? 2 : 0;  // places before..before + 1
        merge(engine,
              {.o = last ? o : at_of(partials.o, 0, after),
               .lse = last ? lse : at_of(partials.lse, 0, after),
               .parts_o = part_of(partials.o, 0, before, 2),
               .parts_lse = part_of(partials.lse, 0, before, 2)},
              stream);
      }
    }
    transport->meet(stream);
  }

  std::size_t backward_bytes() const {
    Room room;
    if (by_heads()) {
      take_heads(room, Operation::backward);
      room.take_workspace(engine.get(gradients, of_heads()).workspace_bytes(of_heads()));
      return room.used();
    }
    const Sums sums(*this, room);
    room.take_workspace(engine.get(part_gradients, of_chunks()).workspace_bytes(of_chunks()));
    return room.used();
  }

  // Float32 sums of a backward. `given`: what this rank has for the keys of others, in two buffers.
  struct Sums {
    Tensor dq, dk, dv, given_k[2], given_v[2], part_q, part_k, part_v;
    Sums(const Impl& of, Room& room) {
      const Shape& z = of.whole;
      const auto take = [&](int length, int heads, int dim) {
        return room.take(DType::fp32, {of.batch(), length, heads, dim});
      };
      dq = take(of.own_rows(), z.num_heads_q, of.spec.head_dim);
      dk = take(of.own_keys(), z.num_heads_kv, of.spec.head_dim);
      dv = take(of.own_keys(), z.num_heads_kv, of.head_dim_v());
      for (int i = 0; i < 2; ++i) {
        given_k[i] = take(of.own_keys(), z.num_heads_kv, of.spec.head_dim);
        given_v[i] = take(of.own_keys(), z.num_heads_kv, of.head_dim_v());
      }
      part_q = take(of.rows[0][0].length, z.num_heads_q, of.spec.head_dim);
      part_k = take(of.keys[0][0].length, z.num_heads_kv, of.spec.head_dim);
      part_v = take(of.keys[0][0].length, z.num_heads_kv, of.head_dim_v());
    }
  };

  // In step i a rank computes what it gives to the keys of the rank i after it. A rank takes what it is
  // given, by the rank i before it, always in this order.
  void backward(const AttentionArgs& args, Stream stream) const {
    steps = {};
    check_backward(args);
    Room room(args.workspace, backward_bytes(), engine.device());
    if (by_heads()) return backward_by_heads(args, room, stream);
    const Sums sums(*this, room);
    const Kernel& kernel = engine.get(part_gradients, of_chunks());
    const std::optional<Tensor> workspace = room.take_workspace(kernel.workspace_bytes(of_chunks()));
    for (const Tensor* const sum : {&sums.dq, &sums.dk, &sums.dv}) clear_elements(*sum);
    const Tensor shown[] = {*args.k,         *args.v,         sums.given_k[0],
                            sums.given_k[1], sums.given_v[0], sums.given_v[1]};
    transport->publish(shown, stream);
    const std::size_t size = rows.size();
    for (std::size_t step = 0; step < size; ++step) {
      const std::size_t to = (own() + step) % size, from = (own() + size - step) % size, buffer = step % 2;
      clear_elements(sums.given_k[buffer]);
      clear_elements(sums.given_v[buffer]);
      for (std::size_t chunk = 0; chunk < rows[own()].size(); ++chunk)
        for (std::size_t key_chunk = 0; key_chunk < keys[to].size(); ++key_chunk) {
          if (!may_see(spec, args, rows[own()][chunk], keys[to][key_chunk])) {
            ++steps.skipped;
            continue;
          }
          ++steps.launched;
          launch_pair(args, kernel, sums, buffer, chunk, to, key_chunk, workspace, stream);
        }
      transport->meet(stream);
      add_elements(sums.dk, transport->fetch(static_cast<int>(from), 2 + buffer, stream));
      add_elements(sums.dv, transport->fetch(static_cast<int>(from), 4 + buffer, stream));
    }
    convert_elements(*args.dq, sums.dq);
    convert_elements(*args.dk, sums.dk);
    convert_elements(*args.dv, sums.dv);
    transport->meet(stream);
  }

  void launch_pair(const AttentionArgs& args, const Kernel& kernel, const Sums& sums, std::size_t buffer,
                   std::size_t chunk, std::size_t peer, std::size_t key_chunk,
                   const std::optional<Tensor>& workspace, Stream stream) const {
    const int length = rows[own()][chunk].length, key_length = keys[peer][key_chunk].length;
    const auto first = static_cast<std::int64_t>(chunk) * length,
               key = static_cast<std::int64_t>(key_chunk) * key_length;
    const auto of_rows = [&](const std::optional<Tensor>& t, int dim) {
      return t ? std::optional(part_of(*t, dim, first, length)) : std::nullopt;
    };
    AttentionArgs launch = common(args, chunk, peer, key_chunk);
    launch.q = of_rows(args.q, rows_dim);
    launch.o = of_rows(args.o, rows_dim);
    launch.d_o = of_rows(args.d_o, rows_dim);
    launch.lse = of_rows(args.lse, lse_dim);
    launch.dlse = of_rows(args.dlse, lse_dim);
    launch.k = part_of(transport->fetch(static_cast<int>(peer), 0, stream), rows_dim, key, key_length);
    launch.v = part_of(transport->fetch(static_cast<int>(peer), 1, stream), rows_dim, key, key_length);
    launch.dq = sums.part_q;
    launch.dk = sums.part_k;
    launch.dv = sums.part_v;
    launch.workspace = workspace;
    kernel.launch(launch, stream);
    add_elements(part_of(sums.dq, rows_dim, first, length), sums.part_q);
    add_elements(part_of(sums.given_k[buffer], rows_dim, key, key_length), sums.part_k);
    add_elements(part_of(sums.given_v[buffer], rows_dim, key, key_length), sums.part_v);
  }

  // The tensors of a rank's heads over the whole sequence.
  struct OfHeads {
    AttentionArgs args;
  };
  OfHeads take_heads(Room& room, Operation op) const {
    const Shape z = of_heads();
    const auto take = [&](DType dtype, int length, int heads, int dim) {
      return room.take(dtype, {batch(), length, heads, dim});
    };
    const auto numbers = [&] { return room.take(DType::fp32, {batch(), z.num_heads_q, z.seqlen_q}); };
    OfHeads made;
    AttentionArgs& a = made.args;
    a.q = take(spec.dtype, z.seqlen_q, z.num_heads_q, spec.head_dim);
    a.k = take(spec.dtype, z.seqlen_k, z.num_heads_kv, spec.head_dim);
    a.v = take(spec.dtype, z.seqlen_k, z.num_heads_kv, head_dim_v());
    a.o = take(spec.o_dtype.value_or(spec.dtype), z.seqlen_q, z.num_heads_q, head_dim_v());
    a.lse = numbers();
    if (!info_of(op).writes_gradients) return made;
    const DType of_gradients = gradients.grad_dtype.value_or(spec.dtype);
    a.d_o = take(spec.dtype, z.seqlen_q, z.num_heads_q, head_dim_v());
    a.dlse = numbers();
    a.dq = take(of_gradients, z.seqlen_q, z.num_heads_q, spec.head_dim);
    a.dk = take(of_gradients, z.seqlen_k, z.num_heads_kv, spec.head_dim);
    a.dv = take(of_gradients, z.seqlen_k, z.num_heads_kv, head_dim_v());
    return made;
  }

  static constexpr TensorMember forward_inputs[] = {&AttentionArgs::q, &AttentionArgs::k, &AttentionArgs::v},
                                forward_outputs[] = {&AttentionArgs::o, &AttentionArgs::lse},
                                backward_inputs[] = {&AttentionArgs::q,   &AttentionArgs::k,
                                                     &AttentionArgs::v,   &AttentionArgs::o,
                                                     &AttentionArgs::lse, &AttentionArgs::d_o,
                                                     &AttentionArgs::dlse},
                                backward_outputs[] = {&AttentionArgs::dq, &AttentionArgs::dk,
                                                      &AttentionArgs::dv};

  void forward_by_heads(const AttentionArgs& args, Room& room, Stream stream) const {
    compute_heads(args, room, engine.get(spec, of_heads()), Operation::forward, forward_inputs,
                  forward_outputs, stream);
  }
  void backward_by_heads(const AttentionArgs& args, Room& room, Stream stream) const {
    compute_heads(args, room, engine.get(gradients, of_heads()), Operation::backward, backward_inputs,
                  backward_outputs, stream);
  }

  // Each rank takes its heads of all rows, computes them, and takes its rows of all heads.
  void compute_heads(const AttentionArgs& args, Room& room, const Kernel& kernel, Operation op,
                     std::span<const TensorMember> inputs, std::span<const TensorMember> outputs,
                     Stream stream) const {
    AttentionArgs of_heads = take_heads(room, op).args, launch = args;
    launch.workspace = room.take_workspace(kernel.workspace_bytes(this->of_heads()));
    std::vector<Tensor> shown;
    std::vector<TensorMember> given;
    for (const TensorMember member : inputs)
      if (args.*member) shown.push_back(*(args.*member)), given.push_back(member);
    transport->publish(shown, stream);
    for (int rank = 0; rank < transport->size(); ++rank)
      for (std::size_t i = 0; i < given.size(); ++i) {
        const auto [rows_at, heads_at] = dims_of(given[i]);
        const Tensor& to = *(of_heads.*given[i]);
        const std::int64_t heads = to.shape[heads_at], length = to.shape[rows_at] / transport->size();
        copy_elements(part_of(to, static_cast<int>(rows_at), rank * length, length),
                      part_of(transport->fetch(rank, i, stream), static_cast<int>(heads_at),
                              transport->rank() * heads, heads));
      }
    for (const TensorMember member : given) launch.*member = of_heads.*member;
    for (const TensorMember member : outputs) launch.*member = of_heads.*member;
    ++steps.launched;
    kernel.launch(launch, stream);
    transport->meet(stream);
    shown.clear();
    for (const TensorMember member : outputs) shown.push_back(*(of_heads.*member));
    transport->publish(shown, stream);
    for (int rank = 0; rank < transport->size(); ++rank)
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const auto [rows_at, heads_at] = dims_of(outputs[i]);
        const Tensor& to = *(args.*outputs[i]);
        const Tensor from = transport->fetch(rank, i, stream);
        const std::int64_t heads = from.shape[heads_at], length = to.shape[rows_at];
        copy_elements(part_of(to, static_cast<int>(heads_at), rank * heads, heads),
                      part_of(from, static_cast<int>(rows_at), transport->rank() * length, length));
      }
    transport->meet(stream);
  }
  // The dimensions of the sequence and of heads.
  static std::array<std::size_t, 2> dims_of(TensorMember member) {
    const bool numbers = member == &AttentionArgs::lse || member == &AttentionArgs::dlse;
    return numbers ? std::array<std::size_t, 2>{2, 1} : std::array<std::size_t, 2>{1, 2};
  }
};

ParallelAttention::ParallelAttention(Engine& engine, const AttentionSpec& spec, const Shape& whole,
                                     SequenceLayout layout, const ParallelGroup& group) {
  // Told to all before anything is refused, so that no rank waits for one that has refused.
  const std::string said = spec.to_json() + ", batch " + std::to_string(whole.batch) + ", seqlens " +
                           std::to_string(whole.seqlen_q) + "/" + std::to_string(whole.seqlen_k) +
                           ", heads " + std::to_string(whole.num_heads_q) + "/" +
                           std::to_string(whole.num_heads_kv) + ", layout " + to_string(layout);
  const std::vector<std::string> all = group.transport()->gather(said);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      refuse_argument("the ranks of a group were given different work: rank 0 ", all[0], "; rank ", rank, " ",
                      all[rank], "; the same on all ranks would work");
  std::string refusal;
  std::exception_ptr thrown;
  try {
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
  Shape shape = impl_->whole;
  shape.seqlen_q = impl_->own_rows();
  shape.seqlen_k = impl_->own_keys();
  return shape;
}
std::size_t ParallelAttention::workspace_bytes(Operation op) const {
  if (const OperationInfo& info = info_of(op); info.attends && !info.few_rows)
    return info.writes_gradients ? impl_->backward_bytes() : impl_->forward_bytes();
  refuse_argument("op ", to_string(op), " has no launch over several ranks; forward or backward would work");
}
void ParallelAttention::forward(const AttentionArgs& args, Stream stream) const {
  impl_->guard([&] { impl_->forward(args, stream); });
}
void ParallelAttention::backward(const AttentionArgs& args, Stream stream) const {
  impl_->guard([&] { impl_->backward(args, stream); });
}
ParallelAttention::Steps ParallelAttention::last_steps() const noexcept {
  return impl_->steps;
}

}  // namespace flashjit
