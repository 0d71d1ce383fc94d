// Decode with mma.sync and cp.async: a few query rows of each batch entry against a long cache
// (FlashDecoding, Dao et al. 2023). Memory bounds it, so the grid's blocks take equal shares of all keys
// (shared/decode_schedule.h), and in each block some warps do nothing but keep copies in flight, across
// tiles. The others compute: query heads of a key/value head are rows of one tile, and groups of warps take
// turns at the tile's keys, each with a softmax of its own. At a tile's end their sums meet in shared memory,
// and all of them write. A second kernel merges tiles that several blocks have worked on.
#pragma once

#include "cuda/decode_units.cuh"
#include "cuda/online_softmax.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/store_columns.cuh"
#include "cuda/tile.cuh"
#include "shared/decode_cuda_layout.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct DecodeCudaSpec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using o_dtype = void;
  static constexpr bool lse = true, varlen = false, paged = false, batch_invariant = false;
};

template <class Spec, class Config>
struct Decode {
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using Sinks = typename Spec::Sinks;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static constexpr CudaDecodeLayout layout{Spec::head_dim, Spec::head_dim_v,   block_m,
                                           block_n,        Config::num_stages, Config::num_warps};
  static constexpr int step_keys = block_n * layout.groups;
  using Entry = DecodeEntry<Spec, step_keys>;
  static constexpr u32 least_units = Entry::fixed_parts ? 1 : 2;  // of a block
  static constexpr int m_tiles = layout.m_tiles;
  static constexpr int n_tiles = block_n / 8;  // 8-key tiles of a block
  static constexpr int k_steps = ceil_div(Spec::head_dim, 16);
  static constexpr int o_tiles = Spec::head_dim_v / 8;  // 8-column tiles of the output
  static constexpr u32 all_lanes = 0xffffffff;
  static_assert(layout.consumers % layout.row_warps == 0);

  using QTile = SharedTile<block_m, k_steps * 2>;
  using KTile = SharedTile<block_n, k_steps * 2>;
  using VTile = SharedTile<block_n, o_tiles>;

  // Addresses in shared memory, by buffer.
  struct Shared {
    u32 base;
    FLASHJIT_FN u32 q(int buffer) const { return base + layout.q + buffer * layout.q_bytes; }
    FLASHJIT_FN u32 k(int slot) const {
      return base + layout.ring + slot * (layout.k_bytes + layout.v_bytes);
    }
    FLASHJIT_FN u32 v(int slot) const { return k(slot) + layout.k_bytes; }
    // A row of a group's sums, and of its softmax.
    FLASHJIT_FN u32 sums(int group, u32 row) const {
      return base + layout.exchange + (group * block_m + row) * (layout.exchange_stride * 4);
    }
    FLASHJIT_FN u32 state(int group, u32 row) const {
      return base + layout.states + (group * block_m + row) * 8;
    }
    FLASHJIT_FN u32 message(int buffer) const {
      return base + layout.messages + buffer * layout.message_bytes;
    }
    FLASHJIT_FN u32 q_full(int buffer) const { return base + layout.q_full + buffer * 8; }
    FLASHJIT_FN u32 q_empty(int buffer) const { return base + layout.q_empty + buffer * 8; }
    FLASHJIT_FN u32 full(int slot) const { return base + layout.ring_full + slot * 8; }
    FLASHJIT_FN u32 empty(int slot) const { return base + layout.ring_empty + slot * 8; }
  };

