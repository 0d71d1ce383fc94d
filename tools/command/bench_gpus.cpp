// flashjit bench --gpus: attention over several GPUs of this host, beside one of them alone.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cuda/memory.hpp"
#include "runtime/parallel.hpp"
#include "runtime/timing.hpp"
#include "runtime/workspace.hpp"
#include "tools/command/bench.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

// A place where all threads wait for each other. Once one has failed, none waits.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    std::unique_lock lock(mutex_);
    const int mine = turn_;
    if (++waiting_ == count_) {
      waiting_ = 0;
      ++turn_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return turn_ != mine || failed_; });
    if (failed_ && turn_ == mine) throw Error(ErrorCode::device_failed, "another GPU's rank failed");
  }
  void fail() {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }

 private:
  const int count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0, turn_ = 0;
  bool failed_ = false;
};

// Bell-shaped numbers, some 2^20 of them again and again.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    for (double& x : values_) x = normal(random);
  }
  void fill(cuda::DeviceBuffer& memory, DType dtype, Stream stream) const {
    std::vector<std::byte> bytes(memory.size());
    const std::size_t count = bytes.size() / size_of(dtype), period = std::min(count, values_.size());
    for (std::size_t i = 0; i < period; ++i)
      verify::store_element(bytes.data(), dtype, static_cast<std::int64_t>(i), values_[i]);
    for (std::size_t done = period; done < count; done += period)
      std::copy_n(bytes.data(), std::min(period, count - done) * size_of(dtype),
                  bytes.data() + done * size_of(dtype));
    memory.copy_from(bytes.data(), bytes.size(), stream);
  }

 private:
  std::vector<double> values_ = std::vector<double>((std::size_t{1} << 20) + 7);
};

// One GPU's tensors of a forward and a backward.
class Tensors {
 public:
  Tensors(const cuda::Context& context, const AttentionSpec& spec, const Shape& shape,
          const BenchOptions& options, const Numbers& numbers, Stream stream)
      : context_(context), numbers_(numbers), stream_(stream) {
    args.window_left = options.masks.window_left;
    args.window_right = options.masks.window_right;
    args.num_sinks = options.masks.num_sinks;
    const auto rows = [&](int heads, int dim, int length) {
      return std::vector<std::int64_t>{shape.batch, length, heads, dim};
    };
    const std::vector<std::int64_t> q = rows(shape.num_heads_q, spec.head_dim, shape.seqlen_q),
                                    o = rows(shape.num_heads_q, spec.head_dim_v, shape.seqlen_q),
                                    k = rows(shape.num_heads_kv, spec.head_dim, shape.seqlen_k),
                                    v = rows(shape.num_heads_kv, spec.head_dim_v, shape.seqlen_k);
    args.q = take(spec.dtype, q, true);
    args.k = take(spec.dtype, k, true);
    args.v = take(spec.dtype, v, true);
    args.o = take(spec.o_dtype.value_or(spec.dtype), o, false);
    args.lse = take(DType::fp32, {shape.batch, shape.num_heads_q, shape.seqlen_q}, false);
    if (!info_of(spec.op).writes_gradients) return;
    const DType gradients = spec.grad_dtype.value_or(spec.dtype);
    args.d_o = take(spec.dtype, o, true);
    args.dq = take(gradients, q, false);
    args.dk = take(gradients, k, false);
    args.dv = take(gradients, v, false);
  }
  void take_workspace(std::size_t bytes) {
    if (bytes > 0) args.workspace = take(DType::uint8, {static_cast<std::int64_t>(bytes)}, false);
  }

  AttentionArgs args;

 private:
  Tensor take(DType dtype, const std::vector<std::int64_t>& sizes, bool filled) {
    std::size_t bytes = size_of(dtype);
    for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
    cuda::DeviceBuffer& buffer =
        *buffers_.emplace_back(std::make_unique<cuda::DeviceBuffer>(context_, bytes));
    if (filled)
      numbers_.fill(buffer, dtype, stream_);
    else
      buffer.fill(0xff, stream_);
    return Tensor::contiguous(buffer.data(), dtype, {Device::Kind::cuda, context_.index()}, sizes);
  }

  const cuda::Context& context_;
  const Numbers& numbers_;
  const Stream stream_;
  std::vector<std::unique_ptr<cuda::DeviceBuffer>> buffers_;
};

