// flashjit audit: the bytes that a launch moves, beside the least possible. On a CPU they come from a model
// of its caches.
#include "tools/command/audit.hpp"

#include <unistd.h>

#include <iostream>
#include <map>
#include <memory>
#include <utility>

#include "codegen/families/cpu_products.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/cpu/partition.hpp"
#include "tools/command/memory_traffic.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/command/workload.hpp"
#include "tools/verify/mask.hpp"

namespace flashjit::command {
namespace {

// Which blocks of keys rows of a head see: counted by the definition of the masks, once for heads that see
// the same.
class SeenBlocks {
 public:
  SeenBlocks(const AttentionSpec& spec, const AttentionArgs& args, int block_n)
      : spec_(spec), sees_(spec, args), sequences_(verify::sequences_of(spec, args)), block_n_(block_n) {
    for (const Mask& mask : spec.mask) {
      const auto* const lists = std::get_if<BlockSparseMask>(&mask);
      by_head_ |= std::holds_alternative<FormulaMask>(mask) || (lists && lists->per_head);
    }
  }
  bool operator()(int batch, int head, int first, int rows, int block) {
    if (spec_.mask.empty()) return true;
    const std::vector<std::vector<int>>& of_blocks = counts(batch, by_head_ ? head : 0);
    const std::vector<int>& count = of_blocks[static_cast<std::size_t>(block)];
    return count[static_cast<std::size_t>(first + rows)] > count[static_cast<std::size_t>(first)];
  }

 private:
  // For each block how many of the first rows see it.
  const std::vector<std::vector<int>>& counts(int batch, int head) {
    const auto [found, is_new] = counts_.try_emplace({batch, head});
    if (!is_new) return found->second;
    const verify::Sequence& sequence = sequences_[static_cast<std::size_t>(batch)];
    const int blocks = (sequence.seqlen_k + block_n_ - 1) / block_n_;
    found->second.assign(static_cast<std::size_t>(blocks), {0});
    std::vector<char> seen(static_cast<std::size_t>(sequence.seqlen_k));
    for (int row = 0; row < sequence.rows; ++row) {
      sees_.row(sequence, head, row, 0, seen);
      for (int block = 0; block < blocks; ++block) {
        const auto begin = seen.begin() + std::ptrdiff_t{block} * block_n_;
        const auto end = seen.end() - begin < block_n_ ? seen.end() : begin + block_n_;
        std::vector<int>& count = found->second[static_cast<std::size_t>(block)];
        count.push_back(count.back() + (std::find(begin, end, 1) != end));
      }
    }
    return found->second;
  }

  const AttentionSpec& spec_;
  const verify::SeenKeys sees_;
  const std::vector<verify::Sequence> sequences_;
  const int block_n_;
  bool by_head_ = false;
  std::map<std::pair<int, int>, std::vector<std::vector<int>>> counts_;
};

// The caches of this machine that a thread has behind its first one, as the system says.
std::vector<std::size_t> caches_here() {
  std::vector<std::size_t> sizes;
  for (const int name : {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE})
    if (const long bytes = ::sysconf(name); bytes > 0) sizes.push_back(static_cast<std::size_t>(bytes));
  if (sizes.empty()) sizes.push_back(std::size_t{1} << 20);
  return sizes;
}

void require_modelled(const AttentionSpec& spec, const Target& target) {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::unsupported, "audit has no model of " + what);
  };
  if (target.is_cuda())
    refuse("target " + target.str() +
           "; --device cuda:0 counts on a GPU, and x86-64-v3, x86-64-v4, x86-64-v4+bf16 and x86-64-v4+amx "
           "have a model");
  const OperationInfo& op = info_of(spec.op);
  if (!op.attends || op.few_rows)
    refuse(std::string("op ") + op.name + "; op forward and backward would work");
  if (spec.varlen) refuse("\"varlen\": true; false would work");
  if (spec.paged) refuse("\"paged\": true; false would work");
}

