#!/usr/bin/env python3
"""Attention of one sequence over the GPUs of a host, a process each: flashjit beside PyTorch's context_parallel.

    context_parallel.py --library libflashjit.so.2 [--seqlens 32768] [--heads 16] [--rounds 6] [--check] [--peer]
        [--messages]

Prints milliseconds of the slowest rank, forward and backward, bf16, causal, heads of 128, in both states of the cards.
All are timed in turns. --check compares flashjit's results with one GPU's. --messages: flashjit over NCCL, too, as
between hosts. Needs PyTorch with NCCL, which is also what flashjit's group comes from.
"""
import argparse
import contextlib
import ctypes
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ARGS = {"q": 1, "k": 2, "v": 3, "o": 4, "lse": 5, "workspace": 11, "do": 31, "dq": 33, "dk": 34, "dv": 35}


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device_kind", ctypes.c_int32),
                ("device_index", ctypes.c_int32), ("rank", ctypes.c_int32), ("shape", ctypes.c_int64 * 6),
                ("strides", ctypes.c_int64 * 6)]


class Argument(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("tensor", ctypes.POINTER(Tensor))]


class Shape(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t)] + [(name, ctypes.c_int32) for name in (
        "batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "page_size")] + [
            ("total_q", ctypes.c_int64), ("total_k", ctypes.c_int64)]


class EngineOptions(ctypes.Structure):  # the first members
    _fields_ = [("struct_size", ctypes.c_size_t), ("device", ctypes.c_char_p)]


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def loaded(name):
    """The path of a library that this process has."""
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if name in line)


def communicator(rank, size):
    """A communicator of its own, of the NCCL that PyTorch has loaded."""
    path = loaded("libnccl.so")
    os.environ["FLASHJIT_NCCL"] = path
    nccl = ctypes.CDLL(path)
    unique = UniqueId()
    if rank == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
    told = [bytes(unique)]
    dist.broadcast_object_list(told)
    ctypes.memmove(ctypes.byref(unique), told[0], 128)
    comm = ctypes.c_void_p()
    assert nccl.ncclCommInitRank(ctypes.byref(comm), size, unique, rank) == 0
    return comm


class Flashjit:
    """A rank's ParallelAttention through the C interface."""

    def __init__(self, path, rank, size, whole, layout, messages):
        self.lib = ctypes.CDLL(path)
        self.lib.flashjit_last_error_message.restype = ctypes.c_char_p
        self.engine, self.spec = ctypes.c_void_p(), ctypes.c_void_p()
        self.group, self.parallel = ctypes.c_void_p(), ctypes.c_void_p()
        given = EngineOptions(ctypes.sizeof(EngineOptions), f"cuda:{rank}".encode())
        self.call("engine_create", ctypes.byref(given), ctypes.byref(self.engine))
        self.call("spec_create", b'{"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"]}',
                  ctypes.byref(self.spec))
        os.environ["FLASHJIT_MAP_PEERS"] = "0" if messages else "1"
        self.call("group_of_nccl", communicator(rank, size), ctypes.byref(self.group))
        maps_memory = ctypes.c_int32()
        self.call("group_transport", self.group, ctypes.byref(maps_memory), None)
        assert maps_memory.value == (not messages)
        batch, seqlen, heads = whole
        shape = Shape(ctypes.sizeof(Shape), batch, seqlen, seqlen, heads, heads)
        self.call("parallel_create", self.engine, self.spec, ctypes.byref(shape), layout, self.group,
                  ctypes.byref(self.parallel))
        for backward in (0, 1):
            self.call("parallel_prepare", self.parallel, backward)
        sizes = []
        for backward in (0, 1):
            size_of = ctypes.c_size_t()
            self.call("parallel_workspace", self.parallel, backward, ctypes.byref(size_of))
            sizes.append(size_of.value)
        self.workspace = torch.empty(max(sizes), dtype=torch.uint8, device="cuda")

    def call(self, name, *args):
        if getattr(self.lib, "flashjit_" + name)(*args) != 0:
            raise RuntimeError(name + ": " + self.lib.flashjit_last_error_message().decode())

    def launch(self, name, tensors):
        kept = []
        args = (Argument * (len(tensors) + 1))()
        for i, (argument, tensor) in enumerate([*tensors.items(), ("workspace", self.workspace)]):
            dtype = {torch.bfloat16: 2, torch.float32: 0, torch.uint8: 6}[tensor.dtype]
            view = Tensor(tensor.data_ptr(), dtype, 1, tensor.device.index, tensor.dim())
            for dim in range(tensor.dim()):
                view.shape[dim], view.strides[dim] = tensor.shape[dim], tensor.stride(dim)
            kept.append(view)
            args[i] = Argument(ARGS[argument], ctypes.pointer(view))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("parallel_" + name, self.parallel, args, ctypes.c_size_t(len(args)), stream)

    def close(self):
        self.call("group_check", self.group)
        self.lib.flashjit_parallel_destroy(self.parallel)
        self.lib.flashjit_group_destroy(self.group)


REST, HEAT = 0.2, 1.0  # seconds before each sample at rest, and of the same launches before sustained ones


