// Attention of requests that share a prefix (cascade): the prefix is read once for all of them.
//
//   1. The rows of all requests attend to the prefix as one sequence.
//   2. Each request's row attends to the request's own keys, which lie in pages.
//   3. A merge makes one result of the two.
//
// Each request has one new token. It sees the whole prefix and all of the request's own keys, its own
// included.
#pragma once

#include <flashjit/flashjit.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>

struct Cascade {
  flashjit::Tensor q, o;                // [requests, heads_q, head_dim]
  flashjit::Tensor prefix_k, prefix_v;  // [1, keys, heads_kv, head_dim]
  flashjit::Tensor k, v;        // pages of the requests' own keys: [num_pages, page_size, heads_kv, head_dim]
  flashjit::Tensor page_table;  // int32 [requests, max_pages]
  flashjit::Tensor seqlens_k;   // int32 [requests], lengths of the own keys
  flashjit::Tensor cu_seqlens_q;  // int32 [requests + 1]: 0, 1, ..., requests
  // The two partial results, float32: [2, requests, heads_q, head_dim] and [2, heads_q, requests].
  flashjit::Tensor parts_o, parts_lse;
  // workspace_bytes() of CascadeKernels, if that is not 0; both decodes use it, one after the other.
  std::optional<flashjit::Tensor> workspace{};
};

// parts[index]
inline flashjit::Tensor part_of(flashjit::Tensor parts, int index) {
  parts.data = static_cast<float*>(parts.data) + index * parts.strides[0];
  for (int i = 1; i < parts.rank; ++i) {
    parts.shape[i - 1] = parts.shape[i];
    parts.strides[i - 1] = parts.strides[i];
  }
  --parts.rank;
  return parts;
}

// [rows, ...] as [1, rows, ...]
inline flashjit::Tensor as_one_sequence(flashjit::Tensor rows) {
  for (int i = rows.rank; i > 0; --i) {
    rows.shape[i] = rows.shape[i - 1];
    rows.strides[i] = rows.strides[i - 1];
  }
  rows.shape[0] = 1;
  ++rows.rank;
  return rows;
}

// The kernels for tensors of these sizes. Making it compiles or loads them, the first time.
struct CascadeKernels {
  CascadeKernels(flashjit::Engine& engine, const Cascade& c) {
    const auto size = [](const flashjit::Tensor& t, int i) { return static_cast<int>(t.shape[i]); };
    const int requests = size(c.q, 0);
    flashjit::AttentionSpec spec;
    spec.dtype = c.q.dtype;
    spec.head_dim = size(c.q, 2);
    spec.o_dtype = flashjit::DType::fp32;  // a partial result loses nothing
    flashjit::Shape shape{.num_heads_q = size(c.q, 1), .num_heads_kv = size(c.k, 2)};

    // Decode takes up to 64 rows of a sequence, the forward any number.
    spec.op = requests <= 64 ? flashjit::Operation::decode : flashjit::Operation::forward;
    shape.batch = 1, shape.seqlen_q = requests, shape.seqlen_k = size(c.prefix_k, 1);
    prefix = &engine.get(spec.validated(), shape);
    workspace_bytes = prefix->workspace_bytes(shape);

    // Packed rows, so that lse is [heads_q, requests] here, too.
    spec.op = flashjit::Operation::decode;
    spec.varlen = spec.paged = true;
    shape.batch = requests, shape.seqlen_q = 1, shape.page_size = size(c.k, 1);
    shape.seqlen_k = size(c.page_table, 1) * shape.page_size;
    own = &engine.get(spec.validated(), shape);
    workspace_bytes = std::max(workspace_bytes, own->workspace_bytes(shape));
  }

  const flashjit::Kernel *prefix, *own;
  std::size_t workspace_bytes;
};

// Launches the two kernels and the merge on one stream.
inline void launch_cascade(flashjit::Engine& engine, const CascadeKernels& kernels, const Cascade& c,
                           flashjit::Stream stream = nullptr) {
  kernels.prefix->launch({.q = as_one_sequence(c.q),
                          .k = c.prefix_k,
                          .v = c.prefix_v,
                          .o = as_one_sequence(part_of(c.parts_o, 0)),
                          .lse = as_one_sequence(part_of(c.parts_lse, 0)),
                          .workspace = c.workspace},
                         stream);
  kernels.own->launch({.q = c.q,
                       .k = c.k,
                       .v = c.v,
                       .o = part_of(c.parts_o, 1),
                       .lse = part_of(c.parts_lse, 1),
                       .cu_seqlens_q = c.cu_seqlens_q,
                       .max_seqlen_q = 1,
                       .seqlens_k = c.seqlens_k,
                       .page_table = c.page_table,
                       .workspace = c.workspace},
                      stream);
  flashjit::merge(engine, {.o = c.o, .parts_o = c.parts_o, .parts_lse = c.parts_lse}, stream);
}
