#include "tools/command/report.hpp"

#include <unistd.h>
#include <cstdio>
#include <iostream>
#include <type_traits>
#include <variant>

#include "tools/command/progress.hpp"

namespace flashjit::command {
void print_json(const Json& json) {
  std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

std::string to_text(const KernelConfig& config, const Target& target) {
  std::string text;  // a choice that the kernel has not is 0
  if (config.block_m != 0) text = std::to_string(config.block_m);
  if (config.block_n != 0) text += "x" + std::to_string(config.block_n);
  if (target.is_cuda()) {
    text += std::string(text.empty() ? "" : ", ") + std::to_string(config.num_stages) + " stages, " +
            std::to_string(config.num_warps) + " warps";
  }
  // Choices of a few kernels are shown unless they are at their defaults.
  if (config.q_in_registers) text += ", q in registers";
  if (config.ping_pong) text += ", ping-pong";
  if (config.tile_order != TileOrder::heads) text += std::string(", ") + to_string(config.tile_order);
  if (config.pack_gqa) text += ", packed heads";
  return text.empty() ? "-" : text;
}

std::string mask_text(const AttentionSpec& spec) {
  std::string title;
  for (const Mask& mask : spec.mask) {
    std::string kind, fields;
    const auto add = [&](const std::string& field) { fields += (fields.empty() ? "" : ", ") + field; };
    std::visit(
        [&](const auto& m) {
          kind = m.kind;
          m.for_each_field(m, [&]<class Field>(const char* name, const Field& value, const auto&...) {
            if constexpr (std::is_same_v<Field, int>) {
              add(name + (" " + std::to_string(value)));
            } else if constexpr (std::is_same_v<Field, bool>) {
              if (value) add(name);
            } else if constexpr (std::is_same_v<Field, std::string>) {
              add(value);
            } else {
              if (value != Field{}) add(to_string(value));
            }
          });
        },
        mask);
    title += (title.empty() ? "" : " and ") + kind + (fields.empty() ? "" : " (" + fields + ")");
  }
  return title.empty() ? "no mask" : title;
}

Json config_json(const KernelConfig& config) {
  return Json::parse(to_json(config));
}

std::string shown(const verify::Table& table) {
  return table.str(terminal_columns(STDOUT_FILENO));
}

Json shape_json(const Shape& shape) {
  return {{"batch", shape.batch},
          {"seqlen_q", shape.seqlen_q},
          {"seqlen_k", shape.seqlen_k},
          {"num_heads_q", shape.num_heads_q},
          {"num_heads_kv", shape.num_heads_kv},
          {"heads_q", shape.num_heads_q},
          {"heads_kv", shape.num_heads_kv}};
}

Json kernel_json(const KernelInfo& info) {
  Json json = Json::parse(to_json(info));
  json["ms"] = info.get_ms;
  return json;
}

std::string where_cached(const KernelInfo& info) {
  return info.path.empty() ? "not cached: " + info.cache_note : info.path;
}

std::string number(double value) {
  const int decimals = value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3;
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

}  // namespace flashjit::command
