// A forward and its backward together: the same weights drop in both, any lse stays inside the tensors, and
// training reaches the loss that float64 reaches.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "runtime/dropout.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support::training {
namespace {

class TrainingOn : public ComputesOnEveryDevice {
 protected:
  void SetUp() override {
    ComputesOnEveryDevice::SetUp();
    const AttentionSpec spec = attention_spec(Operation::backward, DType::bf16, 64, {}, {});
    if (IsSkipped()) return;
    if (const std::string why = why_unsupported(spec, Target::parse(on().target())); !why.empty())
      GTEST_SKIP() << why;
  }
};

// Sets t[0, row, 0, column] of every head to 1 where row is column, else to 0.
void make_identity(GuardedTensor& tensor) {
  const Tensor& t = tensor.on_host();
  for (std::int64_t row = 0; row < t.shape[1]; ++row)
    for (std::int64_t head = 0; head < t.shape[2]; ++head)
      for (std::int64_t c = 0; c < t.shape[3]; ++c)
        verify::store_element(t.data, t.dtype, row * t.strides[1] + head * t.strides[2] + c * t.strides[3],
                              row == c ? 1.0f : 0.0f);
  tensor.upload();
}

double element_of(const Tensor& t, std::int64_t row, std::int64_t head, std::int64_t c) {
  return verify::load_element(t.data, t.dtype, row * t.strides[1] + head * t.strides[2] + c * t.strides[3]);
}

// With V = 1 the forward writes its weights, with dO = 1 the backward writes their transpose to dV.
TEST_P(TrainingOn, TheSameWeightsDropInBothDirections) {
  for (const DType dtype : on().dtypes()) {
    Case c{.heads_q = 2,
           .heads_kv = 2,
           .seqlen_q = 190,
           .seqlen_k = 230,
           .data = Data::plain,
           .dropout_p = 0.25,
           .seed = 7};
    c.spec =
        forward_spec(dtype, 64, {CausalMask{}}, {.head_dim_v = 256, .dropout = true, .o_dtype = DType::fp32});
    if (!takes_next(c.spec)) continue;
    Workload forward(on(), c);
    make_identity(forward.v());
    forward.kernel(on().engine()).launch(forward.args());
    ASSERT_TRUE(forward.fetch());

    c.spec.op = Operation::backward;
    c.spec.grad_dtype = DType::fp32;
    c.spec = c.spec.validated();
    Workload backward(on(), c);
    make_identity(backward.tensor(&AttentionArgs::d_o));
    backward.kernel(on().engine()).launch(backward.args());
    ASSERT_TRUE(backward.fetch());

    const Tensor &o = *forward.host_args().o, &dv = *backward.host_args().dv;
    int seen = 0, dropped = 0, differ = 0;
    for (int head = 0; head < c.heads_q; ++head)
      for (int row = 0; row < c.seqlen_q; ++row)
        for (int key = 0; key <= row + c.seqlen_k - c.seqlen_q; ++key) {
          const double weight = element_of(o, row, head, key), transposed = element_of(dv, key, head, row);
          ++seen;
          dropped += weight == 0;
          // Both may round a weight to 16 bits, and it to fp16's least numbers.
          differ +=
              (weight == 0) != (transposed == 0) || std::abs(weight - transposed) > 0x1p-6 * weight + 0x1p-20;
        }
    EXPECT_EQ(differ, 0) << "of " << seen << ", " << dropped << " dropped";
    EXPECT_NEAR(dropped, 0.25 * seen, 5 * std::sqrt(0.25 * 0.75 * seen));
  }
}

// An lse that no forward wrote gives wrong numbers, but every access stays inside: pages around the tensors
// are not mapped, and what lies around the elements must not change.
TEST_P(TrainingOn, LaunchesWithAnyLseStayInside) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr std::array values = {
      std::numeric_limits<float>::quiet_NaN(), infinity, -infinity, 3e38f, -3e38f, 0.0f};
  const std::vector<std::vector<Mask>> masks = {
      {}, {CausalMask{}, PaddingMask{}}, {BlockSparseMask{.block_m = 64, .block_n = 64}}, {TreeMask{}}};
  for (const DType dtype : on().dtypes())
    for (const auto& mask : masks)
      for (const bool varlen : {false, true}) {
        const AttentionSpec spec =
            attention_spec(Operation::backward, dtype, 64, mask, {.varlen = varlen, .dropout = !varlen});
        if (!takes_next(spec, 3)) continue;
        Case c{.spec = spec, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 100, .seqlen_k = 130};
        if (varlen) c.lengths_q = {37, 100}, c.lengths_k = {130, 70};
        Workload workload(on(), c);
        GuardedTensor& lse = workload.tensor(&AttentionArgs::lse);
        const Tensor t = lse.on_host();
        std::int64_t last = 0;
        for (int i = 0; i < t.rank; ++i) last += (t.shape[i] - 1) * t.strides[i];
        for (std::int64_t i = 0; i <= last; ++i)
          static_cast<float*>(t.data)[i] = values[static_cast<std::size_t>(i) % values.size()];
        lse.upload();
        workload.kernel(on().engine()).launch(workload.args());
        EXPECT_TRUE(workload.fetch());
      }
}

