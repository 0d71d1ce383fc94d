// An engine's decode steps: each appends the keys and values of one new token to every request's pages,
// rotated by its position, and lets the token's queries attend to all that its request has. On this machine's
// CPU.
#include <cstdint>
#include <cstdio>
#include <flashjit/flashjit.hpp>
#include <vector>

int main() try {
  constexpr int requests = 3, heads_q = 8, heads_kv = 2, head_dim = 64, page_size = 16, pages = 4, steps = 40;
  std::vector<float> q(requests * heads_q * head_dim, 0.1f), rotated(q.size()), o(q.size()),
      k_new(requests * heads_kv * head_dim), v_new(k_new.size()),
      k(requests * pages * page_size * heads_kv * head_dim), v(k.size());
  std::vector<std::int32_t> page_table(requests * pages), positions(requests), lengths(requests);
  for (int i = 0; i < requests * pages; ++i) page_table[i] = requests * pages - 1 - i;
  for (int i = 0; i < requests; ++i) positions[i] = 5 * i;  // requests may be of any length

  const auto floats = [](std::vector<float>& data, std::initializer_list<std::int64_t> shape) {
    return flashjit::Tensor::contiguous(data.data(), flashjit::DType::fp32, {}, shape);
  };
  const auto ints = [](std::vector<std::int32_t>& data, std::initializer_list<std::int64_t> shape) {
    return flashjit::Tensor::contiguous(data.data(), flashjit::DType::int32, {}, shape);
  };
  const auto cache = [&](std::vector<float>& data) {
    return floats(data, {requests * pages, page_size, heads_kv, head_dim});
  };

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

  for (int step = 0; step < steps; ++step) {
    // A model computes these. Keys of zeros weigh all tokens alike.
    for (float& value : v_new) value = static_cast<float>(step);
    for (int i = 0; i < requests; ++i) lengths[i] = positions[i] + 1;
    append.launch({.q = floats(q, {requests, 1, heads_q, head_dim}),
                   .k = cache(k),
                   .v = cache(v),
                   .page_table = ints(page_table, {requests, pages}),
                   .k_new = floats(k_new, {requests, 1, heads_kv, head_dim}),
                   .v_new = floats(v_new, {requests, 1, heads_kv, head_dim}),
                   .append_positions = ints(positions, {requests}),
                   .q_out = floats(rotated, {requests, 1, heads_q, head_dim})});
    decode.launch({.q = floats(rotated, {requests, 1, heads_q, head_dim}),
                   .k = cache(k),
                   .v = cache(v),
                   .o = floats(o, {requests, 1, heads_q, head_dim}),
                   .seqlens_k = ints(lengths, {requests}),
                   .page_table = ints(page_table, {requests, pages})});
    for (std::int32_t& position : positions) ++position;
  }

  // The mean of 0 to 39; the others began with 5 and 10 tokens whose values are 0.
  for (int i = 0; i < requests; ++i) std::printf("request %d: %.3f\n", i, o[i * heads_q * head_dim]);
  return 0;
} catch (const flashjit::Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return 1;
}
