// The C interface gives the same results and refusals as the
// C++ interface, as codes and texts of the calling thread.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <variant>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "runtime/flashjit.h"
#include "tests/api/arguments.hpp"

namespace flashjit {
namespace {

using testing::HasSubstr;

template <class T, void (*destroy)(T*)>
struct Destroy {
  void operator()(T* object) const { destroy(object); }
};
using EngineHandle = std::unique_ptr<flashjit_engine, Destroy<flashjit_engine, flashjit_engine_destroy>>;
using SpecHandle = std::unique_ptr<flashjit_spec, Destroy<flashjit_spec, flashjit_spec_destroy>>;
using RequestHandle = std::unique_ptr<flashjit_request, Destroy<flashjit_request, flashjit_request_destroy>>;
using PreparedHandle =
    std::unique_ptr<flashjit_prepared, Destroy<flashjit_prepared, flashjit_prepared_destroy>>;

constexpr const char* good_spec = R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "head_dim_v": 24})";
constexpr flashjit_shape good_shape = {sizeof(flashjit_shape),
                                       GoodArguments::batch,
                                       GoodArguments::seqlen_q,
                                       GoodArguments::seqlen_k,
                                       GoodArguments::heads_q,
                                       GoodArguments::heads_kv,
                                       0,
                                       0,
                                       0};

class CApi : public testing::Test {
 protected:
  void SetUp() override {
    flashjit_engine* e = nullptr;
    ASSERT_EQ(flashjit_engine_create(nullptr, &e), FLASHJIT_OK) << flashjit_last_error_message();
    engine.reset(e);
    flashjit_spec* s = nullptr;
    ASSERT_EQ(flashjit_spec_create(good_spec, &s), FLASHJIT_OK) << flashjit_last_error_message();
    spec.reset(s);
    ASSERT_EQ(flashjit_engine_get(e, s, &good_shape, &kernel), FLASHJIT_OK) << flashjit_last_error_message();
    const Tensor* from[] = {&*good.args.q, &*good.args.k, &*good.args.v, &*good.args.o, &*good.args.lse};
    for (int i = 0; i < 5; ++i) {
      tensors[i] = c_tensor(*from[i]);
      arguments[i] = {FLASHJIT_ARG_Q + i, {&tensors[i]}};
    }
  }

  void expect(flashjit_status code, std::initializer_list<const char*> parts, flashjit_status actual) {
    EXPECT_EQ(actual, code);
    for (const char* part : parts) EXPECT_THAT(flashjit_last_error_message(), HasSubstr(part));
  }
  flashjit_status launch(std::size_t count = 5, void* stream = nullptr) {
    return flashjit_kernel_launch(kernel, arguments, count, stream);
  }

  GoodArguments good;
  EngineHandle engine;
  SpecHandle spec;
  const flashjit_kernel* kernel = nullptr;
  flashjit_tensor tensors[5];
  flashjit_argument arguments[6];
};

TEST_F(CApi, Versions) {
  EXPECT_EQ(flashjit_abi_version(), FLASHJIT_ABI_VERSION);
  EXPECT_STREQ(flashjit_version(), version());
}

