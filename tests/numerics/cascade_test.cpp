// The example of a shared prefix (tools/examples/cascade.hpp) against attention over the whole keys. In the
// reference every request has the prefix's pages before its own.
#include "tools/examples/cascade.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/numerics/specs.hpp"
#include "tests/support/guarded_tensor.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/forward_bound.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::testing_support {
namespace {

struct CascadeCase {
  int prefix = 320;          // keys, whole pages
  std::vector<int> lengths;  // own keys of each request
  DType dtype = DType::bf16;
  int heads_q = 8, heads_kv = 2, head_dim = 64, page_size = 16;
};

class Cascades : public OnEveryDevice {
 protected:
  GuardedTensor& add(DType dtype, const std::vector<std::int64_t>& sizes) {
    const Tensor like = Tensor::contiguous(nullptr, dtype, {}, sizes);
    tensors_.push_back(std::make_unique<GuardedTensor>(on(), dtype,
                                                       TensorShape{like.rank, like.shape, like.strides},
                                                       Poison::nan, GuardedTensor::Fence::after));
    return *tensors_.back();
  }
  GuardedTensor& random(DType dtype, const std::vector<std::int64_t>& sizes) {
    GuardedTensor& tensor = add(dtype, sizes);
    verify::fill_random(tensor.on_host(), static_cast<std::uint64_t>(tensors_.size()), {});
    tensor.upload();
    return tensor;
  }
  GuardedTensor& table(const std::vector<std::int64_t>& sizes, const std::vector<std::int32_t>& values) {
    GuardedTensor& tensor = add(DType::int32, sizes);
    std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(tensor.on_host().data));
    tensor.upload();
    return tensor;
  }

  void expect(const CascadeCase& given) {
    SCOPED_TRACE(std::string(to_string(given.dtype)) + ", prefix " + std::to_string(given.prefix) + ", " +
                 std::to_string(given.lengths.size()) + " requests");
    const auto requests = static_cast<int>(given.lengths.size());
    const int longest = *std::max_element(given.lengths.begin(), given.lengths.end());
    const int of_prefix = given.prefix / given.page_size,
              of_request = std::max(1, (longest + given.page_size - 1) / given.page_size);
    const int num_pages = of_prefix + requests * of_request;

    // The first pages are the prefix, as one sequence. The others are the requests' own, in random order.
    GuardedTensor &q = random(given.dtype, {requests, given.heads_q, given.head_dim}),
                  &k = random(given.dtype, {num_pages, given.page_size, given.heads_kv, given.head_dim}),
                  &v = random(given.dtype, {num_pages, given.page_size, given.heads_kv, given.head_dim}),
                  &o = add(given.dtype, {requests, given.heads_q, given.head_dim}),
                  &parts_o = add(DType::fp32, {2, requests, given.heads_q, given.head_dim}),
                  &parts_lse = add(DType::fp32, {2, given.heads_q, requests});
    std::vector<std::int32_t> own(static_cast<std::size_t>(requests * of_request)), whole, lengths, starts;
    std::iota(own.begin(), own.end(), of_prefix);
    std::shuffle(own.begin(), own.end(), std::mt19937(1));
    for (int i = 0; i < requests; ++i) {
      for (int page = 0; page < of_prefix; ++page) whole.push_back(page);
      whole.insert(whole.end(), own.begin() + i * of_request, own.begin() + (i + 1) * of_request);
      lengths.push_back(given.prefix + given.lengths[static_cast<std::size_t>(i)]);
    }
    for (int i = 0; i <= requests; ++i) starts.push_back(i);
    GuardedTensor &page_table = table({requests, of_request}, own),
                  &seqlens_k = table({requests}, given.lengths),
                  &cu_seqlens_q = table({requests + 1}, starts),
                  &whole_table = table({requests, of_prefix + of_request}, whole),
                  &whole_lengths = table({requests}, lengths);

    o.upload();
    const auto prefix_of = [&](Tensor pages) {
      return Tensor::contiguous(pages.data, pages.dtype, pages.device,
                                {1, given.prefix, given.heads_kv, given.head_dim});
    };
    Cascade cascade = {.q = q.on_device(),
                       .o = o.on_device(),
                       .prefix_k = prefix_of(k.on_device()),
                       .prefix_v = prefix_of(v.on_device()),
                       .k = k.on_device(),
                       .v = v.on_device(),
                       .page_table = page_table.on_device(),
                       .seqlens_k = seqlens_k.on_device(),
                       .cu_seqlens_q = cu_seqlens_q.on_device(),
                       .parts_o = parts_o.on_device(),
                       .parts_lse = parts_lse.on_device()};
    const CascadeKernels kernels(on().engine(), cascade);
    if (kernels.workspace_bytes > 0) {
      GuardedTensor& workspace =
          add(DType::int32, {static_cast<std::int64_t>(kernels.workspace_bytes + 3) / 4});
      workspace.upload();
      cascade.workspace = workspace.on_device();
    }
    launch_cascade(on().engine(), kernels, cascade);
    on().synchronize();
    o.download();
    EXPECT_TRUE(o.was_not_touched("o", true));
    const AttentionSpec spec =
        decode_spec(given.dtype, given.head_dim, {}, {.lse = false, .varlen = true, .paged = true});
    verify::OracleOptions options;
    options.largest_score = verify::largest_score(Target::parse(on().target()));
    const verify::Report report = verify::verify_outputs(spec,
                                                         {.q = q.on_host(),
                                                          .k = k.on_host(),
                                                          .v = v.on_host(),
                                                          .o = o.on_host(),
                                                          .cu_seqlens_q = cu_seqlens_q.on_host(),
                                                          .seqlens_k = whole_lengths.on_host(),
                                                          .page_table = whole_table.on_host()},
                                                         options);
    EXPECT_TRUE(report.ok()) << report.str();
    tensors_.clear();
  }

 private:
  std::vector<std::unique_ptr<GuardedTensor>> tensors_;
};

TEST_P(Cascades, AreAttentionOverTheWholeKeys) {
  for (const DType dtype : on().dtypes()) {
    expect({.lengths = {1, 40, 7, 0, 100}, .dtype = dtype});
    expect({.prefix = 16, .lengths = {3}, .dtype = dtype});
  }
  expect({.prefix = 1024, .lengths = std::vector(64, 33), .heads_q = 4, .heads_kv = 1, .head_dim = 128});
  // More requests than decode has rows: the forward computes the prefix.
  expect({.lengths = std::vector(70, 5), .heads_q = 4, .heads_kv = 4});
}

FLASHJIT_ON_EVERY_DEVICE(Cascades);

}  // namespace
}  // namespace flashjit::testing_support
