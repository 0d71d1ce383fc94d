// Attention forward with mma.sync, ldmatrix and cp.async: every GPU from sm_80 up.
//
// One block of threads computes block_m query rows of one (batch entry, query head). A warp owns 16 or 32
// whole rows, block_m / num_warps, so its softmax needs no other warp. Scores, weights and output stay in
// registers. Of heads of more than 256 columns two warps share 16 rows (forward_sm80_columns.cuh).
//
// Data and strides of q, k, v and o are multiples of 16 bytes.
#pragma once

#include "cuda/dropout.cuh"
#include "cuda/online_softmax.cuh"
#include "cuda/scaled.cuh"
#include "cuda/tile.cuh"
#include "cuda/tile_order.cuh"
#include "shared/forward_sm80_params.h"
#include "shared/kv_scale_params.h"
#include "shared/mask.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct ForwardSm80Spec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using Offsets = NoOffsets;
  using o_dtype = void;
  using kv_dtype = void;
  static constexpr KvScale kv_scale = KvScale::tensor;
  static constexpr bool lse = true, varlen = false, paged = false, dropout = false, batch_invariant = false;
};

template <class Tile, int head_dim, int threads, int element_bytes>
class PagedTileCopy;  // cuda/paged_tile.cuh
template <class Spec, class Config, class KTile, class VTile>
class QuantisedTiles;  // cuda/quantised_tile.cuh
template <int block_m, int block_n, int warp_rows, int groups>
class SharedRows;  // cuda/forward_sm80_columns.cuh

template <class Spec, class Config>
class ForwardSm80 {
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using Sinks = typename Spec::Sinks;

  static constexpr int threads = Config::num_warps * 32;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  // Warps that share rows.
  static constexpr int groups = cuda_forward_column_groups(Spec::head_dim, Spec::head_dim_v);
  static constexpr int warp_rows = block_m * groups / Config::num_warps;
  static constexpr int m_tiles = warp_rows / 16;    // 16-row tiles of a warp
  static constexpr int n_tiles = block_n / 8;       // 8-key tiles of a block
  static constexpr int s_tiles = n_tiles / groups;  // those of a warp's scores
  static constexpr int k_steps = ceil_div(Spec::head_dim, 16);
  static constexpr int v_chunks = Spec::head_dim_v / 8;
  // 8-column tiles of a warp's output. Warps that share rows take turns at pairs of them; the last pairs may
  // not exist.
  static constexpr int o_tiles = groups == 1 ? v_chunks : ceil_div(v_chunks, 2 * groups) * 2;
  static_assert(warp_rows % 16 == 0 && block_n % 16 == 0 && n_tiles % groups == 0 &&
                (Config::num_stages == 1 || Config::num_stages == 2));

  using QTile = SharedTile<block_m, k_steps * 2>;
  using KTile = SharedTile<block_n, k_steps * 2>;
  using VTile = SharedTile<block_n, v_chunks>;
  using OTile = SharedTile<block_m, v_chunks>;
  static constexpr int stage_bytes = KTile::bytes + VTile::bytes;
  static constexpr int words_bytes = Spec::dropout ? block_n * 4 : 0;
  // 8-bit keys and values: the next block is in the place of a second stage, as it is stored.
  static constexpr bool quantised = is_quantised<typename Spec::kv_dtype>;
  static constexpr int stages = quantised ? 1 : Config::num_stages;
  static constexpr int exchange_bytes =
      cuda_forward_exchange(Spec::head_dim, Spec::head_dim_v, block_m, block_n);
  static constexpr int all_bytes =
      quantised ? cuda_quantised_forward_shared_memory(Spec::head_dim, Spec::head_dim_v, block_m, block_n,
                                                       Spec::kv_scale == KvScale::token_head)
                : cuda_forward_shared_memory(Spec::head_dim, Spec::head_dim_v, block_m, block_n,
                                             Config::num_stages, Spec::dropout);
  static_assert(quantised ||
                max(QTile::bytes + stages * (stage_bytes + words_bytes), OTile::bytes) + exchange_bytes ==
                    all_bytes);

  using Softmax = OnlineSoftmax<m_tiles, true>;
  using Sharing = SharedRows<block_m, block_n, warp_rows, groups>;

