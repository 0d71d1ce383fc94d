// The environment variables that flashjit reads, one row of a table for each. The reference follows from it.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>

namespace flashjit {

enum class Variable {
  cache_dir,
  cache_max_bytes,
  cache_path,
  target,
  log,
  record,
  nvrtc,
  nccl,
  map_peers,
  llvm_plugin,
  cache_remote,
  remote_token,
  remote_token_file,
  remote_ca,
  trust,
  signing_key,
  remote_plugin,
  check,
  cuda_home,
  cuda_path,
  xdg_cache_home,
  listen_pid,
  listen_fds,
  home,
};

struct VariableInfo {
  Variable variable;
  const char* name;
  const char* meaning;
  const char* otherwise;  // what holds without it
};

// In the order of the enumerators.
inline constexpr VariableInfo environment_table[] = {
    {Variable::cache_dir, "FLASHJIT_CACHE_DIR",
     "the folder that compiled kernels and tune records are written to",
     "`$XDG_CACHE_HOME/flashjit`, else `~/.cache/flashjit`"},
    {Variable::cache_max_bytes, "FLASHJIT_CACHE_MAX_BYTES",
     "the size cap of that folder; the kernels used last stay", "1 GiB"},
    {Variable::cache_path, "FLASHJIT_CACHE_PATH",
     "folders of prebuilt kernels, colons between them, read only, searched first", "none"},
    {Variable::target, "FLASHJIT_TARGET",
     "the target of engines that name none: one for CPUs, one for GPUs, a comma between them",
     "the device's best"},
    {Variable::log, "FLASHJIT_LOG",
     "a file that gets a line for each kernel that an engine had not in memory", "none"},
    {Variable::record, "FLASHJIT_RECORD", "a file that becomes a manifest of these kernels", "none"},
    {Variable::nvrtc, "FLASHJIT_NVRTC", "the NVRTC library, a file or a folder",
     "`CUDA_HOME`, `CUDA_PATH`, the loader's path, `nvrtc/` beside the library, `/usr/local/cuda`"},
    {Variable::nccl, "FLASHJIT_NCCL", "the NCCL library of communicators, a file",
     "the one that the process has loaded, else the loader's path"},
    {Variable::map_peers, "FLASHJIT_MAP_PEERS",
     "with `0` on one of its ranks, a group of a communicator sends and receives over NCCL",
     "ranks map each other's memory, if all of them can"},
    {Variable::llvm_plugin, "FLASHJIT_LLVM_PLUGIN", "the LLVM plugin, a file",
     "beside the library or program, in its `../lib`, else where the loader looks"},
    {Variable::cache_remote, "FLASHJIT_CACHE_REMOTE",
     "stores over the network, searched after the folders: URLs, spaces between them", "none"},
    {Variable::remote_token, "FLASHJIT_REMOTE_TOKEN",
     "what a store asks for: `user:password`, a bearer token (HTTP) or a password (Redis)",
     "the one of `FLASHJIT_REMOTE_TOKEN_FILE`"},
    {Variable::remote_token_file, "FLASHJIT_REMOTE_TOKEN_FILE", "a file with the same", "no token"},
    {Variable::remote_ca, "FLASHJIT_REMOTE_CA", "a file of the certificates that stores' ones are checked by",
     "the system's certificates"},
    {Variable::trust, "FLASHJIT_TRUST",
     "public keys whose signatures count, and files of them, colons between them", "none"},
    {Variable::signing_key, "FLASHJIT_SIGNING_KEY",
     "the file of the secret key that signs what is compiled here", "nothing is signed"},
    {Variable::remote_plugin, "FLASHJIT_REMOTE_PLUGIN", "the plugin for signatures and remote stores, a file",
     "the same places"},
    {Variable::check, "FLASHJIT_CHECK",
     "with `1`, lengths and lists in GPU memory are checked before every launch", "GPU kernels clamp them"},
    {Variable::cuda_home, "CUDA_HOME", "a CUDA toolkit, whose `lib64` may have NVRTC", "`CUDA_PATH`"},
    {Variable::cuda_path, "CUDA_PATH", "the same, looked at after `CUDA_HOME`", "the loader's path"},
    {Variable::xdg_cache_home, "XDG_CACHE_HOME",
     "the folder of caches, an absolute path; the default of `FLASHJIT_CACHE_DIR` lies in it", "`~/.cache`"},
    {Variable::listen_pid, "LISTEN_PID",
     "the process that systemd passes sockets to; `flashjit serve` takes its own", "`--listen`"},
    {Variable::listen_fds, "LISTEN_FDS", "how many sockets these are", "none"},
    {Variable::home, "HOME", "the user's folder; the default of `FLASHJIT_CACHE_DIR` may lie in it",
     "nothing is kept on disk"},
};
static_assert(
    [] {
      for (std::size_t i = 0; i < std::size(environment_table); ++i)
        if (static_cast<std::size_t>(environment_table[i].variable) != i) return false;
      return std::size(environment_table) == static_cast<std::size_t>(Variable::home) + 1;
    }(),
    "environment_table has a row for each variable, in the order of the enumerators");

// The variable's value; empty if it is not set, and in set-user-id
// programs, where the caller controls the environment.
std::string environment_variable(Variable variable);

}  // namespace flashjit
