#include "runtime/cpu/object.hpp"

#include <elf.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cache/file.hpp"
#include "codegen/base/error.hpp"
#include "codegen/base/suggest.hpp"
#include "runtime/executable.hpp"

namespace flashjit {
namespace {

// The functions that a kernel may call: those that Clang itself emits
// calls to, and functions of libm for which there is no instruction.
void* callable(std::string_view name) {
  static const std::pair<std::string_view, void*> functions[] = {
      {"memcpy", (void*)&memcpy}, {"memmove", (void*)&memmove}, {"memset", (void*)&memset},
      {"memcmp", (void*)&memcmp}, {"expf", (void*)&expf},       {"exp2f", (void*)&exp2f},
      {"logf", (void*)&logf},     {"log2f", (void*)&log2f},     {"log1pf", (void*)&log1pf},
      {"powf", (void*)&powf},     {"fmodf", (void*)&fmodf},     {"tanhf", (void*)&tanhf},
      {"erff", (void*)&erff},     {"sinf", (void*)&sinf},       {"cosf", (void*)&cosf},
  };
  for (const auto& [known, address] : functions) {
    if (known == name) return address;
  }
  return nullptr;
}

std::string cannot_load(const std::string& reason) {
  return "the CPU kernel's object cannot be loaded: " + reason;
}

[[noreturn]] void refuse_object(const std::string& reason) {
  throw BadCode(ErrorCode::device_failed, cannot_load(reason));
}

// The operating system failed; the object is not to blame.
[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(ErrorCode::device_failed, cannot_load(what + ": " + error_text(error)));
}

// Far more than any kernel has, and far within the reach of 32-bit distances.
constexpr std::uint64_t max_size = 64u << 20;
constexpr std::size_t max_sections = 4096;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Reads the object's bytes with bounds checks; they may be unaligned.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : bytes_(bytes) {}

  std::string_view range(std::uint64_t offset, std::uint64_t size) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) refuse_object("it ends early");
    return bytes_.substr(offset, size);
  }
  template <class T>
  T item(std::uint64_t offset) const {
    T result;
    std::memcpy(&result, range(offset, sizeof(T)).data(), sizeof(T));
    return result;
  }
  // The section as an array of T.
  template <class T>
  std::vector<T> items(const Elf64_Shdr& section) const {
    const std::string_view data = range(section.sh_offset, section.sh_size);
    if (section.sh_entsize != sizeof(T) || data.size() % sizeof(T) != 0)
      refuse_object("a table is malformed");
    std::vector<T> result(data.size() / sizeof(T));
    if (!result.empty()) std::memcpy(result.data(), data.data(), data.size());
    return result;
  }
  // Zero-terminated text in a string section.
  std::string_view text(const Elf64_Shdr& strings, std::uint32_t offset) const {
    const std::string_view data = range(strings.sh_offset, strings.sh_size);
    const std::size_t end = data.find('\0', offset);
    if (end == std::string_view::npos) refuse_object("a name is malformed");
    return data.substr(offset, end - offset);
  }

 private:
  std::string_view bytes_;
};

std::vector<Elf64_Shdr> read_sections(const Bytes& bytes) {
  const auto header = bytes.item<Elf64_Ehdr>(0);
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_type != ET_REL || header.e_machine != EM_X86_64 ||
      header.e_shentsize != sizeof(Elf64_Shdr))
    refuse_object("it is not a relocatable ELF object for x86-64");
  if (header.e_shnum > max_sections) refuse_object("it has too many sections");
  std::vector<Elf64_Shdr> sections;
  for (std::uint64_t i = 0; i < header.e_shnum; ++i)
    sections.push_back(bytes.item<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr)));
  return sections;
}

// Memory of one protection. The parts follow each other in this order, each a whole number of pages.
enum Part { code, constants, data, num_parts };
constexpr int protection[num_parts] = {PROT_READ | PROT_EXEC, PROT_READ, PROT_READ | PROT_WRITE};

Part part_of(const Elf64_Shdr& section) {
  if (section.sh_flags & SHF_EXECINSTR) return code;
  return section.sh_flags & SHF_WRITE ? data : constants;
}

// A symbol's stub. It holds a jump to a symbol outside the object, whose
// distance may exceed 32 bits, and the symbol's address for code that loads it.
struct Stub {
  std::array<unsigned char, 6> jump = {0xff, 0x25, 2, 0, 0, 0};  // jmp *2(%rip), which is `address`
  std::array<unsigned char, 2> unused = {0xcc, 0xcc};
  std::uint64_t address = 0;
};
static_assert(sizeof(Stub) == 16);

