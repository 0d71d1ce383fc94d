// The output of most verbs, as text and as JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "tests/cli/command_line.hpp"

namespace flashjit::cli_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const std::vector<std::string> tiny = {"--batch",   "2", "--seqlen-q", "48",
                                       "--heads-q", "4", "--heads-kv", "2"};

bool has_nvrtc(const CommandLine& flashjit) {
  return flashjit({"doctor", "--json"}).json()["compiles_for_cuda"];
}

// Type and shape of a .npy file: "'<f4' (2,48)".
std::string npy_header(const std::string& path) {
  const std::string bytes = slurp(path).substr(0, 128);
  std::smatch found;
  if (!std::regex_search(bytes, found, std::regex("'descr': ('[^']*').*'shape': \\(([0-9, ]*)\\)")))
    return "none";
  return found[1].str() + " (" + std::regex_replace(found[2].str(), std::regex(" |,$"), "") + ")";
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

TEST(Run, VerifiesGeneratedTensors) {
  const CommandLine flashjit;
  const nlohmann::json result =
      flashjit(std::vector<std::string>{"run", small_spec, "--seed", "7", "--verify", "--json"} + tiny)
          .json();
  for (const char* name :
       {"device", "config", "cold_ms", "warm_ms", "hot_us", "ms", "tflops", "max_error", "error_bound", "ok"})
    EXPECT_TRUE(result.contains(name)) << name;
  EXPECT_EQ(result["device"], "cpu");
  EXPECT_EQ(result["origin"], "compiled");
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_LE(result["max_error"].get<double>(), result["error_bound"].get<double>());
  EXPECT_EQ(result["verification"]["rows"], 2 * 48 * 4);
  EXPECT_LE(result["verification"]["lse_error"].get<double>(),
            result["verification"]["lse_error_bound"].get<double>());
  EXPECT_GT(result["cold_ms"].get<double>(), result["warm_ms"].get<double>());
  EXPECT_EQ(result["shape"], (nlohmann::json{{"batch", 2},
                                             {"seqlen_q", 48},
                                             {"seqlen_k", 48},
                                             {"num_heads_q", 4},
                                             {"num_heads_kv", 2},
                                             {"heads_q", 4},
                                             {"heads_kv", 2}}));
}

TEST(Run, MeasuresColdWhereTheKernelIsOnDiskIfAsked) {
  CommandLine flashjit;
  flashjit(std::vector<std::string>{"compile", small_spec} + tiny);
  const std::vector<std::string> run = std::vector<std::string>{"run", small_spec, "--json"} + tiny;
  const nlohmann::json cold = flashjit(run + std::vector<std::string>{"--cold"}).json();
  EXPECT_EQ(cold["origin"], "disk");
  EXPECT_GT(cold["cold_ms"].get<double>(), cold["warm_ms"].get<double>());
  // Otherwise nothing is compiled, and no temporary folder is needed.
  flashjit.environment["FLASHJIT_LLVM_PLUGIN"] = flashjit.missing("plugin.so");
  flashjit.environment["TMPDIR"] = flashjit.missing("tmp");
  const nlohmann::json result = flashjit(run).json();
  EXPECT_TRUE(result["cold_ms"].is_null());
  EXPECT_TRUE(result["ok"].is_null());
  EXPECT_TRUE(result["max_error"].is_null());
}

// What generate writes for any operation, run reads: by the folder, or by an option for each file.
TEST(Run, ReadsWhatGenerateWrites) {
  const std::string forward = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["causal"], )"
                              R"("score": ["score + slope[head]"], "lse": false, "tables": )"
                              R"({"slope": {"dtype": "fp32", "shape": ["heads_q"]}}})";
  const struct {
    std::string spec, op;
    std::vector<std::string> sizes;
  } cases[] = {
      {forward, "forward", {"--seqlen-q", "20"}},
      {forward, "decode", {"--seqlen-k", "40"}},
      {forward, "append_kv", {"--seqlen-q", "3", "--seqlen-k", "40"}},
      {forward, "copy_kv", {"--seqlen-q", "3", "--seqlen-k", "40"}},
      {R"({"op": "append_kv", "dtype": "bf16", "head_dim": 16, "paged": true, "varlen": true, "kv_dtype": "int8",
           "kv_scale": "token_head", "rotary": {"q": true}})",
       "append_kv",
       {"--seqlen-q", "3", "--seqlen-k", "40", "--heads-kv", "1"}},
      {R"({"op": "decode", "dtype": "bf16", "head_dim": 16, "paged": true, "append": true, "kv_dtype": "fp8_e4m3",
           "kv_scale": "token_head", "rotary": {"q": true, "tables": "fp32"}})",
       "decode",
       {"--seqlen-q", "2", "--seqlen-k", "40"}},
      {R"({"op": "forward", "dtype": "fp32", "head_dim": 16,
           "mask": [{"kind": "block_sparse", "of_masks": true}, "causal"]})",
       "make_block_lists",
       {"--seqlen-q", "200"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.op + " of " + c.spec);
    const CommandLine flashjit;
    const std::string in = flashjit.folder() + "/in";
    const std::vector<std::string> heads = {"--batch", "2", "--heads-q", "2"};
    ASSERT_EQ(
        flashjit(std::vector<std::string>{"generate", c.spec, "--op", c.op, "--out", in} + heads + c.sizes)
            .exit_code,
        0);
    std::vector<std::string> by_option;
    for (const auto& file : std::filesystem::directory_iterator(in)) {
      std::string option = file.path().stem().string();
      if (option == "slope") {
        by_option = by_option + std::vector<std::string>{"--named", "slope=" + file.path().string()};
        continue;
      }
      std::replace(option.begin(), option.end(), '_', '-');
      by_option = by_option + std::vector<std::string>{"--" + option, file.path().string()};
    }
    const std::vector<std::string> run = {"run", c.spec, "--op", c.op, "--verify", "--json"};
    // By turns: the same code reads both.
    const bool by_folder = &c - cases != 1 && &c - cases != 3;
    const Outcome outcome =
        flashjit(run + (by_folder ? std::vector<std::string>{"--tensors", in} : by_option));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_TRUE(outcome.json()["ok"].get<bool>());
    EXPECT_EQ(outcome.json()["shape"]["batch"], 2);
    if (c.op == "append_kv" || c.op == "copy_kv") {
      EXPECT_EQ(outcome.json()["shape"]["seqlen_k"], c.op == "append_kv" && c.spec != forward ? 48 : 40);
      EXPECT_GT(outcome.json()["verification"]["rows"], 0) << "places are in the caches";
    }
  }
}

