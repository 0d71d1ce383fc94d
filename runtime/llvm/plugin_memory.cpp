// The memory of this library. LLVM, Clang and the C++ runtime are linked into it and
// allocate only here: the linker's --wrap redirects their malloc, calloc, realloc
// and free. They never get a null pointer, since many of them do not check for one.
#include <malloc.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <new>

#include "runtime/llvm/plugin_parts.hpp"

namespace flashjit::llvm_plugin {
namespace {

// Memory for static constructors (they need 250 KB) if malloc has none. They
// run on the host's thread, under the loader's lock, and could only end the
// process. None of it is given back, so all of it is zero when it is taken.
constexpr std::size_t early_alignment = 64;
alignas(early_alignment) char early[1u << 20];
std::size_t early_used = 0;
bool constructed = false;

bool is_early(const void* memory) {
  return !std::less<>()(memory, static_cast<void*>(early)) &&
         std::less<>()(memory, static_cast<void*>(std::end(early)));
}

// Memory if malloc has none.
void* take_early(std::size_t size, std::size_t alignment = 1) {
  if (constructed || size > sizeof(early) - early_used || alignment > early_alignment) exhaust();
  void* const memory = early + early_used;
  early_used += (size + early_alignment - 1) / early_alignment * early_alignment;
  return memory;
}

// Counts memory that malloc gave, or that it will be given back.
void* counted(void* memory) {
  if (watched_calls.load(std::memory_order_relaxed) > 0 && memory != nullptr)
    count_memory(static_cast<std::ptrdiff_t>(malloc_usable_size(memory)));
  return memory;
}
void uncount(void* memory) {
  if (watched_calls.load(std::memory_order_relaxed) > 0 && memory != nullptr)
    count_memory(-static_cast<std::ptrdiff_t>(malloc_usable_size(memory)));
}

}  // namespace

void end_of_construction() {
  constructed = true;
}

extern "C" {

void* __real_malloc(std::size_t size);
void* __real_calloc(std::size_t count, std::size_t size);
void* __real_realloc(void* memory, std::size_t size);
void __real_free(void* memory);

void* __wrap_malloc(std::size_t size) {
  void* const memory = counted(__real_malloc(std::max<std::size_t>(size, 1)));
  return memory != nullptr ? memory : take_early(size);
}

void* __wrap_calloc(std::size_t count, std::size_t size) {
  void* const memory =
      counted(__real_calloc(std::max<std::size_t>(count, 1), std::max<std::size_t>(size, 1)));
  return memory != nullptr ? memory : take_early(count * size);
}

void __wrap_free(void* memory) {
  if (is_early(memory)) return;
  uncount(memory);
  __real_free(memory);
}

void* __wrap_realloc(void* memory, std::size_t size) {
  size = std::max<std::size_t>(size, 1);
  std::size_t bytes = 0;
  if (is_early(memory)) {
    bytes = static_cast<std::size_t>(std::end(early) - static_cast<char*>(memory));
  } else {
    uncount(memory);
    if (void* const moved = __real_realloc(memory, size)) return counted(moved);
    bytes = malloc_usable_size(counted(memory));  // 0 of a null pointer
  }
  void* const moved = __wrap_malloc(size);
  if (bytes > 0) std::memcpy(moved, memory, std::min(size, bytes));
  __wrap_free(memory);
  return moved;
}

// No object of this library is destroyed when the process exits: sleeping
// threads hold objects that they used, and other threads may still compile.
int __cxa_atexit(void (*)(void*), void*, void*) {
  return 0;
}
}

void* try_malloc(std::size_t size) {
  return __real_malloc(size);
}
void try_free(void* memory) {
  __real_free(memory);
}

}  // namespace flashjit::llvm_plugin

// The other forms of new call these.
void* operator new(std::size_t size) {
  return std::malloc(size);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  void* const memory =
      flashjit::llvm_plugin::counted(std::aligned_alloc(align, (size + align - 1) / align * align));
  return memory != nullptr ? memory : flashjit::llvm_plugin::take_early(size, align);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
