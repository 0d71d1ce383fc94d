#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on a CPU, as a peer for compare.py, which describes the protocol.

Tensors are [batch, seqlen, heads, head_dim] in memory, transposed for PyTorch. Masks without a flag in PyTorch are
boolean attn_masks: padding is [batch, 1, 1, seqlen], the others are [1, 1, seqlen, seqlen]. Needs only PyTorch 2.5 or
newer.
"""
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attn_mask(kind, batch, seqlen):
    """A mask like those of `flashjit bench`: lengths from a quarter of seqlen on, a causal window of 1,024 keys, or a
    share of 0.2 of the blocks of 128."""
    if kind in ("full", "causal", "decode"):
        return None
    if kind == "padding":
        lengths = torch.randint(seqlen // 4, seqlen + 1, (batch, 1, 1, 1))
        lengths[0] = seqlen
        return torch.arange(seqlen) < lengths
    row, key = torch.arange(seqlen)[:, None], torch.arange(seqlen)[None, :]
    if kind == "window":
        return ((key <= row) & (key > row - 1024))[None, None]
    if kind == "blocks":
        size = -(-seqlen // 128)
        kept = torch.rand(size, size) < 0.2
        kept[:, 0] = True  # PyTorch returns NaN for rows that see nothing
        return kept[row // 128, key // 128][None, None]
    raise ValueError(f"mask {kind!r} is not full, causal, padding, window or blocks")


def median_ms(call, samples):
    call()
    start = time.perf_counter()
    call()
    times = max(1, min(1000, round(1e-3 / max(time.perf_counter() - start, 1e-6))))
    measured = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(times):
            call()
        measured.append((time.perf_counter() - start) / times * 1e3)
    return statistics.median(measured)


def measure(request, peer):
    if peer != "sdpa":
        raise ValueError(f"peer {peer!r} is not sdpa, the only one on a CPU")
    torch.set_num_threads(request["threads"])
    b, s, hq, hk = request["b"], request["s"], request["hq"], request["hk"]
    if request.get("lengths") or request.get("page_size"):
        raise ValueError("PyTorch has no pages and no caches of different lengths")
    tensor = lambda rows, heads, dim: torch.randn(b, rows, heads, dim).to(DTYPES[request["dtype"]]).transpose(1, 2)
    rows, keys = request.get("sq", s), request.get("sk", s)  # a decode names its keys s and its rows sq
    if rows != keys and request["mask"] not in ("full", "decode"):
        raise ValueError("PyTorch aligns masks to the first key: of cells of more keys than rows only full ones are compared")
    q, k, v = tensor(rows, hq, request["d"]), tensor(keys, hk, request["d"]), tensor(keys, hk, request["dv"])
    mask, causal = attn_mask(request["mask"], b, s), request["mask"] == "causal"
    attention = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=request.get("p", 0.0),
                                                  enable_gqa=hq != hk)
    if request["modes"] == ["fwd"]:
        with torch.inference_mode():
            return median_ms(attention, request["samples"])
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    q, k, v = inputs
    o = attention()
    d_o = torch.randn_like(o)
    return median_ms(lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True), request["samples"])


def main():
    torch.manual_seed(0)
    for line in sys.stdin:
        request = json.loads(line)
        for peer in request["peers"]:
            row = {"section": "serve", "peer": peer, "mode": request["modes"][0], "version": f"PyTorch {torch.__version__}"}
            try:
                row["ms"] = measure(request, peer)
            except Exception as error:
                row["error"] = str(error)[:200]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
