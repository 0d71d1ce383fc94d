// The runtime of every operation.
#pragma once

#include <optional>

#include "runtime/operation.hpp"
#include "templates/shared/formula_params.h"
#include "templates/shared/forward_params.h"
#include "templates/shared/page_table.h"

namespace flashjit {

extern const OperationRuntime forward_runtime;
extern const OperationRuntime backward_runtime;
extern const OperationRuntime decode_runtime;
extern const OperationRuntime merge_runtime;
extern const OperationRuntime append_runtime;
extern const OperationRuntime block_lists_runtime;

// Adds the step of a forward's kernel on a GPU. The kernel's spec may be a decode's.
void plan_cuda_forward(const PlannedKernel& kernel, const device::ForwardParams& params,
                       const device::PageTable& pages, const std::optional<device::FormulaParams>& formulas,
                       Launch& launch);

}  // namespace flashjit
