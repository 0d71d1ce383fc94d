// append_kv with bad arguments, through the C++ interface: each is refused with the argument's name.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"
#include "tests/unit/expect_error.h"
#include "tools/verify/element.hpp"

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

// Columns before the first rotated one stay, and there is no V.
TEST(AppendArguments, LatentCachesByHand) {
  constexpr char latent[] = R"(, "head_dim_v": 8, "v_in_k": true, "rotary": {"first": 8, "tables": "fp32"})";
  GoodAppend given;
  given.args.v.reset();
  given.args.v_new.reset();
  given.args.rotary_cos = GoodAppend::floats(given.cosines, {rows, 4});
  given.args.rotary_sin = GoodAppend::floats(given.sines, {rows, 4});
  kernel_of(latent).launch(given.args);
  const float* const row = given.k.data() + std::size_t{2} * heads * head_dim;
  for (int c = 0; c < head_dim; ++c) EXPECT_EQ(row[c], c < 8 || c >= 12 ? 1 : -1) << c;
  expect_refusal({"v_new was given", "\"v_in_k\": true"}, latent, [](GoodAppend& g) { g.args.v.reset(); });
  expect_refusal({"v was given", "\"v_in_k\": true"}, latent, [](GoodAppend& g) { g.args.v_new.reset(); });
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

TEST(AppendArguments, PackedLengths) {
  const auto with_starts = [](std::vector<std::int32_t> starts) {
    return [starts](GoodAppend& g) {
      g.args.k_new = GoodAppend::floats(g.k_new, {batch * seqlen, heads, head_dim});
      g.args.v_new = GoodAppend::floats(g.v_new, {batch * seqlen, heads, head_dim});
      g.starts = starts;
      g.args.cu_seqlens_q = Tensor::contiguous(g.starts.data(), DType::int32, {}, {batch + 1});
    };
  };
  expect_refusal({"cu_seqlens_q[0] is 1, it must be 0"}, packed, with_starts({1, 3, 6}));
  expect_refusal({"cu_seqlens_q decreases at entry 1 (0 to -1)"}, packed, with_starts({0, -1, 6}));
  expect_refusal({"cu_seqlens_q decreases at entry 2 (5 to 4)"}, packed, with_starts({0, 5, 4}));
  expect_refusal({"cu_seqlens_q ends at 7, beyond the 6 packed rows"}, packed, with_starts({0, 3, 7}));
  expect_refusal({"k has shape", "the batch of cu_seqlens_q"}, packed, [&](GoodAppend& g) {
    with_starts({0, 3, 6})(g);
    g.args.k->shape[0] = g.args.v->shape[0] = 1;
  });
  GoodAppend given;
  with_starts({0, 0, 4})(given);
  kernel_of(packed).launch(given.args);
  EXPECT_EQ(given.k[(rows + 4) * heads * head_dim], 1);
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

// Caches of int8 with scales of tokens: bf16 rows of ones and twos become 127 each.
struct GoodQuantisedAppend {
  std::vector<std::uint16_t> k_new, v_new;
  std::vector<signed char> k, v;
  std::vector<float> k_scale, v_scale;
  std::vector<std::int32_t> positions = {2, 4};
  AttentionArgs args;

  GoodQuantisedAppend()
      : k_new(batch * seqlen * heads * head_dim, 0x3f80),
        v_new(k_new.size(), 0x4000),
        k(batch * rows * heads * head_dim, 0),
        v(k.size(), 0),
        k_scale(batch * rows * heads, 0),
        v_scale(k_scale.size(), 0) {
    const auto tensor = [](auto& data, DType dtype, std::initializer_list<std::int64_t> sizes) {
      return Tensor::contiguous(data.data(), dtype, {}, sizes);
    };
    args.k_new = tensor(k_new, DType::bf16, {batch, seqlen, heads, head_dim});
    args.v_new = tensor(v_new, DType::bf16, {batch, seqlen, heads, head_dim});
    args.k = tensor(k, DType::int8, {batch, rows, heads, head_dim});
    args.v = tensor(v, DType::int8, {batch, rows, heads, head_dim});
    args.k_scale = tensor(k_scale, DType::fp32, {batch, rows, heads});
    args.v_scale = tensor(v_scale, DType::fp32, {batch, rows, heads});
    args.append_positions = tensor(positions, DType::int32, {batch});
  }
};
const Kernel& quantised_kernel(const std::string& kv_scale, const std::string& kv_dtype = "int8") {
  const auto spec =
      AttentionSpec::from_json(R"({"op": "append_kv", "dtype": "bf16", "head_dim": 16, "kv_dtype": ")" +
                               kv_dtype + R"(", "kv_scale": ")" + kv_scale + "\"}");
  return appending_engine().get(
      spec,
      {.batch = batch, .seqlen_q = seqlen, .seqlen_k = rows, .num_heads_q = heads, .num_heads_kv = heads});
}

TEST(AppendArguments, ScalesOfTokensByHand) {
  GoodQuantisedAppend given;
  quantised_kernel("token_head").launch(given.args);
  for (std::size_t b = 0; b < batch; ++b)
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t head = 0; head < heads; ++head) {
        const auto first = static_cast<std::size_t>(given.positions[b]), at = (b * rows + row) * heads + head;
        const bool written = row >= first && row < first + seqlen;
        ASSERT_EQ(given.k_scale[at], written ? 1.0f / 127 : 0) << at;
        ASSERT_EQ(given.v_scale[at], written ? 2.0f / 127 : 0) << at;
        for (std::size_t c = 0; c < head_dim; ++c) {
          ASSERT_EQ(given.k[at * head_dim + c], written ? 127 : 0) << at;
          ASSERT_EQ(given.v[at * head_dim + c], written ? 127 : 0) << at;
        }
      }
}

