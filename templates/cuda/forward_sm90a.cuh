// FlashAttention-3's forward for sm_90a (Shah et al., 2024): one producer warp keeps TMA copies in flight,
// consumer warpgroups of 64 query rows each run wgmma and softmax, PV of one block overlapping QK of the
// next.
#pragma once

#include "cuda/ptx_sm90a.cuh"
#include "shared/mask.h"
#include "shared/params.h"

namespace flashjit::device {

// Encoded by the host for one set of tensors; 4-D [batch, heads, rows, dim] with boxes of one 64-element
// panel.
struct ForwardMaps {
  TensorMap q, k, v, o;
};

// The order in which a launch's blocks take its tiles.
enum class Order {
  heads,  // all rows of a head, then the next head: every tile is as long, or each has a block of its own
  pairs,  // a head's longest with its shortest: of equal length under a causal mask
  longest_first,  // over all heads, there and back again: the most even, but reads K and V from further away
};

template <bool v>
struct Constant {
  static constexpr bool value = v;
};

template <class Spec, class Config>
struct ForwardSm90a {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;

  static constexpr float rescale_threshold = 8;  // log2
  static constexpr int panel = 64;               // elements of a 128-byte row
  static constexpr int block_m = Config::block_m, block_n = Config::block_n, stages = Config::num_stages;
  static constexpr int consumers = block_m / 64;
  static constexpr int qk_panels = ceil_div(Spec::head_dim, panel),
                       v_panels = ceil_div(Spec::head_dim_v, panel);
  static constexpr int qk_steps = ceil_div(Spec::head_dim, 16);
  static constexpr int o_columns = Spec::head_dim_v;
  static constexpr int q_panel_bytes = block_m * 128, kv_panel_bytes = block_n * 128;
  static constexpr int k_bytes = qk_panels * kv_panel_bytes, v_bytes = v_panels * kv_panel_bytes;
  // With Q in registers its buffer is free for the next tile's at once, and O has its own; else O takes the
  // place of Q.
  static constexpr bool q_in_registers = Config::q_in_registers;
  static constexpr int q_bytes = (q_in_registers ? qk_panels : max(qk_panels, v_panels)) * q_panel_bytes;
  static constexpr int o_bytes = q_in_registers ? v_panels * q_panel_bytes : 0;
  static constexpr int shared_memory = q_bytes + o_bytes + stages * (k_bytes + v_bytes) + 1024 + 256;
  static constexpr int threads = 128 * (consumers + 1);
  static constexpr bool ping_pong = Config::ping_pong && consumers == 2;

  // Addresses of barriers and buffers in shared memory.
  struct Shared {
    u32 q, o, k, v, barriers;
    FLASHJIT_FN u32 q_full() const { return barriers; }
    FLASHJIT_FN u32 q_empty() const { return barriers + 8; }
    FLASHJIT_FN u32 k_full(int s) const { return barriers + 16 + 32 * s; }
    FLASHJIT_FN u32 k_empty(int s) const { return barriers + 24 + 32 * s; }
    FLASHJIT_FN u32 v_full(int s) const { return barriers + 32 + 32 * s; }
    FLASHJIT_FN u32 v_empty(int s) const { return barriers + 40 + 32 * s; }
  };

