// A launch allocates nothing, whatever its spec, arguments and lengths, through either
// interface: every allocator function is counted. Scratch, which a CPU thread allocates
// at a kernel's first launch, has the same size for short and long sequences.
#include <gtest/gtest.h>

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <set>

#include "codegen/families/kernel_family.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/flashjit.h"
#include "tests/api/arguments.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/append_problem.hpp"
#include "tests/support/copy_problem.hpp"
#include "tests/support/workload.hpp"

namespace {

std::atomic<bool> counting = false;
std::atomic<long> allocations = 0;

void count() {
  if (counting.load(std::memory_order_relaxed)) ++allocations;
}

}  // namespace

// The C library's own allocator under its internal names. The functions
// below replace it, so that every allocation in the process is counted. They are visible to the C++ library.
#pragma GCC visibility push(default)
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(std::size_t n, std::size_t bytes) {
  count();
  return __libc_calloc(n, bytes);
}
void* realloc(void* old, std::size_t bytes) {
  count();
  return __libc_realloc(old, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return memalign(alignment, bytes);
}
int posix_memalign(void** to, std::size_t alignment, std::size_t bytes) {
  *to = memalign(alignment, bytes);
  return *to ? 0 : 12;
}
}
#pragma GCC visibility pop

namespace flashjit::testing_support {
namespace {

class Allocation : public OnEveryDevice {
 protected:
  long of(const auto& body) {
    allocations = 0;
    counting = true;
    body();
    counting = false;
    return allocations;
  }
};

TEST_P(Allocation, TheCounterCounts) {
  EXPECT_GE(of([] { ::operator delete(::operator new(8)); }), 1);
  EXPECT_GE(of([] { std::free(std::aligned_alloc(64, 64)); }), 1);
}

Case short_case(const AttentionSpec& spec) {
  return {.spec = spec,
          .batch = 2,
          .heads_q = 4,
          .heads_kv = 2,
          .seqlen_q = 65,
          .seqlen_k = 65,
          .lengths_q = {65, 60},
          .lengths_k = {65, 65}};
}
Case long_case(const AttentionSpec& spec) {
  return {.spec = spec, .seqlen_q = 3000, .seqlen_k = 3000, .lengths_q = {3000}, .lengths_k = {3000}};
}

TEST_P(Allocation, LaunchesTakeNoneAfterTheFirst) {
  const auto engine = on().make_engine({.num_threads = 1});
  for (const DType dtype : own_dtypes()) {
    for (const bool varlen : {false, true}) {
      const AttentionSpec spec = forward_spec(dtype, 64, {CausalMask{}}, {.varlen = varlen});
      Workload small(on(), short_case(spec)), large(on(), long_case(spec));
      const Kernel& kernel = small.kernel(*engine);
      kernel.launch(small.args());
      on().synchronize();
      EXPECT_EQ(of([&] { kernel.launch(small.args()); }), 0);
      EXPECT_EQ(of([&] { kernel.launch(large.args()); }), 0) << "a longer sequence";
      const PreparedLaunch prepared = kernel.prepare(large.args());
      EXPECT_EQ(of([&] { prepared.launch(); }), 0);
      EXPECT_EQ(kernel.workspace_bytes(large.given().shape()), 0u);
      EXPECT_TRUE(large.check());
    }
  }
}

// The given arguments as a list for the C interface.
class CArguments {
 public:
  CArguments(const AttentionSpec& spec, const AttentionArgs& given) {
    tensors_.reserve(num_arguments + given.named.size());
    for (const Argument& argument : arguments) {
      std::visit(
          [&](auto member) {
            if (given.*member) add(argument.id, *(given.*member));
          },
          argument.member);
    }
    for (const NamedArgument& named : given.named) {
      const int place = place_of_name(spec, named.name);
      const DeclaredScalar* const scalar = declared_at(spec, place).scalar;
      if (const auto* table = std::get_if<Tensor>(&named.value)) {
        add(first_named_id + place, *table);
      } else if (const double value = std::get<double>(named.value); scalar->dtype == DType::int32) {
        add(first_named_id + place, static_cast<int>(value));
      } else {
        add(first_named_id + place, value);
      }
    }
  }
  const std::vector<flashjit_argument>& list() const { return list_; }

