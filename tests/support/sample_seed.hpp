// The seed decides which part of a long table a test draws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace flashjit::testing_support {

// FLASHJIT_TEST_SEED, else a number of the commit that was built (seed.sh), so that what one commit's samples
// leave out another's have. Printed once by a process.
std::uint64_t sample_seed();
// The same for one test, so that each draws differently.
std::uint64_t sample_seed(std::string_view test);

// Whether FLASHJIT_TEST_ALL=1: tests that otherwise take a sample run whole.
bool test_all();

// Whether a sample has this place of a table: about every `one_in`th, and each with FLASHJIT_TEST_ALL=1.
bool in_sample(std::string_view table, std::uint64_t place, std::uint64_t one_in);

// A number below `end` for this place of a table.
std::uint64_t drawn(std::string_view table, std::uint64_t place, std::uint64_t end);

// One of so many parts of a table, from 0, which processes side by side take.
struct Part {
  std::size_t index = 0, of = 1;
};
// FLASHJIT_TEST_PART=I/N, for tests that can be divided; without it none.
std::optional<Part> asked_part();

}  // namespace flashjit::testing_support
