"""The package on a GPU, with PyTorch: right results first, then the times of the table that it prints.

gpu_check.py [tests | figures], both by default. It takes the package that Python finds: a wheel, or a build tree's.
"""

import functools
import gc
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flashjit
import torch
import torch.nn.functional as F
from flashjit.compat import flash_attn, flash_attn_interface
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch_test import causal, inputs, plain

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SDPA = F.scaled_dot_product_attention


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


class Functions(unittest.TestCase):
    """Each function on tensors of a GPU. A result in bf16 is off by some of its roundings, of 2^-9 each."""

    def near(self, computed, wanted):
        torch.testing.assert_close(computed.double(), wanted.double(), rtol=2.0**-6, atol=2.0**-6)

    def test_attention(self):
        q, k, v = random(2, 300, 8, 128), random(2, 500, 2, 128, seed=1), random(2, 500, 2, 128, seed=2)
        o, lse = flashjit.attention(q, k, v, mask="causal", return_lse=True)
        wanted, wanted_lse, _ = plain(*(x.double() for x in (q, k, v)), seen=causal(300, 500))
        self.near(o, wanted)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2.0**-10)
        self.assertEqual((o.device, o.dtype), (DEVICE, torch.bfloat16))

    def test_decode(self):
        pages_k, pages_v = random(40, 64, 2, 128, seed=1), random(40, 64, 2, 128, seed=2)
        table = torch.randperm(40, device=DEVICE)[:32].int().reshape(4, 8)
        lengths = torch.tensor([512, 1, 77, 300], dtype=torch.int32, device=DEVICE)
        q = random(4, 1, 8, 128)
        o = flashjit.decode(q, pages_k, pages_v, page_table=table, seqlens_k=lengths)
        k, v = (x[table.long()].reshape(4, 512, 2, 128) for x in (pages_k, pages_v))
        seen = torch.arange(512, device=DEVICE) < lengths[:, None, None, None]
        self.near(o, plain(*(x.double() for x in (q, k, v)), seen=seen)[0])

    def test_append(self):
        k, v = (torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        new_k, new_v = random(3, 2, 128, seed=1), random(3, 2, 128, seed=2)
        slots = torch.tensor([5, -1, 30], device=DEVICE)
        flashjit.append_kv(k, v, new_k, new_v, slots=slots)
        self.assertTrue(torch.equal(k.reshape(64, 2, 128)[[5, 30]], new_k[[0, 2]]))
        self.assertEqual(torch.count_nonzero(v.any(-1).any(-1)).item(), 2)
        q = random(1, 3, 4, 128)
        turned = flashjit.append_kv(k[:1], v[:1], new_k[None], new_v[None], q=q, rotary=True,
                                    append_positions=torch.zeros(1, dtype=torch.int32, device=DEVICE))  # fmt: skip
        self.assertTrue(torch.equal(turned[:, 0], q[:, 0]) and not torch.equal(turned[:, 1], q[:, 1]))

    def test_merge(self):
        q, k, v = random(2, 65, 4, 64), random(2, 200, 2, 64, seed=1), random(2, 200, 2, 64, seed=2)
        parts = [flashjit.attention(q, k[:, s], v[:, s], return_lse=True, out_dtype="fp32")
                 for s in (slice(0, 77), slice(77, 200))]  # fmt: skip
        o, lse = flashjit.merge(*(torch.stack(x) for x in zip(*parts)), return_lse=True, out_dtype="bf16")
        wanted, wanted_lse, _ = plain(*(x.double() for x in (q, k, v)))
        self.near(o, wanted)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2.0**-10)

    def test_block_lists(self):
        q, k, v = (random(1, 1000, h, 64, seed=h) for h in (4, 2, 1))
        v = k + 0.5
        document = (torch.arange(1000, dtype=torch.int32, device=DEVICE) // 300)[None]
        call = {"mask": ["causal", "document[key] == document[position]"], "document": document,
                "tables": {"document": ["batch", "seqlen_k"]}}  # fmt: skip
        lists = flashjit.make_block_lists(q, k, bitmasks=32, **call)
        wanted = flashjit.attention(q, k, v, **call)
        self.near(flashjit.attention(q, k, v, block_lists=lists, **call), wanted)
        seen = causal(1000, 1000) & (document[0][:, None] == document[0])
        self.near(wanted, plain(*(x.double() for x in (q, k, v)), seen=seen)[0])

    def test_kernels(self):
        q, o = random(1, 64, 4, 64), torch.empty(1, 64, 4, 64, dtype=torch.bfloat16, device=DEVICE)
        engine = flashjit.Engine(str(DEVICE))
        kernel = engine.get({"op": "forward", "dtype": "bf16", "head_dim": 64, "lse": False}, seqlen_q=64, seqlen_k=64,
                            num_heads_q=4)  # fmt: skip
        wanted = flashjit.attention(q, q, q)
        for launch in (lambda: kernel.launch(q=q, k=q, v=q, o=o), kernel.prepare(q=q, k=q, v=q, o=o).launch):
            o.zero_()
            launch()
            self.assertTrue(torch.equal(o, wanted))

    def test_deterministic_gradients_have_equal_bits(self):
        torch.use_deterministic_algorithms(True)
        try:
            q, k, v = inputs(rows=700, keys=700)
            gradients = [torch.autograd.grad(flashjit.attention(q, k, v, mask="causal").sum(), (q, k, v))
                         for _ in range(4)]  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(False)
        for one in gradients[1:]:
            self.assertTrue(all(torch.equal(x, y) for x, y in zip(one, gradients[0])))


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class Device(unittest.TestCase):
    """Streams, graphs, lifetimes and failures."""

    def setUp(self):
        self.q, self.k, self.v = random(2, 128, 4, 64), random(2, 128, 4, 64, seed=1), random(2, 128, 4, 64, seed=2)
        self.wanted = flashjit.attention(self.q, self.k, self.v)
        torch.cuda.synchronize()

    def busy(self):
        torch.cuda._sleep(200_000_000)  # a tenth of a second

    def test_current_stream(self):
        stream, done = torch.cuda.Stream(), torch.cuda.Event()
        q = torch.zeros_like(self.q)
        with torch.cuda.stream(stream):
            self.busy()
            q.copy_(self.q)
            o = flashjit.attention(q, self.k, self.v)
            done.record()
            self.assertFalse(done.query())  # it waited for nothing
        stream.synchronize()
        self.assertTrue(torch.equal(o, self.wanted))

    def test_given_stream(self):
        stream, o = torch.cuda.Stream(), torch.zeros_like(self.wanted)
        with torch.cuda.stream(stream):
            self.busy()
        flashjit.attention(self.q, self.k, self.v, out=o, stream=stream.cuda_stream)
        self.assertFalse(stream.query())
        stream.synchronize()
        self.assertTrue(torch.equal(o, self.wanted))

    def test_inputs_and_workspaces_deleted_before_the_kernel_runs(self):
        q = self.q.detach().requires_grad_()
        wanted = torch.autograd.grad(flashjit.attention(q, self.k, self.v, mask="causal").sum(), q)[0]
        torch.cuda.synchronize()
        self.busy()
        copies = [x.clone() for x in (self.q, self.k, self.v)]
        copies[0].requires_grad_()
        o = flashjit.attention(*copies, mask="causal")
        of_q = torch.autograd.grad(o.sum(), copies[0])[0]
        del copies, o
        gc.collect()
        for _ in range(64):  # memory that was freed is handed out again, for later work
            torch.full((1 << 20,), torch.nan, device=DEVICE)
        torch.cuda.synchronize()
        torch.testing.assert_close(of_q, wanted)

    def test_engine_deleted_before_the_kernel_runs(self):
        engine = flashjit.Engine("cuda:0")
        flashjit.attention(self.q, self.k, self.v, engine=engine)
        torch.cuda.synchronize()
        self.busy()
        o = flashjit.attention(self.q, self.k, self.v, engine=engine)
        del engine
        gc.collect()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(o, self.wanted))

    def test_graph(self):
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        do = torch.randn_like(self.wanted)

        def step():
            o = flashjit.attention(q, k, v, mask="causal")
            return o, torch.autograd.grad(o, (q, k, v), do)

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            o, gradients = step()
        for seed in (3, 4):
            with torch.no_grad():
                q.copy_(random(2, 128, 4, 64, seed=seed))
            graph.replay()
            wanted, wanted_gradients = step()
            torch.testing.assert_close(o, wanted)
            torch.testing.assert_close(gradients, wanted_gradients)

    def test_replays_drop_other_weights(self):
        graph = torch.cuda.CUDAGraph()
        call = lambda: flashjit.attention(self.q, self.k, self.v, dropout_p=0.5)  # noqa: E731
        call()
        with torch.cuda.graph(graph):
            o = call()
        graph.replay()
        first = o.clone()
        graph.replay()
        self.assertFalse(torch.equal(first, o))

    def test_compiled_by_inductor(self):
        def loss(q, k, v):
            return flashjit.attention(q * 2, k, v, mask="causal").float().square().mean()

        compiled = torch.compile(loss, fullgraph=True)
        tensors = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        wanted, computed = (torch.autograd.grad(f(*tensors), tensors) for f in (loss, compiled))
        torch.testing.assert_close(computed, wanted)

    def test_other_devices(self):
        cpu = self.k.cpu()
        for tensors in ((self.q, cpu, cpu), (cpu, self.k, self.v)):
            for wanted in (False, True):
                with self.assertRaisesRegex(flashjit.InvalidArgumentError, "cpu|cuda"):
                    flashjit.attention(*(x.detach().requires_grad_(wanted) for x in tensors))
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "cuda"):
            flashjit.attention(self.q, self.k, self.v, engine=flashjit.Engine("cpu"))
        with self.assertRaisesRegex(flashjit.Error, "fp32"):
            flashjit.attention(*(x.float() for x in (self.q, self.k, self.v)))

    def test_fork(self):
        child = os.fork()
        if child == 0:
            try:
                flashjit.attention(self.q, self.k, self.v)
            except flashjit.Error:
                os._exit(17)
            finally:
                os._exit(18)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 17)
        self.assertTrue(torch.equal(flashjit.attention(self.q, self.k, self.v), self.wanted))


