#include "tools/command/options.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "codegen/base/suggest.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "tools/command/progress.hpp"
#include "tools/manifest/models.hpp"
#include "tools/verify/input_file.hpp"

namespace flashjit::command {
namespace {

// Standard input may have no end; no spec or manifest is longer than this.
std::string read_all(std::istream& in) {
  constexpr std::size_t most = 16 << 20;
  std::string text;
  char part[1 << 16];
  while (text.size() <= most && (in.read(part, sizeof part), in.gcount() > 0))
    text.append(part, static_cast<std::size_t>(in.gcount()));
  if (text.size() > most)
    throw Error(ErrorCode::invalid_argument, "the text is longer than 16 MiB, which no spec or manifest is");
  return text;
}

// Calls `parse` with the text that an argument names: the argument itself if it looks like JSON, standard
// input, or a file. Errors about a file begin with its name.
template <class Parse>
auto read_argument(const std::string& argument, const std::string& what, Parse parse) {
  if (argument == "-") return parse(read_all(std::cin));
  const std::size_t start = argument.find_first_not_of(" \t\r\n");
  if (start != std::string::npos && argument[start] == '{') return parse(argument);
  std::ifstream file = verify::open_input(argument, what);
  try {
    return parse(read_all(file));
  } catch (const Error& error) {
    throw Error(error.code(), argument + ": " + error.message(), error.detail());
  }
}

std::string model_names() {
  std::string names;
  for (const Model& model : models()) names += (names.empty() ? "" : ", ") + std::string(model.name);
  return names;
}

}  // namespace

Argument add_spec(const Arguments& app, std::string& argument) {
  return app.add_option("SPEC", argument, "A file, '-' for standard input, or the JSON text itself")
      .required();
}

void add_op(const Arguments& app, std::string& op) {
  app.add_option(
         "--op", op,
         "Operation instead of the spec's own, as in --op backward; what has no meaning for it is left "
         "out")
      .type_name("OP");
}

AttentionSpec read_spec(const std::string& argument, const std::string& op) {
  return read_argument(argument, "SPEC is a file, '-' for standard input, or the JSON text itself",
                       [&](const std::string& text) {
                         return op.empty() ? AttentionSpec::from_json(text)
                                           : AttentionSpec::from_json(text, operation_named(op));
                       });
}

Argument add_manifest(const Arguments& app, std::string& argument) {
  return app
      .add_option(
          "MANIFEST", argument,
          "A file, '-' for standard input, the JSON text itself; or a spec; or a model: " + model_names())
      .required();
}

void ModelOptions::add(const Arguments& app) {
  const Argument for_use =
      app.add_option(
             "--use", use,
             "Of a model, with commas. train: forward, backward. serve: forward, also with keys in "
             "pages; decode and append_kv with contiguous caches and pages, causal and without a mask, "
             "rotating and not; copy_kv; 16-bit caches and fp8_e4m3 with each kind of scale")
          .delimiter(',')
          .type_name("USE");
  const Argument for_ops =
      app.add_option("--ops", ops,
                     "Of a model, with commas: forward, backward, decode, append_kv, copy_kv [forward]")
          .delimiter(',')
          .type_name("OP");
  for_use.excludes(for_ops);
  app.add_option("--kv-dtype", kv_dtype, "Of a model: its caches' only dtype: int8, fp8_e4m3, fp8_e5m2");
  app.add_option("--kv-scale", kv_scale, "Of a model, with --kv-dtype: tensor, head, token_head [tensor]");
  app.add_flag("--tree", tree, "Of a model: also decodes of trees of draft tokens");
  for (const char* name : {"--use", "--ops", "--kv-dtype", "--kv-scale", "--tree"})
    app.get_option(name).group("Models");
}

bool ModelOptions::any() const {
  return !use.empty() || !ops.empty() || !kv_dtype.empty() || !kv_scale.empty() || tree;
}

std::vector<ManifestItem> read_manifest(const std::string& argument, const ModelOptions& model) {
  const bool is_model =
      std::any_of(models().begin(), models().end(), [&](const Model& one) { return one.name == argument; }) &&
      !std::filesystem::exists(argument);
  if (model.any() && !is_model)
    throw Error(ErrorCode::invalid_argument,
                "--use, --ops, --kv-dtype, --kv-scale and --tree are for a model, and MANIFEST is none of " +
                    model_names() +
                    "; an entry of a manifest says them itself, as in {\"kernels\": [{\"model\": "
                    "\"llama-3-8b\", \"use\": [\"serve\"]}]}");
  if (is_model) {
    if (!model.any()) return parse_manifest(argument);
    nlohmann::json entry = {{"model", argument}};
    if (!model.use.empty()) entry["use"] = model.use;
    if (!model.ops.empty()) entry["ops"] = model.ops;
    if (!model.kv_dtype.empty()) entry["kv_dtype"] = model.kv_dtype;
    if (!model.kv_scale.empty()) entry["kv_scale"] = model.kv_scale;
    if (model.tree) entry["tree"] = true;
    return parse_manifest(nlohmann::json{{"kernels", nlohmann::json::array({entry})}}.dump());
  }
  return read_argument(
      argument,
      "MANIFEST is a file, '-' for standard input, the JSON text itself, or a model: " + model_names(),
      [](const std::string& text) { return parse_manifest(text); });
}

std::vector<ManifestItem> for_target(std::vector<ManifestItem> items, const Target& target) {
  std::erase_if(items, [&](const ManifestItem& item) {
    const std::string why = item.optional ? why_unsupported(item.spec, target) : "";
    if (!why.empty())
      tell_progress("flashjit: left out for " + target.str() + ": " + item.spec.to_json() + ": " + why);
    return !why.empty();
  });
  return items;
}

void ShapeOptions::add(const Arguments& app) {
  app.add_option("--batch", batch, "Sequences").at_least(0).type_name("N").capture_default_str();
  app.add_option("--seqlen-q", seqlen_q,
                 "Query rows of a sequence; varlen: of the longest [1024; op decode: 1]")
      .at_least(0)
      .type_name("N");
  app.add_option("--seqlen-k", seqlen_k, "Keys of a sequence [--seqlen-q; op decode: 1024]")
      .at_least(0)
      .type_name("N");
  app.add_option("--heads-q", heads_q, "Query heads").at_least(0).type_name("N").capture_default_str();
  app.add_option("--heads-kv", heads_kv, "Key and value heads [--heads-q]").at_least(0).type_name("N");
  app.add_option("--page-size", page_size, "Specs with \"paged\": keys of a page [16]")
      .at_least(1)
      .type_name("N");
}

void ShapeOptions::add_lengths(const Arguments& app) {
  app.add_option(
         "--lengths-k", lengths_k,
         "op decode, or \"paged\": keys of each sequence, LENGTH or COUNTxLENGTH with commas, or a file of "
         "them; instead of --batch and --seqlen-k")
      .type_name("LIST")
      .excludes(app.get_option("--batch"))
      .excludes(app.get_option("--seqlen-k"));
}

Shape ShapeOptions::shape(const AttentionSpec& spec) const {
  constexpr int usual = 1024;
  const bool few_rows = info_of(spec.op).few_rows;
  const int rows = seqlen_q.value_or(few_rows ? 1 : usual);
  Shape shape{.batch = batch,
              .seqlen_q = rows,
              .seqlen_k = seqlen_k.value_or(few_rows ? usual : rows),
              .num_heads_q = heads_q,
              .num_heads_kv = heads_kv.value_or(heads_q),
              .page_size = page_size};
  if (const std::vector<std::int32_t> given = lengths(); !given.empty()) {
    shape.batch = static_cast<int>(given.size());
    shape.seqlen_k = *std::max_element(given.begin(), given.end());
  }
  return shape;
}

std::vector<Shape> ShapeOptions::shapes(const AttentionSpec& spec, const std::vector<int>& seqlens) const {
  const bool one_row = seqlens.empty() && info_of(spec.op).few_rows;
  const bool has_keys = seqlen_k || !lengths_k.empty();
  std::vector<Shape> shapes;
  for (const int seqlen : seqlens.empty() ? std::vector{512, 1024, 2048, 4096} : seqlens) {
    Shape sized = shape(spec);
    sized.seqlen_q = one_row ? 1 : seqlen;
    if (!has_keys) sized.seqlen_k = seqlen;
    shapes.push_back(sized);
    if (one_row && has_keys) break;
  }
  return shapes;
}

std::vector<std::int32_t> ShapeOptions::lengths() const {
  if (lengths_k.empty()) return {};
  std::string text = lengths_k;
  if (text.find_first_not_of("0123456789x,") != std::string::npos) {
    std::ifstream file =
        verify::open_input(text, "--lengths-k is a list such as 1x100000,63x500, or a file of one");
    text = read_all(file);
  }
  std::replace(text.begin(), text.end(), ',', ' ');
  std::istringstream items(text);
  std::vector<std::int32_t> lengths;
  for (std::string item; items >> item;) {
    std::int64_t count = 1, length = -1;
    char times = 0, end = 0;
    std::istringstream one(item);
    if (item.find('x') == std::string::npos
            ? !(one >> length) || one >> end
            : !(one >> count >> times >> length) || times != 'x' || one >> end)
      length = -1;
    constexpr std::int64_t most = 1 << 20;  // sequences
    if (count < 1 || length < 0 || length > longest_sequence ||
        count > most - static_cast<std::int64_t>(lengths.size()))
      throw Error(ErrorCode::invalid_argument,
                  "--lengths-k: '" + item + "' is not LENGTH or COUNTxLENGTH, as in 1x100000,63x500");
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), static_cast<std::int32_t>(length));
  }
  if (lengths.empty())
    throw Error(ErrorCode::invalid_argument, "--lengths-k names no lengths; 1x100000,63x500 would work");
  return lengths;
}