TEST_F(CApi, ComputesWhatTheCppInterfaceComputes) {
  auto* q = static_cast<std::uint16_t*>(good.args.q->data);
  auto* k = static_cast<std::uint16_t*>(good.args.k->data);
  auto* v = static_cast<std::uint16_t*>(good.args.v->data);
  for (int i = 0; i < 300; ++i) q[i] = k[i] = v[i] = static_cast<std::uint16_t>(0x3f80 + i % 64);
  const std::size_t bytes = std::size_t{2} * GoodArguments::batch * GoodArguments::seqlen_q *
                            GoodArguments::heads_q * GoodArguments::head_dim_v;
  std::vector<char> expected(bytes);
  Engine cpp;
  cpp.get(AttentionSpec::from_json(good_spec), GoodArguments::shape()).launch(good.args);
  std::memcpy(expected.data(), good.args.o->data, bytes);
  std::memset(good.args.o->data, 0xff, bytes);
  ASSERT_EQ(launch(), FLASHJIT_OK) << flashjit_last_error_message();
  EXPECT_EQ(std::memcmp(expected.data(), good.args.o->data, bytes), 0);

  flashjit_prepared* p = nullptr;
  ASSERT_EQ(flashjit_kernel_prepare(kernel, arguments, 5, &p), FLASHJIT_OK);
  const PreparedHandle prepared(p);
  std::memset(good.args.o->data, 0xff, bytes);
  ASSERT_EQ(flashjit_prepared_launch(p, nullptr), FLASHJIT_OK);
  EXPECT_EQ(std::memcmp(expected.data(), good.args.o->data, bytes), 0);

  std::size_t workspace = 1;
  ASSERT_EQ(flashjit_kernel_workspace(kernel, &good_shape, &workspace), FLASHJIT_OK);
  EXPECT_EQ(workspace, 0u);
  const char* info = nullptr;
  ASSERT_EQ(flashjit_kernel_info(kernel, &info), FLASHJIT_OK);
  EXPECT_THAT(info, HasSubstr("\"target\""));
  EXPECT_THAT(info, HasSubstr("\"steps\":[{\"entry\":\"flashjit_forward\""));
}

TEST_F(CApi, InTheBackground) {
  flashjit_request* r = nullptr;
  ASSERT_EQ(flashjit_engine_get_async(engine.get(), spec.get(), &good_shape, &r), FLASHJIT_OK);
  const RequestHandle request(r);
  const flashjit_kernel* same = nullptr;
  ASSERT_EQ(flashjit_request_wait(r, &same), FLASHJIT_OK);
  EXPECT_EQ(flashjit_request_ready(r), 1);
  EXPECT_EQ(same, kernel);
  EXPECT_EQ(flashjit_request_ready(nullptr), 0);
}

TEST_F(CApi, OnTheCallersThreads) {
  int calls = 0;
  const flashjit_parallel_for serial = [](void* user, std::int64_t count,
                                          void (*body)(void*, std::int64_t, std::int64_t), void* context) {
    ++*static_cast<int*>(user);
    body(context, 0, count);
  };
  flashjit_engine_options options = {};
  options.struct_size = sizeof options;
  options.parallel_for = serial;
  options.parallel_for_user = &calls;
  flashjit_engine* e = nullptr;
  ASSERT_EQ(flashjit_engine_create(&options, &e), FLASHJIT_OK);
  const EngineHandle mine(e);
  ASSERT_EQ(flashjit_engine_get(e, spec.get(), &good_shape, &kernel), FLASHJIT_OK);
  ASSERT_EQ(launch(), FLASHJIT_OK);
  EXPECT_EQ(calls, 1);
}

TEST_F(CApi, BadSpecs) {
  flashjit_spec* s = nullptr;
  for (const char* json : {"", "{", "[]", "null", "\x80"}) {
    EXPECT_EQ(flashjit_spec_create(json, &s), FLASHJIT_INVALID_SPEC) << json;
    EXPECT_NE(std::strlen(flashjit_last_error_message()), 0u);
  }
  expect(FLASHJIT_INVALID_SPEC, {"head_dimm", "head_dim"},
         flashjit_spec_create(R"({"op": "forward", "dtype": "bf16", "head_dimm": 64})", &s));
  expect(FLASHJIT_UNSUPPORTED, {"paged true"},
         flashjit_spec_create(R"({"op": "merge", "dtype": "bf16", "head_dim": 64, "paged": true})", &s));
  EXPECT_EQ(s, nullptr) << "written by a call that failed";
}