def sample(work):
    """Milliseconds of a launch of this rank. Short ones are three, after one that is not timed."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    start.record()
    for _ in range(3):
        work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 3


def slowest(samples):
    """The median of samples, each as long as its slowest rank takes."""
    ms = torch.tensor(samples, device="cuda")
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return statistics.median(ms.tolist())


def meet():
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def in_turns(works, rounds):
    """(at rest, sustained) milliseconds of each of the works, by name."""
    names = list(works)
    orders = [names[i % len(names):] + names[:i % len(names)] for i in range(rounds)]
    for work in works.values():
        meet()
        sample(work)
    rest, heat = {name: [] for name in names}, {name: [] for name in names}
    for order in orders:
        for name in order:
            meet()
            time.sleep(REST)
            rest[name].append(sample(works[name]))
    rest = {name: slowest(samples) for name, samples in rest.items()}
    for order in (names, names[::-1]):
        for name in order:
            meet()
            for _ in range(int(HEAT * 1000 / rest[name])):
                works[name]()
            for _ in range(rounds // 2):
                heat[name].append(sample(works[name]))
                meet()
    return {name: (rest[name], slowest(heat[name])) for name in names}


@contextlib.contextmanager
def of_pytorch(rank, size, seqlen, heads):
    """PyTorch's forward and backward, which it computes in this context."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    mesh = init_device_mesh("cuda", (size,))
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, seqlen, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    buffers = [q, k, v, grad]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)), \
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION):

        def attend():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def forward():
            with torch.no_grad():
                attend()

        for t in (q, k, v):
            t.requires_grad_()
        o = attend()
        yield forward, lambda: torch.autograd.grad(o, (q, k, v), grad, retain_graph=True)


def of_flashjit(rank, size, seqlen, heads, options, messages):
    """flashjit's object, and its forward and backward."""
    zigzag = 1
    torch.manual_seed(0)
    whole = {name: torch.randn(1, seqlen, heads, 128, dtype=torch.bfloat16, device="cuda") for name in "qkv"}
    whole["do"] = torch.randn_like(whole["q"])
    chunks = whole["q"].shape[1] // (2 * size)
    places = [slice(c * chunks, (c + 1) * chunks) for c in (rank, 2 * size - 1 - rank)]

    def own(t, dim=1):
        index = [slice(None)] * t.dim()
        parts = []
        for place in places:
            index[dim] = place
            parts.append(t[tuple(index)])
        return torch.cat(parts, dim).contiguous()

    tensors = {name: own(t) for name, t in whole.items()}
    tensors["o"] = torch.full_like(tensors["q"], float("nan"))
    tensors["lse"] = torch.full((1, heads, seqlen // size), float("nan"), device="cuda")
    for name in "qkv":
        tensors["d" + name] = torch.full_like(tensors[name], float("nan"))
    attention = Flashjit(options.library, rank, size, (1, seqlen, heads), zigzag, messages)
    of_forward = {name: tensors[name] for name in ("q", "k", "v", "o", "lse")}

    def forward():
        attention.launch("forward", of_forward)

    def backward():
        attention.launch("backward", tensors)

    forward()
    backward()
    torch.cuda.synchronize()
    if options.check:
        q, k, v = (whole[name].transpose(1, 2).clone().requires_grad_() for name in "qkv")
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        o.backward(whole["do"].transpose(1, 2))
        for name, right in {"o": o, "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
            right = own(right.detach().transpose(1, 2)).float()
            error = (tensors[name].float() - right).abs().max().item()
            share = (tensors[name].float() - right).norm().item() / right.norm().item()
            print(f"rank {rank} {name}{' by messages' * messages}: largest error {error:.4f}, share of the norm "
                  f"{share:.5f}", flush=True)
            assert share < 0.01, name  # two roundings to bf16 and their products
    return attention, forward, backward


def run(rank, size, options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    dist.barrier()
    for seqlen in options.seqlens:
        objects, works = [], {"forward": {}, "backward": {}}

        def add(name, forward, backward):
            works["forward"][name], works["backward"][name] = forward, backward

        for messages in (False, True) if options.messages else (False,):
            made, *both = of_flashjit(rank, size, seqlen, options.heads, options, messages)
            objects.append(made)
            add("flashjit" + ", messages" * messages, *both)
        peer = of_pytorch(rank, size, seqlen, options.heads) if options.peer else contextlib.nullcontext()
        with peer as both:
            if options.peer:
                add("context_parallel", *both)
            for op, of_op in works.items():
                for name, (rest, heat) in in_turns(of_op, options.rounds).items():
                    if rank == 0:
                        print(f"{seqlen} {op}, {name}: {rest:.3f} ms at rest, {heat:.3f} sustained", flush=True)
        del works, both
        for made in objects:
            made.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seqlens", type=lambda text: [int(n) for n in text.split(",")], default=[32768])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--peer", action="store_true", help="PyTorch's context_parallel with cuDNN, too")
    parser.add_argument("--messages", action="store_true", help="flashjit over NCCL, too")
    options = parser.parse_args()
    mp.spawn(run, (options.gpus, options), nprocs=options.gpus)