  // A ring of buffers as one side sees it.
  struct Ring {
    int stage = 0;
    u32 parity = 0;
    FLASHJIT_FN void advance() {
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  struct Tile {
    int batch, head_q, m_block;
  };
  // The tiles of this block. Every role walks its own.
  class Schedule {
   public:
    FLASHJIT_FN Schedule(const ForwardParams& p)
        : num_heads_(p.num_heads_q),
          batch_heads_(p.batch * p.num_heads_q),
          m_blocks_(ceil_div(p.seqlen_q, block_m)) {
      per_head_ = Config::order == Order::pairs ? (m_blocks_ + 1) / 2 : m_blocks_;
      unit_ = blockIdx.x;
    }

    FLASHJIT_FN bool next(Tile& t) {
      if (Config::order == Order::pairs && second_ >= 0) {
        t.m_block = second_;
        second_ = -1;
        return true;
      }
      if (unit_ >= per_head_ * batch_heads_) return false;
      int head;
      if constexpr (Config::order == Order::longest_first) {
        t.m_block = m_blocks_ - 1 - unit_ / batch_heads_;
        head = unit_ % batch_heads_;
        // Even rounds go up over the blocks, odd ones down.
        unit_ += 2 * (round_ % 2 ? blockIdx.x : gridDim.x - 1 - blockIdx.x) + 1;
        ++round_;
      } else {
        const int i = unit_ % per_head_;
        t.m_block = m_blocks_ - 1 - i;
        if (Config::order == Order::pairs && i < t.m_block) second_ = i;
        head = unit_ / per_head_;
        unit_ += gridDim.x;
      }
      t.head_q = head % num_heads_;
      t.batch = head / num_heads_;
      return true;
    }

   private:
    int num_heads_, batch_heads_, m_blocks_, per_head_, unit_, second_ = -1, round_ = 0;
  };

  struct Work {
    Problem problem;
    Span rows;
    FLASHJIT_FN Work(const ForwardParams& p, const Tile& t)
        : problem(make_problem<Spec::varlen>(p, t.batch, t.head_q)) {
      rows = {t.m_block * block_m, min((t.m_block + 1) * block_m, problem.seqlen_q)};
    }
  };

  static FLASHJIT_FN void copy_panels(u32 to, const TensorMap& map, u32 bar, int panels, int panel_bytes,
                                      int row, int head, int batch) {
#pragma unroll
    for (int i = 0; i < panels; ++i)
      cp_async_bulk_tensor_4d(to + i * panel_bytes, map, bar, i * panel, row, head, batch);
  }

  static FLASHJIT_FN void produce(const ForwardParams& p, const ForwardMaps& maps, const Shared& s) {
    Ring ring;
    u32 q_parity = 0;
    Schedule schedule(p);
    for (Tile t; schedule.next(t);) {
      const Work work(p, t);
      if (work.rows.empty()) continue;
      const Mask mask(p, work.problem);
      BlockWalk<Keys, Mask> walk(mask, work.rows, block_n);
      Block block;
      if (!walk.next(block)) continue;

      // Packed tensors are one batch entry whose rows start at the sequence's.
      int batch = t.batch, q_row = work.rows.begin, k_row = 0;
      if constexpr (Spec::varlen) {
        batch = 0;
        q_row += packed_range(p.cu_seqlens_q, t.batch, p.total_q, p.seqlen_q).begin;
        k_row = packed_range(p.cu_seqlens_k, t.batch, p.total_k, p.seqlen_k).begin;
      }
      const auto load_k = [&](int n, const Ring& r) {
        mbarrier_wait(s.k_empty(r.stage), r.parity ^ 1);
        mbarrier_arrive_expect_tx(s.k_full(r.stage), k_bytes);
        copy_panels(s.k + r.stage * k_bytes, maps.k, s.k_full(r.stage), qk_panels, kv_panel_bytes,
                    k_row + n * block_n, work.problem.head_kv, batch);
      };
      const auto load_v = [&](int n, const Ring& r) {
        mbarrier_wait(s.v_empty(r.stage), r.parity ^ 1);
        mbarrier_arrive_expect_tx(s.v_full(r.stage), v_bytes);
        copy_panels(s.v + r.stage * v_bytes, maps.v, s.v_full(r.stage), v_panels, kv_panel_bytes,
                    k_row + n * block_n, work.problem.head_kv, batch);
      };

      load_k(block.index, ring);
      mbarrier_wait(s.q_empty(), q_parity ^ 1);
      mbarrier_arrive_expect_tx(s.q_full(), qk_panels * q_panel_bytes);
      copy_panels(s.q, maps.q, s.q_full(), qk_panels, q_panel_bytes, q_row, t.head_q, batch);
      q_parity ^= 1;
      for (;;) {
        const int n = block.index;
        const Ring here = ring;
        ring.advance();
        const bool more = walk.next(block);
        if (more) load_k(block.index, ring);
        load_v(n, here);
        if (!more) break;
      }
    }
  }

  // Scores of 64 rows: registers 4 i .. 4 i + 3 hold columns 8 i + 2 (lane % 4) + {0, 1} of row lane / 4 and
  // of row lane / 4 + 8, within the warp's 16.
  using Scores = float[block_n / 2];
  using Output = float[o_columns / 2];

  using QueryFragments = u32[q_in_registers ? qk_steps : 1][4];

  static FLASHJIT_FN void issue_qk(Scores& scores, const QueryFragments& fragments, u32 q, u32 k) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < qk_steps; ++step) {
      const int in_panel = step % 4 * 32;
      const u64 b = wgmma_descriptor(k + step / 4 * kv_panel_bytes + in_panel, 0);
      if constexpr (q_in_registers)
        wgmma_rs<Element, block_n, false>(scores, fragments[step][0], fragments[step][1], fragments[step][2],
                                          fragments[step][3], b, step > 0);
      else
        wgmma_ss<Element, block_n>(scores, wgmma_descriptor(q + step / 4 * q_panel_bytes + in_panel, 0), b,
                                   step > 0);
    }
    wgmma_commit_group();
  }