// ---- Training of two layers ----

using Numbers = std::vector<double>;

constexpr int num_sequences = 2, length = 24, num_heads = 2, dim = 8, width = num_heads * dim,
              num_rows = num_sequences * length, num_steps = 200, num_layers = 2;
constexpr double dropout_p = 0.1, z_loss = 1e-2;
constexpr std::uint64_t dropout_seed = 11;

// Causal attention with dropout of [num_sequences, length, num_heads, dim]. `call` numbers the dropout's
// offsets.
struct Attention {
  virtual ~Attention() = default;
  virtual void forward(std::uint64_t call, const Numbers& q, const Numbers& k, const Numbers& v, Numbers& o,
                       Numbers& lse) = 0;
  // The gradients for the q, k, v, o and lse of that call.
  virtual void backward(std::uint64_t call, const Numbers& q, const Numbers& k, const Numbers& v,
                        const Numbers& o, const Numbers& lse, const Numbers& d_o, const Numbers& dlse,
                        Numbers& dq, Numbers& dk, Numbers& dv) = 0;
};

// Attention in float64, by its definition.
struct Float64Attention : Attention {
  // Calls visit(weights of a row's softmax, factors of dropout, index of the row in q, of key 0 in k, of
  // lse).
  template <class Visit>
  void rows(std::uint64_t call, const Numbers& q, const Numbers& k, Visit&& visit) {
    const Dropout dropout{.p = dropout_p, .seed = dropout_seed, .offset = call};
    std::vector<std::uint8_t> keep(length);
    for (int b = 0; b < num_sequences; ++b)
      for (int head = 0; head < num_heads; ++head)
        for (int row = 0; row < length; ++row) {
          dropout_row(dropout, b, head, row, keep);
          const std::size_t keys = static_cast<std::size_t>(b * length * width + head * dim),
                            at = keys + static_cast<std::size_t>(row * width);
          Numbers scores(static_cast<std::size_t>(row + 1)), factors(scores.size());
          double sum = 0;
          for (std::size_t j = 0; j < scores.size(); ++j) {
            for (int c = 0; c < dim; ++c) scores[j] += q[at + c] * k[keys + j * width + c] / std::sqrt(dim);
            factors[j] = keep[j] ? dropout_scale(dropout_p) : 0;
            sum += std::exp(scores[j]);
          }
          for (double& s : scores) s = std::exp(s) / sum;
          visit(scores, factors, at, keys, static_cast<std::size_t>((b * num_heads + head) * length + row),
                std::log(sum));
        }
  }
  void forward(std::uint64_t call, const Numbers& q, const Numbers& k, const Numbers& v, Numbers& o,
               Numbers& lse) override {
    rows(
        call, q, k,
        [&](const Numbers& p, const Numbers& m, std::size_t at, std::size_t keys, std::size_t row, double l) {
          lse[row] = l;
          for (int c = 0; c < dim; ++c) {
            o[at + c] = 0;
            for (std::size_t j = 0; j < p.size(); ++j) o[at + c] += m[j] * p[j] * v[keys + j * width + c];
          }
        });
  }
  // By the softmax's derivative: dS = P (M dP - sum(P M dP) + dlse), without o and lse.
  void backward(std::uint64_t call, const Numbers& q, const Numbers& k, const Numbers& v, const Numbers&,
                const Numbers&, const Numbers& d_o, const Numbers& dlse, Numbers& dq, Numbers& dk,
                Numbers& dv) override {
    for (Numbers* gradient : {&dq, &dk, &dv}) std::fill(gradient->begin(), gradient->end(), 0);
    rows(call, q, k,
         [&](const Numbers& p, const Numbers& m, std::size_t at, std::size_t keys, std::size_t row, double) {
           Numbers dp(p.size());
           double mean = 0;
           for (std::size_t j = 0; j < p.size(); ++j) {
             for (int c = 0; c < dim; ++c) {
               dp[j] += m[j] * d_o[at + c] * v[keys + j * width + c];
               dv[keys + j * width + c] += m[j] * p[j] * d_o[at + c];
             }
             mean += p[j] * dp[j];
           }
           for (std::size_t j = 0; j < p.size(); ++j) {
             const double ds = p[j] * (dp[j] - mean + dlse[row]) / std::sqrt(dim);
             for (int c = 0; c < dim; ++c) {
               dq[at + c] += ds * k[keys + j * width + c];
               dk[keys + j * width + c] += ds * q[at + c];
             }
           }
         });
  }
};

