#include "codegen/base/strict_json.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

using Json = nlohmann::json;

// Builds the value that the parser tells of, event by event. (The library's parser with a callback walks
// through all members of an object after each of them.)
class Builder final : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view what, ErrorCode code) : what_(what), code_(code) {}

  Json take() { return std::move(whole_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& value) override { return add(std::move(value)); }

  bool start_object(std::size_t) override { return open(Json::value_t::object); }
  bool start_array(std::size_t) override { return open(Json::value_t::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [place, is_new] = open_.back()->get_ref<Json::object_t&>().try_emplace(name);
    if (!is_new) throw Error(code_, "field " + in_quotes(name) + " is given twice; once would work");
    member_ = &place->second;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 8: ...", without the bracket.
    std::string_view words = error.what();
    words.remove_prefix(std::min(words.find("] ") + 2, words.size()));
    throw Error(code_, std::string(what_) + " is not valid JSON: " + std::string(words.substr(0, 300)));
  }

 private:
  static constexpr std::size_t max_depth = 64;  // some thousands of levels would overflow the stack later

  // The new value's place: the whole, a list's new last element, or the member that key() has made.
  template <class Value>
  Json* place(Value&& value) {
    if (open_.empty()) return &(whole_ = std::forward<Value>(value));
    if (open_.back()->is_array())
      return &open_.back()->get_ref<Json::array_t&>().emplace_back(std::forward<Value>(value));
    return &(*member_ = std::forward<Value>(value));
  }
  template <class Value>
  bool add(Value&& value) {
    place(std::forward<Value>(value));
    return true;
  }
  bool open(Json::value_t kind) {
    if (open_.size() >= max_depth)
      throw Error(code_, std::string(what_) + " nests deeper than " + std::to_string(max_depth) + " levels");
    open_.push_back(place(Json(kind)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string_view what_;
  const ErrorCode code_;
  Json whole_;
  std::vector<Json*> open_;  // the objects and lists around the next value, the outermost first
  Json* member_ = nullptr;   // of the innermost one, an object
};

}  // namespace

Json parse_strict_json(std::string_view text, std::string_view what, ErrorCode code, std::size_t most_bytes) {
  if (text.size() > most_bytes)
    throw Error(code, std::string(what) + " has " + std::to_string(text.size()) + " bytes; at most " +
                          std::to_string(most_bytes) + " would work");
  Builder builder(what, code);
  Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

}  // namespace flashjit
