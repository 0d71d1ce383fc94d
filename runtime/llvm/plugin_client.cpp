#include "runtime/llvm/plugin_client.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "codegen/error.hpp"

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

// Null, and a line in `problems`, if the file is not a plugin of this version.
const flashjit_llvm_plugin_api* open_plugin(const std::string& file, std::string& problems) {
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    problems += std::string(dlerror()) + "\n";
    return nullptr;
  }
  using Entry = const flashjit_llvm_plugin_api* (*)(uint32_t);
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "flashjit_llvm_plugin"));
  const flashjit_llvm_plugin_api* const api = entry != nullptr ? entry(FLASHJIT_LLVM_PLUGIN_ABI) : nullptr;
  if (api == nullptr) {
    problems += file + (entry != nullptr ? ": belongs to another version of flashjit\n"
                                         : ": is not a flashjit plugin\n");
    dlclose(library);
  }
  return api;
}

const flashjit_llvm_plugin_api& find_plugin() {
  std::string problems;
  for (const std::string& file : places()) {
    if (const flashjit_llvm_plugin_api* const api = open_plugin(file, problems)) return *api;
  }
  throw Error(
      ErrorCode::compiler_unavailable,
      std::string("CPU kernels need the LLVM plugin, and ") + plugin_file +
          " could not be opened. Build flashjit with -DFLASHJIT_LLVM=ON, keep the plugin beside the flashjit "
          "library, or set FLASHJIT_LLVM_PLUGIN to its file. Tried:\n" +
          problems);
}

}  // namespace

const flashjit_llvm_plugin_api& llvm_plugin() {
  static const flashjit_llvm_plugin_api& plugin = find_plugin();
  return plugin;
}

std::string take_text(const flashjit_llvm_plugin_api& plugin, flashjit_llvm_text& text) {
  std::string result(text.data != nullptr ? text.data : "", text.size);
  plugin.free_text(&text);
  return result;
}

}  // namespace flashjit
