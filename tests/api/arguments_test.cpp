// Bad input through the C++ interface is refused with the argument's
// name, and the next launch works as if nothing had happened.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <functional>
#include <limits>
#include <system_error>
#include <thread>

#include "tests/api/arguments.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

Engine& engine() {
  static Engine instance{EngineOptions{}};
  return instance;
}

const Kernel& kernel(bool varlen = false, bool lse = true) {
  AttentionSpec spec;
  spec.head_dim = GoodArguments::head_dim;
  spec.head_dim_v = GoodArguments::head_dim_v;
  spec.varlen = varlen;
  spec.lse = lse;
  return engine().get(spec, GoodArguments::shape());
}

using Spoil = std::function<void(AttentionArgs&)>;

// Makes valid arguments wrong by `spoil`, and expects launch() and prepare() to refuse them.
void expect_refusal(std::initializer_list<const char*> parts, const Spoil& spoil, bool varlen = false,
                    bool lse = true) {
  GoodArguments good(varlen, lse);
  AttentionArgs bad = good.args;
  spoil(bad);
  const Kernel& k = kernel(varlen, lse);
  expect_error(ErrorCode::invalid_argument, parts, [&] { k.launch(bad); });
  expect_error(ErrorCode::invalid_argument, parts, [&] { k.prepare(bad); });
  EXPECT_NO_THROW(k.launch(good.args));
}

struct Field {
  const char* name;
  std::optional<Tensor> AttentionArgs::* member;
};
constexpr Field tensors[] = {{"q", &AttentionArgs::q},
                             {"k", &AttentionArgs::k},
                             {"v", &AttentionArgs::v},
                             {"o", &AttentionArgs::o},
                             {"lse", &AttentionArgs::lse}};
constexpr Field lengths[] = {{"cu_seqlens_q", &AttentionArgs::cu_seqlens_q},
                             {"cu_seqlens_k", &AttentionArgs::cu_seqlens_k}};

// Gives k and v so many rows, all of them the same one.
void repeat_keys(AttentionArgs& args, int dim, std::int64_t rows) {
  for (std::optional<Tensor>* t : {&args.k, &args.v}) {
    (*t)->shape[dim] = rows;
    (*t)->strides[dim] = 0;
  }
}

// v is part of k: given twice it is refused, and k has the spec's head_dim.
TEST(Arguments, ValuesInKeys) {
  const Kernel& k = engine().get(
      AttentionSpec::from_json(
          R"({"op": "forward", "dtype": "bf16", "head_dim": 24, "head_dim_v": 16, "v_in_k": true})"),
      GoodArguments::shape());
  GoodArguments good;
  std::swap(good.args.q, good.args.o);  // head_dim 24, head_dim_v 16
  good.args.k = good.args.v;
  expect_error(ErrorCode::invalid_argument, {"v was given", "\"v_in_k\": true", "leave the argument out"},
               [&] { k.launch(good.args); });
  good.args.v.reset();
  EXPECT_NO_THROW(k.launch(good.args));
  good.args.k->shape[3] = 16;
  expect_error(ErrorCode::invalid_argument, {"k has shape", "the spec's head_dim"},
               [&] { k.launch(good.args); });
  expect_error(ErrorCode::invalid_spec, {"head_dim_v 24", "head_dim 16", "v_in_k"}, [] {
    AttentionSpec::from_json(
        R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24, "v_in_k": true})");
  });
  for (const char* op : {"merge", "backward"})
    expect_error(ErrorCode::unsupported, {"v_in_k", op}, [&] {
      AttentionSpec::from_json(R"({"op": ")" + std::string(op) +
                               R"(", "dtype": "bf16", "head_dim": 16, "v_in_k": true})");
    });
}

