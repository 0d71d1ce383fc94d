// Loads objects from ELF files made by hand: which symbols are refused, which memory
// may be written to, and how code is loaded where a policy restricts executable memory.
#include "runtime/cpu/object.hpp"

#include <elf.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "codegen/base/error.hpp"
#include "runtime/executable.hpp"
#include "tests/cache/support.hpp"
#include "tests/runtime/memory_policy.hpp"

namespace flashjit::testing {
namespace {

constexpr std::string_view code("\xb8\x2a\x00\x00\x00\xc3", 6);  // mov eax, 42; ret
constexpr std::string_view names("\0answer\0", 8);
enum Section : std::uint16_t { none, text, symbols, strings, num_sections };

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// An object with `code` and one global symbol, "answer".
std::string object(std::uint64_t value, unsigned char type = STT_FUNC) {
  const Elf64_Sym table[] = {{},
                             {.st_name = 1,
                              .st_info = static_cast<unsigned char>(ELF64_ST_INFO(STB_GLOBAL, type)),
                              .st_other = 0,
                              .st_shndx = text,
                              .st_value = value,
                              .st_size = 0}};
  std::string file(sizeof(Elf64_Ehdr), '\0');
  Elf64_Shdr sections[num_sections] = {};
  const auto add = [&](Section section, std::uint32_t kind, std::string_view content) {
    sections[section].sh_type = kind;
    sections[section].sh_offset = file.size();
    sections[section].sh_size = content.size();
    file += content;
  };
  add(text, SHT_PROGBITS, code);
  sections[text].sh_flags = SHF_ALLOC | SHF_EXECINSTR;
  add(symbols, SHT_SYMTAB, bytes_of(table));
  sections[symbols].sh_link = strings;
  sections[symbols].sh_entsize = sizeof(Elf64_Sym);
  add(strings, SHT_STRTAB, names);
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_type = ET_REL;
  header.e_machine = EM_X86_64;
  header.e_shoff = file.size();
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shnum = num_sections;
  std::memcpy(file.data(), &header, sizeof header);
  return file.append(bytes_of(sections));
}

// The protection of the address's page, such as "r-xp".
std::string protection_at(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string protection;
    fields >> std::hex >> begin >> dash >> end >> protection;
    if (begin <= wanted && wanted < end) return protection;
  }
  return "not mapped";
}

TEST(Object, RunsItsFunctions) {
  const LoadedObject loaded(object(0));
  EXPECT_EQ(reinterpret_cast<int (*)()>(loaded.function("answer"))(), 42);
  EXPECT_THROW((void)loaded.function("question"), BadCode);
}

TEST(Object, CodeIsNeverWritableAndExecutable) {
  const LoadedObject loaded(object(0));
  EXPECT_EQ(protection_at(loaded.function("answer")), "r-xp");
}

bool runs_protected() {
  const LoadedObject loaded(object(0));
  return reinterpret_cast<int (*)()>(loaded.function("answer"))() == 42 &&
         protection_at(loaded.function("answer")) == "r-xp";
}

TEST(Object, RunsWhereWrittenMemoryMayNotBecomeExecutable) {
  EXPECT_TRUE(
      child_succeeded(start_child([] { return !set_memory_deny_write_execute() || runs_protected(); })));
  EXPECT_TRUE(child_succeeded(start_child([] {
    FLASHJIT_CHECK(forbid_executable_memory(true));
    FLASHJIT_CHECK(runs_protected());
    // The mapped file ends a process that writes it beyond its limit, unless it is not written at all.
    const rlimit limit = {64, 64};
    FLASHJIT_CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    try {
      (void)runs_protected();
    } catch (const Error& error) {
      return contains(error.message(), "File too large");
    }
    return false;
  })));
}

TEST(Object, SaysWhatToAllowWhereNoMemoryMayBeExecutable) {
  EXPECT_TRUE(child_succeeded(start_child([] {
    FLASHJIT_CHECK(forbid_executable_memory(false));
    try {
      (void)runs_protected();
    } catch (const BadCode&) {
      return false;  // the object is not to blame
    } catch (const Error& error) {
      return error.code() == ErrorCode::device_failed && contains(error.message(), "Permission denied") &&
             contains(error.message(), "MemoryDenyWriteExecute=no") && contains(error.message(), "execmem");
    }
    return false;
  })));
}

TEST(Object, SymbolsLieWithinTheirSection) {
  EXPECT_NO_THROW(LoadedObject(object(code.size() - 1)));
  for (const std::uint64_t beyond : {code.size(), code.size() + 1, std::size_t{4096}, SIZE_MAX}) {
    EXPECT_THROW(LoadedObject{object(beyond)}, BadCode) << beyond;
  }
  // A label may lie at the section's end.
  EXPECT_NO_THROW(LoadedObject(object(code.size(), STT_NOTYPE)));
  EXPECT_THROW(LoadedObject{object(code.size() + 1, STT_NOTYPE)}, BadCode);
}

}  // namespace
}  // namespace flashjit::testing