TEST_F(CApi, SpecOfAnotherOperation) {
  flashjit_spec* s = nullptr;
  const char* const json = R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "lse": false})";
  ASSERT_EQ(flashjit_spec_create_for_op(json, "backward", &s), FLASHJIT_OK) << flashjit_last_error_message();
  std::int32_t id = 0;
  EXPECT_EQ(flashjit_spec_argument(s, "dq", &id), FLASHJIT_OK);
  flashjit_spec_destroy(s);
  expect(FLASHJIT_INVALID_SPEC, {"op \"bakward\"", "backward"},
         flashjit_spec_create_for_op(json, "bakward", &s));
  expect(FLASHJIT_INVALID_ARGUMENT, {"op"}, flashjit_spec_create_for_op(json, nullptr, &s));
  expect(FLASHJIT_INVALID_ARGUMENT, {"json"}, flashjit_spec_create_for_op(nullptr, "backward", &s));
}

TEST_F(CApi, CompilationsHaveLimitsAndAreCancelled) {
  flashjit_engine_options options = {};
  options.struct_size = sizeof options;
  options.cache_dir = options.cache_path = "";
  const auto get = [&] {
    flashjit_engine* e = nullptr;
    EXPECT_EQ(flashjit_engine_create(&options, &e), FLASHJIT_OK);
    const EngineHandle limited(e);
    return flashjit_engine_get(e, spec.get(), &good_shape, &kernel);
  };
  options.compile_seconds = 1e-9;
  expect(FLASHJIT_LIMIT_EXCEEDED, {"seconds, more than its limit of 1e-09"}, get());
  options.compile_seconds = 0;
  options.compile_bytes = 4096;
  expect(FLASHJIT_LIMIT_EXCEEDED, {"bytes of memory, more than its limit of 4096"}, get());
  options.compile_bytes = 0;
  int asked = 0;
  options.compile_cancelled_user = &asked;
  options.compile_cancelled = [](void* user) -> int32_t { return ++*static_cast<int*>(user) > 2; };
  expect(FLASHJIT_CANCELLED, {"was cancelled"}, get());
  EXPECT_EQ(asked, 3);
}

TEST_F(CApi, TellsOfKernels) {
  struct Told {
    int times = 0;
    std::int32_t kind = -1;
    std::string spec, target, reason;
    flashjit_shape shape = {};
  } told;
  const std::string log = testing::TempDir() + "flashjit-c-api-" + std::to_string(::getpid()) + ".log";
  flashjit_engine_options options = {};
  options.struct_size = sizeof options;
  options.cache_dir = options.cache_path = options.record = "";
  options.policy = FLASHJIT_POLICY_REQUIRE_PREBUILT;
  options.log = log.c_str();
  options.on_kernel_user = &told;
  options.on_kernel = [](void* user, const flashjit_kernel_event* event) {
    Told& to = *static_cast<Told*>(user);
    EXPECT_EQ(event->struct_size, sizeof *event);
    to = {to.times + 1, event->kind, event->spec, event->target, event->reason, event->shape};
  };
  flashjit_engine* e = nullptr;
  ASSERT_EQ(flashjit_engine_create(&options, &e), FLASHJIT_OK) << flashjit_last_error_message();
  const EngineHandle strict(e);
  expect(FLASHJIT_NOT_PREBUILT, {"no cache folder"},
         flashjit_engine_get(e, spec.get(), &good_shape, &kernel));
  EXPECT_EQ(told.times, 1);
  EXPECT_EQ(told.kind, FLASHJIT_KERNEL_FAILED);
  EXPECT_EQ(told.spec, AttentionSpec::from_json(good_spec).to_json());
  EXPECT_EQ(told.shape.num_heads_kv, good_shape.num_heads_kv);
  EXPECT_THAT(told.reason, HasSubstr("no cache folder"));
  std::ifstream file(log);
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(line, HasSubstr("\"event\":\"failed\""));
  std::remove(log.c_str());
  options.log = "/proc/no/such/place";
  expect(FLASHJIT_INVALID_ARGUMENT, {"log", "/proc/no/such/place"}, flashjit_engine_create(&options, &e));
}

