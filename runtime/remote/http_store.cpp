// A store that answers GET, PUT, HEAD and DELETE of paths: nginx with WebDAV, an object store's front. One
// that says by Accept-Post that it compiles what it lacks is asked for that by POST (tools/serve/). libcurl
// is opened by the first such store, since opening it takes longer than all the rest of the plugin.
#include <curl/curl.h>
#include <dlfcn.h>
#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>

#include "runtime/remote/pool.hpp"
#include "runtime/remote/store.hpp"
#include "runtime/remote/url.hpp"

namespace flashjit::remote_plugin {
namespace {

struct Curl {
  decltype(&::curl_global_init) global_init;
  decltype(&::curl_easy_init) easy_init;
  decltype(&::curl_easy_cleanup) easy_cleanup;
  decltype(&::curl_easy_reset) easy_reset;
  decltype(&::curl_easy_setopt) easy_setopt;
  decltype(&::curl_multi_init) multi_init;
  decltype(&::curl_multi_cleanup) multi_cleanup;
  decltype(&::curl_multi_add_handle) multi_add_handle;
  decltype(&::curl_multi_remove_handle) multi_remove_handle;
  decltype(&::curl_multi_perform) multi_perform;
  decltype(&::curl_multi_poll) multi_poll;
  decltype(&::curl_multi_info_read) multi_info_read;
  decltype(&::curl_easy_getinfo) easy_getinfo;
  decltype(&::curl_easy_strerror) easy_strerror;
  decltype(&::curl_slist_append) slist_append;
  decltype(&::curl_slist_free_all) slist_free_all;
  decltype(&::curl_getdate) getdate;
};

Curl open_curl() {
  void* const library = ::dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Failure(std::string("http needs libcurl: ") + ::dlerror());
  Curl curl{};
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (!function) throw Failure(std::string("libcurl.so.4 lacks ") + name);
  };
  find(curl.global_init, "curl_global_init");
  find(curl.easy_init, "curl_easy_init");
  find(curl.easy_cleanup, "curl_easy_cleanup");
  find(curl.easy_reset, "curl_easy_reset");
  find(curl.easy_setopt, "curl_easy_setopt");
  find(curl.multi_init, "curl_multi_init");
  find(curl.multi_cleanup, "curl_multi_cleanup");
  find(curl.multi_add_handle, "curl_multi_add_handle");
  find(curl.multi_remove_handle, "curl_multi_remove_handle");
  find(curl.multi_perform, "curl_multi_perform");
  find(curl.multi_poll, "curl_multi_poll");
  find(curl.multi_info_read, "curl_multi_info_read");
  find(curl.easy_getinfo, "curl_easy_getinfo");
  find(curl.easy_strerror, "curl_easy_strerror");
  find(curl.slist_append, "curl_slist_append");
  find(curl.slist_free_all, "curl_slist_free_all");
  find(curl.getdate, "curl_getdate");
  if (curl.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) throw Failure("libcurl cannot start");
  return curl;
}

const Curl& curl() {
  static const Curl opened = open_curl();
  return opened;
}

// Handles of libcurl, which keep their connection for the next request. The multi handle lets a request end
// when its answer does not begin.
struct Session {
  CURLM* multi = curl().multi_init();
  CURL* handle = curl().easy_init();
  Session() {
    if (!multi || !handle) throw std::bad_alloc();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    if (handle) curl().easy_cleanup(handle);
    if (multi) curl().multi_cleanup(multi);
  }
};

struct Request {
  std::string_view sent;      // what a PUT has not sent yet
  std::string received = {};  // the body
  std::size_t most = 0;       // octets of it
  std::time_t date = -1, modified = -1;
  bool accepts_post = false;
  long retry_after = 0;      // seconds
  bool has_answer = false;   // the beginning of it
  bool has_headers = false;  // all of them; libcurl takes a connection that ends early for an empty body
};

std::size_t take_body(char* from, std::size_t, std::size_t size, void* to) {
  auto& request = *static_cast<Request*>(to);
  if (size > request.most - request.received.size()) return 0;
  request.received.append(from, size);
  return size;
}

std::size_t give_body(char* to, std::size_t unit, std::size_t count, void* from) {
  std::string_view& sent = static_cast<Request*>(from)->sent;
  const std::size_t size = std::min(unit * count, sent.size());
  std::memcpy(to, sent.data(), size);
  sent.remove_prefix(size);
  return size;
}

std::size_t take_header(char* from, std::size_t, std::size_t size, void* to) {
  auto& request = *static_cast<Request*>(to);
  std::string line(from, size);
  request.has_answer = true;
  const std::size_t colon = std::min(line.find(':'), line.size());
  for (std::size_t i = 0; i < colon; ++i)
    line[i] = static_cast<char>(std::tolower(static_cast<unsigned char>(line[i])));
  const auto value = [&](std::string_view name, std::time_t& time) {
    if (std::string_view(line).substr(0, colon) == name)
      time = curl().getdate(line.substr(colon + 1).c_str(), nullptr);
  };
  request.has_headers = line == "\r\n" || line == "\n";
  value("date", request.date);
  value("last-modified", request.modified);
  const std::string_view name = std::string_view(line).substr(0, colon);
  if (name == "accept-post") request.accepts_post = true;
  if (name == "retry-after") request.retry_after = std::atol(line.c_str() + colon + 1);
  return size;
}

class HttpStore : public Store {
 public:
  explicit HttpStore(const Options& options) : options_(options) {
    const Url url = parse_url(options.url, {{"http", "80"}, {"https", "443"}});
    const bool address = url.host.find(':') != std::string::npos;
    base_ =
        url.scheme + "://" + (address ? "[" + url.host + "]" : url.host) + ":" + url.port + url.path + "/";
    curl();
  }

