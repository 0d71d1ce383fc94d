"""Attention of one sequence that several ranks share: threads, processes, or GPUs of a torch.distributed group.

Each rank has a part of the rows and keys, by a layout. sequence_chunks says which. Every rank makes the objects and
calls their functions, in the same order. If a call raises on one rank, or its process ends, the waiting and later calls
of the others raise DeviceFailedError, and the group is of no use any more.

Two ranks that are threads, with a row of 16 each of the four chunks of 8:

>>> import threading, numpy as np, flashjit
>>> from flashjit import parallel
>>> engine, spec = flashjit.Engine("cpu"), {"op": "forward", "dtype": "fp32", "head_dim": 32, "mask": ["causal"]}
>>> x = np.random.default_rng(0).standard_normal((1, 32, 2, 32), np.float32)
>>> o = np.empty_like(x)
>>> def rank(group):
...     with parallel.ParallelAttention(engine, spec, group, seqlen_q=32, num_heads_q=2) as attention:
...         places = parallel.sequence_chunks(attention.layout, 32, group.rank, group.size)
...         own = np.concatenate([x[:, place] for place in places], axis=1)
...         own_o, lse = np.empty_like(own), np.empty((1, 2, 16), np.float32)
...         attention.forward(q=own, k=own, v=own, o=own_o, lse=lse, workspace=attention.workspace(own))
...         for place, part in zip(places, np.split(own_o, len(places), axis=1)):
...             o[:, place] = part
>>> threads = [threading.Thread(target=rank, args=(group,)) for group in parallel.of_threads(2)]
>>> for thread in threads: thread.start()
>>> for thread in threads: thread.join()
>>> bool(np.abs(o - flashjit.attention(x, x, x, mask="causal")).max() < 1e-5)
True
"""

from . import _native
from ._engine import Spec
from ._errors import Error
from ._native import Group

__all__ = [
    "Group",
    "LayoutConversion",
    "ParallelAttention",
    "name_of_processes",
    "of_nccl",
    "of_processes",
    "of_threads",
    "of_torch",
    "sequence_chunks",
]


def of_threads(size):
    """A list of one Group for each of `size` threads of this process. Each thread takes its own.

    >>> from flashjit import parallel
    >>> [group.rank for group in parallel.of_threads(3)]
    [0, 1, 2]
    """
    return _native.groups_of_threads(size)


def name_of_processes(size):
    """A name for a group of `size` processes of this host. One of them makes it and tells it to the others."""
    return _native.group_name(size)


def of_processes(name, rank, size):
    """This process's Group by a name of name_of_processes. All processes call it, and wait until all have come.

    Their engines are CPUs', or GPUs' that reach each other's memory.

    >>> from flashjit import parallel
    >>> parallel.of_processes(parallel.name_of_processes(1), 0, 1).size
    1
    """
    return _native.group_of_processes(name, rank, size)


def of_nccl(comm):
    """This process's Group of an NCCL communicator, whose address `comm` is. All its ranks call it.

    GPUs of one host that reach each other's memory copy there; others, or those of ranks with FLASHJIT_MAP_PEERS=0,
    send and receive over NCCL. The attributes maps_memory and transport_reason say which, and why. A rank that has not
    called it after five minutes, or an error of the communicator, is a DeviceFailedError. The communicator outlives the
    group. Whoever owns one that has failed aborts it.
    """
    return _native.group_of_nccl(comm)


def of_torch(group=None):
    """This process's Group of a torch.distributed process group (by default the one of all processes).

    All its processes call it. A group with NCCL is one of its GPUs (of_nccl), each of which is its process's current
    device. Groups of other backends are of one host's CPUs, or of GPUs that reach each other's memory.
    """
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if "nccl" in dist.get_backend(group):
        gpu = torch.cuda.current_device()
        dist.barrier(group, device_ids=[gpu])  # PyTorch makes the communicator when it is first used
        return of_nccl(group._get_backend(torch.device("cuda", gpu))._comm_ptr())
    told = [None]
    if rank == 0:
        try:
            told = [name_of_processes(size)]
        except Error as error:
            told = [error]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
    if isinstance(told[0], Error):
        raise told[0]
    return of_processes(told[0], rank, size)


def sequence_chunks(layout, seqlen, rank, size):
    """The places of a rank's chunks in the sequence, as slices in the order of its tensors.

    >>> from flashjit import parallel
    >>> parallel.sequence_chunks("zigzag", 48, 1, 4)
    [slice(6, 12, None), slice(36, 42, None)]
    """
    return _native.sequence_chunks(layout, seqlen, rank, size)


