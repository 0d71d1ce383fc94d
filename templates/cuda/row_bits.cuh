// Which blocks of query rows may see a block of keys, as bits. A walk along rows would look up one block of
// rows after the other, with memory accesses that wait for each other. So a backward's first step looks all
// of them up at once.
#pragma once

#include "cuda/ptx_sync.cuh"
#include "shared/backward_cuda_params.h"
#include "shared/mask.h"

namespace flashjit::device {

// Masks whose keys keep an interval of rows need no bits.
template <class Mask>
constexpr bool has_row_bits = !key_intervals<Mask>;

// The words of a block of keys: for each 32 blocks of rows, whether they may see the keys, and whether the
// mask keeps every pair.
struct RowBits {
  u32 seen, whole;
};
template <class Spec>
FLASHJIT_FN RowBits* row_bits(const CudaBackwardParams& p, const Problem& problem, int first_key) {
  const i64 block =
      (p.first_key_row(problem.batch, problem.first_k, Spec::varlen) + first_key) / backward_row_unit;
  const int head = Spec::Mask::per_head ? problem.head_q : 0;
  return static_cast<RowBits*>(p.row_bits) + (head * (p.key_rows / backward_row_unit) + block) * p.row_words;
}

// Makes all bits. The warps of the grid share them.
template <class Spec>
FLASHJIT_FN void make_row_bits(const CudaBackwardParams& p) {
  using Mask = typename Spec::Mask;
  constexpr int keys_of_block = backward_row_unit;
  const int blocks = ceil_div(p.seqlen_k, keys_of_block), heads = Mask::per_head ? p.num_heads_q : 1;
  const u32 count = static_cast<u32>(p.batch * heads) * static_cast<u32>(blocks * p.row_words);
  const u32 lane = tid_x() % 32, warps = backward_threads / 32, words = static_cast<u32>(p.row_words);
  for (u32 i = ctaid_x() * warps + tid_x() / 32; i < count; i += nctaid_x() * warps) {
    const int word = static_cast<int>(i % words), block = static_cast<int>(i / words % blocks);
    const int entry = static_cast<int>(i / words / blocks);
    const Problem problem = make_problem<Spec::varlen, Mask::padding>(p, entry / heads, entry % heads);
    const Span keys = {block * keys_of_block, min((block + 1) * keys_of_block, problem.seqlen_k)};
    if (keys.empty()) continue;
    const Mask mask(p, problem);
    const int index = word * 32 + static_cast<int>(lane);
    const bool inside = index < ceil_div(problem.seqlen_q, p.row_block);
    const Span rows = inside ? block_span(index, p.row_block) : Span{0, 0};
    const bool seen = inside && touches(mask, intersect(rows, {0, problem.seqlen_q}), keys);
    const RowBits bits = {__ballot_sync(0xffffffff, seen),
                          __ballot_sync(0xffffffff, seen && mask.whole(rows, keys))};
    if (lane == 0) row_bits<Spec>(p, problem, keys.begin)[word] = bits;
  }
}

// A walk by bits, last block of rows to first.
class RowBitsWalk {
 public:
  // bits: of the keys.
  FLASHJIT_FN RowBitsWalk(const RowBits* bits, int words) : bits_(bits), word_(words) {
    griddepcontrol_wait();  // the step before makes them
  }
  FLASHJIT_FN bool next(Block& block) {
    while (now_.seen == 0) {
      if (word_ == 0) return false;
      now_ = bits_[--word_];
    }
    const int bit = 31 - __clz(static_cast<int>(now_.seen));
    now_.seen &= ~(1u << bit);
    block.index = word_ * 32 + bit;
    block.whole = now_.whole >> bit & 1;
    return true;
  }

 private:
  const RowBits* bits_;
  int word_;
  RowBits now_{0, 0};
};

}  // namespace flashjit::device
