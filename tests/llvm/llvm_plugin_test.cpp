// The LLVM plugin as the core library uses it: compiling, loading,
// and above all the things that must not happen to the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <clocale>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "codegen/base/error.hpp"
#include "codegen/embedded_headers.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cpu/object.hpp"
#include "runtime/executable.hpp"
#include "templates/shared/forward_params.h"

namespace flashjit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// Code that differs with wider vector registers.
constexpr const char* vectors = R"(
typedef float Vec __attribute__((vector_size(64)));
extern "C" void flashjit_forward(Vec* data, long long, long long, void*) { data[0] = data[1] * data[2] + data[3]; }
)";

// Writes the tile's number, doubled by a header's function,
// to o[tile]. The scratch must be usable and aligned.
constexpr const char* doubling = R"(
#include "cpu/doubled.h"
#include "shared/forward_params.h"
extern "C" void flashjit_forward(const flashjit::device::ForwardParams* params, long long begin, long long end,
                                 void* scratch) {
  int* const numbers = static_cast<int*>(scratch);
  const bool aligned = reinterpret_cast<unsigned long>(scratch) % 64 == 0;
  for (int i = 0; i < 1024; ++i) numbers[i] = aligned ? i : -1;
  for (long long tile = begin; tile < end; ++tile)
    static_cast<int*>(params->o.data)[tile] = doubled(numbers[tile % 1024]);
}
)";
constexpr const char* doubled_header =
    "#pragma once\n#include \"shared/twice.h\"\n"
    "inline int doubled(int x) { return twice(x); }\n";
constexpr const char* twice_header = "#pragma once\ninline int twice(int x) { return 2 * x; }\n";

KernelSource source_of(std::string text, int level = 3) {
  KernelSource source;
  source.target = {Target::Family::cpu, level};
  source.config = {.block_m = 16, .block_n = 16, .num_stages = 1, .num_warps = 1};
  source.text = std::move(text);
  source.headers.assign(embedded_headers().begin(), embedded_headers().end());
  source.headers.push_back({"cpu/doubled.h", doubled_header});
  source.headers.push_back({"shared/twice.h", twice_header});
  source.steps = {{.function = "flashjit_forward", .scratch = 4096}};
  return source;
}

// A kernel of `declarations` and a function with this body.
std::string kernel(const std::string& declarations, const std::string& body) {
  return declarations + "\nextern \"C\" void flashjit_forward(void* params, long long, long long, void*) {" +
         body + "}\n";
}

CompiledKernel compiled(const KernelSource& source) {
  return clang_compiler()->compile(source);
}

// The error that compiling throws.
Error compile_error(const std::string& text) {
  try {
    compiled(source_of(text));
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorCode::internal, "it compiled");
}

void serial(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  for (std::int64_t i = 0; i < count; i += 3) body(context, i, std::min(i + 3, count));
}

std::unique_ptr<Executable> loaded(const std::string& object,
                                   const std::string& function = "flashjit_forward") {
  return load_cpu(serial, 1, object, {{.function = function, .scratch = 4096}});
}

// The error that loading throws.
Error load_error(const std::string& object, const std::string& function = "flashjit_forward") {
  try {
    loaded(object, function);
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorCode::internal, "it loaded");
}

// The output of a launch of `count` tiles.
std::vector<int> tiles_of(const Executable& executable, int count) {
  std::vector<int> tiles(1000, -7);
  device::ForwardParams params{};
  params.o.data = tiles.data();
  Launch launch;
  StepLaunch& step = launch.add_step();
  step.make_params<device::ForwardParams>(params);
  step.items = {.count = count, .pieces = (count + 1) / 2};
  executable.launch(launch, nullptr);
  return tiles;
}

