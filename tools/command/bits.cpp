// flashjit bits: launches a problem again in other ways, whole and in parts, and says of how many rows the
// bits have changed.
#include <algorithm>
#include <cstring>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "templates/shared/forward_sm90a_params.h"
#include "tools/command/devices.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/command/workload.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

struct BitsOptions {
  std::string spec, op;
  DeviceOptions device;
  ShapeOptions shape;
  MaskOptions masks;
  std::uint64_t seed = 1;
  int configs = 8, random = 0, decoded = 0;
  bool json = false;
};

// The part of the problem that a launch has.
struct Part {
  int entry = -1, entries = 1;  // only so many batch entries from this one on; negative: all
  // Only rows from this one of the first entry to the end of those of the last one, which has keys up to its
  // last row's; end 0: all.
  int row = 0, end = 0;
  int head_kv = -1;       // only the query heads of this key/value head; negative: all
  bool workspace = true;  // whether a kernel that takes one gets it
  bool cut() const { return end > 0; }
};

// The rows and keys of a batch entry that a part has.
struct PartOfEntry {
  int row, end, keys;
  PartOfEntry(const Part& part, const verify::Sequence& s)
      : row(s.batch == part.entry ? part.row : 0), end(s.rows), keys(s.seqlen_k) {
    if (!part.cut() || s.batch != part.entry + part.entries - 1) return;
    end = part.end;
    keys = s.seqlen_k - s.seqlen_q + end;
  }
};

struct Outcome {
  std::string what;
  std::int64_t rows = 0, changed = 0;  // query rows and, of a backward's gradients, keys: of each head
};

Tensor narrowed(Tensor t, int dim, std::int64_t begin, std::int64_t size) {
  t.data =
      static_cast<std::byte*>(t.data) + begin * t.strides[dim] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[dim] = size;
  return t;
}

class Problem {
 public:
  Problem(const AttentionSpec& spec, Workload work) : spec_(spec), work_(std::move(work)) {}

  Workload& work() { return work_; }
  verify::Layout layout() const { return {spec_, work_.host_args()}; }

  void launch(Engine& engine, const AttentionSpec& spec, const Part& part = {}) {
    const verify::Layout whole = layout();
    Shape shape = work_.shape();
    if (part.entry >= 0) {
      shape.batch = part.entries;
      if (part.cut() && part.entries == 1) shape.seqlen_q = part.end - part.row;
    }
    if (part.head_kv >= 0) shape.num_heads_q /= std::exchange(shape.num_heads_kv, 1);
    const Kernel& kernel = engine.get(spec, shape);
    work_.poison();
    AttentionArgs args = work_.args_for(kernel);
    if (!part.workspace) args.workspace.reset();
    numbers_.clear();
    on_device_.clear();
    if (part.entry >= 0) take_entries(whole, part, args);
    if (part.head_kv >= 0) take_heads(whole, part.head_kv, args);
    kernel.launch(args);
    work_.fetch();
  }

  // The outputs of the last launch are those that others are compared with.
  void remember() {
    for (const TensorMember member : outputs())
      if (const auto& tensor = work_.host_args().*member) base_[member] = bytes_of(*tensor);
  }
  void take_base_of(const Problem& other) { base_ = other.base_; }

