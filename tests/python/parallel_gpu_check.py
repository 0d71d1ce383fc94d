"""By hand, on two GPUs: flashjit.parallel of a group of PyTorch's, beside one GPU: results, CUDA graphs, conversions,
and a process that dies.

    parallel_gpu_check.py [nccl|gloo|messages] [GPUS]

messages: over NCCL, as between hosts. There nothing tells that a process of one host has died.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time

import flashjit
import torch
import torch.distributed as dist
from flashjit import parallel

BATCH, SEQLEN, HEADS, HEADS_KV = 2, 4096, 8, 4
SPEC = {"op": "forward", "dtype": "bf16", "head_dim": 128}
LIMIT = 20  # seconds within which a rank's call ends once another rank's process has ended


def own(x, dim, layout, group):
    places = parallel.sequence_chunks(layout, x.shape[dim], group.rank, group.size)
    return torch.cat([x.narrow(dim, place.start, place.stop - place.start) for place in places], dim).contiguous()


class Rank:
    """A rank's tensors, and its forward with its backward."""

    def __init__(self, engine, group, spec, layout, whole):
        sizes = {"batch": BATCH, "seqlen_q": SEQLEN, "num_heads_q": HEADS, "num_heads_kv": HEADS_KV}
        self.attention = parallel.ParallelAttention(engine, spec, group, layout, **sizes)
        self.given = {name: own(x, 1, self.attention.layout, group) for name, x in whole.items()}
        lse = torch.empty(BATCH, HEADS, SEQLEN // group.size, device="cuda")
        self.made = {"o": torch.empty_like(self.given["q"]), "lse": lse}
        self.gradients = {"d" + name: torch.empty_like(self.given[name]) for name in "qkv"}
        for op in ("forward", "backward"):
            self.attention.prepare(op)
        self.rooms = [self.attention.workspace(self.given["q"], op) for op in ("forward", "backward")]

    def launch(self):
        inputs = {name: self.given[name] for name in "qkv"}
        self.attention.forward(**inputs, **self.made, workspace=self.rooms[0])
        self.attention.backward(**self.given, **self.made, **self.gradients, workspace=self.rooms[1])

    def results(self, group, launch, turns=1):
        outputs = {**self.made, **self.gradients}
        for x in outputs.values():
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(turns):
            launch()
        torch.cuda.synchronize()
        group.check()
        return {name: x.clone() for name, x in outputs.items()}


def inputs():
    torch.manual_seed(0)
    sizes = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV, "do": HEADS}
    return {name: torch.randn(BATCH, SEQLEN, n, 128, dtype=torch.bfloat16, device="cuda") for name, n in sizes.items()}


def differing(a, b, names):
    return [name for name in names if not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))]


def compute(engine, group):
    whole = inputs()
    cases = ((["causal"], "zigzag"), (["causal"], "contiguous"), (["causal"], "heads"), ([], "best"))
    for (masks, layout), deterministic in itertools.product(cases, (True, False)):
        rank = Rank(engine, group, {**SPEC, "mask": masks, "deterministic": deterministic}, layout, whole)
        # As on one GPU, a backward's bits repeat if the spec is deterministic.
        repeatable = ("o", "lse", "dq", "dk", "dv") if deterministic else ("o", "lse")
        with rank.attention:
            first = rank.results(group, rank.launch)
            again = rank.results(group, rank.launch, turns=3)
            assert not differing(first, again, repeatable), differing(first, again, repeatable)
            graph = torch.cuda.CUDAGraph()
            # PyTorch's own thread that watches NCCL may call the driver meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                rank.launch()
            for turns in (1, 3):
                replayed = rank.results(group, graph.replay, turns)
                assert not differing(first, replayed, repeatable), ("graph", differing(first, replayed, repeatable))
            q, k, v = (whole[name].clone().requires_grad_() for name in "qkv")
            o = flashjit.attention(q, k, v, mask=masks)
            o.backward(whole["do"])
            for name, right in {"o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
                right = own(right, 1, rank.attention.layout, group).float()
                for made in (first, replayed):
                    share = ((made[name].float() - right).norm() / right.norm()).item()
                    assert share < 0.01, (name, share)  # two roundings to bf16 and their products
            if group.rank == 0:
                of = f"{masks} {rank.attention.layout}{' deterministic' * deterministic}"
                print(f"{of}: as one GPU, also in a graph, with equal bits of {' '.join(repeatable)}", flush=True)


def convert(engine, group):
    whole = torch.arange(2 * SEQLEN * 8, dtype=torch.int32, device="cuda").view(2, SEQLEN, 8)
    x = first = own(whole, 1, "contiguous", group)
    steps = ("contiguous", "zigzag", "heads", "contiguous")
    for before, after in zip(steps, steps[1:]):
        with parallel.LayoutConversion(engine, group, "int32", whole.shape, before, after) as change:
            x = change.convert(x)
            torch.cuda.synchronize()
            group.check()
        right = whole.chunk(group.size, 2)[group.rank] if after == "heads" else own(whole, 1, after, group)
        assert torch.equal(x, right), (before, after)
    assert torch.equal(x, first)
    if group.rank == 0:
        print("conversions: right", flush=True)


def compute_for_ever(engine, group):
    rank = Rank(engine, group, {**SPEC, "mask": ["causal"]}, "zigzag", inputs())
    rank.launch()
    torch.cuda.synchronize()
    print("computes", flush=True)
    try:
        while True:
            rank.launch()
            torch.cuda.synchronize()
            group.check()
    except flashjit.DeviceFailedError as error:
        print(f"{time.time():.3f} {error}", flush=True)
    os._exit(0)  # the communicator has lost a rank, so that its end would wait


def run(rank, size, backend, file, what):
    torch.cuda.set_device(rank)
    os.environ["FLASHJIT_MAP_PEERS"] = str(int(backend != "messages"))
    dist.init_process_group("nccl" if backend == "messages" else backend, init_method=f"file://{file}", rank=rank, world_size=size)
    group = parallel.of_torch()
    assert (group.rank, group.size) == (rank, size)
    assert group.maps_memory == (backend != "messages"), group.transport_reason
    engine = flashjit.Engine(f"cuda:{rank}")
    if what == "dies":
        compute_for_ever(engine, group)
    compute(engine, group)
    convert(engine, group)
    del group
    dist.destroy_process_group()


def main(backend="nccl", size=2):
    failed = False
    for what in ("computes", "dies") if backend != "messages" else ("computes",):
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(size):
                words = ["--rank", str(rank), str(size), backend, f"{folder}/meeting", what]
                ranks.append(subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True))
            if what == "dies":
                for one in ranks:
                    line = one.stdout.readline()
                    assert line == "computes\n", line
                time.sleep(0.1)
                ended = time.time()
                ranks[1].send_signal(signal.SIGKILL)
            said = []
            for one in ranks:
                try:
                    said.append(one.communicate(timeout=LIMIT if what == "dies" else 120)[0])
                except subprocess.TimeoutExpired:
                    one.kill()
                    said.append("waits for ever\n" + one.communicate()[0])
            print(*(text.strip() for text in said if text), sep="\n", flush=True)
            if what == "dies":
                for rank in set(range(size)) - {1}:
                    told = "the process of rank 1 of the group has ended" in said[rank]
                    seconds = float(said[rank].split()[0]) - ended if told else float("inf")
                    print(f"rank {rank} ends after {seconds:.2f} s", flush=True)
                    failed |= not told
            else:
                failed |= any(one.returncode != 0 for one in ranks)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        main(*sys.argv[1:2], *map(int, sys.argv[2:]))
