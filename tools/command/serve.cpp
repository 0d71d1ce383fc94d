// flashjit serve: the compile service (tools/serve/).
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "cache/environment.hpp"
#include "codegen/base/error.hpp"
#include "runtime/build.hpp"
#include "runtime/compiler.hpp"
#include "runtime/remote/plugin_client.hpp"
#include "runtime/thread_pool.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/verbs.hpp"
#include "tools/serve/service.hpp"

namespace flashjit::command {
namespace {

struct ServeOptions {
  std::vector<std::string> listen;
  std::optional<std::string> cache_dir;
  std::string key, tokens, remote;
  bool read_only = false;
  int jobs = 0, client_jobs = 0, queue = 1000, client_queue = 200, connections = 1024;
  double seconds = 60, stop_seconds = 10;
  std::uint64_t bytes = std::uint64_t{4} << 30, memory = std::uint64_t{16} << 20;
};

// One write for each line, so that lines of several processes on one file stay whole.
void write_log(const std::string& line) {
  const std::string whole = line + "\n";
  (void)!::write(STDERR_FILENO, whole.data(), whole.size());
}

int serve_kernels(const ServeOptions& given) {
  std::vector<int> sockets = serve::passed_sockets();
  std::string key_path, trusted = environment_variable(Variable::trust);
  if (!given.read_only || !given.key.empty() || !signing_key_path({}).empty()) {
    key_path = given.key.empty() ? signing_key_path({}) : given.key;
    if (key_path.empty())
      throw Error(
          ErrorCode::invalid_argument,
          "there is no key to sign with: give --key FILE, or set FLASHJIT_SIGNING_KEY; flashjit cache keygen "
          "makes a key, and --read-only needs none");
    const SigningKey key = read_signing_key(key_path);
    trusted += (trusted.empty() ? "" : ":") + key.name + "=" + key.public_key;
    if (const std::string why = Trust::parse(trusted).distrust(key.public_key); !why.empty())
      throw Error(ErrorCode::cache_failed, "signing key " + key_path + " is " + why);
  }
  serve::ServiceOptions options{
      .cache = open_cache(given.cache_dir, "", 0,
                          {.remote = given.remote, .trust = trusted, .signing_key = key_path})};
  if (!options.cache.disk)
    throw Error(ErrorCode::cache_failed, "a service needs a cache folder: " + options.cache.note);
  if (!given.tokens.empty()) options.clients = serve::Clients::of_file(given.tokens);
  options.read_only = given.read_only;
  options.child = {given.seconds, given.bytes};
  const auto jobs = static_cast<std::size_t>(given.jobs ? given.jobs : available_cpus());
  options.queue = {jobs, given.client_jobs ? static_cast<std::size_t>(given.client_jobs) : jobs,
                   static_cast<std::size_t>(given.queue), static_cast<std::size_t>(given.client_queue)};
  options.http.connections = static_cast<std::size_t>(given.connections);
  options.stop = std::chrono::milliseconds(static_cast<std::int64_t>(given.stop_seconds * 1000));
  options.memory = given.memory;
  options.log = write_log;

  ::signal(SIGPIPE, SIG_IGN);
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  serve::Service service(std::move(options));
  if (sockets.empty())
    for (const std::string& place :
         given.listen.empty() ? std::vector<std::string>{"127.0.0.1:8470"} : given.listen)
      sockets.push_back(serve::listen_at(place));
  service.run(sockets);
  return exit_ok;
}

}  // namespace

Verb add_serve(const Arguments& parent) {
  const Arguments app = parent.add_subcommand(
      "serve", "Answer other hosts' requests for kernels by HTTP, compiling what is not there");
  const auto options = std::make_shared<ServeOptions>();
  app.add_option(
         "--listen", options->listen,
         "HOST:PORT, [ADDRESS]:PORT or unix:PATH; several with commas; sockets that systemd passes go "
         "before [127.0.0.1:8470]")
      .delimiter(',')
      .type_name("PLACE");
  add_cache_dir(app, options->cache_dir);
  app.add_option("--key", options->key, "File of the secret key that signs [FLASHJIT_SIGNING_KEY]")
      .type_name("FILE");
  app.add_option("--tokens", options->tokens, "File of lines NAME=TOKEN, of which clients must have one")
      .type_name("FILE");
  app.add_option("--remote", options->remote, "Stores that are asked first, and that get what is compiled")
      .type_name("URL");
  app.add_flag("--read-only", options->read_only, "Compile nothing");
  app.add_option("--jobs", options->jobs, "Compiles at once [processors]").at_least(1);
  app.add_option("--client-jobs", options->client_jobs, "Compiles at once of one client [--jobs]")
      .at_least(1);
  app.add_option("--queue", options->queue, "Compiles that wait").at_least(1).capture_default_str();
  app.add_option("--client-queue", options->client_queue, "Compiles of one client that wait")
      .at_least(1)
      .capture_default_str();
  app.add_option("--compile-seconds", options->seconds,
                 "Limit of each compile's processor time; by the clock it may take ten times as long")
      .between(0.1, 3600.0)
      .capture_default_str();
  app.add_option("--compile-bytes", options->bytes, "Limit of the memory of each compile")
      .capture_default_str();
  app.add_option("--connections", options->connections, "Open connections").at_least(1).capture_default_str();
  app.add_option("--memory", options->memory, "Bytes of kernels that are kept in memory")
      .capture_default_str();
  app.add_option("--stop-seconds", options->stop_seconds, "For compiles that run when the service is to stop")
      .between(0.0, 3600.0)
      .capture_default_str();
  app.footer(
      "Writes a line of JSON to stderr for each event. SIGTERM stops it: compiles that run have\n"
      "--stop-seconds to end.\n"
      "flashjit cache keygen makes the key.\n\n"
      "Examples:\n"
      "  flashjit serve --listen 0.0.0.0:8470 --key service.key --cache-dir kernels --tokens tokens\n");
  return {app, [options] { return serve_kernels(*options); }};
}

}  // namespace flashjit::command
