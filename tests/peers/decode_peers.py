#!/usr/bin/env python3
"""PyTorch's decode on a GPU, as peers for compare.py's decode cells: cudnn, fa2, and the yardstick read, which adds up
as many bytes as K and V have. For latent caches the peer flashmla, FlashMLA's kernel out of a wheel of PyPI, whose module
flash_mla PYTHONPATH names, in pages of 64. For its append cells the yardstick copy, which reads and writes "bytes" bytes in all.

    {"op": "decode", "d": 128, "s": 8192, "sq": 1, "b": 16, "hq": 32, "hk": 8, "lengths": null, "page_size": 0,
     "peers": ["read"], "samples": 40}
    -> {"section": "serve", "peer": "read", "mode": "fwd", "ms": 0.128}

A sample is a launch between two events, after 256 MB were read. Everything is queued at once. Reading leaves nothing to
write back; cleared memory would cost the launch its write-back. `samples` are milliseconds, as Triton's do_bench counts
them. K and V lie in memory as [batch, heads, seqlen, head_dim], which PyTorch's kernels prefer. Needs only PyTorch 2.5
or newer. PyTorch has no pages and no caches of different lengths: there only read answers.
"""
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
BF16 = torch.bfloat16


def cold_ms(call, other, milliseconds):
    """The median of launches that, with the reads before them, take about so many milliseconds."""
    def samples(count):
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            other.sum()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return events

    call()
    few = samples(5)
    once = few[0][0].elapsed_time(few[-1][1]) / len(few)
    count = max(1, min(100_000, int(milliseconds / max(once, 1e-4))))
    for _ in range(max(count // 4, 1)):
        call()
    return statistics.median(start.elapsed_time(end) for start, end in samples(count))


def call_of(request, peer):
    if request["op"] == "append":
        if peer != "copy":
            raise ValueError(f"peer {peer!r} is not copy: PyTorch does not append")
        source, to = (torch.ones(request["bytes"] // 2, device="cuda", dtype=torch.uint8) for _ in range(2))
        return lambda: to.copy_(source)
    b, s, sq, hq, hk, d = (request[name] for name in ("b", "s", "sq", "hq", "hk", "d"))
    if peer == "flashmla":
        return flashmla(b, s, sq, hq, request)
    if peer == "read":
        kv, out = torch.ones(request["bytes"] // 4, device="cuda"), torch.empty((), device="cuda")
        return lambda: torch.sum(kv, 0, out=out)
    if peer not in BACKENDS:
        raise ValueError(f"peer {peer!r} is not read, cudnn, fa2 or flashmla")
    if request["latent"]:
        raise ValueError("PyTorch has no latent caches")
    if request["lengths"] or request["page_size"] or request["kv_dtype"]:
        raise ValueError("PyTorch has no pages, no caches of different lengths and none of 8 bits")
    draw = lambda heads, rows: torch.randn(b, heads, rows, d, device="cuda", dtype=BF16)
    q, k, v = draw(hq, sq), draw(hk, s), draw(hk, s)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=hq != hk)


def flashmla(b, s, sq, hq, request):
    if not request["latent"] or request["page_size"] != 64:
        raise ValueError("FlashMLA takes latent caches in pages of 64")
    import flash_mla
    lengths = torch.tensor(request["lengths"] or [s] * b, dtype=torch.int32, device="cuda")
    pages = (lengths.long() + 63) // 64
    table = torch.zeros(b, int(pages.max()), dtype=torch.int32, device="cuda")
    table[torch.arange(table.shape[1], device="cuda") < pages[:, None]] = torch.randperm(int(pages.sum()), device="cuda").int()
    cache = torch.randn(int(pages.sum()), 64, 1, 576, device="cuda", dtype=BF16)
    q, plan = torch.randn(b, sq, hq, 576, device="cuda", dtype=BF16), flash_mla.plan()
    return lambda: flash_mla.decode(q, cache, table, lengths, plan, causal=sq > 1)


def main():
    torch.manual_seed(0)
    other = torch.ones(2**26, device="cuda")  # 256 MB
    for line in sys.stdin:
        request = json.loads(line)
        for peer in request["peers"]:
            row = {"section": "serve", "peer": peer, "mode": "fwd", "version": f"PyTorch {torch.__version__}"}
            try:
                with torch.no_grad(), sdpa_kernel([BACKENDS.get(peer, SDPBackend.MATH)]):
                    row["ms"] = cold_ms(call_of(request, peer), other, request["samples"])
            except Exception as error:
                row["error"] = str(error)[:200]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
