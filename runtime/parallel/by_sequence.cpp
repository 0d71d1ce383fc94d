// Attention of a rank's rows over the keys of all ranks (context parallelism). Other ranks' keys and values
// arrive while the first launch computes what needs this rank's alone; gradients of their keys leave before
// the last launches.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "runtime/parallel/gradient_sums.hpp"
#include "runtime/parallel/rank_attention.hpp"
#include "runtime/parallel/room.hpp"
#include "runtime/parallel/schedule.hpp"
#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {
namespace {

// The dimension of the sequence.
constexpr int rows_dim = 1, lse_dim = 2;

class BySequence : public RankAttention {
 public:
  explicit BySequence(const RankTask& task)
      : task_(task), keys_(key_chunks(task.layout, task.whole.seqlen_k, task.size())) {
    part_ = task_.spec;
    part_.offsets = true;
    whole_rows_ = part_ = part_.validated();
    part_.o_dtype = DType::fp32;
    part_ = part_.validated();
    part_gradients_ = task_.gradients;
    part_gradients_.offsets = true;
    part_gradients_.grad_dtype = DType::fp32;
    part_gradients_ = part_gradients_.validated();
    const auto know = [&](const SequenceChunk& chunk, int unit) {
      for (int i = 0; i == 0 || i < chunk.length; i += unit) known_positions_.push_back(chunk.begin + i);
    };
    for (const SequenceChunk& chunk : keys_.chunks) know(chunk, cut_unit(chunk.length));
    for (const SequenceChunk& chunk :
         sequence_chunks(task.layout, task.whole.seqlen_q, task.own(), task.size())) {
      know(chunk, cut_unit(chunk.length));
      known_positions_.push_back(chunk.begin + chunk.length / 2);
    }
  }

  std::size_t workspace_bytes(bool backward) const override {
    Room room(task_.engine.device());
    if (backward) {
      Buffers(task_, room);
      room.take_workspace(launch_bytes(part_gradients_));
    } else {
      Partials(task_, room);
      room.take_workspace(std::max(launch_bytes(part_), launch_bytes(whole_rows_)));
    }
    return room.used();
  }

  void prepare(bool backward) override {
    workspace_bytes(backward);  // loads the kernels that attend
    if (!arrivals_) {
      Room count(task_.engine.device());
      take_arrivals(count);
      arrivals_ = open_exchange(task_, count.used());
      Room room(task_.engine.device(), arrivals_->memory());
      take_arrivals(room);
      arrivals_->write(static_cast<std::byte*>(positions_.data), known_positions_.data(),
                       known_positions_.size() * sizeof(std::int64_t));
    }
    if (!backward) {
      merge_kernel();
      return;
    }
    sums_ = std::make_unique<PartSums>(task_.engine, task_.gradients, task_.whole);
    if (gradient_arrivals_) return;
    Room count(task_.engine.device());
    Arrived(task_, count);
    gradient_arrivals_ = open_exchange(task_, count.used());
  }

  void finish() override {
    if (arrivals_) arrivals_->finish();
    if (gradient_arrivals_) gradient_arrivals_->finish();
  }

