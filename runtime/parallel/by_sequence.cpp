// Attention of a rank's rows over the keys of all ranks (context parallelism). Other ranks' keys and values
// arrive while the first launch computes what needs this rank's alone; gradients of their keys leave while
// the last ones run.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "runtime/parallel/gathered_forward.hpp"
#include "runtime/parallel/gradient_sums.hpp"
#include "runtime/parallel/rank_attention.hpp"
#include "runtime/parallel/room.hpp"
#include "runtime/parallel/schedule.hpp"
#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {
namespace {

// The dimension of the sequence, and that of heads.
constexpr int rows_dim = 1, lse_dim = 2, heads_dim = 2, lse_heads_dim = 1;

// Query heads that are computed together, and the key/value heads that they see.
struct Heads {
  int q, num_q, kv, num_kv;
};
Tensor of_queries(const Tensor& t, const Heads& heads) {
  return part_of(t, heads_dim, heads.q, heads.num_q);
}
Tensor of_keys(const Tensor& t, const Heads& heads) {
  return part_of(t, heads_dim, heads.kv, heads.num_kv);
}
// A caller's tensors.
AttentionArgs of_heads(AttentionArgs args, const Heads& heads) {
  for (const TensorMember member :
       {&AttentionArgs::q, &AttentionArgs::o, &AttentionArgs::d_o, &AttentionArgs::dq})
    if (args.*member) args.*member = of_queries(*(args.*member), heads);
  for (const TensorMember member : {&AttentionArgs::lse, &AttentionArgs::dlse})
    if (args.*member) args.*member = part_of(*(args.*member), lse_heads_dim, heads.q, heads.num_q);
  for (const TensorMember member :
       {&AttentionArgs::k, &AttentionArgs::v, &AttentionArgs::dk, &AttentionArgs::dv})
    if (args.*member) args.*member = of_keys(*(args.*member), heads);
  return args;
}

class BySequence : public RankAttention {
 public:
  explicit BySequence(const RankTask& task)
      : task_(task),
        keys_(key_chunks(task.layout, task.whole.seqlen_k, task.size())),
        gathered_(GatheredForward::make(task)) {
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
      (void)Buffers(*this, room);
      room.take_workspace(launch_bytes(true, groups(true)));
    } else if (gathered_) {
      room.take_workspace(gathered_->workspace_bytes());
    } else {
      (void)Partials(*this, room, groups(false));
      room.take_workspace(launch_bytes(false, groups(false)));
    }
    return room.used();
  }

  void prepare(bool backward) override {
    workspace_bytes(backward);  // loads the kernels that attend
    if (!arrivals_) {
      Room count(task_.engine.device());
      take_arrivals(count);
      arrivals_ = open_exchange(*task_.transport, task_.engine.device(), count.used(),
                                count.used() / static_cast<std::size_t>(task_.size()));
      Room room(task_.engine.device(), arrivals_->memory());
      take_arrivals(room);
      arrivals_->write(static_cast<std::byte*>(positions_.data), known_positions_.data(),
                       known_positions_.size() * sizeof(std::int64_t));
    }
    if (!backward) {
      if (!gathered_) merge_kernel();
      return;
    }
    sums_ = std::make_unique<PartSums>(task_.engine, task_.gradients, task_.whole);
    if (gradient_arrivals_) return;
    Room count(task_.engine.device());
    (void)Arrived(task_, count);
    gradient_arrivals_ =
        open_exchange(*task_.transport, task_.engine.device(), count.used(),
                      count.used() / static_cast<std::size_t>(std::max(task_.size() - 1, 1)));
  }

  void finish() override {
    if (arrivals_) arrivals_->finish();
    if (gradient_arrivals_) gradient_arrivals_->finish();
  }