// The kernels of an engine. Gradients are float32, everything else but lse has the dtype.
class KernelAttention : public Attention {
 public:
  KernelAttention(Engine& engine, DType dtype) : dtype_(dtype) {
    AttentionSpec spec{.dtype = dtype, .head_dim = dim, .mask = {CausalMask{}}, .dropout = true};
    forward_ = &engine.get(spec.validated(), shape);
    spec.op = Operation::backward;
    spec.grad_dtype = DType::fp32;
    backward_ = &engine.get(spec.validated(), shape);
    workspace_.resize(backward_->workspace_bytes(shape) / sizeof(Line) + 1);
  }
  void forward(std::uint64_t call, const Numbers& q, const Numbers& k, const Numbers& v, Numbers& o,
               Numbers& lse) override {
    AttentionArgs args = arguments_of(call, q, k, v);
    args.o = input(3, o), args.lse = rows(4, lse);
    forward_->launch(args);
    read(*args.o, o), read(*args.lse, lse);
  }
  void backward(std::uint64_t call, const Numbers& q, const Numbers& k, const Numbers& v, const Numbers& o,
                const Numbers& lse, const Numbers& d_o, const Numbers& dlse, Numbers& dq, Numbers& dk,
                Numbers& dv) override {
    AttentionArgs args = arguments_of(call, q, k, v);
    args.o = input(3, o), args.lse = rows(4, lse), args.d_o = input(5, d_o), args.dlse = rows(6, dlse);
    args.dq = tensor(7, DType::fp32), args.dk = tensor(8, DType::fp32), args.dv = tensor(9, DType::fp32);
    args.workspace = Tensor::contiguous(workspace_.data(), DType::int32, {},
                                        {static_cast<std::int64_t>(workspace_.size() * sizeof(Line) / 4)});
    backward_->launch(args);
    read(*args.dq, dq), read(*args.dk, dk), read(*args.dv, dv);
  }

