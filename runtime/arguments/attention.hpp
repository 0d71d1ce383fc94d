// Checks AttentionArgs and converts them to the params that device code reads.
#pragma once

#include <cstdint>
#include <optional>

#include "runtime/arguments/formulas.hpp"
#include "runtime/arguments/pages.hpp"
#include "runtime/arguments/scales.hpp"
#include "runtime/flashjit.hpp"
#include "templates/shared/forward_params.h"
#include "templates/shared/gathered.h"
#include "templates/shared/offsets.h"

namespace flashjit {

// Checked arguments that every attention operation has beside its problem.
struct CheckedAttention {
  device::TensorView q{}, k{}, v{}, o{};
  device::TensorView lse{};  // data null where the spec has no lse
  CheckedPages pages{};      // with paged
  float scale = 0, scale_log2 = 0;
  std::optional<device::OffsetParams> offsets{};
  std::optional<device::GatheredKeys> gathered{};  // without padding
  Shape shape{};
  bool empty = false;  // no query row
};
// Fill the problem's heads, and then its batch and lengths. All that they read of q and k has been checked by
// itself. Throw invalid_argument.
void check_heads(const Tensor& q, const Tensor& k, device::ProblemParams& problem);
CheckedPages check_sequences(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                             int most_rows, device::ProblemParams& problem);
// Fills the problem. Packed sequences count as at most most_rows long. Throws invalid_argument naming the
// argument. Touches no tensor memory.
CheckedAttention check_attention(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                                 int most_rows, device::ProblemParams& problem);
// FLASHJIT_CHECK=1: tables in a GPU's memory are checked, too, which waits for the GPU.
bool checks_device_data();
// Throws invalid_argument for wrong lengths, lists and page ids: always on a CPU, on a GPU with
// FLASHJIT_CHECK=1.
void check_data(const AttentionSpec& spec, Device device, const device::ProblemParams& problem,
                const device::PageTable& pages, const std::optional<device::OffsetParams>& offsets);

// Checked arguments of a forward.
struct CheckedArguments {
  device::ForwardParams params{};
  device::PageTable pages{};  // with paged
  std::optional<device::FormulaParams> formulas{};
  std::optional<CheckedKvScales> kv_scales{};
  std::optional<device::OffsetParams> offsets{};
  std::optional<device::GatheredKeys> gathered{};
  Shape shape{};
  bool empty = false;  // no query rows: nothing to launch
};

// Throws invalid_argument; the message names the argument. Reads no tensor memory,
// except tables of lengths and lists: always on a CPU, on a GPU if FLASHJIT_CHECK=1.
CheckedArguments check_arguments(const AttentionSpec& spec, Device device, const AttentionArgs& args);

}  // namespace flashjit