 private:
  void add(std::int32_t id, const Tensor& tensor) {
    tensors_.push_back(c_tensor(tensor));
    list_.push_back({id, {.tensor = &tensors_.back()}});
  }
  void add(std::int32_t id, int value) { list_.push_back({id, {.integer = value}}); }
  void add(std::int32_t id, std::uint64_t value) {
    list_.push_back({id, {.integer = static_cast<std::int64_t>(value)}});
  }
  void add(std::int32_t id, float value) { list_.push_back({id, {.real = value}}); }
  void add(std::int32_t id, double value) { list_.push_back({id, {.real = value}}); }
  std::vector<flashjit_tensor> tensors_;
  std::vector<flashjit_argument> list_;
};

// Launches through both interfaces, directly and prepared.
class EveryArgument : public Allocation {
 protected:
  void TearDown() override {
    flashjit_engine_destroy(c_engine_);
    engine_.reset();
  }

  // args: the workload's, or a copy of them.
  void expect_none(Workload& work, const AttentionArgs& args) {
    SCOPED_TRACE(work.given().str());
    work.kernel(engine());  // lends its workspace
    expect_none(work.given().spec, work.given().shape(), args);
  }
  void expect_none(const AttentionSpec& spec, const Shape& shape, const AttentionArgs& args) {
    const Kernel& kernel = engine().get(spec, shape);
    kernel.launch(args);  // allocates scratch
    EXPECT_EQ(of([&] { kernel.launch(args); }), 0);
    std::optional<PreparedLaunch> prepared;
    EXPECT_EQ(of([&] { prepared.emplace(kernel.prepare(args)); }), 1) << "what it returns";
    EXPECT_EQ(of([&] { prepared->launch(); }), 0);
    EXPECT_EQ(of([&] { kernel.workspace_bytes(shape); }), 0);

    const CArguments c(spec, args);
    for (const flashjit_argument& argument : c.list()) given_.insert(argument.id);
    const flashjit_argument* const list = c.list().data();
    const std::size_t count = c.list().size();
    const flashjit_kernel* const c_kernel = c_kernel_of(spec, shape);
    flashjit_prepared* c_prepared = nullptr;
    const auto ok = [](flashjit_status status) {
      EXPECT_EQ(status, FLASHJIT_OK) << flashjit_last_error_message();
    };
    ok(flashjit_kernel_launch(c_kernel, list, count, nullptr));
    EXPECT_EQ(of([&] { ok(flashjit_kernel_launch(c_kernel, list, count, nullptr)); }), 0) << "C";
    EXPECT_EQ(of([&] { ok(flashjit_kernel_prepare(c_kernel, list, count, &c_prepared)); }), 2)
        << "C: what it returns, and its handle";
    EXPECT_EQ(of([&] { ok(flashjit_prepared_launch(c_prepared, nullptr)); }), 0) << "C";
    flashjit_prepared_destroy(c_prepared);
    on().synchronize();
  }
  const std::set<std::int32_t>& given() const { return given_; }

 private:
  Engine& engine() {
    if (!engine_) engine_ = on().make_engine({.num_threads = 1});
    return *engine_;
  }
  const flashjit_kernel* c_kernel_of(const AttentionSpec& spec, const Shape& sizes) {
    if (!c_engine_) {
      const std::string device = on().device().str();
      flashjit_engine_options options{};
      options.struct_size = sizeof options;
      options.device = device.c_str();
      options.target = on().target().c_str();
      options.cache_dir = cache_folder().c_str();
      options.num_threads = 1;
      EXPECT_EQ(flashjit_engine_create(&options, &c_engine_), FLASHJIT_OK) << flashjit_last_error_message();
    }
    flashjit_spec* c_spec = nullptr;
    flashjit_shape shape{};
    shape.struct_size = sizeof shape;
    shape.batch = sizes.batch;
    shape.seqlen_q = sizes.seqlen_q;
    shape.seqlen_k = sizes.seqlen_k;
    shape.num_heads_q = sizes.num_heads_q;
    shape.num_heads_kv = sizes.num_heads_kv;
    const flashjit_kernel* kernel = nullptr;
    EXPECT_EQ(flashjit_spec_create(spec.to_json().c_str(), &c_spec), FLASHJIT_OK);
    EXPECT_EQ(flashjit_engine_get(c_engine_, c_spec, &shape, &kernel), FLASHJIT_OK)
        << flashjit_last_error_message();
    flashjit_spec_destroy(c_spec);
    return kernel;
  }

