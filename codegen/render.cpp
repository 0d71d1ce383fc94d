#include "codegen/render.hpp"

#include <algorithm>

#include "codegen/base/error.hpp"
#include "codegen/embedded_headers.hpp"
#include "codegen/families/kernel_family.hpp"

namespace flashjit {
namespace {

const EmbeddedHeader& header(std::string_view name) {
  for (const EmbeddedHeader& candidate : embedded_headers()) {
    if (candidate.name == name) return candidate;
  }
  throw Error(ErrorCode::internal, "no header \"" + std::string(name) + "\" in templates/");
}

// The name in an `#include "name"` line; empty for any other line.
std::string_view included_name(std::string_view line) {
  constexpr std::string_view start = "#include \"";
  if (!line.starts_with(start)) return {};
  line.remove_prefix(start.size());
  return line.substr(0, line.find('"'));
}

// Calls body(line) for every line of the text, without its end.
template <class Body>
void for_each_line(std::string_view text, Body body) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    body(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

bool has(const std::vector<EmbeddedHeader>& headers, std::string_view name) {
  return std::any_of(headers.begin(), headers.end(), [&](const EmbeddedHeader& h) { return h.name == name; });
}

void collect_headers(std::string_view text, std::vector<EmbeddedHeader>& headers) {
  for_each_line(text, [&](std::string_view line) {
    const std::string_view name = included_name(line);
    if (name.empty() || has(headers, name)) return;
    headers.push_back(header(name));
    collect_headers(headers.back().text, headers);
  });
}

void fold(std::string_view text, std::vector<EmbeddedHeader>& folded, std::string& out) {
  for_each_line(text, [&](std::string_view line) {
    if (line == "#pragma once") return;
    const std::string_view name = included_name(line);
    if (name.empty()) {
      out.append(line) += '\n';
    } else if (!has(folded, name)) {
      folded.push_back(header(name));
      out += "// ---- " + std::string(name) + "\n";
      fold(folded.back().text, folded, out);
      out += "// ---- end of " + std::string(name) + "\n";
    }
  });
}

}  // namespace

KernelSource render(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  KernelSource source{
      .target = target, .config = config, .text = {}, .headers = {}, .steps = {}, .options = {}};
  // The text shows the spec without its pins: Config shows their
  // effect, and a kernel is the same whoever chose its config.
  AttentionSpec unpinned = spec;
  unpinned.config = {};
  source.text = std::string("// flashjit ") + to_string(spec.op) + " for " + target.str() + "\n// " +
                unpinned.to_json() + "\n";
  family_of(spec.op, target).render(spec, source);
  collect_headers(source.text, source.headers);
  return source;
}

std::string standalone(const KernelSource& source) {
  std::string out;
  std::vector<EmbeddedHeader> folded;
  fold(source.text, folded, out);
  return out;
}

}  // namespace flashjit