void MaskOptions::add(const Arguments& app) {
  app.add_option("--window-left", window_left, "sliding_window: keys before a row's own [seqlen_k / 4]")
      .at_least(0)
      .type_name("N");
  app.add_option("--window-right", window_right, "sliding_window: keys after it [0]")
      .at_least(0)
      .type_name("N");
  app.add_option("--num-sinks", num_sinks, "sliding_window with sinks: keys that all rows see [4]")
      .at_least(0)
      .type_name("N");
  app.add_option("--density", density, "block_sparse: share of the blocks that are listed")
      .between(0.0, 1.0)
      .capture_default_str();
  app.add_option("--partial", partial, "block_sparse: share of those that have a bitmask")
      .between(0.0, 1.0)
      .capture_default_str();
  app.add_option("--document-length", document_length,
                 "block_sparse: lists of documents of so many tokens instead of random ones")
      .at_least(0)
      .type_name("N");
  app.add_option(
         "--named", named,
         "NAME=NUMBER or NAME=FILE.npy: a scalar or table of the spec's formulas; d_NAME=FILE.npy: where a "
         "table's gradient is written")
      .repeated()
      .type_name("NAME=VALUE");
  for (const char* name : {"--window-left", "--window-right", "--num-sinks", "--density", "--partial",
                           "--document-length", "--named"})
    app.get_option(name).group("Masks");
}