  ParallelAttention::Steps forward(const AttentionArgs& args, Stream stream) override {
    if (gathered_) {
      Room room(args.workspace, workspace_bytes(false), task_.engine.device());
      // A rank gets at most half of the keys. So calls take the halves of the room by turns, and copies of
      // one do not wait until the other rank has ended the one before.
      const std::int64_t half = task_.whole.seqlen_k / 2;
      const bool second = std::exchange(second_, !second_);
      const auto place = [&](const Tensor& all) { return part_of(all, rows_dim, second ? half : 0, half); };
      gathered_->forward(args, room.take_workspace(gathered_->workspace_bytes()), *arrivals_, place(all_k_),
                         place(all_v_), second, stream);
      return {1, task_.own()};
    }
    const int count = groups(false);
    Room room(args.workspace, workspace_bytes(false), task_.engine.device());
    const Partials partials(*this, room, count);
    const std::optional<Tensor> workspace = room.take_workspace(launch_bytes(false, count));
    const ForwardSchedule schedule =
        forward_schedule(task_.spec, args, task_.whole, task_.layout, task_.own(), task_.size());
    send_keys(args, schedule, stream);
    Arrivals arrivals(*this, schedule, stream);
    for (int group = 0; group < count; ++group) {
      const Heads heads = heads_of(group, count);
      const AttentionArgs own = of_heads(args, heads);
      auto merge = schedule.merges.begin();
      for (std::size_t i = 0; i < schedule.launches.size(); ++i) {
        const ForwardLaunch& launch = schedule.launches[i];
        if (!launch.own) arrivals.wait_for(launch.keys);
        const bool whole = launch.place == ForwardLaunch::whole_result;
        AttentionArgs of_launch = args_of(own, heads, launch.rows, launch.keys, launch.own,
                                          launch.row_position, launch.key_position);
        of_launch.workspace = workspace;
        of_launch.o = whole ? part_of(*own.o, rows_dim, launch.rows.begin, launch.rows.length)
                            : part_of(partials.o, rows_dim, launch.place, launch.rows.length);
        of_launch.lse = whole ? part_of(*own.lse, lse_dim, launch.rows.begin, launch.rows.length)
                              : part_of(partials.lse, lse_dim, launch.place, launch.rows.length);
        kernel_of(whole ? whole_rows_ : part_, launch.own, count).launch(of_launch, stream);
        // Others send the next call's keys while this rank merges.
        if (group + 1 == count && i + 1 == schedule.launches.size()) free_keys(schedule, stream);
        for (; merge != schedule.merges.end() && merge->after == i + 1; ++merge)
          merge_parts(own, partials, *merge, stream);
      }
    }
    arrivals_->end(stream);
    return {static_cast<int>(schedule.launches.size()) * count, schedule.unseen};
  }

  ParallelAttention::Steps backward(const AttentionArgs& args, Stream stream) override {
    const int count = groups(true);
    Room room(args.workspace, workspace_bytes(true), task_.engine.device());
    const Buffers buffers(*this, room);
    const std::optional<Tensor> workspace = room.take_workspace(launch_bytes(true, count));
    Room arrived_room(task_.engine.device(), gradient_arrivals_->memory());
    const Arrived arrived(task_, arrived_room);
    const auto schedule_of = [&](int group) {
      const OwnKeys one_of_many = group + 1 == count ? OwnKeys::last : OwnKeys::first;
      return backward_schedule(task_.spec, args, task_.whole, task_.layout, task_.own(), task_.size(),
                               count > 1 ? one_of_many : OwnKeys::around);
    };
    const BackwardSchedule any_group = schedule_of(0);  // in what they have in common
    KeySums key_sums;
    send_keys(args, any_group, stream);
    Arrivals arrivals(*this, any_group, stream);
    bool of_others = false, passed = false;  // whether this group has computed with keys of others
    int launched = 0;
    for (int group = 0; group < count; ++group) {
      const Heads heads = heads_of(group, count);
      const BackwardSchedule schedule = schedule_of(group);
      const AttentionArgs own = of_heads(args, heads);
      of_others = false;
      if (key_sums.empty() || key_sums.back().first.kv != heads.kv)
        key_sums.emplace_back(
            heads, GradientSums(*sums_, sums_of(buffers.of_keys, heads),
                                sums_of(buffers.of_keys_later, heads), num_chunks(), key_length()));
      GradientSums& of_group = key_sums.back().second;
      GradientSums of_rows(*sums_, {buffers.of_rows[0]}, {buffers.of_rows[1]},
                           static_cast<int>(schedule.pieces.size()), schedule.pieces[0].rows.length);
      for (const ScheduledLaunch& scheduled : schedule.launches) {
        if (scheduled.own && of_others && group + 1 == count && !std::exchange(passed, true))
          pass_gradients(schedule, key_sums, arrived, stream);
        const SequenceChunk rows = rows_of(schedule, scheduled);
        ScheduledLaunch launch = scheduled;
        for (; launch.keys.first < scheduled.keys.end; launch.keys.first = launch.keys.end, ++launched) {
          const int unit = launch.own ? num_others() + launch.keys.first : unit_of(launch.keys.first),
                    units = of_group.most(unit, scheduled.keys.end - launch.keys.first);
          launch.keys.end = launch.keys.first + units;
          const SequenceChunk keys{launch.keys.first * key_length(), units * key_length()};
          if (!launch.own) arrivals.wait_for(keys), of_others = true;
          AttentionArgs of_launch =
              args_of(own, heads, rows, keys, launch.own, launch.row_position,
                      launch.key_position + (launch.keys.first - scheduled.keys.first) * key_length());
          of_launch.workspace = workspace;
          for (const TensorMember member : {&AttentionArgs::o, &AttentionArgs::d_o})
            of_launch.*member = part_of(*(own.*member), rows_dim, rows.begin, rows.length);
          for (const TensorMember member : {&AttentionArgs::lse, &AttentionArgs::dlse})
            if (own.*member) of_launch.*member = part_of(*(own.*member), lse_dim, rows.begin, rows.length);
          of_launch.dq = of_rows.target(launch.piece, launch.pieces, stream)[0];
          const std::vector<Tensor> to = of_group.target(unit, units, stream);
          of_launch.dk = to[0], of_launch.dv = to[1];
          kernel_of(part_gradients_, launch.own, count).launch(of_launch, stream);
        }
      }
      if (group + 1 < count) of_group.settle_all(stream);
      for (std::size_t piece = 0; piece < schedule.pieces.size(); ++piece)
        sums_->add(
            part_of(*own.dq, rows_dim, schedule.pieces[piece].first, schedule.pieces[piece].rows.length),
            of_rows.parts(static_cast<int>(piece), 0), stream);
    }
    if (!passed) pass_gradients(any_group, key_sums, arrived, stream);
    take_gradients(args, any_group, key_sums, arrived, stream);
    free_keys(any_group, stream);
    arrivals_->end(stream);
    return {launched, any_group.unseen};
  }

