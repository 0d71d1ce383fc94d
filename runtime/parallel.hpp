// Attention over several ranks, each with a part of the sequence (context parallelism): by keys and values
// that ranks send each other (ring attention, Liu et al. 2023), in one launch where its kernel waits for keys
// that arrive, else with partial results merged by their log-sum-exps; or all-to-all over heads
// (DeepSpeed-Ulysses, Jacobs et al. 2023).
//
//   std::vector<flashjit::ParallelGroup> group = flashjit::ParallelGroup::of_threads(4);
//   // on the thread of each rank, with the engine of a CPU:
//   flashjit::ParallelAttention attention(engine, spec, whole, flashjit::SequenceLayout::zigzag,
//   group[rank]); attention.forward({.q = own_q, .k = own_k, .v = own_v, .o = own_o, .lse = own_lse,
//   .workspace = workspace});
//
// Every rank makes the object and calls its functions, in the same order. A rank whose call throws makes the
// waiting calls of the others throw device_failed with its text; the group is of no use then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashjit.hpp"

namespace flashjit {

// Which rows and keys of the whole a rank has. Its tensors are [batch, seqlen / size, heads, head_dim], its
// chunks of the sequence one after the other.
enum class SequenceLayout {
  contiguous,  // one chunk for each rank, in the order of ranks
  zigzag,      // chunks rank and 2 size - 1 - rank of 2 size: balances causal masks
  heads,       // chunks as contiguous; heads are divided while attention is computed: copies all tensors once
  best,        // zigzag if the masks are causal and the sequence has 2 size equal chunks, else contiguous
};
FLASHJIT_API const char* to_string(SequenceLayout) noexcept;

// Rows or keys [begin, begin + length) of the whole.
struct SequenceChunk {
  int begin = 0, length = 0;
  bool operator==(const SequenceChunk&) const = default;
};
// The chunks of a rank, in the order of its tensors. Throws invalid_argument if the sequence cannot be
// divided.
FLASHJIT_API std::vector<SequenceChunk> sequence_chunks(SequenceLayout layout, int seqlen, int rank,
                                                        int size);

class Transport;  // runtime/parallel/transport.hpp

// A rank's place among the ranks that compute together.
class FLASHJIT_API ParallelGroup {
 public:
  // One rank for each of `size` threads of this process, whose engines are CPUs', or GPUs' that reach each
  // other's memory. Each thread takes its own.
  static std::vector<ParallelGroup> of_threads(int size);
  // One rank for each of `size` processes of this host, whose engines are CPUs', or GPUs' that reach each
  // other's memory. One of them makes a name and tells it to the others; then all call of_processes(), which
  // waits until all have come. Throws device_failed if one has not after five minutes.
  static std::string name_of_processes(int size);
  static ParallelGroup of_processes(const std::string& name, int rank, int size);
  // This process's rank of an NCCL communicator (`comm` is an ncclComm_t). All ranks call it; engines are
  // those of their GPUs. Where all ranks are of one host and reach each other's memory, NCCL serves to begin
  // with, and copies then go from GPU to GPU without it. Otherwise, or with FLASHJIT_MAP_PEERS=0, ranks send
  // and receive over NCCL. For ranks that are processes: threads have of_threads(). Throws target_unavailable
  // if no NCCL is loaded or found, device_failed with NCCL's text, or if a rank has not called it after five
  // minutes. The communicator stays the caller's, outlives the group, and is aborted by its owner once it has
  // failed: until then NCCL may keep the GPU busy.
  static ParallelGroup of_nccl(void* comm);

  int rank() const noexcept;
  int size() const noexcept;
  // Whether ranks reach each other's memory. Others send and receive. And why.
  bool maps_memory() const noexcept;
  const std::string& transport_reason() const noexcept;
  // Makes waiting and later calls of all ranks throw device_failed with this text: for a rank that cannot go
  // on, although none of its calls has thrown. Ranks that send and receive are not told, but by NCCL.
  void fail(const std::string& why) const noexcept;
  // Throws device_failed once a rank's call has thrown or its process has ended. What GPUs had begun to
  // compute ends then, with results that are no good: ask after waiting for a stream.
  void require_alive() const;
  // Over a transport of the library's, or of its tests.
  explicit ParallelGroup(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}
  const std::shared_ptr<Transport>& transport() const noexcept { return transport_; }

 private:
  std::shared_ptr<Transport> transport_;
};

class FLASHJIT_API ParallelAttention {
 public:
  // `spec`: a forward, whose backward is used, too; `whole`: the sizes of all ranks together, seqlen_q equal
  // to seqlen_k unless every row sees every key. Ranks compare what they were given, and all throw
  // invalid_argument if it differs. Throws unsupported for what the layout does not compute: packed
  // sequences, padding, pages, 8-bit keys, sink logits and tables with gradients; with heads also dropout,
  // formulas that read head, and lists of heads. The engine and the group outlive the object.
  ParallelAttention(Engine& engine, const AttentionSpec& spec, const Shape& whole, SequenceLayout layout,
                    const ParallelGroup& group);
  ParallelAttention(ParallelAttention&&) noexcept;
  ~ParallelAttention();

  // The layout, and why it is that one.
  SequenceLayout layout() const noexcept;
  const std::string& layout_reason() const noexcept;
  // The sizes of a rank's tensors.
  Shape own_shape() const noexcept;
  // Bytes of AttentionArgs::workspace for a forward, or a backward, aligned to 64 bytes.
  std::size_t workspace_bytes(Operation op) const;

  // Loads the kernels of a forward, or a backward, and makes the memory that ranks write into. All ranks call
  // it, and wait for each other; otherwise their first launches do. A launch may be captured in a CUDA graph
  // after it. GPUs of one process: while one of its ranks computes, none may allocate device memory or load
  // code, since the driver would let them wait for each other.
  void prepare(Operation op) const;

  // The rank's rows of the result. Tensors are the rank's; tables of masks and formulas, window sizes and
  // dropout's numbers are those of the whole, the same on every rank. Returns when no rank reads this one's
  // tensors any more. Equal arguments give equal bits run after run. Throws what a launch throws.
  void forward(const AttentionArgs& args, Stream stream = nullptr) const;
  // The rank's gradients, of its own o and lse, which a forward wrote. Their bits repeat as those of one
  // engine's backward do: on a GPU if the spec is deterministic.
  void backward(const AttentionArgs& args, Stream stream = nullptr) const;

  // Launches of the last forward or backward, and pairs of chunks that it skipped since no row sees a key.
  struct Steps {
    int launched = 0, skipped = 0;
  };
  Steps last_steps() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Moves a tensor's parts among the ranks, from where one layout has them to where another has them.
class FLASHJIT_API LayoutConversion {
 public:
  // It takes tensors that are [batch, seqlen, ...] in the whole. A rank has [batch, seqlen / size, ...]; of
  // `heads`, as here, it has all rows of its share of dimension 2: [batch, seqlen, heads / size, ...]. Ranks
  // compare what they were given, as ParallelAttention's do. Makes the memory that ranks write into. The
  // group outlives the object.
  LayoutConversion(Engine& engine, const ParallelGroup& group, DType dtype,
                   const std::vector<std::int64_t>& whole, SequenceLayout before, SequenceLayout after);
  LayoutConversion(LayoutConversion&&) noexcept;
  ~LayoutConversion();

  // Sizes of a rank's tensor in a layout.
  std::vector<std::int64_t> own_sizes(SequenceLayout layout) const;
  // All ranks call it. May be captured in a CUDA graph. Both may be the same tensor.
  void convert(const Tensor& from, const Tensor& to, Stream stream = nullptr) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit
