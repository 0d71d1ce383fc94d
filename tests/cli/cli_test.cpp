// The output of most verbs but `run`, as text and as JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <sstream>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

bool has_nvrtc(const CommandLine& flashjit) {
  return flashjit({"doctor", "--json"}).json()["compiles_for_cuda"];
}

TEST(Help, NamesVerbsAndExitCodes) {
  const CommandLine flashjit;
  const Outcome help = flashjit({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* word : {"doctor", "render", "compile", "generate", "mask", "run", "bench", "tune",
                           "prebuild", "cache", "Exit codes", "invalid_spec"})
    EXPECT_THAT(help.out, HasSubstr(word));
}

TEST(Help, ExamplesUseOptionsThatExist) {
  const CommandLine flashjit;
  for (const std::vector<std::string>& verb : std::vector<std::vector<std::string>>{{"doctor"},
                                                                                    {"render"},
                                                                                    {"compile"},
                                                                                    {"generate"},
                                                                                    {"mask"},
                                                                                    {"run"},
                                                                                    {"bench"},
                                                                                    {"prebuild"},
                                                                                    {"serve"},
                                                                                    {"cache"},
                                                                                    {"cache", "explain"}}) {
    const Outcome help = flashjit(verb + std::vector<std::string>{"--help"});
    EXPECT_EQ(help.exit_code, 0);
    // But for names of options, which stand alone.
    std::istringstream lines(help.out);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(std::string(30, ' '))) {
        EXPECT_LE(line.size(), 80u) << verb.back() << line;
      }
    }
    EXPECT_THAT(help.out, Not(HasSubstr("Excludes: --tensors --q")));
    const std::size_t examples = help.out.find("Examples:");
    ASSERT_NE(examples, std::string::npos) << verb.back();
    std::string options = help.out.substr(0, examples);
    if (verb.size() == 1 && verb[0] == "cache") options += flashjit({"cache", "explain", "--help"}).out;
    const std::string text = help.out.substr(examples);
    const std::regex option("--[a-z][a-z-]*");
    for (std::sregex_iterator it(text.begin(), text.end(), option), end; it != end; ++it)
      EXPECT_THAT(options, HasSubstr(it->str())) << verb.back();
  }
}

// The test also runs the first example, which is a run of a spec.
TEST(Help, HasThreeExamples) {
  const CommandLine flashjit;
  const std::string help = flashjit({"--help"}).out;
  const std::regex example("\n  flashjit ([a-z]+) ([^\n]*)"), option("--[a-z][a-z-]*");
  std::vector<std::string> verbs;
  for (std::sregex_iterator it(help.begin(), help.end(), example), end; it != end; ++it) {
    verbs.push_back((*it)[1]);
    const std::string options = flashjit({verbs.back(), "--help"}).out, line = (*it)[2];
    for (std::sregex_iterator of(line.begin(), line.end(), option); of != end; ++of)
      EXPECT_THAT(options, HasSubstr(of->str())) << it->str();
  }
  EXPECT_THAT(verbs, ::testing::ElementsAre("run", "mask", "bench"));
  std::smatch spec;
  ASSERT_TRUE(std::regex_search(help, spec, std::regex("flashjit run '([^']*)' --verify\n")));
  EXPECT_TRUE(flashjit({"run", spec[1], "--verify", "--json"}).json()["ok"].get<bool>());
}