TEST_F(CApi, BadOptions) {
  flashjit_engine_options options = {};
  flashjit_engine* e = nullptr;
  expect(FLASHJIT_INVALID_ARGUMENT, {"struct_size"}, flashjit_engine_create(&options, &e));
  options.struct_size = sizeof options + 8;
  expect(FLASHJIT_INVALID_ARGUMENT, {"struct_size"}, flashjit_engine_create(&options, &e));
  options.struct_size = sizeof options;
  options.device = "gpu";
  expect(FLASHJIT_INVALID_ARGUMENT, {"device", "gpu"}, flashjit_engine_create(&options, &e));
  options.device = "cpu";
  options.target = "sm_90";
  expect(FLASHJIT_TARGET_UNAVAILABLE, {"sm_90"}, flashjit_engine_create(&options, &e));
  options.target = nullptr;
  options.num_threads = -3;
  expect(FLASHJIT_INVALID_ARGUMENT, {"num_threads", "-3"}, flashjit_engine_create(&options, &e));
  options.num_threads = 1'000'000'000;
  expect(FLASHJIT_INVALID_ARGUMENT, {"num_threads", "8192"}, flashjit_engine_create(&options, &e));
  options.num_threads = 0;
  options.cache_dir = "/proc/no/such/place";
  expect(FLASHJIT_CACHE_FAILED, {"/proc/no/such/place"}, flashjit_engine_create(&options, &e));
  options.cache_dir = "";
  options.cache_path = "/usr:/proc/no/such/layer";
  expect(FLASHJIT_CACHE_FAILED, {"/proc/no/such/layer"}, flashjit_engine_create(&options, &e));
  options.cache_path = "";
  options.policy = 3;
  expect(FLASHJIT_INVALID_ARGUMENT, {"policy", "3"}, flashjit_engine_create(&options, &e));
  options.policy = FLASHJIT_POLICY_REQUIRE_PREBUILT;
  ASSERT_EQ(flashjit_engine_create(&options, &e), FLASHJIT_OK);
  const EngineHandle strict(e);
  expect(FLASHJIT_NOT_PREBUILT, {"flashjit prebuild '{"},
         flashjit_engine_get(e, spec.get(), &good_shape, &kernel));
  for (const double seconds : {-7.0, std::numeric_limits<double>::quiet_NaN()}) {
    options.tune_seconds = seconds;
    expect(FLASHJIT_INVALID_ARGUMENT, {"tune_seconds", "infinity is no limit"},
           flashjit_engine_create(&options, &e));
  }
  options.tune_seconds = std::numeric_limits<double>::infinity();
  ASSERT_EQ(flashjit_engine_create(&options, &e), FLASHJIT_OK);
  flashjit_engine_destroy(e);
  options.tune_seconds = 0;
  for (const std::size_t size : {sizeof options.struct_size, sizeof options.struct_size + 7}) {
    options.struct_size = size;
    expect(FLASHJIT_INVALID_ARGUMENT, {"struct_size"}, flashjit_engine_create(&options, &e));
  }
  // Made by a program that does not know the fields.
  options.struct_size = offsetof(flashjit_engine_options, cache_path);
  ASSERT_EQ(flashjit_engine_create(&options, &e), FLASHJIT_OK);
  flashjit_engine_destroy(e);
}

TEST_F(CApi, BadShapes) {
  const auto refused = [&](std::initializer_list<const char*> parts, auto&& spoil) {
    flashjit_shape shape = good_shape;
    spoil(shape);
    const flashjit_kernel* none = nullptr;
    flashjit_request* request = nullptr;
    expect(FLASHJIT_INVALID_ARGUMENT, parts, flashjit_engine_get(engine.get(), spec.get(), &shape, &none));
    expect(FLASHJIT_INVALID_ARGUMENT, parts,
           flashjit_engine_get_async(engine.get(), spec.get(), &shape, &request));
    EXPECT_EQ(none, nullptr);
  };
  for (const std::size_t size : {std::size_t{0}, offsetof(flashjit_shape, batch),
                                 offsetof(flashjit_shape, seqlen_q) - 1, sizeof(flashjit_shape) + 8})
    refused({"struct_size", "flashjit_shape"}, [&](flashjit_shape& s) { s.struct_size = size; });
  refused({"num_heads_kv 0"}, [](flashjit_shape& s) { s.num_heads_kv = 0; });
  refused({"num_heads_q -4"}, [](flashjit_shape& s) { s.num_heads_q = -4; });
  refused({"num_heads_kv 3", "multiple"}, [](flashjit_shape& s) { s.num_heads_kv = 3; });
  refused({"batch -1"}, [](flashjit_shape& s) { s.batch = -1; });
  refused({"seqlen_q -2"}, [](flashjit_shape& s) { s.seqlen_q = -2; });
  refused({"total_k -3"}, [](flashjit_shape& s) { s.total_k = -3; });
  refused({"page_size 16", "paged"}, [](flashjit_shape& s) { s.page_size = 16; });
  // Made by a program that does not know the fields.
  flashjit_shape older = good_shape;
  older.struct_size = offsetof(flashjit_shape, page_size);
  older.page_size = -1;
  EXPECT_EQ(flashjit_engine_get(engine.get(), spec.get(), &older, &kernel), FLASHJIT_OK);
}

