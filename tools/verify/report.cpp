#include "tools/verify/report.hpp"

#include <cmath>
#include <cstdio>
#include <limits>
#include <mutex>

#include "tools/verify/element.hpp"
#include "tools/verify/layout.hpp"

namespace flashjit::verify {
namespace {

// Judges an element of a result by the oracle's value.
struct Compared {
  double actual, expected, bound;
  DType dtype;
  bool excused;

  double error() const {
    if (actual == expected || (std::isnan(actual) && std::isnan(expected))) return 0;
    return is_rounded_to_infinity() ? 0 : std::abs(actual - expected);
  }

  Verdict verdict() const {
    if (!std::isfinite(bound)) return Verdict::undecided;
    if (error() <= bound) return Verdict::right;
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

std::string place_of(const Output& output, const Expected& expected, std::size_t element) {
  std::string text = output.name;
  for (std::size_t i = 0; i < output.coordinates.size(); ++i) {
    const bool last = i + 1 == output.coordinates.size();
    text += (i == 0 ? ": " : ", ") + std::string(output.coordinates[i]) + " " +
            std::to_string(expected.place[i] + (last ? static_cast<std::int64_t>(element) : 0));
  }
  return text;
}

std::string describe(const Worst& worst) {
  if (worst.where.empty()) return {};
  char text[256];
  std::snprintf(text, sizeof text, "; worst %s = %.9g, expected %.9g, error %.3g, bound %.3g",
                worst.where.c_str(), worst.actual, worst.expected, worst.error, worst.bound);
  return text;
}

void check(const Output& output) {
  const Tensor& tensor = need(output.actual, output.name.c_str(), static_cast<int>(output.shape.size()));
  for (std::size_t i = 0; i < output.shape.size(); ++i) {
    if (tensor.shape[i] == output.shape[i]) continue;
    verify::refuse(output.name + " has " + std::to_string(tensor.shape[i]) + " in dimension " +
                   std::to_string(i) + ", expected " + std::to_string(output.shape[i]));
  }
}

// Counts the elements of one Expected and keeps the worst.
struct Counts {
  std::int64_t wrong = 0, undecided = 0;
  Worst worst;
};

Counts count(const Output& output, const Expected& expected) {
  const Tensor& tensor = *output.actual;
  Counts counts;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    const double actual =
        load_element(tensor.data, tensor.dtype, expected.index + static_cast<std::int64_t>(i));
    const bool excused = (expected.may_be_nan && std::isnan(actual)) || expected.may_be == actual;
    const Compared element{actual, expected.values[i], expected.bounds[i], tensor.dtype, excused};
    Worst candidate{output.name, element.error(),  element.bound, actual, element.expected,
                    "-",         element.verdict()};
    counts.wrong += candidate.verdict == Verdict::wrong;
    counts.undecided += candidate.verdict == Verdict::undecided;
    if (!is_worse(candidate, counts.worst)) continue;
    candidate.where = place_of(output, expected, i);
    counts.worst = candidate;
  }
  return counts;
}

}  // namespace

const char* to_string(Verdict verdict) {
  constexpr const char* names[] = {"right", "undecided", "wrong"};
  return names[static_cast<int>(verdict)];
}

const Worst& Report::of(std::string_view output) const {
  for (const Worst& of_output : worst)
    if (of_output.output == output) return of_output;
  verify::refuse("no output " + std::string(output) + " was compared");
}

Verdict Report::verdict() const {
  return wrong > 0 ? Verdict::wrong : undecided > 0 ? Verdict::undecided : Verdict::right;
}

std::string Report::str() const {
  std::string text =
      std::to_string(rows) + " rows, " + std::to_string(wrong) + " elements beyond their bound" +
      (undecided > 0 ? ", " + std::to_string(undecided) + " elements that cannot be told" : "");
  for (const Worst& of_output : worst) text += describe(of_output);
  return text;
}

Report compare(const Oracle& oracle) {
  Report report;
  for (const Output& output : oracle.outputs) {
    check(output);
    report.worst.push_back({.output = output.name});
  }
  std::mutex mutex;
  oracle.compute([&](const Expected& expected) {
    const Counts counts = count(oracle.outputs[expected.output], expected);
    const std::lock_guard lock(mutex);
    report.rows += expected.output == 0;
    report.wrong += counts.wrong;
    report.undecided += counts.undecided;
    Worst& worst = report.worst[expected.output];
    if (!counts.worst.where.empty() && is_worse(counts.worst, worst)) worst = counts.worst;
  });
  return report;
}

Report verify_outputs(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  return compare(oracle_of(spec, args, options));
}

}  // namespace flashjit::verify