  FLASHJIT_FN static void run(const CudaDecodeParams& p, u32 shared_base) {
    const Shared shared{shared_base};
    const int thread = static_cast<int>(tid_x());
    if (thread == 0) {
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared.q_full(i), 33);
        mbarrier_init(shared.q_empty(i), layout.consumers);
      }
      for (int i = 0; i < layout.slots; ++i) {
        mbarrier_init(shared.full(i), 32);
        mbarrier_init(shared.empty(i), layout.row_warps);
      }
    }
    __syncthreads();
    const int lane = thread % 32, warp = thread / 32;
    if (warp >= layout.consumers)
      Producer(p, shared, warp - layout.consumers, lane).run();
    else
      Consumer(p, shared, warp, lane).run();
  }

  // A segment, as producer 0 announces it to the consumers with the tile's Q.
  struct Message {
    int batch;  // negative: there are no more segments
    DecodeSegment segment;

    FLASHJIT_FN void send(u32 to) const {
      st_shared_v4(to, batch, segment.tile, segment.begin, segment.end);
      st_shared_v4(to + 16, segment.starts, segment.finishes, 0, 0);
    }
    FLASHJIT_FN static Message receive(u32 from) {
      u32 a[4], b[4];
      ld_shared_v4(a, from);
      ld_shared_v4(b, from + 16);
      return {static_cast<int>(a[0]),
              {static_cast<int>(a[1]), static_cast<int>(a[2]), static_cast<int>(a[3]), b[0] != 0, b[1] != 0}};
    }
  };

  // --- copies

  class Producer {
   public:
    FLASHJIT_FN Producer(const CudaDecodeParams& p, const Shared& shared, int index, int lane)
        : p_(p),
          shared_(shared),
          index_(index),
          lane_(lane),
          // Other tiles read the same keys if the rows of a key/value head need several.
          policy_(p.most_tiles > p.num_heads_kv ? l2_evict_normal() : l2_evict_first()) {}

    FLASHJIT_FN void run() {
      if (index_ >= layout.copiers) return;
      const DecodeUnits<Spec, Entry> units(p_, lane_);
      const DecodeShares shares(units.total(), nctaid_x(), least_units);
      const u32 block = ctaid_x(), begin = shares.begin(min(block, shares.used)),
                end = shares.begin(min(block + 1, shares.used));
      DecodeWalk<Entry> walk(p_, begin < end ? units.find(begin) : DecodePlace{}, end - begin);
      DecodeSegment segment;
      int count = 0;
      for (; walk.next(segment); ++count) {
        const Entry& entry = walk.entry();
        const DecodeTile tile(p_, entry, segment.tile);
        if (index_ == 0) {
          wait_for_consumers(count);
          send(count, {entry.problem.batch, segment});
          copy_q(entry, tile, count);
          cp_async_mbarrier_arrive_noinc(shared_.q_full(count % 2));
        }
        copy_keys(entry, tile, segment);
      }
      if (index_ == 0) {
        wait_for_consumers(count);
        send(count, {-1, {}});
        mbarrier_arrive(shared_.q_full(count % 2));
      }
      // Not earlier: the second kernel's blocks would take from what this one needs.
      griddepcontrol_launch_dependents();
      cp_async_commit_group();
      cp_async_wait_group<0>();
    }

   private:
    FLASHJIT_FN void wait_for_consumers(int count) const {
      mbarrier_wait(shared_.q_empty(count % 2), (count / 2 & 1) ^ 1);
    }
    FLASHJIT_FN void send(int count, const Message& message) const {
      if (lane_ != 0) return;
      message.send(shared_.message(count % 2));
      mbarrier_arrive(shared_.q_full(count % 2));
    }
    FLASHJIT_FN void copy_q(const Entry& entry, const DecodeTile& tile, int count) const {
      const Element* const q = static_cast<const Element*>(p_.q.data) + entry.problem.q_offset(p_.q) +
                               tile.first_position * p_.q.row_stride + tile.first_head * p_.q.head_stride;
      for (u32 i = lane_; i < block_m * QTile::chunks; i += 32) {
        const u32 row = i / QTile::chunks, chunk = i % QTile::chunks;
        const int position = static_cast<int>(row * p_.heads_inverse >> 16);
        const int head = static_cast<int>(row) - position * p_.tile_heads;
        const bool valid =
            position < tile.positions && head < tile.heads && (all_of_q || chunk * 8 < Spec::head_dim);
        cp_async_cg(shared_.q(count % 2) + QTile::offset(row, chunk),
                    q + position * p_.q.row_stride + head * p_.q.head_stride + chunk * 8, valid ? 16 : 0);
      }
    }
    static constexpr bool all_of_q = k_steps * 16 == Spec::head_dim;

    // Where the rows of a block begin. together: k and v are of its first row, and the others follow it. Else
    // they are of row `lane`; one that does not exist is zeros.
    struct Rows {
      bool together, exists;
      const Element *k, *v;
    };

    FLASHJIT_FN void copy_keys(const Entry& entry, const DecodeTile& tile, const DecodeSegment& segment) {
      const i64 batch = Spec::paged ? 0 : entry.problem.batch;
      const Element* const k = static_cast<const Element*>(p_.k.data) + p_.k.offset(batch, 0, tile.head_kv);
      const Element* const v = static_cast<const Element*>(p_.v.data) + p_.v.offset(batch, 0, tile.head_kv);
      const int blocks = entry.steps(segment.begin, segment.end) * layout.groups;
      // Producers take turns through all segments. Page ids are looked up one block ahead.
      const int first =
          static_cast<int>((index_ + layout.copiers - count_ % layout.copiers) % layout.copiers);
      Rows next;
      if (first < blocks) next = rows_of(entry, segment, first, k, v);
      for (int i = first; i < blocks; i += layout.copiers) {
        const Rows rows = next;
        if (i + layout.copiers < blocks) next = rows_of(entry, segment, i + layout.copiers, k, v);
        const u32 count = count_ + i, slot = count % layout.slots;
        mbarrier_wait(shared_.empty(slot), (count / layout.slots & 1) ^ 1);
        const u32 k_tile = shared_.k(slot), v_tile = shared_.v(slot);
        if (Spec::paged ? __shfl_sync(all_lanes, rows.together, 0) : rows.together) {
          const auto first_row = [](const Element* row) { return Spec::paged ? of_lane(row, 0) : row; };
          copy_together<KTile, Spec::head_dim>(k_tile, first_row(rows.k), p_.k.row_stride);
          copy_together<VTile, Spec::head_dim_v>(v_tile, first_row(rows.v), p_.v.row_stride);
        } else {
          const u32 existing = __ballot_sync(all_lanes, rows.exists);
          copy_apart<KTile, Spec::head_dim>(k_tile, rows.k, existing);
          copy_apart<VTile, Spec::head_dim_v>(v_tile, rows.v, existing);
        }
        cp_async_mbarrier_arrive_noinc(shared_.full(slot));
      }
      count_ += blocks;
    }

    FLASHJIT_FN Rows rows_of(const Entry& entry, const DecodeSegment& segment, int i, const Element* k,
                             const Element* v) const {
      const int first =
          entry.step(segment.begin, i / layout.groups) * step_keys + i % layout.groups * block_n;
      const Span block = {first, first + block_n};
      const bool all_seen = entry.keys.contains(block) && intersect(block, entry.gap).empty();
      if (!Spec::paged && all_seen)
        return {true, true, k + first * p_.k.row_stride, v + first * p_.v.row_stride};
      const int key = first + lane_;
      if (lane_ >= block_n || !entry.keys.contains(key) || entry.gap.contains(key))
        return {false, false, k, v};
      if constexpr (!Spec::paged) return {false, true, k + key * p_.k.row_stride, v + key * p_.v.row_stride};
      const u32 page_size = static_cast<u32>(p_.pages.page_size);
      const int index = static_cast<int>(key / page_size), place = static_cast<int>(key % page_size);
      const int id = p_.pages.table[entry.problem.batch * p_.pages.table_stride + index];
      const i64 page = min(max(id, 0), p_.pages.num_pages - 1);
      return {all_seen && page_size % block_n == 0, true, k + p_.k.offset(page, place, 0),
              v + p_.v.offset(page, place, 0)};
    }
    FLASHJIT_FN static const Element* of_lane(const Element* own, u32 lane) {
      return reinterpret_cast<const Element*>(
          __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(own), lane));
    }

    // Both copy a block's rows, chunk by chunk: lane l copies chunks l, l + 32, ...
    template <class Tile, int head_dim>
    FLASHJIT_FN void copy_together(u32 to, const Element* from, i64 row_stride) const {
      const Chunk<Tile> own(lane_, 0);
      const Element* source = from + own.row * row_stride + own.column * 8;
#pragma unroll
      for (u32 first = 0; first < Chunk<Tile>::count; first += 32) {
        const Chunk<Tile> chunk(lane_, first);
        if (!Chunk<Tile>::in_columns) source = from + chunk.row * row_stride + chunk.column * 8;
        if (chunk.exists())
          cp_async_cg(to + chunk.offset(), source, chunk.template within<head_dim>() ? 16 : 0, policy_);
        source += Chunk<Tile>::step * row_stride;
      }
    }
    // Row l begins at `own` of lane l, and bit l of `existing` says whether it exists.
    template <class Tile, int head_dim>
    FLASHJIT_FN void copy_apart(u32 to, const Element* own, u32 existing) const {
      const auto copy = [&](u32 first, bool all_exist) {
        const Chunk<Tile> chunk(lane_, first);
        const Element* const source = of_lane(own, chunk.row) + chunk.column * 8;
        const bool valid = (all_exist || existing >> chunk.row & 1) && chunk.template within<head_dim>();
        if (chunk.exists()) cp_async_cg(to + chunk.offset(), source, valid ? 16 : 0, policy_);
      };
      constexpr u32 all_rows = all_lanes >> (32 - block_n);
      if (Spec::paged && existing == all_rows) {
#pragma unroll
        for (u32 first = 0; first < Chunk<Tile>::count; first += 32) copy(first, true);
      } else {
#pragma unroll 1
        for (u32 first = 0; first < Chunk<Tile>::count; first += 32) copy(first, false);
      }
    }
    // Chunk first + lane of a block.
    template <class Tile>
    struct Chunk {
      static constexpr u32 count = block_n * Tile::chunks;
      // With rows of 2, 4, ... 32 chunks a lane's chunks lie in one column, `step` rows apart.
      static constexpr bool in_columns = 32 % Tile::chunks == 0;
      static constexpr u32 step = 32 / Tile::chunks;
      u32 index, row, column;

      FLASHJIT_FN Chunk(u32 lane, u32 first) : index(first + lane) {
        const u32 of_lane = in_columns ? lane : min(index, count - 1);
        row = of_lane / Tile::chunks + (in_columns ? first / 32 * step : 0);
        column = of_lane % Tile::chunks;
      }
      FLASHJIT_FN bool exists() const { return count % 32 == 0 || index < count; }
      FLASHJIT_FN u32 offset() const { return Tile::offset(row, column); }
      template <int head_dim>
      FLASHJIT_FN bool within() const {
        return Tile::chunks * 8 == head_dim || column * 8 < head_dim;
      }
    };

    const CudaDecodeParams& p_;
    const Shared shared_;
    const int index_, lane_;
    const u64 policy_;
    u32 count_ = 0;  // blocks of all segments before this one
  };

  // --- arithmetic

  class Consumer {
   public:
    FLASHJIT_FN Consumer(const CudaDecodeParams& p, const Shared& shared, int warp, int lane)
        : p_(p),
          shared_(shared),
          lane_(lane),
          group_(warp / layout.row_warps),
          row_warp_(warp % layout.row_warps),
          softmax_(Score::scale_log2(p)) {}

    FLASHJIT_FN void run() {
      for (int count = 0;; ++count) {
        mbarrier_wait(shared_.q_full(count % 2), count / 2 & 1);
        const Message message = Message::receive(shared_.message(count % 2));
        if (message.batch < 0) break;
        const DecodeSegment& segment = message.segment;
        const Entry entry(p_, message.batch);
        const DecodeTile tile(p_, entry, segment.tile);
        begin_rows(tile, count);
        add_keys(entry, tile, segment);
        if (!q_in_registers) release(shared_.q_empty(count % 2));
        if (segment.starts && segment.finishes)
          merge_groups<true>(tile, [&](u32 row, int column, const float(&o)[4], float lse) {
            write(entry.problem, tile, row, column, o, lse);
          });
        else
          merge_groups<false>(tile, [&, slot = slot_of(entry, segment, message.batch)](
                                        u32 row, int column, const float(&o)[4], float lse) {
            write_part(slot, row, column, o, lse);
          });
      }
    }

   private:
    static constexpr bool q_in_registers =
        layout.q_registers(Spec::head_dim, Spec::head_dim_v) == m_tiles * 4 * k_steps;
    static constexpr int named_barrier = 1;
    using Softmax = OnlineSoftmax<m_tiles, true>;

    // The row, within the tile, of elements 2 * half and 2 * half + 1 of accumulator tile i.
    FLASHJIT_FN u32 row_of(int i, int half) const {
      return row_warp_ * m_tiles * 16 + i * 16 + half * 8 + lane_ / 4;
    }
    FLASHJIT_FN void release(u32 barrier) const {
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(barrier);
    }

    FLASHJIT_FN void begin_rows(const DecodeTile& tile, int count) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          position_[i][half] =
              tile.first_position + static_cast<int>(row_of(i, half) * p_.heads_inverse >> 16);
      softmax_.reset();
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int c = 0; c < o_tiles; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[i][c][e] = 0;
      q_address_ =
          shared_.q(count % 2) + row_warp_ * m_tiles * 16 * QTile::row_bytes + QTile::lane_offset(lane_);
      if constexpr (q_in_registers) {
#pragma unroll
        for (int step = 0; step < k_steps; ++step) load_q(q_[step], step);
        release(shared_.q_empty(count % 2));
      }
    }
    FLASHJIT_FN void load_q(u32 (&q)[m_tiles][4], int step) const {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) ldmatrix_x4(q[i], QTile::at(q_address_, i * 16, step * 2));
    }

    FLASHJIT_FN void add_keys(const Entry& entry, const DecodeTile& tile, const DecodeSegment& segment) {
      Mask mask(p_, entry.problem);
      see_heads(mask, {tile.first_head, tile.first_head + tile.heads});
      Problem problem = entry.problem;
      problem.head_q = tile.first_head;
      const Score score(p_, problem);
      const Span positions = {tile.first_position, tile.first_position + tile.positions};
      const int steps = entry.steps(segment.begin, segment.end);
      for (int i = 0; i < steps; ++i) {
        const int slot = stage_ * layout.groups + group_;
        Block block;
        block.index = entry.step(segment.begin, i) * layout.groups + group_;
        const Span keys = block_span(block.index, block_n);
        block.whole = mask.whole(positions, keys);
        block.found = not_found;
        mbarrier_wait(shared_.full(slot), parity_);
        if (!intersect(keys, entry.keys).empty()) {
          take_scores(shared_.k(slot));
          modify_and_mask(mask, score, tile, block);
          accumulate(shared_.v(slot));
        }
        release(shared_.empty(slot));
        if (++stage_ == Config::num_stages) stage_ = 0, parity_ ^= 1;
      }
    }

    // s = q k^T
    FLASHJIT_FN void take_scores(u32 k_tile) {
      const u32 k_address = k_tile + KTile::lane_offset_b(lane_);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s_[i][n][e] = 0;
#pragma unroll
      for (int step = 0; step < k_steps; ++step) {
        auto& q = q_[q_in_registers ? step : step % 2];
        if (!q_in_registers) load_q(q, step);
#pragma unroll
        for (int n = 0; n < n_tiles; n += 2) {
          u32 k[4];
          ldmatrix_x4(k, KTile::at(k_address, n * 8, step * 2));
#pragma unroll
          for (int i = 0; i < m_tiles; ++i) {
            mma_m16n8k16(Element{}, s_[i][n], q[i], k[0], k[1]);
            mma_m16n8k16(Element{}, s_[i][n + 1], q[i], k[2], k[3]);
          }
        }
      }
    }

    FLASHJIT_FN void modify_and_mask(const Mask& mask, const Score& score, const DecodeTile& tile,
                                     const Block& block) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        const auto rows = [&](int row) { return position_[i][row / 8]; };
        const auto heads = [&](int row) {
          return tile.first_head + static_cast<int>(row_of(i, row / 8)) -
                 (rows(row) - tile.first_position) * p_.tile_heads;
        };
        score.template modify<block_n>(s_[i][0], score.of_rows(rows, heads), rows, heads,
                                       block.index * block_n, lane_);
        if (!block.whole) mask_elements<unknown_size, block_n>(s_[i][0], mask, rows, heads, block, lane_);
      }
    }

    // Online softmax of s_, then o += p v.
    FLASHJIT_FN void accumulate(u32 v_tile) {
      if (softmax_.template take_max<n_tiles * 4>(s_[0][0])) {
#pragma unroll
        for (int i = 0; i < m_tiles; ++i)
#pragma unroll
          for (int c = 0; c < o_tiles; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) o_[i][c][e] *= softmax_.correction(2 * i + e / 2);
      }
      softmax_.template exponentiate<n_tiles * 4>(s_[0][0]);
      const u32 v_address = v_tile + VTile::lane_offset(lane_);
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        // Two score tiles of 8 keys are, element for element, one operand of 16 keys.
        u32 p[m_tiles][4];
#pragma unroll
        for (int i = 0; i < m_tiles; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            p[i][j] = cvt_rn_x2(Element{}, s_[i][n + j / 2][j % 2 * 2], s_[i][n + j / 2][j % 2 * 2 + 1]);
#pragma unroll
        for (int c = 0; c < o_tiles; c += 2) {
          u32 v[4];
          if (c + 1 < o_tiles)
            ldmatrix_x4_trans(v, VTile::at(v_address, n * 8, c));
          else
            ldmatrix_x2_trans(v[0], v[1], VTile::at(v_address, n * 8, c));
#pragma unroll
          for (int i = 0; i < m_tiles; ++i) {
            mma_m16n8k16(Element{}, o_[i][c], p[i], v[0], v[1]);
            if (c + 1 < o_tiles) mma_m16n8k16(Element{}, o_[i][c + 1], p[i], v[2], v[3]);
          }
        }
      }
    }

    // Merges all groups' sums, of all keys if it `ends`. Calls write(row of the tile, column, columns, lse).
    template <bool ends, class Write>
    FLASHJIT_FN void merge_groups(const DecodeTile& tile, const Write& write) const {
      const u32 rows = static_cast<u32>(tile.positions * p_.tile_heads);
#pragma unroll
      for (int first = 0; first < Spec::head_dim_v; first += layout.exchange_columns) {
        sync_consumers();  // the columns before these have been read
        give_sums(first, rows);
        sync_consumers();
        take_sums<ends>(tile, first, rows, write);
      }
    }
    FLASHJIT_FN static void sync_consumers() { bar_sync(named_barrier, layout.consumers * 32); }

    FLASHJIT_FN void give_sums(int first, u32 rows) const {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 row = row_of(i, half);
          const float sum = softmax_.sum(2 * i + half);
          if (row >= rows) continue;
          if (first == 0 && lane_ % 4 == 0)
            st_shared_v2(shared_.state(group_, row), __float_as_uint(softmax_.reference(2 * i + half)),
                         __float_as_uint(sum));
          const u32 to = shared_.sums(group_, row) + lane_ % 4 * 8;
#pragma unroll
          for (int c = first / 8; c < min(first + layout.exchange_columns, Spec::head_dim_v) / 8; ++c)
            st_shared_v2(to + (c * 8 - first) * 4, __float_as_uint(o_[i][c][half * 2]),
                         __float_as_uint(o_[i][c][half * 2 + 1]));
        }
    }

    template <bool ends, class Write>
    FLASHJIT_FN void take_sums([[maybe_unused]] const DecodeTile& tile, int first, u32 rows,
                               const Write& write) const {
      const u32 vectors = static_cast<u32>(min(layout.exchange_columns, Spec::head_dim_v - first)) / 4;
#pragma unroll 1
      for (u32 i = tid_x(); i < rows * vectors; i += layout.consumers * 32) {
        const u32 row = i / vectors, column = i % vectors * 4;
        float reference[layout.groups], sum[layout.groups];
#pragma unroll
        for (int g = 0; g < layout.groups; ++g) {
          int words[2];
          ld_shared_v2(words[0], words[1], shared_.state(g, row));
          reference[g] = __uint_as_float(static_cast<u32>(words[0]));
          sum[g] = __uint_as_float(static_cast<u32>(words[1]));
        }
        float top = reference[0];
#pragma unroll
        for (int g = 1; g < layout.groups; ++g) top = fmaxf(top, reference[g]);
        float all = 0, o[4] = {};
#pragma unroll
        for (int g = 0; g < layout.groups; ++g) {
          const float weight = ex2_approx(reference[g] - top);
          all = __fmaf_rn(sum[g], weight, all);
          u32 words[4];
          ld_shared_v4(words, shared_.sums(g, row) + column * 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) o[e] = __fmaf_rn(__uint_as_float(words[e]), weight, o[e]);
        }
        float factor = all == 0 ? 0.f : 1.f / all, lse = Softmax::log_sum_exp(all, top);
        if constexpr (ends && Sinks::exist) {
          const int head =
              static_cast<int>(row) - static_cast<int>(row * p_.heads_inverse >> 16) * p_.tile_heads;
          const int last = tile.heads - 1;  // rows beyond it are not written
          factor = Softmax::normalizer(all, top, Sinks::log2(p_, tile.first_head + min(head, last)), lse);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = all == 0 ? 0.f : o[e] * factor;  // 0 times infinity would be NaN
        write(row, first + static_cast<int>(column), o, lse);
      }
    }

    FLASHJIT_FN void write(const Problem& problem, const DecodeTile& tile, u32 row, int column,
                           const float (&o)[4], float lse) const {
      const int position = static_cast<int>(row * p_.heads_inverse >> 16);
      const int head = static_cast<int>(row) - position * p_.tile_heads;
      if (head >= tile.heads) return;
      const auto offset = [&](const TensorView& t) {
        return problem.q_offset(t) + (tile.first_position + position) * t.row_stride +
               (tile.first_head + head) * t.head_stride;
      };
      store_columns(static_cast<OElement*>(p_.o.data) + offset(p_.o) + column, o);
      if (Spec::lse && column == 0) static_cast<float*>(p_.lse.data)[offset(p_.lse)] = lse;
    }
    FLASHJIT_FN i64 slot_of(const Entry& entry, const DecodeSegment& segment, int batch) const {
      if constexpr (Entry::fixed_parts)
        return p_.fixed_slot(batch, segment.tile, entry.units.at(segment.begin));
      return 2 * i64{ctaid_x()} + segment.starts;
    }
    FLASHJIT_FN void write_part(i64 slot, u32 row, int column, const float (&o)[4], float lse) const {
      const i64 place = slot * p_.tile_rows() + row;
      store_columns(p_.parts_o + place * Spec::head_dim_v + column, o);
      if (column == 0) p_.parts_lse[place] = lse;
    }

    const CudaDecodeParams& p_;
    const Shared shared_;
    const int lane_, group_, row_warp_;
    int stage_ = 0, parity_ = 0;
    int position_[m_tiles][2];
    u32 q_address_;
    u32 q_[q_in_registers ? k_steps : 2][m_tiles][4];
    float s_[m_tiles][n_tiles][4], o_[m_tiles][o_tiles][4];
    Softmax softmax_;
  };
};

template <class Spec, class Config>
FLASHJIT_FN void decode(const CudaDecodeParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  Decode<Spec, Config>::run(params, shared_address(dynamic_shared));
}

}  // namespace flashjit::device
