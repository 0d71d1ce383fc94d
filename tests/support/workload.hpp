// One forward of any spec and size on one device: data, launch, check.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codegen/arguments.hpp"
#include "runtime/flashjit.hpp"
#include "tests/support/guarded_tensor.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/random_masks.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::testing_support {

enum class Data {
  random,        // with outliers and long rows
  equal_scores,  // all keys of a head the same
  rising,  // scores rise from key to key, by more than exp can span, so that the maximum moves in every block
  falling,      // the other way
  huge_scores,  // random, 30 times as large
  positive_v,   // random, V around 3
  plain,        // bell-shaped; the same with outliers, or with long rows
  outliers,
  long_rows,
};

// Plain data; str() says all of it.
struct Case {
  AttentionSpec spec{};
  int batch = 1;
  int heads_q = 1, heads_kv = 1;
  int seqlen_q = 1, seqlen_k = 1;             // of every batch entry
  std::vector<int> lengths_q{}, lengths_k{};  // varlen: of each; batch and seqlens follow from them
  int spare_rows = 0;                         // varlen: rows of the packed tensors beyond the last sequence
  std::optional<int> max_seqlen_q{}, max_seqlen_k{};  // as AttentionArgs has them
  MemoryLayout layout = MemoryLayout::contiguous;     // q, o
  MemoryLayout layout_kv = MemoryLayout::contiguous;  // k, v
  std::optional<verify::MaskDataOptions> masks{};     // default: hard ones
  Data data = Data::random;
  Poison poison = Poison::nan;
  std::optional<float> softmax_scale{};
  double dropout_p = 0.2;  // of specs with dropout; their seed and offset follow from the next
  std::uint64_t seed = 1;

  Shape shape() const;
  std::string str() const;
};

class Workload {
 public:
  Workload(TestDevice& device, Case given);

  const Case& given() const { return case_; }
  const AttentionArgs& args() const { return device_args_; }
  // The same tensors on the host; outputs as fetch() has brought them.
  const AttentionArgs& host_args() const { return host_args_; }
  const Kernel& kernel(Engine& engine) const { return engine.get(case_.spec, case_.shape()); }

  // Poisons the outputs; call before each launch.
  void reset();
  // After a launch: brings everything back; inputs and surroundings of outputs are as they were.
  testing::AssertionResult fetch();
  // The oracle's report on the outputs that fetch() has brought.
  verify::Report report() const;
  // fetch(), and every output element is within its bound.
  testing::AssertionResult check();
  // The bits of all outputs.
  std::vector<std::byte> outputs();

  // The tables of the spec's masks on the host.
  const verify::MaskData& masks() const { return masks_; }
  GuardedTensor& q() { return tensor(&AttentionArgs::q); }
  GuardedTensor& k() { return tensor(&AttentionArgs::k); }
  GuardedTensor& v() { return tensor(&AttentionArgs::v); }

 private:
  GuardedTensor& tensor(TensorMember member) { return *tensors_[&argument_of(member) - arguments]; }
  std::unique_ptr<GuardedTensor> make(DType dtype, const TensorShape& shape);
  // Of lse: contiguous rows, with gaps between them where q has some.
  TensorShape arrange_rows(const std::vector<std::int64_t>& sizes) const;
  void fill();

  TestDevice& device_;
  Case case_;
  int next_ = 0;
  std::array<std::unique_ptr<GuardedTensor>, num_arguments> tensors_;  // null: the spec has it not
  verify::MaskData masks_;
  AttentionArgs host_args_, device_args_;
};

// Launches once on the device's engine and checks.
testing::AssertionResult computes(TestDevice& device, const Case& given);

// The largest error, as a share of its bound, that check() has seen since the last call.
double take_share_of_bound();

// OnEveryDevice, whose cases print how much of the bound they used.
class ComputesOnEveryDevice : public OnEveryDevice {
 protected:
  void TearDown() override;
};

}  // namespace flashjit::testing_support