// The C header's remark on an argument: its type, and which launches write it.
std::string remark(const Argument& argument) {
  std::string text = std::visit(
      []<class T>(std::optional<T> AttentionArgs::*) {
        if constexpr (std::is_same_v<T, Tensor>) return "tensor";
        if constexpr (std::is_same_v<T, std::uint64_t>) return "integer; all 64 bits are used";
        return std::is_floating_point_v<T> ? "real" : "integer";
      },
      argument.member);
  if (argument.role == Role::output) text += ", written";
  std::string writers;
  bool several = false;
  for (const OperationInfo& row : operation_table) {
    const unsigned bit = 1u << static_cast<int>(row.op);
    if (argument.read_by & bit) text += std::string("; ") + to_string(row.op) + " reads it";
    if (!(argument.written_by & bit)) continue;
    several = !writers.empty();
    writers += (several ? " and " : "") + std::string(to_string(row.op));
  }
  if (!writers.empty())
    text += "; " + writers + (several ? " write " : " writes ") +
            (argument.layout.of_scales ? "those of tokens" : "it");
  return text;
}

// The lines between "typedef enum {" and "} flashjit_argument_id;".
std::string ids_of_arguments() {
  std::vector<std::string> lines;
  for (const Argument& argument : arguments) {
    std::string line = "  FLASHJIT_ARG_";
    for (const char* c = argument.name; *c; ++c) line += static_cast<char>(std::toupper(*c));
    lines.push_back(line + " = " + std::to_string(argument.id) +
                    (lines.size() + 1 < num_arguments ? "," : ""));
  }
  std::size_t longest = 0;
  for (const std::string& line : lines) longest = std::max(longest, line.size());
  std::string text;
  for (std::size_t i = 0; i < lines.size(); ++i)
    text +=
        lines[i] + std::string(longest + 1 - lines[i].size(), ' ') + "/* " + remark(arguments[i]) + " */\n";
  return text;
}

// The table of arguments makes the C header's list. After a change of the table: run with
// FLASHJIT_UPDATE_GOLDEN=1, which writes the list, then review the diff.
TEST(CHeader, SaysOfArgumentsWhatTheTableSays) {
  const char path[] = FLASHJIT_SOURCE_DIR "/runtime/flashjit.h";
  std::ifstream file(path);
  std::string header(std::istreambuf_iterator<char>(file), {});
  const std::size_t end = header.find("} flashjit_argument_id;");
  ASSERT_NE(end, std::string::npos);
  const std::size_t begin = header.find('\n', header.rfind("typedef enum {", end)) + 1;
  const std::string listed = header.substr(begin, end - begin), made = ids_of_arguments();
  if (std::getenv("FLASHJIT_UPDATE_GOLDEN") != nullptr)
    std::ofstream(path, std::ios::binary) << header.replace(begin, end - begin, made);
  EXPECT_EQ(listed, made) << "to write this into " << path << ", run with FLASHJIT_UPDATE_GOLDEN=1";
}