# ---- figures ----


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_times(calls, count=100, rounds=15):
    """Microseconds that the host needs for each call: the lowest of some rounds, which take turns."""
    lowest = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            lowest[name] = min(lowest[name], (time.perf_counter() - begin) / count * 1e6)
    synchronize()
    return lowest


def steps(calls, rounds=12):
    """Milliseconds of each call: medians of rounds, which take the calls forwards and backwards in turn."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for i in range(rounds):
        for name, call in list(calls.items())[:: (-1) ** i]:
            synchronize()
            begin = time.perf_counter()
            call()
            synchronize()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def kernel_time(call, count=5):
    """Milliseconds of all kernels that a call starts, by PyTorch's profiler."""
    call()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            call()
        synchronize()
    of_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.self_device_time_total for event in of_device) / count / 1e3


def kernel_times(calls, rounds=4):
    """kernel_time() of each call: medians of rounds, which take the calls forwards and backwards in turn."""
    times = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: (-1) ** i]:
            times[name].append(kernel_time(calls[name]))
    return {name: statistics.median(of_call) for name, of_call in times.items()}


def gradient_call(attend, tensors, do):
    return lambda: torch.autograd.grad(attend(*tensors), tensors, do)


def show(what, ours, theirs, unit, other="SDPA"):
    print(f"{what:58} {ours:9.2f} {theirs:9.2f} {unit:3} {ours / theirs:6.2f}  {other}", flush=True)


