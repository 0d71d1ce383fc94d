// Attention with a score and a mask of one's own: ALiBi within documents, on this machine's CPU.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flashjit/flashjit.hpp>
#include <vector>

int main() try {
  constexpr int seqlen = 512, heads = 8, head_dim = 64;
  std::vector<float> q(seqlen * heads * head_dim, 0.1f), k = q, v = q, o(q.size()), slope(heads);
  std::vector<std::int32_t> document(seqlen);
  for (int h = 0; h < heads; ++h) slope[h] = std::exp2(-static_cast<float>(h + 1));
  for (int key = 0; key < seqlen; ++key) document[key] = key / 100;
  for (int key = 0; key < seqlen; ++key) v[key * heads * head_dim] = static_cast<float>(document[key]);
  const auto tensor = [](std::vector<float>& data) {
    return flashjit::Tensor::contiguous(data.data(), flashjit::DType::fp32, {}, {1, seqlen, heads, head_dim});
  };

  flashjit::Engine engine({.device = "cpu"});
  const auto spec = flashjit::AttentionSpec::from_json(R"json({
      "op": "forward", "dtype": "fp32", "head_dim": 64, "lse": false,
      "mask": ["causal", "document[key] == document[position]"],
      "score": ["score + slope[head] * (key - position)", "cap * tanh(score / cap)"],
      "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]},
                 "slope": {"dtype": "fp32", "shape": ["heads_q"]}},
      "scalars": {"cap": "fp32"}})json");
  const flashjit::Kernel& kernel = engine.get(
      spec,
      {.batch = 1, .seqlen_q = seqlen, .seqlen_k = seqlen, .num_heads_q = heads, .num_heads_kv = heads});
  const flashjit::NamedArgument named[] = {
      {"document", flashjit::Tensor::contiguous(document.data(), flashjit::DType::int32, {}, {1, seqlen})},
      {"slope", flashjit::Tensor::contiguous(slope.data(), flashjit::DType::fp32, {}, {heads})},
      {"cap", 30}};
  kernel.launch({.q = tensor(q), .k = tensor(k), .v = tensor(v), .o = tensor(o), .named = named});

  // The rows of a document see its values only.
  for (const int row : {99, 100, 511}) std::printf("row %d: %.3f\n", row, o[row * heads * head_dim]);
  return 0;
} catch (const flashjit::Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return 1;
}
