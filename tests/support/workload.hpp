// A forward of any spec and size on one device: its data, launch and check.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "runtime/flashjit.hpp"
#include "tests/support/guarded_tensor.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/random_masks.hpp"
#include "tools/verify/random_names.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::testing_support {

enum class Data {
  random,        // with outliers and long rows
  equal_scores,  // all keys of a head are equal
  // Scores rise from key to key by more than exp can span, so that the maximum moves in every block.
  rising,
  falling,      // scores fall
  huge_scores,  // random, 30 times as large
  positive_v,   // random, V around 3
  plain,        // bell-shaped; the next two add outliers, or long rows
  outliers,
  long_rows,
};

// A test case; plain data. str() describes it completely.
struct Case {
  AttentionSpec spec{};
  int batch = 1;
  int heads_q = 1, heads_kv = 1;
  int seqlen_q = 1, seqlen_k = 1;  // lengths of every batch entry
  // varlen: the lengths of each sequence; batch and seqlens follow from them. Decode and paged:
  // lengths_k are seqlens_k, of caches with room for seqlen_k; empty: random ones, or none.
  std::vector<int> lengths_q{}, lengths_k{};
  int page_size = 0;   // paged: keys of a page
  int spare_rows = 0;  // varlen: rows of the packed tensors beyond the last sequence
  std::optional<int> max_seqlen_q{}, max_seqlen_k{};  // the values of AttentionArgs
  MemoryLayout layout = MemoryLayout::contiguous;     // q, o
  MemoryLayout layout_kv = MemoryLayout::contiguous;  // k, v
  std::optional<verify::MaskDataOptions> masks{};     // absent: hard ones
  Data data = Data::random;
  Poison poison = Poison::nan;
  std::optional<float> softmax_scale{};
  // The bitmasks that make_block_lists is given. Absent: four for each list; 0: no block_bitmasks.
  std::optional<int> bitmasks{};
  // Values of tables and scalars; those that are not here are hard random ones.
  verify::NamedData named{};
  double dropout_p = 0.2;  // for specs with dropout; dropout's seed and offset follow from `seed`
  std::uint64_t seed = 1;

  Shape shape() const;
  std::string str() const;
};

// A Workload throws this on a device that only prebuilds, once the case's kernel is in the cache.
struct Prebuilt {};

class Workload {
 public:
  Workload(TestDevice& device, Case given);
  Workload(const Workload&) = delete;

  const Case& given() const { return case_; }
  const AttentionArgs& args() const { return device_args_; }
  // args() on the host; fetch() updates the outputs.
  const AttentionArgs& host_args() const { return host_args_; }
  // The kernel of this engine. args() get the workspace that it needs.
  const Kernel& kernel(Engine& engine);

  // Poisons the outputs; call before each launch.
  void reset();
  // A backward's: puts NaN or infinity into a row of q, of do, a key of k and of v of each head, and into o
  // and lse what a forward makes of them. check() then expects that gradients without them are right.
  void spoil();
  // After a launch: downloads everything, and checks that inputs and the outputs' surroundings are unchanged.
  testing::AssertionResult fetch();
  // The oracle's report on the downloaded outputs.
  verify::Report report() const;
  // fetch(), and checks that every output element is within its bound.
  testing::AssertionResult check(bool all_told = true);
  // The bits of all outputs.
  std::vector<std::byte> outputs();

  // The tables of the spec's masks on the host.
  const verify::MaskData& masks() const { return masks_; }
  GuardedTensor& q() { return tensor(&AttentionArgs::q); }
  GuardedTensor& k() { return tensor(&AttentionArgs::k); }
  GuardedTensor& v() { return case_.spec.v_in_k ? k() : tensor(&AttentionArgs::v); }
  GuardedTensor& tensor(TensorMember member) { return *tensors_[&argument_of(member) - arguments]; }

 private:
  std::unique_ptr<GuardedTensor> make(DType dtype, const TensorShape& shape);
  // The layout of lse: contiguous rows, with gaps between them if q has gaps.
  // Rows with gaps begin at multiples of `unit` elements.
  TensorShape arrange_rows(const std::vector<std::int64_t>& sizes, std::int64_t unit = 1) const;
  // Tables by any strides, and scalars.
  void make_named(const Shape& shape);
  float poison_value() const;
  void fill();
  void poison_stale_slots(float poison);
  // A backward's o, lse and dlse in rows that padding leaves unused.
  void poison_unused_rows();
  // wide: of very different sizes, the first of a long cache the least.
  void fill_scales(const Tensor& scales, float usual, bool wide) const;
  // Tensors with a value or more for each key and key/value head, [batch or pages, rows, heads, columns].
  std::vector<Tensor> of_keys();
  bool packed_keys() const { return key_layout(case_.spec) == KeyLayout::packed; }
  // Tensors on the host, before all of them are arguments.
  AttentionArgs lengths_of_host() const;

  TestDevice& device_;
  Case case_;
  int next_ = 0;
  bool spoilt_ = false;
  std::array<std::unique_ptr<GuardedTensor>, num_arguments> tensors_;  // null: the spec has no such argument
  verify::MaskData masks_;
  verify::NamedData named_;
  std::vector<std::unique_ptr<GuardedTensor>> named_tensors_;
  std::deque<std::pair<std::string, std::unique_ptr<GuardedTensor>>> named_outputs_;  // gradients of tables
  std::vector<NamedArgument> host_named_, device_named_;
  AttentionArgs host_args_, device_args_;
  std::vector<std::unique_ptr<GuardedTensor>> workspaces_;  // prepared launches may use all of them
};

// Launches once on the device's engine and checks the result.
testing::AssertionResult computes(TestDevice& device, const Case& given, bool all_told = true);

// The largest error since the last call, as a share of its bound, over all check() calls.
double take_share_of_bound();

// OnEveryDevice whose cases print the largest share of the bound that they used.
class ComputesOnEveryDevice : public OnEveryDevice {
 protected:
  void TearDown() override;
};

}  // namespace flashjit::testing_support
