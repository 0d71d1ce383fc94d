// A manifest lists the kernels to prebuild or to tune.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

struct ManifestItem {
  AttentionSpec spec;         // validated
  std::vector<Shape> shapes;  // shapes to tune; without any_shape, also the only shapes to prebuild
  bool any_shape = false;     // prebuild the kernels of every shape
  bool optional = false;      // left out for a target that has no kernel for it
};

// Reads the JSON form (tools/manifest.schema.json), a spec alone, or the name of a model (models.hpp). A
// model asks for the kernels of every shape, of the forward unless its "ops" say otherwise; a spec asks for
// those of its shapes, or of every shape if it has none. Throws invalid_argument for a text that is no
// manifest; the message says where and what would work. A spec in it throws its own errors.
std::vector<ManifestItem> parse_manifest(std::string_view text);

}  // namespace flashjit
