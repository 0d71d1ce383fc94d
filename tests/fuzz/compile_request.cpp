// Fuzzes requests for kernels: what is accepted has a kernel, and is accepted again as an engine would write
// it.
#include "tools/serve/compile_request.hpp"

#include "runtime/build.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::accepted([&] {
    const serve::CompileRequest request = serve::parse_compile_request(fuzz::text_of(data, size));
    FUZZ_CHECK(!request.source.text.empty());
    const std::string text = compile_request_text(request.spec, request.source.target, request.source.config,
                                                  request.key.digest());
    FUZZ_CHECK(serve::parse_compile_request(text).key == request.key);
  });
  return 0;
}