TEST(Version, IsPrinted) {
  const Outcome version = CommandLine()({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(std::regex_match(version.out, std::regex("flashjit [0-9]+\\.[0-9]+\\.[0-9]+\n")))
      << version.out;
}

TEST(Doctor, FindsTheCpu) {
  const CommandLine flashjit;
  const nlohmann::json report = flashjit({"doctor", "--json"}).json();
  EXPECT_TRUE(report["devices"]["cpu"].get<bool>());
  std::vector<std::string> names;
  for (const nlohmann::json& finding : report["findings"]) {
    names.push_back(finding["name"]);
    EXPECT_FALSE(finding.value(finding["ok"].get<bool>() ? "found" : "problem", "").empty()) << finding;
  }
  EXPECT_THAT(names, ::testing::ElementsAre("cpu", "llvm", "gpu", "nvrtc", "cache"));
  EXPECT_THAT(flashjit({"doctor"}).out, AllOf(HasSubstr("found    cpu"), HasSubstr("CPU kernels run here")));
}

TEST(Doctor, ShowsTheCachesInOrderOfSearch) {
  CommandLine builder, flashjit;
  builder({"compile", small_spec, "--target", "x86-64-v3,x86-64-v4"});
  for (const auto& item : std::filesystem::directory_iterator(builder.cache() + "/v3")) {
    if (item.path().extension() != ".kernel") continue;
    std::filesystem::resize_file(item.path(), 100);
    break;
  }
  flashjit.environment["FLASHJIT_CACHE_PATH"] = builder.cache();
  const auto caches = [&](const nlohmann::json& report) {
    std::vector<nlohmann::json> found;
    for (const nlohmann::json& f : report["findings"])
      if (f["name"] == "layer" || f["name"] == "cache") found.push_back(f);
    return found;
  };
  const auto found = caches(flashjit({"doctor", "--json"}).json());
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0]["name"], "layer");
  EXPECT_THAT(found[0]["found"].get<std::string>(),
              AllOf(HasSubstr(std::filesystem::canonical(builder.cache())), HasSubstr("1 entries, 1 damaged"),
                    HasSubstr("0 tune records")));
  EXPECT_THAT(found[1]["found"].get<std::string>(), HasSubstr("0 entries, 0 tune records"));

  // An engine does not start if a layer cannot be used.
  flashjit.environment["FLASHJIT_CACHE_PATH"] = builder.cache() + ":" + flashjit.folder() + "/missing";
  const Outcome broken = flashjit({"doctor"});
  EXPECT_EQ(broken.exit_code, 4);
  EXPECT_THAT(broken.out, AllOf(HasSubstr("missing  layer  cache folder " + flashjit.folder() + "/missing: "),
                                HasSubstr("found    layer"), HasSubstr("CPU kernels do not run here"),
                                HasSubstr("No engine starts: ")));
}

TEST(Doctor, SaysWhatIsMissingAndWhatToDo) {
  CommandLine flashjit;
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["FLASHJIT_NVRTC"] = flashjit.missing("libnvrtc.so");
  const Outcome report = flashjit({"doctor"});
  EXPECT_EQ(report.exit_code, 4);
  EXPECT_THAT(report.out, AllOf(HasSubstr("missing  llvm"), HasSubstr("missing  nvrtc"),
                                HasSubstr("FLASHJIT_LLVM_PLUGIN")));
}