  ParallelAttention::Steps forward(const AttentionArgs& args, Stream stream) override {
    Room room(args.workspace, workspace_bytes(false), task_.engine.device());
    const Partials partials(task_, room);
    const std::optional<Tensor> workspace =
        room.take_workspace(std::max(launch_bytes(part_), launch_bytes(whole_rows_)));
    const ForwardSchedule schedule =
        forward_schedule(task_.spec, args, task_.whole, task_.layout, task_.own(), task_.size());
    send_keys(args, schedule, stream);
    Arrivals arrivals(*this, schedule, stream);
    auto merge = schedule.merges.begin();
    for (std::size_t i = 0; i < schedule.launches.size(); ++i) {
      const ForwardLaunch& launch = schedule.launches[i];
      if (!launch.own) arrivals.wait_for(launch.keys);
      const bool whole = launch.place == ForwardLaunch::whole_result;
      AttentionArgs of_launch =
          args_of(args, launch.rows, launch.keys, launch.own, launch.row_position, launch.key_position);
      of_launch.workspace = workspace;
      of_launch.o = whole ? part_of(*args.o, rows_dim, launch.rows.begin, launch.rows.length)
                          : part_of(partials.o, rows_dim, launch.place, launch.rows.length);
      of_launch.lse = whole ? part_of(*args.lse, lse_dim, launch.rows.begin, launch.rows.length)
                            : part_of(partials.lse, lse_dim, launch.place, launch.rows.length);
      kernel_of(whole ? whole_rows_ : part_, launch.own).launch(of_launch, stream);
      for (; merge != schedule.merges.end() && merge->after == i + 1; ++merge)
        merge_kernel().launch(
            {.o = part_of(*args.o, rows_dim, merge->rows.begin, merge->rows.length),
             .lse = part_of(*args.lse, lse_dim, merge->rows.begin, merge->rows.length),
             .parts_o = parts_of(part_of(partials.o, rows_dim, merge->place, merge->rows.length),
                                 merge->parts, merge->step * partials.o.strides[rows_dim]),
             .parts_lse = parts_of(part_of(partials.lse, lse_dim, merge->place, merge->rows.length),
                                   merge->parts, merge->step * partials.lse.strides[lse_dim])},
            stream);
    }
    free_keys(schedule, stream);
    return {static_cast<int>(schedule.launches.size()), schedule.unseen};
  }

  ParallelAttention::Steps backward(const AttentionArgs& args, Stream stream) override {
    Room room(args.workspace, workspace_bytes(true), task_.engine.device());
    const Buffers buffers(task_, room);
    const std::optional<Tensor> workspace = room.take_workspace(launch_bytes(part_gradients_));
    Room arrived_room(task_.engine.device(), gradient_arrivals_->memory());
    const Arrived arrived(task_, arrived_room);
    const BackwardSchedule schedule =
        backward_schedule(task_.spec, args, task_.whole, task_.layout, task_.own(), task_.size());
    GradientSums of_rows(*sums_, buffers.of_rows, static_cast<int>(schedule.pieces.size()),
                         schedule.pieces[0].rows.length),
        of_keys(*sums_, buffers.of_keys, num_chunks(), key_length());
    send_keys(args, schedule, stream);
    Arrivals arrivals(*this, schedule, stream);
    bool waited = false, sent_back = false;
    for (const ScheduledLaunch& launch : schedule.launches) {
      const SequenceChunk keys = keys_of(launch);
      if (!launch.own) arrivals.wait_for(keys), waited = true;
      if (launch.own && waited && !std::exchange(sent_back, true))
        send_gradients(schedule, of_keys, arrived, stream);
      const SequenceChunk rows = rows_of(schedule, launch);
      AttentionArgs of_launch = args_of(args, rows, keys, launch.own,
                                        schedule.pieces[static_cast<std::size_t>(launch.piece)].rows.begin,
                                        chunk(launch.keys.first).begin);
      of_launch.workspace = workspace;
      for (const TensorMember member : {&AttentionArgs::o, &AttentionArgs::d_o})
        of_launch.*member = part_of(*(args.*member), rows_dim, rows.begin, rows.length);
      for (const TensorMember member : {&AttentionArgs::lse, &AttentionArgs::dlse})
        if (args.*member) of_launch.*member = part_of(*(args.*member), lse_dim, rows.begin, rows.length);
      of_launch.dq = of_rows.target(launch.piece, launch.pieces, stream)[0];
      const std::vector<Tensor> to =
          of_keys.target(launch.keys.first, launch.keys.end - launch.keys.first, stream);
      of_launch.dk = to[0], of_launch.dv = to[1];
      kernel_of(part_gradients_, launch.own).launch(of_launch, stream);
    }
    if (waited && !sent_back) send_gradients(schedule, of_keys, arrived, stream);
    for (std::size_t piece = 0; piece < schedule.pieces.size(); ++piece)
      sums_->add(
          part_of(*args.dq, rows_dim, schedule.pieces[piece].first, schedule.pieces[piece].rows.length),
          of_rows.parts(static_cast<int>(piece), 0), stream);
    take_gradients(args, schedule, of_keys, arrived, stream);
    free_keys(schedule, stream);
    return {static_cast<int>(schedule.launches.size()), schedule.unseen};
  }

 private:
  // ---- places ----

