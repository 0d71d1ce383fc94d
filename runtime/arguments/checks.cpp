#include "runtime/arguments/checks.hpp"

#include <algorithm>
#include <climits>
#include <span>
#include <utility>
#include <vector>

#include "codegen/base/suggest.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/cuda/memory.hpp"

namespace flashjit {

std::string shape_text(const Tensor& t) {
  std::string s = "[";
  for (int i = 0; i < t.rank; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return s + "]";
}

namespace {

// Every name once, and no other.
void check_names(const AttentionSpec& spec, const AttentionArgs& args) {
  std::size_t given = 0;
  for (const NamedArgument& argument : args.named) {
    if (place_of_name(spec, argument.name) < 0) {
      std::vector<std::string> names;
      for (int i = 0; declared_at(spec, i); ++i) names.push_back(declared_at(spec, i).name());
      const std::vector<std::string_view> known(names.begin(), names.end());
      refuse_argument("named argument ", in_quotes(argument.name), " was given, but the spec ",
                      known.empty() ? "declares no tables and scalars" : "declares " + listed(known),
                      known.empty() ? "" : did_you_mean(argument.name, known));
    }
    for (const NamedArgument& other : args.named.first(given))
      if (other.name == argument.name)
        refuse_argument("named argument ", in_quotes(argument.name), " was given before: give it once");
    ++given;
  }
  if (given == static_cast<std::size_t>(count_of_names(spec))) return;
  const auto is_given = [&](const std::string& name) {
    return std::any_of(args.named.begin(), args.named.end(),
                       [&](const auto& one) { return one.name == name; });
  };
  for (const DeclaredTable& table : spec.tables)
    if (!is_given(table.name))
      refuse_argument("table ", table.name, " is missing: the spec's formulas read it as ",
                      to_string(table.dtype), " ", shape_text(table.shape, ""),
                      "; give it among the named arguments");
  for (const DeclaredTable& table : spec.tables)
    if (table.grad && !is_given(gradient_name(table)))
      refuse_argument(gradient_name(table), " is missing: table ", table.name,
                      " has \"grad\": true, so a backward writes its gradient, as fp32 ",
                      shape_text(table.shape, ""), "; give it among the named arguments, or leave grad out");
  for (const DeclaredScalar& scalar : spec.scalars)
    if (!is_given(scalar.name))
      refuse_argument("scalar ", scalar.name, " is missing: the spec's formulas read it as ",
                      to_string(scalar.dtype), "; give it among the named arguments");
}

}  // namespace

void check_presence(const AttentionSpec& spec, const AttentionArgs& args) {
  const ArgumentSet given = given_arguments(args);
  const ArgumentSets sets = arguments_of(spec);
  if (!args.named.empty() || !spec.tables.empty() || !spec.scalars.empty()) check_names(spec, args);
  if (!(given & ~sets.allowed) && !(sets.required & ~given)) return;
  for (const Argument& a : arguments) {
    if (given & ~sets.allowed & bit_of(a))
      refuse_argument(a.name, " was given, but ", why_not_allowed(spec, a));
    if (sets.required & ~given & bit_of(a))
      refuse_argument(a.name, " is missing: this kernel needs it as ", a.layout_of(spec));
  }
}

namespace {

// Rows and keys of a neighbourhood are the places of its array.
void check_places(const FormulaMask& mask, const Shape& s) {
  const int longest = std::max(s.seqlen_q, s.seqlen_k);
  if (longest <= mask.places) return;
  refuse_argument("the shape has ", s.seqlen_q > mask.places ? "seqlen_q " : "seqlen_k ",
                  s.seqlen_q > mask.places ? s.seqlen_q : s.seqlen_k,
                  ", and mask neighbourhood has an array of ", mask.places,
                  " places, which are the rows and keys: at most ", mask.places,
                  " would work, or a neighbourhood of a larger shape");
}

}  // namespace

void check_shape(const AttentionSpec& spec, const Shape& s) {
  const bool countable = s.batch >= 0 && s.seqlen_q >= 0 && s.seqlen_k >= 0 && s.page_size >= 0 &&
                         s.total_q >= 0 && s.total_k >= 0;
  const bool has_groups =
      s.num_heads_q == 0 ? s.num_heads_kv >= 0
                         : s.num_heads_q > 0 && s.num_heads_kv > 0 && s.num_heads_q % s.num_heads_kv == 0;
  if (countable && has_groups && (s.page_size == 0 || spec.paged)) {
    for (const Mask& mask : spec.mask)
      if (const auto* formula = std::get_if<FormulaMask>(&mask); formula && formula->places != 0)
        check_places(*formula, s);
    return;
  }
  if (!has_groups)
    refuse_argument("the shape has num_heads_q ", s.num_heads_q, " and num_heads_kv ", s.num_heads_kv,
                    ": neither may be negative, and the first must be a multiple of the second");
  const OperationInfo& op = info_of(spec.op);
  if (countable && (op.caches == When::never || op.copies))
    refuse_argument("the shape has page_size ", s.page_size, ": a kernel of op ", op.name,
                    " serves every page size; leave it 0");
  if (countable)
    refuse_argument(
        "the shape has page_size ", s.page_size,
        ", but the spec has \"paged\": false: leave it 0, or ask for a kernel with \"paged\": true");
  const std::pair<const char*, std::int64_t> sizes[] = {{"batch", s.batch},       {"seqlen_q", s.seqlen_q},
                                                        {"seqlen_k", s.seqlen_k}, {"page_size", s.page_size},
                                                        {"total_q", s.total_q},   {"total_k", s.total_k}};
  for (const auto& [name, size] : sizes)
    if (size < 0) refuse_argument("the shape has ", name, " ", size, ": it must be at least 0");
}

const Tensor& require(const Argument& argument, const AttentionSpec& spec, const AttentionArgs& args,
                      Device device) {
  const char* const name = argument.name;
  const std::optional<Tensor>& given = args.*argument.tensor();
  if (!given) refuse_argument(name, " is missing: this kernel needs it as ", argument.layout_of(spec));
  const Tensor& t = *given;
  const int rank = argument.rank_of(spec);
  const DType dtype = argument.dtype(spec);
  if (t.rank != rank) {
    AttentionSpec of_tokens = spec;
    of_tokens.kv_scale = KvScale::token_head;
    const bool has_tokens = argument.layout.of_scales && t.rank == argument.rank_of(of_tokens);
    refuse_argument(name, " has rank ", t.rank, ", this kernel takes ", rank,
                    rank == 1 ? " dimension, " : " dimensions, ", argument.layout_of(spec),
                    has_tokens
                        ? "; a kernel with \"kv_scale\": \"token_head\" takes a scale of each token and head"
                        : "");
  }
  if (t.dtype != dtype)
    refuse_argument(name, " has dtype ", to_string(t.dtype), ", this kernel takes ", to_string(dtype));
  require_memory(name, t, device);
  return t;
}

void require_memory(const char* name, const Tensor& t, Device device) {
  if (t.device != device)
    refuse_argument(name, " is on ", t.device.str(), ", this kernel runs on ", device.str(),
                    t.device.kind == Device::Kind::cpu && device.kind == Device::Kind::cpu
                        ? ": a CPU's index is 0"
                        : ": copy the tensor there");
  for (int i = 0; i < t.rank; ++i)
    if (t.shape[i] < 0 || t.shape[i] > INT_MAX)
      refuse_argument(name, " has shape ", shape_text(t), ": every size must be between 0 and 2147483647");
  if (!product_of(std::span(t.shape).first(static_cast<std::size_t>(t.rank))))
    refuse_argument(name, " has shape ", shape_text(t), ": more elements than 64 bits count");
  if (!has_elements(t)) return;
  if (!t.data) refuse_argument(name, " has a null data pointer but shape ", shape_text(t));
  // The driver knows where the memory really is. Asking costs
  // 40 ns; a fault in a kernel would destroy the host's context.
  if (device.kind == Device::Kind::cuda) cuda::check_device_pointer(t.data, device.index, name);
}

void require_shape(const char* name, const Tensor& t, int dim, std::int64_t expected, const char* what) {
  if (t.shape[dim] != expected)
    refuse_argument(name, " has shape ", shape_text(t), ": dimension ", dim, " must be ", expected, ", ",
                    what);
}

bool has_elements(const Tensor& t) {
  return std::find(t.shape.begin(), t.shape.begin() + t.rank, 0) == t.shape.begin() + t.rank;
}

void require_address(const char* name, const Tensor& t, std::size_t bytes, const char* why) {
  if (reinterpret_cast<std::uintptr_t>(t.data) % bytes && has_elements(t))
    refuse_argument(name, "'s data pointer is not aligned to ", bytes, " bytes", why);
}

void require_contiguous_rows(const char* name, const Tensor& t) {
  const int last = t.rank - 1;
  if (t.shape[last] > 1 && t.strides[last] != 1 && has_elements(t))
    refuse_argument(name, "'s last dimension has stride ", t.strides[last],
                    ", it must be contiguous (stride 1)");
}

void require_table(const char* name, const Tensor& t) {
  std::int64_t stride = 1;
  bool contiguous = true;
  for (int i = t.rank - 1; i >= 0; --i) {
    contiguous = contiguous && (t.shape[i] <= 1 || t.strides[i] == stride);
    stride *= t.shape[i];
  }
  if (!contiguous && stride != 0) refuse_argument(name, " must be contiguous");
  require_address(name, t, size_of(t.dtype));
}

void require_alignment(const char* name, const Tensor& t) {
  const bool cuda = t.device.kind == Device::Kind::cuda;
  const std::size_t element = size_of(t.dtype);
  const std::size_t bytes = cuda ? 16 : element;
  require_address(name, t, bytes, cuda ? ", which GPU kernels need" : ", which its dtype needs");
  require_contiguous_rows(name, t);
  if (!cuda) return;
  const auto elements = static_cast<std::int64_t>(bytes / element);
  for (int i = 0; i + 1 < t.rank; ++i)
    if (stride(t, i) % elements && has_elements(t))
      refuse_argument(name, "'s stride ", t.strides[i], " of dimension ", i, " is not a multiple of ",
                      elements, " elements (16 bytes), which GPU kernels need");
}

device::TensorView view(const Tensor& t) {
  if (!has_elements(t)) return {t.data, 0, 0, 0};
  if (t.rank == 4) return {t.data, stride(t, 0), stride(t, 1), stride(t, 2)};
  return {t.data, 0, stride(t, 0), stride(t, 1)};
}

}  // namespace flashjit
