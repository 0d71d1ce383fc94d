// Formulas in the accumulators of backwards, and the gradients of what they read. A fragment has 16 keys and
// n rows: registers 4 i ... 4 i + 3 of a thread hold rows 8 i + 2 (lane % 4) and the next one, first of key
// lane / 4, then of key lane / 4 + 8. So a thread has many rows of two keys.
#pragma once

#include "cuda/backward_rows.cuh"
#include "cuda/formula.cuh"
#include "cuda/ptx_reduce.cuh"
#include "shared/formula_gradient.h"

namespace flashjit::device {

template <class Blocks, class Masks>
struct Listed;  // shared/listed_mask.h

FLASHJIT_FN void add_exactly(i64* words, float term) {
  const bool finite = add_to_digits(term, [&](int word, i64 amount) { red_add(words + word, amount); });
  if (!finite) red_add(reinterpret_cast<float*>(words), term);
}

// Terms that a thread's pairs give to elements of a table. Terms of one element that come in a row are added
// up in a register.
template <bool exact>
class TermsInARow {
 public:
  FLASHJIT_FN void add(i64 place, float term, const GradientTable& to) {
    if (place != place_) {
      flush(to);
      place_ = place;
    }
    sum_ += term;
  }
  FLASHJIT_FN void flush(const GradientTable& to) {
    if (sum_ != 0) store(to, sum_);
    sum_ = 0;
  }
  // Together with the other lanes of the warp.
  FLASHJIT_FN void flush_warp(const GradientTable& to) {
    const int low = static_cast<int>(place_), high = static_cast<int>(place_ >> 32);
    const int first_low = __shfl_sync(0xffffffff, low, 0), first_high = __shfl_sync(0xffffffff, high, 0);
    if (__any_sync(0xffffffff, low != first_low || high != first_high)) return flush(to);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum_ += __shfl_xor_sync(0xffffffff, sum_, lanes);
    if (tid_x() % 32 == 0) flush(to);
  }

 private:
  FLASHJIT_FN void store(const GradientTable& to, float sum) const {
    if constexpr (exact)
      add_exactly(to.sums + place_, sum);
    else
      red_add(to.data + place_, sum);
  }

  i64 place_ = -1;
  float sum_ = 0;
};

template <class Params, class... Formulas>
class ScoreGradient<FormulaScore<Params, Formulas...>> {
  using Forwards = ScoreChain<Formulas...>;
  using Backwards = GradientChain<Formulas...>;
  using Problem = typename FormulaProblemOf<Params>::type;
  using Row = FormulaRow<DistantKey, int, Problem>;
  using Key = FormulaKey<Row, int>;

 public:
  static constexpr bool changes = !Backwards::shifts || Backwards::reads > 0;
  static constexpr int reads = Backwards::reads;

  // The fragment of a warp: its problem, and the first row and key of the thread.
  struct Place {
    Problem problem;
    int row, key;

    template <class Base>
    FLASHJIT_FN Place(const Base& p, const device::Problem& of, int first_row, int first_key)
        : problem(p, static_cast<const Params&>(p).formulas, of), row(first_row), key(first_key) {}
    FLASHJIT_FN Key at(int i, int j) const {
      return Key(Row(problem, DistantKey{row, 8 * i + j % 2}, problem.heads.begin), key + j / 2 * 8);
    }
  };

  // Elements of tables that this thread's pairs read.
  template <bool exact>
  struct Terms {
    TermsInARow<exact> of_read[reads > 0 ? reads : 1];
  };

 private:
  // raw: minus infinity for a pair that a mask drops.
  FLASHJIT_FN static float weight_of(float raw, float final_score, float scale_log2, float lse_log2,
                                     float far_max) {
    if (raw == minus_infinity || far_max == -minus_infinity) return 0;
    return ex2_approx(__fmaf_rn(final_score - far_max, scale_log2, -lse_log2));
  }

  template <bool exact>
  struct Flush {
    const Params& params;
    Terms<exact>& terms;
    template <class Read, class Table, class... Indices>
    FLASHJIT_FN void operator()(Read, Table, float, const Indices&...) const {
      terms.of_read[Read::index].flush_warp(gradient_of<Table>(params));
    }
  };
  // Adds the term of a pair to an element. A dropped pair gives nothing.
  template <bool exact>
  struct AddTerm {
    const Params& params;
    const Problem& problem;
    Terms<exact>& terms;
    bool has_weight;
    template <class Read, class Table, class... Indices>
    FLASHJIT_FN void operator()(Read, Table, float term, Indices... indices) const {
      const GradientTable& to = gradient_of<Table>(params);
      if (has_weight)
        terms.of_read[Read::index].add(gradient_place<Table, exact>(problem, to, indices...), term, to);
    }
  };

