"""A rank's work, on a thread of parallel_test.py or as a process: parallel_rank.py NAME RANK SIZE save FOLDER|loop."""

import sys

import flashjit
import numpy as np
from flashjit import parallel
from reference import random

SPEC = {"op": "forward", "dtype": "fp32", "head_dim": 32, "mask": ["causal"]}


def tensors(seqlen, heads, heads_kv):
    rows, keys = (1, seqlen, heads, 32), (1, seqlen, heads_kv, 32)
    return {"q": random(rows, seed=1), "k": random(keys, seed=2), "v": random(keys, seed=3), "do": random(rows, seed=4)}


def own(whole, dim, layout, group):
    """A rank's chunks of a tensor, one after the other."""
    places = parallel.sequence_chunks(layout, whole.shape[dim], group.rank, group.size)
    return np.concatenate([whole[(slice(None),) * dim + (place,)] for place in places], axis=dim)


def join(ranks, layout, seqlen):
    """The whole's tensors of what each rank has made, by name."""
    whole = {}
    for name in set(ranks[0]) - {"layout"}:
        dim = 2 if name == "lse" else 1
        sizes = list(ranks[0][name].shape)
        sizes[dim] = seqlen
        whole[name] = np.full(sizes, np.nan, np.float32)
        for rank, made in enumerate(ranks):
            chunks = parallel.sequence_chunks(layout, seqlen, rank, len(ranks))
            for chunk, part in zip(chunks, np.split(made[name], len(chunks), axis=dim)):
                whole[name][(slice(None),) * dim + (chunk,)] = part
    return whole


def run(group, engine, layout, t, again=lambda: False):
    """o, lse, dq, dk and dv of the rank, and the layout. Computes them as long as `again` says so, at least once."""
    seqlen = t["q"].shape[1]
    sizes = {"seqlen_q": seqlen, "num_heads_q": t["q"].shape[2], "num_heads_kv": t["k"].shape[2]}
    with parallel.ParallelAttention(engine, SPEC, group, layout, **sizes) as attention:
        given = {name: own(whole, 1, attention.layout, group) for name, whole in t.items()}
        made = {"o": np.full_like(given["q"], np.nan)}
        made["lse"] = np.full((1, sizes["num_heads_q"], seqlen // group.size), np.nan, np.float32)
        gradients = {f"d{name}": np.full_like(given[name], np.nan) for name in "qkv"}
        for op in ("forward", "backward"):
            attention.prepare(op)
        while True:
            room = attention.workspace(given["q"])
            attention.forward(**{name: given[name] for name in "qkv"}, **made, workspace=room)
            room = attention.workspace(given["q"], "backward")
            attention.backward(**given, **made, **gradients, workspace=room)
            if not again():
                break
        return {**made, **gradients, "layout": attention.layout}


if __name__ == "__main__":
    name, rank, size, what, *folder = sys.argv[1:]
    engine, group = flashjit.Engine("cpu", num_threads=1), parallel.of_processes(name, int(rank), int(size))
    if what == "save":
        made = run(group, engine, "zigzag", tensors(48, heads=6, heads_kv=2))
        np.savez(f"{folder[0]}/{rank}.npz", **{key: value for key, value in made.items() if key != "layout"})
    else:

        def again():
            print("computes", flush=True)
            return True

        try:
            run(group, engine, "zigzag", tensors(192, heads=6, heads_kv=2), again)
        except flashjit.Error as error:
            print(f"{type(error).__name__}: {error}")
