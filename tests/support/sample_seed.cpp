#include "tests/support/sample_seed.hpp"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>

#include "tests/support/seed_of_build.h"

namespace flashjit::testing_support {

std::uint64_t sample_seed() {
  static const std::uint64_t seed = [] {
    const char* const given = std::getenv("FLASHJIT_TEST_SEED");
    const std::uint64_t number = given && *given ? std::strtoull(given, nullptr, 0) : seed_of_build;
    std::cout << "FLASHJIT_TEST_SEED=" << number << std::endl;
    return number;
  }();
  return seed;
}

std::uint64_t sample_seed(std::string_view test) {
  return std::hash<std::string_view>{}(test) + 0x9e3779b97f4a7c15u * sample_seed();
}

bool test_all() {
  const char* value = std::getenv("FLASHJIT_TEST_ALL");
  return value && std::string_view(value) == "1";
}

bool in_sample(std::string_view table, std::uint64_t place, std::uint64_t one_in) {
  return test_all() || drawn(table, place, one_in) == 0;
}

std::uint64_t drawn(std::string_view table, std::uint64_t place, std::uint64_t end) {
  // Mixed by the finalizer of SplitMix64.
  std::uint64_t bits = sample_seed(table) + 0x9e3779b97f4a7c15u * (place + 1);
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  return (bits ^ bits >> 31) % end;
}

std::optional<Part> asked_part() {
  const char* const text = std::getenv("FLASHJIT_TEST_PART");
  Part part;
  if (!text || std::sscanf(text, "%zu/%zu", &part.index, &part.of) != 2 || part.index >= part.of) return {};
  return part;
}

}  // namespace flashjit::testing_support