  int num_chunks() const { return static_cast<int>(keys_.chunks.size()); }
  int key_length() const { return keys_.chunks[0].length; }
  const SequenceChunk& chunk(int c) const { return keys_.chunks[static_cast<std::size_t>(c)]; }
  int owner(int c) const { return keys_.owner_of[static_cast<std::size_t>(c)]; }
  // Keys of a run, in a tensor of this rank's.
  Tensor in_own(const Tensor& t, const ChunkRun& run) const {
    return part_of(t, rows_dim,
                   std::int64_t{keys_.place_of[static_cast<std::size_t>(run.first)]} * key_length(),
                   std::int64_t{run.end - run.first} * key_length());
  }
  // Rows of a launch, in this rank's tensors.
  static SequenceChunk rows_of(const BackwardSchedule& schedule, const ScheduledLaunch& launch) {
    const RowPiece &first = schedule.pieces[static_cast<std::size_t>(launch.piece)],
                   &last = schedule.pieces[static_cast<std::size_t>(launch.piece + launch.pieces - 1)];
    return {first.first, last.first + last.rows.length - first.first};
  }
  // Its keys, where the launch reads them.
  SequenceChunk keys_of(const ScheduledLaunch& launch) const {
    const int first =
        launch.own ? keys_.place_of[static_cast<std::size_t>(launch.keys.first)] : launch.keys.first;
    return {first * key_length(), (launch.keys.end - launch.keys.first) * key_length()};
  }
  SequenceChunk in_own(int c, const SequenceChunk& keys) const {
    const int place = keys_.place_of[static_cast<std::size_t>(c)] * key_length();
    return {place + keys.begin - chunk(c).begin, keys.length};
  }
  static Tensor keys_at(const Tensor& t, const SequenceChunk& keys) {
    return part_of(t, rows_dim, keys.begin, keys.length);
  }

  // Keys and values of the whole, and the positions that launches begin at, which kernels read from memory.
  void take_arrivals(Room& room) {
    const int length = task_.size() > 1 ? task_.whole.seqlen_k : 0;
    const auto take = [&](int dim) {
      return room.take(task_.spec.dtype, {task_.batch(), length, task_.whole.num_heads_kv, dim});
    };
    all_k_ = take(task_.spec.head_dim);
    all_v_ = take(task_.spec.head_dim_v);
    positions_ = room.take(DType::int64, {static_cast<std::int64_t>(known_positions_.size())});
  }
  Tensor position(std::int64_t begin) const {
    const auto found = std::find(known_positions_.begin(), known_positions_.end(), begin);
    Tensor one = part_of(positions_, 0, found - known_positions_.begin(), 1);
    one.shape[0] = task_.batch();
    one.strides[0] = 0;
    return one;
  }

  // ---- launches ----

  // The sizes by which kernels are chosen: for keys of this rank, and for those of others.
  Shape near_shape() const {
    Shape shape = far_shape();
    shape.seqlen_k = task_.own_keys();
    return shape;
  }
  Shape far_shape() const {
    Shape shape = task_.whole;
    shape.seqlen_q = task_.own_rows();
    return shape;
  }
  std::size_t launch_bytes(const AttentionSpec& of) const {
    return std::max(task_.engine.get(of, near_shape()).workspace_bytes(near_shape()),
                    task_.engine.get(of, far_shape()).workspace_bytes(far_shape()));
  }
  const Kernel& kernel_of(const AttentionSpec& of, bool own) const {
    return task_.engine.get(of, own ? near_shape() : far_shape());
  }
  const Kernel& merge_kernel() const {
    AttentionSpec spec;
    spec.op = Operation::merge;
    spec.dtype = task_.spec.o_dtype.value_or(task_.spec.dtype);
    spec.head_dim = spec.head_dim_v = task_.spec.head_dim_v;
    return task_.engine.get(spec, near_shape());
  }

  // What masks, scores and dropout read, with Q, K and V, at the places of a launch.
  AttentionArgs args_of(const AttentionArgs& args, const SequenceChunk& rows, const SequenceChunk& keys,
                        bool own, int row_position, int key_position) const {
    AttentionArgs of_launch = args;
    of_launch.row_offset = position(row_position);
    of_launch.key_offset = position(key_position);
    of_launch.q = part_of(*args.q, rows_dim, rows.begin, rows.length);
    of_launch.k = keys_at(own ? *args.k : all_k_, keys);
    of_launch.v = keys_at(own ? *args.v : all_v_, keys);
    return of_launch;
  }