def figures_of_calls():
    shape, theirs_shape = (1, 1, 32, 128), (1, 32, 1, 128)
    ours = [random(*shape, seed=i).requires_grad_() for i in range(3)]
    theirs = [random(*theirs_shape, seed=i).requires_grad_() for i in range(3)]
    do, their_do = random(*shape), random(*theirs_shape)
    with torch.no_grad():
        times = host_times({"o": lambda: flashjit.attention(*ours), "t": lambda: SDPA(*theirs)})
    show("host: attention [1, 1, 32, 128], no gradients", times["o"], times["t"], "us")
    times = host_times({"o": lambda: flashjit.attention(*ours), "t": lambda: SDPA(*theirs)})
    show("host: forward with autograd", times["o"], times["t"], "us")
    eager = {"o": gradient_call(flashjit.attention, ours, do), "t": gradient_call(SDPA, theirs, their_do)}
    times = host_times(eager)
    show("host: forward and backward", times["o"], times["t"], "us")
    compiled_ours = torch.compile(lambda *x: flashjit.attention(*x), fullgraph=True)
    compiled_theirs = torch.compile(lambda *x: SDPA(*x), fullgraph=True)
    times = host_times({"o": gradient_call(compiled_ours, ours, do),
                        "t": gradient_call(compiled_theirs, theirs, their_do)})  # fmt: skip
    show("host: forward and backward, torch.compile", times["o"], times["t"], "us")
    for rows in (1, 1024):
        replays = {}
        for name, attend, at in (("o", flashjit.attention, 1), ("t", SDPA, 2)):
            sizes = [1, 32, 128]
            sizes.insert(at, rows)
            tensors = [random(*sizes, seed=i).requires_grad_() for i in range(3)]
            call, stream = gradient_call(attend, tensors, random(*sizes)), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call()
            synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            # The graph reads the tensors that the call keeps.
            replays[name] = lambda graph=graph, _=call: [graph.replay() for _ in range(50)]
        times = steps(replays)
        show(f"CUDA graph replay of both, {rows} rows", times["o"] * 20, times["t"] * 20, "us")