// A spec without kv_scale has scales of tensors; the refusal of others names what takes them.
TEST(AppendArguments, ScalesOfTokensForAKernelOfTensors) {
  for (const char* kv_scale : {"tensor", "head"}) {
    GoodQuantisedAppend given;
    expect_error(
        ErrorCode::invalid_argument,
        {"k_scale has rank 3, this kernel takes 1 dimension, [", "\"kv_scale\": \"token_head\" takes"},
        [&] { quantised_kernel(kv_scale).launch(given.args); });
  }
}

// Ties go to the even neighbour. What is too large becomes the largest value; NaN stays NaN, but of int8 it
// is 0.
TEST(AppendArguments, RoundingByHand) {
  const float infinity = HUGE_VALF;
  const float numbers[head_dim] = {0.5,  1.5,   2.5, -2.5,     17,        19,       -17,        300,
                                   -300, 1e30F, NAN, infinity, -infinity, 0x1p-10F, 0x1.8p-16F, 21};
  const struct {
    DType dtype;
    unsigned char stored[head_dim];
  } cases[] = {
      {DType::int8, {0, 2, 2, 0xfe, 17, 19, 0xef, 127, 0x80, 127, 0, 127, 0x80, 0, 0, 21}},
      {DType::fp8_e4m3,
       {0x30, 0x3c, 0x42, 0xc2, 0x58, 0x5a, 0xd8, 0x79, 0xf9, 0x7e, 0x7f, 0x7e, 0xfe, 0, 0, 0x5a}},
      {DType::fp8_e5m2,
       {0x38, 0x3e, 0x41, 0xc1, 0x4c, 0x4d, 0xcc, 0x5d, 0xdd, 0x7b, 0x7f, 0x7b, 0xfb, 0x14, 2, 0x4d}},
  };
  for (const auto& [dtype, stored] : cases) {
    GoodQuantisedAppend given;
    for (std::size_t i = 0; i < given.k_new.size(); ++i)
      given.k_new[i] = verify::float_to_bf16(numbers[i % head_dim]);
    given.args.k->dtype = given.args.v->dtype = dtype;
    given.k_scale[0] = given.v_scale[0] = 1;
    given.args.k_scale = GoodAppend::floats(given.k_scale, {1});
    given.args.v_scale = GoodAppend::floats(given.v_scale, {1});
    quantised_kernel("tensor", to_string(dtype)).launch(given.args);
    const signed char* const row = given.k.data() + std::size_t{2} * heads * head_dim;
    for (std::size_t c = 0; c < head_dim; ++c)
      EXPECT_EQ(static_cast<unsigned char>(row[c]), stored[c]) << to_string(dtype) << " " << numbers[c];
  }
}

// Infinity counts as the largest float32 where scales are computed.
TEST(AppendArguments, ScaleOfARowWithInfinityByHand) {
  GoodQuantisedAppend given;
  given.k_new[0] = verify::float_to_bf16(-HUGE_VALF);
  given.k_new[head_dim] = verify::float_to_bf16(NAN);  // of the next head: counts as nothing
  quantised_kernel("token_head").launch(given.args);
  const std::size_t row = std::size_t{2} * heads;
  EXPECT_EQ(given.k_scale[row], std::numeric_limits<float>::max() * (1.0f / 127));
  EXPECT_EQ(given.k_scale[row + 1], 1.0f / 127);
  const signed char* const stored = given.k.data() + row * head_dim;
  EXPECT_EQ(stored[0], -128);
  EXPECT_EQ(stored[1], 0);
  EXPECT_EQ(stored[head_dim], 0);
  EXPECT_EQ(stored[head_dim + 1], 127);
}

