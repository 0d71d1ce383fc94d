// The whole tuner, with trials of made-up times and on this machine's CPU.
#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "cache/tune_store.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/tune/environment.hpp"
#include "runtime/tune/race.hpp"
#include "runtime/tune/trial.hpp"
#include "tests/cache/support.hpp"
#include "tests/support/sample_seed.hpp"

namespace flashjit::testing {
namespace {

using ::testing::HasSubstr;

const AttentionSpec spec = AttentionSpec{.dtype = DType::fp32, .head_dim = 16}.validated();
const Shape shape{.batch = 2, .seqlen_q = 100, .seqlen_k = 130, .num_heads_q = 4, .num_heads_kv = 2};

// The behaviour of a test's trials, and counters of their calls.
struct Script {
  std::function<double(const KernelConfig&)> ms = [](const KernelConfig& c) { return 1000.0 / c.block_n; };
  std::function<std::string(const KernelConfig&)> wrong = [](const KernelConfig&) { return ""; };
  std::function<void(const KernelConfig&)> build = [](const KernelConfig&) {};
  std::atomic<int> trials = 0, builds = 0, samples = 0;
};

class FakeTrial : public Trial {
 public:
  explicit FakeTrial(Script& script) : script_(script) { ++script.trials; }
  void build(const KernelConfig& config) override {
    ++script_.builds;
    script_.build(config);
  }
  std::string check(const KernelConfig& config) override { return script_.wrong(config); }
  double sample_ms(const KernelConfig& config) override {
    ++script_.samples;
    return script_.ms(config);
  }

 private:
  Script& script_;
};

class Tune : public ::testing::Test {
 protected:
  std::vector<TuneResult> run(const std::vector<Shape>& shapes, const TuneCallback& progress = {}) {
    return tune_with(
        [this](Engine&, const AttentionSpec&, const Shape&) { return std::make_unique<FakeTrial>(script); },
        spec, shapes, options, progress);
  }
  TuneResult run(const TuneCallback& progress = {}) { return run(std::vector{shape}, progress).at(0); }

