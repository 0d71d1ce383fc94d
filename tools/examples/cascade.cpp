// A prefix shared by many requests, read once (cascade.hpp), beside one decode that reads it once for each
// request: times, bytes of K and V that each reads, and the largest difference of the results.
//
//   cascade [DEVICE [REQUESTS [PREFIX]]]        cascade cuda:0 64 8192
#include "cascade.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

namespace {

// Memory that both the host and the device reach: the host's own, on a GPU managed memory.
class Memory {
 public:
  explicit Memory(flashjit::Device device) : on_gpu_(device.kind == flashjit::Device::Kind::cuda) {
    if (!on_gpu_) return;
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    const auto function = [&]<class F>(F*& to, const char* name) {
      to = reinterpret_cast<F*>(driver ? dlsym(driver, name) : nullptr);
      if (!to) throw flashjit::Error(flashjit::ErrorCode::target_unavailable, "libcuda.so.1 cannot be used");
    };
    int (*get_device)(int*, int);
    int (*retain)(void**, int);
    int (*set_current)(void*);
    function(get_device, "cuDeviceGet");
    function(retain, "cuDevicePrimaryCtxRetain");
    function(set_current, "cuCtxSetCurrent");
    function(allocate_, "cuMemAllocManaged");
    function(synchronize_, "cuCtxSynchronize");
    int handle = 0;
    void* context = nullptr;
    if (get_device(&handle, device.index) || retain(&context, handle) || set_current(context))
      throw flashjit::Error(flashjit::ErrorCode::device_failed, device.str() + " has no context");
  }

  // Lives until the process ends.
  void* allocate(std::size_t bytes) const {
    void* memory = nullptr;
    unsigned long long address = 0;
    if (!on_gpu_)
      memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    else if (allocate_(&address, bytes, 1) == 0)
      memory = reinterpret_cast<void*>(address);
    if (!memory) throw std::bad_alloc();
    return memory;
  }
  void synchronize() const {
    if (on_gpu_ && synchronize_())
      throw flashjit::Error(flashjit::ErrorCode::device_failed, "a kernel failed");
  }