TEST(Arguments, LongerThanAnySequence) {
  constexpr int largest = std::numeric_limits<int>::max();
  for (const std::int64_t rows : {std::int64_t{longest_sequence} + 1, std::int64_t{largest}}) {
    const std::string text = std::to_string(rows);
    expect_refusal({"k has shape", text.c_str(), "at most 1073741824 rows"},
                   [&](AttentionArgs& a) { repeat_keys(a, 1, rows); });
    expect_refusal({"q has shape", text.c_str(), "at most 1073741824 rows"},
                   [&](AttentionArgs& a) { a.q->shape[1] = a.o->shape[1] = a.lse->shape[2] = rows; });
  }
  for (const std::int64_t rows : {std::int64_t{largest} + 1, std::numeric_limits<std::int64_t>::max()})
    expect_refusal({"k has shape", std::to_string(rows).c_str(), "between 0 and 2147483647"},
                   [&](AttentionArgs& a) { repeat_keys(a, 1, rows); });
  const auto with_sizes = [](std::int64_t batch, std::int64_t rows, std::int64_t heads) {
    return [=](AttentionArgs& a) {
      for (std::optional<Tensor>* t : {&a.q, &a.k, &a.v, &a.o}) {
        (*t)->shape[0] = batch;
        (*t)->shape[1] = rows;
        (*t)->shape[2] = heads;
      }
    };
  };
  expect_refusal({"q has shape", "64 bits"}, with_sizes(largest, longest_sequence, largest));
  expect_refusal({"batch 131072 x num_heads_q 131072 x seqlen_q 65536", "2^48"},
                 with_sizes(1 << 17, 1 << 16, 1 << 17));
}

// Addresses that no other tensor has. The first page is memory.
class Addresses {
 public:
  explicit Addresses(std::size_t bytes)
      : bytes_(bytes),
        first_(::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (first_ == MAP_FAILED || ::mprotect(first_, 4096, PROT_READ | PROT_WRITE) != 0)
      throw std::system_error(errno, std::generic_category(), "mmap");
  }
  Addresses(const Addresses&) = delete;
  ~Addresses() { ::munmap(first_, bytes_); }
  void* first() const { return first_; }

 private:
  const std::size_t bytes_;
  void* const first_;
};

TEST(Arguments, PackedTotalsNear31Bits) {
  constexpr int largest = std::numeric_limits<int>::max();
  const Addresses addresses(std::size_t{1} << 39);  // of so many rows of o, with their gaps
  for (const std::optional<int> max_seqlen :
       std::initializer_list<std::optional<int>>{{}, GoodArguments::seqlen_k, longest_sequence, largest}) {
    for (const int rows : {largest - 400, largest}) {
      GoodArguments good(true, false);
      good.args.o->data = addresses.first();
      repeat_keys(good.args, 0, rows);
      good.args.max_seqlen_k = max_seqlen;
      EXPECT_NO_THROW(kernel(true, false).launch(good.args)) << rows << ", " << max_seqlen.value_or(-1);
      good.args.q->shape[0] = good.args.o->shape[0] = rows;
      // With gaps between rows: without gaps, a tensor so large would certainly contain the others.
      good.args.q->strides[0] += 8;
      good.args.o->strides[0] += 8;
      EXPECT_NO_THROW(kernel(true, false).prepare(good.args)) << rows << ", " << max_seqlen.value_or(-1);
      good.args.max_seqlen_q = GoodArguments::seqlen_q;
      EXPECT_NO_THROW(kernel(true, false).launch(good.args)) << rows << ", " << max_seqlen.value_or(-1);
    }
  }
  GoodArguments bad(true);
  repeat_keys(bad.args, 0, largest);
  GoodArguments::starts(bad.args.cu_seqlens_k)[2] = largest;
  expect_error(ErrorCode::invalid_argument,
               {"cu_seqlens_k", "2147483640", "longer than max_seqlen_k = 1073741824"},
               [&] { kernel(true).launch(bad.args); });
}

TEST(Arguments, GoodOnesAreAccepted) {
  for (const bool varlen : {false, true}) {
    for (const bool lse : {false, true}) {
      GoodArguments good(varlen, lse);
      EXPECT_NO_THROW(kernel(varlen, lse).launch(good.args));
    }
  }
}

TEST(Arguments, Missing) {
  for (const Field& f : tensors) {
    expect_refusal({f.name, "missing"}, [&](AttentionArgs& a) { (a.*f.member).reset(); });
    expect_refusal({f.name, "missing"}, [&](AttentionArgs& a) { (a.*f.member).reset(); }, true);
  }
  for (const Field& f : lengths) {
    expect_refusal({f.name, "missing"}, [&](AttentionArgs& a) { (a.*f.member).reset(); }, true);
  }
}