  Outcome compare(std::string what, const Part& part = {}) const {
    Outcome outcome{.what = std::move(what)};
    const AttentionArgs& args = work_.host_args();
    const verify::Layout whole = layout();
    const int group = whole.heads_q / whole.heads_kv;
    const auto same = [&](TensorMember member, std::int64_t index, int count) {
      const auto& tensor = args.*member;
      if (!tensor) return true;
      const std::size_t size = size_of(tensor->dtype), at = static_cast<std::size_t>(index) * size;
      return std::memcmp(static_cast<const std::byte*>(tensor->data) + at, base_.at(member).data() + at,
                         static_cast<std::size_t>(count) * size) == 0;
    };
    const auto count = [&](bool equal) { ++outcome.rows, outcome.changed += !equal; };
    const bool gradients = info_of(spec_.op).writes_gradients;
    for (const verify::Sequence& s : whole.sequences) {
      if (part.entry >= 0 && (s.batch < part.entry || s.batch >= part.entry + part.entries)) continue;
      const PartOfEntry own(part, s);
      for (int head = 0; head < whole.heads_q; ++head) {
        if (part.head_kv >= 0 && head / group != part.head_kv) continue;
        const int end = std::min(own.end, s.seqlen_q);
        for (std::int64_t row = s.q_begin + own.row; row < s.q_begin + end; ++row)
          if (gradients)
            count(same(&AttentionArgs::dq, whole.index(*args.dq, s.batch, row, head), whole.head_dim));
          else
            count(
                same(&AttentionArgs::o, whole.index(*args.o, s.batch, row, head), whole.head_dim_v) &&
                (!args.lse || same(&AttentionArgs::lse, whole.lse_index(*args.lse, s.batch, row, head), 1)));
        if (!gradients || part.cut() || head % group != 0) continue;
        for (std::int64_t key = 0; key < s.seqlen_k; ++key)
          count(same(&AttentionArgs::dk, whole.key_index(*args.dk, s, key, head), whole.head_dim) &&
                same(&AttentionArgs::dv, whole.key_index(*args.dv, s, key, head), whole.head_dim_v));
      }
    }
    return outcome;
  }

 private:
  using Args = AttentionArgs;
  std::vector<TensorMember> outputs() const {
    if (info_of(spec_.op).writes_gradients) return {&Args::dq, &Args::dk, &Args::dv};
    return {&Args::o, &Args::lse};
  }
  static std::vector<std::byte> bytes_of(const Tensor& t) {
    std::int64_t elements = 1;
    for (int i = 0; i < t.rank; ++i) elements *= t.shape[i];
    const auto* const data = static_cast<const std::byte*>(t.data);
    return {data, data + elements * static_cast<std::int64_t>(size_of(t.dtype))};
  }

  // Several entries are taken of packed sequences alone.
  void take_entries(const verify::Layout& whole, const Part& part, AttentionArgs& args) {
    const bool packed = spec_.varlen;
    const KeyLayout layout = key_layout(spec_);
    const auto entry = [&](int i) -> const verify::Sequence& {
      return whole.sequences[static_cast<std::size_t>(part.entry + i)];
    };
    std::vector<std::int32_t> rows_before = {0}, keys_before = {0}, keys;
    int longest_q = 0, longest_k = 0;
    for (int i = 0; i < part.entries; ++i) {
      const PartOfEntry own(part, entry(i));
      rows_before.push_back(rows_before.back() + own.end - own.row);
      keys_before.push_back(keys_before.back() + own.keys);
      keys.push_back(own.keys);
      longest_q = std::max(longest_q, own.end - own.row);
      longest_k = std::max(longest_k, own.keys);
    }
    const auto narrow = [&](TensorMember member, int dim, std::int64_t begin, std::int64_t size) {
      if (auto& tensor = args.*member) tensor = narrowed(*tensor, dim, begin, size);
    };
    const int first = part.entry, count = part.entries;
    for (const TensorMember member : {&Args::q, &Args::o, &Args::d_o, &Args::dq}) {
      if (!packed) narrow(member, 0, first, count);
      narrow(member, packed ? 0 : 1, entry(0).q_begin + part.row, rows_before.back());
    }
    for (const TensorMember member : {&Args::lse, &Args::dlse}) {
      if (!packed) narrow(member, 0, first, count);
      narrow(member, packed ? 1 : 2, entry(0).q_begin + part.row, rows_before.back());
    }
    if (layout != KeyLayout::paged)
      for (const TensorMember member : {&Args::k, &Args::v, &Args::dk, &Args::dv}) {
        if (layout == KeyLayout::batched) narrow(member, 0, first, count);
        if (!counts_keys(spec_))
          narrow(member, layout == KeyLayout::packed ? 0 : 1, entry(0).k_begin, keys_before.back());
      }
    for (const TensorMember member :
         {&Args::page_table, &Args::seqlens_q, &Args::seqlens_k, &Args::row_offset, &Args::key_offset})
      narrow(member, 0, first, count);
    if (counts_keys(spec_)) args.seqlens_k = numbers(keys);
    if (args.cu_seqlens_q) args.cu_seqlens_q = numbers(rows_before), args.max_seqlen_q = longest_q;
    if (args.cu_seqlens_k) args.cu_seqlens_k = numbers(keys_before), args.max_seqlen_k = longest_k;
  }
  void take_heads(const verify::Layout& whole, int head_kv, AttentionArgs& args) const {
    const int group = whole.heads_q / whole.heads_kv, first = head_kv * group;
    const auto narrow = [&](TensorMember member, int dim, int begin, int size) {
      if (auto& tensor = args.*member)
        tensor = narrowed(*tensor, dim < 0 ? tensor->rank + dim : dim, begin, size);
    };
    for (const TensorMember member : {&Args::q, &Args::o, &Args::d_o, &Args::dq})
      narrow(member, -2, first, group);
    for (const TensorMember member : {&Args::lse, &Args::dlse}) narrow(member, -2, first, group);
    for (const TensorMember member : {&Args::k, &Args::v, &Args::dk, &Args::dv})
      narrow(member, -2, head_kv, 1);
    narrow(&Args::sink_logits, 0, first, group);
    if (spec_.kv_scale.value_or(KvScale::tensor) != KvScale::tensor)
      for (const TensorMember member : {&Args::k_scale, &Args::v_scale}) narrow(member, -1, head_kv, 1);
  }
  // A tensor of these numbers on the device.
  Tensor numbers(const std::vector<std::int32_t>& values) {
    HostTensor& made =
        numbers_.emplace_back(DType::int32, std::vector{static_cast<std::int64_t>(values.size())});
    std::memcpy(made.view().data, values.data(), made.bytes());
    Tensor view = made.view();
    if (!work_.context()) return view;
    cuda::DeviceBuffer& on_device = on_device_.emplace_back(*work_.context(), made.bytes());
    on_device.copy_from(view.data, made.bytes());
    view.data = on_device.data();
    view.device = {Device::Kind::cuda, work_.context()->index()};
    return view;
  }

