#!/usr/bin/env python3
"""FlexAttention on a GPU, as the peer flex of compare.py's formula and documents cells.

    {"op": "formula", "formula": "softcap", "causal": true, "d": 128, "s": 8192, "b": 4, "hq": 16, "peers": ["flex"]}
    -> {"section": "serve", "peer": "flex", "mode": "fwd", "ms": 4.2}

    {"op": "documents", "part": "whole", "causal": false, "length": 1500, "d": 128, "s": 16384, "b": 4, "hq": 16, "peers": ["flex"]}

"modes": ["bwd"] asks for the backward, "learned" for its gradient of T5's table. Where a mask of blocks or of padding keeps
a share of the blocks, "ms" is divided by that share. The second request is attention within
documents: part lists is the making of a block mask, attention takes one that is there, whole does both.

Each formula is compiled at its first visit, which compare.py does not count. A mask has a block mask, made once. Needs
PyTorch 2.5 or newer and Triton.
"""
import functools
import json
import sys

import torch
import torch._functorch.config
import triton
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SOFTCAP = 20.0
MASKS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 1024),
}
ALIASES = {"causal_formula": "causal", "window_formula": "window"}


def scores(name, heads, bias):
    slopes = torch.exp2(-8 * torch.arange(1, heads + 1, device="cuda") / heads)
    return {"alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
            "softcap": lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP),
            "t5": lambda s, b, h, i, j: s + bias[h, (i - j).abs().clamp(max=127)]}.get(name)


def call_of(request):
    """The call, and the share of blocks that it keeps if it is to be told from the time."""
    b, s, heads, d = (request[name] for name in ("b", "s", "hq", "d"))
    if request["op"] == "documents":
        return call_of_documents(request), 1
    name = ALIASES.get(request["formula"], request["formula"])
    masks = dict(MASKS)
    if name == "prefix_lm":
        prefix = torch.randint(0, s, (b,), device="cuda")
        masks[name] = lambda b_, h, i, j: (j < prefix[b_]) | (i >= j)
    if name == "padding":
        lengths = torch.tensor([8192, 6000, 3000, 1000], device="cuda")
        masks[name] = lambda b_, h, i, j: j < lengths[b_]
    if name.startswith("blocks_"):
        listed = torch.rand(s // 128, s // 128, device="cuda") < float(name.split("_")[1])
        listed |= torch.eye(s // 128, dtype=torch.bool, device="cuda")
        masks[name] = lambda b_, h, i, j: listed[i // 128, j // 128]
    bias = torch.randn(heads, 128, device="cuda", requires_grad=request.get("learned", False))
    score = scores(name, heads, bias)
    mask = masks.get("causal" if request["causal"] else name)
    if score is None and mask is None and name != "none":
        raise ValueError(f"FlexAttention here has no {name}")
    backward = "bwd" in request["modes"]
    draw = lambda: torch.randn(b, heads, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
    q, k, v = draw(), draw(), draw()
    blocks = mask and create_block_mask(mask, b if name in ("prefix_lm", "padding") else None, None, s, s, device="cuda")
    kept = 1 - blocks.sparsity() / 100 if name == "padding" or name.startswith("blocks_") else 1
    compiled = torch.compile(flex_attention)
    # The default configs of the gradient of a table need more shared memory than there is.
    kernel_options = {"num_stages": 1} if bias.requires_grad else None
    call = lambda: compiled(q, k, v, score_mod=score, block_mask=blocks, kernel_options=kernel_options)
    if not backward:
        return call, kept
    with torch.enable_grad():
        o = call()
    d_o = torch.randn_like(o)
    learned = [q, k, v] + [bias] * bias.requires_grad
    return lambda: torch.autograd.grad(o, learned, d_o, retain_graph=True), kept


@functools.cache
def documents(b, s, length, causal):
    """What the parts share: the making of a block mask, compiled and not, and attention with one, compiled."""
    document = (torch.arange(s, device="cuda", dtype=torch.int32) // length).repeat(b, 1)

    def within(b_, h, i, j):
        return document[b_, i] == document[b_, j]

    mask = (lambda b_, h, i, j: within(b_, h, i, j) & (i >= j)) if causal else within
    make_lists = lambda function: function(mask, b, None, s, s, device="cuda")
    compiled = torch.compile(create_block_mask)
    # Its compile takes minutes, so attention's own block mask is made without it.
    return lambda: make_lists(compiled), lambda: make_lists(create_block_mask), torch.compile(flex_attention)


def call_of_documents(request):
    b, s, heads, d = (request[name] for name in ("b", "s", "hq", "d"))
    lists, lists_once, attend = documents(b, s, request["length"], request["causal"])
    if request["part"] == "lists":
        return lists
    q, k, v = (torch.randn(b, heads, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if request["part"] == "whole":
        return lambda: attend(q, k, v, block_mask=lists())
    blocks = lists_once()
    return lambda: attend(q, k, v, block_mask=blocks)


def main():
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # all formulas are compiled from one function
    torch._functorch.config.donated_buffer = False  # a backward runs many times
    calls = {}
    for line in sys.stdin:
        request = json.loads(line)
        for peer in request["peers"]:
            row = {"section": "serve", "peer": peer, "mode": request["modes"][0], "version": f"PyTorch {torch.__version__}"}
            try:
                if peer != "flex":
                    raise ValueError(f"peer {peer!r} is not flex")
                with torch.no_grad():
                    if line not in calls:
                        calls[line] = call_of(request)
                    call, kept = calls[line]
                    row["ms"] = triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median") / kept
            except Exception as error:
                row["error"] = str(error)[:200]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