TEST(Arguments, NullPointers) {
  for (const Field& f : tensors)
    expect_refusal({f.name, "null"}, [&](AttentionArgs& a) { (a.*f.member)->data = nullptr; });
  for (const Field& f : lengths)
    expect_refusal({f.name, "null"}, [&](AttentionArgs& a) { (a.*f.member)->data = nullptr; }, true);
}

TEST(Arguments, WrongRank) {
  for (const Field& f : tensors) {
    for (const bool varlen : {false, true}) {
      for (const int change : {-1, 1, -10, 100}) {
        expect_refusal({f.name, "rank"}, [&](AttentionArgs& a) { (a.*f.member)->rank += change; }, varlen);
      }
    }
  }
  for (const Field& f : lengths)
    expect_refusal({f.name, "rank"}, [&](AttentionArgs& a) { (a.*f.member)->rank = 2; }, true);
}

TEST(Arguments, WrongDtype) {
  for (const Field& f : tensors) {
    for (const DType dtype : {DType::fp16, DType::int32}) {
      expect_refusal({f.name, "dtype", to_string(dtype)},
                     [&](AttentionArgs& a) { (a.*f.member)->dtype = dtype; });
    }
  }
  for (const Field& f : lengths) {
    expect_refusal(
        {f.name, "dtype", "fp32"}, [&](AttentionArgs& a) { (a.*f.member)->dtype = DType::fp32; }, true);
  }
}

TEST(Arguments, DtypeOfTheOutput) {
  AttentionSpec spec{
      .head_dim = GoodArguments::head_dim, .head_dim_v = GoodArguments::head_dim_v, .o_dtype = DType::fp32};
  const Kernel& k = engine().get(spec, GoodArguments::shape());
  GoodArguments good;
  expect_error(ErrorCode::invalid_argument, {"o has dtype bf16, this kernel takes fp32"},
               [&] { k.launch(good.args); });
  good.args.o->dtype = DType::fp32;
  EXPECT_NO_THROW(k.launch(good.args));
  good.args.o->data = static_cast<char*>(good.args.o->data) + 2;
  expect_error(ErrorCode::invalid_argument, {"o's data pointer is not aligned to 4 bytes"},
               [&] { k.launch(good.args); });
}

TEST(Arguments, OnAnotherDevice) {
  const Device gpu{Device::Kind::cuda, 1};
  for (const Field& f : tensors)
    expect_refusal({f.name, "cuda:1", "cpu"}, [&](AttentionArgs& a) { (a.*f.member)->device = gpu; });
  for (const Field& f : lengths) {
    expect_refusal({f.name, "cuda:1", "cpu"}, [&](AttentionArgs& a) { (a.*f.member)->device = gpu; }, true);
  }
}

TEST(Arguments, WrongShape) {
  for (const Field& f : tensors) {
    for (int dim = 0; dim < (f.member == &AttentionArgs::lse ? 3 : 4); ++dim) {
      // Other tensors are compared with q's batch, heads and rows, and v with k's rows and heads.
      const bool defines =
          f.member == &AttentionArgs::q ? dim < 3 : f.member == &AttentionArgs::k && (dim == 1 || dim == 2);
      if (defines) {
        expect_refusal({"has shape"}, [&](AttentionArgs& a) { (a.*f.member)->shape[dim] -= 1; });
      } else {
        expect_refusal({f.name, "dimension"}, [&](AttentionArgs& a) { (a.*f.member)->shape[dim] -= 1; });
      }
      expect_refusal({f.name, "shape"}, [&](AttentionArgs& a) { (a.*f.member)->shape[dim] = -1; });
      expect_refusal({f.name, "shape"},
                     [&](AttentionArgs& a) { (a.*f.member)->shape[dim] = std::int64_t{1} << 31; });
    }
  }
}

TEST(Arguments, HeadsThatDoNotDivide) {
  const auto heads = [](int kv) { return [kv](AttentionArgs& a) { a.k->shape[2] = a.v->shape[2] = kv; }; };
  expect_refusal({"q has 4 heads", "k has 3", "multiple"}, heads(3));
  expect_refusal({"q has 4 heads", "k has 8", "multiple"}, heads(8));
  expect_refusal({"q has 4 heads", "k has 0", "multiple"}, heads(0));
}

