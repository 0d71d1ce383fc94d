// Causal attention on this machine's CPU, from a spec.
#include <cstdio>
#include <flashjit/flashjit.hpp>
#include <vector>

int main() try {
  constexpr int batch = 1, seqlen = 512, heads = 8, head_dim = 64;
  std::vector<float> q(batch * seqlen * heads * head_dim, 0.1f), k = q, v = q, o(q.size());
  const auto tensor = [](std::vector<float>& data) {
    return flashjit::Tensor::contiguous(data.data(), flashjit::DType::fp32, {},
                                        {batch, seqlen, heads, head_dim});
  };

  flashjit::Engine engine({.device = "cpu"});  // or "cuda:0", with tensors in its memory
  const auto spec = flashjit::AttentionSpec::from_json(
      R"({"op": "forward", "dtype": "fp32", "head_dim": 64, "mask": ["causal"], "lse": false})");
  const flashjit::Kernel& kernel = engine.get(
      spec,
      {.batch = batch, .seqlen_q = seqlen, .seqlen_k = seqlen, .num_heads_q = heads, .num_heads_kv = heads});
  kernel.launch({.q = tensor(q), .k = tensor(k), .v = tensor(v), .o = tensor(o)});

  std::printf("%s, %s: o[0] = %.3f\n", engine.target().str().c_str(), to_string(kernel.info().origin), o[0]);
  return 0;
} catch (const flashjit::Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return 1;
}