  // Q stays in registers if it leaves enough of them for the rest. The scores then read a third less from
  // shared memory.
  static constexpr int accumulators = m_tiles * 4 * (s_tiles + o_tiles);
  static constexpr bool q_in_registers = accumulators <= 144 && accumulators + m_tiles * 4 * k_steps <= 184;
  // How far ahead operands of scores are loaded. Where a warp has few keys, a step of Q is a product or two.
  static constexpr int s_pairs = ceil_div(s_tiles, 2);
  static constexpr int s_ahead = min(3, groups == 1 ? s_pairs : k_steps * s_pairs);
  // How many steps of Q are in registers at a time.
  static constexpr int q_steps = q_in_registers ? k_steps : 1 + ceil_div(s_ahead, s_pairs);

 public:
  FLASHJIT_FN static void run(const Sm80ForwardParams& p, u32 shared) {
    const TileIndex tile = tile_of_block(p);
    const Problem problem =
        make_problem<Spec::varlen, Mask::padding, Spec::paged>(p, tile.batch, tile.head_q);
    const int first_row = tile.m_block * block_m;
    if (first_row >= problem.rows) return;
    ForwardSm80(p, problem, shared, first_row).run(problem);
  }

 private:
  FLASHJIT_FN ForwardSm80(const Sm80ForwardParams& p, const Problem& problem, u32 shared, int first_row)
      : p_(p),
        mask_(p, problem),
        score_(p, problem),
        shared_(shared),
        first_row_(first_row),
        seqlen_q_(problem.seqlen_q),
        head_(problem.head_q),
        softmax_(Score::scale_log2(p)) {}

  FLASHJIT_FN static TileIndex tile_of_block(const Sm80ForwardParams& p) {
    return tile_index(p, static_cast<int>(ctaid_x()), block_m);
  }

  FLASHJIT_FN Span rows() const { return {first_row_, min(first_row_ + block_m, seqlen_q_)}; }
  // A warp's first row within the block's tile, and its number among those that share the rows.
  FLASHJIT_FN static u32 warp_row(u32 thread) { return thread / 32 / groups * warp_rows; }
  FLASHJIT_FN static u32 group(u32 thread) { return thread / 32 % groups; }
  // The row, within the block's tile, of elements 2 * half and 2 * half + 1 of accumulator tile i.
  FLASHJIT_FN static u32 accumulator_row(u32 thread, int i, int half) {
    return warp_row(thread) + i * 16 + half * 8 + thread % 32 / 4;
  }
  // The 8 columns that a warp's tile c of O has, and whether there are such columns.
  FLASHJIT_FN static u32 o_chunk(u32 thread, int c) {
    return groups == 1 ? c : c / 2 * (2 * groups) + group(thread) * 2 + c % 2;
  }
  FLASHJIT_FN static bool exists(u32 chunk) { return groups == 1 || chunk < v_chunks; }
  FLASHJIT_FN Sharing sharing() const { return {shared_ + all_bytes - exchange_bytes, tid_x()}; }
  FLASHJIT_FN u32 q_tile() const { return shared_; }
  FLASHJIT_FN u32 k_tile(int stage) const { return shared_ + QTile::bytes + stage * stage_bytes; }
  FLASHJIT_FN u32 v_tile(int stage) const { return k_tile(stage) + KTile::bytes; }
  FLASHJIT_FN u32 column_words(int stage) const { return k_tile(stages) + stage * words_bytes; }

  FLASHJIT_FN void run(const Problem& problem) {
    softmax_.reset();
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int c = 0; c < o_tiles; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[i][c][e] = 0;

    if constexpr (quantised)
      run_quantised(problem);
    else
      run_whole(problem);
    finish();
  }

  FLASHJIT_FN auto copy_of_q(const Problem& problem) const {
    return TileCopy<QTile, Spec::head_dim, threads>(
        static_cast<const Element*>(p_.q.data) + problem.q_offset(p_.q), p_.q.row_stride, threadIdx.x);
  }

