// The runtimes of all operations: NAME.cpp of this folder defines NAME_runtime.
#pragma once

#include "runtime/operation.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/forward_params.h"
#include "templates/shared/page_table.h"

namespace flashjit {

#define FLASHJIT_RUNTIME(name) extern const OperationRuntime name##_runtime;
FLASHJIT_FOR_EACH_OPERATION(FLASHJIT_RUNTIME)
#undef FLASHJIT_RUNTIME

// Adds the step of a forward's kernel on a GPU. The kernel's spec may be a decode's.
void plan_cuda_forward(const PlannedKernel& kernel, const device::ForwardParams& params,
                       const device::PageTable& pages, const AddedParams& added, void* workspace,
                       Launch& launch);

}  // namespace flashjit