  std::unique_ptr<Engine> engine_;
  flashjit_engine* c_engine_ = nullptr;
  std::set<std::int32_t> given_;
};

TEST_P(EveryArgument, IsCheckedWithoutAny) {
  const std::vector<Mask> masks[] = {
      {},
      {PaddingMask{}},
      {SlidingWindowMask{.sinks = true}},
      {BlockSparseMask{.block_m = 16, .block_n = 16}},
      {BlockSparseMask{.block_m = 16, .block_n = 16, .per_head = true}},
      {TreeMask{}},
      {CausalMask{}, SlidingWindowMask{}, PaddingMask{}, BlockSparseMask{.block_m = 32, .block_n = 64}},
      {PaddingMask{}, BlockSparseMask{.block_m = 64, .block_n = 32}, TreeMask{}}};
  for (const std::vector<Mask>& mask : masks) {
    // Hard masks leave some arguments out, depending on the seed.
    for (const std::uint64_t seed : {0, 1, 2, 3}) {
      Workload work(on(), {.spec = forward_spec(DType::bf16, 64, mask),
                           .batch = 2,
                           .heads_q = 4,
                           .heads_kv = 2,
                           .seqlen_q = 130,
                           .seqlen_k = 260,
                           .masks = verify::MaskDataOptions{.hard = seed > 0},
                           .softmax_scale = 0.1f,
                           .seed = seed});
      expect_none(work, work.args());
    }
  }
  Workload packed(on(), {.spec = forward_spec(DType::bf16, 64, {CausalMask{}}, {.varlen = true}),
                         .lengths_q = {7, 0, 100},
                         .lengths_k = {9, 20, 30},
                         .max_seqlen_q = 100,
                         .max_seqlen_k = 30});
  expect_none(packed, packed.args());
  Workload paged(on(),
                 {.spec = forward_spec(DType::bf16, 64, {CausalMask{}}, {.varlen = true, .paged = true}),
                  .seqlen_k = 100,
                  .lengths_q = {7, 0, 100},
                  .lengths_k = {9, 20, 100},
                  .page_size = 16});
  expect_none(paged, paged.args());

  for (const char* op : {"forward", "decode"}) {
    Workload formulas(on(), {.spec = AttentionSpec::from_json(R"({"op": ")" + std::string(op) +
                                                              R"(", "dtype": "bf16", "head_dim": 64,
                                     "mask": ["prefix_lm", "position - key < reach"], "score": ["softcap", "alibi"],
                                     "scalars": {"reach": "int32"}, "sink_logits": true})"),
                             .batch = 2,
                             .heads_q = 4,
                             .heads_kv = 2,
                             .seqlen_q = 7,
                             .seqlen_k = 300});
    expect_none(formulas, formulas.args());
  }

