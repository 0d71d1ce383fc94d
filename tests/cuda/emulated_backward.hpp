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
#include "tests/support/planned_kernel.hpp"

namespace flashjit::testing_support {

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
};

}  // namespace flashjit::testing_support
