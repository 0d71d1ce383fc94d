// The kernels of sm_90a's backward of wide heads share these parts (backward_sm90a_wide.cuh): shared memory,
// copies, the products of a step, the roles of threads. Each kernel makes sums of 64 keys or rows, whose
// operands stay in shared memory, and walks rows or keys of the other side. Its two consumer warpgroups
// divide the columns of the sums, and the first products: one has the scores, the other one dP, or both have
// scores of half of the rows.
#pragma once

#include "cuda/backward_sm90a_parts.cuh"
#include "shared/backward_sm90a_wide_layout.h"
#include "shared/dropout.h"

namespace flashjit::device {

// Chunks of its own operand that a thread keeps in registers. Masks with formulas and tests for NaN need
// these.
template <class Spec>
constexpr int wide_own_chunks =
    has_formula<typename Spec::Mask> || isolates_dropped<typename Spec::Mask> ? 0 : 1;

// A block's shared memory, as addresses.
template <class Kernel>
struct Sm90aWideShared {
  static constexpr Sm90aWideLayout layout = Kernel::layout;
  static constexpr int stages = layout.stages, block = layout.block;

  const char* memory;
  u32 start;
  FLASHJIT_FN u32 first() const { return start + layout.first; }
  FLASHJIT_FN u32 second() const { return start + layout.second; }
  FLASHJIT_FN u32 weights() const { return start + layout.weights; }
  FLASHJIT_FN u32 exchange() const { return start + layout.exchange; }
  FLASHJIT_FN u32 held(int slot) const { return start + layout.held + slot * layout.held_bytes; }
  FLASHJIT_FN u32 streamed(int slot) const { return start + layout.streamed + slot * layout.streamed_bytes; }
  FLASHJIT_FN u32 lse(int stage) const { return start + layout.lse + stage * (block * 4); }
  FLASHJIT_FN u32 delta(int stage) const { return start + layout.delta + stage * (block * 4); }
  FLASHJIT_FN u32 far_max(int stage) const { return start + layout.far_max + stage * (block * 4); }
  FLASHJIT_FN u32 words(int stage) const {
    return start + layout.words + stage * (block * Kernel::word_bytes);
  }
  FLASHJIT_FN u32 message(int stage) const { return start + layout.messages + stage * layout.message_bytes; }
  FLASHJIT_FN BackwardMessage read_message(int stage) const {
    return reinterpret_cast<const BackwardMessage*>(memory + layout.messages)[stage];
  }
  FLASHJIT_FN Words dropout_key() const {
    return *reinterpret_cast<const Words*>(memory + layout.dropout_key);
  }
  // mbarriers, as in Sm90aBackwardShared. A step's message comes with its numbers.
  FLASHJIT_FN u32 barrier(int i) const { return start + layout.barriers + i * layout.barrier_bytes; }
  FLASHJIT_FN u32 own_full() const { return barrier(0); }
  FLASHJIT_FN u32 asked(int stage) const { return barrier(1 + stage); }
  FLASHJIT_FN u32 numbers_full(int stage) const { return barrier(1 + stages + stage); }
  FLASHJIT_FN u32 numbers_empty(int stage) const { return barrier(1 + 2 * stages + stage); }
  FLASHJIT_FN u32 held_full(int slot) const { return barrier(1 + 3 * stages + 2 * slot); }
  FLASHJIT_FN u32 held_empty(int slot) const { return barrier(2 + 3 * stages + 2 * slot); }
  FLASHJIT_FN u32 streamed_full(int slot) const {
    return barrier(1 + 3 * stages + 2 * (layout.held_slots + slot));
  }
  FLASHJIT_FN u32 streamed_empty(int slot) const {
    return barrier(2 + 3 * stages + 2 * (layout.held_slots + slot));
  }

  // By a thread.
  FLASHJIT_FN void init_barriers() const {
    constexpr int consumer_warps = 8;
    mbarrier_init(own_full(), 1);
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(asked(stage), 1);
      mbarrier_init(numbers_full(stage), 1);
      mbarrier_init(numbers_empty(stage), consumer_warps);
    }
    for (int slot = 0; slot < layout.held_slots; ++slot) {
      mbarrier_init(held_full(slot), 1);
      mbarrier_init(held_empty(slot), consumer_warps);
    }
    for (int slot = 0; slot < layout.streamed_slots; ++slot) {
      mbarrier_init(streamed_full(slot), 1);
      mbarrier_init(streamed_empty(slot), Kernel::both_stream ? consumer_warps : consumer_warps / 2);
    }
    fence_mbarrier_init();
  }
};

