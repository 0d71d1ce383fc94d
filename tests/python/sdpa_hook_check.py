"""By hand on a GPU, with PyTorch 2.11 or newer: PyTorch's own attention on flashjit, through its hook.

    PYTHONPATH=... python tests/python/sdpa_hook_check.py

Compares results with those of PyTorch's math backend, trains a step of a model of four layers with either
implementation, whose losses and gradients have to agree, replays a CUDA graph, and prints the times of both.
"""

import sys

import flashjit.compat.sdpa as drop_in
import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import scaled_dot_product_attention as sdpa

HIDDEN, HEADS, HEADS_KV, MLP, LAYERS = 4096, 32, 8, 14336, 4
LENGTHS = 4096, 8192


class Layer(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        dim = HIDDEN // HEADS
        self.heads, self.dropout = (HEADS, HEADS_KV, HEADS_KV), dropout
        self.qkv = torch.nn.Linear(HIDDEN, dim * sum(self.heads), bias=False)
        self.o = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.gate = (torch.nn.Linear(HIDDEN, MLP, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(MLP, HIDDEN, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(HIDDEN) for _ in range(2))

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2).split(self.heads, 1)
        o = sdpa(*qkv, is_causal=True, dropout_p=self.dropout, enable_gqa=True)
        x = x + self.o(o.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def model(dropout=0.0):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Layer(dropout) for _ in range(LAYERS)]).to("cuda", torch.bfloat16)


def step(of, x):
    of.zero_grad(set_to_none=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = of(x).float().square().mean()
        loss.backward()
    return loss


def milliseconds(call, repeats=10):
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return sorted(times)[len(times) // 2]


def far(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def check(name, good, said=""):
    print(f"{'passed' if good else 'FAILED'}  {name} {said}", flush=True)
    FAILED.extend([] if good else [name])


FAILED: list = []


def compare_with_math():
    for heads_kv, rows, dim, causal in ((4, 333, 64, True), (1, 512, 128, True), (4, 1000, 96, False), (2, 77, 40, False)):
        generator = torch.Generator("cuda").manual_seed(rows)
        tensors = [
            torch.randn(2, rows, n, dim, dtype=torch.bfloat16, device="cuda", generator=generator)
            .transpose(1, 2).requires_grad_() for n in (4, heads_kv, heads_kv)
        ]  # fmt: skip
        exact = [x.detach().double().requires_grad_() for x in tensors]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = sdpa(*tensors, is_causal=causal, enable_gqa=True)
        with sdpa_kernel(SDPBackend.MATH):
            wanted = sdpa(*exact, is_causal=causal, enable_gqa=True)
        do = torch.randn_like(o)
        made = [o, *torch.autograd.grad(o, tensors, do)]
        of_exact = [wanted, *torch.autograd.grad(wanted, exact, do.double())]
        off = max(map(far, made, of_exact))
        check(f"heads_kv {heads_kv}, {rows} rows, head_dim {dim}, causal {causal}", off < 2**-6, f"off by {off:.1e}")


def compare_steps():
    for rows in LENGTHS:
        x = torch.randn(1, rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        of = model()
        restore_flash_attention_impl(_raise_warn=False)
        own_loss = step(of, x).item()
        own = [p.grad.clone() for p in of.parameters()]
        own_time = milliseconds(lambda: step(of, x))
        activate_flash_attention_impl("flashjit")
        loss = step(of, x).item()
        off = max(far(p.grad, one) for p, one in zip(of.parameters(), own))
        time = milliseconds(lambda: step(of, x))
        check(f"training step of {rows} rows", abs(loss / own_loss - 1) < 2**-7 and off < 2**-4, f"off by {off:.1e}")
        print(f"        {time:.2f} ms; PyTorch's own {own_time:.2f} ms; ratio {time / own_time:.3f}", flush=True)
        del of, own
        torch.cuda.empty_cache()


def compare_dropout():
    x = torch.randn(1, 1024, HIDDEN, dtype=torch.bfloat16, device="cuda")
    of, losses = model(0.5), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(step(of, x).item())
    check("dropout in a training step", losses[0] == losses[1] != losses[2], f"losses {losses}")
    q = torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(2):
            sdpa(q, q, q, dropout_p=0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = sdpa(q, q, q, dropout_p=0.5)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(o.clone())
    check("each replay of a CUDA graph drops other weights", not torch.equal(*replays))


def compare_compiled():
    x = torch.randn(1, 1024, HIDDEN, dtype=torch.bfloat16, device="cuda")
    of = model()
    wanted = step(of, x).item()
    compiled = torch.compile(of, fullgraph=True)
    loss = step(compiled, x).item()
    check("torch.compile", abs(loss / wanted - 1) < 2**-7)


def compare_varlen():
    from torch.nn.attention.varlen import varlen_attn

    begins = torch.tensor([0, 100, 101, 357], dtype=torch.int32, device="cuda")
    q = torch.randn(357, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = varlen_attn(q, q, q, begins, begins, 256, 256, **CAUSAL)
    do = torch.randn_like(o)
    gradient, = torch.autograd.grad(o, q, do)
    exact = q.detach().double().requires_grad_()
    parts = [x.transpose(0, 1)[None] for x in exact.tensor_split(begins[1:-1].tolist())]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.cat([sdpa(x, x, x, is_causal=True)[0].transpose(0, 1) for x in parts])
    of_exact, = torch.autograd.grad(wanted, exact, do.double())
    off = max(far(o, wanted), far(gradient, of_exact))
    check("varlen_attn", off < 2**-6, f"off by {off:.1e}")


def causal_of_varlen():
    """varlen_attn had is_causal before it had window_size."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name())
    CAUSAL = causal_of_varlen()
    drop_in.register()
    activate_flash_attention_impl("flashjit")
    check("activation", current_flash_attention_impl() == "flashjit")
    for one in (compare_with_math, compare_varlen, compare_dropout, compare_compiled, compare_steps):
        one()
    restore_flash_attention_impl()
    check("restoration", current_flash_attention_impl() is None)
    sys.exit(1 if FAILED else 0)
