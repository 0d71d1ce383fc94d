// Forward on sm_90a: wgmma kernels of one producer warpgroup and a consumer warpgroup for every 64 query
// rows, and for some 8-bit keys the kernel by mma.sync.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "codegen/families/batch_invariant.hpp"
#include "codegen/families/forward_kernels.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "codegen/families/wgmma_products.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/forward_sm90a_params.h"
#include "shared/gathered_maps.h"
#include "shared/layout.h"

namespace flashjit::forward_sm80 {
extern const KernelFamily family;
}

namespace flashjit::forward_sm90a {
namespace {

constexpr std::string_view fields[] = {
    "head_dim_v", "v_in_k", "mask",          "dropout",         "lse",
    "varlen",     "paged",  "deterministic", "o_dtype",         "kv_dtype",
    "kv_scale",   "score",  "tables",        "scalars",         "sink_logits",
    "precise",    "config", "offsets",       "batch_invariant", "gathered"};
constexpr std::string_view choices[] = {"block_m",        "block_n",   "num_stages", "num_warps",
                                        "q_in_registers", "ping_pong", "tile_order", "pack_gqa"};

constexpr int warps_per_warpgroup = 4;

bool is_narrow(const AttentionSpec& spec) {
  return std::max(spec.head_dim, spec.head_dim_v) <= device::Sm90aLayout::panel;
}
// Warpgroups that compute.
int consumers(const AttentionSpec& spec, const KernelConfig& config) {
  return config.block_m / device::Sm90aLayout::warpgroup_rows *
         device::Sm90aLayout::column_groups(spec.head_dim_v);
}
int warps(const AttentionSpec& spec, const KernelConfig& config) {
  return warps_per_warpgroup * (consumers(spec, config) + 1);
}
// Whether a warpgroup more converts 8-bit latents.
bool converts_more(const AttentionSpec& spec, const KernelConfig& config) {
  return converts_latents(spec) && config.num_warps == warps(spec, config) + warps_per_warpgroup;
}
// Whether two warpgroups divide the columns of an output.
bool divides_columns(const AttentionSpec& spec) {
  return device::Sm90aLayout::column_groups(spec.head_dim_v) > 1;
}
// Whether these two take turns at blocks of keys.
bool alternates(const AttentionSpec& spec, const KernelConfig& config) {
  return divides_columns(spec) && config.ping_pong;
}
// A block's values are multiplied after the next block's scores, so those in K need a second stage.
int least_stages(const AttentionSpec& spec) {
  return has_wide_heads(spec) && !spec.v_in_k ? 1 : 2;
}

device::Converts converts(const AttentionSpec& spec) {
  if (!spec.kv_dtype) return device::Converts::nothing;
  if (!spec.has_kv_scales()) return device::Converts::ds_mla;
  return spec.kv_scale == KvScale::token_head ? device::Converts::scaled_rows : device::Converts::numbers;
}

int shared_memory(const AttentionSpec& spec, const KernelConfig& config) {
  return device::Sm90aLayout(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                             config.num_stages, spec.dropout, converts(spec), spec.v_in_k,
                             alternates(spec, config))
      .end;
}

// Whether the mask has tables, sinks or formulas other than intervals: the producer looks them up for the
// consumers, and the consumers look them up for blocks that are not seen whole.
bool looks_up(const AttentionSpec& spec) {
  const auto* window = find_mask<SlidingWindowMask>(spec.mask);
  const auto searches = [&](const Mask& mask) {
    const auto* formula = std::get_if<FormulaMask>(&mask);
    return formula && !is_interval(*formula, spec);
  };
  return reads_tables(spec) || (window && window->sinks) ||
         std::any_of(spec.mask.begin(), spec.mask.end(), searches);
}

// Registers for dropout: the words of a thread's rows, and the registers that
// ptxas takes beyond them in four cases. Three consumers have an odd number of
// steps of 16 keys a block; the rows of an only consumer belong to several
// heads; two consumers hold Q, and their rows belong to several heads or end in
// half a step of 16 columns; two divide the widest outputs, with many keys.
int dropout_registers(const AttentionSpec& spec, const KernelConfig& config) {
  const bool odd_steps = consumers(spec, config) == 3 && config.block_n % 32 != 0;
  const bool several_heads = consumers(spec, config) == 1 && config.pack_gqa;
  const bool beside_q = consumers(spec, config) == 2 && config.q_in_registers;
  const int beside = !beside_q ? 0 : config.pack_gqa ? 24 : spec.head_dim_v % 16 != 0 ? 16 : 0;
  const bool widest = spec.head_dim_v > 512 && config.block_n > 64;
  return 4 + (odd_steps ? 2 : 0) + (several_heads ? 20 : 0) + std::max(beside, widest ? 12 : 0);
}

// Whether scores wait for exponentials and the like beyond those of the softmax.
bool computes_functions(const AttentionSpec& spec) {
  return !spec.score.empty() && work_of_formulas(spec).functions;
}

// Registers that formulas take beyond those of looks_up(). Found by compiling known variants.
int formula_registers(const AttentionSpec& spec, const KernelConfig& config) {
  if (!reads_formula_params(spec)) return 0;
  const FormulaWork work = work_of_formulas(spec);
  const bool paged_waves = spec.paged && config.tile_order == TileOrder::waves;
  const int plain_scores = !paged_waves ? 8 : config.pack_gqa ? 32 : 16;
  const int of_scores = spec.score.empty()               ? 0
                        : work.functions && spec.precise ? std::max(24, plain_scores)
                                                         : plain_scores;
  const int of_loads = work.loads ? 8 : 0;
  return std::max(of_scores, of_loads);
}

// Registers for 8-bit keys. Found by compiling: two consumers need them for scales beside Q, three for masks
// that are looked up.
int conversion_registers(const AttentionSpec& spec, const KernelConfig& config) {
  if (!spec.kv_dtype) return 0;
  const bool scales =
      spec.kv_scale == KvScale::token_head && consumers(spec, config) == 2 && config.q_in_registers;
  return scales || (consumers(spec, config) == 3 && looks_up(spec)) ? 16 : 0;
}

// Registers that consumers take to walk pages for several heads beside wide outputs and Q: for a window of
// packed sequences, or for Q of more than 17 steps where two divide the outputs. Found by compiling.
int walk_registers(const AttentionSpec& spec, const KernelConfig& config) {
  if (!spec.paged || !config.pack_gqa || !config.q_in_registers) return 0;
  if (divides_columns(spec) && spec.head_dim > 272) return 16;
  const bool walks = spec.varlen && find_mask<SlidingWindowMask>(spec.mask);
  return walks && spec.head_dim_v > 128 ? 8 : 0;
}

// Registers of a consumer thread that hold scores, weights, output
// and Q, and those that mask tables, dropout and formulas need.
int held_registers(const AttentionSpec& spec, const KernelConfig& config) {
  const int q = config.q_in_registers ? device::ceil_div(spec.head_dim, 16) * 4 : 0;
  const int columns = device::Sm90aLayout::first_columns(spec.head_dim_v);
  return config.block_n / 2 + config.block_n / 4 + columns / 2 + q + (looks_up(spec) ? 16 : 0) +
         (spec.dropout ? dropout_registers(spec, config) : 0) + formula_registers(spec, config) +
         conversion_registers(spec, config) + walk_registers(spec, config);
}

// Registers of each consumer thread that go to the producer's warpgroup, beyond an even division, as it makes
// dropout's words, looks up and copies pages, or converts K and V, too. Found by compiling known variants. An
// only consumer has registers to spare.
int registers_for_roles(const AttentionSpec& spec, const KernelConfig& config) {
  const int of_consumers = consumers(spec, config);
  if (of_consumers == 1) return 0;
  const bool two = of_consumers == 2;
  // Beside a second role ptxas keeps less of the producer's walk in uniform registers, as it does in sections
  // of packed groups where consumers hold Q, or divide outputs and have stages that are no power of two.
  // Consumers of narrow heads have registers to spare.
  const bool walks_long = looks_up(spec) || config.tile_order == TileOrder::waves;
  const bool sorts = config.tile_order == TileOrder::sections;
  const bool short_of_uniform = config.q_in_registers || (divides_columns(spec) && config.num_stages == 3);
  const bool sorts_groups = sorts && config.pack_gqa && short_of_uniform && !spec.paged;
  const int for_words = !spec.dropout ? 0 : two && (walks_long || is_narrow(spec) || sorts_groups) ? 16 : 8;
  // Scales of rows take more, for which three consumers have none. Keys of wide heads are divided by their
  // lengths, which the group looks up, too.
  const bool scales = converts(spec) == device::Converts::scaled_rows;
  const int for_keys = converts_latents(spec)                    ? (converts_more(spec, config) ? 40 : 32)
                       : spec.kv_dtype                           ? (two && (scales || sorts) ? 24 : 16)
                       : !spec.paged                             ? 0
                       : !two || spec.dropout                    ? 8
                       : looks_up(spec) || divides_columns(spec) ? 24
                                                                 : 16;
  // A block of wide keys, in one stage, has many panels to copy.
  const bool many_panels = config.block_m == 128 && config.num_stages == 1 && config.q_in_registers;
  const bool only_copies = config.tile_order == TileOrder::heads && for_words + for_keys == 0;
  return for_words + for_keys + (many_panels && only_copies ? 8 : 0);
}

// The same for a walk of block lists that asks other masks, too. A diagonal, lengths, and masks that the
// lists were made of are little beside that, unless the group is short of registers already.
int registers_for_lists(const AttentionSpec& spec, const KernelConfig& config) {
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  if (!blocks || spec.mask.size() == 1 || spec.paged || consumers(spec, config) != 2) return 0;
  const bool little =
      blocks->of_masks || std::all_of(spec.mask.begin(), spec.mask.end(), [](const Mask& mask) {
        return !std::holds_alternative<SlidingWindowMask>(mask) && !std::holds_alternative<FormulaMask>(mask);
      });
  return !little || spec.dropout || divides_columns(spec) ? 8 : 0;
}

int given_registers(const AttentionSpec& spec, const KernelConfig& config) {
  if (alternates(spec, config) && spec.paged) return 16;
  return registers_for_roles(spec, config) + registers_for_lists(spec, config);
}

// The most such registers that leave enough for the rest. A thread has 255,
// 240 or 160 registers with 1, 2 or 3 consumers, less those that are given.
// Found by compiling; tests/compile holds every config to no spills.
int register_budget(const AttentionSpec& spec, const KernelConfig& config) {
  constexpr int with_q[] = {216, 212, 132}, without_q[] = {192, 200, 116};
  const int of_consumers = consumers(spec, config), given = given_registers(spec, config);
  // Blocks of 128 keys fit three consumers of narrow heads, too, that have no other role.
  const bool only_narrow = is_narrow(spec) && given == 0 && !looks_up(spec);
  if (of_consumers == 3 && !config.q_in_registers && only_narrow) return 128;
  return (config.q_in_registers ? with_q : without_q)[of_consumers - 1] - given;
}

// Whether the query heads of one key/value head see the same keys.
bool packable(const AttentionSpec& spec) {
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  return (!blocks || !blocks->per_head) && !masks_read_head(spec);
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (forwards_by_mma(spec, target)) {
    const KernelConfig unset;
    if (config.q_in_registers || config.ping_pong || config.pack_gqa || config.tile_order != unset.tile_order)
      return "q_in_registers, ping_pong, tile_order and pack_gqa are for kernels by wgmma, which do not "
             "convert these 8-bit keys";
    return forward_sm80::family.misfit(spec, target, config);
  }
  if (config.block_m != 64 && config.block_m != 128 && config.block_m != 192)
    return wrong("block_m", config.block_m, "is not 64, 128 or 192");
  if (divides_columns(spec) && config.block_m != 64)
    return wrong(
        "block_m", config.block_m,
        "is not 64, as two warpgroups divide the columns of head_dim_v " + std::to_string(spec.head_dim_v));
  if (const int needed = warps(spec, config); config.num_warps != needed && !converts_more(spec, config)) {
    return wrong("num_warps", config.num_warps,
                 "is not " + std::to_string(needed) + ": 4 that copy, and " +
                     (divides_columns(spec) ? std::string("8 that compute")
                                            : "4 for every 64 of block_m " + std::to_string(config.block_m)));
  }
  if (config.block_n <= 0 || config.block_n % 16 != 0 || config.block_n > 256)
    return wrong("block_n", config.block_n, "is not a multiple of 16 up to 256");
  if (const int least = least_stages(spec); config.num_stages < least || config.num_stages > 8)
    return wrong("num_stages", config.num_stages, "is not " + std::to_string(least) + " to 8");
  if (alternates(spec, config)) {
    if (!spec.v_in_k || spec.kv_dtype || config.block_n != 64 || config.num_stages != 2 ||
        config.q_in_registers)
      return std::string(
          "ping_pong of outputs with more than 256 columns takes 16-bit v_in_k, block_n 64, num_stages 2 and "
          "no q_in_registers");
    if (looks_up(spec) || find_mask<SlidingWindowMask>(spec.mask) || spec.offsets || spec.dropout ||
        !spec.score.empty() || reads_formula_params(spec))
      return std::string(
          "ping_pong of outputs with more than 256 columns has no registers for windows, masks that are "
          "looked up, offsets, formulas or dropout");
  }
  if (config.ping_pong && config.block_m < 128 && !divides_columns(spec))
    return wrong("block_m", config.block_m,
                 "is not 128 or 192, as ping_pong takes several warpgroups of 64 rows");
  if (config.pack_gqa && !packable(spec)) {
    return std::string("pack_gqa puts query heads of one key/value head into one tile, and ") +
           (masks_read_head(spec) ? "a formula of the mask reads head"
                                  : "block_sparse with per_head lists blocks for each of them");
  }
  if (uneven_on_device(spec.mask, spec.varlen) && config.tile_order != TileOrder::waves) {
    return std::string("tile_order ") + to_string(config.tile_order) +
           " is not waves: which tiles are long is only known on the device";
  }
  if (std::string why = not_fixed_blocks(spec, target, config); !why.empty()) return why;
  if (const int held = held_registers(spec, config); held > register_budget(spec, config)) {
    return "block_n " + std::to_string(config.block_n) +
           (config.q_in_registers ? " with q_in_registers" : "") + " and block_m " +
           std::to_string(config.block_m) + " hold " + std::to_string(held) +
           " values in registers, more than the " + std::to_string(register_budget(spec, config)) +
           " that a thread has for them";
  }
  return too_much_shared_memory(config, {"block_m", "block_n", "num_stages"}, shared_memory(spec, config),
                                target);
}

TileOrder tile_order(const AttentionSpec& spec) {
  return uneven_on_device(spec.mask, spec.varlen) || masks_read_tables(spec) ? TileOrder::waves
         : find_mask<CausalMask>(spec.mask) || masks_have_diagonal(spec)     ? TileOrder::sections
                                                                             : TileOrder::heads;
}

// With pages only the device knows the lengths of keys; mostly they are alike, or long beside the rows.
std::vector<TileOrder> tile_orders(const AttentionSpec& spec) {
  const TileOrder usual = tile_order(spec);
  if (!spec.paged || usual == TileOrder::waves) return {usual};
  return {usual, TileOrder::waves};
}

// Whether a tile lies within one block of the list. A tile that spans
// several blocks computes all of them as soon as one is listed.
bool fits_blocks(const BlockSparseMask& blocks, const KernelConfig& config) {
  return blocks.block_m % config.block_m == 0 && blocks.block_n % config.block_n == 0;
}

// Whether some tile fits with so many keys: the ones that hold least, with one and with two consumers.
bool fits_keys(const AttentionSpec& spec, const Target& target, int block_n) {
  const auto fits = [&](int block_m) {
    KernelConfig config{.block_m = block_m, .block_n = block_n, .num_stages = least_stages(spec)};
    config.num_warps = warps(spec, config);
    config.tile_order = tile_orders(spec).front();
    return misfit(spec, target, config).empty();
  };
  return fits(64) || fits(128);
}

ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  if (forwards_by_mma(spec, target)) return forward_sm80::family.axes(spec, target);
  ConfigAxes axes = {.block_m = {64, 128, 192},
                     .block_n = {64, 80, 96, 112, 128},
                     .num_stages = {2, 3},
                     .num_warps = {8, 12, 16},
                     .q_in_registers = {false, true},
                     .ping_pong = {false, true},
                     .tile_order = tile_orders(spec),
                     .pack_gqa = {false, true}};
  if (has_wide_heads(spec)) {
    // One stage of many keys, or several of few.
    axes.block_n = {32, 48, 64, 80, 96, 112, 128};
    axes.num_stages = {1, 2, 3, 4};
    if (spec.v_in_k) axes.num_stages.erase(axes.num_stages.begin());
  } else if (const auto* blocks = find_mask<BlockSparseMask>(spec.mask)) {
    for (int block_n = 32; block_n < 64; block_n += 16)
      if (blocks->block_n % block_n == 0) axes.block_n.push_back(block_n);
    std::sort(axes.block_n.begin(), axes.block_n.end());
  } else if (looks_up(spec) && spec.dropout) {
    axes.block_n.insert(axes.block_n.begin(), 48);  // the widest heads leave registers for no more
  }
  if (spec.batch_invariant) {
    fix_blocks(spec, target, axes);
    return axes;
  }
  // Nor for that beside formulas, pages or 8-bit keys. 16 keys always fit.
  while (axes.block_n.front() > 16 && !fits_keys(spec, target, axes.block_n.front()))
    axes.block_n.insert(axes.block_n.begin(), axes.block_n.front() - 16);
  return axes;
}

// Measured (tests/bench/gpu_forward.md).
std::string futility(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (forwards_by_mma(spec, target)) return forward_sm80::family.futility(spec, target, config);
  if (config.pack_gqa && config.block_m == 192)
    return "tiles of 192 rows are for long sequences, where packing heads saves no tile";
  if (const auto* blocks = find_mask<BlockSparseMask>(spec.mask)) {
    return fits_blocks(*blocks, config) ? "" : "a tile would span several blocks of the list";
  }
  constexpr int enough = 96;
  KernelConfig wider = config, with_q = config;
  wider.block_n += 48;
  with_q.q_in_registers = true;
  if (config.block_n < enough && config.num_stages > 1 && misfit(spec, target, wider).empty()) {
    return "a block_n of " + std::to_string(config.block_n) +
           " pays the fixed cost of a block more often, and wider blocks fit";
  }
  if (!config.q_in_registers && !computes_functions(spec) && misfit(spec, target, with_q).empty())
    return "Q fits in registers, too, and is then not read from shared memory for every block";
  if (config.num_stages > 2 && config.block_m == 192)
    return "with three consumer warpgroups two stages of K and V stay full, so a third saves nothing";
  return {};
}

// How long a launch takes with tiles of block_m rows, in a unit of its own: the rows times the keys that the
// busiest multiprocessor computes. Multiprocessors take tiles in rounds. With sections the long tiles come
// first, and the last ones fill the gaps.
double time_of(const Shape& shape, const KernelConfig& config, int block_m) {
  constexpr double multiprocessors = 132;  // of an H100 and an H200
  const int packed = config.pack_gqa ? shape.num_heads_q / std::max(shape.num_heads_kv, 1) : 1;
  const int heads = shape.num_heads_q / packed;
  const double tiles_of_head = std::ceil(shape.seqlen_q * packed / static_cast<double>(block_m));
  const double tiles = tiles_of_head * shape.batch * heads, keys = shape.seqlen_k;
  if (config.tile_order != TileOrder::sections) return block_m * keys * std::ceil(tiles / multiprocessors);
  const double unseen = (shape.seqlen_q - static_cast<double>(block_m) / packed) / 2;  // by the mean tile
  return block_m * std::max(keys, tiles * (keys - std::max(unseen, 0.0)) / multiprocessors);
}

// The rows of a tile. Fewer fit short sequences better. Narrow heads spend as much time on exponentials as on
// products: with 192 rows a third warpgroup, and turns at the tensor cores, keep both units busy. On an H100
// an element takes 8% less time than with 128 rows for heads of 64, and 31% less for heads of 72; with 64
// rows it takes half as much again (tests/bench/log/gpu_forward_sm90a.md). Where a launch has few tiles, many
// keys are divided.
int rows_of_tile(const AttentionSpec& spec, const Shape& shape, const KernelConfig& config) {
  const int widest = std::max(spec.head_dim, spec.head_dim_v);
  if (has_wide_heads(spec)) return 64;
  const int heads_per_tile = config.pack_gqa ? shape.num_heads_q / std::max(shape.num_heads_kv, 1) : 1;
  if (shape.seqlen_q <= 64 / heads_per_tile) return 64;
  const double usual = time_of(shape, config, 128);
  if (shape.seqlen_k <= 1024 && 1.5 * time_of(shape, config, 64) < usual) return 64;
  if (widest > 80 || config.pack_gqa) return 128;
  if (config.tile_order == TileOrder::sections && shape.seqlen_q <= 2048) return 128;  // measured: 3% faster
  return (widest <= 64 ? 0.92 : 0.69) * time_of(shape, config, 192) < usual ? 192 : 128;
}

// The widest block that fits. Q is in registers unless that makes the block narrower than 96, with three
// consumers of narrow heads narrower than 128, or if functions in scores have better use for the registers:
// more of them are then under way at once.
std::optional<KernelConfig> with_widest_block(const AttentionSpec& spec, const Target& target,
                                              KernelConfig config, int most_stages) {
  const int wide = is_narrow(spec) && config.block_m == 192 ? 128 : 96;
  for (const int least : {wide, 96, 16}) {
    for (const bool first : {true, false}) {
      config.q_in_registers = first != (computes_functions(spec) && !is_narrow(spec) && !spec.precise);
      for (config.block_n = 128; config.block_n >= least; config.block_n -= 16) {
        if (!misfit(spec, target, config).empty()) continue;
        KernelConfig deeper = config;
        deeper.num_stages = most_stages;
        return config.block_m < 192 && misfit(spec, target, deeper).empty() ? deeper : config;
      }
    }
  }
  return {};
}

// Measured on an H200 (tests/bench/gpu_forward.md).
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  if (forwards_by_mma(spec, target)) return forward_sm80::family.preferred(spec, target, shape);
  const int widest = std::max(spec.head_dim, spec.head_dim_v);
  KernelConfig config{.block_m = 128, .num_stages = 2, .tile_order = tile_order(spec)};
  config.pack_gqa = packing_pays(shape) && packable(spec);
  config.block_m = rows_of_tile(spec, shape, config);
  config.ping_pong = config.block_m == 192;
  config.num_warps = warps(spec, config);
  int most_stages = 3;
  if (config.tile_order == TileOrder::sections && config.block_m == 128 && widest > 64 && widest <= 128) {
    config.ping_pong = !spec.score.empty() && !computes_functions(spec);
    // All heads of short sequences read K and V from memory at once. Fewer copies in flight are then faster.
    if (shape.seqlen_k <= 512 && shape.num_heads_q == shape.num_heads_kv) most_stages = 2;
  }
  if (const auto* blocks = find_mask<BlockSparseMask>(spec.mask)) {
    // The largest tile within a block of the list.
    KernelConfig within = config;
    within.ping_pong = false;
    for (within.block_m = 128; within.block_m >= 64; within.block_m -= 64) {
      within.num_warps = warps(spec, within);
      for (within.block_n = 128; within.block_n >= 32; within.block_n -= 16) {
        for (const bool q_in_registers : {true, false}) {
          within.q_in_registers = q_in_registers;
          for (within.num_stages = 3; within.num_stages >= 2; --within.num_stages)
            if (fits_blocks(*blocks, within) && misfit(spec, target, within).empty()) return within;
        }
      }
    }
  }
  if (has_wide_heads(spec)) {
    // A stage of values in keys is free late: several small ones hide the time of a copy. Where four tiles
    // and more read the same keys, products of more keys at once save more than that (tests/bench/wide.md).
    const std::int64_t rows =
        std::int64_t{shape.seqlen_q} * shape.num_heads_q / std::max(shape.num_heads_kv, 1);
    const bool divides = divides_columns(spec) && !spec.batch_invariant;
    if (spec.v_in_k && !spec.kv_dtype && divides && rows > 3 * config.block_m) {
      KernelConfig many_keys = config;
      many_keys.block_n = 64;
      if (misfit(spec, target, many_keys).empty()) return many_keys;
    }
    for (config.block_n = spec.v_in_k ? 32 : 64; config.block_n > 16; config.block_n -= 16)
      for (config.num_stages = 4; config.num_stages >= least_stages(spec); --config.num_stages) {
        KernelConfig converting = config;
        converting.num_warps += converts_latents(spec) ? warps_per_warpgroup : 0;
        if (misfit(spec, target, converting).empty()) return converting;
        if (misfit(spec, target, config).empty()) return config;
      }
    config.num_stages = least_stages(spec);
    return config;
  }
  if (const auto fitting = with_widest_block(spec, target, config, most_stages)) return *fitting;
  if (config.block_m == 192) {  // a block that batch_invariant fixes may fit two consumers only
    config.block_m = 128;
    config.ping_pong = false;
    config.num_warps = warps(spec, config);
  }
  return with_widest_block(spec, target, config, most_stages).value_or(config);
}