TEST(Arguments, StridesAKernelCannotUse) {
  for (const Field& f : tensors) {
    const int last = f.member == &AttentionArgs::lse ? 2 : 3;
    expect_refusal({f.name, "contiguous"}, [&](AttentionArgs& a) { (a.*f.member)->strides[last] = 2; });
    expect_refusal({f.name, "contiguous"}, [&](AttentionArgs& a) { (a.*f.member)->strides[last] = 0; });
  }
  for (const Field& f : lengths) {
    expect_refusal({f.name, "contiguous"}, [&](AttentionArgs& a) { (a.*f.member)->strides[0] = 2; }, true);
  }
}

TEST(Arguments, OutputsThatOverwriteThemselves) {
  for (const Field& f : {tensors[3], tensors[4]}) {
    for (const int dim : {0, 1})
      expect_refusal({f.name, "overwrite"}, [&](AttentionArgs& a) { (a.*f.member)->strides[dim] = 0; });
  }
}

// Rows may share elements although no stride is 0. Any order
// of dimensions that lie within one another is accepted.
TEST(Arguments, OutputsWhoseRowsOverlap) {
  constexpr std::int64_t dim = GoodArguments::head_dim_v, heads = GoodArguments::heads_q,
                         rows = GoodArguments::seqlen_q;
  const auto strides = [](std::int64_t batch, std::int64_t row, std::int64_t head) {
    return [=](AttentionArgs& a) { a.o->strides = {batch, row, head, 1}; };
  };
  expect_refusal({"o is written", "overwrite"}, strides(rows * heads * dim, heads * dim, dim - 1));
  expect_refusal({"o is written", "overwrite"}, strides(rows * heads * dim, heads * dim - 1, dim));
  expect_refusal({"o is written", "overwrite"}, strides(rows * heads * dim - 1, heads * dim, dim));
  expect_refusal({"o is written", "overwrite"}, strides(dim, dim, dim));
  expect_refusal({"lse is written", "overwrite"}, [](AttentionArgs& a) { a.lse->strides[1] = rows - 1; });
  for (const auto& good_strides : {strides(rows * heads * dim, dim, rows * dim),  // heads first
                                   strides(heads * dim, 2 * heads * dim, dim),    // batch inside
                                   strides(2 * rows * heads * dim, 2 * heads * dim, 2 * dim)}) {
    GoodArguments good;
    good_strides(good.args);
    EXPECT_NO_THROW(kernel().launch(good.args));
  }
  expect_refusal({"o is written", "overwrite"}, strides(std::numeric_limits<std::int64_t>::min(), 0, dim));
}

TEST(Arguments, OutputOverAnInput) {
  const auto over = [](std::optional<Tensor> AttentionArgs::* member, std::int64_t elements) {
    return [=](AttentionArgs& a) { a.o->data = static_cast<std::uint16_t*>((a.*member)->data) + elements; };
  };
  const Field inputs[] = {tensors[0], tensors[1], tensors[2]};
  for (const bool varlen : {false, true}) {
    for (const Field& f : inputs) {
      expect_refusal({"o and", f.name, "share memory"}, over(f.member, 0), varlen);
      expect_refusal({"o and", f.name, "share memory"}, over(f.member, 1), varlen);
      expect_refusal({"o and", f.name, "share memory"}, over(f.member, -1), varlen);
    }
  }
}