def figures_of_drop_ins():
    """Calls of FlashAttention's functions beside those of flashjit's own that compute the same."""
    tensors = [random(1, 1, 32, 128, seed=i) for i in range(3)]
    packed, slopes = [one[0] for one in tensors], torch.rand(32, device=DEVICE)
    starts, lengths = (torch.tensor(some, dtype=torch.int32, device=DEVICE) for some in ([0, 1], [1]))
    causal = functools.partial(flashjit.attention, mask="causal")
    of_packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1, "max_seqlen_k": 1}
    calls = {
        "flash_attn_func": (lambda: flash_attn.flash_attn_func(*tensors, causal=True), lambda: causal(*tensors)),
        "flash_attn_func of 3": (lambda: flash_attn_interface.flash_attn_func(*tensors, causal=True),
                                 lambda: causal(*tensors)),
        "flash_attn_func, slopes": (lambda: flash_attn.flash_attn_func(*tensors, causal=True, alibi_slopes=slopes),
                                    lambda: causal(*tensors, score=("alibi",), alibi_slopes=slopes)),
        "varlen": (lambda: flash_attn.flash_attn_varlen_func(*packed, starts, starts, 1, 1, causal=True),
                   lambda: causal(*packed, **of_packed)),
        "with_kvcache": (lambda: flash_attn.flash_attn_with_kvcache(*tensors, cache_seqlens=lengths, causal=True),
                         lambda: flashjit.decode(*tensors, seqlens_k=lengths, mask="causal")),
    }  # fmt: skip
    with torch.no_grad():
        for name, (ours, plain) in calls.items():
            times = host_times({"o": ours, "t": plain}, count=200, rounds=25)
            show(f"host: {name} of flashjit.compat", times["o"], times["t"], "us", "flashjit's own")