  const Scratch scratch;
  Script script;
  TuneOptions options{.engine = {.cache_dir = scratch.path(), .cache_path = "", .num_threads = 1}};
  const Target target = Target::native();
  const KernelConfig heuristic = heuristic_config(spec, target, bucket(shape));
};

TEST_F(Tune, TheFastestBecomesTheRecord) {
  std::set<TuneStage> stages;
  const TuneResult result = run([&](const TuneProgress& p) { return stages.insert(p.stage), true; });
  EXPECT_TRUE(result.measured);
  EXPECT_TRUE(result.record.complete);
  EXPECT_EQ(result.record.heuristic, heuristic);
  EXPECT_EQ(result.record.chosen.block_n, 512);
  EXPECT_EQ(result.record.key, tune_key(spec, target, {}, shape));
  EXPECT_EQ(result.record.shape, shape);
  EXPECT_EQ(result.record.environment.num_threads, 1);
  EXPECT_EQ(result.record.candidates.size(), search_space(spec, target).size());
  EXPECT_EQ(script.builds, static_cast<int>(result.record.candidates.size()));
  EXPECT_EQ(stages, (std::set{TuneStage::building, TuneStage::checking, TuneStage::measuring}));
  ASSERT_NE(result.path, "") << result.note;
  const auto found = TuneStore(scratch.path()).lookup(result.record.key, result.record.environment);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->record, result.record);
  EXPECT_EQ(found->path, result.path);
}

TEST_F(Tune, WhatIsKnownIsNotMeasuredAgain) {
  const TuneResult first = run();
  script.ms = [](const KernelConfig& c) { return 1.0 * c.block_n; };
  const TuneResult second = run();
  EXPECT_FALSE(second.measured);
  EXPECT_EQ(second.record, first.record);
  EXPECT_EQ(second.path, first.path);
  EXPECT_EQ(script.trials, 1);
  Shape neighbour = shape;
  neighbour.seqlen_q -= 10;  // in the same bucket
  EXPECT_FALSE(run(std::vector{neighbour}).at(0).measured);
  options.again = true;
  const TuneResult third = run();
  EXPECT_TRUE(third.measured);
  EXPECT_EQ(third.record.chosen.block_n, 64);
}

// Another lse would give weights far from a softmax's, which 16 bits need not hold.
TEST(TuneInputs, LseOfABackwardFitsItsScores) {
  const AttentionSpec backward =
      AttentionSpec{.op = Operation::backward, .dtype = DType::fp16, .head_dim = 64}.validated();
  const TuneTensors tensors(backward, shape, {});
  const Tensor lse = *tensors.sets().front().lse;
  for (int i = 0; i < shape.batch * shape.num_heads_q * shape.seqlen_q; ++i)
    ASSERT_NEAR(static_cast<const float*>(lse.data)[i], std::log(130.0) + 0.889, 1e-3);
}

TEST_F(Tune, AFirstGuessIsMeasuredAgain) {
  TuneRecord record = run().record;
  record.environment.flashjit = "0.0.1";
  ASSERT_TRUE(TuneStore(scratch.path()).publish(record));
  const TuneResult result = run();
  EXPECT_TRUE(result.measured);
  EXPECT_EQ(result.record.environment.flashjit, version());
}

TEST_F(Tune, WrongOutputsDoNotWin) {
  script.wrong = [](const KernelConfig& c) { return c.block_n == 512 ? "o is off" : ""; };
  const TuneResult result = run();
  EXPECT_EQ(result.record.chosen.block_n, 256);
  for (const TuneCandidate& c : result.record.candidates) {
    if (c.config.block_n != 512) continue;
    EXPECT_EQ(c.verdict, Verdict::wrong);
    EXPECT_EQ(c.reason, "o is off");
    EXPECT_TRUE(c.samples_ms.empty());
  }
}

TEST_F(Tune, WhatCannotBeBuiltDoesNotWin) {
  script.build = [](const KernelConfig& c) {
    if (c.block_n == 512) throw Error(ErrorCode::compile_failed, "no such registers");
  };
  const TuneResult result = run();
  EXPECT_EQ(result.record.chosen.block_n, 256);
  EXPECT_TRUE(result.record.complete);
  int failed = 0;
  for (const TuneCandidate& c : result.record.candidates) {
    if (c.config.block_n != 512) continue;
    EXPECT_EQ(c.verdict, Verdict::failed);
    EXPECT_EQ(c.reason, "no such registers");
    ++failed;
  }
  EXPECT_GT(failed, 0);
}

TEST_F(Tune, WhatALimitEndedIsNotRecorded) {
  script.build = [](const KernelConfig& c) {
    if (c.block_n == 512) throw Error(ErrorCode::limit_exceeded, "slow");
  };
  const TuneResult result = run();
  EXPECT_EQ(result.record.chosen.block_n, 256);
  EXPECT_FALSE(result.record.complete);
  for (const TuneCandidate& c : result.record.candidates) EXPECT_NE(c.config.block_n, 512);
  script.build = [](const KernelConfig&) {};
  EXPECT_EQ(run().record.chosen.block_n, 512);
}

TEST_F(Tune, ACancelledCompilationEndsIt) {
  script.build = [](const KernelConfig& c) {
    if (c.block_n == 512) throw Error(ErrorCode::cancelled, "enough");
  };
  try {
    run();
    ADD_FAILURE() << "not cancelled";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cancelled);
  }
  EXPECT_TRUE(TuneStore(scratch.path()).list().empty());
}

