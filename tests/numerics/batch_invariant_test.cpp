// batch_invariant: the bits of a row of a forward, and of its dq in a backward, are the same among any other
// rows and sequences, in any cut of its prompt, in pages of any size, with any number of heads, by every
// config and number of threads. So are those of a key's dk and dv, if its sequence has the same rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/row_in_batches.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

constexpr int position = 1300;
// With the first one, rows before the compared one see a block more; with the second, few keys are seen.
constexpr int windows[] = {1070, 20};

const std::vector<Batch> batches = {
    {{1}, 0, {}, 16},                // as a decode has it
    {{position + 1}, 0, {}, 256},    // a whole prompt
    {{position + 300}, 299, {}, 1},  // a longer one
    {{64}, 0, {}, 48, 2},            // cuts of it
    {{100}, 37, {}, 64},
    {{700, 1, 5, 0}, 2, {900, 5, 77}, 16},  // among others
    {{17, 1000, 40}, 5, {1000, 2000}, 32, 2},
    {{1, 1, 1, 1, 1, 1, 1, 1}, 0, {1, 9, 10, 127, 128, 129, 640}, 16},  // neighbours' lengths at edges
    {{2, 1, 1, 1, 1, 1, 1, 1}, 1, {2, 10, 9, 128, 127, 130, 1300}, 16, 3},
};

// All configs on CPUs, which have few; some of a GPU's.
std::vector<KernelConfig> some_configs(const AttentionSpec& spec, const Target& target) {
  const std::vector<KernelConfig> all = search_space(spec, target);
  std::vector<KernelConfig> some;
  for (std::size_t i = 0; i < all.size(); i += target.is_cuda() ? all.size() / 8 + 1 : 1)
    some.push_back(all[i]);
  return some;
}

AttentionSpec pinned_to(AttentionSpec spec, const Target& target, const KernelConfig& config) {
  const KernelFamily& family = family_of(spec.op, target);
  for_each_choice([&](const char* name, auto choice, auto pin) {
    if (family.has_choice(name)) spec.config.*pin = config.*choice;
  });
  return spec;
}

class BatchInvariant : public ComputesOnEveryDevice {
 protected:
  void SetUp() override {
    ComputesOnEveryDevice::SetUp();
    if (!GetParam()) return;
    for (const int threads : {1, 3, 64})
      if (!on().is_cuda() || threads == 1) engines_.push_back(on().make_engine({.num_threads = threads}));
  }

  // The bits of the compared row with each window; none if a launch failed.
  std::vector<std::byte> bits(Workload& workload, const Batch& batch, const Kernel& kernel) {
    std::vector<std::byte> bits;
    for (const int window : windows) {
      AttentionArgs args = workload.args();
      if (args.window_left) args.window_left = window, args.window_right = 0;
      workload.reset();
      kernel.launch(args);
      if (!workload.fetch()) return {};
      const std::vector<std::byte> of_window = bits_of_row(workload, batch);
      bits.insert(bits.end(), of_window.begin(), of_window.end());
      if (!args.window_left) break;
    }
    return bits;
  }

  void expect(const AttentionSpec& spec) {
    if (!takes_next(spec, 3)) return;
    if (!why_unsupported(spec, Target::parse(on().target())).empty()) return;
    SCOPED_TRACE(spec.to_json());
    std::vector<std::byte> expected;
    for (const Batch& batch : batches) {
      Workload workload(on(), case_of(spec, batch, position));
      fill(workload, batch, on().is_cuda() ? Values::bell_shaped : Values::weightless_column);
      SCOPED_TRACE(workload.given().str());
      const auto expect_same = [&](const Kernel& kernel, const std::string& how) {
        const std::vector<std::byte> found = bits(workload, batch, kernel);
        ASSERT_FALSE(found.empty());
        if (expected.empty()) expected = found;
        EXPECT_TRUE(found == expected) << how;
      };
      for (const auto& engine : engines_) expect_same(workload.kernel(*engine), "the engine's choice");
      std::size_t turn = 0;
      for (const KernelConfig& config : some_configs(spec, Target::parse(on().target()))) {
        const AttentionSpec pinned = pinned_to(spec, Target::parse(on().target()), config);
        expect_same(engines_[turn++ % engines_.size()]->get(pinned, workload.given().shape()),
                    pinned.to_json());
      }
      if (!workload.args().window_left) {
        EXPECT_TRUE(workload.check());
      }
    }
  }

  std::vector<std::unique_ptr<Engine>> engines_;
};