// By a thread: copies of operands.
template <class Kernel>
struct Sm90aWideCopies {
  using Shared = Sm90aWideShared<Kernel>;
  static constexpr Sm90aWideLayout layout = Kernel::layout;
  static constexpr int box_rows = layout.box_rows;

  const Shared& shared;
  Sm90aRing<layout.held_slots> held{};
  Sm90aRing<layout.streamed_slots> streamed{};

  // A panel of `rows` rows.
  template <int rows>
  static FLASHJIT_FN void copy_panel(u32 to, const TensorMap& map, u32 full, int panel, int row, int head,
                                     int batch) {
#pragma unroll
    for (int at = 0; at < rows; at += box_rows)
      cp_async_bulk_tensor_4d(to + at * 128, map, full, panel * layout.panel, row + at, head, batch);
  }
  // The operands that stay.
  FLASHJIT_FN void copy_own(const TensorMap& first, const TensorMap& second, int row, int head,
                            int batch) const {
    mbarrier_arrive_expect_tx(shared.own_full(), layout.first_bytes + layout.second_bytes);
#pragma unroll 1
    for (int panel = 0; panel < layout.first_bytes / layout.own_panel; ++panel)
      copy_panel<layout.own>(shared.first() + panel * layout.own_panel, first, shared.own_full(), panel, row,
                             head, batch);
#pragma unroll 1
    for (int panel = 0; panel < layout.second_bytes / layout.own_panel; ++panel)
      copy_panel<layout.own>(shared.second() + panel * layout.own_panel, second, shared.own_full(), panel,
                             row, head, batch);
  }
  // The rows or keys of a step, in the order in which memory becomes free: first held chunks for which there
  // is more of it than for a part, then streamed ones, then the other held ones.
  FLASHJIT_FN void copy_block(const TensorMap& held_map, const TensorMap& streamed_map, int row, int head,
                              int batch) {
    constexpr int early = layout.held_slots - layout.held_chunks;
#pragma unroll 1
    for (int part = 0; part < layout.parts; ++part, row += layout.part_rows) {
#pragma unroll 1
      for (int chunk = 0; chunk < early; ++chunk) copy_held(held_map, chunk, row, head, batch);
#pragma unroll 1
      for (int chunk = 0; chunk < layout.streamed_chunks; ++chunk)
        copy_streamed(streamed_map, chunk, row, head, batch);
#pragma unroll 1
      for (int chunk = early; chunk < layout.held_chunks; ++chunk)
        copy_held(held_map, chunk, row, head, batch);
    }
  }

 private:
  // Panels of a chunk; the last one may have one.
  template <int panels>
  static FLASHJIT_FN int panels_of(int chunk) {
    return min(panels - 2 * chunk, 2);
  }
  FLASHJIT_FN void copy_held(const TensorMap& map, int chunk, int row, int head, int batch) {
    const u32 to = shared.held(held.stage), full = shared.held_full(held.stage);
    const int panels = panels_of<Kernel::held_panels>(chunk);
    mbarrier_wait(shared.held_empty(held.stage), held.parity ^ 1);
    mbarrier_arrive_expect_tx(full, panels * layout.held_panel);
    for (int i = 0; i < panels; ++i)
      copy_panel<layout.part_rows>(to + i * layout.held_panel, map, full, 2 * chunk + i, row, head, batch);
    held.advance();
  }
  // The rows of each warpgroup lie together.
  FLASHJIT_FN void copy_streamed(const TensorMap& map, int chunk, int row, int head, int batch) {
    const u32 to = shared.streamed(streamed.stage), full = shared.streamed_full(streamed.stage);
    const int panels = panels_of<Kernel::streamed_panels>(chunk);
    mbarrier_wait(shared.streamed_empty(streamed.stage), streamed.parity ^ 1);
    mbarrier_arrive_expect_tx(full, panels * layout.part_rows * 128);
    for (int at = 0; at < layout.part_rows; at += layout.product_rows)
      for (int i = 0; i < panels; ++i)
        copy_panel<layout.product_rows>(to + at * 256 + i * layout.streamed_panel, map, full, 2 * chunk + i,
                                        row + at, head, batch);
    streamed.advance();
  }
};