  static FLASHJIT_FN void issue_pv(Output& out, const u32 (&p)[block_n / 4], u32 v, int accumulate) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < block_n / 16; ++step)
      wgmma_rs<Element, o_columns, true>(out, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                         wgmma_descriptor(v + step * 2048, kv_panel_bytes),
                                         step > 0 ? 1 : accumulate);
    wgmma_commit_group();
  }

  struct Softmax {
    float scale_log2;
    float row_max[2] = {minus_infinity, minus_infinity};  // of raw scores
    float row_sum[2] = {0, 0};                            // this thread's columns
    float correction[2];

    // False: the sums so far stand. Else they, and O, are to be multiplied by correction. The maximum is only
    // a reference point: while no row's grows by more than 2^8, the old one serves.
    FLASHJIT_FN bool take_max(const Scores& scores, bool first) {
      float top[2];
      bool grows = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float m0 = scores[2 * r], m1 = scores[2 * r + 1];
#pragma unroll
        for (int i = 1; i < block_n / 8; ++i) {
          m0 = fmaxf(m0, scores[4 * i + 2 * r]);
          m1 = fmaxf(m1, scores[4 * i + 2 * r + 1]);
        }
        float m = fmaxf(m0, m1);
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
        top[r] = fmaxf(row_max[r], m);
        grows |= (top[r] - row_max[r]) * scale_log2 > rescale_threshold;
      }
      if (!__any_sync(0xffffffff, grows)) return false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        correction[r] = top[r] == minus_infinity ? 1.f : ex2_approx((row_max[r] - top[r]) * scale_log2);
        row_max[r] = top[r];
        if (!first) row_sum[r] *= correction[r];
      }
      return true;
    }

    FLASHJIT_FN void exponentiate(Scores& scores, bool may_be_empty) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float top = may_be_empty && row_max[r] == minus_infinity ? 0.f : row_max[r];
        const float offset = top * scale_log2;
        float sum0 = 0, sum1 = 0;