  // Partial results of rows.
  struct Partials {
    Tensor o, lse;
    Partials(const RankTask& task, Room& room) {
      const std::int64_t places = places_of_parts(task.spec, task.whole, task.layout, task.size());
      o = room.take(DType::fp32, {task.batch(), places, task.whole.num_heads_q, task.spec.head_dim_v});
      lse = room.take(DType::fp32, {task.batch(), task.whole.num_heads_q, places});
    }
  };
  // A tensor of parts that lie so many elements from each other.
  static Tensor parts_of(Tensor part, int count, std::int64_t stride) {
    for (int i = part.rank++; i > 0; --i) {
      const auto at = static_cast<std::size_t>(i);
      part.shape[at] = part.shape[at - 1];
      part.strides[at] = part.strides[at - 1];
    }
    part.shape[0] = count;
    part.strides[0] = stride;
    return part;
  }
  // Float32 gradients: of this rank's rows and of all keys, twice each (GradientSums).
  struct Buffers {
    std::vector<std::vector<Tensor>> of_rows, of_keys;
    Buffers(const RankTask& task, Room& room) {
      const Shape& z = task.whole;
      const auto take = [&](int length, int heads, int dim) {
        return room.take(DType::fp32, {task.batch(), length, heads, dim});
      };
      for (int i = 0; i < 2; ++i) {
        of_rows.push_back({take(task.own_rows(), z.num_heads_q, task.spec.head_dim)});
        of_keys.push_back({take(z.seqlen_k, z.num_heads_kv, task.spec.head_dim),
                           take(z.seqlen_k, z.num_heads_kv, task.spec.head_dim_v)});
      }
    }
  };
  // What other ranks have for the gradients of a rank's keys: dk and dv, of each other rank in turn.
  struct Arrived {
    std::vector<std::array<Tensor, 2>> places;
    Arrived(const RankTask& task, Room& room) {
      const auto take = [&](int dim) {
        return room.take(DType::fp32, {task.batch(), task.own_keys(), task.whole.num_heads_kv, dim});
      };
      for (int i = 1; i < task.size(); ++i) {
        const Tensor dk = take(task.spec.head_dim);
        places.push_back({dk, take(task.spec.head_dim_v)});
      }
    }
    // Where a rank writes in the memory of another.
    const Tensor& place(int writer, int owner, std::size_t tensor) const {
      return places[static_cast<std::size_t>(writer < owner ? writer : writer - 1)][tensor];
    }
  };

  // ---- what ranks send ----

  static bool receives(const Exchanged& schedule, int chunk, int rank) {
    return std::any_of(schedule.sent.begin(), schedule.sent.end(),
                       [&](const SentKeys& sent) { return sent.chunk == chunk && sent.to == rank; });
  }
  // Sends this rank's keys to all that see them. The rank before this one needs them first. A copy within a
  // GPU may have to wait for launches, so it comes last.
  void send_keys(const AttentionArgs& args, const Exchanged& schedule, Stream stream) const {
    arrivals_->begin(stream);
    for (int step = 1; step <= task_.size(); ++step) {
      const int to = task_.after(task_.size() - step);
      bool any = false;
      for (const SentKeys& sent : schedule.sent) {
        if (owner(sent.chunk) != task_.own() || sent.to != to) continue;
        if (!any && to != task_.own()) arrivals_->await(to, freed);
        any = true;
        const SequenceChunk from = in_own(sent.chunk, sent.keys);
        arrivals_->put(to, keys_at(all_k_, sent.keys), keys_at(*args.k, from));
        arrivals_->put(to, keys_at(all_v_, sent.keys), keys_at(*args.v, from));
      }
      if (any) arrivals_->post(to, Box::sent);
    }
  }
  // The other ranks whose keys this rank reads.
  std::vector<int> senders(const Exchanged& schedule) const {
    std::vector<int> ranks;
    for (const SentKeys& sent : schedule.sent)
      if (const int from = owner(sent.chunk); sent.to == task_.own() && from != task_.own() &&
                                              std::find(ranks.begin(), ranks.end(), from) == ranks.end())
        ranks.push_back(from);
    return ranks;
  }
  // Waits for keys of others once, before the first launch that reads them.
  class Arrivals {
   public:
    Arrivals(const BySequence& of, const Exchanged& schedule, Stream stream)
        : of_(of), schedule_(schedule), stream_(stream), waited_(static_cast<std::size_t>(of.task_.size())) {}
    void wait_for(const SequenceChunk& keys) {
      for (const SentKeys& sent : schedule_.sent) {
        const int from = of_.owner(sent.chunk);
        if (sent.to != of_.task_.own() || sent.keys.begin >= keys.begin + keys.length ||
            keys.begin >= sent.keys.begin + sent.keys.length)
          continue;
        if (!std::exchange(waited_[static_cast<std::size_t>(from)], char{1}))
          of_.arrivals_->wait(from, Box::sent, stream_);
      }
    }