ForwardWalk walk_of(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                    const Shape& shape) {
  device::ForwardParams params{};
  params.batch = shape.batch;
  params.num_heads_q = shape.num_heads_q, params.num_heads_kv = shape.num_heads_kv;
  params.seqlen_q = shape.seqlen_q, params.seqlen_k = shape.seqlen_k;
  const Partition cut = partition(params, spec, target, config, 1);
  const int packed_block = cpu_packed_block(spec, target, config);
  const std::int64_t keys = std::int64_t{shape.seqlen_k} * (spec.head_dim + spec.head_dim_v) *
                            static_cast<std::int64_t>(size_of(spec.dtype));
  const int lanes = target.vector_bytes() / int{sizeof(float)};
  const bool few = shape.seqlen_q * cut.packed_heads <= device::cpu_few_rows(lanes, keys);
  return {.tile_rows = cut.tile_rows,
          .packed_heads = cut.packed_heads,
          .block_n = config.block_n,
          .packed_blocks = few ? 0 : cut.packed_blocks,
          .packed_block = packed_block,
          .scratch = cpu_scratch(spec, target, config) - (few ? 0 : packed_block)};
}

BackwardWalk backward_walk_of(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const int lanes = target.vector_bytes() / int{sizeof(float)};
  return {.unit_rows = multiplies_bf16(spec, target) ? device::bf16_backward_unit : 3 * lanes,
          .block_n = config.block_n,
          .scratch = cpu_backward_scratch(spec, target, config),
          .dq_row = std::int64_t{sizeof(float)} * device::cpu_backward_row(spec.head_dim)};
}

int audit(const AuditOptions& options) {
  const AttentionSpec spec = read_spec(options.spec, options.op);
  const Target target = Target::parse(options.target.empty() ? "native" : options.target);
  require_modelled(spec, target);
  options.masks.check({spec});
  const Shape shape = options.shape.shape(spec);
  check_shape(spec, shape);
  if (shape.batch == 0 || shape.seqlen_q == 0 || shape.seqlen_k == 0 || shape.num_heads_q == 0)
    throw Error(ErrorCode::invalid_argument,
                "a launch of this shape moves nothing; sizes of at least 1 would work");
  const KernelConfig config = heuristic_config(spec, target, bucket(shape));
  const bool backward = info_of(spec.op).writes_gradients;
  const ForwardWalk forward_walk = backward ? ForwardWalk{} : walk_of(spec, target, config, shape);
  const BackwardWalk backward_walk = backward ? backward_walk_of(spec, target, config) : BackwardWalk{};
  std::vector<std::int64_t> capacities;
  for (const std::size_t bytes : options.caches.empty() ? caches_here() : options.caches)
    capacities.push_back(static_cast<std::int64_t>(bytes));
  constexpr double most_lines = 1e9;  // some ten seconds
  const double lines =
      backward ? backward_walk.lines_used(spec, shape) : forward_walk.lines_used(spec, shape);
  if (lines * static_cast<double>(capacities.size()) > most_lines)
    throw Error(ErrorCode::invalid_argument,
                "the model would take minutes for this shape; shorter sequences or fewer heads would work");

  const Progress progress("following the lines of caches");
  const Workload work = Workload::generate(spec, shape, 1, options.masks);
  SeenBlocks sees(spec, work.host_args(), config.block_n);
  std::vector<MovedBytes> traffic =
      backward ? backward_traffic(spec, shape, backward_walk, std::ref(sees), capacities)
               : forward_traffic(spec, shape, forward_walk, std::ref(sees), capacities);
  const MovedBytes least = traffic.back();
  traffic.pop_back();
  const auto all = [](const MovedBytes& t) { return static_cast<double>(t.read + t.written); };
  const double standard = bytes_of_standard(work, all(least));
  const int rows = backward ? backward_walk.unit_rows : forward_walk.tile_rows;
  const std::int64_t scratch =
      backward ? backward_walk.scratch
               : forward_walk.scratch + forward_walk.packed_blocks * forward_walk.packed_block;

  if (options.json) {
    Json caches = Json::array();
    for (std::size_t i = 0; i < traffic.size(); ++i)
      caches.push_back({{"bytes", capacities[i]},
                        {"read", traffic[i].read},
                        {"written", traffic[i].written},
                        {"of_least", all(traffic[i]) / all(least)},
                        {"n2_d2_over_m", order_of_bytes(work, static_cast<double>(capacities[i]))}});
    print_json({{"spec", Json::parse(spec.to_json())},
                {"target", target.str()},
                {"config", config_json(config)},
                {"shape", shape_json(shape)},
                {"tile_rows", rows},
                {"scratch", scratch},
                {"least", {{"read", least.read}, {"written", least.written}}},
                {"standard_attention", standard},
                {"caches", std::move(caches)}});
    return 0;
  }
  const auto mb = [](double bytes) { return number(bytes / 1e6); };
  std::cout << spec.to_json() << "\n"
            << target.str() << ", tiles of " << rows << " rows, blocks of " << config.block_n
            << " keys, one thread, scratch of " << mb(static_cast<double>(scratch)) << " MB\n\n";
  verify::Table table({"cache", "MB read", "MB written", "of least", "N^2 d^2 / M, MB"});
  for (std::size_t i = 0; i < traffic.size(); ++i)
    table.add({mb(static_cast<double>(capacities[i])) + " MB", mb(static_cast<double>(traffic[i].read)),
               mb(static_cast<double>(traffic[i].written)), number(all(traffic[i]) / all(least)),
               mb(order_of_bytes(work, static_cast<double>(capacities[i])))});
  table.add({"least possible", mb(static_cast<double>(least.read)), mb(static_cast<double>(least.written)),
             "1", "-"});
  table.add({"standard attention", "", mb(standard) + " in all", number(standard / all(least)), "-"});
  std::cout << shown(table);
  return 0;
}

}  // namespace