 private:
  static constexpr Shape shape{num_sequences, length, length, num_heads, num_heads};
  struct alignas(64) Line {
    float numbers[16];
  };

  AttentionArgs arguments_of(std::uint64_t call, const Numbers& q, const Numbers& k, const Numbers& v) {
    return {.q = input(0, q),
            .k = input(1, k),
            .v = input(2, v),
            .dropout_p = dropout_p,
            .dropout_seed = dropout_seed,
            .dropout_offset = call};
  }
  Tensor tensor(std::size_t i, DType dtype) {
    return Tensor::contiguous(memory_[i].data(), dtype, {}, {num_sequences, length, num_heads, dim});
  }
  Tensor input(std::size_t i, const Numbers& values) { return write(tensor(i, dtype_), values); }
  Tensor rows(std::size_t i, const Numbers& values) {
    return write(Tensor::contiguous(memory_[i].data(), DType::fp32, {}, {num_sequences, num_heads, length}),
                 values);
  }
  static Tensor write(const Tensor& t, const Numbers& values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      verify::store_element(t.data, t.dtype, static_cast<std::int64_t>(i), static_cast<float>(values[i]));
    return t;
  }
  static void read(const Tensor& t, Numbers& values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = verify::load_element(t.data, t.dtype, static_cast<std::int64_t>(i));
  }

  DType dtype_;
  const Kernel *forward_, *backward_;
  std::array<std::array<float, num_rows * width>, 10> memory_{};
  std::vector<Line> workspace_;
};

Numbers random_numbers(std::size_t count, std::uint64_t seed, double scale) {
  std::vector<float> values(count);
  verify::fill_random(Tensor::contiguous(values.data(), DType::fp32, {}, {static_cast<std::int64_t>(count)}),
                      seed, {.outlier_every = 0, .long_row_every = 0});
  Numbers numbers(values.begin(), values.end());
  for (double& number : numbers) number *= scale;
  return numbers;
}

// y += x W, of [num_rows, width] and [width, width].
void multiply(const Numbers& x, const Numbers& w, Numbers& y) {
  for (std::size_t row = 0; row < num_rows; ++row)
    for (std::size_t i = 0; i < width; ++i)
      for (std::size_t c = 0; c < width; ++c) y[row * width + c] += x[row * width + i] * w[i * width + c];
}
// The gradients of that: dw = x^T dy, dx += dy W^T.
void multiply_backward(const Numbers& x, const Numbers& w, const Numbers& dy, Numbers& dw, Numbers& dx) {
  std::fill(dw.begin(), dw.end(), 0);
  for (std::size_t row = 0; row < num_rows; ++row)
    for (std::size_t i = 0; i < width; ++i)
      for (std::size_t c = 0; c < width; ++c) {
        dw[i * width + c] += x[row * width + i] * dy[row * width + c];
        dx[row * width + i] += dy[row * width + c] * w[i * width + c];
      }
}