// An application runs on a host that has prebuilt kernels and no compiler.
TEST(Doctor, RunsAndCompilesAreTwoAnswers) {
  const CommandLine builder;
  builder({"compile", small_spec, "--target", "x86-64-v3"});
  CommandLine flashjit;
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["FLASHJIT_NVRTC"] = flashjit.missing("libnvrtc.so");
  flashjit.environment["FLASHJIT_CACHE_PATH"] = builder.cache();
  const Outcome report = flashjit({"doctor"});
  EXPECT_EQ(report.exit_code, 0) << report.out;
  EXPECT_THAT(report.out, HasSubstr("CPU kernels run here where they are prebuilt, and do not compile"));
  const nlohmann::json json = flashjit({"doctor", "--json"}).json();
  EXPECT_TRUE(json["devices"]["cpu"].get<bool>());
  EXPECT_FALSE(json["compiles_for_cpu"].get<bool>());
  EXPECT_FALSE(json["compiles_for_cuda"].get<bool>());
  // It says what it looked at, and makes nothing.
  EXPECT_THAT(report.out, HasSubstr(flashjit.missing("libnvrtc.so") + ": "));
  EXPECT_THAT(report.out, HasSubstr("not there yet"));
  EXPECT_FALSE(std::filesystem::exists(flashjit.cache()));
  // A folder that cannot be made ends an engine, too.
  const std::string file = flashjit.file("file", "");
  const Outcome refused = flashjit({"doctor", "--cache-dir", file + "/cache"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.out, HasSubstr("No engine starts: "));
}

// NVRTC without its second library is found, and compiles nothing.
TEST(Doctor, TriesTheCompilers) {
  CommandLine flashjit;
  flashjit.environment["FLASHJIT_NVRTC"] = "/usr/lib/x86_64-linux-gnu/libm.so.6";
  const nlohmann::json json = flashjit({"doctor", "--json"}).json();
  for (const nlohmann::json& finding : json["findings"])
    if (finding["name"] == "nvrtc") {
      EXPECT_THAT(finding["problem"].get<std::string>(), HasSubstr("was found and cannot be used ("));
      EXPECT_THAT(finding["detail"].get<std::string>(), HasSubstr("has no nvrtcVersion"));
    }
}

TEST(Render, PrintsATranslationUnit) {
  const CommandLine flashjit;
  const Outcome text = flashjit({"render", small_spec, "--target", "x86-64-v3"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out,
              AllOf(HasSubstr("struct Spec"), HasSubstr("struct Config"), HasSubstr("flashjit_forward")));
  const nlohmann::json json = flashjit({"render", small_spec, "--target", "x86-64-v3", "--json"}).json();
  EXPECT_EQ(json["text"], text.out);
  EXPECT_EQ(json["target"], "x86-64-v3");
  EXPECT_FALSE(json["headers"].empty());
  EXPECT_EQ(json["steps"][0]["entry"], "flashjit_forward");
}

TEST(Render, StandaloneIncludesNothing) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "forward", "dtype": "bf16", "head_dim": 64})";
  const Outcome text = flashjit({"render", spec, "--target", "sm_80", "--standalone"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_EQ(text.out.find("#include"), std::string::npos);
  EXPECT_GT(text.out.size(), 5000u);
}

TEST(Spec, ComesFromAFileStandardInputOrTheCommandLine) {
  const CommandLine flashjit;
  const std::string inline_text = flashjit({"render", small_spec}).out;
  EXPECT_FALSE(inline_text.empty());
  EXPECT_EQ(flashjit({"render", flashjit.file("spec.json", small_spec)}).out, inline_text);
  EXPECT_EQ(flashjit({"render", "-"}, small_spec).out, inline_text);
}

TEST(Compile, CompilesThenFindsOnDisk) {
  const CommandLine flashjit;
  const nlohmann::json first = flashjit({"compile", small_spec, "--target", "native", "--json"}).json();
  const nlohmann::json second = flashjit({"compile", small_spec, "--target", "native", "--json"}).json();
  for (const char* name : {"cache_key", "target", "origin", "get_ms", "registers", "spill_bytes",
                           "shared_memory", "config", "path", "key", "ms", "smem_bytes"})
    EXPECT_TRUE(first.contains(name)) << name;
  EXPECT_EQ(first["origin"], "compiled");
  EXPECT_EQ(second["origin"], "disk");
  EXPECT_EQ(first["key"], second["key"]);
  EXPECT_THAT(first["path"].get<std::string>(),
              StartsWith(std::filesystem::canonical(flashjit.cache()).string()));
  EXPECT_THAT(flashjit({"compile", small_spec}).out,
              AllOf(HasSubstr("disk"), HasSubstr(first["key"].get<std::string>())));
}

TEST(Compile, LimitsEndIt) {
  const CommandLine flashjit;
  const auto late = flashjit({"compile", small_spec, "--compile-seconds", "1e-9"});
  EXPECT_EQ(late.exit_code, 12);
  EXPECT_THAT(late.err, HasSubstr("limit_exceeded"));
  EXPECT_EQ(flashjit({"compile", small_spec, "--compile-bytes", "4096"}).exit_code, 12);
  EXPECT_EQ(flashjit({"compile", small_spec, "--target", "sm_90", "--compile-bytes", "4096"}).exit_code, 2);
  EXPECT_EQ(flashjit({"compile", small_spec, "--compile-seconds", "1e6"}).exit_code, 0);
}

TEST(Layers, PrebuiltKernelsNeedNoCompiler) {
  const CommandLine builder;
  builder(std::vector<std::string>{"compile", small_spec} + tiny);
  CommandLine flashjit;
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  const auto run = [&] {
    return flashjit(std::vector<std::string>{"run", small_spec, "--verify", "--json"} + tiny);
  };
  EXPECT_EQ(run().error()["code"], "compiler_unavailable");
  flashjit.environment["FLASHJIT_CACHE_PATH"] = builder.cache();
  nlohmann::json result = run().json();
  EXPECT_EQ(result["origin"], "disk");
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_TRUE(result["cold_ms"].is_null());
  EXPECT_FALSE(std::filesystem::exists(flashjit.cache() + "/v3"));
  EXPECT_THAT(result["kernel"]["path"].get<std::string>(),
              StartsWith(std::filesystem::canonical(builder.cache()).string()));
  // As the folder that is written to, it serves as well.
  flashjit.environment["FLASHJIT_CACHE_PATH"] = "";
  flashjit.environment["FLASHJIT_CACHE_DIR"] = builder.cache();
  EXPECT_EQ(run().json()["origin"], "disk");

  flashjit.environment["FLASHJIT_CACHE_PATH"] = builder.cache() + ":" + flashjit.missing("layer");
  EXPECT_THAT(run().error()["message"].get<std::string>(),
              HasSubstr(flashjit.folder() + "/missing: No such file"));
}

TEST(Compile, SeveralGpuTargetsWithoutAGpu) {
  const CommandLine flashjit;
  if (!has_nvrtc(flashjit)) GTEST_SKIP() << "no NVRTC";
  const std::string spec = R"({"op": "forward", "dtype": "fp16", "head_dim": 64})";
  const nlohmann::json kernels = flashjit({"compile", spec, "--target", "sm_80,sm_90", "--json"}).json();
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_EQ(kernels[0]["target"], "sm_80");
  EXPECT_EQ(kernels[1]["target"], "sm_90");
  EXPECT_GT(kernels[0]["registers"].get<int>(), 0);
  EXPECT_GT(kernels[0]["smem_bytes"].get<int>(), 0);
  EXPECT_NE(kernels[0]["key"], kernels[1]["key"]);
}

TEST(Audit, ALargeCacheLeavesTheLeastPossible) {
  const CommandLine flashjit;
  const std::vector<std::string> audit = {"audit", small_spec, "--seqlen-q",        "512",      "--heads-q",
                                          "2",     "--cache",  "1000000,100000000", "--target", "x86-64-v3"};
  const nlohmann::json json = flashjit(audit + std::vector<std::string>{"--json"}).json();
  // Q, K and V; O and lse.
  constexpr double tensor = 512 * 2 * 16 * 4, least = 4 * tensor + 512 * 2 * 4;
  EXPECT_EQ(json["least"]["read"], 3 * tensor);
  EXPECT_EQ(json["least"]["written"], least - 3 * tensor);
  EXPECT_EQ(json["caches"][1]["of_least"], 1.0);
  EXPECT_GE(json["caches"][0]["of_least"].get<double>(), 1.0);
  EXPECT_EQ(json["standard_attention"], least + 4 * 4.0 * 2 * 512 * 512);
  // Half of the pairs and the diagonal.
  EXPECT_NEAR(json["caches"][0]["n2_d2_over_m"].get<double>(), 2 * 512 * 513 / 2 * 16 * 16 * 16 / 1e6, 1e-9);
  EXPECT_THAT(flashjit(audit).out, HasSubstr("least possible"));

  const Outcome on_gpu = flashjit({"audit", small_spec, "--target", "sm_90a"});
  EXPECT_EQ(on_gpu.exit_code, 2);
  EXPECT_THAT(on_gpu.err, HasSubstr("x86-64-v3"));
  const Outcome decode = flashjit({"audit", R"({"op": "decode", "dtype": "fp32", "head_dim": 16})"});
  EXPECT_THAT(decode.err, HasSubstr("op forward and backward would work"));
}

TEST(Audit, ABackwardThroughALargeCache) {
  const CommandLine flashjit;
  const nlohmann::json json =
      flashjit({"audit", small_spec, "--op", "backward", "--seqlen-q", "256", "--heads-q", "2", "--heads-kv",
                "1", "--cache", "20000,100000000", "--target", "x86-64-v3", "--json"})
          .json();
  // Q, O and dO, K and V, lse; dQ, dK and dV.
  constexpr double tensor = 256 * 2 * 16 * 4, lse = 256 * 2 * 4;
  EXPECT_EQ(json["least"]["read"], 4 * tensor + lse);
  EXPECT_EQ(json["least"]["written"], 2 * tensor);
  EXPECT_EQ(json["caches"][1]["of_least"], 1.0);
  EXPECT_GT(json["caches"][0]["of_least"].get<double>(), 1.5);
  EXPECT_EQ(json["standard_attention"], 6 * tensor + lse + 7 * 4.0 * 2 * 256 * 256);
}

TEST(Audit, OptionsOfTheOtherDeviceAreRefused) {
  const CommandLine flashjit;
  EXPECT_THAT(flashjit({"audit", small_spec, "--launches", "2"}).err,
              HasSubstr("--device cuda:0 would work"));
  EXPECT_THAT(flashjit({"audit", small_spec, "--device", "cuda:0", "--cache", "1000"}).err,
              HasSubstr("model of CPUs"));
  EXPECT_THAT(
      flashjit({"audit", R"({"op": "merge", "dtype": "bf16", "head_dim": 64})", "--device", "cuda:0"}).err,
      HasSubstr("forward, backward and decode"));
}

TEST(Cache, ListsAndClears) {
  const CommandLine flashjit;
  const std::string key = flashjit({"compile", small_spec, "--json"}).json()["key"];
  EXPECT_EQ(flashjit({"cache", "path"}).out, flashjit.cache() + "\n");
  EXPECT_EQ(flashjit({"cache", "path", "--json"}).json()["folder"], flashjit.cache());

  const nlohmann::json list = flashjit({"cache", "ls", "--json"}).json();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0]["key"], key);
  EXPECT_TRUE(list[0]["fields"].contains("spec"));
  EXPECT_TRUE(list[0]["metadata"].contains("compile_ms"));
  EXPECT_THAT(flashjit({"cache", "ls"}).out, HasSubstr(key));

  EXPECT_EQ(flashjit({"cache", "stat", "--json"}).json()["entries"], 1);
  EXPECT_THAT(flashjit({"cache", "stat"}).out, HasSubstr("1 entries"));
  EXPECT_EQ(flashjit({"cache", "verify"}).exit_code, 0);
  EXPECT_GE(flashjit({"cache", "clear", "--json"}).json()["removed_files"].get<int>(), 1);
  EXPECT_EQ(flashjit({"cache", "stat", "--json"}).json()["entries"], 0);
}