  Workload lists(
      on(), {.spec = AttentionSpec::from_json(R"({"op": "make_block_lists", "dtype": "bf16", "head_dim": 64,
                                "mask": [{"kind": "block_sparse", "of_masks": true}, "prefix_lm"]})"),
             .batch = 2,
             .heads_q = 4,
             .heads_kv = 2,
             .seqlen_q = 300,
             .seqlen_k = 300});
  expect_none(lists, lists.args());

  Workload shards(on(),
                  {.spec = AttentionSpec::from_json(R"({"op": "forward", "dtype": "bf16", "head_dim": 64,
                                "mask": ["causal"], "offsets": true})"),
                   .batch = 2,
                   .seqlen_q = 20,
                   .seqlen_k = 20});
  expect_none(shards, shards.args());

  Workload drops(
      on(), {.spec = forward_spec(DType::bf16, 64, {}, {.dropout = true}), .seqlen_q = 20, .seqlen_k = 20});
  expect_none(drops, drops.args());
  AttentionArgs args = drops.args();
  GuardedTensor words(on(), DType::int32, {.rank = 1, .shape = {2}, .strides = {1}}, Poison::nan,
                      GuardedTensor::Fence::before);
  words.upload();
  Tensor number = words.on_device();
  number.dtype = DType::int64;
  number.shape[0] = 1;
  args.dropout_seed.reset();
  args.dropout_offset.reset();
  args.dropout_seed_tensor = args.dropout_offset_tensor = number;
  expect_none(drops, args);

  const AttentionSpec merging =
      AttentionSpec::from_json(R"({"op": "merge", "dtype": "bf16", "head_dim": 64})");
  Workload merged(on(), {.spec = forward_spec(DType::bf16, 64), .batch = 2, .heads_q = 3, .seqlen_q = 5});
  GuardedTensor parts_o(on(), DType::fp32,
                        TensorShape{.rank = 5, .shape = {1, 2, 5, 3, 64}, .strides = {1920, 960, 192, 64, 1}},
                        Poison::nan, GuardedTensor::Fence::before);
  GuardedTensor parts_lse(on(), DType::fp32,
                          TensorShape{.rank = 4, .shape = {1, 2, 3, 5}, .strides = {30, 15, 5, 1}},
                          Poison::nan, GuardedTensor::Fence::before);
  expect_none(merging, merged.given().shape(),
              {.o = merged.args().o,
               .lse = merged.args().lse,
               .parts_o = parts_o.on_device(),
               .parts_lse = parts_lse.on_device()});

  for (const bool varlen : {false, true}) {
    const AttentionSpec decoding =
        decode_spec(DType::bf16, 64, {CausalMask{}}, {.varlen = varlen, .paged = true});
    Workload decoded(on(), {.spec = decoding,
                            .batch = 2,
                            .heads_q = 4,
                            .heads_kv = 2,
                            .seqlen_q = 3,
                            .seqlen_k = 700,
                            .lengths_q = varlen ? std::vector{3, 1} : std::vector<int>{},
                            .lengths_k = {700, 20},
                            .page_size = 16});
    expect_none(decoded, decoded.args());
  }

  for (const KvScale scale : {KvScale::tensor, KvScale::head, KvScale::token_head}) {
    for (const auto make_spec : {decode_spec, forward_spec}) {
      Workload quantised(on(),
                         {.spec = make_spec(DType::bf16, 64, {CausalMask{}},
                                            {.paged = true, .kv_dtype = DType::int8, .kv_scale = scale}),
                          .batch = 2,
                          .heads_q = 4,
                          .heads_kv = 2,
                          .seqlen_q = 3,
                          .seqlen_k = 100,
                          .page_size = 16});
      expect_none(quantised, quantised.args());
    }
  }

  for (const AppendCase& c :
       {AppendCase{.by_slots = true, .page_size = 16},
        {.page_size = 16, .rotary = Rotary{.q = true}, .own_positions = true, .base = 5e5, .scale = 2},
        {.packed = true, .rotary = Rotary{.q = true, .tables = DType::fp32}},
        {.kv_dtype = DType::int8, .kv_scale = KvScale::head},
        {.kv_dtype = DType::fp8_e4m3,
         .kv_scale = KvScale::token_head,
         .page_size = 16,
         .rotary = Rotary{.q = true}}}) {
    AppendProblem problem(on(), c);
    expect_none(c.spec(),
                {.batch = c.batch,
                 .seqlen_q = c.seqlen,
                 .seqlen_k = c.rows,
                 .num_heads_q = c.heads_q,
                 .num_heads_kv = c.heads_kv,
                 .page_size = c.page_size},
                problem.args());
  }

  for (const auto from : {CopyCase::From::others, CopyCase::From::themselves}) {
    const CopyCase c{.kv_dtype = DType::int8, .kv_scale = KvScale::token_head, .from = from};
    CopyProblem problem(on(), c, on().engine().get(c.spec(), c.shape()).workspace_bytes(c.shape()));
    expect_none(c.spec(), c.shape(), problem.args());
  }

  Workload backward(on(), {.spec = attention_spec(Operation::backward, DType::bf16, 64, {CausalMask{}}, {}),
                           .heads_q = 4,
                           .heads_kv = 2,
                           .seqlen_q = 100,
                           .seqlen_k = 120});
  expect_none(backward, backward.args());

  const AttentionSpec learning = AttentionSpec::from_json(
      R"({"op": "backward", "dtype": "bf16", "head_dim": 64, "score": ["score + a_table_of_a_long_name[head, row]"],
          "sink_logits": true, "tables": {"a_table_of_a_long_name":
              {"dtype": "fp32", "shape": ["heads_q", "seqlen_q"], "grad": true}}})");
  Workload learns(on(), {.spec = learning, .heads_q = 4, .heads_kv = 2, .seqlen_q = 100, .seqlen_k = 120});
  expect_none(learns, learns.args());

  // Keys in two pairs of tensors, on targets whose kernels take them.
  const AttentionSpec split = AttentionSpec::from_json(
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["causal"], "gathered": true})");
  const bool takes_gathered = why_unsupported(split, Target::parse(on().target())).empty();
  if (takes_gathered) {
    Workload whole(on(), {.spec = forward_spec(DType::bf16, 64, {CausalMask{}}),
                          .heads_q = 4,
                          .heads_kv = 2,
                          .seqlen_q = 100,
                          .seqlen_k = 256});
    GuardedTensor arrived(on(), DType::int32, {.rank = 1, .shape = {2}, .strides = {1}}, Poison::nan,
                          GuardedTensor::Fence::after);
    std::fill_n(static_cast<std::int32_t*>(arrived.on_host().data), 2, 1);
    arrived.upload();
    AttentionArgs args = whole.args();
    args.k->shape[1] = args.v->shape[1] = 128;
    args.k_gathered = args.k, args.v_gathered = args.v;
    args.early_rows = 10, args.late_keys = 64, args.arrived = arrived.on_device();
    expect_none(split, whole.given().shape(), args);
  }

  Workload beside(on(), {.spec = forward_spec(DType::bf16, 64, {}), .seqlen_q = 100, .seqlen_k = 100});
  AttentionArgs sparing = beside.args();
  sparing.spare_multiprocessors = on().is_cuda() ? 1 : 0;
  expect_none(beside, sparing);

  for (const Argument& argument : arguments)
    EXPECT_TRUE(given().contains(argument.id) ||
                (argument.needs == &AttentionSpec::gathered && !takes_gathered))
        << "no launch had argument " << argument.name;
}