void MaskOptions::check(const std::vector<AttentionSpec>& specs) const {
  const auto require = [&](bool given, const char* options, const char* mask, auto has_it) {
    if (given && std::none_of(specs.begin(), specs.end(), has_it))
      throw Error(ErrorCode::invalid_argument, std::string(options) + " was given, but SPEC has no " + mask +
                                                   ", which alone uses it: leave it out, or ask for such a "
                                                   "mask");
  };
  const auto window = [](const AttentionSpec& spec) {
    return find_mask<SlidingWindowMask>(spec.mask) != nullptr;
  };
  const auto sinks = [](const AttentionSpec& spec) {
    const auto* mask = find_mask<SlidingWindowMask>(spec.mask);
    return mask && mask->sinks;
  };
  const auto lists = [](const AttentionSpec& spec) {
    const auto* mask = find_mask<BlockSparseMask>(spec.mask);
    return mask && !mask->of_masks;
  };
  constexpr char any_window[] = "sliding_window mask", with_sinks[] = "sliding_window mask with sinks",
                 own_lists[] = "block_sparse mask with lists of its own";
  require(window_left.has_value(), "--window-left", any_window, window);
  require(window_right.has_value(), "--window-right", any_window, window);
  require(num_sinks.has_value(), "--num-sinks", with_sinks, sinks);
  require(document_length > 0, "--document-length", own_lists, lists);
}