SequenceLayout layout_of(const std::string& name) {
  for (const SequenceLayout layout :
       {SequenceLayout::contiguous, SequenceLayout::zigzag, SequenceLayout::heads, SequenceLayout::best})
    if (name == to_string(layout)) return layout;
  throw Error(ErrorCode::invalid_argument,
              "layout '" + name + "' is none of contiguous, zigzag, heads and best");
}

// As tests/peers has them: a card at rest has idled before a sample, a sustained one has computed all the
// time.
constexpr const char* states[] = {"at rest", "sustained"};
constexpr std::size_t num_states = std::size(states);

struct GpusRow {
  Shape shape;
  std::string layout, reason;
  double alone_ms[num_states] = {}, together_ms[num_states] = {};
  std::size_t alone_bytes = 0, together_bytes = 0;  // of the first GPU's memory
  int launches = 0;
};

class GpusBench {
 public:
  GpusBench(const BenchOptions& options, const AttentionSpec& spec)
      : options_(options),
        spec_(spec),
        backward_(info_of(spec.op).writes_gradients),
        barrier_(options.gpus),
        group_(ParallelGroup::of_threads(options.gpus)),
        numbers_(options.seed),
        samples_(static_cast<std::size_t>(options.gpus)) {}

  GpusRow measure(const Shape& shape) {
    row_ = {};
    row_.shape = shape;
    std::vector<std::thread> threads;
    std::vector<std::string> errors(static_cast<std::size_t>(options_.gpus));
    for (int rank = 0; rank < options_.gpus; ++rank)
      threads.emplace_back([&, rank] {
        try {
          run(rank, shape);
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
          barrier_.fail();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors)
      if (!error.empty()) throw Error(ErrorCode::device_failed, error);
    // A round takes as long as the slowest rank.
    for (std::size_t state = 0; state < num_states; ++state) {
      std::vector<double> together = samples_[0][state];
      for (const auto& of_rank : samples_)
        for (std::size_t i = 0; i < together.size(); ++i)
          together[i] = std::max(together[i], of_rank[state][i]);
      row_.together_ms[state] = median(together);
    }
    return row_;
  }

 private:
  static AttentionArgs forward_of(AttentionArgs args) {
    args.d_o.reset(), args.dq.reset(), args.dk.reset(), args.dv.reset();
    return args;
  }
  void run(int rank, const Shape& shape) {
    const cuda::Context context(rank);
    const cuda::OwnedStream stream(context);
    EngineOptions engine_options;
    engine_options.device = "cuda:" + std::to_string(rank);
    Engine engine(engine_options);
    AttentionSpec forward = spec_;
    if (backward_) {
      forward.op = Operation::forward;
      forward.deterministic = false;
      forward.grad_dtype.reset();
      forward = forward.validated();
    }
    const ParallelGroup& group = group_[static_cast<std::size_t>(rank)];
    const std::size_t at_first = cuda::free_memory(context);
    const ParallelAttention attention(engine, forward, shape, layout_of(options_.layout), group);
    Tensors own(context, spec_, attention.own_shape(), options_, numbers_, stream.get());
    own.take_workspace(std::max(attention.workspace_bytes(Operation::forward),
                                backward_ ? attention.workspace_bytes(Operation::backward) : 0));
    attention.prepare(Operation::forward);
    if (backward_) attention.prepare(spec_.op);
    const auto together = [&] {
      if (backward_)
        attention.backward(own.args, stream.get());
      else
        attention.forward(own.args, stream.get());
    };
    attention.forward(forward_of(own.args), stream.get());
    if (backward_) together();
    stream.synchronize();
    group.require_alive();
    barrier_.wait();  // nothing is allocated while a rank computes
    std::unique_ptr<Tensors> whole;
    const Kernel* kernel = nullptr;
    if (rank == 0) {
      row_.together_bytes = at_first - cuda::free_memory(context);
      whole = std::make_unique<Tensors>(context, spec_, shape, options_, numbers_, stream.get());
      const Kernel& of_forward = engine.get(forward, shape);
      kernel = &engine.get(spec_, shape);
      whole->take_workspace(std::max(kernel->workspace_bytes(shape), of_forward.workspace_bytes(shape)));
      if (backward_) of_forward.launch(forward_of(whole->args), stream.get());
      kernel->launch(whole->args, stream.get());
      stream.synchronize();
      row_.alone_bytes = at_first - row_.together_bytes - cuda::free_memory(context);
      row_.layout = to_string(attention.layout());
      row_.reason = attention.layout_reason();
    }
    const auto time = [&](const std::function<void()>& launch) {
      // One long launch is enough.
      constexpr double long_pairs = 1e11;
      const bool brief = double(shape.seqlen_q) * shape.seqlen_k * shape.batch < long_pairs;
      const int launches = brief ? 3 : 1;
      cuda::Event start(context), stop(context);
      if (brief) launch();
      start.record(stream.get());
      for (int i = 0; i < launches; ++i) launch();
      stop.record(stream.get());
      return elapsed_ms(start, stop) / launches;
    };
    for (std::size_t state = 0; state < num_states; ++state) {
      samples_[static_cast<std::size_t>(rank)][state] =
          sample(state == 0, together, time, rank == 0, [&] { barrier_.wait(); });
      barrier_.wait();
      if (rank != 0) continue;
      std::vector<double> alone =
          sample(state == 0, [&] { kernel->launch(whole->args, stream.get()); }, time, true, [] {});
      row_.alone_ms[state] = median(alone);
    }
    group.require_alive();
    if (rank == 0) row_.launches = attention.last_steps().launched;
    stream.synchronize();
    barrier_.wait();
  }

  // Milliseconds of launches in a state of the card. All that launch together begin a sample when they meet;
  // one of them leads.
  template <class Time>
  std::vector<double> sample(bool at_rest, const std::function<void()>& launch, const Time& time, bool leads,
                             const std::function<void()>& meet) {
    constexpr std::chrono::milliseconds rest(200);
    constexpr double heating_ms = 1000;
    std::vector<double> samples;
    for (int round = 0; round <= options_.rounds; ++round) {
      meet();
      if (at_rest) std::this_thread::sleep_for(rest);
      const double ms = time(launch);
      if (round > 0) {
        samples.push_back(ms);
        continue;
      }
      if (leads) heating_ = at_rest ? 0 : static_cast<int>(heating_ms / ms);
      meet();
      for (int i = 0; i < heating_; ++i) launch();
    }
    meet();
    return samples;
  }

  const BenchOptions& options_;
  const AttentionSpec spec_;
  const bool backward_;
  Barrier barrier_;
  const std::vector<ParallelGroup> group_;
  const Numbers numbers_;
  std::vector<std::array<std::vector<double>, num_states>> samples_;  // of each rank
  int heating_ = 0;                                                   // launches before a sustained sample
  GpusRow row_;
};

}  // namespace

int bench_gpus(const BenchOptions& options) {
  std::vector<GpusRow> rows;
  verify::Table table({"op", "shape", "layout", "state", "one GPU, ms",
                       std::to_string(options.gpus) + " GPUs, ms", "rate of each / one's", "memory / one's"});
  Json json = Json::array();
  for (const std::string& argument : options.specs) {
    const AttentionSpec spec = read_spec(argument, options.op);
    GpusBench bench(options, spec);
    for (const Shape& shape : options.shape.shapes(spec, options.seqlens)) {
      const GpusRow row = bench.measure(shape);
      for (std::size_t state = 0; state < num_states; ++state) {
        const double alone = row.alone_ms[state], together = row.together_ms[state],
                     share = alone / (together * options.gpus);
        table.add({to_string(spec.op),
                   std::to_string(shape.batch) + " x " + std::to_string(shape.seqlen_q) + ", " +
                       std::to_string(shape.num_heads_q) + "/" + std::to_string(shape.num_heads_kv),
                   row.layout, states[state], verify::digits(alone, 4), verify::digits(together, 4),
                   verify::digits(share),
                   verify::digits(double(row.together_bytes) / static_cast<double>(row.alone_bytes))});
        Json one = {{"spec", Json::parse(spec.to_json())}};
        one.update(shape_json(shape));
        one.update({{"gpus", options.gpus},
                    {"layout", row.layout},
                    {"layout_reason", row.reason},
                    {"launches", row.launches},
                    {"state", states[state]},
                    {"one_gpu_ms", alone},
                    {"ms", together},
                    {"share_of_one_gpus_rate", share},
                    {"one_gpu_bytes", row.alone_bytes},
                    {"bytes", row.together_bytes}});
        json.push_back(one);
      }
    }
  }
  if (options.json)
    print_json(json);
  else
    std::cout << shown(table);
  return exit_ok;
}

}  // namespace flashjit::command
