// Families name the features that they compute. A feature that no family names
// is refused, and a feature that a spec does not ask for leaves no trace.
#include "codegen/families/kernel_family.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "codegen/families/search_space.hpp"
#include "expect_error.h"

namespace flashjit {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::IsSupersetOf;

// The fields of a later version, with one that no family knows. It uses a member that forwards accept.
std::vector<SpecField> later_fields() {
  std::vector<SpecField> fields(std::begin(spec_fields), std::end(spec_fields));
  fields.insert(fields.begin() + 3, {"made_up", &AttentionSpec::deterministic});
  return fields;
}

// A misspelt name would refuse a feature that the family computes.
TEST(Family, NamesAreThoseOfFieldsMasksAndChoices) {
  std::set<std::string_view> fields, masks, choices;
  for (const SpecField& field : spec_fields) fields.insert(field.name);
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    (masks.insert(std::variant_alternative_t<i, Mask>::kind), ...);
  }(std::make_index_sequence<std::variant_size_v<Mask>>());
  EXPECT_EQ(masks.size(), std::variant_size_v<Mask>);
  for_each_choice([&](const char* name, auto, auto) { choices.insert(name); });
  for (const Target& target : Target::all()) {
    for (const Operation op : operations_on(target)) {
      const KernelFamily& family = family_of(op, target);
      EXPECT_THAT(fields, IsSupersetOf(family.fields)) << target.str();
      EXPECT_THAT(masks, IsSupersetOf(family.masks)) << target.str();
      EXPECT_THAT(choices, IsSupersetOf(family.choices)) << target.str();
    }
  }
}

// A row of the table without a kernel would be a word of JSON that no target knows.
TEST(Family, EveryOperationHasOne) {
  for (const OperationInfo& row : operation_table) {
    const auto has_it = [&](const Target& target) {
      const std::vector<Operation> all = operations_on(target);
      return std::find(all.begin(), all.end(), row.op) != all.end();
    };
    const std::vector<Target> targets = Target::all();
    EXPECT_TRUE(std::any_of(targets.begin(), targets.end(), has_it)) << row.name;
  }
}

TEST(Family, ForwardsAreDeterministic) {
  const AttentionSpec spec{.head_dim = 64, .deterministic = true};
  for (const Target& target : Target::all())
    EXPECT_EQ(why_unsupported(spec.validated(), target), "") << target.str();
}

// Every target's backward has a deterministic config, or is refused with what works.
TEST(Family, DeterministicBackwards) {
  const AttentionSpec spec =
      AttentionSpec{.op = Operation::backward, .dtype = DType::bf16, .head_dim = 64, .deterministic = true}
          .validated();
  for (const Target& target : Target::all()) {
    const std::string why = why_unsupported(spec, target);
    if (why.empty()) {
      EXPECT_EQ(misfit(spec, target, heuristic_config(spec, target, {})), "") << target.str();
    } else {
      EXPECT_TRUE(target.is_cuda()) << target.str();
      EXPECT_THAT(why, AnyOf(HasSubstr("deterministic true is not supported on " + target.str()),
                             HasSubstr("op backward is not supported on " + target.str())));
      EXPECT_THAT(why, HasSubstr("would work"));
    }
  }
}

TEST(Family, FieldThatNoFamilyNamesIsRefused) {
  const AttentionSpec spec{.head_dim = 64, .deterministic = true};
  for (const Target& target : Target::all())
    EXPECT_EQ(why_unsupported(spec, target, later_fields()),
              "made_up true is not supported on " + target.str() + "; false would work there");
  expect_error(ErrorCode::unsupported, {"made_up true is not supported by op forward; false would work"},
               [&] { check_supported(spec, later_fields()); });
}

// So no key changes and no tune record is orphaned: keys are made
// of this text, and of rendered text, which has the same fields.
TEST(Family, FieldAtItsDefaultChangesNoText) {
  const char* specs[] = {
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64})",
      R"({"op": "forward", "dtype": "fp16", "head_dim": 64, "head_dim_v": 32, "mask": ["causal", "tree"],
          "dropout": true, "lse": false, "varlen": true, "config": {"block_m": 64}})",
  };
  for (const char* json : specs) {
    const AttentionSpec spec = AttentionSpec::from_json(json);
    EXPECT_EQ(canonical_text(spec, later_fields()), spec.to_json());
    for (const Target& target : Target::all()) EXPECT_EQ(why_unsupported(spec, target, later_fields()), "");
    AttentionSpec given = spec;
    given.deterministic = true;
    EXPECT_THAT(canonical_text(given, later_fields()), HasSubstr(R"(, "made_up": true, )"));
  }
}

