// Compiling with too little memory is an error, wherever the memory ends, and the host survives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "codegen/base/error.hpp"
#include "codegen/embedded_headers.hpp"
#include "runtime/compiler.hpp"
#include "runtime/executable.hpp"
#include "runtime/llvm/plugin_client.hpp"

namespace flashjit {
namespace {

constexpr std::size_t mebibyte = 1u << 20;

KernelSource source() {
  KernelSource source;
  source.target = {Target::Family::cpu, 3};
  source.config = {.block_m = 16, .block_n = 16, .num_stages = 1, .num_warps = 1};
  source.text = R"(
#include "shared/forward_params.h"
extern "C" void flashjit_forward(const flashjit::device::ForwardParams* params, long long begin, long long end, void*) {
  for (long long tile = begin; tile < end; ++tile) static_cast<float*>(params->o.data)[tile] += 2.0f * tile;
}
)";
  source.headers.assign(embedded_headers().begin(), embedded_headers().end());
  source.steps = {{.function = "flashjit_forward", .scratch = 4096}};
  return source;
}

void load(const std::string& object) {
  const auto serial = [](std::int64_t count, auto* body, void* context) { body(context, 0, count); };
  load_cpu(serial, 1, object, source().steps);
}

// The address space of this process.
std::size_t mapped_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

void limit_memory(rlim_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = std::min(bytes, limit.rlim_max);
  setrlimit(RLIMIT_AS, &limit);
}

// Memory that children write and this process reads.
struct Board {
  std::size_t object_size = 0;
  std::array<char, mebibyte> object{};
  std::atomic<int> compiled = 0, ended_in_clang = 0, refused = 0;
};

class OutOfMemory : public testing::Test {
 protected:
  // Every child must open the plugin for the first time, so this process never opens it.
  void SetUp() override {
    void* const shared =
        mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(shared, MAP_FAILED);
    board_ = new (shared) Board;
    ASSERT_EQ(status_of([this] {
                const std::string object = clang_compiler()->compile(source()).code;
                board_->object_size = object.size();
                std::copy(object.begin(), object.end(), board_->object.begin());
                return object.size() <= board_->object.size();
              }),
              0);
  }
  void TearDown() override { munmap(board_, sizeof(Board)); }

  // The exit status of a child that runs `body`: 0 if it returned true and the process could exit.
  static int status_of(const std::function<bool()>& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      alarm(120);  // in case it hangs
      bool good = false;
      try {
        good = body();
      } catch (const std::exception& e) {
        std::fprintf(stderr, "child: %s\n", e.what());
      }
      std::exit(good ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
  }

  // One thread's compilation. Only the promised errors may occur; the loader words its own.
  bool compile(const Compiler& compiler) const {
    try {
      compiler.compile(source());
      ++board_->compiled;
      return true;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::compile_failed) {
        ++board_->ended_in_clang;
        return error.message().find("memory") != std::string::npos;
      }
      ++board_->refused;
      return error.code() == ErrorCode::compiler_unavailable;
    } catch (const std::bad_alloc&) {  // there was no memory for the data that Clang is to get
      ++board_->refused;
      return true;
    }
  }

  // Runs `prepare`, then a host that has so many bytes left, and later more.
  bool host(std::size_t bytes, int num_threads, void (*prepare)()) const {
    const std::string object(board_->object.data(), board_->object_size);
    const auto compiler = clang_compiler();
    prepare();
    limit_memory(mapped_bytes() + bytes);
    std::atomic<bool> good = true;
    {
      std::vector<std::jthread> threads;
      for (int i = 1; i < num_threads; ++i) {
        try {
          threads.emplace_back([&] { good = compile(*compiler) && good; });
        } catch (const std::exception&) {  // no memory for the host's own thread
        }
      }
      good = compile(*compiler) && good;
    }
    limit_memory(RLIM_INFINITY);
    load(object);  // as if it had been cached
    return compile(*compiler) && good;
  }

  void try_limits(std::size_t most, void (*prepare)()) {
    constexpr int limits = 24;
    for (int i = 1; i <= limits; ++i) {
      const std::size_t bytes = most / limits * i;
      // All threads must get an error, whichever runs out of memory first.
      const int num_threads = i % 3 == 0 ? 3 : 1;
      EXPECT_EQ(status_of([&] { return host(bytes, num_threads, prepare); }), 0)
          << bytes << " bytes, " << num_threads << " threads; 14: it hung; below 128: killed by that signal";
    }
    std::printf("%d compiled, %d ended in Clang, %d could not open it\n", board_->compiled.load(),
                board_->ended_in_clang.load(), board_->refused.load());
    EXPECT_GT(board_->compiled, 0);
    EXPECT_GT(board_->ended_in_clang + board_->refused, 0);
  }

  Board* board_ = nullptr;
};

TEST_F(OutOfMemory, WhileThePluginIsOpened) {
  try_limits(240 * mebibyte, [] {});
  EXPECT_GT(board_->refused, 0);
}

TEST_F(OutOfMemory, InTheFirstCompile) {
  try_limits(48 * mebibyte, [] { llvm_plugin(); });
  EXPECT_GT(board_->ended_in_clang, 0);
}

TEST_F(OutOfMemory, InALaterCompile) {
  try_limits(24 * mebibyte, [] { clang_compiler()->compile(source()); });
  EXPECT_GT(board_->ended_in_clang, 0);
}

// The compile would take years, and all memory, if Clang did not look whether it is to end.
TEST_F(OutOfMemory, IsNotReachedOnceALimitEndsTheCompile) {
  KernelSource endless = source();
  endless.text = R"(
template <unsigned long n, int depth>
struct Tree {
  static constexpr unsigned long size = Tree<2 * n, depth - 1>::size + Tree<2 * n + 1, depth - 1>::size;
};
template <unsigned long n>
struct Tree<n, 0> {
  static constexpr unsigned long size = 1;
};
extern "C" unsigned long flashjit_forward() { return Tree<1, 50>::size; }
)";
  EXPECT_EQ(status_of([&] {
              const auto compiler = clang_compiler();
              llvm_plugin();
              limit_memory(mapped_bytes() + 256 * mebibyte);
              try {
                compiler->compile(endless, false, {.seconds = 0.01});
                return false;
              } catch (const Error& error) {
                return error.code() == ErrorCode::limit_exceeded;
              }
            }),
            0);
}

}  // namespace
}  // namespace flashjit
