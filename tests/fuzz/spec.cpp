// Fuzzes specs: an accepted spec survives a round trip, and every target renders or refuses it.
#include "codegen/spec/spec.hpp"

#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  AttentionSpec spec;
  if (!fuzz::accepted([&] { spec = AttentionSpec::from_json(fuzz::text_of(data, size)); })) return 0;
  FUZZ_CHECK(AttentionSpec::from_json(spec.to_json()) == spec);
  for (const char* name : {"sm_80", "sm_90a", "x86-64-v4"}) {
    const Target target = Target::parse(name);
    fuzz::accepted([&] {
      const KernelConfig config = heuristic_config(spec, target, {1, 100, 100, 8, 2});
      FUZZ_CHECK(misfit(spec, target, config).empty());
      FUZZ_CHECK(!render(spec, target, config).text.empty());
    });
  }
  return 0;
}
