// Attention over groups is that of one engine over the whole. Ranks are threads, also of groups that are for
// processes.
#include "runtime/parallel.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cuda/memory.hpp"
#include "runtime/parallel/rank_attention.hpp"
#include "runtime/parallel/transport.hpp"
#include "tests/support/message_group.hpp"
#include "tests/support/workload.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit::testing_support {
namespace {

// A rank's tensor: its chunks of the whole's, one after the other.
class OwnTensor {
 public:
  OwnTensor(const Tensor& whole, int dim, const std::vector<SequenceChunk>& chunks) : dim_(dim) {
    std::vector<std::int64_t> sizes(whole.shape.begin(), whole.shape.begin() + whole.rank);
    sizes[static_cast<std::size_t>(dim)] = 0;
    for (const SequenceChunk& chunk : chunks) sizes[static_cast<std::size_t>(dim)] += chunk.length;
    std::size_t bytes = size_of(whole.dtype);
    for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
    memory_.assign(bytes + 64, std::byte{0xff});
    const auto address = (reinterpret_cast<std::uintptr_t>(memory_.data()) + 63) / 64 * 64;
    view_ = Tensor::contiguous(reinterpret_cast<void*>(address), whole.dtype, {}, sizes);
    for (const SequenceChunk& chunk : chunks)
      for (int i = 0; i < chunk.length; ++i) places_.push_back(chunk.begin + i);
  }
  const Tensor& view() const { return view_; }
  // Copies this rank's elements from the whole, or to it.
  void take(const Tensor& whole) { copy(whole, false); }
  void give(const Tensor& whole) { copy(whole, true); }

 private:
  void copy(const Tensor& whole, bool to_whole) {
    const std::size_t size = size_of(whole.dtype);
    std::vector<std::int64_t> at(static_cast<std::size_t>(whole.rank));
    const std::function<void(int)> each = [&](int dim) {
      if (dim == whole.rank) {
        std::int64_t own = 0, other = 0;
        for (std::size_t i = 0; i < at.size(); ++i) {
          own += at[i] * view_.strides[i];
          other += (static_cast<int>(i) == dim_ ? places_[static_cast<std::size_t>(at[i])] : at[i]) *
                   whole.strides[i];
        }
        auto* const mine = static_cast<std::byte*>(view_.data) + own * static_cast<std::int64_t>(size);
        auto* const theirs = static_cast<std::byte*>(whole.data) + other * static_cast<std::int64_t>(size);
        std::memcpy(to_whole ? theirs : mine, to_whole ? mine : theirs, size);
        return;
      }
      const auto place = static_cast<std::size_t>(dim);
      for (at[place] = 0; at[place] < view_.shape[place]; ++at[place]) each(dim + 1);
    };
    each(0);
  }

  const int dim_;
  std::vector<std::byte> memory_;
  std::vector<std::int64_t> places_;
  Tensor view_;
};

constexpr TensorMember tensors[] = {
    &AttentionArgs::q,   &AttentionArgs::k,    &AttentionArgs::v,  &AttentionArgs::o,  &AttentionArgs::lse,
    &AttentionArgs::d_o, &AttentionArgs::dlse, &AttentionArgs::dq, &AttentionArgs::dk, &AttentionArgs::dv};

// The GPU of a rank, with copies of its tensors.
struct Gpu {
  explicit Gpu(int index) : context(index), stream(context), engine(options(index)) {}
  static EngineOptions options(int index) {
    EngineOptions made;
    made.device = "cuda:" + std::to_string(index);
    made.cache_dir = cache_folder();
    return made;
  }
  Tensor upload(const Tensor& host) {
    std::size_t bytes = size_of(host.dtype);
    for (int i = 0; i < host.rank; ++i)
      bytes *= static_cast<std::size_t>(host.shape[static_cast<std::size_t>(i)]);
    Copy& copy = copies.emplace_back(cuda::DeviceBuffer(context, bytes), host.data, bytes);
    copy.memory.copy_from(host.data, bytes, stream.get());
    Tensor there = host;
    there.data = copy.memory.data();
    there.device = {Device::Kind::cuda, context.index()};
    return there;
  }
  void download() {
    stream.synchronize();
    for (const Copy& copy : copies) copy.memory.copy_to(copy.host, copy.bytes, stream.get());
    stream.synchronize();
  }