verify::MaskData MaskOptions::generate(const AttentionSpec& spec, const Shape& shape,
                                       std::uint64_t seed) const {
  verify::MaskData data = verify::random_mask_data(spec, shape, seed,
                                                   {.density = document_length > 0 ? 0 : density,
                                                    .partial = partial,
                                                    .window_left = window_left,
                                                    .window_right = window_right,
                                                    .lengths_k = lengths_k});
  if (num_sinks) data.num_sinks = *num_sinks;
  for (const Mask& mask : spec.mask) {
    const auto* blocks = std::get_if<BlockSparseMask>(&mask);
    if (!blocks || document_length == 0) continue;
    const auto ids = [&](int seqlen) {
      std::vector<std::int32_t> segments(seqlen);
      for (int i = 0; i < seqlen; ++i) segments[i] = i / document_length;
      return segments;
    };
    std::erase_if(data.tables, [](const MaskTable& table) {
      return table.argument == &AttentionArgs::block_offsets ||
             table.argument == &AttentionArgs::block_indices;
    });
    const std::vector<std::int32_t> of_rows = ids(shape.seqlen_q), of_keys = ids(shape.seqlen_k);
    for (MaskTable& table : document_mask(*blocks, of_rows, of_keys, 1))
      data.tables.push_back(std::move(table));
  }
  return data;
}

void DropoutOptions::add(const Arguments& app) {
  app.add_option("--dropout-p", p, "Probability that a weight is dropped [0.1]").type_name("P");
  app.add_option("--dropout-seed", seed, "With the offset it decides which are [1]").type_name("N");
  app.add_option("--dropout-offset", offset, "[0]").type_name("N");
  for (const char* name : {"--dropout-p", "--dropout-seed", "--dropout-offset"})
    app.get_option(name).group("Dropout");
}

void DropoutOptions::check(const std::vector<AttentionSpec>& specs) const {
  const bool given = p || seed || offset;
  if (given && std::none_of(specs.begin(), specs.end(), [](const AttentionSpec& s) { return s.dropout; }))
    throw Error(ErrorCode::invalid_argument,
                "dropout was given, but SPEC has \"dropout\": false: ask for one with \"dropout\": true");
}

void DeviceOptions::add(const Arguments& app) {
  app.add_option("--device", device, "\"cpu\" or \"cuda:N\"").capture_default_str();
  app.add_option("--target", target, "Compile for this instead of the device's best");
  app.add_option("--num-threads", num_threads, "Threads of a CPU kernel; 0: as many as this process may use")
      .between(0, max_num_threads)
      .capture_default_str();
  add_compile_limits(app, compile);
  add_cache_dir(app, cache_dir);
  add_cache_path(app, cache_path);
}

EngineOptions DeviceOptions::engine() const {
  return {.device = device,
          .target = target,
          .cache_dir = cache_dir,
          .cache_path = cache_path,
          .num_threads = num_threads,
          .parallel_for = {},
          .compile = compile,
          .on_kernel = [](const KernelEvent& event) {
            if (event.kind == KernelEvent::Kind::waiting) tell_progress(event.reason + " ...");
          }};
}

void add_output(const Arguments& app, bool& json) {
  app.add_flag("--json", json, "Print one JSON value instead of text");
  app.add_flag("--quiet", is_quiet(), "Tell no progress and no notes on standard error; errors remain");
}

void add_cache_dir(const Arguments& app, std::optional<std::string>& cache_dir) {
  app.add_option("--cache-dir", cache_dir,
                 "Cache folder [FLASHJIT_CACHE_DIR, else ~/.cache/flashjit]; \"\" for none");
}

void add_compile_limits(const Arguments& app, CompileLimits& limits) {
  app.add_option("--compile-seconds", limits.seconds,
                 "The most seconds that a compilation may take [no limit]");
  app.add_option("--compile-bytes", limits.bytes,
                 "The most memory that a compilation for a CPU may have [no limit]");
}

void add_cache_path(const Arguments& app, std::optional<std::string>& cache_path) {
  app.add_option("--cache-path", cache_path,
                 "Read-only folders of prebuilt kernels, searched first, with colons [FLASHJIT_CACHE_PATH]");
}

}  // namespace flashjit::command