 public:
  // By all lanes of a warp, after all fragments. `place`: any.
  template <bool exact, class Base>
  FLASHJIT_FN static void flush(const Base& p, const Place& place, Terms<exact>& terms) {
    if constexpr (reads > 0) {
      const typename Forwards::template OfKey<Key> of_key(place.at(0, 0));
      Backwards::apply(place.at(0, 0), of_key, ScaledScore{0, 0}, 0.f,
                       Flush<exact>{static_cast<const Params&>(p), terms});
    }
  }

  // Final scores, but for a cap that the softmax multiplies by, of a fragment of `rows` rows.
  template <int rows>
  FLASHJIT_FN static void modify(float* scores, const Place& place) {
    const float scale = place.problem.params.scale;
    const typename Forwards::template OfKey<Key> of_key[2] = {
        typename Forwards::template OfKey<Key>(place.at(0, 0)),
        typename Forwards::template OfKey<Key>(place.at(0, 2))};
#pragma unroll
    for (int i = 0; i < rows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& score = scores[4 * i + j];
        score = Forwards::template apply<true>(place.at(i, j), of_key[j / 2], ScaledScore{score, scale});
      }
      end_of_columns<(Formulas::loads || ...)>(i);
    }
  }

  // Turns products of q and k, minus infinity for pairs that a mask drops, into weights, and products of do
  // and v into gradients by the products of q and k. numbers(i, lse_log2, delta, far_max) has the numbers of
  // rows 8 i and 8 i + 1 of the thread; change(index, product) is what dropout makes of a product.
  template <int rows, bool exact, class Base, class Numbers, class Change>
  FLASHJIT_FN static void differentiate(const Base& p, float* scores, float* products, const Place& place,
                                        Terms<exact>& terms, const Numbers& numbers, const Change& change) {
    const float scale = place.problem.params.scale,
                scale_log2 = FormulaScore<Params, Formulas...>::scale_log2(p);
    const typename Forwards::template OfKey<Key> of_key[2] = {
        typename Forwards::template OfKey<Key>(place.at(0, 0)),
        typename Forwards::template OfKey<Key>(place.at(0, 2))};
#pragma unroll
    for (int i = 0; i < rows / 8; ++i) {
      float lse_log2[2], delta[2], far_max[2];
      numbers(i, lse_log2, delta, far_max);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float raw = scores[4 * i + j];
        const Key at = place.at(i, j);
        const float final_score = Forwards::template apply<true>(at, of_key[j / 2], ScaledScore{raw, scale});
        const float weight = weight_of(raw, final_score, scale_log2, lse_log2[j % 2], far_max[j % 2]);
        const float gradient = weight * (change(4 * i + j, products[4 * i + j]) - delta[j % 2]);
        const float changed = Backwards::apply(
            at, of_key[j / 2], ScaledScore{raw, scale}, gradient,
            AddTerm<exact>{static_cast<const Params&>(p), place.problem, terms, weight != 0});
        scores[4 * i + j] = weight;
        products[4 * i + j] = weight == 0 ? 0 : changed;
      }
      end_of_columns<(Formulas::loads || ...)>(i);
    }
    if constexpr (reads > 0) __syncwarp();  // lanes may have parted where they add to memory
  }

  // One pair, in a kernel whose threads have few rows: the gradient by the product of q and k. The key is the
  // thread's first one and its distance, which the compiler knows.
  template <class Base>
  FLASHJIT_FN static float of_pair(const Base& p, const device::Problem& of, int row, int first_key,
                                   int distance, float raw, float lse_log2, float far_max, float product,
                                   float delta) {
    const Problem problem(p, static_cast<const Params&>(p).formulas, of);
    const FormulaKey at(FormulaRow(problem, row, of.head_q), DistantKey{first_key, distance});
    const typename Forwards::template OfKey<decltype(at)> of_key(at);
    const ScaledScore score{raw, problem.params.scale};
    const float weight = weight_of(raw, Forwards::template apply<true>(at, of_key, score),
                                   FormulaScore<Params, Formulas...>::scale_log2(p), lse_log2, far_max);
    const float changed = Backwards::apply(at, of_key, score, weight * (product - delta), NoElements{});
    return weight == 0 ? 0 : changed;
  }
};

