// Fuzzes sizes of any magnitude: each is refused, or the numbers
// computed from it are consistent. Memory is never read.
#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/cpu/partition.hpp"
#include "runtime/cuda/tile_plan.hpp"
#include "runtime/dropout.hpp"
#include "runtime/masks.hpp"
#include "runtime/operation.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

namespace {

constexpr std::int64_t most_int = std::numeric_limits<int>::max();

class Numbers {
 public:
  explicit Numbers(std::string_view bytes) : bytes_(bytes) {}
  std::int64_t any() {
    constexpr std::int64_t known[] = {0,
                                      1,
                                      2,
                                      64,
                                      65536,
                                      longest_sequence - 1,
                                      longest_sequence,
                                      longest_sequence + 1,
                                      most_int - 400,
                                      most_int,
                                      most_int + 1,
                                      2 * most_int + 1,
                                      2 * most_int + 2,
                                      std::numeric_limits<std::int64_t>::max(),
                                      std::numeric_limits<std::int64_t>::min(),
                                      -1};
    const unsigned kind = byte();
    return kind < std::size(known) ? known[kind] : kind < 128 ? kind : kind * 256 + byte();
  }
  int size() { return static_cast<int>(std::clamp<std::int64_t>(any(), -1, most_int)); }

 private:
  unsigned byte() {
    if (bytes_.empty()) return 1;
    const auto first = static_cast<unsigned char>(bytes_.front());
    bytes_.remove_prefix(1);
    return first;
  }
  std::string_view bytes_;
};

void check_bucket(const Shape& shape) {
  const Shape b = bucket(shape);
  FUZZ_CHECK(b.batch >= 1 && b.num_heads_q >= 1 && b.num_heads_kv == 1);
  FUZZ_CHECK(b.seqlen_q >= std::min(shape.seqlen_q, longest_sequence) && b.seqlen_k >= 1);
  FUZZ_CHECK(bucket(b) == b);
}

void check_partition(const device::ForwardParams& p, const AttentionSpec& spec, int threads) {
  const KernelConfig config{.block_m = 384, .block_n = 128, .num_stages = 1, .num_warps = 1};
  for (const char* name : {"x86-64-v3", "x86-64-v4+amx"}) {
    const Partition cut = partition(p, spec, Target::parse(name), config, threads);
    FUZZ_CHECK(cut.tile_rows > 0 && cut.tile_rows <= config.block_m && cut.key_parts >= 1);
    const std::int64_t rows = std::int64_t{p.seqlen_q} * cut.packed_heads;
    FUZZ_CHECK(cut.tiles ==
               std::int64_t{p.batch} * (p.num_heads_q / cut.packed_heads) * ((rows - 1) / cut.tile_rows + 1));
    FUZZ_CHECK(cut.pieces >= 1 && cut.pieces <= cut.tiles * cut.key_parts && cut.packed_blocks >= 1);
    FUZZ_CHECK(cut.key_parts == 1 || cut.tiles * cut.key_parts <= most_items_in_parts(threads));
  }
}

void check_plan(const device::ForwardParams& params, const AttentionSpec& spec) {
  const KernelConfig config{.block_m = 128, .block_n = 64};
  fuzz::accepted([&] {
    StepLaunch step;
    auto& p = step.make_params<device::Sm80ForwardParams>(params);
    const Grid grid = cuda::plan_tiles(spec, config, 132, p);
    FUZZ_CHECK(grid.x >= 1 && grid.x <= most_int && p.section_heads >= 1);
    FUZZ_CHECK(std::int64_t{p.section_heads} <= std::int64_t{p.batch} * p.num_heads_q);
  });
}

void check_launch(Numbers& numbers) {
  alignas(64) static char memory[64];
  AttentionSpec spec{.dtype = DType::bf16, .head_dim = 64, .head_dim_v = 64, .lse = false};
  const std::int64_t kind = numbers.any();
  if (kind % 2) spec.mask = {SlidingWindowMask{.sinks = true}};
  AttentionArgs args;
  Tensor q{.data = memory, .dtype = spec.dtype, .device = {}, .rank = 4};
  q.shape = {numbers.any(), numbers.any(), numbers.any(), 64};
  q.strides = {64, 64, 64, 1};
  Tensor k = q;
  k.shape[1] = numbers.any();
  k.shape[2] = kind % 3 ? numbers.any() : q.shape[2];
  args.q = q;
  // The output is row-major and elsewhere: most others would overlap an input.
  args.o = q;
  args.o->data =
      reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(memory) + (std::uintptr_t{1} << 46));
  std::uint64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    args.o->strides[i] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(q.shape[i]);
  }
  args.k = args.v = k;
  if (kind % 2) {
    args.window_left = numbers.size();
    args.window_right = numbers.size();
    args.num_sinks = numbers.size();
  }
  fuzz::accepted([&] {
    const CheckedArguments checked = check_arguments(spec, {}, args);
    const device::ForwardParams& p = checked.params;
    FUZZ_CHECK(p.seqlen_q <= longest_sequence && p.seqlen_k <= longest_sequence);
    if (checked.empty) return;
    check_partition(p, spec, std::max(1, numbers.size()));
    check_plan(p, spec);
  });
}

