// An engine's decode steps: each appends the keys and values of one new token to every request's pages,
// rotated by its position, and lets the token's queries attend to all that its request has. On this machine's
// CPU.
#include <cstdint>
#include <cstdio>
#include <flashjit/workspace.hpp>
#include <flashjit/wrap.hpp>
#include <vector>

int main() try {
  constexpr int requests = 3, heads_q = 8, heads_kv = 2, head_dim = 64, page_size = 16, pages = 4, steps = 40;
  std::vector<float> q(requests * heads_q * head_dim, 0.1f), rotated(q.size()), o(q.size()),
      k_new(requests * heads_kv * head_dim), v_new(k_new.size()),
      k(requests * pages * page_size * heads_kv * head_dim), v(k.size());
  std::vector<std::int32_t> page_table(requests * pages), positions(requests), lengths(requests);
  for (int i = 0; i < requests * pages; ++i) page_table[i] = requests * pages - 1 - i;
  for (int i = 0; i < requests; ++i) positions[i] = 5 * i;  // requests may be of any length

  using flashjit::wrap;
  const auto k_cache = wrap(k, {requests * pages, page_size, heads_kv, head_dim}),
             v_cache = wrap(v, {requests * pages, page_size, heads_kv, head_dim}),
             table = wrap(page_table, {requests, pages}),
             turned = wrap(rotated, {requests, 1, heads_q, head_dim});

  flashjit::Engine engine({.device = "cpu"});
  const flashjit::Shape shape = {.batch = requests,
                                 .seqlen_q = 1,
                                 .seqlen_k = pages * page_size,
                                 .num_heads_q = heads_q,
                                 .num_heads_kv = heads_kv,
                                 .page_size = page_size};
  const flashjit::Kernel& append = engine.get(flashjit::AttentionSpec::from_json(R"json({
      "op": "append_kv", "dtype": "fp32", "head_dim": 64, "paged": true,
      "rotary": {"style": "half", "q": true}})json"),
                                              shape);
  const flashjit::Kernel& decode = engine.get(flashjit::AttentionSpec::from_json(R"json({
      "op": "decode", "dtype": "fp32", "head_dim": 64, "paged": true, "lse": false})json"),
                                              shape);

  flashjit::EngineStep step(engine);
  step.add(append,
           {.q = wrap(q, {requests, 1, heads_q, head_dim}),
            .k = k_cache,
            .v = v_cache,
            .page_table = table,
            .k_new = wrap(k_new, {requests, 1, heads_kv, head_dim}),
            .v_new = wrap(v_new, {requests, 1, heads_kv, head_dim}),
            .append_positions = wrap(positions, {requests}),
            .q_out = turned},
           shape);
  step.add(decode,
           {.q = turned,
            .k = k_cache,
            .v = v_cache,
            .o = wrap(o, {requests, 1, heads_q, head_dim}),
            .seqlens_k = wrap(lengths, {requests}),
            .page_table = table},
           shape);

  for (int token = 0; token < steps; ++token) {
    // A model computes these. Keys of zeros weigh all tokens alike.
    for (float& value : v_new) value = static_cast<float>(token);
    for (int i = 0; i < requests; ++i) lengths[i] = positions[i] + 1;
    step.launch();
    for (std::int32_t& position : positions) ++position;
  }

  // The mean of 0 to 39; the others began with 5 and 10 tokens whose values are 0.
  for (int i = 0; i < requests; ++i) std::printf("request %d: %.3f\n", i, o[i * heads_q * head_dim]);
  return 0;
} catch (const flashjit::Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return 1;
}
