// Fuzzes manifests: each is refused, or accepted and not empty.
#include "tools/manifest/manifest.hpp"

#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::accepted([&] {
    for (const ManifestItem& item : parse_manifest(fuzz::text_of(data, size))) {
      FUZZ_CHECK(item.any_shape || !item.shapes.empty());
      FUZZ_CHECK(item.spec == item.spec.validated());
      for (const Shape& shape : item.shapes) FUZZ_CHECK(shape.seqlen_q > 0 && bucket(shape).batch > 0);
    }
  });
  return 0;
}