ParamsType params_of_step(const AttentionSpec& spec) {
  const ParamsType type = params_of<device::Sm90aForwardParams, true>(spec);
  return spec.gathered ? with_second<device::GatheredMaps>(type) : with_second<device::ForwardMaps>(type);
}

std::string function_text(const AttentionSpec& spec) {
  return R"(extern "C" __global__ void __launch_bounds__(Config::num_warps * 32, 1)
    flashjit_forward(const __grid_constant__ )" +
         params_of_step(spec).text + R"( params, const __grid_constant__ )" +
         (spec.gathered ? "GatheredMaps" : "ForwardMaps") + R"( maps) {
  forward_sm90a<Spec, Config>(params, maps);
}
extern "C" __global__ void __launch_bounds__(forward_merge_threads)" +
         std::string(divides_by_length(spec) ? ", lengths_merge_blocks" : "") + R"()
    flashjit_forward_merge(const __grid_constant__ )" +
         params_of_step(spec).text + R"( params) {
  forward_sm90a_merge<Spec, Config>(params);
}
)";
}

void render(const AttentionSpec& spec, KernelSource& source) {
  if (forwards_by_mma(spec, source.target)) return forward_sm80::family.render(spec, source);
  const KernelConfig& config = source.config;
  source.text += include_lines("cuda/forward_sm90a.cuh", spec,
                               converts_latents(spec) ? "cuda/forward_sm90a_latents.cuh"
                               : spec.kv_dtype        ? "cuda/forward_sm90a_quantised.cuh"
                                                      : "cuda/forward_sm90a_pages.cuh") +
                 "#pragma nv_hdrstop\n\n" +
                 structs(spec, "ForwardSm90aSpec", params_of_step(spec).text, wgmma_products(spec, config),
                         choices, config,
                         "WgmmaProducts;\n  static constexpr int given_registers = " +
                             std::to_string(given_registers(spec, config))) +
                 function_text(spec);
  source.steps.push_back({.function = "flashjit_forward",
                          .threads = config.num_warps * 32,
                          .shared_memory = shared_memory(spec, config),
                          .params = params_of_step(spec)});
  source.steps.push_back({.function = "flashjit_forward_merge",
                          .threads = device::forward_merge_threads,
                          .shared_memory = divides_by_length(spec) ? device::lengths_merge_shared : 0,
                          .params = params_of<device::Sm90aForwardParams, true>(spec)});
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::forward,
    .on = Target::Family::cuda,
    .needs = Instructions::wgmma,
    .head_dim = heads_to_576,
    .dtypes = two_byte_dtypes,
    .fields = fields,
    .masks = all_masks,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .futility = futility,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::forward_sm90a