// A kernel for a target, without its machine code.
struct KernelOfTarget {
  Target target;
  KernelConfig config;
  std::vector<Step> steps;
  PlannedKernel planned(const AttentionSpec& spec, int threads) const {
    return {.spec = spec, .target = target, .config = config, .parallelism = threads, .steps = steps};
  }
};
// The kernels of a spec, which is the same in every call with its operation.
const std::vector<KernelOfTarget>& kernels_of(const AttentionSpec& spec, const Shape& shape) {
  static std::map<Operation, std::vector<KernelOfTarget>> made;
  std::vector<KernelOfTarget>& kernels = made[spec.op];
  if (kernels.empty())
    for (const char* name : {"x86-64-v4", "sm_80", "sm_90a"}) {
      const Target target = Target::parse(name);
      const KernelConfig config = heuristic_config(spec, target, shape);
      kernels.push_back({target, config, render(spec, target, config).steps});
    }
  return kernels;
}

// A decode without lengths and pages.
void check_decode(Numbers& numbers) {
  alignas(256) static char memory[256];
  static const AttentionSpec spec{
      .op = Operation::decode, .dtype = DType::bf16, .head_dim = 64, .head_dim_v = 64, .lse = false};
  AttentionArgs args;
  Tensor q{.data = memory, .dtype = spec.dtype, .device = {}, .rank = 4};
  q.shape = {numbers.any(), numbers.any(), numbers.any(), 64};
  q.strides = {64, 64, 64, 1};
  Tensor k = q;
  k.shape[1] = numbers.any();
  k.shape[2] = numbers.any();
  args.q = q;
  args.o = q;
  args.o->data =
      reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(memory) + (std::uintptr_t{1} << 46));
  std::uint64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    args.o->strides[i] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(q.shape[i]);
  }
  args.k = args.v = k;
  const int threads = std::clamp(numbers.size(), 1, max_num_threads);
  args.workspace = Tensor{.data = memory, .dtype = DType::int32, .device = {}, .rank = 1};
  args.workspace->shape[0] = most_int;
  args.workspace->strides[0] = 1;
  for (const KernelOfTarget& kernel : kernels_of(spec, {1, 1, 1000, 4, 1})) {
    const Target& target = kernel.target;
    fuzz::accepted([&] {
      AttentionArgs given = args;
      if (!target.is_cuda()) given.workspace.reset();
      Launch launch;
      runtime_of(spec.op).plan(kernel.planned(spec, threads), given, launch);
      for (std::size_t i = 0; i < launch.size(); ++i) {
        if (target.is_cuda()) {
          // Without parts of tiles there is nothing to merge.
          FUZZ_CHECK((launch[i].grid.x >= 1 || i > 0) && launch[i].grid.y >= 1);
          continue;
        }
        const Items& items = launch[i].items;
        FUZZ_CHECK(items.count >= 1 && items.pieces >= 1 && items.pieces <= items.count);
        FUZZ_CHECK(items.lent_bytes <= std::size_t{1} << 32);
      }
    });
  }
}