class _Shared:
    """The end of a with statement closes the object, or tells the other ranks of the exception that ends it."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self.group.fail(f"{kind.__name__}: {error}")
        self.close()


class ParallelAttention(_Shared, _native.ParallelAttention):
    """A rank's part of the attention of one sequence, forward and backward.

    ParallelAttention(engine, spec, group, layout="best", *, batch=1, seqlen_q, seqlen_k=seqlen_q, num_heads_q=1,
    num_heads_kv=num_heads_q)

    spec is a forward's (a Spec, JSON text or a dict), the sizes are those of all ranks together. layout: "contiguous",
    "zigzag" (balances causal masks), "heads" (divides heads while it computes), or "best", which chooses one of the
    first two; the attributes layout and layout_reason say which, and why. All raise InvalidArgumentError if the ranks
    were given different work, and UnsupportedError for what the layout does not compute.

    It is for a with statement, whose end waits for the other ranks (close), or tells them of an exception.
    """

    def __new__(
        cls, engine, spec, group, layout="best", *, batch=1, seqlen_q, seqlen_k=None, num_heads_q=1, num_heads_kv=None
    ):
        spec = spec if isinstance(spec, _native.Spec) else Spec(spec)
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        num_heads_kv = num_heads_q if num_heads_kv is None else num_heads_kv
        return super().__new__(
            cls, engine, spec, group, layout, batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv
        )

    def __init__(self, engine, spec, group, layout="best", **sizes):
        self.group = group

    def forward(self, **arguments):
        """Computes the rank's rows of o and lse, which are given as are q, k, v, workspace and what the spec reads.

        q and o: [batch, seqlen_q / size, num_heads_q, head_dim], k and v: [batch, seqlen_k / size, num_heads_kv,
        head_dim], lse: float32 [batch, num_heads_q, seqlen_q / size]. Tables of masks and formulas, window_left,
        window_right and dropout's numbers are those of the whole, the same on every rank. On a GPU it is asynchronous,
        on the framework's current stream unless stream, the address of a CUDA stream, is given; ask group.check()
        after waiting for it. It may be captured in a CUDA graph after prepare("forward").
        """
        super().forward(**arguments)

    def backward(self, **arguments):
        """Computes the rank's dq, dk and dv of do, the gradient by o, as of forward's q, k, v, o and lse.

        do is as o, dq, dk and dv are as q, k and v; the rest is as in forward. dlse, the gradient by lse, may be left
        out.
        """
        super().backward(**arguments)

    def workspace(self, like, op="forward"):
        """New scratch memory of workspace_bytes(op) bytes, by the framework of the tensor `like` on its device."""
        return _native.empty_like(like, (self.workspace_bytes(op),), "uint8")


class LayoutConversion(_Shared, _native.LayoutConversion):
    """Moves tensors' parts among the ranks, from where layout `before` has them to where layout `after` has them.

    Of tensors that are [batch, seqlen, ...] of `sizes` in the whole. A rank has [batch, seqlen / size, ...]; of
    "heads", as here, it has all rows of its share of dimension 2, [batch, seqlen, heads / size, ...].

    >>> import numpy as np, flashjit
    >>> from flashjit import parallel
    >>> group = parallel.of_threads(1)[0]
    >>> x = np.arange(8, dtype=np.int32)[None]
    >>> engine = flashjit.Engine("cpu")
    >>> with parallel.LayoutConversion(engine, group, "int32", (1, 8), "contiguous", "zigzag") as change:
    ...     change.convert(x).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """

    def __new__(cls, engine, group, dtype, sizes, before, after):
        return super().__new__(cls, engine, group, dtype, tuple(sizes), before, after)

    def __init__(self, engine, group, dtype, sizes, before, after):
        self.group, self.dtype = group, dtype
        divided = 2 if after == "heads" else 1
        self._own_sizes = tuple(n // group.size if i == divided else n for i, n in enumerate(sizes))

    def convert(self, tensor, out=None, *, stream=None):
        """The rank's part by layout `after` of a tensor whose part by layout `before` it has. All ranks call it."""
        if out is None:
            out = _native.empty_like(tensor, self._own_sizes, self.dtype)
        self._convert(tensor, out, stream)
        return out