  FLASHJIT_FN void run_whole(const Problem& problem) {
    const auto copy_k = copy_of<KTile, Spec::head_dim>(p_.k, problem);
    const auto copy_v = copy_of<VTile, Spec::head_dim_v>(p_.v, problem);
    const auto copy_q = copy_of_q(problem);
    const int seqlen_k = problem.seqlen_k;
    [[maybe_unused]] Words key;
    if constexpr (Spec::dropout) {
      key = dropout_key(p_.dropout);
      make_row_words(key, problem);
    }
    // Copies V and makes the words of its columns.
    const auto load_v = [&](int stage, int first_key) {
      copy_v(v_tile(stage), first_key, seqlen_k);
      if constexpr (Spec::dropout) {
        const int part = static_cast<int>(threadIdx.x);
        if (part < block_n / 4)
          st_column_words(
              column_words(stage), part,
              column_words_at<typename Spec::Offsets>(p_, key, first_key / 4 + part, problem.batch));
      }
    };

    BlockWalk<Keys, Mask> walk(mask_, rows(), block_n);
    Block block;
    // Starts the copies for the next block. A copy of the walk looks that block up.
    const auto load_next = [&](int stage) {
      BlockWalk<Keys, Mask> ahead = walk;
      Block next;
      if (ahead.next(next)) {
        copy_k(k_tile(stage), next.index * block_n, seqlen_k);
        if (Config::num_stages == 2) load_v(stage, next.index * block_n);
      }
      cp_async_commit_group();
    };
    copy_q(q_tile(), first_row_, seqlen_q_);
    cp_async_commit_group();
    load_next(0);
    load_q();

    if constexpr (Config::num_stages == 1) {
      // V arrives during the scores, the next K during softmax and output.
      while (walk.next(block)) {
        wait_and_sync<0>();
        load_v(0, block.index * block_n);
        cp_async_commit_group();
        compute_scores(k_tile(0));
        wait_and_sync<0>();
        load_next(0);
        modify_and_mask(block);
        accumulate(v_tile(0), column_words(0));
      }
    } else {
      // The next K and V arrive during a whole step. One barrier means both "this stage is full" and "the
      // other stage is free".
      for (int stage = 0; walk.next(block); stage ^= 1) {
        wait_and_sync<0>();
        load_next(stage ^ 1);
        compute_scores(k_tile(stage));
        modify_and_mask(block);
        accumulate(v_tile(stage), column_words(stage));
      }
    }
    wait_and_sync<0>();
  }

  // The next block arrives during a whole step, in 8 bits. Then all threads convert it.
  FLASHJIT_FN void run_quantised(const Problem& problem) {
    const QuantisedTiles<Spec, Config, KTile, VTile> stored(p_, problem, mask_, rows(),
                                                            shared_ + QTile::bytes + stage_bytes);
    BlockWalk<Keys, Mask> walk(mask_, rows(), block_n);
    Block block;
    const auto copy_next = [&] {
      BlockWalk<Keys, Mask> ahead = walk;
      Block next;
      if (ahead.next(next)) stored.copy(next.index * block_n);
      cp_async_commit_group();
    };
    copy_of_q(problem)(q_tile(), first_row_, seqlen_q_);
    cp_async_commit_group();
    copy_next();
    load_q();
    while (walk.next(block)) {
      wait_and_sync<0>();
      stored.convert(k_tile(0), v_tile(0));
      __syncthreads();
      copy_next();
      compute_scores(k_tile(0));
      stored.scale_scores(s_, static_cast<int>(group(threadIdx.x)) * s_tiles);
      modify_and_mask(block);
      accumulate(v_tile(0), 0);
    }
    wait_and_sync<0>();
  }

  template <class Tile, int head_dim>
  FLASHJIT_FN auto copy_of(const TensorView& keys, const Problem& problem) const {
    if constexpr (Spec::paged) {
      return PagedTileCopy<Tile, head_dim, threads, 2>(p_, keys, problem, mask_, rows(), threadIdx.x);
    } else {
      return TileCopy<Tile, head_dim, threads>(
          static_cast<const Element*>(keys.data) + problem.k_offset(keys), keys.row_stride, threadIdx.x);
    }
  }

  template <int pending>
  FLASHJIT_FN static void wait_and_sync() {
    cp_async_wait_group<pending>();
    __syncthreads();
  }

  // Each lane makes the words of one of the warp's rows, then gets the words of its own rows.
  FLASHJIT_FN void make_row_words(const Words& key, const Problem& problem) {
    const u32 thread = threadIdx.x;
    const int row = first_row_ + static_cast<int>(thread / (32 * groups) * warp_rows + thread % warp_rows);
    const RowWords words = row_words_at<typename Spec::Offsets>(p_, key, row, problem.head_q, problem.batch);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        row_words_[i][half] = row_words_of(words, i * 16 + half * 8 + thread % 32 / 4);
  }