// A launch that writes rows of caches keeps the others, and caches that are not given have room for its rows.
TEST(Run, CachesThatALaunchWritesInto) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in", written = flashjit.folder() + "/k.npy";
  const auto made = [&](const std::string& spec) {
    return flashjit({"generate", spec, "--out", in, "--batch", "2", "--seqlen-q", "3", "--seqlen-k", "40",
                     "--heads-q", "4", "--heads-kv", "2"})
        .exit_code;
  };
  const auto run = [&](const std::string& spec) {
    return flashjit({"run", spec, "--tensors", in, "--verify", "--json", "--k-out", written});
  };
  const std::string append = R"({"op": "append_kv", "dtype": "fp32", "head_dim": 16, "rotary": {"q": true}})";
  ASSERT_EQ(made(append), 0);
  EXPECT_EQ(run(append).json()["verification"]["rows"], 2 * 3 * 2);
  const std::string before = slurp(in + "/k.npy"), after = slurp(written);
  ASSERT_EQ(before.size(), after.size());
  int kept = 0;
  for (std::size_t i = before.size() - 2 * 40 * 2 * 16 * 4; i < before.size(); i += 16 * 4)
    kept += before.compare(i, 16 * 4, after, i, 16 * 4) == 0;
  EXPECT_EQ(kept, 2 * 2 * (40 - 3));

  for (const char* name : {"/k.npy", "/v.npy"}) std::filesystem::remove(in + name);
  const nlohmann::json by_positions = run(append).json();
  EXPECT_EQ(by_positions["verification"]["rows"], 2 * 3 * 2);
  EXPECT_EQ(by_positions["shape"]["num_heads_q"], 4);

  const std::string paged = R"({"op": "append_kv", "dtype": "fp32", "head_dim": 16, "paged": true})";
  ASSERT_EQ(made(paged), 0);
  EXPECT_EQ(run(paged).json()["shape"]["seqlen_k"], 48) << "3 pages of 16";
  std::filesystem::remove(in + "/k.npy");
  EXPECT_THAT(run(paged).error()["message"].get<std::string>(), HasSubstr("k is missing"));
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

