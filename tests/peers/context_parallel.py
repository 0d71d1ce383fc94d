#!/usr/bin/env python3
"""Attention of one sequence over the GPUs of a host, a process each: flashjit beside PyTorch's context_parallel.

    context_parallel.py --library libflashjit.so.2 [--seqlens 32768] [--heads 16] [--rounds 5] [--check]

Prints milliseconds of the slowest rank, forward and forward with backward, bf16, causal, heads of 128. --check compares
flashjit's results with one GPU's. Needs PyTorch with NCCL, which is also what flashjit's group comes from.
"""
import argparse
import ctypes
import os
import statistics

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

    def __init__(self, path, rank, size, whole, layout):
        self.lib = ctypes.CDLL(path)
        self.lib.flashjit_last_error_message.restype = ctypes.c_char_p
        self.engine, self.spec = ctypes.c_void_p(), ctypes.c_void_p()
        self.group, self.parallel = ctypes.c_void_p(), ctypes.c_void_p()
        given = EngineOptions(ctypes.sizeof(EngineOptions), f"cuda:{rank}".encode())
        self.call("engine_create", ctypes.byref(given), ctypes.byref(self.engine))
        self.call("spec_create", b'{"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"]}',
                  ctypes.byref(self.spec))
        self.call("group_of_nccl", communicator(rank, size), ctypes.byref(self.group))
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


def slowest(work, rounds):
    """The median of rounds, each as long as its slowest rank takes."""
    samples = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        start.record()
        for _ in range(3):
            work()
        stop.record()
        torch.cuda.synchronize()
        ms = torch.tensor([start.elapsed_time(stop) / 3], device="cuda")
        dist.all_reduce(ms, op=dist.ReduceOp.MAX)
        samples.append(ms.item())
    return statistics.median(samples[1:])


def of_pytorch(rank, size, seqlen, heads, rounds):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    mesh = init_device_mesh("cuda", (size,))
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, seqlen, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    buffers = [q, k, v, grad]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)), \
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for t in (q, k, v):
            t.requires_grad_()

        def forward():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both():
            forward().backward(grad)
            q.grad = k.grad = v.grad = None

        with torch.no_grad():
            ms = slowest(forward, rounds)
        return ms, slowest(both, rounds)


def of_flashjit(rank, size, seqlen, heads, options):
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
    attention = Flashjit(options.library, rank, size, (1, seqlen, heads), zigzag)
    forward_names = ["q", "k", "v", "o", "lse"]
    of_forward = {name: tensors[name] for name in forward_names}

    def forward():
        attention.launch("forward", of_forward)

    def both():
        forward()
        attention.launch("backward", tensors)

    both()
    torch.cuda.synchronize()
    if options.check:
        q, k, v = (whole[name].transpose(1, 2).clone().requires_grad_() for name in "qkv")
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        o.backward(whole["do"].transpose(1, 2))
        for name, right in {"o": o, "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
            right = own(right.detach().transpose(1, 2)).float()
            error = (tensors[name].float() - right).abs().max().item()
            share = (tensors[name].float() - right).norm().item() / right.norm().item()
            print(f"rank {rank} {name}: largest error {error:.4f}, share of the norm {share:.5f}", flush=True)
            assert share < 0.01, name  # two roundings to bf16 and their products
    del whole
    ms = slowest(forward, options.rounds), slowest(both, options.rounds)
    attention.close()
    return ms


def run(rank, size, options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    dist.barrier()
    for seqlen in options.seqlens:
        mine = of_flashjit(rank, size, seqlen, options.heads, options)
        peer = of_pytorch(rank, size, seqlen, options.heads, options.rounds) if options.peer else (0, 0)
        if rank == 0:
            print(f"{seqlen}: flashjit {mine[0]:.3f}, {mine[1]:.3f} ms; context_parallel {peer[0]:.3f}, "
                  f"{peer[1]:.3f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seqlens", type=lambda text: [int(n) for n in text.split(",")], default=[32768])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--peer", action="store_true", help="PyTorch's context_parallel with cuDNN, too")
    options = parser.parse_args()
    mp.spawn(run, (options.gpus, options), nprocs=options.gpus)