double order_of_bytes(const Workload& work, double capacity) {
  const AttentionSpec& spec = work.spec();
  const auto element = static_cast<double>(size_of(spec.dtype));
  return verify::kept_pairs(spec, work.host_args()) * spec.head_dim * spec.head_dim_v * element * element /
         capacity;
}

double bytes_of_standard(const Workload& work, double least) {
  const AttentionSpec& spec = work.spec();
  const Shape& shape = work.shape();
  // A forward writes and reads scores and weights. A backward reads weights for dV, writes the gradients of
  // weights, reads both, writes those of scores, and reads these for dQ and for dK.
  const double matrices = info_of(spec.op).writes_gradients ? 7 : 4;
  return least + matrices * static_cast<double>(size_of(spec.dtype)) * shape.batch * shape.num_heads_q *
                     static_cast<double>(shape.seqlen_q) * shape.seqlen_k;
}

Verb add_audit(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("audit", "Count the bytes that a launch moves");
  const auto options = std::make_shared<AuditOptions>();
  add_spec(app, options->spec);
  add_op(app, options->op);
  app.add_option("--device", options->device,
                 "cuda:0: count on this GPU [a model of a CPU's caches counts, which needs no device]");
  app.add_option(
      "--target", options->target,
      "x86-64-v3, x86-64-v4, x86-64-v4+bf16, x86-64-v4+amx [this CPU's]; on a GPU sm_90a, sm_90 [its own]");
  app.add_option("--cache", options->caches,
                 "Bytes of a cache of a CPU; several, or with commas [this machine's second and third level]")
      .delimiter(',');
  options->shape.add(app);
  options->masks.add(app);
  app.add_option("--ncu", options->ncu, "Where Nsight Compute's ncu is [PATH, CUDA's toolkit]")
      .group("On a GPU");
  app.add_option("--launches", options->launches,
                 "Count nothing, but launch so often between cuProfilerStart and cuProfilerStop, for another "
                 "profiler")
      .at_least(1)
      .group("On a GPU");
  add_output(app, options->json);
  app.footer(
      "The least possible reads the inputs and writes the outputs once. N^2 d^2 / M is the order of all "
      "exact\n"
      "attention with a cache of M elements (Dao et al. 2022). Standard attention also writes and reads\n"
      "matrices of N^2 elements: 4 in a forward, 7 in a backward.\n\n"
      "On a CPU, forward and backward: a model counts the lines of 64 bytes that one thread moves between a\n"
      "cache and what lies behind it: the tensors, and the thread's scratch, where the cache replaces the\n"
      "line that was used longest ago. On a GPU ncu counts the bytes of the device's memory in four "
      "launches,\n"
      "one after the other. What the last one leaves in the second-level cache is not counted as written.\n\n"
      "Examples:\n"
      "  flashjit audit tools/examples/causal_bf16.json --seqlen-q 2048\n"
      "  flashjit audit spec.json --op backward --target x86-64-v4 --cache 2000000,32000000 --json\n"
      "  flashjit audit spec.json --device cuda:0 --seqlen-q 8192 --heads-q 16\n");
  return {app, [options] {
            const bool on_device = !options->device.empty() && options->device != "cpu";
            if (!on_device && (options->launches > 0 || !options->ncu.empty()))
              throw Error(ErrorCode::invalid_argument,
                          "--launches and --ncu count on a GPU; --device cuda:0 would work");
            if (on_device && !options->caches.empty())
              throw Error(ErrorCode::invalid_argument, "--cache is of the model of CPUs, not of a GPU");
            return on_device ? audit_on_device(*options) : audit(*options);
          }};
}

}  // namespace flashjit::command
