"""Times of FlexAttention's functions here beside PyTorch's own, compiled. On a GPU if PyTorch has one.

flex_check.py prints a table: first calls, each in a process of its own with empty caches; a hot call beyond
flashjit.attention; on a GPU forward and backward of 8,192 tokens.
"""

import os
import subprocess
import sys
import tempfile
import time
import timeit

import flashjit
import torch
from flashjit.compat import create_block_mask, flex_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
NAMES = ("causal with ALiBi", "soft cap", "documents")


def mods(name, rows):
    """score_mod and mask_mod."""
    slopes, cap = torch.rand(32, device=DEVICE), 20.0
    documents = torch.arange(rows, device=DEVICE) * 8 // rows
    return {
        "causal with ALiBi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: q >= k),
        "soft cap": (lambda s, b, h, q, k: cap * torch.tanh(s / cap), lambda b, h, q, k: q >= k),
        "documents": (None, lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])),
    }[name]


def functions(whose):
    if whose == "flashjit":
        return flex_attention, create_block_mask
    from torch.nn.attention import flex_attention as of_torch

    return torch.compile(of_torch.flex_attention, dynamic=False), torch.compile(of_torch.create_block_mask, dynamic=False)


def inputs(heads, rows):
    return [torch.randn(1, heads, rows, 128 if DEVICE == "cuda" else 64, device=DEVICE, dtype=DTYPE) for _ in range(3)]


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def first_call(whose, name):
    """Seconds of block mask and forward, in this process."""
    q, k, v = inputs(8, 1024)
    attend, make_mask = functions(whose)
    score_mod, mask_mod = mods(name, 1024)
    begin = time.perf_counter()
    with torch.no_grad():
        attend(q, k, v, score_mod, make_mask(mask_mod, None, None, 1024, 1024, device=DEVICE))
    synchronize()
    return time.perf_counter() - begin


def show(what, ours, theirs, unit, other):
    print(f"{what:48} {ours:9.2f} {theirs:9.2f} {unit:3} {ours / theirs:6.2f}  {other}", flush=True)


def figures_of_first_calls():
    for name in NAMES:
        times = []
        for whose in ("flashjit", "torch"):
            with tempfile.TemporaryDirectory() as folder:
                caches = {"FLASHJIT_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
                command = [sys.executable, "-W", "ignore", __file__, whose, name]
                done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=True)
                times.append(float(done.stdout.split()[-1]))
        show(f"first call: {name}", *times, "s", "FlexAttention")


def figures_of_hot_calls():
    """Beyond flashjit.attention of the same formulas."""
    x, slopes, cap = torch.zeros(1, 1, 1, 64, device=DEVICE, dtype=DTYPE), torch.rand(1, device=DEVICE), 20.0
    score = "(score + (st0[head] * (key - row)))"
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1, 1, device=DEVICE)
    lists = flashjit.make_block_lists(x, x, mask="row >= key")
    alibi = lambda s, b, h, q, k: s + slopes[h] * (k - q)  # noqa: E731
    capped = lambda s, b, h, q, k: cap * torch.tanh(s / cap)  # noqa: E731
    for name, ours, plain in (
        ("nothing", lambda: flex_attention(x, x, x), lambda: flashjit.attention(x, x, x)),
        ("a table", lambda: flex_attention(x, x, x, alibi),
         lambda: flashjit.attention(x, x, x, score=(score,), st0=slopes, tables={"st0": ("heads_q",)})),
        ("a number", lambda: flex_attention(x, x, x, capped),
         lambda: flashjit.attention(x, x, x, score=("(sn0 * tanh((score / sn0)))",), sn0=cap)),
        ("a block mask", lambda: flex_attention(x, x, x, None, mask),
         lambda: flashjit.attention(x, x, x, mask=("(row >= key)",), block_lists=lists)),
    ):  # fmt: skip
        times = []
        for call in (ours, plain):
            call()
            times.append(min(timeit.repeat(call, number=300, repeat=200)) / 300 * 1e6)
            synchronize()
        show(f"hot call: {name}", *times, "us", "flashjit.attention")


def figures_of_steps(rows=8192, heads=16):
    """Forward and backward, the fastest of 20, in milliseconds."""
    for name in NAMES:
        times = []
        for whose in ("flashjit", "torch"):
            attend, make_mask = functions(whose)
            score_mod, mask_mod = mods(name, rows)
            tensors = [x.requires_grad_() for x in inputs(heads, rows)]
            mask, do = make_mask(mask_mod, None, None, rows, rows, device=DEVICE), torch.randn_like(tensors[0])
            each = []
            for _ in range(25):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                torch.autograd.grad(attend(*tensors, score_mod, mask), tensors, do)
                end.record()
                end.synchronize()
                each.append(begin.elapsed_time(end))
            times.append(min(each[5:]))
        show(f"forward and backward: {name}, {rows} tokens", *times, "ms", "FlexAttention")


def main():
    if len(sys.argv) == 3:
        print(first_call(*sys.argv[1:]))
        return
    figures_of_hot_calls()
    if DEVICE == "cuda":
        figures_of_steps()
    figures_of_first_calls()


if __name__ == "__main__":
    main()
