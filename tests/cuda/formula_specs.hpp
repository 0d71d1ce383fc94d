// Formulas for emulated kernels, as codegen renders them.
#pragma once

#include <string>
#include <type_traits>

#include "codegen/spec/spec.hpp"
#include "cuda/formula.cuh"

namespace flashjit::testing_support {

// ALiBi, then softcap, sink logits, and a window whose size goes by the row; `per_head`: by the head, too.
// Params: the kernel's. Base: a Spec without formulas.
template <class Base, class Params, bool per_head>
struct WithFormulaSpec : Base {
  using table_slope = device::Table<0, device::fp32, device::Dimension::outer>;
  using scalar_cap = device::Scalar<0, device::fp32>;

  struct WindowOfHead : device::Formula {
    static constexpr bool reads_head = true;
    template <class At, class Row>
    static auto value(const At& at, const Row&) {
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
  using Mask1 = std::conditional_t<per_head, WindowOfHead, WindowOfRow>;
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
    static constexpr bool caps = true;
    template <class At>
    static auto of_row(const At& at) {
      return device::row_values(inverse(abs(at.read(scalar_cap()))));
    }
    template <class At>
    static auto cap(const At& at) {
      return abs(at.read(scalar_cap()));
    }
    template <class At, class Row>
    static auto before_cap(const At& at, const Row& row) {
      return tanh(at.score * row.a);
    }
    template <class At, class Row>
    static auto value(const At& at, const Row& row) {
      return cap(at) * before_cap(at, row);
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

// ALiBi alone: linear in the key, or in the magnitude of its distance.
template <class Base, class Params, bool by_magnitude>
struct WithTilt : Base {
  using table_slope = device::Table<0, device::fp32, device::Dimension::outer>;

  struct Score1 : device::Formula {
    static constexpr bool reads_head = true, tilts = true, tilts_by_magnitude = by_magnitude;
    template <class At>
    static auto of_row(const At& at) {
      return device::row_values(at.read(table_slope(), at.head));
    }
    template <class At, class Row>
    static auto value(const At& at, const Row& row) {
      if constexpr (by_magnitude)
        return fma(-row.a, abs(to_real(at.position - at.key)), at.score);
      else
        return fma(row.a, to_real(at.key - at.position), at.score);
    }
    template <class At>
    static auto from(const At& at) {
      return at.position;
    }
    template <class At, class Row>
    static auto tilt(const At&, const Row& row) {
      return by_magnitude ? -row.a : row.a;
    }
  };
  using Score = device::FormulaScore<Params, Score1>;

  static AttentionSpec add_to(AttentionSpec spec) {
    spec.score = {by_magnitude ? "score - slope[head] * abs(position - key)"
                               : "score + slope[head] * (key - position)"};
    spec.tables = {{"slope", DType::fp32, {{.kind = TableDimension::Kind::heads_q}}}};
    return spec.validated();
  }
};

// A cap of the score itself.
template <class Base, class Params, bool precise_>
struct WithCap : Base {
  using scalar_cap = device::Scalar<0, device::fp32>;

  struct Score1 : device::Formula {
    static constexpr bool caps = true, caps_score = true, precise = precise_;
    template <class At>
    static auto of_row(const At& at) {
      return device::row_values(inverse(abs(at.read(scalar_cap()))));
    }
    template <class At>
    static auto cap(const At& at) {
      return abs(at.read(scalar_cap()));
    }
    template <class At, class Row>
    static auto before_cap(const At& at, const Row& row) {
      if constexpr (precise)
        return precise_tanh(at.score * row.a);
      else
        return tanh(at.score * row.a);
    }
    template <class At, class Row>
    static auto value(const At& at, const Row& row) {
      return cap(at) * before_cap(at, row);
    }
  };
  using Score = device::FormulaScore<Params, Score1>;

  static AttentionSpec add_to(AttentionSpec spec) {
    spec.score = {"cap * tanh(score / cap)"};
    spec.scalars = {{"cap", DType::fp32}};
    spec.precise = precise_;
    return spec.validated();
  }
};

// Left padding by a bias: the first keys of the first rows have scores far below the others.
template <class Base, class Params, bool farthest>
struct WithFarKeys : Base {
  struct Score1 : device::Formula {
    template <class At, class Row>
    static auto value(const At& at, const Row&) {
      using device::Integer, device::Real;
      return select(at.key < Integer(1100) - Integer(300) * at.row, at.score - Real(farthest ? 1e30f : 3e9f),
                    at.score);
    }
  };
  using Score = device::FormulaScore<Params, Score1>;

  static AttentionSpec add_to(AttentionSpec spec) {
    spec.score = {std::string("key < 1100 - 300 * row ? score - ") + (farthest ? "1e30" : "3e9") +
                  " : score"};
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
