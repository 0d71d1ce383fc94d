// Formulas for emulated kernels, as codegen renders them.
#pragma once

#include <string>

#include "codegen/spec.hpp"
#include "cuda/formula.cuh"

namespace flashjit::testing_support {

// ALiBi, then softcap, sink logits, and a window whose size goes by the row; `per_head`: by the head, too.
// Params: the kernel's. Base: a Spec without formulas.
template <class Base, class Params, bool per_head>
struct WithFormulaSpec : Base {
  using table_slope = device::Table<0, device::fp32, device::Dimension::outer>;
  using scalar_cap = device::Scalar<0, device::fp32>;

  struct Mask1 : device::Formula {
    static constexpr bool reads_head = per_head;
    template <class At, class Row>
    static auto value(const At& at, const Row&) {
      using device::Integer;
      if constexpr (per_head)
        return at.key <= at.position && at.position - at.key < Integer(9) * (at.head + Integer(1));
      else
        return at.key <= at.position && at.position - at.key < Integer(20) + at.row % Integer(3);
    }
  };
  struct Score1 : device::Formula {
    static constexpr bool reads_head = true;
    template <class At>
    static auto of_row(const At& at) {
      return device::row_values(at.read(table_slope(), at.head));
    }
    template <class At, class Row>
    static auto value(const At& at, const Row& row) {
      return fma(row.a, to_real(at.key - at.position), at.score);
    }
  };
  struct Score2 : device::Formula {
    template <class At>
    static auto of_row(const At& at) {
      return device::row_values(inverse(at.read(scalar_cap())));
    }
    template <class At, class Row>
    static auto value(const At& at, const Row& row) {
      return at.read(scalar_cap()) * tanh(at.score * row.a);
    }
  };
  using Mask = device::Both<typename Base::Mask, device::FormulaMask<Mask1, Params>>;
  using Score = device::FormulaScore<Params, Score1, Score2>;
  using Sinks = device::SinkLogits<Params>;

  // `spec` with these formulas.
  static AttentionSpec add_to(AttentionSpec spec) {
    spec.mask.push_back(FormulaMask{per_head ? "key <= position && position - key < 9 * (head + 1)"
                                             : "key <= position && position - key < 20 + row % 3"});
    spec.score = {"score + slope[head] * (key - position)", "cap * tanh(score / cap)"};
    spec.tables = {{"slope", DType::fp32, {{.kind = TableDimension::Kind::heads_q}}}};
    spec.scalars = {{"cap", DType::fp32}};
    spec.sink_logits = true;
    return spec.validated();
  }
};

// Adds its formulas to the spec if Spec has some.
template <class Spec>
AttentionSpec with_formulas(AttentionSpec spec) {
  if constexpr (requires { Spec::add_to(spec); }) return Spec::add_to(std::move(spec));
  return spec;
}

}  // namespace flashjit::testing_support
