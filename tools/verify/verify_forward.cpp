#include <cmath>
#include <cstdio>
#include <limits>
#include <mutex>

#include "tools/verify/element.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/oracle.hpp"

namespace flashjit::verify {
namespace {

// An element of a result beside the oracle's.
struct Compared {
  double actual, expected, bound;
  DType dtype;
  bool may_be_nan, may_be_empty;
  double of_empty;  // what it is in a row without keys

  double error() const {
    if (actual == expected || (std::isnan(actual) && std::isnan(expected))) return 0;
    return is_rounded_to_infinity() ? 0 : std::abs(actual - expected);
  }

  Verdict verdict() const {
    if (!std::isfinite(bound)) return Verdict::undecided;
    if (error() <= bound) return Verdict::right;
    const bool excused = (may_be_nan && std::isnan(actual)) || (may_be_empty && actual == of_empty);
    return excused ? Verdict::undecided : Verdict::wrong;
  }

 private:
  bool is_rounded_to_infinity() const {
    const double largest = dtype == DType::fp16 ? 65504 : std::numeric_limits<float>::max();
    return std::isinf(actual) && actual * expected > 0 && std::abs(expected) + bound >= largest;
  }
};

bool is_worse(const Worst& a, const Worst& b) {
  if (b.where.empty() || a.verdict != b.verdict) return b.where.empty() || a.verdict > b.verdict;
  const auto excess = [](const Worst& w) {
    if (std::isnan(w.error)) return std::numeric_limits<double>::infinity();
    return w.verdict == Verdict::wrong ? w.error - w.bound : w.bound > 0 ? w.error / w.bound : 0;
  };
  return excess(a) > excess(b);
}

// Counts the element, and keeps it if it is the worst.
void count(const Compared& element, ForwardReport& report, Worst& worst, const auto& where) {
  Worst candidate{element.error(), element.bound, element.actual, element.expected, "-", element.verdict()};
  report.wrong += candidate.verdict == Verdict::wrong;
  report.undecided += candidate.verdict == Verdict::undecided;
  if (!is_worse(candidate, worst)) return;
  candidate.where = where();
  worst = candidate;
}

std::string describe(const char* name, const Worst& worst) {
  if (worst.where.empty()) return {};
  char text[256];
  std::snprintf(text, sizeof text, "; worst %s: %s = %.9g, expected %.9g, error %.3g, bound %.3g", name,
                worst.where.c_str(), worst.actual, worst.expected, worst.error, worst.bound);
  return text;
}

}  // namespace

const char* to_string(Verdict verdict) {
  constexpr const char* names[] = {"right", "undecided", "wrong"};
  return names[static_cast<int>(verdict)];
}

Verdict ForwardReport::verdict() const {
  return wrong > 0 ? Verdict::wrong : undecided > 0 ? Verdict::undecided : Verdict::right;
}

std::string ForwardReport::str() const {
  return std::to_string(rows) + " rows, " + std::to_string(wrong) + " elements beyond their bound" +
         (undecided > 0 ? ", " + std::to_string(undecided) + " elements that cannot be told" : "") +
         describe("o", o) + describe("lse", lse);
}

ForwardReport verify_forward(const AttentionSpec& spec, const AttentionArgs& args,
                             const OracleOptions& options) {
  const Layout layout(spec, args);
  const Tensor& o = need(args.o, "o", layout.rank());
  const Tensor* lse = spec.lse ? &need(args.lse, "lse", layout.rank() - 1) : nullptr;
  ForwardReport total;
  std::mutex mutex;
  forward_reference(
      spec, args,
      [&](const ReferenceRow& row) {
        ForwardReport report;
        const auto position = [&] {
          return ": batch " + std::to_string(row.batch) + ", row " + std::to_string(row.row) + ", head " +
                 std::to_string(row.head);
        };
        const std::int64_t in_tensor = layout.sequences[row.batch].q_begin + row.row;
        const std::int64_t at = layout.index(o, row.batch, in_tensor, row.head);
        for (std::size_t c = 0; c < row.o.size(); ++c) {
          const double actual = load_element(o.data, o.dtype, at + static_cast<std::int64_t>(c));
          count({actual, row.o[c], row.o_bound[c], o.dtype, row.may_be_nan, row.may_be_empty, 0}, report,
                report.o, [&] { return "o" + position() + ", dim " + std::to_string(c); });
        }
        if (lse) {
          const double actual =
              load_element(lse->data, DType::fp32, layout.lse_index(*lse, row.batch, in_tensor, row.head));
          count({actual, row.lse, row.lse_bound, DType::fp32, row.may_be_nan, row.may_be_empty, -HUGE_VAL},
                report, report.lse, [&] { return "lse" + position(); });
        }
        const std::lock_guard lock(mutex);
        ++total.rows;
        total.wrong += report.wrong;
        total.undecided += report.undecided;
        for (auto [mine, all] : {std::pair{&report.o, &total.o}, std::pair{&report.lse, &total.lse}})
          if (!mine->where.empty() && is_worse(*mine, *all)) *all = *mine;
      },
      options);
  return total;
}

}  // namespace flashjit::verify
