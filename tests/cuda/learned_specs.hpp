// Formulas that are learned, for emulated backwards, as codegen renders them.
#pragma once

#include <type_traits>

#include "codegen/spec/spec.hpp"
#include "cuda/formula_gradient.cuh"
#include "shared/backward_cuda_params.h"
#include "tests/cuda/offset_specs.hpp"

namespace flashjit::testing_support {

using LearnedParams = device::WithGradients<device::CudaBackwardParams>;

// A bias by distance and ALiBi, then softcap, sink logits, and a window: by the head and tested element by
// element, or an interval of each row. Base: a Spec without formulas. capped: else derivatives by scores
// are 1.
template <class Base, bool tested, bool capped>
struct WithLearned : Base {
  static constexpr bool learns = true;
  using Params = LearnedParams;
  using table_bias = device::Table<0, device::fp32, device::Dimension::outer>;
  using table_slope = device::Table<1, device::fp32, device::Dimension::outer>;
  using scalar_cap = device::Scalar<0, device::fp32>;

  struct WindowOfHead : device::Formula {
    static constexpr bool by_key = true, reads_head = true;
    template <class At, class OfKey>
    static auto value(const At& at, const OfKey&) {
      using device::Integer;
      return at.key <= at.position && at.position - at.key < Integer(9) * (at.head + Integer(1));
    }
  };
  struct WindowOfRow : device::Formula {
    static constexpr bool interval = true;
    template <class At, class Tile>
    static auto begin(const At& at, const Tile&) {
      using device::Integer;
      return bounded_sum(bounded_difference(at.position, Integer(20) + at.row % Integer(3)), Integer(1));
    }
    template <class At, class Tile>
    static auto end(const At& at, const Tile&) {
      return bounded_sum(at.position, device::Integer(1));
    }
  };
  struct Score1 : device::Formula {
    static constexpr bool by_key = true, reads_head = true, loads = true, shifts = true;
    template <class At>
    static auto of_key(const At& at) {
      return device::row_values(at.read(table_slope(), at.head));
    }
    template <class At>
    static auto bucket(const At& at) {
      return minimum(abs(at.key - at.position), device::Integer(5));
    }
    template <class At, class OfKey>
    static auto value(const At& at, const OfKey& of_key) {
      return fma(of_key.a, to_real(at.key - at.position), at.score) +
             at.read(table_bias(), at.head, bucket(at));
    }
    static constexpr int reads = 2;
    template <class At, class OfKey, class Add>
    static void elements(const At& at, const OfKey&, const Add& add) {
      add(device::Read<0>(), table_slope(), to_real(at.key - at.position), at.head);
      add(device::Read<1>(), table_bias(), device::Real(1.0f), at.head, bucket(at));
    }
  };
  struct Score2 : device::Formula {
    static constexpr bool by_key = true, caps = true;
    template <class At>
    static auto of_key(const At& at) {
      return device::row_values(inverse(abs(at.read(scalar_cap()))));
    }
    template <class At>
    static auto cap(const At& at) {
      return abs(at.read(scalar_cap()));
    }
    template <class At, class OfKey>
    static auto before_cap(const At& at, const OfKey& of_key) {
      return tanh(at.score * of_key.a);
    }
    template <class At, class OfKey>
    static auto value(const At& at, const OfKey& of_key) {
      return cap(at) * before_cap(at, of_key);
    }
    template <class At, class OfKey>
    static auto derivative(const At& at, const OfKey& of_key) {
      return fma(-before_cap(at, of_key), before_cap(at, of_key), device::Real(1.0f));
    }
  };
  using Window = std::conditional_t<tested, WindowOfHead, WindowOfRow>;
  using Mask = device::Both<typename Base::Mask, device::FormulaMask<Window, Params>>;
  using Score = std::conditional_t<capped, device::FormulaScore<Params, Score1, Score2>,
                                   device::FormulaScore<Params, Score1>>;
  using Sinks = device::SinkLogits<Params>;

  static AttentionSpec add_to(AttentionSpec spec) {
    using Kind = TableDimension::Kind;
    spec.mask.push_back(FormulaMask{tested ? "key <= position && position - key < 9 * (head + 1)"
                                           : "key <= position && position - key < 20 + row % 3"});
    spec.score = {"score + slope[head] * (key - position) + bias[min(abs(key - position), 5)]"};
    if (capped) spec.score.emplace_back("cap * tanh(score / cap)");
    spec.tables = {{"bias", DType::fp32, {{.kind = Kind::heads_q}, {.kind = Kind::number, .size = 6}}, true},
                   {"slope", DType::fp32, {{.kind = Kind::heads_q}}, true}};
    if (capped) spec.scalars = {{"cap", DType::fp32}};
    spec.sink_logits = true;
    return spec.validated();
  }
};

// Scores that are shifted by what nobody learns, and the interval.
template <class Base>
struct WithShift : WithLearned<Base, false, false> {
  using Of = WithLearned<Base, false, false>;
  struct Score1 : Of::Score1 {
    static constexpr int reads = 0;
  };
  using Score = device::FormulaScore<LearnedParams, Score1>;
  static AttentionSpec add_to(AttentionSpec spec) {
    spec = Of::add_to(std::move(spec));
    for (DeclaredTable& table : spec.tables) table.grad = false;
    return spec.validated();
  }
};

template <class Spec>
constexpr bool learns = requires { Spec::learns; };
template <class Spec>
using BackwardParamsOf =
    std::conditional_t<learns<Spec>, LearnedParams, ParamsInShard<Spec, device::CudaBackwardParams>>;
// Adds its formulas to the spec if Spec has some.
template <class Spec>
AttentionSpec with_learned(AttentionSpec spec) {
  if constexpr (learns<Spec>) return Spec::add_to(std::move(spec));
  return spec;
}

}  // namespace flashjit::testing_support
