// The C interface of attention over several ranks.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/flashjit.h"

namespace {

TEST(CParallel, ComputesOnARankAndRefusesBadInput) {
  flashjit_engine_options options{};
  options.struct_size = sizeof options;
  flashjit_engine* engine = nullptr;
  ASSERT_EQ(flashjit_engine_create(&options, &engine), FLASHJIT_OK) << flashjit_last_error_message();
  flashjit_spec* spec = nullptr;
  ASSERT_EQ(
      flashjit_spec_create(R"({"op": "forward", "dtype": "fp32", "head_dim": 8, "mask": ["causal"]})", &spec),
      FLASHJIT_OK);
  flashjit_group* group = nullptr;
  EXPECT_EQ(flashjit_groups_of_threads(0, &group), FLASHJIT_INVALID_ARGUMENT);
  char name[FLASHJIT_GROUP_NAME];
  EXPECT_EQ(flashjit_group_name(0, name), FLASHJIT_INVALID_ARGUMENT);
  ASSERT_EQ(flashjit_group_name(1, name), FLASHJIT_OK) << flashjit_last_error_message();
  EXPECT_EQ(flashjit_group_of_processes("/flashjit-none", 0, 1, &group), FLASHJIT_DEVICE_FAILED);
  ASSERT_EQ(flashjit_group_of_processes(name, 0, 1, &group), FLASHJIT_OK) << flashjit_last_error_message();
  int32_t rank = -1, size = -1;
  EXPECT_EQ(flashjit_group_rank(group, &rank, &size), FLASHJIT_OK);
  EXPECT_EQ(rank, 0);
  EXPECT_EQ(size, 1);
  int32_t maps_memory = -1;
  const char* why = nullptr;
  EXPECT_EQ(flashjit_group_transport(group, &maps_memory, &why), FLASHJIT_OK);
  EXPECT_EQ(maps_memory, 1);
  EXPECT_NE(std::string(why).find("one host"), std::string::npos);
  EXPECT_EQ(flashjit_group_fail(group, "no reason"), FLASHJIT_OK);
  EXPECT_EQ(flashjit_group_check(group), FLASHJIT_DEVICE_FAILED);
  EXPECT_NE(std::string(flashjit_last_error_message()).find("no reason"), std::string::npos);
  flashjit_group_destroy(group);
  ASSERT_EQ(flashjit_groups_of_threads(1, &group), FLASHJIT_OK);
  EXPECT_EQ(flashjit_group_check(group), FLASHJIT_OK);
  int32_t begins[2] = {-1, -1}, count = 0, length = 0;
  EXPECT_EQ(flashjit_sequence_chunks(FLASHJIT_LAYOUT_ZIGZAG, 48, 1, 4, begins, &count, &length), FLASHJIT_OK);
  EXPECT_EQ((std::vector<int32_t>{begins[0], begins[1], count, length}), (std::vector<int32_t>{6, 36, 2, 6}));
  flashjit_group* none = nullptr;
  EXPECT_EQ(flashjit_group_of_nccl(nullptr, &none), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flashjit_last_error_message()).find("ncclComm_t"), std::string::npos);
  flashjit_shape whole{};
  whole.struct_size = sizeof whole;
  whole.batch = 1, whole.seqlen_q = whole.seqlen_k = 6, whole.num_heads_q = whole.num_heads_kv = 1;
  flashjit_parallel* parallel = nullptr;
  EXPECT_EQ(flashjit_parallel_create(engine, spec, &whole, 9, group, &parallel), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flashjit_last_error_message()).find("layout is 9"), std::string::npos);
  ASSERT_EQ(flashjit_parallel_create(engine, spec, &whole, FLASHJIT_LAYOUT_BEST, group, &parallel),
            FLASHJIT_OK)
      << flashjit_last_error_message();
  int32_t layout = -1;
  const char* reason = nullptr;
  EXPECT_EQ(flashjit_parallel_layout(parallel, &layout, &reason), FLASHJIT_OK);
  EXPECT_EQ(layout, FLASHJIT_LAYOUT_ZIGZAG) << reason;

  // All scores are 0, so row i is the mean of values 0 to i.
  std::vector<float> zeros(48), v(48), o(48, -1), lse(6, -1);
  for (int i = 0; i < 48; ++i) v[static_cast<std::size_t>(i)] = static_cast<float>(i / 8);
  const auto tensor = [](std::vector<float>& data, bool rows) {
    flashjit_tensor t{};
    t.data = data.data();
    t.dtype = FLASHJIT_FP32;
    t.rank = rows ? 3 : 4;
    const std::int64_t sizes[] = {1, rows ? 1 : 6, rows ? 6 : 1, 8},
                       strides[] = {rows ? 6 : 48, rows ? 6 : 8, rows ? 1 : 8, 1};
    for (int i = 0; i < t.rank; ++i) t.shape[i] = sizes[i], t.strides[i] = strides[i];
    return t;
  };
  size_t bytes = 0;
  EXPECT_EQ(flashjit_parallel_prepare(parallel, 0), FLASHJIT_OK) << flashjit_last_error_message();
  EXPECT_EQ(flashjit_parallel_workspace(parallel, 0, &bytes), FLASHJIT_OK);
  flashjit_workspace* workspace = nullptr;
  ASSERT_EQ(flashjit_workspace_create(engine, bytes, &workspace), FLASHJIT_OK);
  flashjit_tensor of_q = tensor(zeros, false), of_v = tensor(v, false), of_o = tensor(o, false),
                  of_lse = tensor(lse, true), of_workspace{};
  EXPECT_EQ(flashjit_workspace_tensor(workspace, &of_workspace), FLASHJIT_OK);
  std::vector<flashjit_argument> args;
  const auto add = [&](std::int32_t id, const flashjit_tensor& t) {
    flashjit_argument one{};
    one.id = id;
    one.value.tensor = &t;
    args.push_back(one);
  };
  add(FLASHJIT_ARG_Q, of_q), add(FLASHJIT_ARG_K, of_q), add(FLASHJIT_ARG_V, of_v), add(FLASHJIT_ARG_O, of_o);
  add(FLASHJIT_ARG_LSE, of_lse), add(FLASHJIT_ARG_WORKSPACE, of_workspace);
  ASSERT_EQ(flashjit_parallel_forward(parallel, args.data(), args.size(), nullptr), FLASHJIT_OK)
      << flashjit_last_error_message();
  for (int row = 0; row < 6; ++row) EXPECT_NEAR(o[static_cast<std::size_t>(row) * 8], row / 2.0, 1e-5) << row;
  flashjit_parallel_destroy(parallel);

  // One rank has all of the sequence in every layout.
  std::vector<float> moved(48, -1);
  flashjit_tensor of_moved = tensor(moved, false);
  flashjit_conversion* conversion = nullptr;
  EXPECT_EQ(flashjit_conversion_create(engine, group, &of_v, FLASHJIT_LAYOUT_CONTIGUOUS, 9, &conversion),
            FLASHJIT_INVALID_ARGUMENT);
  ASSERT_EQ(flashjit_conversion_create(engine, group, &of_v, FLASHJIT_LAYOUT_CONTIGUOUS,
                                       FLASHJIT_LAYOUT_ZIGZAG, &conversion),
            FLASHJIT_OK)
      << flashjit_last_error_message();
  EXPECT_EQ(flashjit_conversion_run(conversion, &of_v, &of_moved, nullptr), FLASHJIT_OK)
      << flashjit_last_error_message();
  EXPECT_EQ(moved, v);
  EXPECT_EQ(flashjit_conversion_run(conversion, &of_v, nullptr, nullptr), FLASHJIT_INVALID_ARGUMENT);
  flashjit_conversion_destroy(conversion);
  flashjit_workspace_destroy(workspace);
  flashjit_group_destroy(group);
  flashjit_spec_destroy(spec);
  flashjit_engine_destroy(engine);
}

}  // namespace