TEST(Cache, ExplainsAMiss) {
  const CommandLine flashjit;
  const std::string full = R"({"op": "forward", "dtype": "fp32", "head_dim": 16})";
  const std::string a = flashjit({"compile", small_spec, "--json"}).json()["key"];
  const std::string b = flashjit({"compile", full, "--json"}).json()["key"];

  const nlohmann::json hit = flashjit({"cache", "explain", "--spec", small_spec, "--json"}).json();
  EXPECT_TRUE(hit["found"].get<bool>());
  EXPECT_EQ(hit["key"], a);
  const nlohmann::json miss = flashjit({"cache", "explain", "--spec",
                                        R"({"op": "forward", "dtype": "fp32", "head_dim": 24})", "--json"})
                                  .json();
  EXPECT_FALSE(miss["found"].get<bool>());
  EXPECT_THAT(miss["difference"].get<std::string>(), HasSubstr("spec"));

  EXPECT_THAT(flashjit({"cache", "explain", a}).out, AllOf(StartsWith(a), HasSubstr("compiler: ")));
  EXPECT_THAT(flashjit({"cache", "explain", a.substr(0, 8), b.substr(0, 8)}).out,
              AllOf(HasSubstr("differs from " + b), HasSubstr("spec")));
  EXPECT_EQ(flashjit({"cache", "explain", "not-a-key"}).exit_code, 3);
}

TEST(Cache, DamageIsFoundAndRepaired) {
  const CommandLine flashjit;
  const std::string path = flashjit({"compile", small_spec, "--json"}).json()["path"];
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  const Outcome verify = flashjit({"cache", "verify"});
  EXPECT_EQ(verify.exit_code, 7);
  EXPECT_THAT(verify.err, HasSubstr(path));
  EXPECT_EQ(flashjit({"compile", small_spec, "--json"}).json()["origin"], "compiled");
  EXPECT_EQ(flashjit({"cache", "verify"}).exit_code, 0);
}

}  // namespace
}  // namespace flashjit::cli_test