// Each family says which heads it takes. Where another target's takes more, the refusal says so.
TEST(Family, HeadsAreTheirOwn) {
  const Target gpu = Target::parse("sm_86"), hopper = Target::parse("sm_90a"),
               cpu = Target::parse("x86-64-v3");
  const AttentionSpec wide = AttentionSpec{.head_dim = 584, .head_dim_v = 264}.validated();
  EXPECT_EQ(why_unsupported(wide, cpu), "");
  EXPECT_EQ(
      why_unsupported(wide, gpu),
      "head_dim 584 is more than 576, the largest of op forward's kernels for sm_86; 576 would work there, "
      "and head_dim 584 on x86-64-v3, x86-64-v4, x86-64-v4+bf16 and x86-64-v4+amx");
  const AttentionSpec wide_v = AttentionSpec{.head_dim = 64, .head_dim_v = 584}.validated();
  EXPECT_THAT(why_unsupported(wide_v, gpu), HasSubstr("head_dim_v 584 is more than 576"));
  expect_error(ErrorCode::unsupported, {"head_dim 584", "sm_86", "x86-64-v3"},
               [&] { search_space(wide, gpu); });
  // Multi-head latent attention in the form of one shared head.
  for (const int dim_v : {512, 576}) {
    AttentionSpec latent = AttentionSpec{.head_dim = 576, .head_dim_v = dim_v}.validated();
    for (const Operation op : {Operation::forward, Operation::decode}) {
      latent.op = op;
      EXPECT_EQ(why_unsupported(latent, gpu), "");
    }
    latent.op = Operation::backward;
    EXPECT_EQ(why_unsupported(latent, cpu), "");
    EXPECT_THAT(why_unsupported(latent, hopper),
                HasSubstr("MLA's up-projected K and V (head_dim 192, head_dim_v 128), and head_dim 576 on "));
  }
  // The kernel by mma.sync computes 8-bit keys beside wide heads on sm_90a, and its configs.
  const auto refused = [&](const char* text) {
    return why_unsupported(AttentionSpec::from_json(text), hopper);
  };
  EXPECT_EQ(refused(R"({"op": "forward", "dtype": "bf16", "head_dim": 576})"), "");
  for (const char* rest :
       {R"("head_dim": 264)", R"("head_dim": 64, "v_in_k": true)",
        R"("head_dim": 576, "head_dim_v": 512, "v_in_k": true, "kv_scale": "token_head")"}) {
    const std::string text =
        R"({"op": "forward", "dtype": "bf16", "paged": true, "kv_dtype": "int8", )" + std::string(rest) + "}";
    EXPECT_EQ(refused(text.c_str()), "");
    const AttentionSpec spec = AttentionSpec::from_json(text);
    const KernelConfig config = heuristic_config(spec, hopper, {64, 512, 4096, 16, 1});
    EXPECT_EQ(misfit(spec, Target::parse("sm_90"), config), "") << text;
    KernelConfig packed = config;
    packed.pack_gqa = true;
    EXPECT_THAT(misfit(spec, hopper, packed), HasSubstr("pack_gqa are for kernels by wgmma"));
  }
  EXPECT_EQ(refused(R"({"op": "decode", "dtype": "bf16", "head_dim": 576, "paged": true, "varlen": true})"),
            "");
  for (const char* field : {R"("batch_invariant": true)", R"("kv_dtype": "int8")", R"("varlen": true)"}) {
    const std::string text =
        R"({"op": "decode", "dtype": "bf16", "head_dim": 264, )" + std::string(field) + "}";
    EXPECT_EQ(refused(text.c_str()), "");
    // The forward's kernel does not compute it.
    const AttentionSpec spec = AttentionSpec::from_json(text);
    EXPECT_LE(heuristic_config(spec, hopper, {64, 1, 4096, 16, 1}).block_n, 32) << text;
  }
  for (const char* rest : {R"("append_kv"})", R"("decode"})", R"("decode", "paged": true})",
                           R"("decode", "paged": true, "batch_invariant": true})"}) {
    const AttentionSpec spec = AttentionSpec::from_json(
        R"({"dtype": "bf16", "head_dim": 576, "head_dim_v": 512, "v_in_k": true, "kv_dtype": "fp8_ds_mla", "op": )" +
        std::string(rest));
    const bool by_wgmma = spec.paged && !spec.batch_invariant;
    for (const Target& target : Target::all())
      EXPECT_EQ(why_unsupported(spec, target),
                spec.op == Operation::append_kv || !target.is_cuda() ||
                        (by_wgmma && target.has(Instructions::wgmma))
                    ? ""
                    : "kv_dtype fp8_ds_mla has decode kernels on CPUs and, with pages and without "
                      "batch_invariant, on sm_90a; kv_dtype fp8_e4m3 would work");
  }
  // Latent caches in 8 bits.
  const auto latent = [&](const char* rest) {
    return refused((R"({"dtype": "fp16", "head_dim": 576, "head_dim_v": 512, "v_in_k": true, "paged": true, )"
                    R"("op": "forward", )" +
                    std::string(rest) + "}")
                       .c_str());
  };
  EXPECT_EQ(latent(R"("kv_dtype": "int8", "kv_scale": "head")"), "");
  for (const Target& target : Target::all())
    for (const Operation op : operations_on(target)) {
      const KernelFamily& family = family_of(op, target);
      for (const Range& range : {family.head_dim, family.head_dim_v}) {
        EXPECT_EQ(range.first, head_dims.first);
        EXPECT_EQ(range.step, head_dims.step);
        EXPECT_TRUE(range.has(range.last));
        EXPECT_LE(range.last, 4096) << "not a limit";
      }
    }
}

