#include "codegen/base/suggest.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace flashjit {
namespace {

// Optimal string alignment distance: Levenshtein's, with a swap of neighbours as one edit.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

// Words of other libraries and languages, and what they mean here where that is known.
constexpr std::pair<std::string_view, std::string_view> same_meaning[] = {
    {"q_idx", "row"},
    {"kv_idx", "key"},
    {"k_idx", "key"},
    {"i", "row"},
    {"j", "key"},
    {"h", "head"},
    {"b", "batch"},
    {"pos", "position"},
    {"qk", "score"},
    {"fabs", "abs"},
    {"fmin", "min"},
    {"fmax", "max"},
    {"INFINITY", "inf"},
    {"half", "fp16"},
    {"float16", "fp16"},
    {"bfloat16", "bf16"},
    {"float", "fp32"},
    {"float32", "fp32"},
    {"fp8", "fp8_e4m3"},
    {"local", "sliding_window"},
    {"swa", "sliding_window"},
    {"banded", "sliding_window"},
    {"lower_triangular", "causal"},
    {"autoregressive", "causal"},
    {"sparse", "block_sparse"},
    {"natten", "neighbourhood"},
    {"neighborhood", "neighbourhood"},
    {"head_size", "head_dim"},
    {"rope", "rotary"},
    {"attention_sinks", "sink_logits"},
    {"is_varlen", "varlen"},
    {"packed", "varlen"},
    {"logits_soft_cap", "softcap"},
    {"prefill", "forward"},
    {"fwd", "forward"},
    {"bwd", "backward"},
    {"generate", "decode"},
};

constexpr std::string_view separators = "_-";

// Whether the text is a whole part of the word between separators: "window" of "sliding_window".
bool is_part_of(std::string_view text, std::string_view word) {
  for (std::size_t at = word.find(text); at != std::string_view::npos; at = word.find(text, at + 1)) {
    const std::size_t end = at + text.size();
    const bool begins = at == 0 || separators.find(word[at - 1]) != std::string_view::npos;
    const bool ends = end == word.size() || separators.find(word[end]) != std::string_view::npos;
    if (begins && ends) return true;
  }
  return false;
}

}  // namespace

std::string_view closest(std::string_view word, std::span<const std::string_view> known) {
  word = word.substr(0, 64);
  for (const auto& [other, meant] : same_meaning)
    if (other == word && std::find(known.begin(), known.end(), meant) != known.end()) return meant;
  // A third of the letters may be wrong: "doc" is no slip for "log".
  if (word.size() < 2) return {};
  std::string lower(word);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  word = lower;
  std::string_view best;
  std::size_t best_distance = std::max<std::size_t>(1, word.size() / 3) + 1;
  for (std::string_view candidate : known) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  if (best_distance <= 1) return best;
  // The word is a known one's beginning, or one has the other as a part. The shortest such word adds the
  // least.
  constexpr std::size_t shortest_part = 3;
  std::string_view longer;
  for (std::string_view candidate : known) {
    const bool has_part =
        word.size() >= shortest_part && candidate.size() >= shortest_part &&
        (candidate.starts_with(word) || is_part_of(word, candidate) || is_part_of(candidate, word));
    if (has_part && (longer.empty() || candidate.size() < longer.size())) longer = candidate;
  }
  return longer.empty() ? best : longer;
}

std::string listed(std::span<const std::string_view> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " and " : ", ";
    text += words[i];
  }
  return text;
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t longest = 48;
  std::string out = "\"";
  for (char c : text.substr(0, longest)) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  if (text.size() > longest) out += "...";
  return out + '"';
}

std::string did_you_mean(std::string_view word, std::span<const std::string_view> known) {
  const std::string_view near = closest(word, known);
  return near.empty() ? "" : "; did you mean " + std::string(near) + "?";
}

std::string json_string(std::string_view text) {
  constexpr char digits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (byte < 0x20) {
      ((out += "\\u00") += digits[byte >> 4]) += digits[byte & 15];
    } else {
      out += c;
    }
  }
  return out + '"';
}

bool is_identifier(std::string_view text) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  return !text.empty() && is_letter(text.front()) && std::all_of(text.begin(), text.end(), [&](char c) {
    return is_letter(c) || (c >= '0' && c <= '9');
  });
}

}  // namespace flashjit
