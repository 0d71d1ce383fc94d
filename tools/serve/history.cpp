#include "tools/serve/history.hpp"

#include <cstdio>
#include <sstream>

namespace flashjit::serve {
namespace {

constexpr std::size_t most_events = 50, most_log = 4000;

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += c;
    }
  return safe;
}

std::string label(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    if (c == '\\' || c == '"') safe += '\\';
    safe += c == '\n' ? ' ' : c;
  }
  return '"' + safe + '"';
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", value);
  return text;
}

void metric(std::ostream& out, const char* name, const char* kind, const char* help) {
  out << "# HELP flashjit_" << name << ' ' << help << "\n# TYPE flashjit_" << name << ' ' << kind << '\n';
}

template <class Value>
void gauge(std::ostream& out, const char* name, const char* help, Value value, const char* kind = "gauge") {
  metric(out, name, kind, help);
  out << "flashjit_" << name << ' ' << value << '\n';
}

}  // namespace

void History::note_compile(CompileEvent event) {
  ++results_[{event.target, event.result}];
  if (event.result == "compiled") {
    Times& times = times_[event.target];
    ++times.count;
    times.seconds += event.seconds;
    times.longest = std::max(times.longest, event.seconds);
  }
  if (event.log.size() > most_log) event.log.resize(most_log);
  if (event.message.size() > most_log) event.message.resize(most_log);
  if (event.spec.size() > most_log) event.spec.resize(most_log);
  compiles_.push_front(std::move(event));
  if (compiles_.size() > most_events) compiles_.pop_back();
}

void History::note_refused(RefusedEvent event) {
  if (event.why.size() > most_log) event.why.resize(most_log);
  refused_.push_front(std::move(event));
  if (refused_.size() > most_events) refused_.pop_back();
}

double History::mean_seconds() const {
  std::uint64_t count = 0;
  double seconds = 0;
  for (const auto& [target, times] : times_) {
    count += times.count;
    seconds += times.seconds;
  }
  return count == 0 ? 1 : seconds / static_cast<double>(count);
}

std::string History::metrics(const Gauges& now) const {
  std::ostringstream out;
  metric(out, "requests_total", "counter", "Requests by method and status of the answer.");
  for (const auto& [key, count] : requests_)
    out << "flashjit_requests_total{method=" << label(key.first) << ",status=\"" << key.second << "\"} "
        << count << '\n';
  gauge(out, "hits_total", "Requests answered with an object that was there.", hits_, "counter");
  gauge(out, "malformed_total", "Requests that were no HTTP, or beyond a limit.", now.malformed, "counter");
  metric(out, "compiles_total", "counter", "Kernels asked for that were not there, by target and result.");
  for (const auto& [key, count] : results_)
    out << "flashjit_compiles_total{target=" << label(key.first) << ",result=" << label(key.second) << "} "
        << count << '\n';
  metric(out, "compile_seconds", "summary", "Times of compiles by target.");
  for (const auto& [target, times] : times_)
    out << "flashjit_compile_seconds_sum{target=" << label(target) << "} " << number(times.seconds)
        << "\nflashjit_compile_seconds_count{target=" << label(target) << "} " << times.count << '\n';
  metric(out, "compile_seconds_longest", "gauge", "The longest compile by target.");
  for (const auto& [target, times] : times_)
    out << "flashjit_compile_seconds_longest{target=" << label(target) << "} " << number(times.longest)
        << '\n';
  gauge(out, "queued", "Compiles that wait.", now.queued);
  gauge(out, "running", "Compiles that run.", now.running);
  gauge(out, "connections", "Open connections.", now.connections);
  gauge(out, "pending", "Requests that wait for their answer.", now.pending);
  gauge(out, "objects", "Objects in memory.", now.objects);
  gauge(out, "object_bytes", "Octets of the objects in memory.", now.object_bytes);
  gauge(out, "resident_bytes", "Memory of the service.", now.memory);
  gauge(out, "nursery_resident_bytes", "Memory of the process that starts compilers.", now.nursery_memory);
  gauge(out, "nurseries_total", "Times that this process was started.", now.nurseries, "counter");
  gauge(out, "uptime_seconds", "Time since the start.",
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start_).count());
  return out.str();
}

std::string History::page(const Gauges& now, const std::string& what) const {
  std::ostringstream out;
  out << "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
         "content=\"width=device-width\"><title>flashjit serve</title><style>\n"
         "body{font:15px/1.4 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}\n"
         "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{text-align:left;padding:.25em "
         ".6em;border-bottom:1px solid "
         "#ddd;vertical-align:top}code{overflow-wrap:anywhere}pre{white-space:pre-wrap}\n"
         "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}}\n"
         "</style></head><body>\n<h1>flashjit serve</h1>\n<p>"
      << escaped(what) << (now.stopping ? " It is stopping." : "") << "</p>\n<table id=\"state\"><tr>";
  const std::pair<const char*, std::uint64_t> numbers[] = {
      {"running", now.running},           {"queued", now.queued}, {"connections", now.connections},
      {"objects in memory", now.objects}, {"hits", hits_},        {"MiB", now.memory >> 20}};
  for (const auto& [name, value] : numbers) out << "<th>" << name << "</th>";
  out << "</tr><tr>";
  for (const auto& [name, value] : numbers) out << "<td>" << value << "</td>";
  out << "</tr></table>\n<h2>Queue</h2>\n";
  if (now.jobs.empty()) {
    out << "<p>Nothing waits.</p>\n";
  } else {
    out << "<table id=\"queue\"><tr><th>state</th><th>spec</th></tr>\n";
    for (const auto& [spec, state] : now.jobs)
      out << "<tr><td>" << escaped(state) << "</td><td><code>" << escaped(spec) << "</code></td></tr>\n";
    out << "</table>\n";
  }
  out << "<h2>Last compiles</h2>\n";
  if (compiles_.empty()) {
    out << "<p>There were none.</p>\n";
  } else {
    out << "<table "
           "id=\"compiles\"><tr><th>time</th><th>client</th><th>target</th><th>result</th><th>seconds</th>"
           "<th>spec</th></tr>\n";
    for (const CompileEvent& one : compiles_) {
      out << "<tr><td>" << one.time << "</td><td>" << escaped(one.client) << "</td><td>"
          << escaped(one.target) << "</td><td>" << escaped(one.result) << "</td><td>" << number(one.seconds)
          << "</td><td><code>" << escaped(one.spec) << "</code>";
      if (!one.message.empty()) out << "<br>" << escaped(one.message);
      if (!one.log.empty())
        out << "<details><summary>log</summary><pre>" << escaped(one.log) << "</pre></details>";
      out << "</td></tr>\n";
    }
    out << "</table>\n";
  }
  out << "<h2>Refused</h2>\n";
  if (refused_.empty()) {
    out << "<p>Nothing was.</p>\n";
  } else {
    out << "<table id=\"refused\"><tr><th>time</th><th>client</th><th>status</th><th>why</th></tr>\n";
    for (const RefusedEvent& one : refused_)
      out << "<tr><td>" << one.time << "</td><td>" << escaped(one.client) << "</td><td>" << one.status
          << "</td><td>" << escaped(one.why) << "</td></tr>\n";
    out << "</table>\n";
  }
  out << "</body></html>\n";
  return out.str();
}

}  // namespace flashjit::serve
