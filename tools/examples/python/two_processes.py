# Attention of one sequence by two processes, which this program starts. On CPUs they share memory. With --gpus each has
# a GPU, and PyTorch's NCCL brings them together by a file.
import multiprocessing
import os
import sys
import tempfile

import flashjit
import numpy as np
from flashjit import parallel

SIZE, SEQLEN, HEADS = 2, 512, 8
SPEC = {"op": "forward", "dtype": "fp16", "head_dim": 64, "mask": ["causal"]}


def on_cpu(rank, name):
    compute(flashjit.Engine("cpu"), parallel.of_processes(name, rank, SIZE), lambda x: x)


def on_gpu(rank, file):
    import torch

    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=SIZE)
    compute(flashjit.Engine(f"cuda:{rank}"), parallel.of_torch(), lambda x: torch.from_numpy(x).cuda())
    torch.distributed.destroy_process_group()


def compute(engine, group, put):
    whole = np.random.default_rng(0).standard_normal((3, 1, SEQLEN, HEADS, 64)).astype(np.float16)
    with parallel.ParallelAttention(engine, SPEC, group, seqlen_q=SEQLEN, num_heads_q=HEADS) as attention:
        layout = attention.layout
        places = parallel.sequence_chunks(layout, SEQLEN, group.rank, SIZE)
        q, k, v = (put(np.concatenate([x[:, place] for place in places], axis=1)) for x in whole)
        o, lse = put(np.empty(q.shape, np.float16)), put(np.empty((1, HEADS, SEQLEN // SIZE), np.float32))
        attention.forward(q=q, k=k, v=v, o=o, lse=lse, workspace=attention.workspace(q))
        own = np.array(o.tolist())  # waits for a GPU
        group.check()  # raises if the other process has ended meanwhile
    alone = np.array(flashjit.attention(*map(put, whole), mask="causal").tolist())
    off = abs(own - np.concatenate([alone[:, place] for place in places], axis=1)).max()
    assert off < 0.01, off
    if group.rank == 0:
        rows = " and ".join(f"{place.start} to {place.stop - 1}" for place in places)
        print(f"{layout}: rank 0 has rows {rows}", flush=True)


if __name__ == "__main__":
    work = on_gpu if "--gpus" in sys.argv else on_cpu
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting") if work is on_gpu else parallel.name_of_processes(SIZE)
        start = multiprocessing.get_context("spawn").Process
        processes = [start(target=work, args=(rank, meeting)) for rank in range(SIZE)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    print(f"as one engine computes: {all(process.exitcode == 0 for process in processes)}")
