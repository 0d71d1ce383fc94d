#include "runtime/llvm/plugin_client.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include "codegen/error.hpp"
#include "runtime/build_id.hpp"

namespace flashjit {
namespace {

constexpr const char* plugin_file = "libflashjit-llvm.so";

// Folder of the shared library or program that this code is linked into; empty if it cannot be told.
std::filesystem::path own_folder() {
  Dl_info info{};
  link_map* map = nullptr;
  if (dladdr1(reinterpret_cast<const void*>(&llvm_plugin), &info, reinterpret_cast<void**>(&map),
              RTLD_DL_LINKMAP) == 0)
    return {};
  // A program has no name in the link map, and the one it was started by need not be a path.
  const char* const name = map->l_name != nullptr && *map->l_name != 0 ? map->l_name : "/proc/self/exe";
  std::error_code error;
  return std::filesystem::canonical(name, error).parent_path();
}

std::vector<std::string> places() {
  if (const char* const chosen = std::getenv("FLASHJIT_LLVM_PLUGIN"); chosen != nullptr && *chosen != 0)
    return {chosen};
  std::vector<std::string> result;
  if (const std::filesystem::path folder = own_folder(); !folder.empty()) {
    result.push_back((folder / plugin_file).string());
    result.push_back((folder.parent_path() / "lib" / plugin_file).string());
  }
  result.push_back(plugin_file);
  return result;
}

[[noreturn]] void unavailable(const std::string& problems) {
  throw Error(
      ErrorCode::compiler_unavailable,
      std::string("CPU kernels are compiled by the LLVM plugin, and ") + plugin_file +
          " could not be opened. Build flashjit with -DFLASHJIT_LLVM=ON, keep the plugin beside the flashjit "
          "library, or set FLASHJIT_LLVM_PLUGIN to its file; kernels that are cached or prebuilt need none. "
          "Tried:\n" +
          problems);
}

// Of an open library; never closed.
std::string path_of(void* library) {
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

LlvmPluginFile find_file() {
  std::string problems;
  for (const std::string& place : places()) {
    LlvmPluginFile file{place, {}};
    if (place.find('/') == std::string::npos) {  // only the loader can tell where that is
      void* const library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) {
        problems += std::string(dlerror()) + "\n";
        continue;
      }
      file.path = path_of(library);
    }
    file.build_id = build_id(file.path);
    if (!file.build_id.empty()) return file;
    std::error_code error;
    problems += place + (std::filesystem::exists(place, error) ? ": is not a shared library with a build ID\n"
                                                               : ": cannot open: no such file\n");
  }
  unavailable(problems);
}

const flashjit_llvm_plugin_api& open_plugin() {
  const LlvmPluginFile& file = llvm_plugin_file();
  void* const library = dlopen(file.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) unavailable(dlerror());
  using Entry = const flashjit_llvm_plugin_api* (*)(uint32_t);
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "flashjit_llvm_plugin"));
  if (entry == nullptr) unavailable(file.path + ": is not a flashjit plugin");
  const flashjit_llvm_plugin_api* const api = entry(FLASHJIT_LLVM_PLUGIN_ABI);
  if (api == nullptr) unavailable(file.path + ": belongs to another version of flashjit");
  // Keys were made of the file's.
  if (!std::string_view(api->identity).ends_with(file.build_id))
    unavailable(file.path + ": was replaced while this process ran");
  return *api;
}

}  // namespace

const LlvmPluginFile& llvm_plugin_file() {
  static const LlvmPluginFile file = find_file();
  return file;
}

const flashjit_llvm_plugin_api& llvm_plugin() {
  static const flashjit_llvm_plugin_api& plugin = open_plugin();
  return plugin;
}

std::string take_text(const flashjit_llvm_plugin_api& plugin, flashjit_llvm_text& text) {
  std::string result(text.data != nullptr ? text.data : "", text.size);
  plugin.free_text(&text);
  return result;
}

}  // namespace flashjit
