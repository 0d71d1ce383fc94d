#include "tools/verify/npy.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>
#include <string_view>

#include "tools/verify/element.hpp"
#include "tools/verify/input_file.hpp"

namespace flashjit::verify {
namespace {

constexpr std::string_view magic = "\x93NUMPY";

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, path + ": " + what);
}

// The text after 'key': in the header's Python dictionary.
std::string_view field(const std::string& path, std::string_view header, std::string_view key) {
  const std::size_t at = header.find(std::string(1, '\'').append(key).append(1, '\''));
  const std::size_t colon = at == std::string_view::npos ? at : header.find(':', at);
  if (colon == std::string_view::npos) refuse(path, "the .npy header has no '" + std::string(key) + "'");
  std::string_view rest = header.substr(colon + 1);
  const std::size_t start = rest.find_first_not_of(' ');
  return start == std::string_view::npos ? std::string_view{} : rest.substr(start);
}

std::size_t width_of(const std::string& path, const std::string& descr) {
  if (descr == "<i8") return 8;
  if (descr == "<f4" || descr == "<i4") return 4;
  if (descr == "<f2" || descr == "<u2") return 2;
  if (descr == "|i1" || descr == "|u1") return 1;
  refuse(path, "elements are '" + descr +
                   "'; supported are <f4, <f2, <u2 (the bits of bf16), <i8, <i4, |i1 and |u1 (also "
                   "the bits of fp8)");
}

std::vector<std::int64_t> parse_shape(const std::string& path, std::string_view text) {
  std::vector<std::int64_t> shape;
  const std::size_t close = text.find(')');
  if (text.empty() || text[0] != '(' || close == std::string_view::npos)
    refuse(path, "the .npy header's shape is no tuple");
  text = text.substr(1, close - 1);
  while (text.find_first_not_of(" ,") != std::string_view::npos) {
    text.remove_prefix(text.find_first_not_of(" ,"));
    std::int64_t size = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
    if (error != std::errc() || size < 0)
      refuse(path, "the .npy header's shape holds something else than sizes");
    shape.push_back(size);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  }
  return shape;
}

}  // namespace

NpyArray read_npy(const std::string& path) {
  std::ifstream file = open_input(path, "a .npy file would work");
  file.seekg(0, std::ios::end);
  const auto size = static_cast<std::uint64_t>(file.tellg());
  file.seekg(0);
  unsigned char start[12] = {};
  file.read(reinterpret_cast<char*>(start), 8);
  if (!file || std::string_view(reinterpret_cast<char*>(start), magic.size()) != magic)
    refuse(path, "is no .npy file");
  const int version = start[6];
  if (version < 1 || version > 3)
    refuse(path, "has .npy format version " + std::to_string(version) + "; supported are 1 to 3");
  const int width = version == 1 ? 2 : 4;
  file.read(reinterpret_cast<char*>(start) + 8, width);
  std::uint64_t length = 0;
  for (int i = width - 1; i >= 0; --i) length = length << 8 | start[8 + i];
  const std::uint64_t data_start = 8 + static_cast<std::uint64_t>(width) + length;
  if (!file || data_start > size) refuse(path, "ends within its header");
  std::string header(length, '\0');
  file.read(header.data(), static_cast<std::streamsize>(length));

  NpyArray array;
  const std::string_view descr = field(path, header, "descr");
  if (descr.empty() || descr[0] != '\'') refuse(path, "holds records; supported are plain arrays");
  array.descr = descr.substr(1, descr.find('\'', 1) - 1);
  if (!field(path, header, "fortran_order").starts_with("False")) {
    refuse(path, "is in Fortran order; save numpy.ascontiguousarray(x)");
  }
  array.shape = parse_shape(path, field(path, header, "shape"));
  std::uint64_t bytes = width_of(path, array.descr);
  for (const std::int64_t extent : array.shape) {
    const auto n = static_cast<std::uint64_t>(extent);
    if (n != 0 && bytes > std::numeric_limits<std::uint64_t>::max() / n)
      refuse(path, "has a shape beyond all memory");
    bytes *= n;
  }
  if (size - data_start != bytes) {
    refuse(path, "holds " + std::to_string(size - data_start) + " bytes of data where its shape asks for " +
                     std::to_string(bytes));
  }
  array.data.resize(bytes);
  file.read(reinterpret_cast<char*>(array.data.data()), static_cast<std::streamsize>(bytes));
  if (!file) refuse(path, "could not be read to its end");
  return array;
}

