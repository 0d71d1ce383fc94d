// Both kernels of sm_90a that make dQ alone share these parts: a block of the grid has rows of a query head,
// and walks their blocks of keys.
#pragma once

#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/dropout.cuh"

namespace flashjit::device {

// The rows of a block of the grid. The last rows of a head come first: with a causal mask they see the most
// keys.
template <class Spec, int block_m>
struct QueryBlock {
  Problem problem;
  Span rows;     // without padding
  int rows_end;  // with padding
  FLASHJIT_FN explicit QueryBlock(const CudaBackwardParams& p) {
    const u32 blocks = max(ceil_div(p.seqlen_q, block_m), 1);
    const u32 head = blockIdx.x / blocks;
    const int block = static_cast<int>(blocks - 1 - blockIdx.x % blocks);
    problem = make_problem<Spec::varlen, Spec::Mask::padding>(
        p, static_cast<int>(head / static_cast<u32>(p.num_heads_q)),
        static_cast<int>(head % static_cast<u32>(p.num_heads_q)));
    rows = {block * block_m, min((block + 1) * block_m, problem.seqlen_q)};
    rows_end = min((block + 1) * block_m, problem.rows);
  }
};

// With dropout, a warp: the words of a block's columns, once the producer has told which block it is.
template <class Kernel>
FLASHJIT_FN void make_column_words(const CudaBackwardParams& p, const typename Kernel::Shared& shared) {
  constexpr int parts = Kernel::block_n / 4;
  const int lane = threadIdx.x % 32;
  const int batch = typename Kernel::Work(p).problem.batch;
  for (typename Kernel::Ring ring;; ring.advance()) {
    mbarrier_wait(shared.asked(ring.stage), ring.parity);
    int word, found;
    ld_shared_v2(word, found, shared.message(ring.stage));
    if (word >= 0 && lane < parts)
      st_column_words(shared.words(ring.stage), lane,
                      column_words_at<typename Kernel::Spec::Offsets>(
                          p, shared.dropout_key(), BackwardMessage::index_of(word) * parts + lane, batch));
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.numbers_full(ring.stage));
    if (word < 0) return;
  }
}

}  // namespace flashjit::device