  const AttentionSpec& spec_;
  Workload work_;
  std::map<TensorMember, std::vector<std::byte>,
           decltype([](TensorMember a, TensorMember b) { return &argument_of(a) < &argument_of(b); })>
      base_;
  std::vector<HostTensor> numbers_;
  std::vector<cuda::DeviceBuffer> on_device_;
};

// Why launches of parts of a spec's problem are other problems; empty if they are not.
std::string not_in_parts(const AttentionSpec& spec) {
  const auto by_lengths = [](const Mask& mask) {
    return std::holds_alternative<CausalMask>(mask) || std::holds_alternative<SlidingWindowMask>(mask) ||
           std::holds_alternative<PaddingMask>(mask) || std::holds_alternative<FormulaMask>(mask);
  };
  if (spec.dropout) return "dropout goes by batch entry, head and row";
  if (!spec.tables.empty()) return "tables of formulas belong to the whole problem";
  if (spec.append) return "a launch appends";
  return std::ranges::all_of(spec.mask, by_lengths) ? "" : "tables of masks belong to the whole problem";
}
bool reads_any(const AttentionSpec& spec, std::initializer_list<FormulaName> names) {
  return std::any_of(names.begin(), names.end(), [&](FormulaName name) { return formulas_read(spec, name); });
}
// Whether rows against the keys up to the last one's are the same problem.
bool takes_cuts(const AttentionSpec& spec) {
  const auto* causal = find_mask<CausalMask>(spec.mask);
  const auto* window = find_mask<SlidingWindowMask>(spec.mask);
  return causal && causal->align == CausalAlign::bottom_right &&
         (!window || window->align == CausalAlign::bottom_right) && !find_mask<PaddingMask>(spec.mask) &&
         !spec.offsets && !reads_any(spec, {FormulaName::row, FormulaName::seqlen_q, FormulaName::seqlen_k});
}

std::vector<std::pair<std::string, Part>> parts_of(const AttentionSpec& spec, const verify::Layout& whole) {
  std::vector<std::pair<std::string, Part>> parts;
  const auto add = [&](const Part& part, const std::string& what) { parts.emplace_back(what, part); };
  if (!reads_any(spec, {FormulaName::batch}))
    for (const verify::Sequence& s : whole.sequences) {
      const std::string entry = "batch entry " + std::to_string(s.batch);
      add({.entry = s.batch}, entry + " alone");
      if (!takes_cuts(spec) || s.batch > 0) continue;
      const int rows = s.seqlen_q, third = rows / 3;
      for (const auto& [row, end] : {std::pair{0, third}, {third, rows - 1}, {rows - 1, rows}})
        if (row < end && s.seqlen_k - rows + row >= 0)
          add({.entry = s.batch, .row = row, .end = end},
              entry + ", rows " + std::to_string(row) + " to " + std::to_string(end - 1));
    }
  if (!reads_any(spec, {FormulaName::head, FormulaName::head_kv}) && whole.heads_kv > 1)
    add({.head_kv = whole.heads_kv - 1}, "one key/value head");
  return parts;
}

