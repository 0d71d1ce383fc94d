// Decode steps of DeepSeek-V3's attention: a token has one row of 512 latent and 64 rotary columns, which is
// key and value of all heads. A launch writes the new tokens' rows into the cache, rotates their last
// columns and the queries', and attends. On this machine's CPU.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flashjit/workspace.hpp>
#include <flashjit/wrap.hpp>
#include <vector>

int main() try {
  constexpr int requests = 2, heads = 16, columns = 576, latent = 512, page_size = 64, pages = 2, steps = 40;
  std::vector<float> q(requests * heads * columns), rotated(q.size()), o(requests * heads * latent),
      row(requests * columns), cache(requests * pages * page_size * columns);
  std::vector<std::int32_t> page_table = {3, 0, 1, 2}, lengths = {0, 60};  // requests may be of any length

  using flashjit::wrap;
  flashjit::Engine engine({.device = "cpu"});
  const flashjit::Shape shape = {.batch = requests,
                                 .seqlen_q = 1,
                                 .seqlen_k = pages * page_size,
                                 .num_heads_q = heads,
                                 .num_heads_kv = 1,
                                 .page_size = page_size};
  const flashjit::Kernel& decode = engine.get(flashjit::AttentionSpec::from_json(R"json({
      "op": "decode", "dtype": "fp32", "head_dim": 576, "head_dim_v": 512, "v_in_k": true,
      "paged": true, "append": true, "lse": false,
      "rotary": {"style": "interleaved", "first": 512, "q": true}})json"),
                                              shape);

  flashjit::EngineStep step(engine);
  step.add(decode,
           {.q = wrap(q, {requests, 1, heads, columns}),
            .k = wrap(cache, {requests * pages, page_size, 1, columns}),
            .o = wrap(o, {requests, 1, heads, latent}),
            .seqlens_k = wrap(lengths, {requests}),
            .page_table = wrap(page_table, {requests, pages}),
            .k_new = wrap(row, {requests, 1, 1, columns}),
            .q_out = wrap(rotated, {requests, 1, heads, columns}),
            .softmax_scale = 1 / std::sqrt(192.0f)},  // of the 128 + 64 columns that a head has in the model
           shape);

  for (int token = 0; token < steps; ++token) {
    // A model computes these. Queries of zeros weigh all tokens alike.
    for (int i = 0; i < requests; ++i) row[i * columns] = static_cast<float>(token);
    for (std::int32_t& length : lengths) ++length;
    step.launch();
  }

  // The mean of 0 to 39; the other began with 60 tokens of zeros.
  for (int i = 0; i < requests; ++i) std::printf("request %d: %.3f\n", i, o[i * heads * latent]);
  return 0;
} catch (const flashjit::Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return 1;
}