TEST_F(CApi, NullPointersEverywhere) {
  flashjit_engine* e = nullptr;
  flashjit_spec* s = nullptr;
  flashjit_request* r = nullptr;
  flashjit_prepared* p = nullptr;
  const flashjit_kernel* k = nullptr;
  const char* text = nullptr;
  std::size_t bytes = 0;
  expect(FLASHJIT_INVALID_ARGUMENT, {"engine"}, flashjit_engine_create(nullptr, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"json"}, flashjit_spec_create(nullptr, &s));
  expect(FLASHJIT_INVALID_ARGUMENT, {"spec"}, flashjit_spec_create(good_spec, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"engine"}, flashjit_engine_get(nullptr, spec.get(), &good_shape, &k));
  expect(FLASHJIT_INVALID_ARGUMENT, {"spec"}, flashjit_engine_get(engine.get(), nullptr, &good_shape, &k));
  expect(FLASHJIT_INVALID_ARGUMENT, {"shape"}, flashjit_engine_get(engine.get(), spec.get(), nullptr, &k));
  expect(FLASHJIT_INVALID_ARGUMENT, {"kernel"},
         flashjit_engine_get(engine.get(), spec.get(), &good_shape, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"engine"},
         flashjit_engine_get_async(nullptr, spec.get(), &good_shape, &r));
  expect(FLASHJIT_INVALID_ARGUMENT, {"request"}, flashjit_request_wait(nullptr, &k));
  expect(FLASHJIT_INVALID_ARGUMENT, {"kernel"}, flashjit_kernel_info(nullptr, &text));
  expect(FLASHJIT_INVALID_ARGUMENT, {"json"}, flashjit_kernel_info(kernel, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"kernel"}, flashjit_kernel_workspace(nullptr, &good_shape, &bytes));
  expect(FLASHJIT_INVALID_ARGUMENT, {"bytes"}, flashjit_kernel_workspace(kernel, &good_shape, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"kernel"}, flashjit_kernel_launch(nullptr, arguments, 5, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"args"}, flashjit_kernel_launch(kernel, nullptr, 5, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"q"}, flashjit_kernel_launch(kernel, nullptr, 0, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"prepared"}, flashjit_kernel_prepare(kernel, arguments, 5, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"prepared"}, flashjit_prepared_launch(nullptr, nullptr));
  flashjit_engine_destroy(nullptr);
  flashjit_spec_destroy(nullptr);
  flashjit_request_destroy(nullptr);
  flashjit_prepared_destroy(nullptr);
  EXPECT_EQ(e, nullptr);
  EXPECT_EQ(p, nullptr);
  EXPECT_EQ(launch(), FLASHJIT_OK);
}

TEST_F(CApi, BadArguments) {
  for (int i = 0; i < 5; ++i) {
    const flashjit_tensor before = tensors[i];
    const auto refused = [&](std::initializer_list<const char*> parts) {
      expect(FLASHJIT_INVALID_ARGUMENT, parts, launch());
      tensors[i] = before;
    };
    tensors[i].data = nullptr;
    refused({"null"});
    tensors[i].dtype = 77;
    refused({"dtype", "77"});
    tensors[i].device_kind = -1;
    refused({"device_kind", "-1"});
    tensors[i].device_kind = FLASHJIT_CUDA;
    refused({"cuda:0"});
    tensors[i].device_index = 1;
    refused({"is on cpu:1", "a CPU's index is 0"});
    tensors[i].rank = 6;
    refused({"rank", "6"});
    tensors[i].rank = 7;
    refused({"rank", "7", "between 1 and 6"});
    tensors[i].rank = 0;
    refused({"rank", "0"});
    tensors[i].shape[1] = -4;
    refused({"shape"});
    tensors[i].strides[tensors[i].rank - 1] = 3;
    refused({"contiguous"});
    arguments[i].value.tensor = nullptr;
    expect(FLASHJIT_INVALID_ARGUMENT, {"null"}, launch());
    arguments[i].value.tensor = &tensors[i];
  }
  expect(FLASHJIT_INVALID_ARGUMENT, {"lse"}, launch(4));
  arguments[5] = {};
  arguments[5].id = 999;
  expect(FLASHJIT_INVALID_ARGUMENT, {"999", "position 5"}, launch(6));
  arguments[5] = arguments[2];
  expect(FLASHJIT_INVALID_ARGUMENT, {"argument v at position 5", "give it once"}, launch(6));
  arguments[5].id = FLASHJIT_ARG_SOFTMAX_SCALE;
  arguments[5].value.real = 1e300;  // beyond a float32
  expect(FLASHJIT_INVALID_ARGUMENT, {"softmax_scale"}, launch(6));
  arguments[5].id = FLASHJIT_ARG_MAX_SEQLEN_Q;
  arguments[5].value.integer = std::int64_t{1} << 40;
  expect(FLASHJIT_INVALID_ARGUMENT, {"argument max_seqlen_q is 1099511627776"}, launch(6));
  arguments[5].id = FLASHJIT_ARG_WINDOW_LEFT;
  arguments[5].value.integer = -1;
  expect(FLASHJIT_INVALID_ARGUMENT, {"argument window_left is -1"}, launch(6));
  expect(FLASHJIT_INVALID_ARGUMENT, {"stream"}, launch(5, this));
  EXPECT_EQ(launch(), FLASHJIT_OK) << flashjit_last_error_message();
}