  FLASHJIT_FN void load_q() {
    q_address_ = q_tile() + warp_row(threadIdx.x) * QTile::row_bytes + QTile::lane_offset(threadIdx.x % 32);
    if constexpr (q_in_registers) {
      wait_and_sync<1>();
#pragma unroll
      for (int step = 0; step < k_steps; ++step) load_q(q_[step], step);
    }
  }
  FLASHJIT_FN void load_q(u32 (&q)[m_tiles][4], int step) const {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) ldmatrix_x4(q[i], QTile::at(q_address_, i * 16, step * 2));
  }

  // s = q k^T. Operands are loaded `ahead` products before their use, since ldmatrix takes longer than one
  // product.
  FLASHJIT_FN void compute_scores(u32 k_tile) {
    constexpr int pairs = s_pairs, count = k_steps * pairs, ahead = s_ahead;
    const u32 k_address = k_tile + group(threadIdx.x) * (s_tiles * 8) * KTile::row_bytes +
                          KTile::lane_offset_b(threadIdx.x % 32);
    u32 k[ahead + 1][4];
    const auto load = [&](int t) {
      const int step = t / pairs, n = t % pairs * 2;
      auto& b = k[t % (ahead + 1)];
      if (n == 0 && !q_in_registers) load_q(q_[step % q_steps], step);
      if (n + 1 < s_tiles)
        ldmatrix_x4(b, KTile::at(k_address, n * 8, step * 2));
      else
        ldmatrix_x2(b[0], b[1], KTile::at(k_address, n * 8, step * 2));
    };
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int n = 0; n < s_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s_[i][n][e] = 0;
#pragma unroll
    for (int t = 0; t < ahead; ++t) load(t);
#pragma unroll
    for (int t = 0; t < count; ++t) {
      if (t + ahead < count) load(t + ahead);
      const int step = t / pairs, n = t % pairs * 2;
      const auto& q = q_[step % q_steps];
      const auto& b = k[t % (ahead + 1)];
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        mma_m16n8k16(Element{}, s_[i][n], q[i], b[0], b[1]);
        if (n + 1 < s_tiles) mma_m16n8k16(Element{}, s_[i][n + 1], q[i], b[2], b[3]);
      }
    }
  }

  FLASHJIT_FN void modify_and_mask(const Block& block) {
    const u32 thread = tid_x(), lane = thread % 32;
    const int first = first_row_ + static_cast<int>(accumulator_row(thread, 0, 0));
    constexpr int keys = block_n / groups;
    const int part = static_cast<int>(group(thread));
    const auto heads = [&](int) { return head_; };
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      const auto rows = [&](int row) { return first + i * 16 + row; };
      score_.template modify<keys>(s_[i][0], score_.of_rows(rows, heads), rows, heads,
                                   first_key_of<block_n, keys>(block, part), lane);
    }
    if (block.whole) return;
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
      mask_elements<block_m, block_n, keys>(
          s_[i][0], mask_, [&](int row) { return first + i * 16 + row; }, heads, block, lane, part);
  }

  // Online softmax of s_, then o += p v. Sums include dropped weights.
  FLASHJIT_FN void accumulate(u32 v_tile, [[maybe_unused]] u32 column_words) {
    if (take_max()) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int c = 0; c < o_tiles; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[i][c][e] *= softmax_.correction(2 * i + e / 2);
    }

    // Two score tiles of 8 keys are, element for element, one operand of 16 keys. One operand is multiplied
    // while the next is exponentiated: the tensor cores and the special function unit work side by side.
    constexpr int pairs = ceil_div(o_tiles, 2), count = n_tiles / 2 * pairs, ahead = min(4, count);
    constexpr int registers = m_tiles * 4;
    u32 p[2][m_tiles][4], v[ahead + 1][4];
    [[maybe_unused]] u32 columns[4];
    if constexpr (groups > 1) share_weights(column_words);
    const auto exponentiate = [&](int n, int begin, int end) {
      if constexpr (groups > 1) {
        if (begin == 0 && end > 0) sharing().load(p[n / 2 % 2], n / 2);
        return;
      }
      if (Spec::dropout && begin == 0) ld_column_words(columns, column_words, n / 2, threadIdx.x);
#pragma unroll
      for (int r = begin; r < end; ++r) {
        const int i = r / 4, j = r % 4, half = j % 2;
        float low = s_[i][n + j / 2][half * 2], high = s_[i][n + j / 2][half * 2 + 1];
        softmax_.exponentiate(2 * i + half, low, high);
        if constexpr (Spec::dropout) {
          if (dropped(row_words_[i][half], columns[j / 2 * 2], p_.dropout.below)) low = 0;
          if (dropped(row_words_[i][half], columns[j / 2 * 2 + 1], p_.dropout.below)) high = 0;
        }
        p[n / 2 % 2][i][j] = cvt_rn_x2(Element{}, low, high);
      }
    };
    const u32 v_address = v_tile + VTile::lane_offset(threadIdx.x % 32, group(threadIdx.x) * 2);
    const auto load = [&](int t) {
      const int key = t / pairs * 16, c = t % pairs * 2;
      auto& b = v[t % (ahead + 1)];
      if (c + 1 < o_tiles) {
        // In place of columns that do not exist, the warp's first ones.
        const bool all_exist = (c + 2) * groups <= v_chunks;
        const bool exist = all_exist || exists(o_chunk(threadIdx.x, c) + threadIdx.x % 32 / 16);
        ldmatrix_x4_trans(b, VTile::at(v_address, key, exist ? c * groups : 0));
      } else {
        ldmatrix_x2_trans(b[0], b[1], VTile::at(v_address, key, c));
      }
    };