 private:
  // ---- places ----

  int num_chunks() const { return static_cast<int>(keys_.chunks.size()); }
  int key_length() const { return keys_.chunks[0].length; }
  const SequenceChunk& chunk(int c) const { return keys_.chunks[static_cast<std::size_t>(c)]; }
  int owner(int c) const { return keys_.owner_of[static_cast<std::size_t>(c)]; }
  int num_others() const { return num_chunks() - num_chunks() / task_.size(); }
  // The place of a chunk among sums of gradients: after those of others come this rank's, side by side.
  int unit_of(int c) const {
    if (owner(c) == task_.own()) return num_others() + keys_.place_of[static_cast<std::size_t>(c)];
    const auto first = keys_.owner_of.begin();
    return c - static_cast<int>(std::count(first, first + c, task_.own()));
  }
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

  // How many groups of heads are computed one after the other.
  int groups(bool backward) const {
    int& known = groups_[backward];
    if (known > 0) return known;
    const int most = why_heads_differ(task_.spec).empty() ? std::max(task_.whole.num_heads_q, 1) : 1;
    // In a backward of two groups, rows and keys have one launch of this rank's keys alone.
    const bool halves = backward && most > 1 && task_.whole.num_heads_kv % 2 == 0 &&
                        by_order(task_.spec, task_.layout, task_.size());
    known = halves ? 2 : 1;
    while (known < most && rows_bytes(backward, known) > task_.most_bytes) do
        ++known;
      while (!divides_heads(known));
    return known;
  }
  bool divides_heads(int count) const {
    const int q = task_.whole.num_heads_q, kv = task_.whole.num_heads_kv;
    return kv % count == 0 || (count % kv == 0 && q % count == 0);
  }
  std::size_t rows_bytes(bool backward, int count) const {
    Room room(task_.engine.device());
    if (backward)
      take_rows(room, count), take_rows(room, count);
    else
      Partials(*this, room, count);
    room.take_workspace(launch_bytes(backward, count));
    return room.used();
  }
  Heads heads_of(int group, int count) const {
    const int q = task_.whole.num_heads_q / count, kv = task_.whole.num_heads_kv;
    if (kv % count == 0) return {group * q, q, group * (kv / count), kv / count};
    return {group * q, q, group / (count / kv), 1};
  }

  // The sizes by which kernels are chosen: for keys of this rank, and for those of others.
  Shape near_shape(int count) const {
    Shape shape = far_shape(count);
    shape.seqlen_k = task_.own_keys();
    return shape;
  }
  Shape far_shape(int count) const {
    Shape shape = task_.whole;
    shape.seqlen_q = task_.own_rows();
    const Heads heads = heads_of(0, count);
    shape.num_heads_q = heads.num_q, shape.num_heads_kv = heads.num_kv;
    return shape;
  }
  // The workspace that a launch of so many groups needs.
  std::size_t launch_bytes(bool backward, int count) const {
    std::size_t bytes = 0;
    for (const AttentionSpec* of : {backward ? &part_gradients_ : &part_, backward ? nullptr : &whole_rows_})
      for (const Shape& shape : {near_shape(count), far_shape(count)})
        if (of) bytes = std::max(bytes, task_.engine.get(*of, shape).workspace_bytes(shape));
    return bytes;
  }
  const Kernel& kernel_of(const AttentionSpec& of, bool own, int count) const {
    return task_.engine.get(of, own ? near_shape(count) : far_shape(count));
  }
  const Kernel& merge_kernel() const {
    AttentionSpec spec;
    spec.op = Operation::merge;
    spec.dtype = task_.spec.o_dtype.value_or(task_.spec.dtype);
    spec.head_dim = spec.head_dim_v = task_.spec.head_dim_v;
    return task_.engine.get(spec, near_shape(1));
  }

