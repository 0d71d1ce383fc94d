// The operations, one row of a table for each. What code outside of an operation's own files (its kernel
// families, its runtime, its oracle) wants to know about it stands in its row.
#pragma once

#include <cstddef>
#include <iterator>
#include <optional>

#include "../base/error.hpp"

namespace flashjit {

// Every operation, by its name in JSON. The tables of runtimes (runtime/operation.cpp) and of oracles
// (tools/verify/oracle.cpp) are made of this list: they look for NAME_runtime and NAME_oracle.
#define FLASHJIT_FOR_EACH_OPERATION(X) \
  X(forward)                           \
  X(backward)                          \
  X(decode)                            \
  X(merge)                             \
  X(append_kv)                         \
  X(make_block_lists)                  \
  X(copy_kv)

#define FLASHJIT_ENUMERATOR(name) name,
enum class Operation { FLASHJIT_FOR_EACH_OPERATION(FLASHJIT_ENUMERATOR) };
#undef FLASHJIT_ENUMERATOR

// Which launches of an operation do something: none, those of specs with a certain field, or all.
enum class When { never, by_field, always };

// The floating-point operations of a launch by the customary count: the sum of these terms.
struct CustomaryFlops {
  double per_column = 0;   // for each column of K and V, of each pair that the masks keep and each query head
  double per_element = 0;  // for each element of the tensor `rows`
  double per_rotated = 0;  // for each element that a rotary embedding turns
  double per_pair = 0;     // for each pair of a row and a key, of each head that has block lists of its own
};

// The memory traffic that bounds an operation. `bench` reports its rate, and measures the same traffic of a
// plain kernel or of the driver beside it.
enum class Traffic {
  none,         // arithmetic bounds it
  reads_cache,  // each key and value that a row sees is read once
  copies_rows,  // new rows are read, and written to the cache
  moves_rows,   // rows of a cache are read, and written to other places
};

struct OperationInfo {
  Operation op;
  const char* name;
  // The input whose last four dimensions are batch, seqlen_q, heads and head_dim (packed: total, heads,
  // head_dim). Sizes of a problem are taken from it, and oracles choose rows of it.
  const char* rows;
  CustomaryFlops flops;
  Traffic traffic = Traffic::none;
  // Rows attend to keys: there are scores, which masks and formulas may change, and a softmax.
  bool attends = false;
  // A launch has few rows of each sequence. Beyond 64 of them the preferred config stays the same, and models
  // of manifests pack no rows unless the cache lies in pages.
  bool few_rows = false;
  // k and v are a cache: they have room for more keys than a sequence has. By the field: `paged`.
  When caches = When::never;
  // The launch writes the rows k_new and v_new to the cache. By the field: `append`.
  When appends = When::never;
  // The launch copies rows of the caches k_from and v_from, with their scales, to other rows of k and v.
  bool copies = false;
  // It writes gradients, also of learned tables and sink logits.
  bool writes_gradients = false;
  // It writes the lists of the spec's block_sparse mask. Of q and k it reads the sizes alone.
  bool makes_lists = false;
  // A launch takes outputs of a launch of this operation as inputs.
  std::optional<Operation> after = {};
  // Manifests may name it for a model.
  bool of_models = false;
};

// In the order of the enumerators.
inline constexpr OperationInfo operation_table[] = {
    {.op = Operation::forward,
     .name = "forward",
     .rows = "q",
     .flops = {.per_column = 2},
     .attends = true,
     .caches = When::by_field,
     .of_models = true},
    {.op = Operation::backward,
     .name = "backward",
     .rows = "q",
     .flops = {.per_column = 5},  // five products, where a forward has two
     .attends = true,
     .writes_gradients = true,
     .after = Operation::forward,
     .of_models = true},
    {.op = Operation::decode,
     .name = "decode",
     .rows = "q",
     .flops = {.per_column = 2},
     .traffic = Traffic::reads_cache,
     .attends = true,
     .few_rows = true,
     .caches = When::always,
     .appends = When::by_field,
     .of_models = true},
    {.op = Operation::merge, .name = "merge", .rows = "parts_o", .flops = {.per_element = 2}},
    {.op = Operation::append_kv,
     .name = "append_kv",
     .rows = "k_new",
     .flops = {.per_rotated = 3},
     .traffic = Traffic::copies_rows,
     .caches = When::always,
     .appends = When::always,
     .of_models = true},
    {.op = Operation::make_block_lists,
     .name = "make_block_lists",
     .rows = "q",
     .flops = {.per_pair = 1},
     .makes_lists = true},
    {.op = Operation::copy_kv,
     .name = "copy_kv",
     .rows = "k_from",
     .flops = {},
     .traffic = Traffic::moves_rows,
     .caches = When::always,
     .copies = true,
     .of_models = true},
};

inline constexpr std::size_t num_operations = std::size(operation_table);

#define FLASHJIT_COUNT_ONE(name) +1
static_assert(num_operations == 0 FLASHJIT_FOR_EACH_OPERATION(FLASHJIT_COUNT_ONE),
              "every operation has a row in operation_table");
#undef FLASHJIT_COUNT_ONE
static_assert(
    [] {
      for (std::size_t i = 0; i < num_operations; ++i)
        if (static_cast<std::size_t>(operation_table[i].op) != i) return false;
      return true;
    }(),
    "the rows of operation_table are in the order of the enumerators");

constexpr const OperationInfo& info_of(Operation op) {
  const auto row = static_cast<std::size_t>(op);
  if (row >= num_operations) throw Error(ErrorCode::internal, "no row of operation_table has the operation");
  return operation_table[row];
}

}  // namespace flashjit