// A backward, and the workspace of a shape.
void check_backward(Numbers& numbers) {
  alignas(256) static char memory[256];
  static const AttentionSpec spec{
      .op = Operation::backward, .dtype = DType::bf16, .head_dim = 64, .head_dim_v = 64};
  AttentionArgs args;
  const std::int64_t batch = numbers.any(), rows = numbers.any(), keys = numbers.any(),
                     heads_q = numbers.any(), heads_kv = numbers.any();
  int next = 0;
  // Row-major. Outputs lie elsewhere: most others would overlap an input.
  const auto tensor = [&](std::initializer_list<std::int64_t> shape, DType dtype, bool elsewhere) {
    Tensor t{.data = memory, .dtype = dtype, .device = {}, .rank = static_cast<int>(shape.size())};
    if (elsewhere)
      t.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(memory) +
                                       (std::uintptr_t{1} << (46 + next++)));
    std::copy(shape.begin(), shape.end(), t.shape.begin());
    std::uint64_t stride = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      t.strides[i] = static_cast<std::int64_t>(stride);
      stride *= static_cast<std::uint64_t>(t.shape[i]);
    }
    return t;
  };
  args.q = args.o = args.d_o = tensor({batch, rows, heads_q, 64}, DType::bf16, false);
  args.k = args.v = tensor({batch, keys, heads_kv, 64}, DType::bf16, false);
  args.lse = args.dlse = tensor({batch, heads_q, rows}, DType::fp32, false);
  args.dq = tensor({batch, rows, heads_q, 64}, DType::bf16, true);
  args.dk = tensor({batch, keys, heads_kv, 64}, DType::bf16, true);
  args.dv = tensor({batch, keys, heads_kv, 64}, DType::bf16, true);
  args.workspace = tensor({most_int}, DType::int32, false);
  const int threads = std::clamp(numbers.size(), 1, max_num_threads);
  const Shape shape{numbers.size(), numbers.size(), numbers.size(), numbers.size(), numbers.size()};
  for (const KernelOfTarget& of_target : kernels_of(spec, {1, 1000, 1000, 4, 1})) {
    const Target& target = of_target.target;
    const PlannedKernel kernel = of_target.planned(spec, threads);
    // The driver describes the tensors of a kernel that copies tiles.
    const bool without_driver =
        !target.is_cuda() || !CudaBackwardKernels(spec, of_target.config, target).by_wgmma;
    fuzz::accepted([&] {
      if (!without_driver) return;
      Launch launch;
      runtime_of(spec.op).plan(kernel, args, launch);
      for (std::size_t i = 0; i < launch.size(); ++i) {
        if (target.is_cuda()) {
          FUZZ_CHECK(launch[i].grid.x >= 1 && launch[i].grid.y >= 1);
        } else {
          const Items& items = launch[i].items;
          FUZZ_CHECK(items.count >= 1 && items.pieces >= 1 && items.pieces <= items.count);
        }
      }
    });
    // A workspace that serves a shape serves every smaller one.
    if (shape.batch < 1 || shape.seqlen_q < 1 || shape.seqlen_k < 1 || shape.num_heads_kv < 1 ||
        shape.num_heads_q % shape.num_heads_kv != 0 || shape.num_heads_q < 1)
      continue;
    fuzz::accepted([&] {
      const std::size_t bytes = runtime_of(spec.op).workspace_bytes(kernel, shape);
      for (int Shape::* const size : {&Shape::batch, &Shape::seqlen_q, &Shape::seqlen_k}) {
        Shape smaller = shape;
        smaller.*size = std::max(1, smaller.*size / 3);
        FUZZ_CHECK(runtime_of(spec.op).workspace_bytes(kernel, smaller) <= bytes);
      }
    });
  }
}