// The address space of this process, in pages.
long mapped_pages() {
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

TEST(LlvmPlugin, CompilesLoadsAndRunsEveryTile) {
  const auto executable = loaded(compiled(source_of(doubling)).code);
  const std::vector<int> tiles = tiles_of(*executable, 18);
  for (int i = 0; i < 18; ++i) EXPECT_EQ(tiles[i], 2 * i);
  EXPECT_EQ(tiles[18], -7) << "a tile too many";
}

TEST(LlvmPlugin, ManyThreadsLendTheirScratch) {
  const ParallelFor threads = [](std::int64_t count, auto* body, void* context) {
    std::vector<std::thread> workers;
    for (std::int64_t i = 0; i < count; ++i) workers.emplace_back([=] { body(context, i, i + 1); });
    for (std::thread& worker : workers) worker.join();
  };
  const KernelSource source = source_of(doubling);
  const auto executable = load_cpu(threads, 20, compiled(source).code, source.steps);
  const std::vector<int> tiles = tiles_of(*executable, 20);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(tiles[i], 2 * i);
}

TEST(LlvmPlugin, IdentityNamesVersionAndBuild) {
  const std::string identity = clang_compiler()->identity(),
                    compiler = compiled(source_of(doubling)).compiler;
  EXPECT_THAT(compiler, testing::ContainsRegex("clang version [0-9]+\\.[0-9].*, build [0-9a-f]{16}"));
  const std::string build = identity.substr(identity.find("build"));
  EXPECT_THAT(build, testing::ContainsRegex("build [0-9a-f]{16}"));
  EXPECT_THAT(compiler, testing::EndsWith(build));
}

TEST(LlvmPlugin, SameSourceSameCodeAndOptionsChangeIt) {
  const KernelSource v3 = source_of(vectors, 3), v4 = source_of(vectors, 4);
  const std::string object = compiled(v3).code;
  EXPECT_TRUE(object == compiled(v3).code);
  EXPECT_FALSE(object == compiled(v4).code);
  EXPECT_THAT(clang_compiler()->compile(v3, true).assembly, AllOf(HasSubstr("%ymm"), Not(HasSubstr("%zmm"))));
  EXPECT_THAT(clang_compiler()->compile(v4, true).assembly, HasSubstr("%zmm"));
  EXPECT_NE(clang_compiler()->options(v3), clang_compiler()->options(v4));
}

// An indirect call to anything else is a fault in a process whose indirect calls are checked.
TEST(LlvmPlugin, FunctionsBeginWithLandingPads) {
  const LoadedObject object(compiled(source_of(doubling)).code);
  constexpr unsigned char endbr64[] = {0xf3, 0x0f, 0x1e, 0xfa};
  EXPECT_EQ(std::memcmp(object.function("flashjit_forward"), endbr64, sizeof endbr64), 0);
}

TEST(LlvmPlugin, AssemblyOnRequest) {
  EXPECT_EQ(compiled(source_of(doubling)).assembly, "");
  EXPECT_THAT(clang_compiler()->compile(source_of(doubling), true).assembly, HasSubstr("flashjit_forward:"));
}

TEST(LlvmPlugin, ErrorsComeWithTheCompilersWords) {
  const Error error = compile_error(kernel("", "return undeclared + 1;"));
  EXPECT_EQ(error.code(), ErrorCode::compile_failed);
  EXPECT_THAT(error.message(), HasSubstr("x86-64-v3"));
  EXPECT_THAT(error.detail(),
              AllOf(HasSubstr("kernel.cpp:2:"), HasSubstr("undeclared identifier 'undeclared'")));
}

TEST(LlvmPlugin, WarningsAreInTheLog) {
  EXPECT_THAT(compiled(source_of(kernel("#warning from the kernel", ""))).log, HasSubstr("from the kernel"));
}

TEST(LlvmPlugin, HeadersOnDiskDoNotExist) {
  ASSERT_TRUE(std::ifstream("/usr/include/stdio.h").good());
  for (const char* header : {"<stdio.h>", "<stddef.h>", "\"/usr/include/stdio.h\"", "\"cpu/unknown.h\""}) {
    const Error error = compile_error(kernel(std::string("#include ") + header, ""));
    EXPECT_EQ(error.code(), ErrorCode::compile_failed) << header;
    EXPECT_THAT(error.detail(), HasSubstr("file not found")) << header;
  }
}

TEST(LlvmPlugin, FatalErrorsOfTheBackEndAreErrors) {
  // Without our handler LLVM would end the process for this error.
  const std::string fatal =
      kernel("register unsigned long frame asm(\"rbp\");", "*(unsigned long*)params = frame;");
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(compile_error(fatal).detail(), HasSubstr("register rbp is allocatable"));
    EXPECT_NO_THROW(loaded(compiled(source_of(doubling)).code));
  }
}

TEST(LlvmPlugin, DeepRecursionIsAnErrorOnASmallStack) {
  const std::string templates =
      "template <int n> struct Deep { static constexpr int v = Deep<n - 1>::v; };\n"
      "int deep = Deep<100000>::v;";
  const std::string brackets = "int deep = " + std::string(20000, '(') + "1" + std::string(20000, ')') + ";";
  struct Result {
    std::vector<std::string> texts, details;
  } result{{kernel(templates, ""), kernel(brackets, "")}, {}};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 128 << 10);
  pthread_t thread;
  const auto run = [](void* p) -> void* {
    auto& r = *static_cast<Result*>(p);
    for (const std::string& text : r.texts) r.details.push_back(compile_error(text).detail());
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &result), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_THAT(result.details[0], HasSubstr("instantiation"));
  EXPECT_THAT(result.details[1], HasSubstr("nesting"));
}

TEST(LlvmPlugin, KernelsCallOnlyWhatIsAllowed) {
  const std::string calls_puts =
      compiled(source_of(kernel("extern \"C\" int puts(const char*);", "puts(\"x\");"))).code;
  const Error error = load_error(calls_puts);
  EXPECT_EQ(error.code(), ErrorCode::device_failed);
  EXPECT_THAT(error.message(), HasSubstr("puts"));
  EXPECT_NO_THROW(loaded(compiled(source_of(kernel("", "__builtin_memset(params, 0, 1 << 20);"))).code));
}