#pragma unroll
    for (int t = 0; t < ahead; ++t) load(t);
    exponentiate(0, 0, registers);
#pragma unroll
    for (int t = 0; t < count; ++t) {
      const int n = t / pairs * 2, part = t % pairs, c = part * 2;
      if (t + ahead < count) load(t + ahead);
      const auto& a = p[n / 2 % 2];
      const auto& b = v[t % (ahead + 1)];
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        mma_m16n8k16(Element{}, o_[i][c], a[i], b[0], b[1]);
        if (c + 1 < o_tiles) mma_m16n8k16(Element{}, o_[i][c + 1], a[i], b[2], b[3]);
      }
      if (n + 2 < n_tiles) exponentiate(n + 2, registers * part / pairs, registers * (part + 1) / pairs);
    }
  }

  FLASHJIT_FN bool take_max() {
    if constexpr (groups == 1)
      return softmax_.template take_max<n_tiles * 4>(s_[0][0]);
    else
      return softmax_.template take_max_of_all<s_tiles * 4>(s_[0][0], [&](float(&maxima)[2 * m_tiles]) {
        sharing().combine(maxima, [](float a, float b) { return fmaxf(a, b); });
      });
  }

  // The weights of the warp's keys, for all that share its rows.
  FLASHJIT_FN void share_weights([[maybe_unused]] u32 column_words) {
    const Sharing to = sharing();
    const u32 lane = threadIdx.x % 32, first_tile = group(threadIdx.x) * s_tiles;
#pragma unroll
    for (int n = 0; n < s_tiles; ++n) {
      [[maybe_unused]] u32 columns[2];
      if constexpr (Spec::dropout) ld_column_words_of_8(columns, column_words, first_tile + n, lane);
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) {
        float low = s_[r / 2][n][r % 2 * 2], high = s_[r / 2][n][r % 2 * 2 + 1];
        softmax_.exponentiate(r, low, high);
        if constexpr (Spec::dropout) {
          if (dropped(row_words_[r / 2][r % 2], columns[0], p_.dropout.below)) low = 0;
          if (dropped(row_words_[r / 2][r % 2], columns[1], p_.dropout.below)) high = 0;
        }
        to.store(r, first_tile + n, cvt_rn_x2(Element{}, low, high));
      }
    }
    to.wait_for_all();
  }

  // A row's sum of weights, for each of the thread's rows.
  FLASHJIT_FN void take_sums(float (&sums)[2 * m_tiles]) const {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) sums[r] = softmax_.relative_sum(r);
    sharing().combine(sums, [](float a, float b) { return a + b; });
  }

  // The factor of all outputs.
  FLASHJIT_FN float of_outputs([[maybe_unused]] const Problem& problem) const {
    if constexpr (quantised) return QuantisedTiles<Spec, Config, KTile, VTile>::of_outputs(p_, problem);
    return Spec::dropout ? p_.dropout.scale : 1.0f;
  }

  // Normalises o, and writes it and lse. float32 goes directly to memory: four lanes hold a row, and write 32
  // contiguous bytes of it at a time. 16 bits go through shared memory, which nothing else uses any more, for
  // stores of 16 bytes.
  FLASHJIT_FN void finish() {
    const TileIndex tile = tile_of_block(p_);  // again: costs less than registers held through the loop
    const Problem problem =
        make_problem<Spec::varlen, Mask::padding, Spec::paged>(p_, tile.batch, tile.head_q);
    const int first_row = tile.m_block * block_m;
    const u32 o_tile = shared_, thread = tid_x();
    const float factor = of_outputs(problem);
    [[maybe_unused]] float sums[2 * m_tiles];
    if constexpr (groups > 1) take_sums(sums);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float lse, sum;
        if constexpr (groups == 1) {
          sum = softmax_.sum(2 * i + half, lse);
        } else {
          sum = Softmax::checked(sums[2 * i + half], softmax_.reference(2 * i + half));
          lse = Softmax::log_sum_exp(sum, softmax_.reference(2 * i + half));
        }
        float inverse = rcp_approx(sum) * factor;
        if constexpr (Sinks::exist)
          inverse = Softmax::normalizer(sum, softmax_.reference(2 * i + half),
                                        Sinks::log2(p_, problem.head_q), lse) *
                    factor;
        const u32 row = accumulator_row(thread, i, half);
        const int position = first_row + static_cast<int>(row);
        const bool unused = Mask::padding && position >= problem.seqlen_q;
        const bool zero = unused || sum == 0 || (Spec::dropout && p_.dropout.scale == 0);
        if constexpr (Spec::lse) {
          if (thread % 4 == 0 && group(thread) == 0 && position < problem.rows) {
            static_cast<float*>(p_.lse.data)[problem.q_offset(p_.lse) + position * p_.lse.row_stride] =
                unused ? minus_infinity : lse;
          }
        }
        if constexpr (sizeof(OElement) == 4) {
          OElement* const to = static_cast<OElement*>(p_.o.data) + problem.q_offset(p_.o) +
                               position * p_.o.row_stride + thread % 4 * 2;
#pragma unroll
          for (int c = 0; c < o_tiles; ++c) {
            const u32 value[2] = {
                zero ? 0 : __float_as_uint(scaled<Spec::batch_invariant>(o_[i][c][half * 2], inverse)),
                zero ? 0 : __float_as_uint(scaled<Spec::batch_invariant>(o_[i][c][half * 2 + 1], inverse))};
            const u32 chunk = o_chunk(thread, c);
            if (position < problem.rows && exists(chunk)) st_global_v2(to + chunk * 8, value);
          }
        } else {
          const u32 address = o_tile + OTile::offset(row, o_chunk(thread, 0)) + thread % 4 * 4;
#pragma unroll
          for (int c = 0; c < o_tiles; ++c) {
            const u32 value = cvt_rn_x2(Element{}, scaled<Spec::batch_invariant>(o_[i][c][half * 2], inverse),
                                        scaled<Spec::batch_invariant>(o_[i][c][half * 2 + 1], inverse));
            if (exists(o_chunk(thread, c))) st_shared(OTile::at(address, 0, o_chunk(0, c)), zero ? 0 : value);
          }
        }
      }
    }
    if constexpr (sizeof(OElement) == 4) return;
    if constexpr (groups == 1)
      __syncwarp();
    else
      sharing().wait_for_all();
    Element* o = static_cast<Element*>(p_.o.data) + problem.q_offset(p_.o);
    constexpr u32 own_rows = warp_rows / groups;
#pragma unroll 4
    for (u32 index = thread % 32; index < own_rows * v_chunks; index += 32) {
      const u32 row = thread / 32 * own_rows + index / v_chunks, chunk = index % v_chunks;
      const int position = first_row + static_cast<int>(row);
      u32 value[4];
      ld_shared_v4(value, o_tile + OTile::offset(row, chunk));
      if (position < problem.rows) st_global_v4(o + position * p_.o.row_stride + chunk * 8, value);
    }
  }

  const Sm80ForwardParams& p_;
  const Mask mask_;
  const Score score_;
  const u32 shared_;
  const int first_row_, seqlen_q_, head_;
  u32 q_address_;
  u32 q_[q_steps][m_tiles][4];
  float s_[m_tiles][s_tiles][4], o_[m_tiles][o_tiles][4];
  Softmax softmax_;
  RowWords row_words_[m_tiles][2];  // with dropout
};

template <class Spec, class Config>
FLASHJIT_FN void forward_sm80(const Sm80ForwardParams& params) {
  extern __shared__ __align__(128) char shared_memory[];
  ForwardSm80<Spec, Config>::run(params, shared_address(shared_memory));
}

}  // namespace flashjit::device