// Maps a file that exists in memory alone over the pages, with their contents. Policies against memory that
// is written to and executed later (PR_SET_MDWE, seccomp, SELinux without execmem) allow it. Returns 0 or an
// error.
int replace_by_file(std::byte* pages, std::size_t bytes, int new_protection) {
  // No program is started from the file. A kernel may refuse files that allow it (vm.memfd_noexec).
  constexpr unsigned no_exec_seal = 8;  // MFD_NOEXEC_SEAL, since Linux 6.3
  File file(::memfd_create("flashjit", MFD_CLOEXEC | no_exec_seal));
  if (!file && errno == EINVAL) file = File(::memfd_create("flashjit", MFD_CLOEXEC));
  if (!file || !write_fully(file.get(), reinterpret_cast<const char*>(pages), bytes)) return errno;
  void* const mapped = ::mmap(pages, bytes, new_protection, MAP_PRIVATE | MAP_FIXED, file.get(), 0);
  return mapped == MAP_FAILED ? errno : 0;
}

void store(std::byte* place, std::uint64_t value, std::size_t size) {
  std::memcpy(place, &value, size);  // little-endian, like the machine
}

// Stores a 32-bit distance; throws if it does not fit.
void store_signed_32(std::byte* place, std::int64_t value) {
  if (value != static_cast<std::int32_t>(value)) refuse_object("a distance exceeds 32 bits");
  store(place, static_cast<std::uint64_t>(value), 4);
}

class Loader {
 public:
  explicit Loader(std::string_view object) : bytes_(object), sections_(read_sections(bytes_)) {
    for (const Elf64_Shdr& section : sections_) {
      if (section.sh_type != SHT_SYMTAB) continue;
      if (symbol_table_ || section.sh_link >= sections_.size())
        refuse_object("its symbol table is malformed");
      symbol_table_ = &section;
    }
    if (!symbol_table_) refuse_object("it has no symbols");
    symbols_ = bytes_.items<Elf64_Sym>(*symbol_table_);
    plan();
  }

  // Bytes to map; a whole number of pages.
  std::uint64_t size() const { return part_begin_[num_parts]; }

  // Fills `memory`, which is writable and zeroed, and protects it. Returns the object's functions.
  std::map<std::string, void*, std::less<>> load(std::byte* memory) {
    memory_ = memory;
    for (std::size_t i = 0; i < sections_.size(); ++i) {
      const Elf64_Shdr& section = sections_[i];
      if (!(section.sh_flags & SHF_ALLOC) || section.sh_type == SHT_NOBITS) continue;
      const std::string_view content = bytes_.range(section.sh_offset, section.sh_size);
      if (!content.empty()) std::memcpy(memory_ + places_[i], content.data(), content.size());
    }
    resolve();
    for (const Elf64_Shdr& section : sections_) relocate(section);
    for (int part = 0; part < num_parts; ++part) protect(static_cast<Part>(part));
    return std::move(functions_);
  }

 private:
  // Computes each section's offset from the beginning of the memory.
  void plan() {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    std::uint64_t end = symbols_.size() * sizeof(Stub);
    places_.resize(sections_.size());
    for (int part = 0; part < num_parts; ++part) {
      for (std::size_t i = 0; i < sections_.size(); ++i) {
        const Elf64_Shdr& section = sections_[i];
        if (!(section.sh_flags & SHF_ALLOC) || part_of(section) != part) continue;
        if (section.sh_flags & SHF_TLS) refuse_object("kernels may not have thread-local variables");
        const bool initialises = section.sh_type == SHT_INIT_ARRAY || section.sh_type == SHT_PREINIT_ARRAY;
        if (initialises) refuse_object("kernels may not have static initialisers");
        const std::uint64_t alignment = section.sh_addralign ? section.sh_addralign : 1;
        if (!std::has_single_bit(alignment) || alignment > page) refuse_object("an alignment is impossible");
        places_[i] = round_up(end, alignment);
        if (section.sh_size > max_size || places_[i] + section.sh_size > max_size)
          refuse_object("it is larger than any kernel");
        end = places_[i] + section.sh_size;
      }
      end = round_up(end, page);
      if (end > max_size) refuse_object("it is larger than any kernel");
      part_begin_[part + 1] = end;
    }
  }

  void protect(Part part) const {
    std::byte* const begin = memory_ + part_begin_[part];
    const std::size_t bytes = part_begin_[part + 1] - part_begin_[part];
    if (bytes == 0 || ::mprotect(begin, bytes, protection[part]) == 0) return;
    const int error = errno;
    if (part != code) fail("memory cannot be protected", error);
    if (const int file_error = replace_by_file(begin, bytes, protection[part]))
      throw Error(
          ErrorCode::device_failed,
          cannot_load("this process may not run code that it made: memory cannot be made executable (" +
                      error_text(error) + "), nor a file in memory be mapped as executable (" +
                      error_text(file_error) +
                      "). CPU kernels need one of the two: let the host's policy allow mprotect or "
                      "memfd_create and mmap with PROT_EXEC (systemd: MemoryDenyWriteExecute=no; SELinux: "
                      "execmem)"));
  }