// Gives `value` to the pairs that a mask with formulas drops, in `tiles` fragments of 16 keys each.
// others(part) does the same for a part without formulas. It returns the part's look-up of all these pairs
// (shared/mask.h).
template <int rows, int tiles = 1, class Mask, class Others>
FLASHJIT_FN void drop_pairs(float*, const Mask& mask, const Problem&, int, int, float, const Others& others) {
  others(mask);
}
template <int rows, int tiles = 1, class A, class B, class Others>
FLASHJIT_FN void drop_pairs(float* scores, const Both<A, B>& mask, const Problem& problem, int first_row,
                            int first_key, float value, const Others& others) {
  if constexpr (has_formula<A> || has_formula<B>) {
    drop_pairs<rows, tiles>(scores, mask.a, problem, first_row, first_key, value, others);
    drop_pairs<rows, tiles>(scores, mask.b, problem, first_row, first_key, value, others);
  } else {
    others(mask);
  }
}
// Only blocks without a bitmask ask the masks that lists were made of.
template <int rows, int tiles = 1, class Blocks, class Masks, class Others>
FLASHJIT_FN void drop_pairs(float* scores, const Listed<Blocks, Masks>& mask, const Problem& problem,
                            int first_row, int first_key, float value, const Others& others) {
  const int found = others(mask.blocks);
  if (found == by_masks || found == not_found)
    drop_pairs<rows, tiles>(scores, mask.others, problem, first_row, first_key, value, others);
}
template <int rows, int tiles = 1, class Formula, class Params, class Others>
  requires(!Formula::interval)
FLASHJIT_FN void drop_pairs(float* scores, const FormulaMask<Formula, Params>& mask, const Problem&,
                            int first_row, int first_key, float value, const Others&) {
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
    const auto place = [&](int i, int j) {
      return FormulaKey(FormulaRow(mask.problem, first_row + 8 * i + j % 2, mask.problem.heads.begin),
                        first_key + tile * 16 + j / 2 * 8);
    };
    const decltype(Formula::of_key(place(0, 0))) of_key[2] = {Formula::of_key(place(0, 0)),
                                                              Formula::of_key(place(0, 2))};
#pragma unroll
    for (int i = 0; i < rows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!Formula::value(place(i, j), of_key[j / 2]).v) scores[tile * (rows / 2) + 4 * i + j] = value;
      end_of_columns<Formula::loads>(i);
    }
  }
}

// Zeros for the gradients that later steps add to. By all threads of a grid.
template <class Params>
FLASHJIT_FN void clear_gradients(const Params& p) {
  const i64 first = static_cast<i64>(ctaid_x()) * backward_threads + tid_x();
  const i64 threads = static_cast<i64>(nctaid_x()) * backward_threads;
#pragma unroll 1
  for (int table = 0; table < most_formula_tables; ++table) {
    const GradientTable& gradient = p.gradients.tables[table];
    if (gradient.sums)
      for (i64 i = first; i < gradient.count * exact_sum_words; i += threads) gradient.sums[i] = 0;
    else
      for (i64 i = first; i < gradient.count; i += threads) *gradient.element(i) = 0;
  }
}

// The gradient of a head's sink logit: minus the sum over its rows of the logit's weight exp(logit - lse)
// times delta. By a block, always in the same order.
template <class Spec, class Params>
FLASHJIT_FN void add_up_sink_logit(const Params& p, int head) {
  constexpr int warps = backward_threads / 32;
  extern __shared__ __align__(1024) char dynamic_shared[];
  float* const of_warps = reinterpret_cast<float*>(dynamic_shared);
  griddepcontrol_wait();
  float sum = 0;
  for (int batch = 0; batch < p.batch; ++batch) {
    const Problem problem = make_problem<Spec::varlen, Spec::Mask::padding>(p, batch, head);
    const i64 place = head * p.rows + p.first_row(batch, problem.first_q, Spec::varlen);
    for (int row = static_cast<int>(tid_x()); row < problem.seqlen_q; row += backward_threads) {
      const float logit =
          SinkLogits<Params>::template log2_above<typename Spec::Score>(p, head, p.far_max[place + row]);
      const float weight = ex2_approx(logit - p.lse_log2[place + row]);
      if (weight != 0) sum -= weight * p.delta[place + row];
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  if (tid_x() % 32 == 0) of_warps[tid_x() / 32] = sum;
  __syncthreads();
  if (tid_x() != 0) return;
  for (int i = 1; i < warps; ++i) sum += of_warps[i];
  *p.gradients.sink_logits().element(head) = sum;
}

// A deterministic backward's last step: elements from their exact sums; further blocks write those of sink
// logits.
template <class Spec, class Params>
FLASHJIT_FN void backward_tables(const Params& p) {
  u32 block = ctaid_x();
#pragma unroll 1
  for (int table = 0; table < most_formula_tables; ++table) {
    const GradientTable& gradient = p.gradients.tables[table];
    const u32 blocks =
        static_cast<u32>((gradient.count + backward_elements_of_block - 1) / backward_elements_of_block);
    if (block < blocks) {
      const i64 first = static_cast<i64>(block) * backward_elements_of_block;
      for (i64 i = first + tid_x(); i < min(first + backward_elements_of_block, gradient.count);
           i += backward_threads)
        *gradient.element(i) = exact_sum(gradient.sums + i * exact_sum_words);
      return;
    }
    block -= blocks;
  }
  if constexpr (Spec::Sinks::exist) add_up_sink_logit<Spec>(p, static_cast<int>(block));
}

}  // namespace flashjit::device
