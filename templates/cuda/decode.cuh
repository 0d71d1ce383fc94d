// Decode with mma.sync and cp.async: a few query rows of each batch entry against a long cache
// (FlashDecoding, Dao et al. 2023). Memory bounds it, so the grid's blocks take equal shares of all keys
// (shared/decode_schedule.h), and in each block some warps do nothing but keep copies in flight, across
// tiles. The others compute: query heads of a key/value head are rows of one tile, and groups of warps take
// turns at the tile's keys, each with a softmax of its own. At a tile's end they merge. A second kernel
// merges tiles that several blocks have worked on.
#pragma once

#include "cuda/online_softmax.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/tile.cuh"
#include "shared/decode_cuda_layout.h"
#include "shared/decode_schedule.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct DecodeCudaSpec {
  using Mask = Intersect<Bounds>;
  using Score = PlainScore;
  using o_dtype = void;
  static constexpr bool lse = true, varlen = false, paged = false, batch_invariant = false;
};

template <class Spec, class Config>
struct Decode {
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static constexpr CudaDecodeLayout layout{Spec::head_dim, Spec::head_dim_v,   block_m,
                                           block_n,        Config::num_stages, Config::num_warps};
  static constexpr int step_keys = block_n * layout.groups;
  using Entry = DecodeEntry<Spec, step_keys>;
  using Walk = DecodeWalk<Entry>;
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
    FLASHJIT_FN u32 exchange(int place) const {
      return base + layout.exchange + place * layout.exchange_bytes;
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
    griddepcontrol_launch_dependents();
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
    int parts;  // of a tile that this block begins and another one ends; else 0

    FLASHJIT_FN void send(u32 to) const {
      st_shared_v4(to, batch, segment.tile, segment.begin, segment.end);
      st_shared_v4(to + 16, segment.starts, segment.finishes, parts, 0);
    }
    FLASHJIT_FN static Message receive(u32 from) {
      u32 a[4], b[4];
      ld_shared_v4(a, from);
      ld_shared_v4(b, from + 16);
      return {static_cast<int>(a[0]),
              {static_cast<int>(a[1]), static_cast<int>(a[2]), static_cast<int>(a[3]), b[0] != 0, b[1] != 0},
              static_cast<int>(b[2])};
    }
  };

  // --- the block's share, found by each producer for itself