TEST_F(CApi, ErrorsBelongToTheirThread) {
  flashjit_spec* s = nullptr;
  expect(FLASHJIT_INVALID_SPEC, {}, flashjit_spec_create("{", &s));
  const std::string mine = flashjit_last_error_message();
  std::string theirs = "unset";
  std::jthread([&] { theirs = flashjit_last_error_message(); }).join();
  EXPECT_EQ(theirs, "");
  EXPECT_EQ(launch(), FLASHJIT_OK);
  EXPECT_EQ(flashjit_last_error_message(), mine) << "success keeps the last failure's text";
}

// Tables made from parents and lists through the C interface.
// The other builders call the C++ functions directly.
// Two caches in pages of 4 keys. The values of page p are p + 1: a row with zeros as scores is their mean.
TEST_F(CApi, DecodesFromPages) {
  flashjit_spec* s = nullptr;
  ASSERT_EQ(flashjit_spec_create(
                R"({"op": "decode", "dtype": "fp32", "head_dim": 8, "paged": true, "lse": false})", &s),
            FLASHJIT_OK)
      << flashjit_last_error_message();
  const SpecHandle decode(s);
  flashjit_shape shape{};
  shape.struct_size = sizeof shape;
  shape.batch = 2, shape.seqlen_q = 1, shape.seqlen_k = 8, shape.num_heads_q = 2, shape.num_heads_kv = 1;
  shape.page_size = 4;
  const flashjit_kernel* k = nullptr;
  ASSERT_EQ(flashjit_engine_get(engine.get(), s, &shape, &k), FLASHJIT_OK) << flashjit_last_error_message();

  float q[2 * 2 * 8] = {}, pages[3 * 4 * 8], o[2 * 2 * 8];
  for (int i = 0; i < 3 * 4 * 8; ++i) pages[i] = static_cast<float>(1 + i / 32);
  std::int32_t table[] = {2, 0, 1, -1}, lengths[] = {8, 3};
  const auto of = [](void* data, DType dtype, std::initializer_list<std::int64_t> sizes) {
    return c_tensor(Tensor::contiguous(data, dtype, {}, sizes));
  };
  const flashjit_tensor given[] = {of(q, DType::fp32, {2, 1, 2, 8}), of(pages, DType::fp32, {3, 4, 1, 8}),
                                   of(o, DType::fp32, {2, 1, 2, 8}), of(table, DType::int32, {2, 2}),
                                   of(lengths, DType::int32, {2})};
  const flashjit_argument list[] = {
      {FLASHJIT_ARG_Q, {.tensor = &given[0]}},          {FLASHJIT_ARG_K, {.tensor = &given[1]}},
      {FLASHJIT_ARG_V, {.tensor = &given[1]}},          {FLASHJIT_ARG_O, {.tensor = &given[2]}},
      {FLASHJIT_ARG_PAGE_TABLE, {.tensor = &given[3]}}, {FLASHJIT_ARG_SEQLENS_K, {.tensor = &given[4]}}};
  ASSERT_EQ(flashjit_kernel_launch(k, list, 6, nullptr), FLASHJIT_OK) << flashjit_last_error_message();
  for (int i = 0; i < 16; ++i) EXPECT_FLOAT_EQ(o[i], 2) << i;   // pages 2 and 0: 3 and 1
  for (int i = 16; i < 32; ++i) EXPECT_FLOAT_EQ(o[i], 2) << i;  // page 1
  lengths[0] = 4;
  ASSERT_EQ(flashjit_kernel_launch(k, list, 6, nullptr), FLASHJIT_OK);
  EXPECT_FLOAT_EQ(o[0], 3);
  table[0] = 3;
  expect(FLASHJIT_INVALID_ARGUMENT, {"page_table[0, 0] is 3", "between 0 and 2"},
         flashjit_kernel_launch(k, list, 6, nullptr));
  expect(FLASHJIT_INVALID_ARGUMENT, {"page_table is missing"}, flashjit_kernel_launch(k, list, 4, nullptr));
}