   private:
    const BySequence& of_;
    const Exchanged& schedule_;
    const Stream stream_;
    std::vector<char> waited_;  // by rank
  };
  void free_keys(const Exchanged& schedule, Stream stream) const {
    arrivals_->begin(stream);
    for (const int from : senders(schedule)) arrivals_->post(from, freed);
    arrivals_->end(stream);
  }

  // Sends what this rank has for the keys of others.
  void send_gradients(const BackwardSchedule& schedule, GradientSums& of_keys, const Arrived& arrived,
                      Stream stream) const {
    for (int c = 0; c < num_chunks(); ++c)
      if (owner(c) != task_.own()) of_keys.settle(c, stream);
    gradient_arrivals_->begin(stream);
    for (int step = 1; step < task_.size(); ++step) {
      const int to = task_.after(step);
      bool any = false;
      for (int c = 0; c < num_chunks(); ++c) {
        if (owner(c) != to || !receives(schedule, c, task_.own())) continue;
        if (!any) gradient_arrivals_->await(to, freed);
        any = true;
        for (const std::size_t i : {0, 1})
          gradient_arrivals_->put(to, in_own(arrived.place(task_.own(), to, i), {c, c + 1}),
                                  of_keys.parts(c, i).at(0));
      }
      if (any) gradient_arrivals_->post(to, sent);
    }
  }
  // Adds what all ranks have for this rank's keys, in the order of ranks.
  void take_gradients(const AttentionArgs& args, const BackwardSchedule& schedule, GradientSums& of_keys,
                      const Arrived& arrived, Stream stream) const {
    std::vector<int> writers;
    for (int step = 1; step < task_.size(); ++step) {
      const int from = task_.after(task_.size() - step);
      bool any = false;
      for (int c = 0; c < num_chunks(); ++c)
        any = any || (owner(c) == task_.own() && receives(schedule, c, from));
      if (!any) continue;
      gradient_arrivals_->wait(from, sent, stream);
      writers.push_back(from);
    }
    for (int c = 0; c < num_chunks(); ++c) {
      if (owner(c) != task_.own()) continue;
      const ChunkRun run{c, c + 1};
      for (const std::size_t i : {0, 1}) {
        std::vector<Tensor> parts = of_keys.parts(c, i);
        for (const SentKeys& sent : schedule.sent) {
          if (sent.chunk != c || sent.to == task_.own()) continue;
          if (parts.size() == 2) {
            sums_->add(parts[0], parts, stream);
            parts.pop_back();
          }
          parts.push_back(in_own(arrived.place(sent.to, task_.own(), i), run));
        }
        sums_->add(in_own(i == 0 ? *args.dk : *args.dv, run), parts, stream);
      }
    }
    gradient_arrivals_->begin(stream);
    for (const int from : writers) gradient_arrivals_->post(from, freed);
    gradient_arrivals_->end(stream);
  }

  const RankTask task_;
  const KeyChunks keys_;
  AttentionSpec part_, whole_rows_, part_gradients_;  // a partial result, the only one, gradients
  std::vector<std::int64_t> known_positions_;         // what positions_ holds
  std::shared_ptr<Exchange> arrivals_, gradient_arrivals_;
  Tensor all_k_, all_v_, positions_;  // in arrivals_
  std::unique_ptr<PartSums> sums_;
};

}  // namespace

std::unique_ptr<RankAttention> attention_by_sequence(const RankTask& task) {
  return std::make_unique<BySequence>(task);
}

}  // namespace flashjit
