// Arguments of decode, and of forwards with pages: what is wrong is refused with its name and what would
// work, and what no launch reads is not looked at.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tests/api/arguments.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit::decode_arguments {
namespace {

constexpr int batch = 2, seqlen_q = 3, heads_q = 4, heads_kv = 2, dim = 16, dim_v = 24, page_size = 16,
              max_pages = 4, num_pages = 6;

Engine& decoding_engine() {
  static Engine instance{EngineOptions{}};
  return instance;
}

struct Options {
  bool paged = true, varlen = false;
  std::vector<Mask> mask = {};
  Operation op = Operation::decode;
  bool append = false;
  std::optional<Rotary> rotary = {};
};

AttentionSpec spec_of(const Options& options) {
  AttentionSpec spec;
  spec.op = options.op;
  spec.head_dim = dim;
  spec.head_dim_v = dim_v;
  spec.mask = options.mask;
  spec.paged = options.paged;
  spec.varlen = options.varlen;
  spec.append = options.append;
  spec.rotary = options.rotary;
  return spec;
}

const Kernel& kernel_of(const Options& options) {
  return decoding_engine().get(spec_of(options), {.batch = batch,
                                                  .seqlen_q = seqlen_q,
                                                  .seqlen_k = max_pages * page_size,
                                                  .num_heads_q = heads_q,
                                                  .num_heads_kv = heads_kv});
}

// Lengths 20 and 33; what lies beyond them in the table is no page.
struct GoodDecode {
  explicit GoodDecode(const Options& options = {}) {
    const std::int64_t keys = max_pages * page_size;
    args.q = make(DType::bf16, rows(options, {heads_q, dim}));
    args.o = make(DType::bf16, rows(options, {heads_q, dim_v}));
    args.lse = options.varlen ? make(DType::fp32, {heads_q, batch * seqlen_q})
                              : make(DType::fp32, {batch, heads_q, seqlen_q});
    args.k = make(DType::bf16,
                  {options.paged ? num_pages : batch, options.paged ? page_size : keys, heads_kv, dim});
    args.v = make(DType::bf16,
                  {options.paged ? num_pages : batch, options.paged ? page_size : keys, heads_kv, dim_v});
    args.seqlens_k = make(DType::int32, {batch});
    numbers(args.seqlens_k)[0] = 20;
    numbers(args.seqlens_k)[1] = 33;
    if (options.varlen) {
      args.cu_seqlens_q = make(DType::int32, {batch + 1});
      for (int b = 0; b <= batch; ++b) numbers(args.cu_seqlens_q)[b] = b * seqlen_q;
    }
    if (options.append) {
      args.k_new = make(DType::bf16, rows(options, {heads_kv, dim}));
      args.v_new = make(DType::bf16, rows(options, {heads_kv, dim_v}));
    }
    if (options.rotary) args.q_out = make(DType::bf16, rows(options, {heads_q, dim}));
    if (options.paged) {
      args.page_table = make(DType::int32, {batch, max_pages});
      const int table[] = {5, 0, -1, 1 << 30, 3, 1, 4, -77};
      std::copy(std::begin(table), std::end(table), numbers(args.page_table));
    }
  }

  static std::int32_t* numbers(const std::optional<Tensor>& t) { return static_cast<std::int32_t*>(t->data); }

  AttentionArgs args;

