// The rows that append_kv, or a decode that appends, writes into the caches: checked and made into a step.
#pragma once

#include <optional>

#include "runtime/arguments/scales.hpp"
#include "runtime/operation.hpp"
#include "templates/shared/append_params.h"
#include "templates/shared/rotary.h"

namespace flashjit {

struct CheckedAppend : device::Rotated<device::AppendParams, device::most_rotary_pairs> {
  // The rows are the last keys of their batch entries.
  struct LastKeys {
    const int* seqlens_k;  // null: seqlen_k
    int seqlen_k;
  };
  std::optional<CheckedKvScales> scales{};
  std::optional<LastKeys> last_keys{};  // of a decode
};

// Each throws invalid_argument and touches no tensor memory but scales of a tensor or of heads on a CPU.

// A table of k_new's tokens.
void require_of_tokens(const char* name, const Tensor& t, const Tensor& k_new);
// Checks k_new, v_new and the caches, and sets all but the batch and where the rows go.
void check_new_rows(const AttentionSpec& spec, Device device, const AttentionArgs& args, CheckedAppend& p);
// Checks the page table. The batch has been set.
void check_append_pages(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                        CheckedAppend& p);
// Checks what is left: rotary embedding, and that scales share memory with nothing. Everything else has been
// checked.
void check_conversions(const AttentionSpec& spec, Device device, const AttentionArgs& args, CheckedAppend& p);

// Add the step. There is at least one token, and a head.
void plan_cuda_append(const PlannedKernel& kernel, int num_warps, const CheckedAppend& checked,
                      Launch& launch);
void plan_cpu_append(const PlannedKernel& kernel, const CheckedAppend& checked, Launch& launch);

}  // namespace flashjit
