#include "cache/config_json.hpp"

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

using nlohmann::json;

// A size of 0 is left out of the text: the config's kernel has no such choice.
void read(const json& object, const char* name, int& out) {
  out = object.contains(name) ? count_from_json(object, name) : 0;
}
void read(const json& object, const char* name, bool& out) {
  out = object.at(name).get<bool>();
}
void read(const json& object, const char* name, TileOrder& out) {
  for (const TileOrder order : tile_orders) {
    if (object.at(name) == to_string(order)) return void(out = order);
  }
  throw Error(ErrorCode::cache_failed, std::string(name) + " is not an order");
}

}  // namespace

int count_from_json(const json& object, const char* name) {
  const json& value = object.at(name);
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::cache_failed, std::string(name) + " is not a count");
  }
  return value.get<int>();
}

std::string text_from_json(const json& object, const char* name) {
  return object.at(name).get<std::string>();
}

KernelConfig config_from_json(const json& object) {
  KernelConfig config;
  for_each_choice([&](const char* name, auto choice, auto) { read(object, name, config.*choice); });
  return config;
}

}  // namespace flashjit