TEST_P(BatchInvariant, CutsAndNeighbours) {
  const SpecOptions plain{.batch_invariant = true}, packed{.varlen = true, .batch_invariant = true};
  const SpecOptions pages{.o_dtype = DType::fp32, .paged = true, .batch_invariant = true};
  const SpecOptions both{.head_dim_v = 40, .varlen = true, .paged = true, .batch_invariant = true};
  for (const DType dtype : own_dtypes()) {
    expect(forward_spec(dtype, 64, {CausalMask{}}, plain));
    expect(forward_spec(dtype, 72, {CausalMask{}}, packed));
    expect(forward_spec(dtype, 128, {SlidingWindowMask{}}, pages));
    expect(forward_spec(dtype, 64, {CausalMask{}, SlidingWindowMask{bottom_right, true}}, both));
  }
}

TEST_P(BatchInvariant, FormulasAndEightBits) {
  for (const char* score : {"score - abs(position - key) * 0.015625", "4 * tanh(score / 4)"}) {
    AttentionSpec spec = forward_spec(DType::bf16, 64, {CausalMask{}},
                                      {.varlen = true, .paged = true, .batch_invariant = true});
    spec.score = {score};
    expect(spec.validated());
    spec.mask = {CausalMask{}, FormulaMask{"position - key < 900 && (key + position) % 7 != 3"}};
    expect(spec.validated());
  }
  for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3})
    expect(forward_spec(DType::bf16, 64, {CausalMask{}},
                        {.varlen = true, .paged = true, .batch_invariant = true, .kv_dtype = kv_dtype}));
}

TEST_P(BatchInvariant, Gradients) {
  constexpr int last = 420, key = 131;  // the key is seen by rows of several blocks, not all of them
  const std::vector<Batch> given_batches = {
      {{last + 1}, 0, {}, 0},
      {{last + 1, 1, 700}, 0, {5, 900}, 0, 3},
      {{last + 1, 128, 1, 1, 0}, 0, {127, 1, 129, 7}, 0},
      {{1}, 0, {}, 0},
      {{64}, 0, {}, 0, 2},
      {{100, 30}, 37, {300}, 0},
  };
  for (const DType dtype : own_dtypes())
    for (const auto& [dim, dim_v, varlen] : {std::tuple{64, 64, false}, {72, 40, true}, {128, 128, true}}) {
      const AttentionSpec spec =
          attention_spec(Operation::backward, dtype, dim, {CausalMask{}},
                         {.head_dim_v = dim_v, .varlen = varlen, .batch_invariant = true});
      if (!takes_next(spec, 3)) continue;
      if (!why_unsupported(spec, Target::parse(on().target())).empty()) continue;
      SCOPED_TRACE(spec.to_json());
      std::vector<std::byte> of_row, of_key;
      for (const Batch& batch : given_batches) {
        Workload workload(on(), case_of(spec, batch, last));
        fill(workload, batch);
        SCOPED_TRACE(workload.given().str());
        const auto expect_same = [&](const Kernel& kernel, const std::string& how) {
          workload.reset();
          kernel.launch(workload.args());
          ASSERT_TRUE(workload.fetch());
          const std::vector<std::byte> row = bits_of_row(workload, batch);
          if (of_row.empty()) of_row = row;
          EXPECT_TRUE(row == of_row) << "dq " << how;
          if (!has_whole_sequence(batch, last)) return;
          const std::vector<std::byte> gradients = bits_of_key(workload, batch, key);
          if (of_key.empty()) of_key = gradients;
          EXPECT_TRUE(gradients == of_key) << "dk, dv " << how;
        };
        for (const auto& engine : engines_) expect_same(workload.kernel(*engine), "by the engine's choice");
        for (const KernelConfig& config : some_configs(spec, Target::parse(on().target()))) {
          const AttentionSpec pinned = pinned_to(spec, Target::parse(on().target()), config);
          // A kernel's workspace goes by its own config.
          Workload own(on(), case_of(pinned, batch, last));
          fill(own, batch);
          own.reset();
          own.kernel(*engines_[0]).launch(own.args());
          ASSERT_TRUE(own.fetch());
          EXPECT_TRUE(bits_of_row(own, batch) == of_row) << pinned.to_json();
          if (has_whole_sequence(batch, last)) {
            EXPECT_TRUE(bits_of_key(own, batch, key) == of_key) << pinned.to_json();
          }
        }
      }
    }
}

FLASHJIT_ON_EVERY_DEVICE(BatchInvariant);

}  // namespace
}  // namespace flashjit::testing_support