// q, k, v and o lie side by side in each row or each head of one buffer; any of them may be moved there.
TEST(Arguments, SlicesOfOneBuffer) {
  AttentionSpec spec;
  spec.head_dim = GoodArguments::head_dim;
  const Kernel& even = engine().get(spec, GoodArguments::shape());
  constexpr std::int64_t dim = GoodArguments::head_dim, heads = GoodArguments::heads_q;
  std::vector<std::uint16_t> buffer(65536);
  for (const bool heads_inside : {false, true}) {
    GoodArguments good;
    std::int64_t slice = heads_inside ? heads * dim : dim, first = 0;
    for (std::optional<Tensor>* t : {&good.args.q, &good.args.k, &good.args.v, &good.args.o}) {
      (*t)->shape = {2, 5, heads, dim};
      (*t)->strides = {5 * 4 * heads * dim, 4 * heads * dim, heads_inside ? dim : 4 * dim, 1};
      (*t)->data = buffer.data() + first;
      first += slice;
    }
    EXPECT_NO_THROW(even.launch(good.args));
    good.args.k->shape[1] = good.args.v->shape[1] = 3;  // fewer keys in the same rows
    EXPECT_NO_THROW(even.launch(good.args));
    Tensor& o = *good.args.o;
    o.data = buffer.data() + 2 * slice + 1;
    expect_error(ErrorCode::invalid_argument, {"o and v share memory"}, [&] { even.launch(good.args); });
    o.data = buffer.data() + 1;
    expect_error(ErrorCode::invalid_argument, {"o and q share memory"}, [&] { even.launch(good.args); });
  }
}

TEST(Arguments, NoRowsAtAll) {
  GoodArguments good(true);
  for (int b = 0; b <= GoodArguments::batch; ++b) GoodArguments::starts(good.args.cu_seqlens_k)[b] = 0;
  good.args.max_seqlen_k = 0;
  std::fill_n(static_cast<std::uint16_t*>(good.args.o->data), 2 * 5 * 4 * 24, std::uint16_t{0x7fff});
  kernel(true).launch(good.args);
  EXPECT_EQ(*static_cast<std::uint16_t*>(good.args.o->data), 0);
  EXPECT_EQ(*static_cast<float*>(good.args.lse->data), -std::numeric_limits<float>::infinity());
  good.args.max_seqlen_q = 0;
  expect_error(ErrorCode::invalid_argument,
               {"cu_seqlens_q gives sequence 0 a length of 5", "max_seqlen_q = 0"},
               [&] { kernel(true).launch(good.args); });
  for (int b = 0; b <= GoodArguments::batch; ++b) GoodArguments::starts(good.args.cu_seqlens_q)[b] = 0;
  EXPECT_NO_THROW(kernel(true).launch(good.args));
}

TEST(Arguments, OfASequencesOwnLength) {
  expect_refusal({"max_seqlen_q was given", "\"varlen\": true"},
                 [](AttentionArgs& a) { a.max_seqlen_q = 5; });
}

TEST(Arguments, MisalignedPointers) {
  const auto shift = [](std::optional<Tensor>& t, int bytes) {
    t->data = static_cast<char*>(t->data) + bytes;
  };
  for (const Field& f : tensors)
    expect_refusal({f.name, "align"}, [&](AttentionArgs& a) { shift(a.*f.member, 1); });
  for (const Field& f : lengths)
    expect_refusal({f.name, "align"}, [&](AttentionArgs& a) { shift(a.*f.member, 2); }, true);
}

TEST(Arguments, ThatTheSpecHasNoUseFor) {
  GoodArguments with_lse, packed(true);
  expect_refusal(
      {"lse", "\"lse\": false"}, [&](AttentionArgs& a) { a.lse = with_lse.args.lse; }, false, false);
  expect_refusal({"cu_seqlens_q was given", "\"varlen\": true"},
                 [&](AttentionArgs& a) { a.cu_seqlens_q = packed.args.cu_seqlens_q; });
  expect_refusal({"cu_seqlens", "\"varlen\": true"},
                 [&](AttentionArgs& a) { a.cu_seqlens_k = packed.args.cu_seqlens_k; });
}