TEST(Run, PrintsATable) {
  const CommandLine flashjit;
  const Outcome result =
      flashjit(std::vector<std::string>{"run", small_spec, "--verify", "--num-threads", "1"} + tiny);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("cold ms"), HasSubstr("GFLOP/s"), HasSubstr("384 rows"), HasSubstr(".kernel")));
}

TEST(Run, WithoutADiskCache) {
  const CommandLine flashjit;
  const nlohmann::json result =
      flashjit(std::vector<std::string>{"run", small_spec, "--cache-dir", "", "--json"} + tiny).json();
  EXPECT_EQ(result["origin"], "compiled");
  EXPECT_TRUE(result["warm_ms"].is_null());
  EXPECT_EQ(result["kernel"]["path"], "");
  EXPECT_FALSE(result["kernel"]["cache_note"].get<std::string>().empty());
}

TEST(Run, Dropout) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "dropout": true})";
  const auto output = [&](const std::vector<std::string>& options) {
    const std::string out = flashjit.folder() + "/out.npy";
    const nlohmann::json result =
        flashjit(std::vector<std::string>{"run", spec, "--verify", "--json", "--out", out} + tiny + options)
            .json();
    EXPECT_TRUE(result["ok"].get<bool>());
    std::ifstream file(out, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string usual = output({});
  EXPECT_EQ(output({"--dropout-p", "0.1", "--dropout-seed", "1", "--dropout-offset", "0"}), usual);
  EXPECT_NE(output({"--dropout-p", "0.5"}), usual);
  EXPECT_NE(output({"--dropout-seed", "2"}), usual);
  EXPECT_NE(output({"--dropout-offset", "18446744073709551615"}), usual);
  EXPECT_TRUE(flashjit(std::vector<std::string>{"bench", spec, "--seqlens", "16", "--rounds", "1",
                                                "--dropout-p", "0.5", "--json"})
                  .json()["rows"][0]["spec"]["dropout"]
                  .get<bool>());
}

TEST(Run, EveryMask) {
  const CommandLine flashjit;
  for (const char* masks :
       {R"(["padding"])", R"(["causal", {"kind": "sliding_window", "sinks": true}])",
        R"([{"kind": "block_sparse", "block_m": 16, "block_n": 16, "per_head": true}])", R"(["tree"])"}) {
    const std::string spec =
        std::string(R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": )") + masks + "}";
    const nlohmann::json generated =
        flashjit(std::vector<std::string>{"run", spec, "--verify", "--json", "--density", "0.5"} + tiny)
            .json();
    EXPECT_TRUE(generated["ok"].get<bool>()) << masks;
  }
  // generate writes tensors; run reads them.
  const std::string spec =
      R"({"op": "forward", "dtype": "fp32", "head_dim": 16, "mask": ["padding", "tree"]})";
  const std::string in = flashjit.folder() + "/in/";
  ASSERT_EQ(flashjit(std::vector<std::string>{"generate", spec, "--out", in} + tiny).exit_code, 0);
  const nlohmann::json own =
      flashjit({"run", spec, "--verify", "--json", "--q", in + "q.npy", "--k", in + "k.npy", "--v",
                in + "v.npy", "--seqlens-q", in + "seqlens_q.npy", "--seqlens-k", in + "seqlens_k.npy",
                "--tree-bits", in + "tree_bits.npy"})
          .json();
  EXPECT_TRUE(own["ok"].get<bool>());
}

TEST(Run, OnOwnTensors) {
  const CommandLine flashjit;
  const std::string in = flashjit.folder() + "/in", out = flashjit.folder() + "/o.npy",
                    lse = flashjit.folder() + "/lse.npy";
  ASSERT_EQ(
      flashjit(std::vector<std::string>{"generate", small_spec, "--seed", "3", "--out", in} + tiny).exit_code,
      0);
  const std::vector<std::string> run = {"run", small_spec,    "--q", in + "/q.npy",
                                        "--k", in + "/k.npy", "--v", in + "/v.npy"};
  const nlohmann::json own =
      flashjit(run + std::vector<std::string>{"--out", out, "--lse-out", lse, "--verify", "--json"}).json();
  EXPECT_TRUE(own["ok"].get<bool>());
  EXPECT_EQ(own["shape"]["heads_kv"], 2);
  EXPECT_EQ(npy_header(out), "'<f4' (2,48,4,16)");
  EXPECT_EQ(npy_header(lse), "'<f4' (2,4,48)");

  // The same seed generates the same problem.
  const std::string again = flashjit.folder() + "/again.npy";
  flashjit(std::vector<std::string>{"run", small_spec, "--seed", "3", "--out", again} + tiny);
  EXPECT_TRUE(slurp(again) == slurp(out));
  // Another scale gives another result.
  flashjit(run + std::vector<std::string>{"--softmax-scale", "2", "--out", again});
  EXPECT_FALSE(slurp(again) == slurp(out));
}

TEST(Run, PackedSequences) {
  const CommandLine flashjit;
  const std::string spec =
      R"({"op": "forward", "dtype": "fp16", "head_dim": 16, "mask": ["causal"], "varlen": true})";
  const std::string in = flashjit.folder() + "/in";
  ASSERT_EQ(
      flashjit(std::vector<std::string>{"generate", spec, "--out", in, "--seqlen-k", "80"} + tiny).exit_code,
      0);
  const nlohmann::json result = flashjit({"run", spec, "--q", in + "/q.npy", "--k", in + "/k.npy", "--v",
                                          in + "/v.npy", "--cu-seqlens-q", in + "/cu_seqlens_q.npy",
                                          "--cu-seqlens-k", in + "/cu_seqlens_k.npy", "--verify", "--json"})
                                    .json();
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_EQ(result["shape"]["batch"], 2);
  EXPECT_EQ(result["shape"]["seqlen_k"], 80);
}

TEST(Run, PagedDecode) {
  const CommandLine flashjit;
  const std::string spec =
      R"({"op": "decode", "dtype": "fp16", "head_dim": 16, "mask": ["causal"], "paged": true, "varlen": true})";
  const std::string in = flashjit.folder() + "/in";
  ASSERT_EQ(flashjit(std::vector<std::string>{"generate", spec, "--out", in, "--seqlen-k", "80",
                                              "--page-size", "32"} +
                     tiny)
                .exit_code,
            0);
  const std::vector<std::string> files = {
      "run", spec,          "--q",          in + "/q.npy",          "--k",      in + "/k.npy",
      "--v", in + "/v.npy", "--page-table", in + "/page_table.npy", "--verify", "--json"};
  const nlohmann::json result =
      flashjit(files + std::vector<std::string>{"--cu-seqlens-q", in + "/cu_seqlens_q.npy"}).json();
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_EQ(result["shape"]["seqlen_k"], 96);
  const auto refused = flashjit(files);
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_NE(refused.err.find("--cu-seqlens-q must say"), std::string::npos) << refused.err;
}

// A tree of drafts after a cache in pages, generated and verified.
TEST(Run, DecodeOfATreeAfterPages) {
  const CommandLine flashjit;
  for (const char* mask : {R"("tree")", R"("tree", "causal")"}) {
    const std::string spec = R"({"op": "decode", "dtype": "bf16", "head_dim": 32, "mask": [)" +
                             std::string(mask) + R"(], "paged": true})";
    const nlohmann::json result =
        flashjit({"run", spec, "--seqlen-q", "33", "--lengths-k", "300,33,70", "--page-size", "8",
                  "--heads-q", "4", "--heads-kv", "2", "--verify", "--json"})
            .json();
    EXPECT_TRUE(result["ok"].get<bool>()) << result;
    EXPECT_EQ(result["verification"]["rows"], 3 * 33 * 4);
  }
}

TEST(Run, OutputInFloat) {
  const CommandLine flashjit;
  const std::string spec = R"({"op": "forward", "dtype": "fp16", "head_dim": 16, "o_dtype": "fp32"})";
  const std::string out = flashjit.folder() + "/o.npy";
  const nlohmann::json result =
      flashjit(std::vector<std::string>{"run", spec, "--out", out, "--verify", "--json"} + tiny).json();
  EXPECT_TRUE(result["ok"].get<bool>());
  EXPECT_NE(slurp(out).find("<f4"), std::string::npos);
}

TEST(Run, SizesOfZero) {
  const CommandLine flashjit;
  for (const char* size : {"--batch", "--seqlen-q", "--seqlen-k"}) {
    const Outcome result = flashjit({"run", small_spec, "--heads-q", "2", size, "0", "--verify", "--json"});
    EXPECT_TRUE(result.json()["ok"].get<bool>()) << size;
  }
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