namespace {

// The type of each dtype in a file. NumPy has no bf16 and no 8-bit floats; float32 holds them exactly.
struct FileType {
  DType dtype;
  const char* descr;
  const char* bits = nullptr;  // the type that its own bits have, if it is written as float32
};
constexpr FileType file_types[] = {{DType::fp32, "<f4"},
                                   {DType::fp16, "<f2"},
                                   {DType::bf16, "<f4", "<u2"},
                                   {DType::fp8_e4m3, "<f4", "|u1"},
                                   {DType::fp8_e5m2, "<f4", "|u1"},
                                   {DType::int64, "<i8"},
                                   {DType::int32, "<i4"},
                                   {DType::int8, "|i1"},
                                   {DType::uint8, "|u1"}};
const FileType& file_type_of(DType dtype) {
  return *std::find_if(std::begin(file_types), std::end(file_types),
                       [&](const FileType& type) { return type.dtype == dtype; });
}
// Whether a file's elements are of the dtype, bit by bit.
bool has_bits_of(const FileType& type, const std::string& descr) {
  return descr == (type.bits ? type.bits : type.descr);
}

}  // namespace

std::vector<std::byte> elements_as(const NpyArray& array, DType dtype) {
  const FileType& type = file_type_of(dtype);
  if (has_bits_of(type, array.descr)) return array.data;
  const bool floating = std::string_view(type.descr) == "<f4" || std::string_view(type.descr) == "<f2";
  if (!floating || (array.descr != "<f4" && array.descr != "<f2")) {
    throw Error(ErrorCode::invalid_argument, "elements '" + array.descr + "' cannot become " +
                                                 to_string(dtype) +
                                                 "; <f4 and <f2 become any floating type, <u2 are the bits "
                                                 "of bf16 and |u1 of fp8, <i8 and <i4 are "
                                                 "int64 and int32, |i1 and |u1 are int8 and uint8");
  }
  const DType from = array.descr == "<f4" ? DType::fp32 : DType::fp16;
  const auto count = static_cast<std::int64_t>(array.data.size() / size_of(from));
  std::vector<std::byte> out(static_cast<std::size_t>(count) * size_of(dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    store_element(out.data(), dtype, i, static_cast<float>(load_element(array.data.data(), from, i)));
  }
  return out;
}

void write_npy(const std::string& path, const Tensor& tensor) {
  const FileType& type = file_type_of(tensor.dtype);
  const char* const descr = type.descr;
  const DType dtype = type.bits ? DType::fp32 : tensor.dtype;
  std::string header = std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (";
  std::int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    header += std::to_string(tensor.shape[i]) + ",";
    count *= tensor.shape[i];
  }
  header += "), }";
  header.resize((header.size() + 11 + 63) / 64 * 64 - 11, ' ');  // the data begin at a multiple of 64 bytes
  header += '\n';
  std::string bytes(magic);
  bytes += std::string("\x01\x00", 2);
  bytes += static_cast<char>(header.size() & 0xff);
  bytes += static_cast<char>(header.size() >> 8);
  bytes += header;
  const std::size_t data_start = bytes.size();
  bytes.resize(data_start + static_cast<std::size_t>(count) * size_of(dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t offset = 0;
    for (std::int64_t d = tensor.rank - 1, rest = i; d >= 0; rest /= tensor.shape[d], --d) {
      offset += rest % tensor.shape[d] * tensor.strides[d];
    }
    if (dtype == tensor.dtype) {
      const auto size = static_cast<std::int64_t>(size_of(dtype));
      std::memcpy(bytes.data() + data_start + i * size, static_cast<const char*>(tensor.data) + offset * size,
                  size_of(dtype));
    } else {
      store_element(bytes.data() + data_start, dtype, i,
                    static_cast<float>(load_element(tensor.data, tensor.dtype, offset)));
    }
  }
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw Error(ErrorCode::invalid_argument, path + ": cannot be written");
}

}  // namespace flashjit::verify