TEST(Arguments, LengthsThatContradict) {
  const auto set = [](std::optional<Tensor> AttentionArgs::* member, int index, int value) {
    return [=](AttentionArgs& a) { GoodArguments::starts(a.*member)[index] = value; };
  };
  // Each case needs arguments of its own: `spoil` changes the tables that the tensors point to.
  const auto refused = [&](std::initializer_list<const char*> parts, const Spoil& spoil) {
    GoodArguments good(true);
    spoil(good.args);
    expect_error(ErrorCode::invalid_argument, parts, [&] { kernel(true).launch(good.args); });
  };
  for (const Field& f : lengths) {
    refused({f.name, "[0]"}, set(f.member, 0, 1));
    refused({f.name, "decreases"}, set(f.member, 1, -1));
    refused({f.name, "1000"}, set(f.member, 1, 1000));
    refused({f.name, "beyond"}, set(f.member, 2, 15));
    refused({f.name}, set(f.member, 2, std::numeric_limits<int>::max()));
    refused({f.name, "dimension"}, [&](AttentionArgs& a) { (a.*f.member)->shape[0] = 2; });
  }
  refused({"cu_seqlens_q", "empty"},
          [](AttentionArgs& a) { a.cu_seqlens_q->shape[0] = a.cu_seqlens_k->shape[0] = 0; });
  refused({"cu_seqlens_q", "max_seqlen_q"}, [](AttentionArgs& a) { a.max_seqlen_q = 4; });
  refused({"cu_seqlens_k", "max_seqlen_k"}, [](AttentionArgs& a) { a.max_seqlen_k = 6; });
  refused({"max_seqlen_q", "-1"}, [](AttentionArgs& a) { a.max_seqlen_q = -1; });
  refused({"max_seqlen_k", "-7"}, [](AttentionArgs& a) { a.max_seqlen_k = -7; });
}

TEST(Arguments, SoftmaxScales) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(),
                  infinity = std::numeric_limits<float>::infinity();
  // The last but one is denormal; the last one times log2(e) is beyond float.
  for (const float scale : {0.0f, -0.125f, nan, infinity, -infinity, 1e-38f, 2.4e38f}) {
    expect_refusal({"softmax_scale", "1.2e-38"}, [&](AttentionArgs& a) { a.softmax_scale = scale; });
  }
  for (const float scale : {1.2e-38f, 2.3e38f}) {
    GoodArguments good;
    good.args.softmax_scale = scale;
    EXPECT_NO_THROW(kernel().launch(good.args)) << scale;
  }
}

TEST(Arguments, SpareMultiprocessorsOfACpu) {
  expect_refusal({"spare_multiprocessors", "8", "CPU"},
                 [](AttentionArgs& a) { a.spare_multiprocessors = 8; });
}

TEST(Arguments, AStreamForACpuKernel) {
  GoodArguments good;
  int stream = 0;
  expect_error(ErrorCode::invalid_argument, {"stream", "CPU"}, [&] { kernel().launch(good.args, &stream); });
  const PreparedLaunch prepared = kernel().prepare(good.args);
  expect_error(ErrorCode::invalid_argument, {"stream", "CPU"}, [&] { prepared.launch(&stream); });
  EXPECT_NO_THROW(prepared.launch());
}

TEST(Arguments, AtMostSixDimensions) {
  EXPECT_EQ(Tensor::contiguous(nullptr, DType::bf16, {}, {2, 3, 4, 5, 6, 7}).strides[0], 3 * 4 * 5 * 6 * 7);
  expect_error(ErrorCode::invalid_argument, {"6 dimensions"},
               [] { Tensor::contiguous(nullptr, DType::bf16, {}, {1, 1, 1, 1, 1, 1, 1}); });
}