  bool get(const std::string& name, std::string& bytes) override {
    Request request{.sent = {}, .most = options_.max_bytes};
    const long status = perform("GET", name, request);
    if (is_absent(status)) return false;
    require(status, status == 200);
    bytes = std::move(request.received);
    return true;
  }

  void put(const std::string& name, std::string_view bytes) override {
    Request request{.sent = bytes};
    const long status = perform("PUT", name, request);
    require(status, status == 200 || status == 201 || status == 204);
  }

  bool exists(const std::string& name) override {
    Request request;
    const long status = perform("HEAD", name, request);
    require(status, status == 200 || is_absent(status));
    return status == 200;
  }

  // A lease is an object that is as old as its Last-Modified says, by the server's own clock. An object store
  // gives it to one of those who ask for it by a conditional PUT. nginx ignores the condition and tells new
  // objects from overwritten ones. Two may get it if they ask within the same moment, or where a holder has
  // died; the cost is one compile more.
  bool lease(const std::string& name, const std::string& token, std::chrono::milliseconds ttl) override {
    if (ttl.count() == 0) {
      Request request;
      const long status = perform("DELETE", name, request);
      require(status, (status >= 200 && status < 300) || is_absent(status));
      return true;
    }
    Request asked;
    const long found = perform("HEAD", name, asked);
    require(found, found == 200 || is_absent(found));
    const bool is_new = is_absent(found);
    if (!is_new && asked.date - asked.modified <= ttl.count() / 1000) return false;
    Request request{.sent = token};
    const long status = perform("PUT", name, request, is_new ? "If-None-Match: *" : nullptr);
    if (is_new && (status == 409 || status == 412 || status == 204)) return false;
    require(status, status == 200 || status == 201 || status == 204);
    if (status == 201) return true;
    std::string holder;
    return get(name, holder) && holder == token;
  }

  bool makes() const override { return makes_; }

  Made make(const std::string& text) override {
    Request request{.sent = text, .most = options_.max_bytes};
    const long status =
        perform("POST", "compile?wait_ms=" + std::to_string(options_.answer.count() / 2), request);
    if (status == 200) return {Made::yes, std::move(request.received)};
    if (status == 202) return {Made::later};
    if (status == 429 || status == 503)
      return {Made::later, {}, std::chrono::seconds(std::clamp(request.retry_after, 1l, 600l))};
    require(status, (status >= 400 && status < 500) || status == 501);
    request.received.resize(std::min(request.received.size(), most_of_an_answer));
    return {Made::refused,
            request.received.empty() ? "HTTP status " + std::to_string(status) : std::move(request.received)};
  }

 private:
  static bool is_absent(long status) { return status == 404 || status == 410; }
  static void require(long status, bool good) {
    if (!good) throw Failure("HTTP status " + std::to_string(status));
  }

