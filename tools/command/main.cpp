// flashjit: the command. Every verb is a file of this folder.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <new>
#include <string_view>
#include <vector>

#include "runtime/flashjit.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/verbs.hpp"

namespace flashjit::command {
namespace {

int run(int argc, char** argv, bool json) {
  CLI::App app{"Attention kernels from specs, at run time.", "flashjit"};
  app.set_version_flag("--version", std::string("flashjit ") + version());
  app.require_subcommand(1);
  app.footer(
      "A SPEC is a file, '-' for standard input, or the JSON text itself.\n"
      "'flashjit VERB --help' shows a verb's options and examples.\n\n"
      "Examples:\n"
      "  flashjit run '{\"op\": \"forward\", \"dtype\": \"bf16\", \"head_dim\": 64, \"mask\": [\"causal\"]}' "
      "--verify\n"
      "  flashjit mask tools/examples/causal_bf16.json --seqlen-q 2048 --svg mask.svg\n"
      "  flashjit bench tools/examples/causal_bf16.json --device cuda:0 --seqlens 1024,4096,16384\n\n" +
      exit_code_help());

  const Arguments arguments(app);
  const std::vector<Verb> verbs = {add_doctor(arguments),   add_render(arguments), add_compile(arguments),
                                   add_generate(arguments), add_mask(arguments),   add_run(arguments),
                                   add_bench(arguments),    add_tune(arguments),   add_prebuild(arguments),
                                   add_cache(arguments)};
  try {
    app.parse(argc, argv);
    for (const Verb& verb : verbs) {
      if (verb.arguments.parsed()) return verb.run();
    }
    return exit_usage;
  } catch (const CLI::Success& wanted) {  // --help, --version
    return app.exit(wanted);
  } catch (const CLI::ParseError& error) {
    return report_usage_error(std::string(error.what()) + "; see flashjit --help", json);
  } catch (const Error& error) {
    return report_error(error, json);
  } catch (const std::bad_alloc&) {
    return report_error(Error(ErrorCode::device_failed, "out of memory on the host"), json);
  } catch (const std::exception& error) {
    return report_error(Error(ErrorCode::internal, error.what()), json);
  }
}

}  // namespace
}  // namespace flashjit::command

int main(int argc, char** argv) {
  // Errors of parsing are reported in JSON, too, so this cannot wait for it.
  const bool json = std::any_of(argv, argv + argc, [](std::string_view word) { return word == "--json"; });
  return flashjit::command::finish_output(flashjit::command::run(argc, argv, json), json);
}
