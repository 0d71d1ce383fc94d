// Backwards on the host (emulated_attention.hpp) against the float64 oracle. To be included after the
// kernels' headers.
#pragma once

#include <concepts>
#include <utility>
#include <vector>

#include "runtime/operation.hpp"
#include "tests/cuda/emulated_attention.hpp"
#include "tests/cuda/far_rows.hpp"
#include "tests/cuda/learned_specs.hpp"
#include "tests/cuda/listed_specs.hpp"
#include "tests/support/planned_kernel.hpp"

namespace flashjit::testing_support {

// The backward's formulas keep what they read of a key.
template <class Base, int block_m, int block_n>
struct ListedDocuments : WithLists<Base, LearnedParams, block_m, block_n> {
  static constexpr bool learns = true;
  using Params = LearnedParams;
  using Document = typename WithLists<Base, LearnedParams, block_m, block_n>::table_document;
  struct SameDocument : device::Formula {
    static constexpr bool by_key = true, loads = true;
    template <class At>
    static auto of_key(const At& at) {
      return device::row_values(at.read(Document(), at.batch, at.key));
    }
    template <class At, class OfKey>
    static auto value(const At& at, const OfKey& of_key) {
      return at.read(Document(), at.batch, at.position) == of_key.a;
    }
  };
  using Mask =
      device::Intersect<device::Bounds,
                        device::Listed<device::BlockSparse<block_m, block_n, false, true>,
                                       device::Intersect<device::Causal<device::Align::bottom_right>,
                                                         device::FormulaMask<SameDocument, Params>>>>;
};

// Kernels: with launch<Spec, Config>(case, arguments).
template <class Kernels>
class EmulatedBackward : public EmulatorTest {
 protected:
  template <class Spec, class Config>
  void expect(Case given, std::vector<Mask> masks, bool spoilt = false) {
    expect<Spec, Config>(std::move(given), std::move(masks), [&](Workload& workload) {
      if (spoilt) workload.spoil();
    });
  }
  // change: of the inputs.
  template <class Spec, class Config, class Change>
    requires std::invocable<Change, Workload&>
  void expect(Case given, std::vector<Mask> masks, const Change& change) {
    if (!has_turn()) return;
    given.spec = spec_of<Spec>(Operation::backward, std::move(masks));
    given.spec.grad_dtype = dtype_if_any<typename Spec::grad_dtype>;
    given.spec.deterministic = Spec::deterministic;
    given.spec = with_offsets<Spec>(with_learned<Spec>(given.spec.validated()));
    Workload workload(host, given);
    change(workload);
    workload.reset();
    Kernels::template launch<Spec, Config>(workload.given(), workload.args());
    EXPECT_TRUE(workload.check()) << "block_m " << Config::block_m << ", block_n " << Config::block_n << ", "
                                  << Config::num_stages << " stages, " << Config::num_warps
                                  << " warps, deterministic " << Spec::deterministic;
  }
  // Lists of the spec's own masks, against gradients by the masks alone.
  template <class Spec, class Config>
  void expect_listed(Case given) {
    if (!has_turn()) return;
    AttentionSpec spec = Spec::add_to(spec_of<Spec>(Operation::backward, {}));
    given.spec = without_lists(spec);
    Workload workload(host, given);
    AttentionArgs args = workload.args();
    const MaskTables lists = set_lists_of_masks(spec, args);
    workload.reset();
    given.spec = std::move(spec);
    Kernels::template launch<Spec, Config>(given, args);
    EXPECT_TRUE(workload.check()) << "block_m " << Config::block_m;
  }
};

}  // namespace flashjit::testing_support