// Where the least tile of a backward of wide heads has no room, the refusal says how much it needs.
TEST(Family, BackwardsOfWideHeadsTakeWhatHasRoom) {
  AttentionSpec spec = AttentionSpec{.op = Operation::backward, .head_dim = 512}.validated();
  for (const char* target : {"sm_90", "sm_100"}) EXPECT_EQ(why_unsupported(spec, Target::parse(target)), "");
  EXPECT_EQ(
      why_unsupported(spec, Target::parse("sm_80")),
      "head_dim 512 with head_dim_v 512 of op backward on sm_80 needs 205312 bytes of shared memory for "
      "32 keys and 64 rows, more than the 166912 of a block; 256 for both would work there");
  spec.head_dim_v = 256;
  EXPECT_EQ(why_unsupported(spec, Target::parse("sm_80")), "");
  spec.deterministic = true;
  EXPECT_THAT(why_unsupported(spec, Target::parse("sm_90")),
              HasSubstr("deterministic is not supported for head_dim 512 with head_dim_v 256"));
}

// A target whose instructions are its own, but none that a family needs, has the kernels of the common ones.
TEST(Family, ServesByInstructions) {
  const Target common = Target::parse("sm_100"), hopper = Target::parse("sm_90a"),
               own = {Target::Family::cuda, 100, true};
  EXPECT_TRUE(hopper.has(Instructions::wgmma));
  EXPECT_TRUE(own.has(Instructions::common) && !own.has(Instructions::wgmma));
  EXPECT_EQ(operations_on(own), operations_on(common));
  for (const Operation op : operations_on(common)) EXPECT_EQ(&family_of(op, own), &family_of(op, common));
  for (const Operation op : {Operation::forward, Operation::decode, Operation::backward})
    EXPECT_NE(&family_of(op, hopper), &family_of(op, common));
}

TEST(Family, RefusalsSayWhatWouldWork) {
  const AttentionSpec wide{.dtype = DType::fp32, .head_dim = 64};
  EXPECT_EQ(
      why_unsupported(wide, Target::parse("sm_90a")),
      "dtype fp32 is not supported on sm_90a; bf16 or fp16 would work there, and dtype fp32 on x86-64-v3, "
      "x86-64-v4, x86-64-v4+bf16 and x86-64-v4+amx");
}

}  // namespace
}  // namespace flashjit
