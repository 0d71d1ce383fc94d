// Compares outputs' errors with those of FlashAttention's arithmetic, computed here: a kernel may
// add at most a fifth. The bound of the other tests is a worst case; this test holds the usual one.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "codegen/families/cpu_products.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/oracle.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::testing_support {
namespace {

constexpr double allowed = 1.2;

float rounded(DType dtype, float value) {
  return dtype == DType::bf16 ? verify::bf16_to_float(verify::float_to_bf16(value))
                              : verify::fp16_to_float(verify::float_to_fp16(value));
}

// The sizes of a case with contiguous tensors.
struct Sizes {
  std::size_t rows, heads, dim;  // sizes of o; rows of all batch entries
  std::size_t at(int batch, int seqlen, int row, int head) const {
    return ((static_cast<std::size_t>(batch) * seqlen + row) * heads + head) * dim;
  }
};

// Converts an exact weight to the weight that an algorithm multiplies with V.
using Weight = std::function<float(float)>;

// The algorithm in float32: blocks of keys, an online softmax, weights changed by `weight` before they
// meet V, one division at the end, rounded to the dtype. Weights are relative to a maximum that is
// raised once scores exceed it by more than `tolerance`. At tolerance 0 the largest weight is exactly
// 1 and rounds to itself, which is worth a third of the error if a few keys outweigh all others.
std::vector<float> flash_attention(const Case& c, const AttentionArgs& args, const Sizes& sizes,
                                   float tolerance, const Weight& weight) {
  constexpr int block_n = 64;
  const int dim = c.spec.head_dim, dim_v = c.spec.head_dim_v;
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const auto floats = [&](const Tensor& t) {
    std::vector<float> values(static_cast<std::size_t>(t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3]));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(verify::load_element(t.data, t.dtype, static_cast<std::int64_t>(i)));
    return values;
  };
  const std::vector<float> q = floats(*args.q), k = floats(*args.k), v = floats(*args.v);
  std::vector<float> o(sizes.rows * sizes.heads * sizes.dim);
  for (const verify::Sequence& s : verify::sequences_of(c.spec, args)) {
    for (int head = 0; head < c.heads_q; ++head) {
      const int head_kv = head / (c.heads_q / c.heads_kv);
      const auto key_at = [&](int key) {
        return (static_cast<std::size_t>(s.batch) * c.seqlen_k + key) * c.heads_kv + head_kv;
      };
      for (int row = 0; row < c.seqlen_q; ++row) {
        const float* const of_q = &q[sizes.at(s.batch, c.seqlen_q, row, head) / sizes.dim * dim];
        std::vector<float> sum(static_cast<std::size_t>(dim_v));
        float top = -HUGE_VALF, total = 0;
        for (int begin = 0; begin < c.seqlen_k; begin += block_n) {
          std::vector<std::pair<int, float>> scores;
          float higher = top;
          for (int key = begin; key < std::min(begin + block_n, c.seqlen_k); ++key) {
            if (!verify::sees(c.spec, args, s, head, row, key)) continue;
            const float* const of_k = &k[key_at(key) * dim];
            float score = 0;
            for (int d = 0; d < dim; ++d) score += of_q[d] * of_k[d];
            scores.emplace_back(key, score * scale);
            higher = std::max(higher, score * scale);
          }
          if (scores.empty()) continue;
          const bool grows = !(higher - top <= tolerance);
          const float correction = grows ? std::exp(top - higher) : 1;
          if (grows) top = higher;
          total *= correction;
          for (float& x : sum) x *= correction;
          for (const auto& [key, score] : scores) {
            const float p = std::exp(score - top), rounded_p = weight(p);
            const float* const of_v = &v[key_at(key) * dim_v];
            total += p;
            for (int d = 0; d < dim_v; ++d) sum[d] += rounded_p * of_v[d];
          }
        }
        for (int d = 0; d < dim_v; ++d)
          o[sizes.at(s.batch, c.seqlen_q, row, head) + d] =
              total > 0 ? rounded(c.spec.dtype, sum[d] / total) : 0;
      }
    }
  }
  return o;
}

// Two norms of the error. Both are means over thousands of roundings, so that another order of the same
// operations changes them by a percent or two. (The largest single error is one rounding's luck: it differs
// by tens of percent among equally good algorithms.) In the root mean square, rows of large values decide.
// of_rows is the mean over rows of a row's largest error relative to its own values, so all rows count alike.
struct Errors {
  double rms = 0, of_rows = 0;
};

Errors errors_of(const std::vector<float>& o, const std::vector<double>& exact, std::size_t dim) {
  Errors e;
  std::size_t rows = 0;
  for (std::size_t row = 0; row < o.size(); row += dim) {
    double largest = 0, squares = 0;
    for (std::size_t i = row; i < row + dim; ++i) {
      const double error = std::abs(static_cast<double>(o[i]) - exact[i]);
      e.rms += error * error;
      largest = std::max(largest, error);
      squares += exact[i] * exact[i];
    }
    if (squares == 0) continue;  // the row sees no key
    e.of_rows += largest / std::sqrt(squares / static_cast<double>(dim));
    ++rows;
  }
  return {std::sqrt(e.rms / static_cast<double>(o.size())), e.of_rows / static_cast<double>(rows)};
}