TEST(LlvmPlugin, ObjectsThatCannotRunAreRefused) {
  const std::string good = compiled(source_of(doubling)).code;
  EXPECT_THAT(load_error(good, "another_entry").message(), HasSubstr("another_entry"));
  EXPECT_EQ(load_error("").code(), ErrorCode::device_failed);
  EXPECT_EQ(load_error("not an object at all").code(), ErrorCode::device_failed);
  EXPECT_EQ(load_error(good.substr(0, good.size() / 2)).code(), ErrorCode::device_failed);
  EXPECT_THAT(load_error(compiled(source_of(kernel(
                                      "int f(); int global = f(); int f() { volatile int x = 3; return x; }",
                                      "global = 4;")))
                             .code)
                  .message(),
              HasSubstr("static initialisers"));
  EXPECT_EQ(load_error(compiled(source_of(kernel("thread_local int mine;", "++mine;"))).code).code(),
            ErrorCode::device_failed);
}

// Loading any bytes ends in a kernel or in an error.
TEST(LlvmPlugin, DamagedObjectsEndInErrors) {
  const std::string good = compiled(source_of(doubling)).code;
  for (std::size_t size = 0; size < good.size(); size += 7)
    EXPECT_EQ(load_error(good.substr(0, size)).code(), ErrorCode::device_failed) << size;
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = good;
    for (int flips = 0; flips < 3; ++flips)
      damaged[random() % good.size()] ^= static_cast<char>(1u << random() % 8);
    refused += load_error(damaged).code() == ErrorCode::device_failed;
  }
  EXPECT_GT(refused, 300);
}

TEST(LlvmPlugin, CompilesInParallel) {
  const KernelSource source = source_of(vectors, 4);
  const std::string expected = compiled(source).code;
  std::array<std::string, 4> codes;
  std::vector<std::thread> threads;
  for (std::string& code : codes) {
    threads.emplace_back([&] {
      for (int i = 0; i < 3; ++i) {
        code = compiled(source).code;
        EXPECT_EQ(tiles_of(*loaded(compiled(source_of(doubling)).code), 2)[1], 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& code : codes) EXPECT_TRUE(code == expected);
}

TEST(LlvmPlugin, UnloadingFreesTheMemory) {
  const std::string object = compiled(source_of(doubling)).code;
  for (int i = 0; i < 50; ++i) loaded(object);
  const long pages = mapped_pages();
  const auto heap = static_cast<long>(mallinfo2().uordblks);  // 0 if a sanitizer has its own heap
  for (int i = 0; i < 1000; ++i) loaded(object);
  EXPECT_LT(mapped_pages() - pages, 500);
  EXPECT_LT(static_cast<long>(mallinfo2().uordblks) - heap, 50'000) << "bytes";
}

TEST(LlvmPlugin, LeavesTheHostAsItWas) {
  using Handlers = std::array<struct sigaction, NSIG>;
  const auto handlers = [] {
    Handlers all{};
    for (int i = 1; i < NSIG; ++i) sigaction(i, nullptr, &all[i]);
    return all;
  };
  const Handlers before = handlers();
  const std::string locale = std::setlocale(LC_ALL, nullptr);

  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  loaded(compiled(source_of(doubling)).code);
  compile_error("#warning this too\nsyntax error");
  load_error("not an object at all");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");

  const Handlers after = handlers();
  for (int i = 1; i < NSIG; ++i) EXPECT_EQ(before[i].sa_handler, after[i].sa_handler) << strsignal(i);
  EXPECT_EQ(locale, std::setlocale(LC_ALL, nullptr));
}

// Prints the error that compiling throws, in a process that has not opened the plugin yet.
[[noreturn]] void report_unavailable(const char* file) {
  setenv("FLASHJIT_LLVM_PLUGIN", file, 1);
  try {
    clang_compiler()->compile(source_of(doubling));
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s", to_string(e.code()), e.what());
  }
  std::exit(0);
}

TEST(LlvmPluginDeathTest, AMissingPluginIsAnErrorThatHelps) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(report_unavailable("/proc/no/such/libflashjit-llvm.so"), testing::ExitedWithCode(0),
              AllOf(HasSubstr("compiler_unavailable"), HasSubstr("FLASHJIT_LLVM_PLUGIN"),
                    HasSubstr("/proc/no/such/libflashjit-llvm.so: cannot open")));
  EXPECT_EXIT(report_unavailable("libm.so.6"), testing::ExitedWithCode(0),
              AllOf(HasSubstr("compiler_unavailable"), HasSubstr("not a flashjit plugin")));
}

}  // namespace
}  // namespace flashjit