  struct Copy {
    Copy(cuda::DeviceBuffer buffer, void* at, std::size_t size)
        : memory(std::move(buffer)), host(at), bytes(size) {}
    cuda::DeviceBuffer memory;
    void* host;
    std::size_t bytes;
  };
  cuda::Context context;
  cuda::OwnedStream stream;
  Engine engine;
  std::deque<Copy> copies;
};

void on_threads(int size, const std::function<void(int rank)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

// Ranks that have computed for so long wait for each other for ever, as they do when one of them does not say
// that something is there. The watch ends their group, so each of them fails.
class Watch {
 public:
  explicit Watch(int ranks) : preparing_(ranks), thread_([this] { watch(); }) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  // A rank has its kernels, and begins to compute.
  void begin(const ParallelGroup& group) {
    {
      const std::lock_guard lock(mutex_);
      group_ = group;
      --preparing_;
    }
    changed_.notify_all();
  }

 private:
  static constexpr std::chrono::seconds patience{120};
  void watch() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return over_ || preparing_ == 0; });
    if (!changed_.wait_for(lock, patience, [&] { return over_; })) group_->fail("the ranks wait for ever");
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int preparing_;
  bool over_ = false;
  std::optional<ParallelGroup> group_;
  std::thread thread_;
};

class Parallel : public ComputesOnEveryDevice {
 protected:
  struct Ways {
    bool on_gpus = false;
    bool short_of_memory = false;
    bool of_processes = false;  // ranks meet in shared memory
    bool by_messages = false;   // ranks do not reach each other's memory
    bool trains = false;        // forwards before and between backwards
  };
  // Computes what the workload asks for by so many ranks, and writes it where one engine would. Returns the
  // steps of rank 0.
  ParallelAttention::Steps run(Workload& workload, int size, SequenceLayout layout, const Ways& ways) {
    const Case& c = workload.given();
    const bool backward = c.spec.op == Operation::backward;
    const AttentionSpec forward = backward ? forward_of(c.spec) : c.spec;
    const std::vector<ParallelGroup> group =
        ways.by_messages ? message_group(size) : ParallelGroup::of_threads(size);
    const std::string name = ways.of_processes ? ParallelGroup::name_of_processes(size) : std::string();
    std::vector<std::string> errors(static_cast<std::size_t>(size));
    ParallelAttention::Steps steps;
    const AttentionArgs& whole = workload.args();
    Engine& of_cpu = on().engine();  // made here, before there are threads
    Watch watch(size);
    on_threads(size, [&](int rank) {
      try {
        std::optional<Gpu> gpu;
        if (ways.on_gpus) gpu.emplace(rank);
        Engine& engine = gpu ? gpu->engine : of_cpu;
        const ParallelGroup own = ways.of_processes ? ParallelGroup::of_processes(name, rank, size)
                                                    : group[static_cast<std::size_t>(rank)];
        const ParallelAttention attention(engine, forward, c.shape(), layout, own);
        std::unique_ptr<RankAttention> frugal;  // computes as few heads at a time as it can
        if (ways.short_of_memory) {
          frugal = attention_by_sequence({.engine = engine,
                                          .transport = own.transport(),
                                          .whole = c.shape(),
                                          .spec = forward,
                                          .gradients = forward.for_op(Operation::backward),
                                          .layout = attention.layout(),
                                          .most_bytes = 0});
          frugal->prepare(backward);
        }
        std::deque<OwnTensor> parts;
        AttentionArgs args = whole;
        std::vector<std::pair<OwnTensor*, TensorMember>> outputs;
        for (const TensorMember member : tensors) {
          if (!(whole.*member)) continue;
          const bool of_keys = member == &AttentionArgs::k || member == &AttentionArgs::v ||
                               member == &AttentionArgs::dk || member == &AttentionArgs::dv;
          const bool numbers = member == &AttentionArgs::lse || member == &AttentionArgs::dlse;
          parts.emplace_back(
              *(whole.*member), numbers ? 2 : 1,
              sequence_chunks(attention.layout(), of_keys ? c.seqlen_k : c.seqlen_q, rank, size));
          args.*member = parts.back().view();
          if (argument_of(member).role_in(c.spec) == Role::output)
            outputs.emplace_back(&parts.back(), member);
          else
            parts.back().take(*(whole.*member));
        }
        const std::size_t bytes =
            frugal ? frugal->workspace_bytes(backward)
                   : std::max(attention.workspace_bytes(c.spec.op),
                              ways.trains ? attention.workspace_bytes(Operation::forward) : 0);
        std::vector<std::byte> memory(bytes + 64, std::byte{0xff});
        const auto address = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
        args.workspace = Tensor::contiguous(reinterpret_cast<void*>(address), DType::uint8, {},
                                            {static_cast<std::int64_t>(bytes)});
        if (gpu) {
          args.workspace = gpu->upload(*args.workspace);
          for (const TensorMember member : tensors)
            if (args.*member) args.*member = gpu->upload(*(args.*member));
        }
        watch.begin(own);
        ParallelAttention::Steps frugal_steps;
        // The gradients' bounds are those of the given o and lse, so forwards write others.
        AttentionArgs of_forward = args;
        if (ways.trains) {
          for (const TensorMember member : {&AttentionArgs::d_o, &AttentionArgs::dlse, &AttentionArgs::dq,
                                            &AttentionArgs::dk, &AttentionArgs::dv})
            (of_forward.*member).reset();
          const std::vector<SequenceChunk> rows = sequence_chunks(attention.layout(), c.seqlen_q, rank, size);
          of_forward.o = parts.emplace_back(*whole.o, 1, rows).view();
          of_forward.lse = parts.emplace_back(*whole.lse, 2, rows).view();
        }
        // Ranks may be a call ahead of each other.
        for (int turn = 0; turn < (gpu                                                       ? 3
                                   : ways.short_of_memory || ways.by_messages || ways.trains ? 2
                                                                                             : 1);
             ++turn) {
          for (int i = 0; ways.trains && i < 1 + turn; ++i)
            attention.forward(of_forward, gpu ? gpu->stream.get() : nullptr);
          if (frugal)
            frugal_steps = backward ? frugal->backward(args, nullptr) : frugal->forward(args, nullptr);
          else if (backward)
            attention.backward(args, gpu ? gpu->stream.get() : nullptr);
          else
            attention.forward(args, gpu ? gpu->stream.get() : nullptr);
        }
        if (gpu) gpu->download();
        own.require_alive();
        for (const auto& [part, member] : outputs) part->give(*(whole.*member));
        if (frugal) own.transport()->gather({});  // others write to it until all have come here
        if (rank == 0) steps = frugal ? frugal_steps : attention.last_steps();
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.message();
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    return steps;
  }
  static AttentionSpec forward_of(AttentionSpec spec) {
    spec.op = Operation::forward;
    spec.deterministic = false;
    spec.grad_dtype.reset();
    return spec.validated();
  }

  void expect(const std::string& fields, const Case& given, int size, SequenceLayout layout) {
    if (on().is_cuda()) return;
    for (const char* const op : {"forward", "backward"}) {
      Case c = given;
      c.spec = AttentionSpec::from_json(std::string("{\"op\": \"") + op + "\", " + fields + "}");
      SCOPED_TRACE(c.spec.to_json() + ", " + std::to_string(size) + " ranks, " + to_string(layout));
      Workload workload(on(), c);
      workload.reset();
      run(workload, size, layout, {});
      EXPECT_TRUE(workload.check());
      const std::vector<std::byte> first = workload.outputs();
      workload.reset();
      run(workload, size, layout, {.of_processes = true});
      EXPECT_EQ(workload.outputs(), first) << "the bits differ from run to run";
      if (c.spec.op == Operation::backward) {
        SCOPED_TRACE("after forwards");
        workload.reset();
        run(workload, size, layout, {.trains = true});
        EXPECT_TRUE(workload.check());
      }
      SCOPED_TRACE("by messages");
      workload.reset();
      run(workload, size, layout, {.by_messages = true});
      EXPECT_TRUE(workload.check());
    }
  }
};

const Case usual{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 48, .seqlen_k = 48};

TEST_P(Parallel, EveryLayoutAndSize) {
  constexpr char causal[] = R"("dtype": "bf16", "head_dim": 32, "mask": ["causal"])";
  for (const int size : {2, 3, 4, 8})
    for (const SequenceLayout layout :
         {SequenceLayout::contiguous, SequenceLayout::zigzag, SequenceLayout::heads}) {
      Case c = usual;
      c.heads_kv = size < 4 ? 2 : 1;  // a backward divides an even number
      if (layout == SequenceLayout::heads) c.batch = 1, c.heads_q = c.heads_kv = size;
      c.seed = static_cast<std::uint64_t>(size);
      expect(causal, c, size, layout);
    }
}

TEST_P(Parallel, MasksDropoutAndFormulas) {
  std::uint64_t seed = 50;
  for (
      const char* const fields :
      {R"("dtype": "bf16", "head_dim": 32, "dropout": true, "mask": ["causal"])",
       R"("dtype": "fp32", "head_dim": 32, "score": ["alibi"], "mask": [{"kind": "sliding_window", "sinks": true}])"}) {
    Case c = usual;
    c.seed = seed++;
    c.masks = verify::MaskDataOptions{.window_left = 10, .window_right = 3};
    for (const SequenceLayout layout : {SequenceLayout::contiguous, SequenceLayout::zigzag})
      expect(fields, c, 4, layout);
  }
}

// Long sequences are computed some heads at a time: here one, and two for each key/value head.
TEST_P(Parallel, OneHeadAtATime) {
  if (on().is_cuda()) return;
  for (const int size : {2, 3})
    for (const char* const op : {"forward", "backward"}) {
      Case c = usual;
      c.seed = static_cast<std::uint64_t>(90 + size);
      c.spec = AttentionSpec::from_json(std::string("{\"op\": \"") + op +
                                        R"(", "dtype": "bf16", "head_dim": 32, "mask": ["causal"],
                                              "score": ["softcap"]})");
      SCOPED_TRACE(c.spec.to_json() + ", " + std::to_string(size) + " ranks");
      Workload workload(on(), c);
      workload.reset();
      const ParallelAttention::Steps steps =
          run(workload, size, SequenceLayout::zigzag, {.short_of_memory = true});
      EXPECT_GE(steps.launched, 4 * 2);  // for each head, by rank 0
      EXPECT_TRUE(workload.check());
      const std::vector<std::byte> first = workload.outputs();
      workload.reset();
      run(workload, size, SequenceLayout::zigzag, {.short_of_memory = true, .by_messages = true});
      EXPECT_EQ(workload.outputs(), first) << "the bits differ by messages, or from run to run";
    }
}

// A rank sends only those keys of a long chunk that other ranks see, and few rows wait for them.
TEST_P(Parallel, WindowsOfLongChunks) {
  Case c{.batch = 1, .heads_q = 2, .heads_kv = 1, .seqlen_q = 1024, .seqlen_k = 1024, .seed = 70};
  c.masks = verify::MaskDataOptions{.window_left = 100};
  for (const SequenceLayout layout : {SequenceLayout::contiguous, SequenceLayout::zigzag})
    expect(R"("dtype": "bf16", "head_dim": 32, "mask": ["causal", "sliding_window"])", c, 2, layout);
}

// Pairs of chunks without a key are neither computed nor read.
TEST_P(Parallel, SkipsWhatNoRowSees) {
  if (on().is_cuda()) return;
  Case c = usual;
  c.spec = AttentionSpec::from_json(
      R"({"op": "forward", "dtype": "bf16", "head_dim": 32, "mask": ["causal", "sliding_window"]})");
  c.masks = verify::MaskDataOptions{.window_left = 10};
  Workload workload(on(), c);
  workload.reset();
  const ParallelAttention::Steps first = run(workload, 4, SequenceLayout::contiguous, {});
  EXPECT_EQ(first.launched, 1);  // rows 0 to 11, which see no other keys
  EXPECT_EQ(first.skipped, 3);
  EXPECT_TRUE(workload.check());
}

// From and to every layout, by messages: of 6 rows and 6 heads, element i is i.
TEST_P(Parallel, ConvertsLayoutsByMessages) {
  if (on().is_cuda()) return;
  using Layout = SequenceLayout;
  constexpr Layout layouts[] = {Layout::contiguous, Layout::zigzag, Layout::heads,     Layout::contiguous,
                                Layout::heads,      Layout::zigzag, Layout::contiguous};
  const std::vector<std::int64_t> whole = {2, 12, 6, 3};
  for (const int size : {2, 3}) {
    const std::vector<ParallelGroup> group = message_group(size);
    Engine& engine = on().engine();
    on_threads(size, [&](int rank) {
      const auto first = [&](int row) {
        return sequence_chunks(Layout::contiguous, 12, rank, size)[0].begin + row;
      };
      const int rows = 12 / size;
      std::vector<std::int32_t> given(2 * 12 * 6 * 3 / static_cast<std::size_t>(size)), x;
      for (std::size_t i = 0; i < given.size(); ++i) {
        const int entry = static_cast<int>(i) / (rows * 18), in_entry = static_cast<int>(i) % (rows * 18);
        given[i] = (entry * 12 + first(in_entry / 18)) * 18 + in_entry % 18;
      }
      x = given;
      for (std::size_t i = 0; i + 1 < std::size(layouts); ++i) {
        const LayoutConversion change(engine, group[static_cast<std::size_t>(rank)], DType::int32, whole,
                                      layouts[i], layouts[i + 1]);
        std::vector<std::int32_t> to(x.size(), -1);
        change.convert(Tensor::contiguous(x.data(), DType::int32, {}, change.own_sizes(layouts[i])),
                       Tensor::contiguous(to.data(), DType::int32, {}, change.own_sizes(layouts[i + 1])));
        if (layouts[i + 1] == Layout::heads) {
          EXPECT_EQ(to[0], rank * (6 / size) * 3);
        } else {
          const SequenceChunk last = sequence_chunks(layouts[i + 1], 12, rank, size).back();
          EXPECT_EQ(to.back(), (12 + last.begin + last.length) * 18 - 1);
        }
        x = to;
      }
      EXPECT_EQ(x, given);
    });
  }
}

TEST_P(Parallel, RanksThatDisagreeAreToldBeforeTheFirstStep) {
  if (on().is_cuda()) return;
  std::vector<ParallelGroup> group = ParallelGroup::of_threads(3);
  const AttentionSpec spec{.head_dim = 32, .mask = {CausalMask{}}};
  const Shape whole{.batch = 1, .seqlen_q = 48, .seqlen_k = 48, .num_heads_q = 2, .num_heads_kv = 2};
  Engine& engine = on().engine();
  on_threads(3, [&](int rank) {
    AttentionSpec own = spec;
    if (rank == 1) own.head_dim = 64;
    const ParallelGroup& of = group[static_cast<std::size_t>(rank)];
    expect_error(ErrorCode::invalid_argument, {"rank 1", "\"head_dim\": 64", "\"head_dim\": 32"},
                 [&] { ParallelAttention(engine, own, whole, SequenceLayout::contiguous, of); });
    // The group still works.
    const ParallelAttention attention(engine, spec, whole, SequenceLayout::best, of);
    EXPECT_EQ(attention.layout(), SequenceLayout::zigzag) << attention.layout_reason();
    // A rank that fails ends the others' calls.
    AttentionArgs none;
    expect_error(rank == 0 ? ErrorCode::invalid_argument : ErrorCode::device_failed,
                 {rank == 0 ? "q" : "rank 0"}, [&] {
                   if (rank == 0)
                     attention.forward(none);
                   else
                     of.transport()->gather("");
                 });
  });
}

TEST_P(Parallel, RefusesWhatALayoutDoesNotCompute) {
  if (on().is_cuda()) return;
  const ParallelGroup alone = ParallelGroup::of_threads(1)[0];
  const Shape whole{.batch = 1, .seqlen_q = 48, .seqlen_k = 48, .num_heads_q = 2, .num_heads_kv = 2};
  const auto refused = [&](const char* fields, ErrorCode code, std::initializer_list<const char*> parts,
                           SequenceLayout layout = SequenceLayout::contiguous) {
    const AttentionSpec spec = AttentionSpec::from_json(
        std::string(R"({"op": "forward", "dtype": "bf16", "head_dim": 32, )") + fields + "}");
    expect_error(code, parts, [&] { ParallelAttention(on().engine(), spec, whole, layout, alone); });
  };
  refused(R"("varlen": true)", ErrorCode::unsupported, {"varlen"});
  refused(R"("sink_logits": true)", ErrorCode::unsupported, {"sink_logits"});
  refused(R"("mask": ["padding"])", ErrorCode::unsupported, {"padding"});
  refused(R"("dropout": true)", ErrorCode::unsupported, {"heads", "dropout"}, SequenceLayout::heads);
  expect_error(ErrorCode::invalid_argument, {"50", "8"},
               [] { sequence_chunks(SequenceLayout::zigzag, 50, 0, 4); });
  EXPECT_EQ(sequence_chunks(SequenceLayout::zigzag, 48, 1, 4), (std::vector<SequenceChunk>{{6, 6}, {36, 6}}));
}

// Two GPUs, of which this process has a thread each. The oracle is a CPU's case.
TEST_P(Parallel, OnGpus) {
  const int size = static_cast<int>(cuda_devices().size());
  if (on().is_cuda() || size < 2) GTEST_SKIP() << "needs two GPUs";
  std::uint64_t seed = 80;
  using Layout = SequenceLayout;
  const std::vector<std::pair<const char*, std::vector<Layout>>> cases = {
      {R"("dtype": "bf16", "head_dim": 128, "mask": ["causal"])",
       {Layout::contiguous, Layout::zigzag, Layout::heads}},
      {R"("dtype": "bf16", "head_dim": 128)", {Layout::contiguous}},
      {R"("dtype": "fp16", "head_dim": 64, "mask": ["causal"], "dropout": true)", {Layout::zigzag}},
      {R"("dtype": "bf16", "head_dim": 128, "mask": ["causal", "sliding_window"])", {Layout::contiguous}}};
  for (const auto& [fields, layouts] : cases)
    for (const Layout layout : layouts)
      for (const char* const op : {"forward", "backward"}) {
        Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 512, .seqlen_k = 512, .seed = seed++};
        c.heads_q *= size, c.heads_kv *= size;
        c.masks = verify::MaskDataOptions{.window_left = 100};
        c.spec = AttentionSpec::from_json(std::string("{\"op\": \"") + op + "\", " + fields + "}");
        SCOPED_TRACE(c.spec.to_json() + ", " + to_string(layout));
        Workload workload(on(), c);
        workload.reset();
        run(workload, size, layout, {.on_gpus = true});
        EXPECT_TRUE(workload.check());
      }
}

FLASHJIT_ON_EVERY_DEVICE(Parallel);

}  // namespace
}  // namespace flashjit::testing_support