  // The arguments of a launch: Q, K and V, and what masks, scores and dropout read, at the launch's places.
  AttentionArgs args_of(const AttentionArgs& own_args, const Heads& heads, const SequenceChunk& rows,
                        const SequenceChunk& keys, bool own, int row_position, int key_position) const {
    AttentionArgs of_launch = own_args;
    of_launch.spare_multiprocessors = task_.multiprocessors_of_copies();
    of_launch.row_offset = position(row_position);
    of_launch.key_offset = position(key_position);
    of_launch.q = part_of(*own_args.q, rows_dim, rows.begin, rows.length);
    of_launch.k = keys_at(own ? *own_args.k : of_keys(all_k_, heads), keys);
    of_launch.v = keys_at(own ? *own_args.v : of_keys(all_v_, heads), keys);
    return of_launch;
  }

  // Partial results of rows.
  struct Partials {
    Tensor o, lse;
    Partials(const BySequence& of, Room& room, int count) {
      const RankTask& task = of.task_;
      const std::int64_t places = places_of_parts(task.spec, task.whole, task.layout, task.size());
      const int heads = of.heads_of(0, count).num_q;
      o = room.take(DType::fp32, {task.batch(), places, heads, task.spec.head_dim_v});
      lse = room.take(DType::fp32, {task.batch(), heads, places});
    }
  };
  void merge_parts(const AttentionArgs& own, const Partials& partials, const RowMerge& merge,
                   Stream stream) const {
    merge_kernel().launch(
        {.o = part_of(*own.o, rows_dim, merge.rows.begin, merge.rows.length),
         .lse = part_of(*own.lse, lse_dim, merge.rows.begin, merge.rows.length),
         .parts_o = parts_of(part_of(partials.o, rows_dim, merge.place, merge.rows.length), merge.parts,
                             merge.step * partials.o.strides[rows_dim]),
         .parts_lse = parts_of(part_of(partials.lse, lse_dim, merge.place, merge.rows.length), merge.parts,
                               merge.step * partials.lse.strides[lse_dim])},
        stream);
  }
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