TEST(Engines, UnknownDevices) {
  for (const char* device :
       {"", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:1x", "cuda:99999999999", "CPU"}) {
    expect_error(ErrorCode::invalid_argument, {"device", "\"cpu\" or \"cuda:N\""},
                 [&] { Engine({.device = device}); });
  }
  expect_error(ErrorCode::target_unavailable, {}, [] { Engine({.device = "cuda:1000"}); });
}

TEST(Engines, TargetsThatDoNotRunHere) {
  expect_error(ErrorCode::target_unavailable, {"sm_90", "cpu"}, [] { Engine({.target = "sm_90"}); });
  expect_error(ErrorCode::invalid_argument, {"x86-64-v5", "x86-64-v4"},
               [] { Engine({.target = "x86-64-v5"}); });
  if (Target::native().level < 4) {
    expect_error(ErrorCode::target_unavailable, {"x86-64-v4", "x86-64-v3"},
                 [] { Engine({.target = "x86-64-v4"}); });
  }
}

TEST(Engines, ThreadCounts) {
  expect_error(ErrorCode::invalid_argument, {"num_threads", "-1"}, [] { Engine({.num_threads = -1}); });
  for (const int too_many : {max_num_threads + 1, 1'000'000'000}) {
    const std::string text = std::to_string(too_many);
    expect_error(ErrorCode::invalid_argument, {"num_threads", text.c_str(), "up to 8192"},
                 [&] { Engine({.num_threads = too_many}); });
  }
  const ParallelFor serial = [](std::int64_t count, auto* body, void* context) { body(context, 0, count); };
  EXPECT_NO_THROW(Engine({.num_threads = max_num_threads, .parallel_for = serial}));
}

// While it lives, new threads ask for a stack larger than any address space, so the system gives none.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_getattr_default_np(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 60);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;
  ~NoMoreThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST(Engines, WithoutAThreadGetAsyncSaysSo) {
  Engine one({.num_threads = 1});
  AttentionSpec spec;
  spec.head_dim = GoodArguments::head_dim;
  {
    const NoMoreThreads here;
    EXPECT_THROW(std::thread([] {}).join(), std::system_error) << "the system gave one all the same";
    expect_error(ErrorCode::device_failed, {"get_async", "no more threads", "ulimit -u"},
                 [&] { one.get_async(spec, GoodArguments::shape()); });
  }
  const Kernel* kernel = one.get_async(spec, GoodArguments::shape()).get();
  EXPECT_EQ(kernel, &one.get(spec, GoodArguments::shape()));
  const NoMoreThreads here;
  EXPECT_EQ(one.get_async(spec, GoodArguments::shape()).get(), kernel) << "in memory: takes no thread";
}

TEST(Engines, SpecsThatCannotBe) {
  AttentionSpec spec;
  expect_error(ErrorCode::invalid_spec, {"head_dim"}, [&] { engine().get(spec, {}); });
  spec.head_dim = 64;
  spec.config.block_m = 1040;
  expect_error(ErrorCode::invalid_spec, {"block_m", "1040"}, [&] { engine().get(spec, {}); });
  spec.config = {};
  spec.parts_dtype = DType::bf16;
  expect_error(ErrorCode::unsupported, {"parts_dtype"}, [&] { engine().get(spec, {}); });
  spec.parts_dtype.reset();
  EXPECT_NO_THROW(engine().get(spec, {}));
}

TEST(Engines, FailuresArriveThroughTheFutureToo) {
  AttentionSpec spec;
  spec.head_dim = 12;
  const auto future = engine().get_async(spec, {});
  expect_error(ErrorCode::invalid_spec, {"head_dim", "12"}, [&] { future.get(); });
}

// A shape is a hint: kernels compute launches of any size. Sizes that no launch can have are refused.
TEST(Engines, ShapesOfAnyKind) {
  AttentionSpec spec;
  spec.head_dim = GoodArguments::head_dim;
  spec.head_dim_v = GoodArguments::head_dim_v;
  constexpr int most = std::numeric_limits<int>::max();
  GoodArguments good;
  for (const Shape shape :
       {Shape{0, 0, 0, 1, 1}, Shape{.num_heads_q = 0}, Shape{.num_heads_q = 0, .num_heads_kv = 0},
        Shape{most, most, most, most, most}, Shape{.total_q = most, .total_k = most}}) {
    EXPECT_NO_THROW(engine().get(spec, shape).launch(good.args));
  }
  const auto refused = [&](std::initializer_list<const char*> parts, const Shape& shape) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { engine().get(spec, shape); });
    expect_error(ErrorCode::invalid_argument, parts, [&] { engine().get_async(spec, shape); });
    expect_error(ErrorCode::invalid_argument, parts, [&] { compile(spec, engine().target(), shape); });
  };
  refused({"num_heads_kv 0", "multiple"}, {.num_heads_kv = 0});
  refused({"num_heads_q 8 and num_heads_kv 3", "multiple"}, {.num_heads_q = 8, .num_heads_kv = 3});
  refused({"num_heads_kv -1"}, {.num_heads_q = 1, .num_heads_kv = -1});
  refused({"batch -1"}, {.batch = -1});
  refused({"seqlen_q -2"}, {.seqlen_q = -2});
  refused({"seqlen_k -3"}, {.seqlen_k = -3});
  refused({"total_q -4"}, {.total_q = -4});
  refused({"page_size 16", "\"paged\": true"}, {.page_size = 16});
}

}  // namespace
}  // namespace flashjit