// Launches of some of the packed sequences beside each other, the first and the last one cut at random. Each
// has neighbours of random lengths, and its keys in the pages of one of the problems.
Outcome among_random_neighbours(const BitsOptions& options, const std::vector<Problem*>& problems,
                                Engine& engine, const AttentionSpec& spec) {
  if (!spec.varlen || !takes_cuts(spec) || !not_in_parts(spec).empty() ||
      reads_any(spec, {FormulaName::batch}) || info_of(spec.op).writes_gradients)
    throw Error(
        ErrorCode::invalid_argument,
        "--random takes parts of packed prompts; a forward or a decode with \"varlen\": true and the mask "
        "causal, without dropout, offsets, tables and padding, would work");
  std::mt19937_64 random(options.seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); };
  const std::vector<verify::Sequence> sequences = problems.front()->layout().sequences;
  const int entries = static_cast<int>(sequences.size());
  Outcome all;
  int neighbours = 0, across_edges = 0, in_other_pages = 0;
  const Progress progress("random launches");
  for (int i = 0; i < options.random; ++i) {
    Part part{.entry = below(entries)};
    part.entries = 1 + below(std::min(8, entries - part.entry));
    const verify::Sequence &first = sequences[static_cast<std::size_t>(part.entry)],
                           &last = sequences[static_cast<std::size_t>(part.entry + part.entries - 1)];
    if (first.seqlen_q > 0 && below(2)) part.row = below(first.seqlen_q);
    const int begin = part.entries == 1 ? part.row : 0;
    if (last.seqlen_q > begin && below(2)) part.end = begin + 1 + below(last.seqlen_q - begin);
    // Cut rows may be more than keys: then the first ones see none.
    if (last.seqlen_k - last.seqlen_q + part.end < 0) part.end = 0;
    part.workspace = info_of(spec.op).few_rows || below(2);  // a decode needs one
    const auto pages = static_cast<std::size_t>(below(static_cast<int>(problems.size())));
    in_other_pages += pages > 0;
    Problem& problem = *problems[pages];
    problem.launch(engine, spec, part);
    const Outcome one = problem.compare("", part);
    all.rows += one.rows;
    all.changed += one.changed;
    neighbours += part.entries - 1;
    const auto parts_of = [&](int entry) {
      return sequences[static_cast<std::size_t>(entry)].seqlen_k / device::forward_part_keys;
    };
    for (int other = part.entry + 1; other < part.entry + part.entries; ++other)
      across_edges += parts_of(other) != parts_of(other - 1);
  }
  all.what = std::to_string(options.random) + " random launches: " + std::to_string(neighbours) +
             " neighbours, of them " + std::to_string(across_edges) + " across an edge of parts" +
             (spec.paged ? ", " + std::to_string(in_other_pages) + " launches in other pages" : "");
  return all;
}

// The same keys in larger pages, where a key's scale does not lie with it.
std::unique_ptr<Problem> in_other_pages(const AttentionSpec& spec, const BitsOptions& options,
                                        const Problem& problem, const Shape& shape, MaskOptions masks,
                                        int times) {
  const verify::Layout from = problem.layout();
  Shape larger = shape;
  larger.page_size = times * argument_table::page_size_of(shape);
  // A window's default goes by seqlen_k.
  masks.window_left = masks.window_left.value_or(shape.seqlen_k / 4);
  // Without lengths of its own a sequence would have all keys of its pages.
  masks.lengths_k.clear();
  for (const verify::Sequence& s : from.sequences) {
    masks.lengths_k.push_back(s.seqlen_k);
    larger.seqlen_k = std::max(larger.seqlen_k, s.seqlen_k);
  }
  auto other = std::make_unique<Problem>(spec, Workload::generate(spec, larger, options.seed, masks));
  const verify::Layout to = other->layout();
  for (std::size_t i = 0; i < from.sequences.size(); ++i) {
    const verify::Sequence &of = from.sequences[i], &its = to.sequences[i];
    for (int head = 0; head < from.heads_q; head += from.heads_q / from.heads_kv)
      for (int key = 0; key < of.seqlen_k; ++key)
        for (const auto& [a, b] : {std::pair{from.k, to.k}, {from.v, to.v}}) {
          const std::size_t size = size_of(a.dtype);
          std::memcpy(static_cast<std::byte*>(b.data) +
                          static_cast<std::size_t>(to.key_index(b, its, key, head)) * size,
                      static_cast<const std::byte*>(a.data) +
                          static_cast<std::size_t>(from.key_index(a, of, key, head)) * size,
                      static_cast<std::size_t>(a.shape[3]) * size);
        }
  }
  return other;
}

