#pragma once

#include <memory>

#include "runtime/executable.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

struct Kernel::Impl {
  KernelInfo info;
  std::string info_json;
  Device device;
  std::unique_ptr<Executable> executable;
};

}  // namespace flashjit
