#include "runtime/event_files.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "cache/environment.hpp"
#include "cache/file.hpp"
#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

using Json = nlohmann::ordered_json;

constexpr int mode = 0644;

[[noreturn]] void refuse(const char* variable, const std::string& path, const std::string& why,
                         const std::string& remedy) {
  throw Error(ErrorCode::invalid_argument, std::string(variable) + " names " + in_quotes(path) + ", " + why +
                                               "; " + remedy + " would work");
}

void require_writable(const char* variable, const std::string& path) {
  if (!File(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, mode)))
    refuse(variable, path, "which cannot be written: " + error_text(errno), "a file in a folder of your own");
}

// The specs and shapes so far; null for a text that is no manifest of them.
Json parse_record(const std::string& text) {
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) return {{"kernels", Json::array()}};
  Json record = Json::parse(text, nullptr, false);
  const bool fits = record.is_object() && record.contains("kernels") && record["kernels"].is_array();
  return fits ? record : Json();
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Json shape_json(const Shape& shape) {
  Json json = {{"batch", std::max(shape.batch, 1)},
               {"seqlen_q", std::max(shape.seqlen_q, 1)},
               {"seqlen_k", std::max(shape.seqlen_k, 1)},
               {"num_heads_q", std::max(shape.num_heads_q, 1)},
               {"num_heads_kv", std::max(shape.num_heads_kv, 1)}};
  if (shape.page_size > 0) json["page_size"] = shape.page_size;
  return json;
}

// Adds the spec and the shape's bucket, which decides the kernel. Returns whether the manifest lacked them.
bool add(Json& record, const KernelEvent& event) {
  const Json spec = Json::parse(event.spec.to_json()), shape = shape_json(bucket(event.shape));
  for (Json& entry : record["kernels"]) {
    if (entry.value("spec", Json()) != spec || !entry.contains("shapes")) continue;
    Json& shapes = entry["shapes"];
    if (std::find(shapes.begin(), shapes.end(), shape) != shapes.end()) return false;
    shapes.push_back(shape);
    return true;
  }
  record["kernels"].push_back({{"spec", spec}, {"shapes", Json::array({shape})}});
  return true;
}

void write_log(const std::string& path, const KernelEvent& event) {
  using namespace std::chrono;
  const auto now = duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
  const Json line = {{"time", static_cast<double>(now) / 1e3},
                     {"pid", ::getpid()},
                     {"event", to_string(event.kind)},
                     {"target", event.target.str()},
                     {"ms", event.ms},
                     {"spec", Json::parse(event.spec.to_json())},
                     {"shape", shape_json(event.shape)},
                     {"path", event.path},
                     {"reason", event.reason}};
  const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  // One write of an appending file: lines of several processes do not mix. A pipe that nobody reads is not
  // waited for.
  if (const File file{::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, mode)})
    write_fully(file.get(), text.data(), text.size());
}

// The file is replaced as a whole, so that a reader never sees half a manifest. A second file holds the lock.
void write_record(const std::string& path, const KernelEvent& event) {
  const File lock{::open((path + ".lock").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, mode)};
  if (!lock || ::flock(lock.get(), LOCK_EX) != 0) return;
  Json record = parse_record(read_file(path));
  if (record.is_null() || !add(record, event)) return;
  const std::string text = record.dump(1, ' ', false, Json::error_handler_t::replace) + "\n",
                    temporary = path + ".new";
  const File file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode)};
  if (file && write_fully(file.get(), text.data(), text.size())) ::rename(temporary.c_str(), path.c_str());
}

}  // namespace

EventFiles::EventFiles(const std::optional<std::string>& log, const std::optional<std::string>& record)
    : log_(log ? *log : environment_variable(Variable::log)),
      record_(record ? *record : environment_variable(Variable::record)) {
  const char* const log_name = log ? "log" : "FLASHJIT_LOG";
  const char* const record_name = record ? "record" : "FLASHJIT_RECORD";
  if (!log_.empty()) require_writable(log_name, log_);
  if (record_.empty()) return;
  require_writable(record_name, record_);
  if (struct stat status; ::stat(record_.c_str(), &status) != 0 || !S_ISREG(status.st_mode))
    refuse(record_name, record_, "which is no regular file", "a new file");
  require_writable(record_name, record_ + ".lock");
  if (parse_record(read_file(record_)).is_null())
    refuse(record_name, record_, "which holds something else than a manifest", "a new file");
}

void EventFiles::write(const KernelEvent& event) const noexcept {
  try {
    if (!log_.empty()) write_log(log_, event);
    if (!record_.empty() && event.kind != KernelEvent::Kind::waiting) write_record(record_, event);
  } catch (...) {  // no memory for the text
  }
}

const char* to_string(KernelEvent::Kind kind) noexcept {
  switch (kind) {
    case KernelEvent::Kind::waiting:
      return "waiting";
    case KernelEvent::Kind::loaded:
      return "loaded";
    case KernelEvent::Kind::compiled:
      return "compiled";
    case KernelEvent::Kind::failed:
      return "failed";
  }
  return "unknown";
}

}  // namespace flashjit
