// Tensors without elements: nobody reads their strides or their pointers, and libraries give them any.
#include <gtest/gtest.h>

#include "tests/api/any_launch.hpp"

namespace flashjit {
namespace {

bool is_empty(const Tensor& t) {
  return std::count(t.shape.begin(), t.shape.begin() + t.rank, 0) > 0;
}

TEST(EmptyTensors, MayHaveAnyLayout) {
  constexpr Shape whole{.batch = 2, .seqlen_q = 5, .seqlen_k = 48, .num_heads_q = 4, .num_heads_kv = 2};
  Shape no_batch = whole, no_rows = whole, no_keys = whole, no_heads = whole;
  no_batch.batch = no_rows.seqlen_q = no_keys.seqlen_k = no_heads.num_heads_q = no_heads.num_heads_kv = 0;
  Engine engine{EngineOptions{}};
  for (const AnySpec& of : any_specs())
    for (const Shape& shape : {no_batch, no_rows, no_keys, no_heads}) {
      SCOPED_TRACE(std::string(of.json) + ", batch " + std::to_string(shape.batch) + ", seqlen_q " +
                   std::to_string(shape.seqlen_q) + ", seqlen_k " + std::to_string(shape.seqlen_k) +
                   ", heads " + std::to_string(shape.num_heads_q));
      // Tables of angles have positions.
      const auto rotary = AttentionSpec::from_json(of.json).rotary;
      if (shape.seqlen_k == 0 && rotary && rotary->tables) continue;
      AnyLaunch launch(of, shape, engine);
      ASSERT_NO_THROW(launch.kernel.launch(launch.args));
      for (const std::int64_t stride : {0, -3, 7}) {
        for (const AnyLaunch::Given& given : launch.tensors()) {
          if (!is_empty(*given.tensor)) continue;
          given.tensor->strides.fill(stride);
          given.tensor->data = stride == 0 ? nullptr : reinterpret_cast<void*>(std::uintptr_t{1});
        }
        launch.args.named = launch.named;
        EXPECT_NO_THROW(launch.kernel.launch(launch.args)) << stride;
      }
    }
}

}  // namespace
}  // namespace flashjit