  // The status of the answer.
  long perform(const char* method, const std::string& name, Request& request,
               const char* condition = nullptr) {
    const Curl& c = curl();
    std::unique_ptr<Session> session = sessions_.take();
    if (!session) session = std::make_unique<Session>();
    CURL* const handle = session->handle;
    c.easy_reset(handle);
    const std::string url = base_ + name, method_name = method;
    char error[CURL_ERROR_SIZE] = "";
    curl_slist* headers = nullptr;
    const auto header = [&](const std::string& line) { headers = c.slist_append(headers, line.c_str()); };
    header("Expect:");
    if (condition) header(condition);
    if (!options_.token.empty() && options_.token.find(':') == std::string::npos)
      header("Authorization: Bearer " + options_.token);
    const std::unique_ptr<curl_slist, void (*)(curl_slist*)> freed(headers, c.slist_free_all);
    const auto set = [&](CURLoption option, auto value) { c.easy_setopt(handle, option, value); };
    set(CURLOPT_URL, url.c_str());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_TIMEOUT_MS, static_cast<long>(options_.timeout.count()));
    set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.answer.count()));
    set(CURLOPT_ERRORBUFFER, error);
    set(CURLOPT_USERAGENT, "flashjit");
    set(CURLOPT_HTTPHEADER, headers);
    set(CURLOPT_WRITEFUNCTION, &take_body);
    set(CURLOPT_WRITEDATA, static_cast<void*>(&request));
    set(CURLOPT_HEADERFUNCTION, &take_header);
    set(CURLOPT_HEADERDATA, static_cast<void*>(&request));
    if (options_.token.find(':') != std::string::npos) set(CURLOPT_USERPWD, options_.token.c_str());
    if (!options_.ca_file.empty()) set(CURLOPT_CAINFO, options_.ca_file.c_str());
    if (method_name == "PUT") {
      set(CURLOPT_UPLOAD, 1L);
      set(CURLOPT_READFUNCTION, &give_body);
      set(CURLOPT_READDATA, static_cast<void*>(&request));
      set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(request.sent.size()));
      request.most = most_of_an_answer;
    } else if (method_name == "POST") {
      header("Content-Type: application/json");
      set(CURLOPT_HTTPHEADER, headers);
      set(CURLOPT_POST, 1L);
      set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.sent.size()));
      set(CURLOPT_POSTFIELDS, request.sent.data());
    } else if (method_name == "HEAD") {
      set(CURLOPT_NOBODY, 1L);
    } else if (method_name == "DELETE") {
      set(CURLOPT_CUSTOMREQUEST, "DELETE");
      request.most = most_of_an_answer;
    }
    const CURLcode code = run(*session, request, method_name != "PUT");
    long status = 0;
    c.easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
    if (code != CURLE_OK) {
      const std::string reason = *error ? error : c.easy_strerror(code);
      throw Failure(code == CURLE_WRITE_ERROR ? "the answer is larger than any entry" : printable(reason));
    }
    if (!request.has_headers) throw Failure("the server closed the connection");
    sessions_.give_back(std::move(session));
    if (is_absent(status)) makes_ = request.accepts_post;
    return status;
  }

  CURLcode run(Session& session, const Request& request, bool hurries) const {
    using std::chrono::steady_clock;
    const Curl& c = curl();
    if (c.multi_add_handle(session.multi, session.handle) != CURLM_OK) throw std::bad_alloc();
    const std::unique_ptr<void, std::function<void(void*)>> removed(
        session.handle, [&](void* handle) { c.multi_remove_handle(session.multi, handle); });
    const auto deadline = steady_clock::now() + options_.answer;
    for (int running = 1;;) {
      if (c.multi_perform(session.multi, &running) != CURLM_OK) throw Failure("libcurl fails");
      int left = 0;
      if (const CURLMsg* const message = c.multi_info_read(session.multi, &left);
          message && message->msg == CURLMSG_DONE)
        return message->data.result;
      auto most = std::chrono::milliseconds(1000);
      if (hurries && !request.has_answer) {
        most = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now());
        if (most.count() <= 0) throw Failure("no answer in time");
      }
      c.multi_poll(session.multi, nullptr, 0, static_cast<int>(most.count()), nullptr);
    }
  }

  static constexpr std::size_t most_of_an_answer = std::size_t{1} << 20;  // a page that nobody reads
  const Options options_;
  std::string base_;
  Pool<Session> sessions_;
  std::atomic<bool> makes_{false};
};

}  // namespace

std::unique_ptr<Store> http_store(const Options& options) {
  return std::make_unique<HttpStore>(options);
}

}  // namespace flashjit::remote_plugin