// Two layers x + attention(x Wq, x Wk, x Wv) Wo learn random targets by gradient descent with momentum. The
// loss is the mean squared error, plus z_loss times the mean of lse^2, so that it has a gradient by lse. All
// but the attention is computed in float64. Returns the loss before each step, and after the last.
std::vector<double> train(Attention& attention) {
  constexpr std::size_t count = num_rows * width;
  constexpr double rate = 0.2, momentum = 0.9;
  const Numbers inputs = random_numbers(count, 1, 1), targets = random_numbers(count, 2, 1);
  struct Layer {
    std::array<Numbers, 4> weights, steps;  // of q, k, v and o
    std::array<Numbers, 4> x = {Numbers(count), Numbers(count), Numbers(count), Numbers(count)};
    Numbers lse = Numbers(num_rows * num_heads), input;
  };
  std::vector<Layer> layers(num_layers);
  for (std::size_t l = 0; l < num_layers; ++l)
    for (std::size_t w = 0; w < 4; ++w) {
      layers[l].weights[w] = random_numbers(width * width, 3 + 4 * l + w, 1 / std::sqrt(width));
      layers[l].steps[w].resize(width * width);
    }
  std::vector<double> losses;
  for (int step = 0; step <= num_steps; ++step) {
    const auto call = [&](std::size_t layer) {
      return static_cast<std::uint64_t>(step) * num_layers + layer;
    };
    Numbers y = inputs;
    double loss = 0;
    for (std::size_t l = 0; l < num_layers; ++l) {
      Layer& layer = layers[l];
      layer.input = y;
      for (std::size_t w = 0; w < 3; ++w) {
        std::fill(layer.x[w].begin(), layer.x[w].end(), 0);
        multiply(y, layer.weights[w], layer.x[w]);
      }
      attention.forward(call(l), layer.x[0], layer.x[1], layer.x[2], layer.x[3], layer.lse);
      multiply(layer.x[3], layer.weights[3], y);
      for (const double lse : layer.lse) loss += z_loss * lse * lse / static_cast<double>(layer.lse.size());
    }
    Numbers dy(count);
    for (std::size_t i = 0; i < count; ++i) {
      loss += (y[i] - targets[i]) * (y[i] - targets[i]) / count;
      dy[i] = 2 * (y[i] - targets[i]) / count;
    }
    losses.push_back(loss);
    for (std::size_t l = num_layers; step < num_steps && l-- > 0;) {
      Layer& layer = layers[l];
      Numbers dlse = layer.lse, dw(width * width);
      for (double& d : dlse) d *= 2 * z_loss / static_cast<double>(dlse.size());
      std::array<Numbers, 4> dx = {Numbers(count), Numbers(count), Numbers(count), Numbers(count)};
      const auto descend = [&](std::size_t w) {
        for (std::size_t i = 0; i < dw.size(); ++i) {
          layer.steps[w][i] = momentum * layer.steps[w][i] - rate * dw[i];
          layer.weights[w][i] += layer.steps[w][i];
        }
      };
      multiply_backward(layer.x[3], layer.weights[3], dy, dw, dx[3]);
      descend(3);
      attention.backward(call(l), layer.x[0], layer.x[1], layer.x[2], layer.x[3], layer.lse, dx[3], dlse,
                         dx[0], dx[1], dx[2]);
      for (std::size_t w = 0; w < 3; ++w) {
        multiply_backward(layer.input, layer.weights[w], dx[w], dw, dy);
        descend(w);
      }
    }
  }
  return losses;
}

TEST_P(TrainingOn, TwoLayersReachTheLossOfFloat64) {
  if (on().is_cuda()) GTEST_SKIP() << "the chain is trained on CPUs";
  static const std::vector<double> expected = [] {
    Float64Attention attention;
    return train(attention);
  }();
  ASSERT_LT(expected.back(), 0.5 * expected.front()) << "it learns";
  for (const DType dtype : own_dtypes()) {
    if (dtype == DType::fp16 && !test_all()) continue;
    KernelAttention attention(on().engine(), dtype);
    const std::vector<double> losses = train(attention);
    double worst = 0;
    for (std::size_t step = 0; step < losses.size(); ++step)
      worst = std::max(worst, std::abs(losses[step] / expected[step] - 1));
    // Measured in all steps: 1.2 units of roundoff of bf16 and of fp16, 4 of fp32.
    const double bound = dtype == DType::fp32 ? 16 * 0x1p-24 : 4 * (dtype == DType::fp16 ? 0x1p-11 : 0x1p-8);
    std::cout << "  " << to_string(dtype) << ": from " << losses.front() << " to " << losses.back()
              << ", float64 " << expected.back() << "; at most " << worst << " away\n";
    EXPECT_LE(worst, bound) << to_string(dtype);
  }
}

FLASHJIT_ON_EVERY_DEVICE(TrainingOn);

}  // namespace
}  // namespace flashjit::testing_support::training