 private:
  static std::vector<std::int64_t> rows(const Options& options, std::vector<std::int64_t> sizes) {
    const auto first = sizes.begin();
    if (options.varlen) return sizes.insert(first, batch * seqlen_q), sizes;
    return sizes.insert(first, {batch, seqlen_q}), sizes;
  }
  Tensor make(DType dtype, const std::vector<std::int64_t>& shape) {
    memory_.emplace_back(8192);
    return Tensor::contiguous(memory_.back().data(), dtype, {}, shape);
  }
  std::vector<std::vector<std::int32_t>> memory_;
};

using Change = std::function<void(AttentionArgs&)>;

void expect_refused_by(std::initializer_list<const char*> texts, const Change& spoil,
                       const Options& options) {
  GoodDecode good(options), bad(options);
  const Kernel& kernel = kernel_of(options);
  spoil(bad.args);
  expect_error(ErrorCode::invalid_argument, texts, [&] { kernel.launch(bad.args); });
  expect_error(ErrorCode::invalid_argument, texts, [&] { kernel.prepare(bad.args); });
  EXPECT_NO_THROW(kernel.launch(good.args));
}

void expect_accepted_by(const Change& change, const Options& options) {
  GoodDecode good(options);
  change(good.args);
  EXPECT_NO_THROW(kernel_of(options).launch(good.args));
}

// By a decode and, where the keys lie in pages, by a forward.
template <class Body>
void for_each_op(Options options, Body body) {
  body(options);
  options.op = Operation::forward;
  if (options.paged) body(options);
}
void expect_refused(std::initializer_list<const char*> texts, const Change& spoil,
                    const Options& options = {}) {
  for_each_op(options, [&](const Options& with_op) { expect_refused_by(texts, spoil, with_op); });
}
void expect_accepted(const Change& change, const Options& options = {}) {
  for_each_op(options, [&](const Options& with_op) { expect_accepted_by(change, with_op); });
}

TEST(DecodeArguments, GoodOnes) {
  for (const bool paged : {false, true})
    for (const bool varlen : {false, true})
      expect_accepted([](AttentionArgs&) {}, {.paged = paged, .varlen = varlen});
}

TEST(DecodeArguments, NewRows) {
  for (const bool paged : {false, true})
    for (const bool varlen : {false, true}) {
      const Options options = {.paged = paged, .varlen = varlen, .append = true, .rotary = Rotary{.q = true}};
      const auto refused = [&](std::initializer_list<const char*> texts, const Change& spoil) {
        expect_refused_by(texts, spoil, options);
      };
      expect_accepted_by([](AttentionArgs& a) { a.q_out = a.q; }, options);
      refused({"v_new is missing"}, [](AttentionArgs& a) { a.v_new.reset(); });
      refused({"k_new has shape", "as q"},
              [](AttentionArgs& a) { a.k_new->shape[0] = a.v_new->shape[0] = 1; });
      refused({"k_new has shape", "head_dim"},
              [](AttentionArgs& a) { a.k_new->shape[a.k_new->rank - 1] = 8; });
      refused({"k has shape", "k_new's heads"}, [](AttentionArgs& a) {
        a.k_new->shape[a.k_new->rank - 2] = a.v_new->shape[a.v_new->rank - 2] = 1;
      });
      refused({"k is written", "overwrite each other"}, [](AttentionArgs& a) { a.k->strides[1] = 0; });
      refused({"k and v_new share memory"}, [](AttentionArgs& a) { a.v_new->data = a.k->data; });
      refused({"o and q_out share memory"}, [](AttentionArgs& a) { a.q_out->data = a.o->data; });
      refused({"q_out is missing"}, [](AttentionArgs& a) { a.q_out.reset(); });
      refused({"append_positions was given", "op\": \"decode"},
              [](AttentionArgs& a) { a.append_positions = a.seqlens_k; });
    }
  expect_refused_by({"k_new was given", "\"append\": true"}, [](AttentionArgs& a) { a.k_new = a.q; }, {});
}

TEST(DecodeArguments, QueryRows) {
  // Rows and batch entries that are all the same memory.
  const auto with_rows = [](int rows) {
    return [=](AttentionArgs& a) {
      a.q->shape[1] = a.o->shape[1] = a.lse->shape[2] = rows;
      a.q->shape[0] = a.o->shape[0] = a.lse->shape[0] = 0;
      a.page_table->shape[0] = a.seqlens_k->shape[0] = 0;
    };
  };
  expect_refused_by({"q has 65 rows", "1 to 64", "op forward takes more"}, with_rows(65), {});
  expect_accepted_by(with_rows(64), {});
  const Options packed{.varlen = true};
  expect_refused_by({"max_seqlen_q is 65", "1 to 64"}, [](AttentionArgs& a) { a.max_seqlen_q = 65; }, packed);
  expect_accepted_by([](AttentionArgs& a) { a.max_seqlen_q = 64; }, packed);
  expect_refused_by(
      {"cu_seqlens_q gives sequence 0 a length of 3", "max_seqlen_q = 2"},
      [](AttentionArgs& a) { a.max_seqlen_q = 2; }, packed);
}

TEST(DecodeArguments, PackedRowsLongerThanDecodeTakes) {
  const Options packed{.varlen = true};
  expect_refused_by(
      {"cu_seqlens_q gives sequence 0 a length of 65", "max_seqlen_q = 64"},
      [](AttentionArgs& a) {
        a.q->shape[0] = a.o->shape[0] = a.lse->shape[1] = 65;
        a.lse->strides[0] = 65;
        GoodDecode::numbers(a.cu_seqlens_q)[1] = GoodDecode::numbers(a.cu_seqlens_q)[2] = 65;
      },
      packed);
}

TEST(DecodeArguments, ThatTheSpecHasNoUseFor) {
  const GoodDecode paged, packed({.varlen = true});
  expect_refused({"page_table was given", "\"paged\": true"},
                 [&](AttentionArgs& a) { a.page_table = paged.args.page_table; }, {.paged = false});
  expect_refused({"cu_seqlens_q was given", "\"varlen\": true"},
                 [&](AttentionArgs& a) { a.cu_seqlens_q = packed.args.cu_seqlens_q; });
  const Change add_starts = [&](AttentionArgs& a) { a.cu_seqlens_k = packed.args.cu_seqlens_q; },
               add_bound = [](AttentionArgs& a) { a.max_seqlen_k = 64; },
               add_rows = [](AttentionArgs& a) { a.seqlens_q = a.seqlens_k; };
  expect_refused_by({"cu_seqlens_k was given", "\"op\": \"decode\"", "leave it out"}, add_starts,
                    {.varlen = true});
  expect_refused_by({"max_seqlen_k was given", "\"op\": \"decode\""}, add_bound, {.varlen = true});
  expect_refused_by({"seqlens_q was given", "\"op\": \"decode\""}, add_rows, {});
  for (const bool varlen : {false, true}) {
    const Options forward{.varlen = varlen, .op = Operation::forward};
    expect_refused_by({"cu_seqlens_k was given", "\"paged\": true", "seqlens_k has their number"}, add_starts,
                      forward);
    expect_refused_by({"max_seqlen_k was given", "\"paged\": true"}, add_bound, forward);
    expect_refused_by({"seqlens_q was given", "no padding mask"}, add_rows, forward);
  }
}

TEST(DecodeArguments, Missing) {
  expect_refused({"page_table is missing", "[batch, max_pages]"},
                 [](AttentionArgs& a) { a.page_table.reset(); });
  expect_refused({"k is missing", "[num_pages, page_size, heads_kv, head_dim]"},
                 [](AttentionArgs& a) { a.k.reset(); });
  expect_refused({"cu_seqlens_q is missing"}, [](AttentionArgs& a) { a.cu_seqlens_q.reset(); },
                 {.varlen = true});
}

TEST(DecodeArguments, PageSizes) {
  const auto with_pages_of = [](int keys, int pages = 2) {
    return [=](AttentionArgs& a) {
      for (std::optional<Tensor>* t : {&a.k, &a.v}) {
        (*t)->shape[0] = pages;
        (*t)->shape[1] = keys;
        (*t)->strides[0] = (*t)->strides[1] = 0;  // all the same key
      }
      for (int i = 0; i < batch * max_pages; ++i) GoodDecode::numbers(a.page_table)[i] = i % 2;
      GoodDecode::numbers(a.seqlens_k)[0] = GoodDecode::numbers(a.seqlens_k)[1] = std::min(keys, 4);
    };
  };
  for (const int keys : {1, 2, 4, 8, 16, 32, 48, 64, 80, 128, 256, 272, 512, 1024})
    expect_accepted(with_pages_of(keys));
  expect_refused({"pages of 3 keys", "a power of two up to 256 or a multiple of 16", "2 would work"},
                 with_pages_of(3));
  expect_refused({"pages of 12 keys", "8 would work"}, with_pages_of(12));
  for (const auto& [keys, below] :
       {std::pair{24, "16 would work"}, {40, "32 would work"}, {100, "96 would work"}})
    expect_refused({below, "a power of two up to 256 or a multiple of 16"}, with_pages_of(keys));
  expect_refused({"pages of 0 keys", "1 would work"}, with_pages_of(0));
}

TEST(DecodeArguments, TensorsThatDoNotFit) {
  expect_refused({"page_table has dtype int64", "takes int32"},
                 [](AttentionArgs& a) { a.page_table->dtype = DType::int64; });
  expect_refused({"page_table has rank 1", "2 dimensions"}, [](AttentionArgs& a) { a.page_table->rank = 1; });
  expect_refused({"page_table has shape [3, 4]", "dimension 0 must be 2, the batch"},
                 [](AttentionArgs& a) { a.page_table->shape[0] = 3; });
  expect_refused({"page_table's last dimension has stride 2"},
                 [](AttentionArgs& a) { a.page_table->strides[1] = 2; });
  expect_refused({"page_table's data pointer is not aligned"},
                 [](AttentionArgs& a) { a.page_table->data = static_cast<char*>(a.page_table->data) + 2; });
  expect_refused({"v has shape [5, 16, 2, 24]", "k's pages"}, [](AttentionArgs& a) { a.v->shape[0] = 5; });
  expect_refused({"v has shape [6, 8, 2, 24]", "as k"}, [](AttentionArgs& a) { a.v->shape[1] = 8; });
  expect_refused({"k has shape [1, 64, 2, 16]", "q's batch"}, [](AttentionArgs& a) { a.k->shape[0] = 1; },
                 {.paged = false});
  expect_refused({"k has shape [1, 64, 2, 16]", "the batch of cu_seqlens_q"},
                 [](AttentionArgs& a) { a.k->shape[0] = a.v->shape[0] = 1; },
                 {.paged = false, .varlen = true});
  expect_refused({"seqlens_k has shape [1]", "the batch"},
                 [](AttentionArgs& a) { a.seqlens_k->shape[0] = 1; });
  expect_refused({"q has 4 heads and k has 3"}, [](AttentionArgs& a) { a.k->shape[2] = a.v->shape[2] = 3; });
}

TEST(DecodeArguments, Lengths) {
  const auto with_length = [](int length) {
    return [=](AttentionArgs& a) { GoodDecode::numbers(a.seqlens_k)[1] = length; };
  };
  expect_refused({"seqlens_k[1] is 65", "page_table's max_pages x page_size = 64"}, with_length(65));
  expect_refused({"seqlens_k[1] is -1"}, with_length(-1));
  expect_refused({"seqlens_k[1] is 65", "seqlen_k = 64"}, with_length(65), {.paged = false});
  for (const int length : {0, 1, 2, 48}) expect_accepted(with_length(length));
  expect_accepted([](AttentionArgs& a) { a.seqlens_k.reset(); }, {.paged = false});
}

TEST(DecodeArguments, PageIds) {
  const auto with_page = [](int at, int page) {
    return [=](AttentionArgs& a) { GoodDecode::numbers(a.page_table)[at] = page; };
  };
  expect_refused(
      {"page_table[0, 1] is 6", "between 0 and 5, the last page of k", "batch entry 0 has 20 keys"},
      with_page(1, 6));
  expect_refused({"page_table[1, 2] is -1"}, with_page(max_pages + 2, -1));
  expect_refused({"page_table[0, 2] is -1", "has 64 keys"}, [](AttentionArgs& a) { a.seqlens_k.reset(); });
  // Entries beyond a length are anything already.
  expect_accepted(with_page(2, std::numeric_limits<int>::min()));
  // A batch entry without query rows reads no page.
  expect_accepted(
      [](AttentionArgs& a) {
        GoodDecode::numbers(a.page_table)[0] = -5;
        GoodDecode::numbers(a.cu_seqlens_q)[1] = 0;
      },
      {.varlen = true});
}

// Lengths 20 and 33, three rows: with a window of 10 keys before them row 0 of the second entry sees keys
// from 20 on, which is in its second page.
TEST(DecodeArguments, PageIdsBeforeAWindow) {
  const auto windowed = [](int left, int sinks, int at) {
    return [=](AttentionArgs& a) {
      a.window_left = left;
      if (sinks) a.num_sinks = sinks;
      GoodDecode::numbers(a.page_table)[at] = -9;
    };
  };
  const Options window{.mask = {SlidingWindowMask{}}},
      with_sinks{.mask = {SlidingWindowMask{CausalAlign::bottom_right, true}}};
  expect_accepted(windowed(10, 0, max_pages), window);
  expect_accepted(windowed(14, 0, max_pages), window);
  expect_refused({"page_table[1, 0] is -9"}, windowed(15, 0, max_pages), window);
  expect_refused({"page_table[1, 1] is -9"}, windowed(10, 0, max_pages + 1), window);
  expect_refused({"page_table[1, 0] is -9"}, windowed(10, 1, max_pages), with_sinks);
  expect_refused({"page_table[1, 1] is -9"}, windowed(1, 17, max_pages + 1), with_sinks);
}

// The second entry uses one of its three rows. That row sees keys from 22 on.
TEST(DecodeArguments, PageIdsBeforeTheWindowOfUsedRows) {
  const auto used = [](int rows, int left) {
    return [=](AttentionArgs& a) {
      a.seqlens_q = a.seqlens_k;
      a.seqlens_q->data = static_cast<std::int32_t*>(a.seqlens_k->data) + 16;
      GoodDecode::numbers(a.seqlens_q)[0] = GoodDecode::numbers(a.seqlens_q)[1] = rows;
      a.window_left = left;
      GoodDecode::numbers(a.page_table)[max_pages] = -9;
    };
  };
  const Options padded{.mask = {SlidingWindowMask{}, PaddingMask{}}, .op = Operation::forward};
  expect_accepted_by(used(1, 16), padded);
  expect_refused_by({"page_table[1, 0] is -9"}, used(2, 16), padded);
  expect_refused_by({"page_table[1, 0] is -9"}, used(1, 17), padded);
  expect_accepted_by(used(0, 64), padded);
}

TEST(DecodeArguments, NoPages) {
  const auto no_pages = [](AttentionArgs& a) { a.k->shape[0] = a.v->shape[0] = 0; };
  expect_refused({"seqlens_k[0] is 20", "= 0"}, no_pages);
  expect_refused({"k has no pages", "without seqlens_k"}, [&](AttentionArgs& a) {
    no_pages(a);
    a.seqlens_k.reset();
  });
  expect_accepted([&](AttentionArgs& a) {
    no_pages(a);
    GoodDecode::numbers(a.seqlens_k)[0] = GoodDecode::numbers(a.seqlens_k)[1] = 0;
  });
}

TEST(DecodeArguments, TablesForLongerSequencesWithRowsApart) {
  GoodDecode good;
  std::vector<std::int32_t> table(1000, -1);
  for (int b = 0; b < batch; ++b)
    std::copy_n(GoodDecode::numbers(good.args.page_table) + b * max_pages, max_pages,
                table.begin() + b * 500);
  good.args.page_table->data = table.data();
  good.args.page_table->shape[1] = 400;
  good.args.page_table->strides[0] = 500;
  for_each_op({}, [&](const Options& options) { EXPECT_NO_THROW(kernel_of(options).launch(good.args)); });
}

TEST(DecodeArguments, MoreHeadsThanAPinnedTileHasRowsAreSeveralTiles) {
  AttentionSpec spec = spec_of({});
  spec.config.block_m = 16;
  const Kernel& kernel = decoding_engine().get(spec, {.num_heads_q = heads_q, .num_heads_kv = heads_kv});
  GoodDecode good;
  std::vector<float> room(1 << 16);
  AttentionArgs many = good.args;
  many.q = Tensor::contiguous(room.data(), DType::bf16, {}, {batch, 1, 40, dim});
  many.o = Tensor::contiguous(room.data() + (1 << 14), DType::bf16, {}, {batch, 1, 40, dim_v});
  many.lse = Tensor::contiguous(room.data() + (1 << 15), DType::fp32, {}, {batch, 40, 1});
  EXPECT_NO_THROW(kernel.launch(many));
}

}  // namespace
}  // namespace flashjit::decode_arguments
