#include "tools/verify/copy_oracle.hpp"

#include <algorithm>
#include <unordered_map>

#include "tools/verify/element.hpp"
#include "tools/verify/layout.hpp"

namespace flashjit::verify {
namespace {

struct Copied {
  std::int64_t from, to;  // slots
};

// The rows that a launch copies to a place of their own.
std::vector<Copied> rows_of(const AttentionArgs& args) {
  const Tensor &from = need(args.from_slots, "from_slots", 1), &to = need(args.to_slots, "to_slots", 1);
  const auto slot = [](const Tensor& t, std::int64_t i, const Tensor& cache) {
    const std::int64_t at = static_cast<const std::int64_t*>(t.data)[i * t.strides[0]];
    return at < 0 || at >= cache.shape[0] * cache.shape[1] ? -1 : at;
  };
  std::vector<Copied> rows;
  std::unordered_map<std::int64_t, int> writers;
  for (std::int64_t i = 0; i < from.shape[0]; ++i) {
    const Copied row = {slot(from, i, *args.k_from), slot(to, i, *args.k)};
    if (row.from < 0 || row.to < 0) continue;
    rows.push_back(row);
    ++writers[row.to];
  }
  std::erase_if(rows, [&](const Copied& row) { return writers[row.to] > 1; });
  return rows;
}

struct Pair {
  Output output;
  Tensor source;
};

// Where the row of a slot and a head begins.
std::int64_t index_of(const Tensor& t, std::int64_t slot, std::int64_t head) {
  return slot / t.shape[1] * t.strides[0] + slot % t.shape[1] * t.strides[1] + head * t.strides[2];
}

}  // namespace

Oracle copy_kv_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  std::vector<Pair> pairs;
  const auto add = [&](const char* name, const std::optional<Tensor>& to, const char* source,
                       const std::optional<Tensor>& from, std::vector<const char*> coordinates) {
    const Tensor& t = need(to, name, static_cast<int>(coordinates.size()));
    pairs.push_back({{name, {t.shape.begin(), t.shape.begin() + t.rank}, t, std::move(coordinates)},
                     need(from, source, t.rank)});
  };
  add("k", args.k, "k_from", args.k_from, {"page", "row", "head", "dim"});
  if (!spec.v_in_k) add("v", args.v, "v_from", args.v_from, {"page", "row", "head", "dim"});
  if (spec.kv_dtype && spec.kv_scale == KvScale::token_head) {
    add("k_scale", args.k_scale, "k_scale_from", args.k_scale_from, {"page", "row", "head"});
    if (!spec.v_in_k)
      add("v_scale", args.v_scale, "v_scale_from", args.v_scale_from, {"page", "row", "head"});
  }
  Oracle oracle;
  for (const Pair& pair : pairs) oracle.outputs.push_back(pair.output);
  oracle.compute = [pairs, rows = rows_of(args), options](const Visit& visit) {
    const std::int64_t heads = pairs[0].source.shape[2];
    const std::size_t most = static_cast<std::size_t>(options.max_rows / std::max<std::int64_t>(heads, 1)),
                      step = options.max_rows > 0 ? rows.size() / std::max<std::size_t>(most, 1) + 1 : 1;
    std::vector<double> values, bounds;
    for (std::size_t i = 0; i < rows.size(); i += step)
      for (std::int64_t head = 0; head < heads; ++head)
        for (std::size_t output = 0; output < pairs.size(); ++output) {
          const auto& [to, from] = pairs[output];
          const std::int64_t columns = from.rank == 4 ? from.shape[3] : 1,
                             first = index_of(from, rows[i].from, head);
          values.clear();
          for (std::int64_t c = 0; c < columns; ++c)
            values.push_back(load_element(from.data, from.dtype, first + c));
          bounds.assign(values.size(), 0.0);
          visit({.output = output,
                 .place = {rows[i].to / to.shape[1], rows[i].to % to.shape[1], head},
                 .index = index_of(*to.actual, rows[i].to, head),
                 .values = values,
                 .bounds = bounds});
        }
  };
  return oracle;
}

}  // namespace flashjit::verify