TEST_F(Tune, TheHeuristicConfigMustWork) {
  script.build = [](const KernelConfig&) { throw Error(ErrorCode::compile_failed, "broken"); };
  EXPECT_THROW(run(), Error);
  script.build = [](const KernelConfig&) {};
  script.wrong = [](const KernelConfig&) { return "NaN"; };
  EXPECT_THROW(run(), Error);
  EXPECT_TRUE(TuneStore(scratch.path()).list().empty());
}

TEST_F(Tune, CancelledItKeepsItsSamplesAndGoesOnFromThem) {
  const auto rounds = [](int n) {
    return [n](const TuneProgress& p) { return p.stage != TuneStage::measuring || p.done < n; };
  };
  const TuneResult first = run(rounds(3));
  EXPECT_FALSE(first.record.complete);
  EXPECT_EQ(first.record.chosen, heuristic);  // nothing is proved yet
  EXPECT_EQ(first.record.candidates.front().samples_ms.size(), 3u);
  EXPECT_NE(first.path, "");
  const int samples = script.samples;
  const TuneResult second = run(rounds(4));
  EXPECT_EQ(second.record.candidates.front().samples_ms.size(), 4u);
  const TuneResult third = run();
  EXPECT_TRUE(third.record.complete);
  EXPECT_EQ(third.record.chosen.block_n, 512);
  options.again = true;
  script.samples = 0;
  run();
  EXPECT_LT(samples, script.samples);
}

TEST_F(Tune, CancelledBeforeAnythingWasMeasuredItLeavesNothing) {
  const TuneResult result = run([](const TuneProgress&) { return false; });
  EXPECT_EQ(result.record.chosen, heuristic);
  EXPECT_FALSE(result.record.complete);
  EXPECT_EQ(result.path, "");
  EXPECT_TRUE(TuneStore(scratch.path()).list().empty());
  EXPECT_EQ(run(std::vector{shape, shape}, [](const TuneProgress&) { return false; }).size(), 1u);
}

TEST_F(Tune, TheBudgetIsSharedAmongShapes) {
  script.ms = [](const KernelConfig&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return 5;
  };
  options.budget_seconds = 0.2;
  Shape longer = shape;
  longer.seqlen_k = 1000;
  const std::vector<TuneResult> results = run(std::vector{shape, longer});
  ASSERT_EQ(results.size(), 2u);
  for (const TuneResult& r : results) {
    EXPECT_FALSE(r.record.complete);
    EXPECT_EQ(r.record.chosen, r.record.heuristic);
  }
  EXPECT_LE(script.samples, 60);  // of 2 shapes x 16 rounds x 5 candidates
  // Builds that take too long get half of the time; the candidates that were built are measured.
  options.budget_seconds = 1;
  options.jobs = 1;
  options.again = true;
  script.ms = [](const KernelConfig&) { return 1; };
  script.build = [](const KernelConfig&) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  const TuneResult result = run();
  EXPECT_FALSE(result.record.complete);
  EXPECT_EQ(result.record.candidates.front().config, heuristic);
  EXPECT_LT(result.record.candidates.size(), search_space(spec, target).size());
}

TEST_F(Tune, OneOfManyMeasures) {
  std::vector<TuneResult> results(4);
  {
    std::vector<std::jthread> threads;
    for (TuneResult& result : results) threads.emplace_back([&] { result = run(); });
  }
  EXPECT_EQ(script.trials, 1);
  int measured = 0;
  for (const TuneResult& result : results) {
    measured += result.measured;
    EXPECT_EQ(result.record, results[0].record);
  }
  EXPECT_EQ(measured, 1);
}

TEST_F(Tune, WorksWithoutAFolder) {
  options.engine.cache_dir = "";
  const TuneResult result = run();
  EXPECT_EQ(result.record.chosen.block_n, 512);
  EXPECT_EQ(result.path, "");
  EXPECT_THAT(result.note, HasSubstr("no cache folder"));
}

// Four candidates, measured on the device.
class TuneOnCpu : public Tune {
 protected:
  TuneOnCpu() { narrow.config.block_m = 48; }
  AttentionSpec narrow = spec;
};

