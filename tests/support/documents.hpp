// Packed documents as data of a mask's formula.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tools/verify/random_names.hpp"

namespace flashjit::testing_support {

// Documents of so many keys.
inline verify::NamedData documents_of(int length, int batch, int seqlen_k) {
  verify::NamedTable table{
      .name = "document", .dtype = DType::int32, .shape = {batch, seqlen_k}, .elements = {}};
  std::vector<std::int32_t> ids;
  for (int i = 0; i < batch * seqlen_k; ++i) ids.push_back((i % seqlen_k + i / seqlen_k * 7) / length);
  table.elements.resize(ids.size() * sizeof ids[0]);
  std::memcpy(table.elements.data(), ids.data(), table.elements.size());
  return {.tables = {table}, .scalars = {}};
}

}  // namespace flashjit::testing_support