TEST_P(Allocation, LongListsOfBlocks) {
  const auto engine = on().make_engine({.num_threads = 1});
  Workload work(on(), {.spec = forward_spec(DType::bf16, 16, {BlockSparseMask{.block_m = 16, .block_n = 16}}),
                       .seqlen_q = 4096,
                       .seqlen_k = 4096,
                       .masks = verify::MaskDataOptions{.density = 0.02}});
  const Kernel& kernel = work.kernel(*engine);
  kernel.launch(work.args());
  EXPECT_EQ(of([&] { kernel.launch(work.args()); }), 0);
}

TEST_P(Allocation, PartsOfKeysTakeNoMoreForMore) {
  if (on().is_cuda()) GTEST_SKIP() << "GPU kernels take none";
  const auto engine =
      on().make_engine({.num_threads = 8, .parallel_for = [](std::int64_t count, auto* body, void* context) {
                          body(context, 0, count);
                        }});
  const AttentionSpec spec = forward_spec(DType::fp32, 64);
  Workload small(on(), {.spec = spec, .seqlen_k = 4096}),
      large(on(), {.spec = spec, .seqlen_q = 64, .seqlen_k = 8192});
  const Kernel& kernel = small.kernel(*engine);
  kernel.launch(small.args());
  EXPECT_EQ(of([&] { kernel.launch(large.args()); }), 0);
}

TEST_P(Allocation, EveryThreadTakesItsScratchOnce) {
  constexpr int threads = 3;
  const auto engine = on().make_engine({.num_threads = threads});
  const AttentionSpec spec = forward_spec(DType::bf16, 64, {CausalMask{}});
  Workload small(on(), short_case(spec)), large(on(), long_case(spec));
  const Kernel& kernel = small.kernel(*engine);
  EXPECT_LE(of([&] {
              for (int i = 0; i < 50; ++i) kernel.launch((i % 2 ? large : small).args());
            }),
            2 * threads);  // the buffer, and the C++ library's record to free it when the thread ends
}

TEST_P(Allocation, AKernelInMemoryIsFoundWithoutAny) {
  const AttentionSpec spec = forward_spec(DType::bf16, 64);
  const Shape shape{1, 64, 64, 1, 1};
  Engine& engine = on().engine();
  const Kernel* first = &engine.get(spec, shape);
  const Kernel* again = nullptr;
  EXPECT_EQ(of([&] { again = &engine.get(spec, shape); }), 0);
  EXPECT_EQ(first, again);
}

FLASHJIT_ON_EVERY_DEVICE(Allocation);
FLASHJIT_ON_EVERY_DEVICE(EveryArgument);

}  // namespace
}  // namespace flashjit::testing_support
