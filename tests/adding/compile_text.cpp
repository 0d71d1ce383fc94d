// compile_text TARGET <TEXT: NVRTC compiles a rendered text with its headers folded in, as it compiles
// kernels. Exits with 77 where there is no NVRTC.
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>
#include <string>

#include "codegen/base/error.hpp"
#include "runtime/compiler.hpp"

int main(int, char** arguments) {
  using namespace flashjit;
  try {
    const KernelSource source{.target = Target::parse(arguments[1]),
                              .config = {},
                              .text = std::string(std::istreambuf_iterator<char>(std::cin), {}),
                              .headers = {},
                              .steps = {},
                              .options = {}};
    const CompiledKernel kernel = nvrtc_compiler()->compile(source);
    for (const CompiledStep& step : kernel.steps)
      std::printf("%s: %d registers, %d bytes of spills\n", step.function.c_str(), step.registers,
                  step.spill_bytes);
    return kernel.steps.empty();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n%s\n", error.what(), error.detail().c_str());
    return error.code() == ErrorCode::compiler_unavailable ? 77 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
