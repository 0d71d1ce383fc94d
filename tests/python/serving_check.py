"""A server's steps with bf16 queries and fp8 caches in pages, of the shapes of llama-3-8b, by prebuilt kernels alone.

serving_check.py FOLDER    FOLDER is that of `flashjit prebuild llama-3-8b --use serve --target TARGET -o FOLDER`.

The results are compared with attention in float64. FLASHJIT_LOG names a file that tells which kernels the steps took. Needs
PyTorch.
"""

import math
import sys

import flashjit
import torch

HEADS, HEADS_KV, DIM, PAGE, PAGES = 32, 8, 128, 16, 32


def pages_of(cache, scale, table, length):
    """The rows of a sequence, in float64."""
    rows = cache.double() * scale.double()[..., None]
    return torch.cat([rows[page] for page in table])[:length]


def wanted(q, k, v, first):
    """Row i sees the keys up to first + i."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.repeat_interleave(HEADS // HEADS_KV, 1)) / math.sqrt(DIM)
    keys, rows = torch.arange(k.shape[0]), torch.arange(q.shape[0])
    scores.masked_fill_(keys > first + rows[:, None], -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(HEADS // HEADS_KV, 1))


def main(folder):
    engine = flashjit.Engine("cpu", policy="require_prebuilt", cache_path=folder, cache_dir="")
    generator = torch.Generator().manual_seed(0)

    def rows(tokens, heads):
        return torch.randn((2, tokens, heads, DIM), generator=generator).to(torch.bfloat16)

    caches = [torch.zeros((PAGES, PAGE, HEADS_KV, DIM), dtype=torch.float8_e4m3fn) for _ in "kv"]
    scales = [torch.ones((PAGES, PAGE, HEADS_KV)) for _ in "kv"]
    table = torch.tensor([[3, 7, 9, 2], [1, 4, 0, 5]], dtype=torch.int32)
    lengths = torch.tensor([40, 40], dtype=torch.int32)
    common = {"page_table": table, "k_scale": scales[0], "v_scale": scales[1], "kv_scale": "token_head",
              "engine": engine}  # fmt: skip

    worst = 0  # of the bound: weights and outputs are rounded to bf16, by 2^-9 of at most the largest value each

    def compare(q, o, first):
        nonlocal worst
        for i in range(2):
            k, v = (pages_of(cache, scale, table[i], int(lengths[i])) for cache, scale in zip(caches, scales))
            error = (o[i].double() - wanted(q[i], k, v, first)).abs().max().item()
            worst = max(worst, error / (2**-8 * v.abs().max().item()))

    q = flashjit.append_kv(*caches, rows(40, HEADS_KV), rows(40, HEADS_KV), q=rows(40, HEADS), rotary=True,
                           append_positions=lengths - 40, **common)  # fmt: skip
    compare(q, flashjit.attention(q, *caches, mask="causal", seqlens_k=lengths, **common), 0)
    for _ in range(3):
        q = flashjit.append_kv(*caches, rows(1, HEADS_KV), rows(1, HEADS_KV), q=rows(1, HEADS), rotary=True,
                               append_positions=lengths, **common)  # fmt: skip
        lengths += 1
        compare(q, flashjit.decode(q, *caches, seqlens_k=lengths, **common), int(lengths[0]) - 1)
    print(f"prefill and 3 steps, all by kernels of {folder}; largest error {worst:.2f} of its bound")
    if not worst <= 1:
        raise SystemExit("serving_check.py: results differ")


if __name__ == "__main__":
    main(sys.argv[1])
