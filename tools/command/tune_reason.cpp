#include "tools/command/tune_reason.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/timing.hpp"
#include "runtime/tune/race.hpp"
#include "tools/command/report.hpp"

namespace flashjit::command {
namespace {

// "block_n 512 instead of 64": the sizes in which two configs differ.
std::string differences(const KernelConfig& to, const KernelConfig& from) {
  std::string text;
  const auto add = [&](const char* name, int now, int before) {
    if (now != before)
      text += (text.empty() ? "" : ", ") + std::string(name) + " " + std::to_string(now) + " instead of " +
              std::to_string(before);
  };
  add("block_m", to.block_m, from.block_m);
  add("block_n", to.block_n, from.block_n);
  add("num_stages", to.num_stages, from.num_stages);
  add("num_warps", to.num_warps, from.num_warps);
  if (to.q_in_registers != from.q_in_registers)
    text += (text.empty() ? "" : ", ") + std::string(to.q_in_registers ? "q" : "no q") + " in registers";
  if (to.ping_pong != from.ping_pong)
    text += (text.empty() ? "" : ", ") + std::string(to.ping_pong ? "ping-pong" : "no ping-pong");
  if (to.tile_order != from.tile_order)
    text += (text.empty() ? "" : ", ") + std::string("tile order ") + to_string(to.tile_order);
  if (to.pack_gqa != from.pack_gqa)
    text += (text.empty() ? "" : ", ") + std::string(to.pack_gqa ? "packed heads" : "heads not packed");
  return text;
}

// How many of the rounds after the selection the candidate won against the heuristic config.
struct Confirmed {
  std::size_t won = 0, rounds = 0;
};
Confirmed confirmed(const TuneCandidate& candidate, const TuneCandidate& heuristic) {
  Confirmed count;
  const std::size_t rounds = std::min(candidate.samples_ms.size(), heuristic.samples_ms.size());
  for (std::size_t r = screen_rounds; r < rounds; ++r, ++count.rounds)
    count.won += candidate.samples_ms[r] < heuristic.samples_ms[r];
  return count;
}

// Median over the rounds that both took part in, so that what slows the machine down slows both.
double ratio_of(const TuneCandidate& candidate, const TuneCandidate& heuristic) {
  std::vector<double> ratios;
  const std::size_t rounds = std::min(candidate.samples_ms.size(), heuristic.samples_ms.size());
  for (std::size_t r = 0; r < rounds; ++r)
    ratios.push_back(candidate.samples_ms[r] / heuristic.samples_ms[r]);
  return ratios.empty() ? 1 : median(ratios);
}

// Key blocks that a tile of query rows visits without a mask.
int key_blocks(const KernelConfig& config, const Shape& shape) {
  return config.block_n == 0 ? 0 : (shape.seqlen_k + config.block_n - 1) / config.block_n;
}

}  // namespace

const TuneCandidate* candidate_of(const TuneRecord& record, const KernelConfig& config) {
  const auto it = std::find_if(record.candidates.begin(), record.candidates.end(),
                               [&](const TuneCandidate& c) { return c.config == config; });
  return it == record.candidates.end() ? nullptr : &*it;
}

std::string why_chosen(const TuneRecord& record, const Target& target) {
  const std::string chosen = to_text(record.chosen, target);
  const std::string early = record.complete ? "" : ", but the race ended early";
  const TuneCandidate* const heuristic = candidate_of(record, record.heuristic);
  if (!heuristic || heuristic->samples_ms.empty()) return "Nothing was measured.";
  const std::string warning = noise_warning(record.candidates);
  const std::string noise = warning.empty() ? "" : " Beware: " + warning + ".";
  if (record.chosen == record.heuristic) {
    // Only those that took part to the end have samples of the same rounds.
    const TuneCandidate *second = nullptr, *dropped = nullptr;
    for (const TuneCandidate& c : record.candidates) {
      if (&c == heuristic || c.samples_ms.empty()) continue;
      const TuneCandidate*& closest = c.verdict == Verdict::measured ? second : dropped;
      if (!closest || fastest_ms(c) < fastest_ms(*closest)) closest = &c;
    }
    const TuneCandidate* const closest = second ? second : dropped;
    if (!closest)
      return "The heuristic config " + chosen + " stays: no other config was measured" + early + "." + noise;
    // A config that dropped out was slow by its fastest sample.
    const double ratio =
        second ? ratio_of(*second, *heuristic) : fastest_ms(*dropped) / fastest_ms(*heuristic);
    const double percent = 100 * (ratio - 1);
    return "The heuristic config " + chosen +
           " stays: no other config was faster beyond noise (the closest, " +
           to_text(closest->config, target) + ", took " + number(std::abs(percent)) + "% " +
           (percent < 0 ? "less" : "more") + " time in " + std::to_string(closest->samples_ms.size()) +
           (closest->samples_ms.size() == 1 ? " sample" : " samples") + (second ? "" : " and dropped out") +
           ")" + early + "." + noise;
  }
  const TuneCandidate& winner = *candidate_of(record, record.chosen);
  const double gain = 100 * (1 - ratio_of(winner, *heuristic));
  const Confirmed rounds = confirmed(winner, *heuristic);
  const int blocks = key_blocks(record.chosen, record.shape),
            before = key_blocks(record.heuristic, record.shape);
  return chosen + " won: it takes " + number(gain) + "% less time than the heuristic config " +
         to_text(record.heuristic, target) + " and was faster in " + std::to_string(rounds.won) + " of " +
         std::to_string(rounds.rounds) + " rounds after the selection; it has " +
         differences(record.chosen, record.heuristic) +
         (blocks == before
              ? ""
              : ", so that a query tile visits up to " + std::to_string(blocks) +
                    (blocks == 1 ? " key block, not " : " key blocks, not ") + std::to_string(before)) +
         early + "." + noise;
}

}  // namespace flashjit::command