// Pages of any size and number.
void check_pages_of(Numbers& numbers) {
  alignas(64) static char memory[64];
  const AttentionSpec spec{
      .dtype = DType::bf16, .head_dim = 64, .head_dim_v = 64, .lse = false, .paged = true};
  AttentionArgs args;
  const std::int64_t batch = numbers.any(), heads = numbers.any();
  const auto tensor = [&](std::int64_t first, std::int64_t second) {
    Tensor t{.data = memory, .dtype = spec.dtype, .device = {}, .rank = 4};
    t.shape = {first, second, heads, 64};
    t.strides = {64, 64, 64, 1};
    return t;
  };
  args.q = args.o = tensor(batch, 1);
  args.o->data =
      reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(memory) + (std::uintptr_t{1} << 46));
  args.o->strides = {64 * std::max<std::int64_t>(heads & 0xffff, 1), 64, 64, 1};
  args.k = args.v = tensor(numbers.any(), numbers.any());
  args.page_table = Tensor{.data = memory, .dtype = DType::int32, .device = {}, .rank = 2};
  args.page_table->shape = {batch, numbers.any()};
  args.page_table->strides = {numbers.any(), 1};
  fuzz::accepted([&] {
    device::ProblemParams p{};
    const CheckedAttention checked = check_attention(spec, {}, args, longest_sequence, p);
    const device::PageTable& pages = checked.pages.table;
    FUZZ_CHECK(p.seqlen_k >= 0 && p.seqlen_k <= longest_sequence && p.seqlen_k == checked.pages.longest);
    FUZZ_CHECK(pages.page_size >= 1 && pages.num_pages >= 0 && (pages.num_pages > 0 || p.seqlen_k == 0));
    for (const int key : {0, pages.page_size - 1, p.seqlen_k / 2, p.seqlen_k})
      FUZZ_CHECK(pages.page_of(key) == key / pages.page_size);
  });
}

void check_tables(Numbers& numbers) {
  static std::int32_t words[64];
  constexpr std::size_t enough = 1 << 10;  // few enough to build the tables
  const BlockSparseMask mask{.block_m = 16, .block_n = 32, .per_head = numbers.any() % 2 == 0};
  const BlockListShape shape{numbers.size(), numbers.size(), numbers.size(), numbers.size()};
  const auto some = [&] { return static_cast<std::size_t>(std::max(0, numbers.size())); };
  const std::span<const std::int32_t> many(words, some());
  fuzz::accepted([&] {
    const std::int64_t lists = count_block_lists(mask, shape);
    FUZZ_CHECK(lists >= 0 && lists <= most_int);
    if (std::int64_t{shape.batch} * shape.heads + lists < std::int64_t{enough} &&
        many.size() <= std::size(words))
      block_sparse_from_csr(mask, shape, many, many);
  });
  const int batch = numbers.size();
  constexpr std::size_t too_many = 1 << 19;  // tokens of a tree that is refused unread
  if (many.size() > std::size(words) && many.size() / static_cast<std::size_t>(std::max(batch, 1)) < too_many)
    return;
  fuzz::accepted([&] { tree_from_parents(many, batch); });
}

void check_dropout(const Shape& shape) {
  fuzz::accepted([&] {
    const std::size_t size = dropout_mask_size(shape);
    FUZZ_CHECK(shape.batch == 0 || shape.num_heads_q == 0 || shape.seqlen_q == 0 || shape.seqlen_k == 0 ||
               size > 0);
    if (size == 0) dropout_mask({.p = 0.5}, shape, {});
  });
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Numbers numbers(fuzz::text_of(data, size));
  const Shape shape{numbers.size(), numbers.size(), numbers.size(), numbers.size(), numbers.size()};
  check_bucket(shape);
  check_dropout(shape);
  check_launch(numbers);
  check_decode(numbers);
  check_pages_of(numbers);
  check_tables(numbers);
  check_backward(numbers);
  return 0;
}
