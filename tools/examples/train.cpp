// Trains: gradients of causal attention move q, k and v until its output is near a wanted one.
#include <cmath>
#include <cstdio>
#include <flashjit/flashjit.hpp>
#include <string>
#include <vector>

int main() try {
  constexpr int batch = 1, seqlen = 128, heads = 4, head_dim = 32, steps = 100;
  constexpr int size = batch * seqlen * heads * head_dim;
  constexpr float rate = 0.1f;
  std::vector<float> q(size), k(size), v(size), o(size), wanted(size), lse(batch * heads * seqlen);
  std::vector<float> d_o(size), dq(size), dk(size), dv(size);
  for (int i = 0; i < size; ++i) {
    q[i] = std::sin(1.0f * i), k[i] = std::sin(2.0f * i), v[i] = std::sin(3.0f * i);
    wanted[i] = std::sin(5.0f * i);
  }
  const auto tensor = [](std::vector<float>& data) {
    return flashjit::Tensor::contiguous(data.data(), flashjit::DType::fp32, {},
                                        {batch, seqlen, heads, head_dim});
  };
  const auto rows =
      flashjit::Tensor::contiguous(lse.data(), flashjit::DType::fp32, {}, {batch, heads, seqlen});

  flashjit::Engine engine({.device = "cpu"});
  const flashjit::Shape shape{batch, seqlen, seqlen, heads, heads};
  const auto kernel = [&](const std::string& op) -> const flashjit::Kernel& {
    return engine.get(flashjit::AttentionSpec::from_json(
                          R"({"op": ")" + op + R"(", "dtype": "fp32", "head_dim": 32, "mask": ["causal"]})"),
                      shape);
  };
  const flashjit::Kernel &forward = kernel("forward"), &backward = kernel("backward");

  struct alignas(64) Line {  // a workspace is aligned to 64 bytes
    float numbers[16];
  };
  std::vector<Line> memory(backward.workspace_bytes(shape) / sizeof(Line) + 1);
  const auto workspace = flashjit::Tensor::contiguous(memory.data(), flashjit::DType::fp32, {},
                                                      {static_cast<std::int64_t>(16 * memory.size())});

  float first = 0, loss = 0;
  for (int step = 0; step < steps; ++step) {
    forward.launch({.q = tensor(q), .k = tensor(k), .v = tensor(v), .o = tensor(o), .lse = rows});
    loss = 0;
    for (int i = 0; i < size; ++i) {
      d_o[i] = o[i] - wanted[i];  // the gradient of half the squared error
      loss += d_o[i] * d_o[i] / size;
    }
    if (step == 0) first = loss;
    backward.launch({.q = tensor(q),
                     .k = tensor(k),
                     .v = tensor(v),
                     .o = tensor(o),
                     .lse = rows,
                     .d_o = tensor(d_o),
                     .dq = tensor(dq),
                     .dk = tensor(dk),
                     .dv = tensor(dv),
                     .workspace = workspace});
    for (int i = 0; i < size; ++i) q[i] -= rate * dq[i], k[i] -= rate * dk[i], v[i] -= rate * dv[i];
  }
  std::printf("loss from %.4f to %.4f in %d steps\n", first, loss, steps);
  return loss < first / 2 ? 0 : 1;
} catch (const flashjit::Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return 1;
}