// A consumer warpgroup's products. A part of a step:
//   multiply(); exchange() where warpgroups have different products; store() of weights; pass_weights();
//   add().
template <class Kernel, int warpgroup>
class Sm90aWideConsumer {
 protected:
  using Products = typename Kernel::Products;
  using Shared = Sm90aWideShared<Kernel>;
  static constexpr Sm90aWideLayout layout = Kernel::layout;
  static constexpr int head_dim = Kernel::Spec::head_dim, head_dim_v = Kernel::Spec::head_dim_v;
  static constexpr bool makes_dv = layout.makes_dv;
  // Whether the first product's rows are the held ones.
  static constexpr bool multiplies_held = !makes_dv && warpgroup == 0;
  static constexpr int multiplied_columns = makes_dv || warpgroup == 0 ? head_dim : head_dim_v;
  // Chunks and columns of the sums.
  static constexpr int first_chunk = warpgroup == 0 ? 0 : ceil_div(layout.held_chunks, 2);
  static constexpr int chunks = warpgroup == 0 ? ceil_div(layout.held_chunks, 2) : layout.held_chunks / 2;
  static constexpr int held_columns = makes_dv ? head_dim_v : head_dim;
  FLASHJIT_FN static constexpr int columns_of(int chunk) {
    return min(held_columns - (first_chunk + chunk) * layout.chunk_columns, layout.chunk_columns);
  }
  static constexpr int floats = chunks > 0
                                    ? ((chunks - 1) * layout.chunk_columns + columns_of(chunks - 1)) / 2
                                    : 1;
  using Product = float[layout.product_rows / 2];  // of a thread
  // Steps of a chunk. Chunks of the first product's own operand that a thread keeps in registers: shared
  // memory, whose speed bounds these products, then has only the other operand to read.
  static constexpr int whole = layout.chunk_columns / 16;
  static constexpr int own_chunks = min(Kernel::own_chunks, multiplied_columns / layout.chunk_columns);
  using HeldRing = Sm90aRing<layout.held_slots>;
  using StreamedRing = Sm90aRing<layout.streamed_slots>;

  // Ids of named barriers: the warpgroup's four warps; what the warpgroups tell each other, in two sets that
  // take turns, so that none is at the same barrier twice before the other has left it.
  static constexpr int own_barrier = 1 + warpgroup, first_both_barrier = 3;

  FLASHJIT_FN explicit Sm90aWideConsumer(const Shared& shared)
      : shared_(shared), warp_(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0)), lane_(threadIdx.x % 32) {}

  // Waits for the other warpgroup.
  FLASHJIT_FN static void meet(int set) {
    const int id = first_both_barrier + 2 * set;
    bar_arrive(id + 1 - warpgroup, 256);
    bar_sync(id + warpgroup, 256);
  }
  FLASHJIT_FN void release(u32 empty) const { mbarrier_arrive_if(lane_ == 0, empty); }

  // Takes the first chunks of the first product's operand, once it is in shared memory.
  FLASHJIT_FN void take_own() {
    const int row = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int chunk = 0; chunk < own_chunks; ++chunk)