 private:
  bool on_gpu_;
  int (*allocate_)(unsigned long long*, std::size_t, unsigned) = nullptr;
  int (*synchronize_)() = nullptr;
};

float value_of(std::uint16_t bf16) {
  return std::bit_cast<float>(std::uint32_t{bf16} << 16);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string name = argc > 1 ? argv[1] : "cpu";
  const int requests = argc > 2 ? std::atoi(argv[2]) : 8, prefix = argc > 3 ? std::atoi(argv[3]) : 1024;
  constexpr int heads_q = 32, heads_kv = 8, head_dim = 128, page_size = 16, own_keys = 128;
  if (requests < 1 || prefix < page_size || prefix % page_size) {
    std::fprintf(stderr, "cascade [DEVICE [REQUESTS [PREFIX]]]: PREFIX is a multiple of %d\n", page_size);
    return 64;
  }

  flashjit::Engine engine({.device = name});
  const flashjit::Device device = engine.device();
  const Memory memory(device);
  const auto make = [&](flashjit::DType dtype, std::initializer_list<std::int64_t> shape) {
    std::size_t bytes = dtype == flashjit::DType::bf16 ? 2 : 4;
    for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
    return flashjit::Tensor::contiguous(memory.allocate(bytes), dtype, device, shape);
  };
  // Numbers between -2 and 2 as bf16.
  const auto random = [&](std::initializer_list<std::int64_t> shape) {
    static std::uint32_t state = 1;
    const flashjit::Tensor t = make(flashjit::DType::bf16, shape);
    auto* to = static_cast<std::uint16_t*>(t.data);
    for (std::int64_t i = 0; i < t.shape[0] * t.strides[0]; ++i) {
      state = state * 1664525u + 1013904223u;  // Numerical Recipes
      const float number = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-30f;
      to[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16);
    }
    return t;
  };
  const auto int32 = [](const flashjit::Tensor& t) { return static_cast<std::int32_t*>(t.data); };

  // One pool of pages. The prefix has the first ones, in order.
  const int of_prefix = prefix / page_size, of_request = own_keys / page_size,
            of_whole = of_prefix + of_request;
  const int num_pages = of_prefix + requests * of_request;
  const auto bf16 = flashjit::DType::bf16, fp32 = flashjit::DType::fp32;
  Cascade c;
  c.q = random({requests, heads_q, head_dim});
  c.k = random({num_pages, page_size, heads_kv, head_dim});
  c.v = random({num_pages, page_size, heads_kv, head_dim});
  c.prefix_k = flashjit::Tensor::contiguous(c.k.data, bf16, device, {1, prefix, heads_kv, head_dim});
  c.prefix_v = flashjit::Tensor::contiguous(c.v.data, bf16, device, {1, prefix, heads_kv, head_dim});
  c.o = make(bf16, {requests, heads_q, head_dim});
  c.page_table = make(flashjit::DType::int32, {requests, of_request});
  c.seqlens_k = make(flashjit::DType::int32, {requests});
  c.cu_seqlens_q = make(flashjit::DType::int32, {requests + 1});
  c.parts_o = make(fp32, {2, requests, heads_q, head_dim});
  c.parts_lse = make(fp32, {2, heads_q, requests});
  // The same without a cascade: every request's table begins with the prefix's pages.
  const flashjit::Tensor whole_table = make(flashjit::DType::int32, {requests, of_whole}),
                         whole_o = make(bf16, {requests, 1, heads_q, head_dim});
  for (int i = 0; i <= requests; ++i) int32(c.cu_seqlens_q)[i] = i;
  for (int i = 0; i < requests; ++i) {
    int32(c.seqlens_k)[i] = own_keys;
    for (int page = 0; page < of_whole; ++page) {
      const int own = page - of_prefix;
      int32(whole_table)[i * of_whole + page] = own < 0 ? page : of_prefix + i * of_request + own;
      if (own >= 0) int32(c.page_table)[i * of_request + own] = of_prefix + i * of_request + own;
    }
  }

  const auto spec = flashjit::AttentionSpec::from_json(
      R"({"op": "decode", "dtype": "bf16", "head_dim": 128, "paged": true, "lse": false})");
  const flashjit::Shape whole = {.batch = requests,
                                 .seqlen_q = 1,
                                 .seqlen_k = prefix + own_keys,
                                 .num_heads_q = heads_q,
                                 .num_heads_kv = heads_kv,
                                 .page_size = page_size};
  const flashjit::Kernel& decode = engine.get(spec, whole);
  flashjit::Tensor rows = whole_o;
  rows.data = c.q.data;
  const auto ms = [&](const auto& launch) {  // the least of a few
    double least = HUGE_VAL;
    for (int i = 0; i < 5; ++i) {
      const auto start = std::chrono::steady_clock::now();
      launch();
      memory.synchronize();
      least = std::min(
          least, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    return least;
  };
  const auto workspace = [&](std::size_t bytes) -> std::optional<flashjit::Tensor> {
    if (bytes == 0) return {};
    return make(flashjit::DType::int32, {static_cast<std::int64_t>(bytes + 3) / 4});
  };
  const auto whole_workspace = workspace(decode.workspace_bytes(whole));
  const double whole_ms = ms([&] {
    decode.launch({.q = rows,
                   .k = c.k,
                   .v = c.v,
                   .o = whole_o,
                   .page_table = whole_table,
                   .workspace = whole_workspace});
  });
  const CascadeKernels kernels(engine, c);
  c.workspace = workspace(kernels.workspace_bytes);
  const double cascade_ms = ms([&] { launch_cascade(engine, kernels, c); });

  // Weights and results are rounded to bf16: a result by up to 2^-9 of itself.
  double worst = 0;
  for (std::int64_t i = 0; i < c.o.shape[0] * c.o.strides[0]; ++i) {
    const double a = value_of(static_cast<const std::uint16_t*>(c.o.data)[i]),
                 b = value_of(static_cast<const std::uint16_t*>(whole_o.data)[i]);
    const double share = std::abs(a - b) / (0x1p-8 * (std::abs(a) + std::abs(b)) + 0x1p-9);
    worst = share <= worst ? worst : share;  // keeps NaN
  }
  const double mb_of_key = 1e-6 * 2 * heads_kv * head_dim * 2;  // K and V
  std::printf("%s, %s: %d requests with %d keys of their own after a prefix of %d\n", device.str().c_str(),
              engine.target().str().c_str(), requests, own_keys, prefix);
  std::printf("one decode: %8.3f ms, reads %9.1f MB\n", whole_ms, mb_of_key * requests * (prefix + own_keys));
  std::printf("cascade:    %8.3f ms, reads %9.1f MB\n", cascade_ms,
              mb_of_key * (prefix + requests * own_keys));
  std::printf("largest difference: %.2f of the bound\n", worst);
  return worst <= 1 ? 0 : 20;
} catch (const flashjit::Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.message().c_str());
  return 1;
}
