#include "tools/verify/rows.hpp"

#include "tools/verify/random_tensor.hpp"

namespace flashjit::verify {

std::vector<RowTask> row_tasks(std::span<const int> rows_of, int heads, int group_rows,
                               const OracleOptions& options) {
  std::int64_t all = 0;
  for (const int rows : rows_of) all += static_cast<std::int64_t>(rows) * heads;
  const bool sample = options.max_rows > 0 && all > options.max_rows;
  std::vector<RowTask> tasks;
  std::uint64_t draw = 0;
  for (std::size_t sequence = 0; sequence < rows_of.size(); ++sequence) {
    const int of_head = rows_of[sequence];
    for (int head = 0; head < heads; ++head) {
      std::vector<int> rows;
      if (sample) {
        const auto share = static_cast<double>(options.max_rows) * of_head / static_cast<double>(all);
        const int count = std::min(of_head, std::max(2, static_cast<int>(share)));
        for (int i = 0; i < count; ++i) {  // one row of each of `count` parts, and both ends
          const std::int64_t begin = static_cast<std::int64_t>(of_head) * i / count;
          const std::int64_t end = static_cast<std::int64_t>(of_head) * (i + 1) / count;
          const auto offset = random_bits(options.seed, draw++) % static_cast<std::uint64_t>(end - begin);
          rows.push_back(static_cast<int>(i == 0           ? 0
                                          : i + 1 == count ? end - 1
                                                           : begin + static_cast<int>(offset)));
        }
      } else {
        for (int row = 0; row < of_head; ++row) rows.push_back(row);
      }
      for (std::size_t i = 0; i < rows.size(); i += static_cast<std::size_t>(group_rows)) {
        const auto first = rows.begin() + static_cast<std::ptrdiff_t>(i);
        const auto count = std::min<std::ptrdiff_t>(group_rows, rows.end() - first);
        tasks.push_back({static_cast<int>(sequence), head, {first, first + count}});
      }
    }
  }
  return tasks;
}

}  // namespace flashjit::verify