#pragma unroll
      for (int step = 0; step < whole; ++step)
        ldmatrix_x4(own_[chunk][step], own() + chunk * layout.own_chunk + step / 4 * layout.own_panel +
                                           row * 128 + ((step % 4 * 2 + lane_ / 16) ^ row % 8) * 16);
  }
  FLASHJIT_FN void clear_sums() {
#pragma unroll
    for (float& x : sums_) x = 0;
  }
  // The warpgroup's first product, S or dP of the part, transposed or not.
  FLASHJIT_FN void multiply(Product& product) {
    constexpr int steps = ceil_div(multiplied_columns, 16);
    HeldRing held = held_;
    StreamedRing last = streamed_;
#pragma unroll
    for (int chunk = 0; chunk < ceil_div(steps, whole); ++chunk) {
      const u64 a = wgmma_descriptor(own() + chunk * layout.own_chunk, 0);
      u64 b;
      if constexpr (multiplies_held) {
        mbarrier_wait(shared_.held_full(held.stage), held.parity);
        b = wgmma_descriptor(shared_.held(held.stage), 0);
        held.advance();
      } else {
        mbarrier_wait(shared_.streamed_full(streamed_.stage), streamed_.parity);
        b = wgmma_descriptor(
            shared_.streamed(streamed_.stage) + (makes_dv ? warpgroup * 2 * layout.streamed_panel : 0), 0);
      }
      wgmma_fence();
      if (chunk < own_chunks)
        Products::s_own(product, own_[chunk < own_chunks ? chunk : 0], b, chunk > 0);
      else if (steps - chunk * whole >= whole)
        Products::s(product, a, b, chunk > 0);
      else if constexpr (steps % whole > 0) {
        if constexpr (makes_dv || warpgroup == 0)
          Products::s_rest(product, a, b, chunk > 0);
        else
          Products::dp_rest(product, a, b, chunk > 0);
      }
      wgmma_commit_group();
      if constexpr (!multiplies_held) {
        if (chunk > 0) {
          wgmma_wait_group<1>();
          release(shared_.streamed_empty(last.stage));
        }
        last = streamed_;
        streamed_.advance();
      }
    }
    wgmma_wait_group<0>();
    if constexpr (!multiplies_held) release(shared_.streamed_empty(last.stage));
  }
  // Zeros for products with rows, or keys, from `first` on: those of another sequence, or padding, may be
  // anything. With a branch around this ptxas would let no products run at once.
  FLASHJIT_FN void clear_from(Product& product, int first) const {
#pragma unroll
    for (int i = 0; i < layout.product_rows / 2; ++i)
      if (i / 4 * 8 + lane_ % 4 * 2 + i % 2 >= first) product[i] = 0;
  }
  // Each warpgroup gives half of its product for half of the other's.
  template <int size>
  FLASHJIT_FN void exchange(const Product& product, float (&scores)[size], float (&dp)[size]) const {
    static_assert(size == layout.product_rows / 4);
    const u32 at = shared_.exchange() + threadIdx.x % 128 * 16;
    constexpr int given = (1 - warpgroup) * size, vectors = size / 4;
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      st_shared_v4(at + (warpgroup * vectors + i) * 2048, __float_as_uint(product[given + 4 * i]),
                   __float_as_uint(product[given + 4 * i + 1]), __float_as_uint(product[given + 4 * i + 2]),
                   __float_as_uint(product[given + 4 * i + 3]));
    meet(0);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      u32 taken[4];
      ld_shared_v4(taken, at + ((1 - warpgroup) * vectors + i) * 2048);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float own = product[warpgroup * size + 4 * i + j], other = __uint_as_float(taken[j]);
        scores[4 * i + j] = warpgroup == 0 ? own : other;
        dp[4 * i + j] = warpgroup == 0 ? other : own;
      }
    }
  }
  // Waits for the part's held chunks of the warpgroup's sums, or all of them. act(chunk, address).
  template <bool all, class Act>
  FLASHJIT_FN void for_held(const Act& act) const {
    HeldRing ring = held_;
#pragma unroll 1
    for (int chunk = 0; chunk < layout.held_chunks; ++chunk, ring.advance()) {
      if (!all && (chunk < first_chunk || chunk >= first_chunk + chunks)) continue;
      mbarrier_wait(shared_.held_full(ring.stage), ring.parity);
      act(chunk, shared_.held(ring.stage));
    }
  }
  // Zeros for the rows whose bit is set among 32 held rows of the warpgroup's chunks, from row `first` on.
  FLASHJIT_FN void clear_held(u32 rows, int first) const {
    if (rows == 0) return;
    for_held<false>([&](int, u32 tile) {
#pragma unroll 1
      for (u32 left = rows >> warp_; left != 0; left &= left - 1) {
        const int row = __ffs(static_cast<int>(left)) - 1;
        if (row % 4 == 0 && lane_ < 16)
          st_shared_v4(tile + lane_ / 8 * layout.held_panel + (first + row + warp_) * 128 + lane_ % 8 * 16, 0,
                       0, 0, 0);
      }
    });
  }
  // Gives the weights, or dS, of the warpgroup's rows of the part to the other, and takes those of its rows:
  // both warpgroups have the 64 keys or rows of the sums in the same lanes. Held rows have been cleared.
  template <int steps>
  FLASHJIT_FN void pass_weights(const u32 (&own)[steps][4], u32 (&all)[2 * steps][4], int set = 1,
                                int buffer = 0) const {
    const u32 at = shared_.weights() + buffer * layout.weights_bytes + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < steps; ++i)
      st_shared_v4(at + (warpgroup * steps + i) * 2048, own[i][0], own[i][1], own[i][2], own[i][3]);
    if constexpr (Kernel::clears_held) fence_proxy_async();
    meet(set);
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      ld_shared_v4(all[(1 - warpgroup) * steps + i], at + ((1 - warpgroup) * steps + i) * 2048);
#pragma unroll
      for (int j = 0; j < 4; ++j) all[warpgroup * steps + i][j] = own[i][j];
    }
  }
  // Adds the part's product to the sums.
  using AllWeights = u32[layout.part_rows / 16][4];
  FLASHJIT_FN void add(const AllWeights& weights) {
    HeldRing ring = held_;
#pragma unroll
    for (int chunk = 0; chunk < layout.held_chunks; ++chunk, ring.advance()) {
      if (chunk < first_chunk || chunk >= first_chunk + chunks) continue;
      mbarrier_wait(shared_.held_full(ring.stage), ring.parity);
    }
    wgmma_fence();
    ring = held_;
#pragma unroll
    for (int i = 0; i < first_chunk; ++i) ring.advance();
    if constexpr (chunks > 0) add_chunk<0>(weights, ring);
    ring.advance();
    if constexpr (chunks > 1) add_chunk<1>(weights, ring);
    wgmma_commit_group();
    // While sums are under way, ptxas lets no other product begin.
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < layout.held_chunks; ++i, held_.advance()) release(shared_.held_empty(held_.stage));
  }
  // Writes the columns that the warpgroup has of the thread's row r, 0 or 1.
  template <bool batch_invariant, class Gradient>
  FLASHJIT_FN void write(Gradient* row, int r, float factor, bool inside) const {
    Gradient* const to = row + first_chunk * layout.chunk_columns;
    if constexpr (chunks > 0) write_gradient<batch_invariant>(to, sums_of<0>(), r, factor, inside, lane_ % 4);
    if constexpr (chunks > 1)
      write_gradient<batch_invariant>(to + layout.chunk_columns, sums_of<1>(), r, factor, inside, lane_ % 4);
  }

  const Shared& shared_;
  const int warp_, lane_;

 private:
  static_assert(chunks <= 2);
  template <int chunk>
  using Chunk = float[columns_of(chunk) / 2];
  template <int chunk>
  FLASHJIT_FN Chunk<chunk>& sums_of() {
    return *reinterpret_cast<Chunk<chunk>*>(sums_ + chunk * (layout.chunk_columns / 2));
  }
  template <int chunk>
  FLASHJIT_FN const Chunk<chunk>& sums_of() const {
    return *reinterpret_cast<const Chunk<chunk>*>(sums_ + chunk * (layout.chunk_columns / 2));
  }
  template <int chunk>
  FLASHJIT_FN void add_chunk(const AllWeights& a, const HeldRing& ring) {
    const u64 b = wgmma_descriptor(shared_.held(ring.stage), layout.held_panel);
    constexpr bool is_whole = columns_of(chunk) == layout.chunk_columns;
    if constexpr (makes_dv && is_whole)
      Products::dv(sums_of<chunk>(), a, b, 1);
    else if constexpr (makes_dv)
      Products::dv_rest(sums_of<chunk>(), a, b, 1);
    else if constexpr (is_whole)
      Products::dk(sums_of<chunk>(), a, b, 1);
    else
      Products::dk_rest(sums_of<chunk>(), a, b, 1);
  }
  // The operand of the first product that stays.
  FLASHJIT_FN u32 own() const { return makes_dv || warpgroup == 0 ? shared_.first() : shared_.second(); }

  float sums_[floats];
  u32 own_[max(own_chunks, 1)][whole][4];
  HeldRing held_;  // the part's first chunk
  StreamedRing streamed_;
};

// A block of the grid: a thread copies, a warp adds numbers or dropout's words to what it tells, and two
// warpgroups compute.
template <class Kernel>
FLASHJIT_FN void run_wide(const CudaBackwardParams& p, const BackwardMaps& maps) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  const typename Kernel::Shared shared{dynamic_shared, shared_address(dynamic_shared)};
  if (threadIdx.x == 0) shared.init_barriers();
  if (Kernel::Spec::dropout && threadIdx.x == 32)
    *reinterpret_cast<Words*>(dynamic_shared + Kernel::layout.dropout_key) = dropout_key(p.dropout);
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0)
      Kernel::copy(p, maps, shared);
    else if (Kernel::adds_numbers && threadIdx.x / 32 == 1)
      Kernel::add_numbers(p, shared);
  } else {
    setmaxnreg_inc<232>();
    if (threadIdx.x < 256)
      typename Kernel::template Consumer<0>(p, shared).run();
    else
      typename Kernel::template Consumer<1>(p, shared).run();
    if (Kernel::launches_dependents) griddepcontrol_launch_dependents();
  }
}

}  // namespace flashjit::device