class Layer(torch.nn.Module):
    """A decoder's layer as Llama 3 has it."""

    def __init__(self, hidden, inner, heads, heads_kv, dim):
        super().__init__()
        self.heads, self.heads_kv, self.dim = heads, heads_kv, dim
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
        self.qkv, self.out = linear(hidden, (heads + 2 * heads_kv) * dim), linear(heads * dim, hidden)
        self.gate_up, self.down = linear(hidden, 2 * inner), linear(inner, hidden)
        self.norms = torch.nn.ModuleList(
            torch.nn.RMSNorm(hidden, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
        )

    def forward(self, x, turn, attend):
        batch, rows, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, rows, -1, self.dim)
        q, k, v = qkv.split([self.heads, self.heads_kv, self.heads_kv], 2)
        x = x + self.out(attend(turned(q, turn), turned(k, turn), v).reshape(batch, rows, -1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turned(x, turn):
    cos, sin = turn
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def turn_of(rows, dim):
    angle = torch.arange(rows, device=DEVICE)[:, None] * 10000.0 ** (-torch.arange(dim // 2, device=DEVICE) / dim * 2)
    angle = torch.cat([angle, angle], -1)[None, :, None]
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def by_heads(attend):
    """Turns tensors [batch, seqlen, heads, head_dim] into those of what takes [batch, heads, seqlen, head_dim]."""
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def of_backend(backend, grouped):
    def attend(q, k, v):
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(backend):
            return SDPA(q, k, v, is_causal=True, enable_gqa=grouped)

    return by_heads(attend)


def figures_of_training(lengths=(4096, 8192), hidden=4096, inner=14336, heads=32, heads_kv=8, dim=128):
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Layer(hidden, inner, heads, heads_kv, dim) for _ in range(4))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.ones_(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    flex, make_mask = (torch.compile(f, dynamic=False) for f in (flex_attention, create_block_mask))

    for rows in lengths:
        x, wanted, turn = random(1, rows, hidden), random(1, rows, hidden, seed=1), turn_of(rows, dim)
        tensors = [random(1, rows, h, dim, seed=i).requires_grad_() for i, h in enumerate((heads, heads_kv, heads_kv))]
        do = random(1, rows, heads, dim, seed=7)
        generator = torch.Generator(DEVICE).manual_seed(5)
        cuts = torch.randint(rows, (7,), device=DEVICE, generator=generator).sort().values
        document = torch.bucketize(torch.arange(rows, device=DEVICE), cuts, right=True).int()
        call = {"mask": ["causal", "document[key] == document[position]"], "document": document[None],
                "tables": {"document": ["batch", "seqlen_k"]}}  # fmt: skip

        def our_documents(call=call, tensors=tensors):
            lists = flashjit.make_block_lists(*(x.detach() for x in tensors[:2]), bitmasks=4 * rows // 128, **call)
            return lambda q, k, v: flashjit.attention(q, k, v, block_lists=lists, **call)

        def their_documents(document=document, rows=rows):
            of_document = lambda b, h, q, k: (q >= k) & (document[q] == document[k])  # noqa: E731
            mask = make_mask(of_document, 1, 1, rows, rows, device=str(DEVICE))
            return by_heads(lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=True))

        def step(make, x=x, wanted=wanted, turn=turn):
            def run():
                attend, y = make(), x
                for layer in model:
                    y = layer(y, turn, attend)
                F.mse_loss(y.float(), wanted.float()).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            return run

        ours = lambda q, k, v: flashjit.attention(q, k, v, mask="causal")  # noqa: E731
        makes = {"flashjit": lambda: ours}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for grouped in (True, False):
                attend = of_backend(backend, grouped)
                try:
                    gradient_call(attend, tensors, do)()
                except RuntimeError as error:
                    print(f"{backend.name}, {'grouped' if grouped else 'repeated'} heads: {str(error)[:60]}")
                    continue
                makes[f"{backend.name}{'' if grouped else ' repeated heads'}"] = lambda attend=attend: attend
        whole = steps({name: step(make) for name, make in makes.items()})
        kernels = kernel_times({name: gradient_call(make(), tensors, do) for name, make in makes.items()})
        best, best_kernels = (min((n for n in makes if n != "flashjit"), key=t.get) for t in (whole, kernels))
        show(f"training step, {rows} tokens: whole", whole["flashjit"], whole[best], "ms", best)
        name = best_kernels
        show(f"training step, {rows} tokens: attention", kernels["flashjit"], kernels[name], "ms", name)

        makes = {"flashjit": our_documents, "flex": their_documents}
        whole = steps({name: step(make) for name, make in makes.items()})
        kernels = kernel_times({name: gradient_call(make(), tensors, do) for name, make in makes.items()})
        show(f"8 documents, {rows} tokens: whole", whole["flashjit"], whole["flex"], "ms", "FlexAttention")
        show(f"8 documents, {rows} tokens: attention", kernels["flashjit"], kernels["flex"], "ms", "FlexAttention")


def tests_pass():
    """Runs the tests in many processes at once: their time is that of NVRTC and of torch.compile."""
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromName, ("torch_test", "torch_caches_test", "torch_node_test", "torch_graph_test", "flash_attn_test", "flex_test", "gpu_check")))
    names = [test.id() for classes in suite for tests in classes for test in tests]
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def run(some):
        command = [sys.executable, "-m", "unittest", *some]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            print(f"{done.stdout}{done.stderr}", flush=True)
        return done.returncode == 0

    count = min(len(os.sched_getaffinity(0)), 14)
    groups = [names[i::count] for i in range(count)]
    if importlib.util.find_spec("jax"):
        groups.append(["jax_test"])
    else:
        print("no JAX here, so jax_test does not run")
    with ThreadPoolExecutor(len(groups)) as pool:
        passed = list(pool.map(run, groups))
    print(f"{len(names)} tests of PyTorch, in groups: {sum(passed)} of {len(groups)} groups pass")
    return all(passed)


def main():
    what = sys.argv[1:] or ["tests", "figures"]
    begin = time.perf_counter()
    print(f"flashjit {flashjit.__version__} of {flashjit.__file__}, PyTorch {torch.__version__}")
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", flush=True)
    passed = "tests" not in what or tests_pass()
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    if "figures" in what:
        torch.set_default_device(None)  # it would cost each call of PyTorch some time
        print(f"{'':58} {'flashjit':>9} {'other':>9} {'':3} {'ratio':>6}  other")
        figures_of_calls()
        figures_of_drop_ins()
        figures_of_training()
        print(f"{time.perf_counter() - begin:.0f} s")
    return not passed


if __name__ == "__main__":
    sys.exit(main())
