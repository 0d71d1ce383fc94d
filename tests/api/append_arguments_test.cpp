// append_kv with bad arguments, through the C++ interface: each is refused with the argument's name.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit::append_arguments_testing {
namespace {

constexpr int batch = 2, seqlen = 3, rows = 8, heads = 2, head_dim = 16;

Engine& appending_engine() {
  static Engine instance{EngineOptions{}};
  return instance;
}

struct GoodAppend {
  std::vector<float> k_new, v_new, k, v, q, q_out, cosines, sines;
  std::vector<std::int64_t> slots = {0, 1, 2, 8, 9, 10};
  std::vector<std::int32_t> positions = {2, 4}, rotary_positions = {2, 3, 4, 4, 5, 6}, pages = {0, 1},
                            starts = {0, 6};
  AttentionArgs args;

  GoodAppend()
      : k_new(batch * seqlen * heads * head_dim, 1),
        v_new(k_new.size(), 2),
        k(batch * rows * heads * head_dim, 0),
        v(k.size(), 0),
        q(2 * k_new.size(), 1),
        q_out(q.size()),
        cosines(rows * head_dim / 2, 0),
        sines(cosines.size(), 1) {
    args.k_new = floats(k_new, {batch, seqlen, heads, head_dim});
    args.v_new = floats(v_new, {batch, seqlen, heads, head_dim});
    args.k = floats(k, {batch, rows, heads, head_dim});
    args.v = floats(v, {batch, rows, heads, head_dim});
    args.append_positions = Tensor::contiguous(positions.data(), DType::int32, {}, {batch});
  }
  static Tensor floats(std::vector<float>& data, std::initializer_list<std::int64_t> sizes) {
    return Tensor::contiguous(data.data(), DType::fp32, {}, sizes);
  }
  Tensor slots_tensor() { return Tensor::contiguous(slots.data(), DType::int64, {}, {batch, seqlen}); }
  void give_queries() {
    args.q = floats(q, {batch, seqlen, 2 * heads, head_dim});
    args.q_out = floats(q_out, {batch, seqlen, 2 * heads, head_dim});
  }
};

const Kernel& kernel_of(const std::string& more) {
  const auto spec =
      AttentionSpec::from_json(R"({"op": "append_kv", "dtype": "fp32", "head_dim": 16)" + more + "}");
  return appending_engine().get(
      spec,
      {.batch = batch, .seqlen_q = seqlen, .seqlen_k = rows, .num_heads_q = heads, .num_heads_kv = heads});
}

void expect_refusal(std::initializer_list<const char*> texts, const std::string& spec,
                    const std::function<void(GoodAppend&)>& spoil) {
  GoodAppend given;
  spoil(given);
  expect_error(ErrorCode::invalid_argument, texts, [&] { kernel_of(spec).launch(given.args); });
  for (const float value : given.k) ASSERT_EQ(value, 0);
}

constexpr char plain[] = "", rotary[] = R"(, "rotary": {})", rotary_q[] = R"(, "rotary": {"q": true})",
               tables[] = R"(, "rotary": {"tables": "fp32"})", paged[] = R"(, "paged": true)",
               packed[] = R"(, "varlen": true)";

TEST(AppendArguments, WriteWhatIsAskedFor) {
  GoodAppend given;
  kernel_of(plain).launch(given.args);
  for (int b = 0; b < batch; ++b)
    for (int row = 0; row < rows; ++row)
      for (int c = 0; c < heads * head_dim; ++c) {
        const bool written = row >= given.positions[static_cast<std::size_t>(b)] &&
                             row < given.positions[static_cast<std::size_t>(b)] + seqlen;
        const auto at = static_cast<std::size_t>((b * rows + row) * heads * head_dim + c);
        ASSERT_EQ(given.k[at], written ? 1 : 0) << at;
        ASSERT_EQ(given.v[at], written ? 2 : 0) << at;
      }
}

// A quarter turn: columns i and i + 8 of ones become -1 and 1.
TEST(AppendArguments, TablesByHand) {
  GoodAppend given;
  given.args.rotary_cos = GoodAppend::floats(given.cosines, {rows, head_dim / 2});
  given.args.rotary_sin = GoodAppend::floats(given.sines, {rows, head_dim / 2});
  kernel_of(tables).launch(given.args);
  const float* const row = given.k.data() + std::size_t{2} * heads * head_dim;
  for (int c = 0; c < head_dim; ++c) EXPECT_EQ(row[c], c < head_dim / 2 ? -1 : 1) << c;
}

TEST(AppendArguments, PlacesAreGivenOnce) {
  expect_refusal({"slots is missing", "append_positions may say it"}, plain,
                 [](GoodAppend& g) { g.args.append_positions.reset(); });
  expect_refusal({"slots and append_positions were given"}, plain,
                 [](GoodAppend& g) { g.args.slots = g.slots_tensor(); });
  expect_refusal({"page_table is missing"}, paged,
                 [](GoodAppend& g) { g.args.k = GoodAppend::floats(g.k, {batch, rows, heads, head_dim}); });
  expect_refusal({"page_table was given, but slots says"}, paged, [](GoodAppend& g) {
    g.args.append_positions.reset();
    g.args.slots = g.slots_tensor();
    g.args.page_table = Tensor::contiguous(g.pages.data(), DType::int32, {}, {batch, 1});
  });
  expect_refusal({"cu_seqlens_q is missing"}, packed, [](GoodAppend& g) {
    g.args.k_new = GoodAppend::floats(g.k_new, {batch * seqlen, heads, head_dim});
    g.args.v_new = GoodAppend::floats(g.v_new, {batch * seqlen, heads, head_dim});
  });
}

TEST(AppendArguments, Shapes) {
  expect_refusal({"v_new has shape", "as k_new"}, plain, [](GoodAppend& g) { g.args.v_new->shape[1] = 2; });
  expect_refusal({"k has shape", "k_new's heads"}, plain, [](GoodAppend& g) { g.args.k->shape[2] = 1; });
  expect_refusal({"v has shape", "as k"}, plain, [](GoodAppend& g) { g.args.v->shape[1] = 7; });
  expect_refusal({"k has shape", "k_new's batch"}, plain, [](GoodAppend& g) {
    g.args.k->shape[0] = 1;
    g.args.v->shape[0] = 1;
  });
  expect_refusal({"append_positions has shape"}, plain,
                 [](GoodAppend& g) { g.args.append_positions->shape[0] = 1; });
  expect_refusal({"slots has dtype int32", "int64"}, plain, [](GoodAppend& g) {
    g.args.append_positions.reset();
    g.args.slots = g.slots_tensor();
    g.args.slots->dtype = DType::int32;
  });
  expect_refusal({"k has shape", "pages of 7 keys", "4 would work"}, paged, [](GoodAppend& g) {
    g.args.k->shape[1] = g.args.v->shape[1] = 7;
    g.args.page_table = Tensor::contiguous(g.pages.data(), DType::int32, {}, {batch, 1});
  });
}

TEST(AppendArguments, Overlaps) {
  expect_refusal({"k and k_new share memory"}, plain, [](GoodAppend& g) { g.args.k_new->data = g.k.data(); });
  expect_refusal({"k and v share memory"}, plain, [](GoodAppend& g) { g.args.v->data = g.k.data(); });
  expect_refusal({"k is written"}, plain, [](GoodAppend& g) { g.args.k->strides[1] = 0; });
  expect_refusal({"q_out and q share memory"}, rotary_q, [](GoodAppend& g) {
    g.give_queries();
    g.args.q_out->data = g.q.data() + 16;
    g.args.q->shape[1] = g.args.q_out->shape[1] = seqlen;
  });
}

TEST(AppendArguments, Rotary) {
  expect_refusal({"rotary_positions was given", "has no rotary"}, plain, [](GoodAppend& g) {
    g.args.rotary_positions =
        Tensor::contiguous(g.rotary_positions.data(), DType::int32, {}, {batch, seqlen});
  });
  expect_refusal({"rotary_positions is missing"}, rotary, [](GoodAppend& g) {
    g.args.append_positions.reset();
    g.args.slots = g.slots_tensor();
  });
  expect_refusal({"rotary_base is", "positive"}, rotary, [](GoodAppend& g) { g.args.rotary_base = -1; });
  expect_refusal({"rotary_scale is", "positive"}, rotary, [](GoodAppend& g) { g.args.rotary_scale = 0; });
  expect_refusal({"rotary_base was given", "has tables"}, tables, [](GoodAppend& g) {
    g.args.rotary_cos = g.args.rotary_sin = GoodAppend::floats(g.cosines, {rows, 8});
    g.args.rotary_base = 1e4;
  });
  expect_refusal({"rotary_cos is missing"}, tables, [](GoodAppend&) {});
  expect_refusal({"rotary_cos has shape", "half of the rotary dimension"}, tables, [](GoodAppend& g) {
    g.args.rotary_cos = g.args.rotary_sin = GoodAppend::floats(g.cosines, {rows, 4});
  });
  expect_refusal({"rotary_cos has no positions"}, tables, [](GoodAppend& g) {
    g.args.rotary_cos = g.args.rotary_sin = GoodAppend::floats(g.cosines, {0, 8});
  });
  expect_refusal({"q was given", "does not rotate Q"}, rotary, [](GoodAppend& g) { g.give_queries(); });
  expect_refusal({"q is missing"}, rotary_q, [](GoodAppend&) {});
  expect_refusal({"q_out has shape", "as q"}, rotary_q, [](GoodAppend& g) {
    g.give_queries();
    g.args.q_out->shape[2] = 1;
  });
}

}  // namespace
}  // namespace flashjit::append_arguments_testing
