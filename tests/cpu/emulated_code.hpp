// A kernel for AMX, compiled for AVX2 with emulator/cpu/instructions.h in place of the header of that name.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "codegen/render.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cpu/object.hpp"

namespace flashjit::testing_support {

// Memory of 64-byte alignment whose bytes are 0xff, NaN in every dtype. expect_canary() sees writes past
// `bytes`.
class FilledMemory {
 public:
  explicit FilledMemory(std::size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + canary + 63) / 64 * 64)), std::free) {
    std::memset(data_.get(), 0xff, bytes + canary);
  }
  std::byte* data() const { return data_.get(); }
  void expect_canary() const {
    for (std::size_t i = 0; i < canary; ++i) ASSERT_EQ(data_.get()[bytes_ + i], std::byte{0xff});
  }

 private:
  static constexpr std::size_t canary = 4096;
  std::size_t bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> data_;
};

class EmulatedCode {
 public:
  explicit EmulatedCode(KernelSource source) : source_(std::move(source)) {}

  const Step& step(std::size_t index) const { return source_.steps.at(index); }
  const std::vector<Step>& steps() const { return source_.steps; }

  // Calls a step for items [0, items), a few at a time. The first call compiles.
  void run(std::size_t index, const void* params, long long items, void* scratch) const {
    if (!object_) object_.emplace(compile());
    const auto entry = reinterpret_cast<void (*)(const void*, long long, long long, void*)>(
        object_->function(step(index).function));
    for (long long item = 0; item < items; item += 3) {
      entry(params, item, std::min(item + 3, items), scratch);
      ASSERT_FALSE(asked("emulated_tiles_configured"));
    }
    EXPECT_FALSE(asked("emulated_tiles_misused"));
  }

 private:
  static const std::string& emulator() {
    static const std::string text = [] {
      std::ifstream file(FLASHJIT_SOURCE_DIR "/tests/cpu/emulator/cpu/instructions.h");
      return std::string(std::istreambuf_iterator<char>(file), {});
    }();
    return text;
  }
  std::string compile() const {
    KernelSource source = source_;
    std::string lanes;
    for (EmbeddedHeader& header : source.headers) {
      if (header.name == "cpu/instructions.h") header.text = emulator();
      if (header.name != "cpu/formula_lanes.h") continue;
      // No register of this target holds a vector.
      constexpr std::string_view in_register = "\"+v\"(product)";
      lanes = header.text;
      lanes.replace(lanes.find(in_register), in_register.size(), "\"+m\"(product)");
      header.text = lanes;
    }
    source.target = Target::parse("x86-64-v3");
    return clang_compiler()->compile(source).code;
  }
  bool asked(const char* name) const { return reinterpret_cast<int (*)()>(object_->function(name))() != 0; }

  KernelSource source_;
  mutable std::optional<LoadedObject> object_;
};

}  // namespace flashjit::testing_support
