#include "runtime/llvm/plugin_client.hpp"

#include <dlfcn.h>

#include <string_view>
#include <utility>

#include "cache/environment.hpp"
#include "cache/fork.hpp"
#include "codegen/base/error.hpp"
#include "runtime/build_id.hpp"
#include "runtime/library_file.hpp"

namespace flashjit {
namespace {

constexpr const char* plugin_file = "libflashjit-llvm.so";

[[noreturn]] void unavailable(const std::string& problems) {
  throw Error(
      ErrorCode::compiler_unavailable,
      std::string("CPU kernels are compiled by the LLVM plugin, and ") + plugin_file +
          " could not be opened. Build flashjit with -DFLASHJIT_LLVM=ON, keep the plugin beside the flashjit "
          "library, or set FLASHJIT_LLVM_PLUGIN to its file; kernels that are cached or prebuilt need none. "
          "Tried:\n" +
          problems);
}

LlvmPluginFile find_file() {
  std::string problems;
  for (const std::string& place : plugin_places(Variable::llvm_plugin, plugin_file, problems)) {
    LlvmPluginFile file;
    std::string why;
    if (place.find('/') != std::string::npos) {
      file.name = file.path = trusted_library(place, &why);
    } else if (void* const library = open_library(place, &why)) {  // only the loader knows where that is
      file.name = place;
      file.path = path_of(library);
    }
    if (!file.path.empty()) {
      file.build_id = build_id(file.path);
      if (!file.build_id.empty()) return file;
      why = "is not a shared library with a build ID";
    }
    problems += place + ": " + why + "\n";
  }
  unavailable(problems);
}

flashjit_llvm_plugin_api open_plugin() {
  const LlvmPluginFile& file = llvm_plugin_file();
  std::string why;
  void* const library = open_library(file.name, &why);
  if (library == nullptr) unavailable(file.path + ": " + why);
  using GetApi = const flashjit_llvm_plugin_api* (*)(uint32_t);
  const auto get_api = reinterpret_cast<GetApi>(dlsym(library, "flashjit_llvm_plugin"));
  if (get_api == nullptr) unavailable(file.path + ": is not a flashjit plugin");
  const flashjit_llvm_plugin_api* const api = get_api(FLASHJIT_LLVM_PLUGIN_ABI);
  if (api == nullptr) unavailable(file.path + ": belongs to another version of flashjit");
  if (api->identity == nullptr) unavailable(file.path + ": ran out of memory when it started");
  // Cache keys were made with the file's build ID.
  if (!std::string_view(api->identity).ends_with(file.build_id))
    unavailable(file.path + ": was replaced while this process ran");
  return *api;
}

}  // namespace

const LlvmPluginFile& llvm_plugin_file() {
  static constinit std::atomic<const LlvmPluginFile*> file = nullptr;
  return opened_once(file, find_file);
}

const flashjit_llvm_plugin_api& llvm_plugin() {
  static constinit std::atomic<const flashjit_llvm_plugin_api*> plugin = nullptr;
  return opened_once(plugin, open_plugin);
}

std::string take_text(const flashjit_llvm_plugin_api& plugin, flashjit_llvm_text& text) {
  std::string result(text.data != nullptr ? text.data : "", text.size);
  plugin.free_text(&text);
  return result;
}

}  // namespace flashjit