  // Float32 gradients (GradientSums): of this rank's rows, twice, and of all keys. Where heads are computed
  // some at a time, memory is short, and one chunk of keys is written a second time at once.
  Tensor take_rows(Room& room, int count) const {
    return room.take(DType::fp32,
                     {task_.batch(), task_.own_rows(), heads_of(0, count).num_q, task_.spec.head_dim});
  }
  struct Buffers {
    std::array<Tensor, 2> of_rows;
    std::vector<Tensor> of_keys, of_keys_later;
    Buffers(const BySequence& of, Room& room) {
      const RankTask& task = of.task_;
      const int count = of.groups(true);
      for (Tensor& t : of_rows) t = of.take_rows(room, count);
      const auto take = [&](std::int64_t keys) {
        std::vector<Tensor> made;
        for (const int dim : {task.spec.head_dim, task.spec.head_dim_v})
          made.push_back(room.take(DType::fp32, {task.batch(), keys, task.whole.num_heads_kv, dim}));
        return made;
      };
      of_keys = take(task.whole.seqlen_k);
      of_keys_later = take((count > 1 ? 1 : of.num_chunks()) * std::int64_t{of.key_length()});
    }
  };
  // By the key/value heads that groups see.
  using KeySums = std::vector<std::pair<Heads, GradientSums>>;
  static std::vector<Tensor> sums_of(std::vector<Tensor> tensors, const Heads& heads) {
    for (Tensor& t : tensors) t = of_keys(t, heads);
    return tensors;
  }
  // The parts of the gradients of a rank's keys that other ranks have: dk and dv, of each other rank in turn.
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
      CopyStep copies{task_.after(task_.size() - step), task_.after(step), Box::sent};
      for (const SentKeys& sent : schedule.sent) {
        const Tensor k = keys_at(all_k_, sent.keys), v = keys_at(all_v_, sent.keys);
        if (owner(sent.chunk) == task_.own() && sent.to == copies.to) {
          const SequenceChunk from = in_own(sent.chunk, sent.keys);
          copies.sends.push_back({k, keys_at(*args.k, from)});
          copies.sends.push_back({v, keys_at(*args.v, from)});
        }
        if (owner(sent.chunk) == copies.from && sent.to == task_.own()) {
          copies.receives.push_back(k);
          copies.receives.push_back(v);
        }
      }
      if (gathered_ && copies.to != task_.own() && !copies.sends.empty())
        arrivals_->hold(copies.to, Box::freed_second);
      arrivals_->pass(copies);
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
    for (const int from : senders(schedule)) {
      arrivals_->release(from, Box::freed, stream);
      if (gathered_) arrivals_->release(from, Box::freed_second, stream);
    }
  }

  // Sends what this rank has for the keys of others, and receives what they have for its own.
  void pass_gradients(const BackwardSchedule& schedule, KeySums& key_sums, const Arrived& arrived,
                      Stream stream) const {
    for (int c = 0; c < num_chunks(); ++c)
      for (auto& [heads, sums] : key_sums)
        if (owner(c) != task_.own()) sums.settle(unit_of(c), stream);
    gradient_arrivals_->begin(stream);
    for (int step = 1; step < task_.size(); ++step) {
      CopyStep copies{task_.after(step), task_.after(task_.size() - step), Box::sent};
      for (int c = 0; c < num_chunks(); ++c) {
        const bool sends = owner(c) == copies.to && receives(schedule, c, task_.own()),
                   gets = owner(c) == task_.own() && receives(schedule, c, copies.from);
        const auto place = [&](int writer, std::size_t i, const Heads& heads) {
          return of_keys(in_own(arrived.place(writer, owner(c), i), {c, c + 1}), heads);
        };
        for (const std::size_t i : {0, 1})
          for (const auto& [heads, sums] : key_sums) {
            if (sends)
              copies.sends.push_back({place(task_.own(), i, heads), sums.parts(unit_of(c), i).at(0)});
            if (gets) copies.receives.push_back(place(copies.from, i, heads));
          }
      }
      gradient_arrivals_->pass(copies);
    }
  }
  // Adds what all ranks have for this rank's keys, in the order of ranks.
  void take_gradients(const AttentionArgs& args, const BackwardSchedule& schedule, const KeySums& key_sums,
                      const Arrived& arrived, Stream stream) const {
    std::vector<int> writers;
    for (int step = 1; step < task_.size(); ++step) {
      const int from = task_.after(task_.size() - step);
      bool any = false;
      for (int c = 0; c < num_chunks(); ++c)
        any = any || (owner(c) == task_.own() && receives(schedule, c, from));
      if (!any) continue;
      gradient_arrivals_->wait(from, Box::sent, stream);
      writers.push_back(from);
    }
    for (int c = 0; c < num_chunks(); ++c) {
      if (owner(c) != task_.own()) continue;
      const ChunkRun run{c, c + 1};
      for (const std::size_t i : {0, 1})
        for (const auto& [heads, sums] : key_sums) {
          std::vector<Tensor> parts = sums.parts(unit_of(c), i);
          for (const SentKeys& sent : schedule.sent) {
            if (sent.chunk != c || sent.to == task_.own()) continue;
            if (parts.size() == 2) {
              sums_->add(parts[0], parts, stream);
              parts.pop_back();
            }
            parts.push_back(of_keys(in_own(arrived.place(sent.to, task_.own(), i), run), heads));
          }
          sums_->add(of_keys(in_own(i == 0 ? *args.dk : *args.dv, run), heads), parts, stream);
        }
    }
    for (const int from : writers) gradient_arrivals_->release(from, Box::freed, stream);
    gradient_arrivals_->end(stream);
  }

  const RankTask task_;
  const KeyChunks keys_;
  const std::unique_ptr<GatheredForward> gathered_;   // of all forwards, if it is there
  AttentionSpec part_, whole_rows_, part_gradients_;  // a partial result, the only one, gradients
  std::vector<std::int64_t> known_positions_;         // what positions_ holds
  bool second_ = false;                               // where the next forward's keys go
  mutable int groups_[2] = {};                        // of a forward and a backward; 0: not counted yet
  std::shared_ptr<Exchange> arrivals_, gradient_arrivals_;
  Tensor all_k_, all_v_, positions_;  // in arrivals_
  std::unique_ptr<PartSums> sums_;
};

}  // namespace

std::unique_ptr<RankAttention> attention_by_sequence(const RankTask& task) {
  return std::make_unique<BySequence>(task);
}

}  // namespace flashjit
