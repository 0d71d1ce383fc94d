// Another thread writes the lengths while a launch reads them. Results are undefined then; memory outside of
// the tensors is not touched, and the launch ends.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/api/any_launch.hpp"

namespace flashjit {
namespace {

// Moves a tensor to the end of memory that an unmapped page follows.
class Fence {
 public:
  explicit Fence(Tensor& t) {
    std::size_t bytes = size_of(t.dtype);
    for (int i = 0; i < t.rank; ++i) bytes *= static_cast<std::size_t>(t.shape[i]);
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t room = (bytes + page - 1) / page * page;
    size_ = room + page;
    memory_ = static_cast<char*>(
        ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ::mprotect(memory_ + room, page, PROT_NONE);
    std::memcpy(memory_ + room - bytes, t.data, bytes);
    t.data = memory_ + room - bytes;
  }
  ~Fence() { ::munmap(memory_, size_); }
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;

 private:
  char* memory_;
  std::size_t size_;
};

TEST(ChangingLengths, LeadToNoOtherMemory) {
  constexpr int rows = 160;
  constexpr Shape shape{.batch = 2, .seqlen_q = rows, .seqlen_k = rows, .num_heads_q = 2, .num_heads_kv = 1};
  EngineOptions options;
  options.num_threads = 1;
  Engine engine(options);
  for (const char* const json :
       {R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "varlen": true})",
        R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "varlen": true})",
        R"({"op": "decode", "dtype": "bf16", "head_dim": 16, "paged": true, "append": true})",
        R"({"op": "append_kv", "dtype": "bf16", "head_dim": 16, "varlen": true})"}) {
    SCOPED_TRACE(json);
    const bool decode = std::string(json).find("decode") != std::string::npos;
    Shape sized = shape;
    if (decode) sized.seqlen_q = 2;
    AnyLaunch launch({json, {&AttentionArgs::slots}}, sized, engine);
    std::vector<std::unique_ptr<Fence>> fences;
    std::vector<std::pair<std::int32_t*, int>> tables;  // two kinds of contents that are both valid
    for (const AnyLaunch::Given& given : launch.tensors()) {
      if (given.tensor->dtype == DType::int32)
        tables.emplace_back(static_cast<std::int32_t*>(given.tensor->data),
                            given.name.starts_with("cu_") ? 1 : 0);
      else if (given.name != "workspace")
        fences.push_back(std::make_unique<Fence>(*given.tensor));
    }
    const int all = 2 * sized.seqlen_q;
    std::atomic<bool> over = false;
    std::thread writer([&] {
      for (unsigned turn = 0; !over; ++turn)
        for (const auto& [table, at] : tables) {
          const int most = at == 0 ? rows : table[2] == 2 * rows ? 2 * rows : all;
          __atomic_store_n(table + at, turn % 2 ? most : 0, __ATOMIC_RELAXED);
        }
    });
    for (int i = 0; i < 150; ++i) {
      try {
        launch.kernel.launch(launch.args);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      }
    }
    over = true;
    writer.join();
  }
}

}  // namespace
}  // namespace flashjit