  FLASHJIT_FN static i64 units_of(const CudaDecodeParams& p, int batch) {
    return batch < p.batch ? Entry(p, batch).all_units() : 0;
  }
  FLASHJIT_FN static i64 all_units(const CudaDecodeParams& p, int lane) {
    i64 sum = 0;
    for (int batch = lane; batch < p.batch; batch += 32) sum += units_of(p, batch);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(all_lanes, sum, lanes);
    return sum;
  }
  FLASHJIT_FN static Walk walk_of(const CudaDecodeParams& p, const DecodeShares& shares, int block,
                                  int lane) {
    if (block >= shares.used || shares.total == 0) return Walk(p, 0, 0, 0, 0);
    const i64 begin = shares.begin(block), end = shares.begin(block + 1);
    i64 before = 0;  // units of all entries before `first`
    for (int first = 0;; first += 32) {
      const i64 own = units_of(p, first + lane);
      i64 sum = own;  // of this and all lower lanes
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const i64 lower = __shfl_sync(all_lanes, sum, (lane - lanes) & 31);
        if (lane >= lanes) sum += lower;
      }
      const u32 after_begin = __ballot_sync(all_lanes, before + sum > begin);
      if (after_begin) {
        const int found = __ffs(static_cast<int>(after_begin)) - 1;
        const i64 skipped = begin - before - __shfl_sync(all_lanes, sum - own, found);
        return Walk(p, begin, end, first + found, skipped);
      }
      before += __shfl_sync(all_lanes, sum, 31);
    }
  }

  // --- copies

  class Producer {
   public:
    FLASHJIT_FN Producer(const CudaDecodeParams& p, const Shared& shared, int index, int lane)
        : p_(p), shared_(shared), index_(index), lane_(lane) {}

    FLASHJIT_FN void run() {
      if (index_ >= layout.copiers) return;
      const int block = static_cast<int>(ctaid_x());
      constexpr int least_units = Entry::fixed_parts ? 1 : 2;  // of a block
      const DecodeShares shares(all_units(p_, lane_), static_cast<int>(nctaid_x()), least_units);
      Walk walk = walk_of(p_, shares, block, lane_);
      DecodeSegment segment;
      int count = 0;
      for (; walk.next(segment); ++count) {
        const Entry& entry = walk.entry();
        const DecodeTile tile(p_, entry, segment.tile);
        if (index_ == 0) {
          wait_for_consumers(count);
          const bool split = !Entry::fixed_parts && segment.starts && !segment.finishes;
          send(count,
               {entry.problem.batch, segment, split ? shares.block_of(walk.tile_end() - 1) - block + 1 : 0});
          copy_q(entry, tile, count);
          cp_async_mbarrier_arrive_noinc(shared_.q_full(count % 2));
        }
        copy_keys(entry, tile, segment);
      }
      if (index_ == 0) {
        wait_for_consumers(count);
        send(count, {-1, {}, 0});
        mbarrier_arrive(shared_.q_full(count % 2));
      }
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

    // The rows of a block: where K and V of key `lane` begin, in elements. Negative: a row of zeros.
    struct Rows {
      int first_key;
      i64 k, v;  // if the cache is paged
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
      if (first < blocks) next = rows_of(entry, segment, first);
      for (int i = first; i < blocks; i += layout.copiers) {
        const Rows rows = next;
        if (i + layout.copiers < blocks) next = rows_of(entry, segment, i + layout.copiers);
        const u32 count = count_ + i, slot = count % layout.slots;
        mbarrier_wait(shared_.empty(slot), (count / layout.slots & 1) ^ 1);
        copy<KTile, Spec::head_dim>(shared_.k(slot), k, p_.k.row_stride, entry, rows, rows.k);
        copy<VTile, Spec::head_dim_v>(shared_.v(slot), v, p_.v.row_stride, entry, rows, rows.v);
        cp_async_mbarrier_arrive_noinc(shared_.full(slot));
      }
      count_ += blocks;
    }

    FLASHJIT_FN static bool seen(const Entry& entry, int key) {
      return entry.keys.contains(key) && !entry.gap.contains(key);
    }
    FLASHJIT_FN Rows rows_of(const Entry& entry, const DecodeSegment& segment, int i) const {
      const int step = entry.step(segment.begin, i / layout.groups);
      Rows rows;
      rows.first_key = step * step_keys + i % layout.groups * block_n;
      if constexpr (Spec::paged) {
        const int key = rows.first_key + lane_;
        rows.k = rows.v = -1;
        if (lane_ < block_n && seen(entry, key)) {
          const u32 page_size = static_cast<u32>(p_.pages.page_size);
          const int index = static_cast<int>(key / page_size), place = static_cast<int>(key % page_size);
          const int id = p_.pages.table[entry.problem.batch * p_.pages.table_stride + index];
          const i64 page = min(max(id, 0), p_.pages.num_pages - 1);
          rows.k = p_.k.offset(page, place, 0);
          rows.v = p_.v.offset(page, place, 0);
        }
      }
      return rows;
    }

    template <class Tile, int head_dim>
    FLASHJIT_FN void copy(u32 to, const Element* from, i64 row_stride, const Entry& entry, const Rows& rows,
                          i64 paged_offset) const {
      constexpr int chunks = block_n * Tile::chunks;
#pragma unroll
      for (int first = 0; first < chunks; first += 32) {
        const u32 i = min(static_cast<u32>(first + lane_), u32{chunks - 1});
        const u32 row = i / Tile::chunks, chunk = i % Tile::chunks;
        i64 offset;
        bool valid = Tile::chunks * 8 == head_dim || chunk * 8 < head_dim;
        if constexpr (Spec::paged) {
          offset = __shfl_sync(all_lanes, paged_offset, row);
          valid &= offset >= 0;
        } else {
          const int key = rows.first_key + static_cast<int>(row);
          offset = key * row_stride;
          valid &= seen(entry, key);
        }
        if (chunks % 32 == 0 || first + lane_ < chunks)
          cp_async_cg(to + Tile::offset(row, chunk), from + offset + chunk * 8, valid ? 16 : 0);
      }
    }

    const CudaDecodeParams& p_;
    const Shared shared_;
    const int index_, lane_;
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
          softmax_(p.scale_log2) {}

    FLASHJIT_FN void run() {
      const int block = static_cast<int>(ctaid_x());
      SplitTile split{0, 0, 0};
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
        merge_groups();
        if (group_ == 0) {
          if (segment.starts && segment.finishes)
            write_rows(entry.problem, tile);
          else
            write_part(tile, Entry::fixed_parts
                                 ? p_.fixed_slot(message.batch, segment.tile, entry.units.at(segment.begin))
                                 : 2 * block + segment.starts);
        }
        if (message.parts > 0) split = {message.batch, segment.tile, message.parts};
      }
      if (!Entry::fixed_parts && tid_x() == 0) p_.split[block] = split;
    }

   private:
    static constexpr bool q_in_registers =
        layout.q_registers(Spec::head_dim, Spec::head_dim_v) == m_tiles * 4 * k_steps;
    static constexpr int named_barrier = 1;

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
      const Mask mask(p_, entry.problem);
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
          modify_and_mask(mask, block);
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

    FLASHJIT_FN void modify_and_mask(const Mask& mask, const Block& block) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        const auto rows = [&](int row) { return position_[i][row / 8]; };
        Spec::Score::modify(s_[i], rows, block, lane_);
        if (!block.whole) mask_scores<unknown_size, block_n>(s_[i][0], mask, rows, block, lane_);
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

    // Merges all groups' results into group 0's, in pairs. Each lane gives its registers to the same lane of
    // another warp. A group that gives in a later round uses the place that it has just read itself.
    FLASHJIT_FN void merge_groups() {
#pragma unroll
      for (int half = layout.groups / 2; half > 0; half /= 2) {
        const bool gives = half <= group_ && group_ < 2 * half;
        const int place = half == layout.groups / 2 ? group_ - half : group_;
        const int partner_place = half == layout.groups / 2 ? group_ : group_ + half;
        if (half == layout.groups / 2) sync_consumers();  // the last tile's places have been read
        if (gives) give(shared_.exchange(place * layout.row_warps + row_warp_));
        sync_consumers();
        if (group_ < half) take(shared_.exchange(partner_place * layout.row_warps + row_warp_));
      }
    }
    FLASHJIT_FN static void sync_consumers() { bar_sync(named_barrier, layout.consumers * 32); }

    FLASHJIT_FN void give(u32 to) const {
      to += lane_ * 16;
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        float state[4];
        softmax_.state(2 * i, state[0], state[1]);
        softmax_.state(2 * i + 1, state[2], state[3]);
        put(to, i * (o_tiles + 1), state);
#pragma unroll
        for (int c = 0; c < o_tiles; ++c) put(to, i * (o_tiles + 1) + 1 + c, o_[i][c]);
      }
    }
    FLASHJIT_FN static void put(u32 to, int place, const float (&v)[4]) {
      st_shared_v4(to + place * 512, __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                   __float_as_uint(v[3]));
    }
    FLASHJIT_FN void take(u32 from) {
      from += lane_ * 16;
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        u32 words[4];
        ld_shared_v4(words, from + i * (o_tiles + 1) * 512);
        float mine[2], theirs[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          softmax_.merge(2 * i + half, __uint_as_float(words[2 * half]), __uint_as_float(words[2 * half + 1]),
                         mine[half], theirs[half]);
#pragma unroll
        for (int c = 0; c < o_tiles; ++c) {
          ld_shared_v4(words, from + (i * (o_tiles + 1) + 1 + c) * 512);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            o_[i][c][e] = o_[i][c][e] * mine[e / 2] + __uint_as_float(words[e]) * theirs[e / 2];
        }
      }
    }

    // Calls body(accumulator tile, half, row of the tile, position within the tile, head within the tile,
    // factor, lse) for this thread's rows.
    template <class Body>
    FLASHJIT_FN void each_row(const DecodeTile& tile, const Body& body) const {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float lse;
          const float factor = softmax_.normalizer(2 * i + half, lse);
          const int row = static_cast<int>(row_of(i, half));
          const int position = position_[i][half] - tile.first_position;
          const int head = row - position * p_.tile_heads;
          if (position < tile.positions && head < tile.heads) body(i, half, row, position, head, factor, lse);
        }
    }
    FLASHJIT_FN void write_rows(const Problem& problem, const DecodeTile& tile) const {
      each_row(tile, [&](int i, int half, int, int position, int head, float factor, float lse) {
        position += tile.first_position;
        head += tile.first_head;
        OElement* const to = static_cast<OElement*>(p_.o.data) + problem.q_offset(p_.o) +
                             position * p_.o.row_stride + head * p_.o.head_stride + lane_ % 4 * 2;
#pragma unroll
        for (int c = 0; c < o_tiles; ++c) {
          // A sum of 0 times infinity would be NaN.
          const float low = factor == 0 ? 0 : o_[i][c][half * 2] * factor;
          const float high = factor == 0 ? 0 : o_[i][c][half * 2 + 1] * factor;
          if constexpr (sizeof(OElement) == 4)
            st_global_v2(to + c * 8, {__float_as_uint(low), __float_as_uint(high)});
          else
            st_global(to + c * 8, cvt_rn_x2(Element{}, low, high));
        }
        if (Spec::lse && lane_ % 4 == 0)
          static_cast<float*>(p_.lse.data)[problem.q_offset(p_.lse) + position * p_.lse.row_stride +
                                           head * p_.lse.head_stride] = lse;
      });
    }
    FLASHJIT_FN void write_part(const DecodeTile& tile, i64 slot) const {
      each_row(tile, [&](int i, int half, int row, int, int, float factor, float lse) {
        const i64 place = slot * p_.tile_rows() + row;
        float* const to = p_.parts_o + place * Spec::head_dim_v + lane_ % 4 * 2;
#pragma unroll
        for (int c = 0; c < o_tiles; ++c)
          st_global_v2(to + c * 8, {__float_as_uint(o_[i][c][half * 2] * factor),
                                    __float_as_uint(o_[i][c][half * 2 + 1] * factor)});
        if (lane_ % 4 == 0) p_.parts_lse[place] = lse;
      });
    }

    const CudaDecodeParams& p_;
    const Shared shared_;
    const int lane_, group_, row_warp_;
    int stage_ = 0, parity_ = 0;
    int position_[m_tiles][2];
    u32 q_address_;
    u32 q_[q_in_registers ? k_steps : 2][m_tiles][4];
    float s_[m_tiles][n_tiles][4], o_[m_tiles][o_tiles][4];
    OnlineSoftmax<m_tiles, true> softmax_;
  };
};

template <class Spec, class Config>
FLASHJIT_FN void decode(const CudaDecodeParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  Decode<Spec, Config>::run(params, shared_address(dynamic_shared));
}

}  // namespace flashjit::device
