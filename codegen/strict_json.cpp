#include "strict_json.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "suggest.hpp"

namespace flashjit {

nlohmann::json parse_strict_json(std::string_view text, std::string_view what, ErrorCode code) {
  using Json = nlohmann::json;
  constexpr int max_depth = 64;  // some thousands of levels would overflow the stack when printed
  std::vector<std::set<std::string, std::less<>>> open;
  const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > max_depth)
      throw Error(code, std::string(what) + " nests deeper than " + std::to_string(max_depth) + " levels");
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second)
      throw Error(code, "field " + in_quotes(parsed.get<std::string>()) + " is given twice; once would work");
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 8: ...", without the bracket.
    std::string_view words = error.what();
    words.remove_prefix(std::min(words.find("] ") + 2, words.size()));
    throw Error(code, std::string(what) + " is not valid JSON: " + std::string(words.substr(0, 300)));
  }
}

}  // namespace flashjit