// At any scale infinity becomes the largest value of its sign, NaN stays NaN, and a quotient is right. Scales
// below 2^-126 in size count as 0: finite values are stored as 0.
TEST(AppendArguments, ScalesOfAnySizeByHand) {
  const float scales[] = {0,          -0.0F,    0x1p-127F,  -0x1.fcp-127F, 0x1p-126F,  -0x1p-125F, 1,
                          0x1.8p124F, 0x1p125F, 0x1.8p125F, 0x1p126F,      0x1.8p127F, -0x1p126F};
  for (const auto& [dtype, largest, least, nan] : {std::tuple{DType::int8, 127.0, -128.0, 0},
                                                   {DType::fp8_e4m3, 448.0, -448.0, 0x7f},
                                                   {DType::fp8_e5m2, 57344.0, -57344.0, 0x7f}})
    for (const float scale : scales) {
      const bool is_zero = std::abs(scale) < 0x1p-126F, turns = !is_zero && scale < 0;
      const float numbers[] = {HUGE_VALF, -HUGE_VALF, NAN, 0, is_zero ? 0x1.fep127F : scale};
      const double expected[] = {turns ? least : largest, turns ? largest : least, 0, 0, is_zero ? 0.0 : 1.0};
      GoodQuantisedAppend given;
      for (std::size_t i = 0; i < std::size(numbers); ++i) given.k_new[i] = verify::float_to_bf16(numbers[i]);
      given.args.k->dtype = given.args.v->dtype = dtype;
      given.k_scale[0] = given.v_scale[0] = scale;
      given.args.k_scale = GoodAppend::floats(given.k_scale, {1});
      given.args.v_scale = GoodAppend::floats(given.v_scale, {1});
      quantised_kernel("tensor", to_string(dtype)).launch(given.args);
      const signed char* const stored = given.k.data() + std::size_t{2} * heads * head_dim;
      for (std::int64_t i = 0; i < 5; ++i) {
        SCOPED_TRACE(std::string(to_string(dtype)) + ": " + std::to_string(numbers[i]) + " / " +
                     std::to_string(scale));
        if (i == 2)
          EXPECT_EQ(stored[i] & 0x7f, nan);
        else
          EXPECT_EQ(verify::load_element(stored, dtype, i), expected[i]);
      }
    }
}

TEST(AppendArguments, Scales) {
  const auto refused = [](std::initializer_list<const char*> texts, const std::string& kv_scale,
                          const std::function<void(GoodQuantisedAppend&)>& spoil) {
    GoodQuantisedAppend given;
    spoil(given);
    expect_error(ErrorCode::invalid_argument, texts, [&] { quantised_kernel(kv_scale).launch(given.args); });
    for (const signed char value : given.k) ASSERT_EQ(value, 0);
  };
  const auto one = [](std::vector<float>& data) {
    return Tensor::contiguous(data.data(), DType::fp32, {}, {1});
  };
  refused({"k_scale is missing"}, "tensor", [](GoodQuantisedAppend& g) { g.args.k_scale.reset(); });
  refused({"v_scale has rank 3", "[1]"}, "tensor",
          [&](GoodQuantisedAppend& g) { g.args.k_scale = one(g.k_scale); });
  refused({"v_scale[0] is inf", "finite"}, "tensor", [&](GoodQuantisedAppend& g) {
    g.v_scale[0] = HUGE_VALF;
    g.args.k_scale = one(g.k_scale);
    g.args.v_scale = one(g.v_scale);
  });
  refused({"k_scale has shape", "k's rows"}, "token_head",
          [](GoodQuantisedAppend& g) { g.args.k_scale->shape[1] = 1; });
  refused({"k_scale is written", "overwrite each other"}, "token_head",
          [](GoodQuantisedAppend& g) { g.args.k_scale->strides[1] = 0; });
  refused({"k_scale and v_scale share memory"}, "token_head",
          [](GoodQuantisedAppend& g) { g.args.v_scale = g.args.k_scale; });
  refused({"k and v_scale share memory"}, "token_head",
          [](GoodQuantisedAppend& g) { g.args.v_scale->data = g.k.data(); });
  refused({"v_scale and k_new share memory"}, "token_head",
          [](GoodQuantisedAppend& g) { g.args.v_scale->data = g.k_new.data(); });
  refused({"k has dtype bf16", "int8"}, "token_head",
          [](GoodQuantisedAppend& g) { g.args.k->dtype = DType::bf16; });
  expect_refusal({"k_scale was given", "no \"kv_dtype\""}, plain,
                 [&](GoodAppend& g) { g.args.k_scale = GoodAppend::floats(g.cosines, {1}); });
}

}  // namespace
}  // namespace flashjit::append_arguments_testing
