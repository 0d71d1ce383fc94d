// The features that meet in one kernel, as axes of a covering array: for each operation and target, what a
// spec and a problem may have, and the problem that a row of the array describes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/base/target.hpp"
#include "codegen/spec/spec.hpp"
#include "tests/support/covering_array.hpp"

namespace flashjit::testing_support {

// The problem that a row describes. Lengths are of two batch entries, or of three packed sequences.
struct FeatureCase {
  AttentionSpec spec{};
  int heads_q = 1, heads_kv = 1;
  int seqlen_q = 65, seqlen_k = 257;  // the longest
  bool some_empty = false;            // sequences without rows or keys
  int page_size = 0;
  int parts = 2;                                 // of a merge
  bool by_slots = false, own_positions = false;  // of append_kv
  bool in_place = false;                         // of copy_kv
  std::uint64_t seed = 1;

  std::vector<int> lengths_q() const { return lengths(seqlen_q); }
  std::vector<int> lengths_k() const { return lengths(seqlen_k); }
  Shape shape() const;
  // The `flashjit run` that computes this spec and these sizes, from numbers of its own.
  std::string command(const std::string& device, const std::string& target) const;

 private:
  std::vector<int> lengths(int longest) const;
};

class FeatureSpace {
 public:
  // Features of the operation's kernels for the target.
  FeatureSpace(Operation op, const Target& target);

  Operation op() const { return op_; }
  const Target& target() const { return target_; }
  std::vector<int> sizes() const;
  // Throws invalid_spec or unsupported where the features exclude each other.
  FeatureCase at(const Row& row) const;
  // "dtype fp16, dropout true"
  std::string str(const Triples::Triple& triple) const;

  // The array of all triples that are possible: a spec may have them, and the target has a kernel for it.
  // Both are asked, no list says it. Of specs that `is_wanted` takes. Made anew by each call.
  CoveringArray covering(
      std::uint64_t seed, const std::function<bool(const AttentionSpec&)>& is_wanted =
                              [](const AttentionSpec&) { return true; }) const;

 private:
  struct Value {
    std::string name;
    std::function<void(FeatureCase&)> set;
  };
  struct Axis {
    std::string name;
    std::vector<Value> values;
  };

  // Whether the target's kernels compute specs with the field, or the kind of mask.
  bool has(std::string_view field) const;
  bool has_mask(std::string_view kind) const;
  void add(std::string name, std::vector<Value> values);
  void add_flag(const char* name, bool AttentionSpec::* field, bool common = false);
  void add_numbers();
  void add_score();
  void add_masks();
  void add_keys();
  void add_append();
  void add_sizes();

  Operation op_;
  Target target_;
  std::vector<Axis> axes_;
};

}  // namespace flashjit::testing_support