// Changes the outputs of one config as if its kernel were wrong, and makes it the fastest.
class CorruptingTrial : public DeviceTrial {
 public:
  using DeviceTrial::DeviceTrial;
  double sample_ms(const KernelConfig& config) override {
    return config.block_n == 512 ? 1e-6 : DeviceTrial::sample_ms(config);
  }

 protected:
  void run(const KernelConfig& config, const PreparedLaunch& launch) override {
    DeviceTrial::run(config, launch);
    if (config.block_n != 512) return;
    float value;
    char* last = static_cast<char*>(first_set().o->data) + 4 * (2 * 100 * 4 * 16 - 1);
    std::memcpy(&value, last, sizeof value);
    value += 0.01F;
    std::memcpy(last, &value, sizeof value);
  }
};

TEST_F(TuneOnCpu, MeasuresAndRecords) {
  const TuneResult result = tune(narrow, {shape}, options).at(0);
  EXPECT_TRUE(result.record.complete);
  ASSERT_EQ(result.record.candidates.size(), 4u);
  for (const TuneCandidate& c : result.record.candidates) {
    EXPECT_TRUE(c.verdict == Verdict::measured || c.verdict == Verdict::dropped) << c.reason;
    EXPECT_EQ(c.config.block_m, 48);
    for (const double ms : c.samples_ms) EXPECT_GT(ms, 0);
  }
  EXPECT_NE(result.record.environment.compiler, "");
}

TEST_F(TuneOnCpu, AKernelThatComputesSomethingElseCannotWin) {
  const TuneResult result =
      tune_with([](Engine& engine, const AttentionSpec& s,
                   const Shape& at) { return std::make_unique<CorruptingTrial>(engine, s, at); },
                narrow, {shape}, options, {})
          .at(0);
  EXPECT_NE(result.record.chosen.block_n, 512);
  for (const TuneCandidate& c : result.record.candidates) {
    if (c.config.block_n != 512) continue;
    EXPECT_EQ(c.verdict, Verdict::wrong);
    EXPECT_THAT(c.reason, HasSubstr("o differs from the heuristic config's"));
    EXPECT_THAT(c.reason, HasSubstr("row 799"));
  }
}

TEST_F(TuneOnCpu, EveryDtypeMaskAndPackedSequences) {
  const std::vector<std::vector<Mask>> masks = {{CausalMask{}},
                                                {SlidingWindowMask{.sinks = true}},
                                                {BlockSparseMask{.block_m = 32, .block_n = 48}},
                                                {TreeMask{}},
                                                {BlockSparseMask{.per_head = true}, CausalMask{}}};
  int n = 0;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const bool varlen : {false, true}) {
      const int place = n++;
      if (!testing_support::in_sample("tuned specs", static_cast<std::uint64_t>(place), 3)) continue;
      const auto& mask = masks[static_cast<std::size_t>(place) % masks.size()];
      AttentionSpec s{.dtype = dtype, .head_dim = 32, .mask = mask, .varlen = varlen};
      if (!varlen) s.mask.emplace_back(PaddingMask{});
      s.config = {.block_m = 96, .block_n = n % 2 == 0 ? 64 : 128};
      const TuneResult result = tune(s, {shape}, options).at(0);
      for (const TuneCandidate& c : result.record.candidates) {
        EXPECT_EQ(c.verdict, Verdict::measured) << s.to_json() << c.reason;
        EXPECT_FALSE(c.samples_ms.empty());
      }
    }
  }
}

TEST_F(TuneOnCpu, NothingToMeasure) {
  EXPECT_THROW(tune(narrow, {{.batch = 0}}, options), Error);
  EXPECT_THROW(tune(narrow, {{.num_heads_q = 3, .num_heads_kv = 2}}, options), Error);
}