// The last rows of each sequence, as a decode has them: each by itself, against the keys up to its own.
Outcome row_by_row(int rows, Problem& problem, Engine& engine, const AttentionSpec& spec) {
  if (!takes_cuts(spec) || !not_in_parts(spec).empty() || reads_any(spec, {FormulaName::batch}) ||
      info_of(spec.op).writes_gradients)
    throw Error(ErrorCode::invalid_argument,
                "--decode launches rows of a prompt one by one; a forward with the mask causal, without "
                "dropout, offsets, tables and padding, would work");
  Outcome all{.what = "the last rows one by one"};
  const Progress progress(all.what);
  for (const verify::Sequence& s : problem.layout().sequences)
    for (int row = std::max({s.seqlen_q - rows, s.seqlen_q - s.seqlen_k, 0}); row < s.seqlen_q; ++row) {
      const Part part{.entry = s.batch, .row = row, .end = row + 1};
      problem.launch(engine, spec, part);
      const Outcome one = problem.compare("", part);
      all.rows += one.rows;
      all.changed += one.changed;
    }
  return all;
}

std::vector<Outcome> compare_all(const BitsOptions& options, const AttentionSpec& spec, Device device) {
  MaskOptions masks = options.masks;
  masks.lengths_k = options.shape.lengths();
  const Shape shape = options.shape.shape(spec);
  Problem problem(spec, Workload::generate(spec, shape, options.seed, masks));
  EngineOptions engine_options = options.device.engine();
  engine_options.device = device.str();
  Engine engine(engine_options);
  std::vector<std::unique_ptr<Problem>> repaged;
  if (spec.paged && spec.kv_scale != KvScale::token_head)
    for (const int times : {2, 8})
      if (times == 2 || options.random > 0)
        repaged.push_back(in_other_pages(spec, options, problem, shape, masks, times));
  problem.work().place(device);
  problem.work().compute_forward(engine);
  problem.launch(engine, spec);
  problem.remember();

  std::vector<Outcome> outcomes;
  const auto try_way = [&](const std::string& what, Engine& by, const AttentionSpec& pinned,
                           const Part& part = {}) {
    const Progress progress(what);
    problem.launch(by, pinned, part);
    outcomes.push_back(problem.compare(what, part));
  };
  try_way("the same launch again", engine, spec);
  if (not_in_parts(spec).empty())
    for (const auto& [what, part] : parts_of(spec, problem.layout())) try_way(what, engine, spec, part);
  const bool takes_workspace = problem.work().args_for(engine.get(spec, shape)).workspace.has_value();
  if (takes_workspace && !info_of(spec.op).few_rows && !info_of(spec.op).writes_gradients)
    try_way("no workspace", engine, spec, {.workspace = false});
  std::vector<Problem*> in_any_pages = {&problem};
  for (const auto& other : repaged) {
    other->work().place(device);
    other->take_base_of(problem);
    in_any_pages.push_back(other.get());
  }
  if (!repaged.empty()) {
    repaged.front()->launch(engine, spec);
    const int page_size = 2 * argument_table::page_size_of(shape);
    outcomes.push_back(
        repaged.front()->compare("pages of " + std::to_string(page_size) + " keys, in another order"));
  }
  if (options.random > 0) outcomes.push_back(among_random_neighbours(options, in_any_pages, engine, spec));
  if (options.decoded > 0) outcomes.push_back(row_by_row(options.decoded, problem, engine, spec));
  if (device.kind == Device::Kind::cpu)
    for (const int threads : {1, 3}) {
      engine_options.num_threads = threads;
      Engine other(engine_options);
      try_way(std::to_string(threads) + (threads == 1 ? " thread" : " threads"), other, spec);
    }
  const std::vector<KernelConfig> configs = search_space(spec, engine.target());
  const KernelFamily& family = family_of(spec.op, engine.target());
  const std::size_t most = static_cast<std::size_t>(options.configs),
                    step = most == 0 ? configs.size() : (configs.size() + most - 1) / most;
  for (std::size_t i = 0; most > 0 && i < configs.size(); i += step) {
    AttentionSpec pinned = spec;
    for_each_choice([&](const char* name, auto choice, auto pin) {
      if (family.has_choice(name)) pinned.config.*pin = configs[i].*choice;
    });
    try_way("config " + to_text(configs[i], engine.target()), engine, pinned);
  }
  return outcomes;
}