  // Computes the address of every symbol that relocations may name, and writes the stubs.
  void resolve() {
    const Elf64_Shdr& names = sections_[symbol_table_->sh_link];
    std::string missing;
    for (const Elf64_Sym& symbol : symbols_) {
      std::uint64_t address = 0;
      const std::string_view name = bytes_.text(names, symbol.st_name);
      if (symbol.st_shndx == SHN_UNDEF && !name.empty()) {
        address = reinterpret_cast<std::uint64_t>(callable(name));
        if (!address) missing += (missing.empty() ? "" : ", ") + in_quotes(name);
      } else if (symbol.st_shndx < sections_.size() && (sections_[symbol.st_shndx].sh_flags & SHF_ALLOC)) {
        // A label may lie at a section's end; a function there would begin with the next section.
        const bool is_function = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
        const std::uint64_t size = sections_[symbol.st_shndx].sh_size;
        if (symbol.st_value > size || (is_function && symbol.st_value == size))
          refuse_object("a symbol lies outside its section");
        address = reinterpret_cast<std::uint64_t>(memory_) + places_[symbol.st_shndx] + symbol.st_value;
        if (ELF64_ST_BIND(symbol.st_info) != STB_LOCAL && is_function &&
            part_of(sections_[symbol.st_shndx]) == code)
          functions_.emplace(name, reinterpret_cast<void*>(address));
      }
      Stub stub;
      stub.address = address;
      std::memcpy(memory_ + addresses_.size() * sizeof(Stub), &stub, sizeof stub);
      addresses_.push_back(address);
    }
    if (!missing.empty()) refuse_object("kernels may not refer to: " + missing);
  }

  void relocate(const Elf64_Shdr& relocations) {
    if (relocations.sh_type == SHT_REL) refuse_object("its relocations are of another machine");
    if (relocations.sh_type != SHT_RELA) return;
    if (relocations.sh_info >= sections_.size()) refuse_object("its relocations are malformed");
    const Elf64_Shdr& section = sections_[relocations.sh_info];
    if (!(section.sh_flags & SHF_ALLOC)) return;
    for (const auto& item : bytes_.items<Elf64_Rela>(relocations)) {
      const std::uint64_t index = ELF64_R_SYM(item.r_info);
      if (index >= addresses_.size() || !addresses_[index]) refuse_object("a relocation names no symbol");
      const std::uint32_t type = ELF64_R_TYPE(item.r_info);
      const std::size_t width = type == R_X86_64_64 || type == R_X86_64_PC64 ? 8 : 4;
      if (section.sh_size < width || item.r_offset > section.sh_size - width)
        refuse_object("a relocation lies outside its section");
      std::byte* const place = memory_ + places_[relocations.sh_info] + item.r_offset;
      const auto here = reinterpret_cast<std::uint64_t>(place);
      const auto addend = static_cast<std::uint64_t>(item.r_addend);
      const std::uint64_t stub = reinterpret_cast<std::uint64_t>(memory_) + index * sizeof(Stub);
      const std::uint64_t near = symbols_[index].st_shndx == SHN_UNDEF ? stub : addresses_[index];
      switch (type) {
        case R_X86_64_64:
          store(place, addresses_[index] + addend, 8);
          break;
        case R_X86_64_PC64:
          store(place, addresses_[index] + addend - here, 8);
          break;
        case R_X86_64_PC32:
        case R_X86_64_PLT32:
          store_signed_32(place, static_cast<std::int64_t>(near + addend - here));
          break;
        case R_X86_64_GOTPCREL:
        case R_X86_64_GOTPCRELX:
        case R_X86_64_REX_GOTPCRELX:
          store_signed_32(place, static_cast<std::int64_t>(stub + offsetof(Stub, address) + addend - here));
          break;
        default:
          refuse_object("relocations of type " + std::to_string(type) + " are not those of a kernel");
      }
    }
  }

  const Bytes bytes_;
  const std::vector<Elf64_Shdr> sections_;
  const Elf64_Shdr* symbol_table_ = nullptr;
  std::vector<Elf64_Sym> symbols_;
  std::vector<std::uint64_t> places_;                      // offsets of sections
  std::array<std::uint64_t, num_parts + 1> part_begin_{};  // the code part begins with the stubs
  std::byte* memory_ = nullptr;
  std::vector<std::uint64_t> addresses_;  // addresses of symbols; 0: none
  std::map<std::string, void*, std::less<>> functions_;
};

}  // namespace

LoadedObject::LoadedObject(std::string_view object) {
  Loader loader(object);
  void* const memory =
      ::mmap(nullptr, loader.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("no memory", errno);
  memory_ = static_cast<std::byte*>(memory);
  size_ = loader.size();
  try {
    functions_ = loader.load(memory_);
  } catch (...) {
    ::munmap(memory_, size_);
    throw;
  }
}

LoadedObject::~LoadedObject() {
  ::munmap(memory_, size_);
}

void* LoadedObject::function(std::string_view name) const {
  void* const found = find(name);
  if (!found) refuse_object("the object has no function " + std::string(name));
  return found;
}

void* LoadedObject::find(std::string_view name) const {
  const auto found = functions_.find(name);
  return found == functions_.end() ? nullptr : found->second;
}

}  // namespace flashjit
