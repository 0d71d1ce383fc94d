#!/usr/bin/env python3
"""cuDNN, FlashAttention-2 and FlashAttention-3 as peers of compare.py's full and causal cells, forward and backward; and the
yardstick gemm, the time that PyTorch's product of two matrices of 8192 x 8192 would take for as many operations ("flops").

    {"d": 128, "dv": 128, "s": 512, "sk": 8192, "causal": true, "b": 1, "hq": 32, "hk": 8, "flops": 66571993088.0,
     "peers": ["fa3"], "modes": ["fwd"]}
    -> {"section": "serve", "peer": "fa3", "mode": "fwd", "ms": 0.08}

Without "sk" there are as many keys as rows. Causal is aligned to the last key. cudnn and fa2 are PyTorch's, fa3 comes from
two wheels of PyPI, whose modules PYTHONPATH names: fa3_fwd (the forward, with the splits that it chooses itself) and fa3
(the backward; the forward where there is no fa3_fwd). PyTorch has no causal cuDNN with fewer rows than keys. Tensors are
[batch, seqlen, heads, head_dim], bf16. Needs PyTorch 2.5 or newer and Triton.
"""
import functools
import json
import sys

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


@functools.cache
def module(name):
    """A module that calls FlashAttention-3, loaded; None if there is none."""
    try:
        found = __import__(name)
        found.load()
        return found
    except Exception as error:
        print(f"gpu_peers.py: no {name}: {error}", file=sys.stderr)
        return None


def ms_of(request, peer):
    if peer == "gemm":
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return median_ms(lambda: a @ b) * request["flops"] / (2 * 8192**3)
    return median_ms(call_of(request, peer))


def median_ms(call):
    return triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median")


def call_of(request, peer):
    b, s, hq, hk, d, dv = (request[name] for name in ("b", "s", "hq", "hk", "d", "dv"))
    sk, causal, backward = request.get("sk", s), request["causal"], request["modes"] == ["bwd"]
    q, k, v, d_o = (torch.randn(b, rows, heads, dim, device="cuda", dtype=torch.bfloat16)
                    for rows, heads, dim in ((s, hq, d), (sk, hk, d), (sk, hk, dv), (s, hq, dv)))
    if peer == "fa3":
        if d != dv or request.get("p"):
            raise ValueError("these wheels have neither dropout nor a head_dim_v")
        splits, plain = module("fa3_fwd"), module("fa3")
        if not backward and splits:
            o = torch.empty_like(q)
            return lambda: splits.fwd(q, k, v, causal, num_splits=0, out=o)
        if not plain:
            raise ValueError("the module fa3 is not there")
        o, lse = plain.fwd(q, k, v, causal)
        return plain.prepare_bwd(d_o, q, k, v, o, lse, causal) if backward else plain.prepare_fwd(q, k, v, causal, out=o, lse=lse)
    if peer not in BACKENDS:
        raise ValueError(f"peer {peer!r} is not cudnn, fa2, fa3 or gemm")
    q, k, v, d_o = (x.transpose(1, 2) for x in (q, k, v, d_o))
    if causal and s != sk:
        if peer == "cudnn":
            raise ValueError("PyTorch has no causal cuDNN with fewer rows than keys")
        mask = {"attn_mask": causal_lower_right(s, sk)}
    else:
        mask = {"is_causal": causal}
    call = lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=request.get("p", 0.0), enable_gqa=hq != hk, **mask)
    if not backward:
        return call
    for x in (q, k, v):
        x.requires_grad_()
    with torch.enable_grad():
        o = call()
    return lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)


def main():
    torch.manual_seed(0)
    for line in sys.stdin:
        request = json.loads(line)
        for peer in request["peers"]:
            row = {"section": "serve", "peer": peer, "mode": request["modes"][0], "version": f"PyTorch {torch.__version__}"}
            try:
                with torch.no_grad(), sdpa_kernel([BACKENDS.get(peer, SDPBackend.MATH)]):
                    row["ms"] = ms_of(request, peer)
            except Exception as error:
                row["error"] = str(error)[:200]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