// The output of a case's kernel, and the outputs to compare it with.
class Measured {
 public:
  Measured(TestDevice& device, const Case& c)
      : case_(c),
        workload_(device, c),
        sizes_{static_cast<std::size_t>(c.batch) * c.seqlen_q, static_cast<std::size_t>(c.heads_q),
               static_cast<std::size_t>(c.spec.head_dim_v)},
        exact_(sizes_.rows * sizes_.heads * sizes_.dim) {
    const verify::Oracle oracle = verify::oracle_of(c.spec, workload_.host_args());
    oracle.compute([&](const verify::Expected& row) {
      if (oracle.outputs[row.output].name != "o") return;
      std::copy(row.values.begin(), row.values.end(), exact_.begin() + row.index);
    });
  }

  Errors kernel(Engine& engine) {
    workload_.reset();
    workload_.kernel(engine).launch(workload_.args());
    EXPECT_TRUE(workload_.check());
    const Tensor& o = *workload_.host_args().o;
    std::vector<float> values(exact_.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(verify::load_element(o.data, o.dtype, static_cast<std::int64_t>(i)));
    return errors_of(values, exact_, sizes_.dim);
  }
  Errors algorithm(float tolerance, const Weight& weight) const {
    return errors_of(flash_attention(case_, workload_.host_args(), sizes_, tolerance, weight), exact_,
                     sizes_.dim);
  }
  Errors algorithm(float tolerance = 0) const {
    return algorithm(tolerance, [&](float p) { return rounded(case_.spec.dtype, p); });
  }

 private:
  Case case_;
  Workload workload_;
  Sizes sizes_;
  std::vector<double> exact_;
};

std::vector<Case> cases() {
  std::vector<Case> list;
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const auto& [dim, dim_v] : {std::pair{64, 64}, {128, 128}, {192, 128}, {40, 72}})
      for (const bool causal : {false, true})
        for (const Data data : {Data::plain, Data::outliers, Data::long_rows})
          list.push_back({.spec = forward_spec(dtype, dim,
                                               causal ? std::vector<Mask>{CausalMask{}} : std::vector<Mask>{},
                                               {.head_dim_v = dim_v}),
                          .heads_q = 4,
                          .heads_kv = 2,
                          .seqlen_q = 150,
                          .seqlen_k = data == Data::plain ? 1500 : 400,
                          .data = data,
                          .seed = ++seed});
  return list;
}

class Accuracy : public ComputesOnEveryDevice {};

TEST_P(Accuracy, IsThatOfFlashAttention) {
  // Kernels whose products use tensor cores or AMX rescale only when
  // a maximum grows by more than 2^8, as FlashAttention-4 does.
  const Target target = Target::parse(on().target());
  const auto tolerance_of = [&](const AttentionSpec& spec) {
    return target.is_cuda() || uses_amx(spec, target) ? 8 * std::log(2.0f) : 0.0f;
  };
  const auto ratio = [](const Errors& a, const Errors& b) {
    return Errors{a.rms / b.rms, a.of_rows / b.of_rows};
  };
  Errors worst, to_exact_maxima;
  const auto raise = [](Errors& most, const Errors& by) {
    most = {std::max(most.rms, by.rms), std::max(most.of_rows, by.of_rows)};
  };
  for (const Case& c : cases()) {
    if (!takes_next(c.spec)) continue;
    Measured measured(on(), c);
    const float tolerance = tolerance_of(c.spec);
    const Errors ours = measured.kernel(on().engine()), theirs = measured.algorithm(tolerance);
    EXPECT_LE(ours.rms, allowed * theirs.rms) << c.str();
    EXPECT_LE(ours.of_rows, allowed * theirs.of_rows) << c.str();
    raise(worst, ratio(ours, theirs));
    raise(to_exact_maxima, ratio(ours, tolerance == 0 ? theirs : measured.algorithm()));
  }
  const auto print = [](const char* of, const Errors& most) {
    std::cout << "  at most " << verify::digits(most.rms, 3) << " (rms), " << verify::digits(most.of_rows, 3)
              << " (rows) of " << of << std::endl;
  };
  print("the same algorithm's error", worst);
  print("that with exact maxima", to_exact_maxima);
}

FLASHJIT_ON_EVERY_DEVICE(Accuracy);

// The norms detect worse arithmetic. Weights rounded a second time, cut off instead of
// rounded, and exponentials by too short a polynomial all exceed the limit. (If one key of
// a row outweighs all others, as under long rows, errors of weights cancel in their sum.)
TEST(AccuracyNorms, SeeWorseArithmetic) {
  TestDevice host({Device::Kind::cpu, 0}, "x86-64-v3");
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    const float unit = dtype == DType::bf16 ? 0x1p-8f : 0x1p-11f;
    const std::pair<const char*, Weight> variants[] = {
        {"rounded twice", [&](float p) { return rounded(dtype, rounded(dtype, p) * 0.7f) / 0.7f; }},
        {"cut off", [&](float p) { return rounded(dtype, p * (1 - unit / 2)); }},
        {"a coarse exponential", [&](float p) { return rounded(dtype, p * (1 + unit * std::sin(40 * p))); }}};
    for (const Data data : {Data::plain, Data::outliers}) {
      const Measured measured(host, {.spec = forward_spec(dtype, 64),
                                     .heads_q = 4,
                                     .heads_kv = 2,
                                     .seqlen_q = 150,
                                     .seqlen_k = 400,
                                     .data = data});
      const Errors good = measured.algorithm();
      for (const auto& [name, weight] : variants) {
        const Errors bad = measured.algorithm(0, weight);
        EXPECT_TRUE(bad.rms > allowed * good.rms || bad.of_rows > allowed * good.of_rows) << name;
      }
    }
  }
}

}  // namespace
}  // namespace flashjit::testing_support
