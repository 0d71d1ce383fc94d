// A manifest: the kernels that somebody will need, to be prebuilt or tuned for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "codegen/shape.hpp"
#include "codegen/spec.hpp"

namespace flashjit {

struct ManifestItem {
  AttentionSpec spec;         // validated
  std::vector<Shape> shapes;  // to tune for; and if any_shape is not set, all that will be asked for
  bool any_shape = false;     // kernels for every shape are wanted
};

// From the JSON form (tools/manifest.schema.json), a spec alone, or the name of a model (models.hpp). A
// model's kernels are those of every shape, a spec's those of its shapes if it has some. Throws
// invalid_argument for what is no manifest, saying where and what would work, and what a spec's errors are.
std::vector<ManifestItem> parse_manifest(std::string_view text);

}  // namespace flashjit
