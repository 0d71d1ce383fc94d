#include "cache/tune_record.hpp"

#include <nlohmann/json.hpp>

#include "cache/config_json.hpp"
#include "cache/tune_store.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr Verdict verdicts[] = {Verdict::measured, Verdict::dropped, Verdict::wrong, Verdict::failed};

// The page size and the totals of packed sequences are left out if they are 0.
ordered_json shape_json(const Shape& s) {
  ordered_json object = {{"batch", s.batch},
                         {"seqlen_q", s.seqlen_q},
                         {"seqlen_k", s.seqlen_k},
                         {"num_heads_q", s.num_heads_q},
                         {"num_heads_kv", s.num_heads_kv}};
  if (s.page_size) object["page_size"] = s.page_size;
  if (s.total_q) object["total_q"] = s.total_q;
  if (s.total_k) object["total_k"] = s.total_k;
  return object;
}

Shape shape_from_json(const json& object) {
  const auto total = [&](const char* name) -> std::int64_t {
    if (!object.contains(name)) return 0;
    const json& value = object.at(name);
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >> 62)
      throw Error(ErrorCode::cache_failed, std::string(name) + " is not a count");
    return value.get<std::int64_t>();
  };
  return {.batch = count_from_json(object, "batch"),
          .seqlen_q = count_from_json(object, "seqlen_q"),
          .seqlen_k = count_from_json(object, "seqlen_k"),
          .num_heads_q = count_from_json(object, "num_heads_q"),
          .num_heads_kv = count_from_json(object, "num_heads_kv"),
          .page_size = object.contains("page_size") ? count_from_json(object, "page_size") : 0,
          .total_q = total("total_q"),
          .total_k = total("total_k")};
}

ordered_json config_json(const KernelConfig& config) {
  return ordered_json::parse(to_json(config));
}

TuneCandidate candidate_from_json(const json& object) {
  TuneCandidate candidate{.config = config_from_json(object.at("config")),
                          .verdict = Verdict::failed,
                          .reason = text_from_json(object, "reason"),
                          .samples_ms = object.at("samples_ms").get<std::vector<double>>()};
  for (const Verdict verdict : verdicts) {
    if (object.at("verdict") == to_string(verdict)) candidate.verdict = verdict;
  }
  for (const double ms : candidate.samples_ms) {
    if (!(ms > 0)) throw Error(ErrorCode::cache_failed, "a sample of " + std::to_string(ms) + " ms");
  }
  return candidate;
}

TuneRecord record_from_json(const json& object) {
  const json& environment = object.at("environment");
  TuneRecord record{
      .key = {text_from_json(object, "spec"), text_from_json(object, "target"),
              text_from_json(object, "device"), shape_from_json(object.at("bucket"))},
      .chosen = config_from_json(object.at("chosen")),
      .heuristic = config_from_json(object.at("heuristic")),
      .shape = shape_from_json(object.at("shape")),
      .complete = object.at("complete").get<bool>(),
      .environment = {text_from_json(environment, "driver"), text_from_json(environment, "compiler"),
                      text_from_json(environment, "flashjit"), count_from_json(environment, "num_threads")},
      .candidates = {}};
  for (const json& candidate : object.at("candidates").get_ref<const json::array_t&>()) {
    record.candidates.push_back(candidate_from_json(candidate));
  }
  return record;
}

}  // namespace

const char* to_string(Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::measured:
      return "measured";
    case Verdict::dropped:
      return "dropped";
    case Verdict::wrong:
      return "wrong";
    case Verdict::failed:
      return "failed";
  }
  return "unknown";
}

std::string difference(const TuneEnvironment& measured, const TuneEnvironment& here) {
  std::string text;
  const auto compare = [&](const char* name, const std::string& a, const std::string& b) {
    if (a.empty() || b.empty() || a == b) return;
    text += (text.empty() ? "" : "; ") + std::string(name) + " " + a + ", here " + b;
  };
  const auto number = [](int n) { return n == 0 ? std::string() : std::to_string(n); };
  compare("driver", measured.driver, here.driver);
  compare("compiler", measured.compiler, here.compiler);
  compare("flashjit", measured.flashjit, here.flashjit);
  compare("num_threads", number(measured.num_threads), number(here.num_threads));
  return text;
}

std::string to_json(const TuneRecord& record) {
  ordered_json candidates = ordered_json::array();
  for (const TuneCandidate& c : record.candidates) {
    candidates.push_back({{"config", config_json(c.config)},
                          {"verdict", to_string(c.verdict)},
                          {"reason", c.reason},
                          {"samples_ms", c.samples_ms}});
  }
  const TuneEnvironment& e = record.environment;
  ordered_json object = {{"format", tune_format_version},
                         {"spec", record.key.spec},
                         {"target", record.key.target},
                         {"device", record.key.device},
                         {"bucket", shape_json(record.key.bucket)},
                         {"chosen", config_json(record.chosen)},
                         {"heuristic", config_json(record.heuristic)},
                         {"shape", shape_json(record.shape)},
                         {"complete", record.complete},
                         {"environment",
                          {{"driver", e.driver},
                           {"compiler", e.compiler},
                           {"flashjit", e.flashjit},
                           {"num_threads", e.num_threads}}},
                         {"candidates", candidates}};
  // A reason may quote bytes that are not UTF-8.
  const auto dump = [&] { return object.dump(-1, ' ', false, ordered_json::error_handler_t::replace); };
  object["checksum"] = digest(dump());
  return dump() + "\n";
}

std::optional<TuneRecord> parse_tune_record(std::string_view text, std::string& why) try {
  if (text.empty()) {
    why = "empty file";
    return std::nullopt;
  }
  const json object = json::parse(text.begin(), text.end());
  if (const int version = count_from_json(object, "format"); version != tune_format_version) {
    why = "format version " + std::to_string(version) + " instead of " + std::to_string(tune_format_version);
    return std::nullopt;
  }
  TuneRecord record = record_from_json(object);
  // Compares the checksum, the field names, their order and
  // number, and every value with the text that we would write.
  if (to_json(record) != text) {
    why = "its checksum or its form is not that of a tune record";
    return std::nullopt;
  }
  return record;
} catch (const std::exception& error) {  // json::exception, Error
  why = std::string("not a tune record: ") + error.what();
  return std::nullopt;
}

}  // namespace flashjit
