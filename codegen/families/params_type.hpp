// Makes the type of a kernel's params from its struct of templates/shared and the spec.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "codegen/families/kernel_source.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/spec.hpp"
#include "shared/formula_params.h"
#include "shared/gathered.h"
#include "shared/kv_scale_params.h"
#include "shared/last_keys.h"
#include "shared/offsets.h"
#include "shared/paged_forward_params.h"
#include "shared/rotary.h"

namespace flashjit {

// The name of a struct, without its namespaces.
template <class Struct>
constexpr std::string_view name_of_struct() {
  // "... [Struct = flashjit::device::MergeParams]" by Clang, "... [with Struct = device::MergeParams; ...]"
  // by GCC.
  constexpr std::string_view function = __PRETTY_FUNCTION__;
  constexpr std::size_t begin = function.find("Struct = ");
  constexpr std::string_view name = function.substr(begin, function.find_first_of(";]", begin) - begin);
  return name.substr(name.rfind(':') + 1);
}
// An address for each struct.
template <class Struct>
inline constexpr char id_of_struct = 0;

// The same params, of a kernel that has a second one.
template <class Second>
ParamsType with_second(ParamsType type) {
  type.second = &id_of_struct<Second>;
  type.second_bytes = sizeof(Second);
  return type;
}

namespace params_type {

template <class Params>
constexpr std::size_t bytes_with(bool offsets) {
  return offsets ? sizeof(device::WithOffsets<Params>) : sizeof(Params);
}
template <class Params>
constexpr std::size_t bytes_with(ParamsType::Formulas formulas, bool offsets) {
  using enum ParamsType::Formulas;
  return formulas == none   ? bytes_with<Params>(offsets)
         : formulas == read ? bytes_with<device::WithFormulas<Params>>(offsets)
                            : bytes_with<device::WithGradients<Params>>(offsets);
}
template <class Params>
constexpr std::size_t bytes_with(const ParamsType& type) {
  return type.quantised ? bytes_with<device::Quantised<Params>>(type.formulas, type.offsets)
                        : bytes_with<Params>(type.formulas, type.offsets);
}
// `pairs` of rotary columns have their turns in the params.
template <class Params>
constexpr std::size_t bytes_rotated(int pairs) {
  const std::size_t more = pairs > 1 ? static_cast<std::size_t>(pairs - 1) : 0;
  return sizeof(device::Rotated<Params, 1>) + more * sizeof(device::u64);
}
template <class Params>
constexpr std::size_t bytes_of_append(bool quantised, bool rotated, int pairs) {
  using Q = device::Quantised<Params>;
  if (rotated) return quantised ? bytes_rotated<Q>(pairs) : bytes_rotated<Params>(pairs);
  return quantised ? sizeof(Q) : sizeof(Params);
}

}  // namespace params_type

// Own with what a spec adds. With `has_pages` the kernel of a paged spec has Paged<Own>.
template <class Own, bool has_pages = false>
ParamsType params_of(const AttentionSpec& spec) {
  using enum ParamsType::Formulas;
  ParamsType type{.own = &id_of_struct<Own>, .text = std::string(name_of_struct<Own>())};
  type.paged = has_pages && spec.paged;
  type.quantised = spec.has_kv_scales();
  type.formulas = has_gradients(spec) ? gradients : reads_formula_params(spec) ? read : none;
  type.offsets = spec.offsets;
  const auto wrap = [&](const char* in) { type.text = std::string(in) + "<" + type.text + ">"; };
  if (type.paged) wrap("Paged");
  if (type.quantised) wrap("Quantised");
  if (type.formulas != none) wrap(type.formulas == read ? "WithFormulas" : "WithGradients");
  if (type.offsets) wrap("WithOffsets");
  type.gathered = spec.gathered;
  if (type.gathered) {
    wrap("WithGathered");
    type.bytes = sizeof(device::WithGathered<Own>);
    return type;
  }
  type.bytes =
      type.paged ? params_type::bytes_with<device::Paged<Own>>(type) : params_type::bytes_with<Own>(type);
  return type;
}

// The params of a kernel that appends. `last_keys`: it is a step of a decode.
template <class Own>
ParamsType params_of_append(const AttentionSpec& spec, bool last_keys) {
  ParamsType type{.own = &id_of_struct<Own>};
  type.quantised = spec.has_kv_scales();
  type.last_keys = last_keys;
  type.rotated = spec.rotary.has_value();
  const int dim = spec.rotary ? spec.rotary->columns(spec.head_dim) : 0;
  const int pairs = spec.rotary && spec.rotary->tables ? 0 : dim / 2;
  type.bytes = last_keys
                   ? params_type::bytes_of_append<device::LastKeys<Own>>(type.quantised, type.rotated, pairs)
                   : params_type::bytes_of_append<Own>(type.quantised, type.rotated, pairs);
  return type;
}

}  // namespace flashjit