// NaN stands for elements that a kernel did not write, -inf for rows that see no key.
TEST(OutputDifference, BoundsAndSpecialValues) {
  const AttentionSpec s = AttentionSpec{.dtype = DType::fp16, .head_dim = 8}.validated();
  const auto fp16 = [](std::vector<std::uint16_t> bits) {
    std::vector<char> bytes(2 * bits.size());
    std::memcpy(bytes.data(), bits.data(), bytes.size());
    return bytes;
  };
  const auto fp32 = [](std::vector<float> values) {
    std::vector<char> bytes(4 * values.size());
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  };
  constexpr float infinity = std::numeric_limits<float>::infinity(),
                  nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::uint16_t> ones(8, 0x3c00), zeros(8, 0), nans(8, 0xffff);
  const auto row = [&](std::vector<std::uint16_t> bits, float lse) {
    return std::vector<TuneTensors::Output>{
        {&argument_of(&AttentionArgs::o), fp16(std::move(bits))},
        {&argument_of(&AttentionArgs::lse), fp32({lse})},
    };
  };
  EXPECT_EQ(output_difference(s, row(ones, 1), row(ones, 1)), "");
  EXPECT_EQ(output_difference(s, row(zeros, -infinity), row(zeros, -infinity)), "");
  EXPECT_THAT(output_difference(s, row(nans, 1), row(ones, 1)), HasSubstr("o differs"));
  EXPECT_THAT(output_difference(s, row(nans, 1), row(nans, 1)), HasSubstr("o differs"));
  EXPECT_THAT(output_difference(s, row(ones, nan), row(ones, 1)), HasSubstr("lse differs"));
  EXPECT_THAT(output_difference(s, row(ones, 1.01F), row(ones, 1)), HasSubstr("lse differs"));
  EXPECT_THAT(output_difference(s, row(ones, -infinity), row(ones, 1)), HasSubstr("lse differs"));
  auto near = ones, far = ones;
  near[3] = 0x3c10;  // 1.6% in one of eight elements
  far[3] = 0x3c40;   // 6%
  EXPECT_EQ(output_difference(s, row(near, 1), row(ones, 1)), "");
  EXPECT_THAT(output_difference(s, row(far, 1), row(ones, 1)), HasSubstr("row 0"));

  // Outputs in float32 still differ by the rounding of weights to 16 bits.
  AttentionSpec wide = s;
  wide.o_dtype = DType::fp32;
  const auto wide_row = [&](float third) {
    std::vector<float> values(8, 1);
    values[3] = third;
    return std::vector<TuneTensors::Output>{{&argument_of(&AttentionArgs::o), fp32(std::move(values))}};
  };
  EXPECT_EQ(output_difference(wide, wide_row(1.016F), wide_row(1)), "");
  EXPECT_THAT(output_difference(wide, wide_row(1.06F), wide_row(1)), HasSubstr("row 0"));

  // Rows of an 8-bit cache are equal; scales that nobody wrote are poison.
  AttentionSpec quantised = s;
  quantised.op = Operation::append_kv;
  quantised.kv_dtype = DType::int8;
  quantised.kv_scale = KvScale::token_head;
  const auto written = [&](char third, std::vector<float> scales) {
    std::vector<char> elements(16, 1);
    elements[11] = third;
    return std::vector<TuneTensors::Output>{{&argument_of(&AttentionArgs::k), elements},
                                            {&argument_of(&AttentionArgs::k_scale), fp32(std::move(scales))}};
  };
  EXPECT_EQ(output_difference(quantised, written(3, {1, nan}), written(3, {1, nan})), "");
  EXPECT_THAT(output_difference(quantised, written(4, {1, nan}), written(3, {1, nan})),
              HasSubstr("k differs from the heuristic config's by 1.000000 in row 1"));
  EXPECT_THAT(output_difference(quantised, written(3, {nan, 1}), written(3, {1, nan})),
              HasSubstr("k_scale differs"));
}

}  // namespace
}  // namespace flashjit::testing
