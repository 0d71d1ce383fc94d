// Options that several verbs share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"
#include "tools/command/arguments.hpp"
#include "tools/manifest/manifest.hpp"
#include "tools/verify/random_masks.hpp"

namespace flashjit::command {

// The positional SPEC: a file, '-' for standard input, or the JSON text itself.
Argument add_spec(const Arguments& app, std::string& argument);
// --op: the spec's operation instead of its own, so that one file serves a forward and its backward.
void add_op(const Arguments& app, std::string& op);
// Throws invalid_argument if the file cannot be read, and invalid_spec if its text is not a valid spec.
AttentionSpec read_spec(const std::string& argument, const std::string& op = "");

// The positional MANIFEST: as SPEC, or a spec, or the name of a model.
Argument add_manifest(const Arguments& app, std::string& argument);
// The uses of a model that MANIFEST names: the fields of its entry in a manifest.
struct ModelOptions {
  std::vector<std::string> use, ops;
  std::string kv_dtype, kv_scale;
  bool tree = false;

  void add(const Arguments& app);
  bool any() const;
};
// Throws invalid_argument if the file cannot be read or is no manifest, or if options for a model are given
// beside something else; invalid_spec for a bad spec in it.
std::vector<ManifestItem> read_manifest(const std::string& argument, const ModelOptions& model);
// Takes away the optional items that have no kernels for the target. stderr says which, and why.
std::vector<ManifestItem> for_target(std::vector<ManifestItem> items, const Target& target);

struct ShapeOptions {
  int batch = 1;
  std::optional<int> seqlen_q;  // 1024; 1 for an operation that takes few rows
  std::optional<int> seqlen_k;  // seqlen_q; 1024 for an operation that takes few rows
  int heads_q = 8;
  std::optional<int> heads_kv;  // heads_q
  int page_size = 0;            // 0: contiguous, or 16 where the spec is paged
  std::string lengths_k;        // "1x100000,63x500", or a file of numbers; empty: all have seqlen_k

  void add(const Arguments& app);
  // After add(): --lengths-k.
  void add_lengths(const Arguments& app);
  // The sizes for a spec. With --lengths-k, batch and seqlen_k are those of the lengths.
  Shape shape(const AttentionSpec& spec) const;
  // The same for several lengths of sequences: of its query rows and, unless --seqlen-k says otherwise, keys.
  // If none are given, they are usual ones, and an operation that takes few rows has one against so many
  // keys.
  std::vector<Shape> shapes(const AttentionSpec& spec, const std::vector<int>& seqlens) const;
  // Empty without --lengths-k. Throws invalid_argument for a text that is no list.
  std::vector<std::int32_t> lengths() const;
};

// Run-time arguments of masks, and how block lists are generated.
struct MaskOptions {
  std::optional<int> window_left, window_right, num_sinks;
  double density = 0.25, partial = 0.1;  // shares in generated block lists
  int document_length = 0;               // tokens of a document; 0: the lists are random
  // "slope=slope.npy", "cap=30": tables and scalars of formulas; those that are not here are generated.
  std::vector<std::string> named;
  // Decode and pages: the keys of each sequence, as many as the shape's batch; empty: as many as its
  // seqlen_k.
  std::vector<std::int32_t> lengths_k;

  void add(const Arguments& app);
  // Throws invalid_argument if an option that says what a mask keeps is given and no spec has that mask.
  void check(const std::vector<AttentionSpec>& specs) const;
  // Seeded data for every mask of the spec.
  verify::MaskData generate(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed) const;
};

// Run-time arguments of specs with dropout.
struct DropoutOptions {
  std::optional<double> p;
  std::optional<std::uint64_t> seed, offset;

  void add(const Arguments& app);
  // Throws invalid_argument if an option is given and no spec has dropout.
  void check(const std::vector<AttentionSpec>& specs) const;
};

struct DeviceOptions {
  std::string device = "cpu";
  std::string target;
  std::optional<std::string> cache_dir, cache_path;
  int num_threads = 0;
  CompileLimits compile;

  void add(const Arguments& app);
  EngineOptions engine() const;
};

// --json and --quiet.
void add_output(const Arguments& app, bool& json);
void add_cache_dir(const Arguments& app, std::optional<std::string>& cache_dir);
void add_cache_path(const Arguments& app, std::optional<std::string>& cache_path);
// --compile-seconds and --compile-bytes.
void add_compile_limits(const Arguments& app, CompileLimits& limits);

}  // namespace flashjit::command
