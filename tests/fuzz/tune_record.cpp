// Fuzzes tune records: only the exact text that we would write is accepted.
#include "cache/tune_store.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace flashjit;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  std::string why;
  const auto record = parse_tune_record(text, why);
  if (record) FUZZ_CHECK(to_json(*record) == text);
  if (!record) FUZZ_CHECK(!why.empty());
  return 0;
}
