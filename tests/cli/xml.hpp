// Tests ask these questions of a picture.
#pragma once

#include <cctype>
#include <string>
#include <vector>

namespace flashjit::cli_test {

// Says what is wrong with an XML text as the command writes it (no comments, no CDATA); empty if nothing is.
inline std::string xml_error(const std::string& text) {
  std::vector<std::string> open;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = text.find('<', at);
    const std::string words = text.substr(at, begin - at);
    if (words.find('>') != std::string::npos) return "a bare > in: " + words;
    for (std::size_t i = 0; (i = words.find('&', i)) != std::string::npos; ++i)
      if (words.find(';', i) > i + 5) return "a bare & in: " + words;
    if (begin == std::string::npos) break;
    if (begin > at && open.empty() && words.find_first_not_of(" \n") != std::string::npos)
      return "text outside the root: " + words;
    std::size_t end = begin + 1;
    for (bool quoted = false; end < text.size() && (quoted || text[end] != '>'); ++end) {
      if (text[end] == '"') quoted = !quoted;
      if (text[end] == '<') return "a < inside the tag at " + text.substr(begin, 60);
    }
    if (end == text.size()) return "no end of the tag at " + text.substr(begin, 60);
    const std::string tag = text.substr(begin + 1, end - begin - 1);
    const std::string name = tag.substr(0, tag.find_first_of(" \n/", 1));
    if (tag[0] == '/') {
      if (open.empty() || "/" + open.back() != tag) return "</" + tag.substr(1) + "> closes nothing";
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  return open.empty() ? "" : "<" + open.back() + "> is not closed";
}

// The attribute of the element with that id; empty if there is none.
inline std::string attribute(const std::string& text, const std::string& id, const std::string& name) {
  const std::size_t element = text.find("id=\"" + id + "\"");
  if (element == std::string::npos) return "";
  const std::string before = " " + name + "=\"";
  const std::size_t begin = text.find(before, element);
  if (begin == std::string::npos || begin > text.find('>', element)) return "";
  return text.substr(begin + before.size(), text.find('"', begin + before.size()) - begin - before.size());
}

}  // namespace flashjit::cli_test