int compare_bits(const BitsOptions& options) {
  const AttentionSpec spec = read_spec(options.spec, options.op);
  options.masks.check({spec});
  if (!info_of(spec.op).attends)
    throw Error(ErrorCode::unsupported, std::string("op ") + to_string(spec.op) +
                                            " has no rows that attend; op forward, backward or decode would "
                                            "work");
  const std::vector<Device> devices = parse_devices(options.device.device);
  bool changed = false;
  Json json = Json::array();
  for (const Device device : devices) {
    const std::vector<Outcome> outcomes = compare_all(options, spec, device);
    verify::Table table({"launch", "rows", "changed"});
    Json launches = Json::array();
    for (const Outcome& one : outcomes) {
      changed |= one.changed > 0;
      table.add({one.what, std::to_string(one.rows), std::to_string(one.changed)});
      launches.push_back({{"launch", one.what}, {"rows", one.rows}, {"changed", one.changed}});
    }
    const std::string whole_only = not_in_parts(spec);
    json.push_back({{"device", device.str()}, {"launches", launches}, {"not_in_parts", whole_only}});
    if (options.json) continue;
    std::cout << device.str() << ", compared with one launch of the whole problem:\n\n" << shown(table);
    if (!whole_only.empty()) std::cout << "\nNot in parts: " << whole_only << ".\n";
  }
  if (options.json) print_json(json.size() == 1 ? json.front() : json);
  return changed && spec.batch_invariant ? exit_verification_failed : exit_ok;
}

}  // namespace

Verb add_bits(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("bits", "Say which launches of a problem give the same bits");
  const auto options = std::make_shared<BitsOptions>();
  add_spec(app, options->spec);
  add_op(app, options->op);
  options->device.add(app);
  app.get_option("--device").description("\"cpu\", \"cuda:N\", several with commas, or \"all\"");
  options->shape.batch = 3;
  options->shape.add(app);
  options->shape.add_lengths(app);
  options->masks.add(app);
  app.add_option("--seed", options->seed, "Seed of the random numbers").capture_default_str();
  app.add_option("--configs", options->configs, "Configs of the search space to try, evenly spread")
      .capture_default_str()
      .at_least(0);
  app.add_option("--random", options->random,
                 "Launches of packed sequences among others, cut at random, in random pages, to compare")
      .capture_default_str()
      .at_least(0);
  app.add_option("--decode", options->decoded,
                 "Rows at the end of each sequence to launch one by one, as a decode has them")
      .capture_default_str()
      .at_least(0);
  add_output(app, options->json);
  app.footer(
      "Launches the problem again: as it is; each batch entry alone; rows cut out of a causal prompt; one "
      "key/value head;\n"
      "in other pages; by other threads and configs. A row has changed if a bit of its o or lse has, or of "
      "its "
      "dq; a key\n"
      "counts as a row of dk and dv. Exit code 20: a row has changed, though the spec has "
      "\"batch_invariant\": true.\n\n"
      "Examples:\n"
      "  flashjit bits '{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 64, \"mask\": [\"causal\"], "
      "\"batch_invariant\": true}'\n"
      "  flashjit bits spec.json --op backward --batch 4 --seqlen-q 500 --device cuda:0\n\n"
      "--json prints {device, launches: [{launch, rows, changed}], not_in_parts}; a list of these for "
      "several "
      "devices.\n");
  return {app, [options] { return compare_bits(*options); }};
}

}  // namespace flashjit::command