#pragma unroll
        for (int i = 0; i < block_n / 8; ++i) {
          float& a = scores[4 * i + 2 * r];
          float& b = scores[4 * i + 2 * r + 1];
          a = __fmaf_rn(a, scale_log2, -offset);
          b = __fmaf_rn(b, scale_log2, -offset);
          a = ex2_approx(a);
          b = ex2_approx(b);
          sum0 += a;
          sum1 += b;
        }
        row_sum[r] += sum0 + sum1;
      }
    }
  };

  static FLASHJIT_FN void pack(u32 (&p)[block_n / 4], const Scores& scores) {
#pragma unroll
    for (int i = 0; i < block_n / 4; ++i) p[i] = cvt_rn_x2(Element{}, scores[2 * i], scores[2 * i + 1]);
  }

  static FLASHJIT_FN u32 low_bits(int n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; }

  static FLASHJIT_FN void apply_mask(Scores& scores, const Mask& mask, int row, int first_key, int lane) {
    const int base = first_key + lane % 4 * 2;
    if constexpr (Mask::row_intervals) {
      // This thread's columns in order are 0, 1, 8, 9, 16, ... from `base`: how many lie before a limit.
      const auto before = [&](int limit) {
        const int n = min(max(limit - base, 0), block_n);
        return n / 8 * 2 + min(n % 8, 2);
      };
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Span kept = mask.hull(Keys{}, {row + 8 * r, row + 8 * r + 1});
        const int begin = before(kept.begin), end = before(kept.end);
#pragma unroll
        for (int word = 0; word < ceil_div(block_n, 128); ++word) {
          const u32 bits = low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
#pragma unroll
          for (int i = 16 * word; i < min(16 * word + 16, block_n / 8); ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (!(bits & 1u << (2 * i + c) % 32)) scores[4 * i + 2 * r + c] = minus_infinity;
        }
      }
    } else {
      const auto tile = mask.tile({row, row + 9}, {first_key, first_key + block_n});
#pragma unroll
      for (int i = 0; i < block_n / 8; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (!tile.keep(row + c / 2 * 8, base + 8 * i + c % 2)) scores[4 * i + c] = minus_infinity;
    }
  }

  static FLASHJIT_FN void consume(const ForwardParams& p, const ForwardMaps& maps, const Shared& s) {
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = threadIdx.x % 32,
              warp = thread / 32;
    const u32 q_rows = s.q + group * 64 * 128;
    const float scale_log2 = p.softmax_scale * log2_e;
    Ring ring;
    u32 q_parity = 0;
    if (ping_pong && group == 1) bar_arrive(2, 256);  // group 0 goes first

    Schedule schedule(p);
    for (Tile t; schedule.next(t);) {
      const Work work(p, t);
      if (work.rows.empty()) continue;
      const Mask mask(p, work.problem);
      const int row = work.rows.begin + group * 64 + warp * 16 + lane / 4;
      BlockWalk<Keys, Mask> walk(mask, work.rows, block_n);
      Block block;
      Output out;
      Softmax softmax{scale_log2};
      const bool any = walk.next(block);
      if (any) {
        Scores scores;
        u32 probabilities[block_n / 4];
        mbarrier_wait(s.q_full(), q_parity);
        q_parity ^= 1;
        QueryFragments queries;
        if constexpr (q_in_registers) {
#pragma unroll
          for (int step = 0; step < qk_steps; ++step) {
            const int r = lane % 16, chunk = step % 4 * 2 + lane / 16;
            ldmatrix_x4(queries[step],
                        q_rows + step / 4 * q_panel_bytes + (warp * 16 + r) * 128 + (chunk ^ r % 8) * 16);
          }
          __syncwarp();
          if (lane == 0) mbarrier_arrive(s.q_empty());
        }
        mbarrier_wait(s.k_full(ring.stage), ring.parity);
        issue_qk(scores, queries, q_rows, s.k + ring.stage * k_bytes);
        wgmma_wait_group<0>();
        if (lane == 0) mbarrier_arrive(s.k_empty(ring.stage));
        if (!block.whole) apply_mask(scores, mask, row, block.index * block_n, lane);
        softmax.take_max(scores, true);
        softmax.exponentiate(scores, true);
        pack(probabilities, scores);
        int accumulate = 0;
        const auto zero_tail = [&](const Ring& r, int n) {
          // Rows past the end of a packed sequence belong to the next: 0 * NaN must not come in.
          if constexpr (Spec::varlen) {
            const int valid = work.problem.seqlen_k - n * block_n;
            if (valid >= block_n) return;
            for (int i = valid * 8 + thread; i < block_n * 8; i += 128)
              for (int j = 0; j < v_panels; ++j) {
                const u32 to = s.v + r.stage * v_bytes + j * kv_panel_bytes + i * 16;
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
              }
            fence_proxy_async();
            bar_sync(4 + group, 128);
          }
        };
        int v_block = block.index;
        const auto step = [&](auto masked) {
          const Ring before = ring;
          ring.advance();
          mbarrier_wait(s.k_full(ring.stage), ring.parity);
          if constexpr (ping_pong) bar_sync(2 + group, 256);
          issue_qk(scores, queries, q_rows, s.k + ring.stage * k_bytes);
          mbarrier_wait(s.v_full(before.stage), before.parity);
          zero_tail(before, v_block);
          issue_pv(out, probabilities, s.v + before.stage * v_bytes, accumulate);
          if constexpr (ping_pong) bar_arrive(3 - group, 256);
          wgmma_wait_group<1>();
          if (lane == 0) mbarrier_arrive(s.k_empty(ring.stage));
          if constexpr (decltype(masked)::value) apply_mask(scores, mask, row, block.index * block_n, lane);
          const bool rescale = softmax.take_max(scores, false);
          softmax.exponentiate(scores, decltype(masked)::value);
          wgmma_wait_group<0>();
          if (lane == 0) mbarrier_arrive(s.v_empty(before.stage));
          pack(probabilities, scores);
          if (rescale) {
#pragma unroll
            for (int i = 0; i < o_columns / 2; ++i) out[i] *= softmax.correction[i / 2 % 2];
          }
          accumulate = 1;
          v_block = block.index;
        };
        while (walk.next(block)) {
          if (block.whole)
            step(Constant<false>{});
          else
            step(Constant<true>{});
        }
        mbarrier_wait(s.v_full(ring.stage), ring.parity);
        zero_tail(ring, v_block);
        issue_pv(out, probabilities, s.v + ring.stage * v_bytes, accumulate);
        wgmma_wait_group<0>();
        if (lane == 0) mbarrier_arrive(s.v_empty(ring.stage));
        ring.advance();
      }
      if (!any) {
        store_nothing(p, work, group, warp, lane);
        continue;
      }
      store(p, maps, s, t, work, group, warp, lane, softmax, out);
      if constexpr (!q_in_registers) {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          cp_async_bulk_wait_group_read();
          mbarrier_arrive(s.q_empty());
        }
      }
    }
    if (ping_pong && group == 0) bar_sync(2, 256);  // takes up the last arrival
    cp_async_bulk_wait_group();
  }

  // Rows that attend to nothing. Not through shared memory: the next tile's Q may be there already.
  static FLASHJIT_FN void store_nothing(const ForwardParams& p, const Work& work, int group, int warp,
                                        int lane) {
    const int first = work.rows.begin + group * 64 + warp * 16, rows = min(work.rows.end - first, 16);
    char* o = static_cast<char*>(p.o.data) + 2 * (work.problem.o_offset + first * p.o.row_stride);
    constexpr int chunks = o_columns / 8;
    for (int i = lane; i < rows * chunks; i += 32)
      *reinterpret_cast<uint4*>(o + 2 * (i / chunks * p.o.row_stride + i % chunks * 8)) = uint4{0, 0, 0, 0};
    if (Spec::lse && lane < rows)
      static_cast<float*>(p.lse.data)[work.problem.lse_offset + first + lane] = minus_infinity;
  }

  static FLASHJIT_FN void store(const ForwardParams& p, const ForwardMaps& maps, const Shared& s,
                                const Tile& t, const Work& work, int group, int warp, int lane,
                                Softmax& softmax, Output& out) {
    const int first = work.rows.begin + group * 64 + warp * 16;
    const int rows = work.rows.end - first;  // of this warp's 16, may be <= 0
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = softmax.row_sum[r];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const bool empty = softmax.row_max[r] == minus_infinity;
      const float factor = empty ? 0.f : 1.f / sum;
#pragma unroll
      for (int i = 0; i < o_columns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = out[4 * i + 2 * r + c];
          x = empty ? 0.f : x * factor;
        }
      const int row = lane / 4 + 8 * r;
      if (Spec::lse && lane % 4 == 0 && row < rows) {
        float* lse = static_cast<float*>(p.lse.data) + work.problem.lse_offset + first + row;
        *lse = empty ? minus_infinity : softmax.row_max[r] * p.softmax_scale + __logf(sum);
      }
    }
    // Through shared memory, so that whole rows are written. Rows past the end of a packed sequence are
    // another's: there a copy by rows, else by TMA, which leaves out what is past the tensor's end.
    const u32 base = s.o + (group * 64 + warp * 16) * 128;
    constexpr int chunks = o_columns / 8;  // 16-byte pieces of a row
    if (lane == 0) cp_async_bulk_wait_group_read();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < chunks; i += 2) {
      // Matrices: columns i and i + 1 of rows 0-7 and 8-15; lane gives the address of one row of one of them.
      const int column = min(i + lane / 16, chunks - 1), r = lane % 16;
      const u32 to = base + column / 8 * q_panel_bytes + r * 128 + ((column ^ r) % 8) * 16;
      const u32 a = cvt_rn_x2(Element{}, out[4 * i], out[4 * i + 1]),
                b = cvt_rn_x2(Element{}, out[4 * i + 2], out[4 * i + 3]);
      if (i + 1 < chunks)
        stmatrix_x4(to, a, b, cvt_rn_x2(Element{}, out[4 * i + 4], out[4 * i + 5]),
                    cvt_rn_x2(Element{}, out[4 * i + 6], out[4 * i + 7]));
      else
        stmatrix_x2(to, a, b);
    }
    if constexpr (Spec::varlen) {
      __syncwarp();
      char* o = static_cast<char*>(p.o.data) + 2 * (work.problem.o_offset + first * p.o.row_stride);
      for (int i = lane; i < 16 * chunks; i += 32) {
        const int r = i / chunks, column = i % chunks;
        if (r >= rows) break;
        const u32 from = base + column / 8 * q_panel_bytes + r * 128 + ((column ^ r) % 8) * 16;
        u32 x[4];
        ld_shared_v4(x, from);
        *reinterpret_cast<uint4*>(o + 2 * (r * p.o.row_stride + column * 8)) = uint4{x[0], x[1], x[2], x[3]};
      }
    } else {
      fence_proxy_async();
      __syncwarp();
      if (lane == 0 && rows > 0) {
        for (int i = 0; i < v_panels; ++i)
          cp_async_bulk_tensor_4d_store(maps.o, base + i * q_panel_bytes, i * panel, first, t.head_q,
                                        t.batch);
        cp_async_bulk_commit_group();
      }
    }
  }

  static FLASHJIT_FN void run(const ForwardParams& p, const ForwardMaps& maps) {
    extern __shared__ char dynamic_shared[];
    Shared s;
    const u32 start = (shared_address(dynamic_shared) + 1023) & ~1023u;
    s.q = start;
    s.o = q_in_registers ? s.q + q_bytes : s.q;
    s.k = s.q + q_bytes + o_bytes;
    s.v = s.k + stages * k_bytes;
    s.barriers = s.v + stages * v_bytes;
    if (threadIdx.x == 0) {
      prefetch_tensormap(maps.q);
      prefetch_tensormap(maps.k);
      prefetch_tensormap(maps.v);
      prefetch_tensormap(maps.o);
      mbarrier_init(s.q_full(), 1);
      mbarrier_init(s.q_empty(), consumers * 4);
      for (int i = 0; i < stages; ++i) {
        mbarrier_init(s.k_full(i), 1);
        mbarrier_init(s.k_empty(i), consumers * 4);
        mbarrier_init(s.v_full(i), 1);
        mbarrier_init(s.v_empty(i), consumers * 4);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dec<(consumers == 3 ? 32 : consumers == 2 ? 24 : 56)>();
      if (threadIdx.x == 0) produce(p, maps, s);
    } else {
      setmaxnreg_inc<(consumers == 3 ? 160 : consumers == 2 ? 240 : 256)>();
      consume(p, maps, s);
    }
  }
};

}  // namespace flashjit::device