TEST_F(CApi, TablesOfMasks) {
  flashjit_tables* tables = nullptr;
  const std::int32_t cycle[] = {-1, 2, 1};
  EXPECT_EQ(flashjit_tree_from_parents(cycle, 1, 3, &tables), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_THAT(flashjit_last_error_message(), testing::HasSubstr("parents[0, 1] is 2"));
  const std::int32_t parents[] = {-1, 0, 0, 1, 1};
  ASSERT_EQ(flashjit_tree_from_parents(parents, 1, 5, &tables), FLASHJIT_OK);
  flashjit_tensor bits{};
  EXPECT_EQ(flashjit_tables_get(tables, FLASHJIT_ARG_BLOCK_OFFSETS, &bits), 0);
  ASSERT_EQ(flashjit_tables_get(tables, FLASHJIT_ARG_TREE_BITS, &bits), 1);
  EXPECT_EQ(bits.rank, 3);
  EXPECT_EQ(bits.shape[1], 5);
  EXPECT_EQ(static_cast<const std::int32_t*>(bits.data)[4], 0b10011);
  flashjit_tables_destroy(tables);

  const flashjit_block_lists lists = {16, 16, 0, 1, 1, 32, 32};
  const std::int32_t offsets[] = {0, 1, 3}, columns[] = {0, 1, 0}, ids[32] = {};
  const std::vector<std::uint8_t> seen(32 * 32, 1);
  const std::int32_t counts[] = {1, 1}, indices[] = {0, 1, 1, 0};
  EXPECT_EQ(flashjit_block_sparse_from_dense(&lists, seen.data(), nullptr), FLASHJIT_INVALID_ARGUMENT);
  ASSERT_EQ(flashjit_block_sparse_from_csr(&lists, offsets, columns, &tables), FLASHJIT_OK);
  const auto listed = [&] {
    flashjit_tensor tensor{};
    EXPECT_EQ(flashjit_tables_get(tables, FLASHJIT_ARG_BLOCK_INDICES, &tensor), 1);
    flashjit_tables_destroy(tables);
    return tensor.shape[0];
  };
  EXPECT_EQ(listed(), 3);
  ASSERT_EQ(flashjit_block_sparse_from_dense(&lists, seen.data(), &tables), FLASHJIT_OK);
  EXPECT_EQ(listed(), 4);
  ASSERT_EQ(flashjit_block_sparse_from_flex(&lists, 2, counts, indices, nullptr, nullptr, &tables),
            FLASHJIT_OK);
  EXPECT_EQ(listed(), 2);
  ASSERT_EQ(flashjit_document_mask(&lists, ids, ids, &tables), FLASHJIT_OK);
  EXPECT_EQ(listed(), 4);
  EXPECT_EQ(flashjit_document_mask(nullptr, ids, ids, &tables), FLASHJIT_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace flashjit
