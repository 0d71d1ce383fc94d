#!/usr/bin/env python3
"""Measures flashjit and other attention kernels in turns, in one job on one device, and prints the ratios of their
speeds.

    compare.py PEERS [--flashjit build/release/bin/flashjit] [--peers cudnn fa3]
               [--cells grid | 128:8192:full ...] [--states rest sustained]
    compare.py cpu_peers.py --device cpu [--threads 1 2] [--dtypes bf16 fp32] [--cells grid masks decode]
    compare.py decode_peers.py --cells decode [--peers read cudnn fa2]
    compare.py decode_peers.py --cells decode_formulas --peers read
    compare.py decode_peers.py --cells decode_8bit --peers read
    compare.py flex_peers.py --cells formulas formulas_backward
    compare.py flex_peers.py --cells documents
    compare.py decode_peers.py --cells append
    compare.py PEERS --cells backward [--target sm_90]
    compare.py cpu_peers.py --device cpu --cells backward backward_masks

PEERS is a script that reads JSON requests from standard input, one a line, and answers with one JSON row for each peer
and mode:
    {"d": 128, "dv": 128, "s": 8192, "causal": true, "b": 2, "hq": 16, "hk": 16, "peers": ["fa3"], "modes": ["fwd"]}
       (with "p": 0.1 for dropout; on a CPU with "dtype": "bf16", "mask": "window", "threads": 2, "samples": 25)
    -> {"section": "serve", "peer": "fa3", "mode": "fwd", "ms": 2.1, ...}    or    {..., "error": "why"}
For a backward cell "modes" is ["bwd"]; a row of the forward may come before the answer.
For a decode cell the request has "op": "decode", "sq" (query rows), "lengths" (null, or keys of each sequence),
"page_size" (0: contiguous), "kv_dtype" (null: the dtype of q), "bytes" (of K, V and their scales) and "samples". The
peer "read" is the yardstick, a plain read of as many bytes, and never the best peer. A decode's amount is these bytes a
second. Its last column compares its time with that of a decode of the same run: with one of 16-bit keys and without
formula; without pages; with one of a single query row; else with one of 8/8 heads and as many bytes. The last column of a formula cell compares its rate on the pairs that it keeps with the cell of the built-in mask
or without formula.
For an append cell the request has "op": "append" and "bytes", those that flashjit reads and writes; the yardstick is
"copy", which reads and writes as many.
PEERS and `flashjit bench --serve` keep running, since a card cools while a process starts. The first visit of every
cell compiles and makes plans; it is not counted.

A visit is one request: some 10 ms of launches, then about 40 ms whose median counts. PEERS measures like Triton's
do_bench, and so does flashjit on a GPU. A card at its power limit slows down after a hotter kernel. Therefore
  - rounds take every order of flashjit and its peers in turn, each cell the next order, and a ratio compares two visits
    of one round;
  - a GPU is measured in two states: at rest, it idles 0.2 s before every visit; sustained, visits follow each other at
    once.
Tables show the medians of the rounds, and the ratios with their range. A ratio above 1 means that flashjit is faster.
The best peer of a cell in a state is the peer with the lowest median time there. Needs only Python's standard library
(PEERS may need more).
"""
import argparse
import array
import contextlib
import itertools
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time


REST_SECONDS = 0.2
STATES = {"rest": "At rest", "sustained": "Sustained"}
HEATING = 5  # uncounted visits of all sides before the sustained ones of a round: about a second
MASKS = {  # a spec's masks; the last three only on a CPU: PyTorch has no flag for them
    "full": [],
    "causal": ["causal"],
    "padding": ["padding"],
    "window": ["sliding_window"],
    "blocks": [{"kind": "block_sparse", "block_m": 128, "block_n": 128}],
}
MASK_OPTIONS = ["--window-left", "1023", "--density", "0.2", "--partial", "0"]


def grid(dims, seqlens):
    return [f"{dim}:{seqlen}:{mask}" for dim in dims for mask in ("full", "causal") for seqlen in seqlens]


GPU_CELLS = {"grid": grid((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)),
             "backward": ["backward:" + cell for cell in grid((64, 128), (8192,))],
             "backward_grid": ["backward:" + cell for cell in grid((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384))],
             "backward_dims": [f"backward:{dims}:8192:causal" for dims in ("40", "72", "80", "96", "112", "160", "192")] + ["backward:192/128:8192:causal:16"],
             "backward_gqa": [f"backward:128:{seqlen}:{mask}:64/8" for mask in ("full", "causal") for seqlen in (2048, 8192, 32768)],
             "decode": ["decode:" + cell for cell in (
                 "1x8192", "1x131072", "16x8192", "64x8192", "16x32768", "1x100000+63x500:p16",
                 "16x8192:p1", "16x8192:p16", "16x8192:p64", "16x8192:p256",
                 "16x8192:8/8", "16x8192:64/8", "128x8192:64/1", "16x8192:q8", "16x8192:q16")],
             "decode_8bit": ["decode:" + sizes + pages + kv_dtype for sizes in ("64x8192", "16x32768") for pages in ("", ":p16")
                             for kv_dtype in ("", ":fp8_e4m3", ":fp8_e4m3/token_head", ":int8", ":int8/token_head")],
             "decode_formulas": ["decode:16x8192" + formula for formula in ("", ":alibi", ":softcap", ":sinks")],
             "append": ["append:" + cell for cell in (
                 "16x8192", "16x8192:q", "16x8192:p16", "16x8192:fp8_e4m3", "16x8192:fp8_e4m3/token_head", "16x8192:int8/token_head",
                 "64x1", "64x1:p16", "64x1:fp8_e4m3/token_head")],
             "formulas": ["formula:" + name for name in (
                 "none", "causal", "window", "causal_formula", "window_formula", "prefix_lm", "alibi", "softcap",
                 "softcap_precise", "t5", "alibi:causal", "softcap:causal", "softcap_precise:causal", "t5:causal")],
             "formulas_backward": ["formula:" + name for name in (
                 "none:backward", "causal:backward", "window:backward", "padding:backward", "blocks_0.5:backward",
                 "blocks_0.2:backward", "blocks_0.05:backward", "alibi:backward", "softcap:backward", "t5:backward",
                 "t5:backward:learned")],
             "documents": ["documents:" + part for part in ("whole", "attention", "lists", "lists:b1", "whole:causal", "attention:causal")]}
CPU_CELLS = {"grid": grid((64, 80, 128), (128, 512, 1024, 4096)),
             "masks": [f"128:4096:{mask}" for mask in ("padding", "window", "blocks")],
             "backward": ["backward:" + cell for cell in grid((64, 128), (512, 1024, 2048, 4096))],
             "backward_masks": [f"backward:128:4096:{mask}" for mask in ("padding", "window", "blocks")],
             "decode": ["decode:1x32768"]}
YARDSTICKS = ("read", "copy")
DENSITIES = (0.5, 0.2, 0.05)  # of listed blocks
# What a formula cell adds to the spec, and the cell that has no formula.
FORMULAS = {
    "none": ({}, None),
    "causal": ({"mask": ["causal"]}, None),
    "window": ({"mask": ["sliding_window"]}, None),
    "padding": ({"mask": ["padding"]}, "none"),
    **{f"blocks_{density}": ({"mask": [{"kind": "block_sparse", "block_m": 128, "block_n": 128}]}, "none") for density in DENSITIES},
    "causal_formula": ({"mask": ["key <= position"]}, "causal"),
    "window_formula": ({"mask": ["position - key < 1024 && key <= position"]}, "window"),
    "prefix_lm": ({"mask": ["prefix_lm"]}, "none"),
    "alibi": ({"score": ["alibi"]}, "none"),
    "softcap": ({"score": ["softcap"]}, "none"),
    "softcap_precise": ({"score": ["softcap"], "precise": True}, "none"),
    "t5": ({"score": ["score + bias[head, min(abs(key - position), 127)]"],
            "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", 128]}}}, "none"),
}
RELATIVE = ("decode", "formula", "append")  # cells whose last column compares them with another one
DECODE_FORMULAS = {"alibi": {"score": ["alibi"]}, "softcap": {"score": ["softcap"]}, "sinks": {"sink_logits": True}}


class Cell:
    """A problem: [backward:]HEAD_DIM[/HEAD_DIM_V]:SEQLEN:MASK[:HEADS_Q[/HEADS_KV]]. There are 2048 / head_dim heads unless
    given. On a CPU `tokens` is None and batch * heads is 8."""

    def __init__(self, text, tokens):
        cpu = tokens is None
        self.name, self.op, self.mode = text, "forward", "fwd"
        if text.startswith("backward:"):
            self.op, self.mode, text = "backward", "bwd", text[len("backward:"):]
        try:
            dims, seqlen, self.mask, *heads = text.split(":")
            self.dim, self.dim_v = [int(x) for x in (dims.split("/") * 2)[:2]]
            self.seqlen, self.causal = int(seqlen), self.mask == "causal"
            if len(heads) > 1 or self.mask not in (MASKS if cpu else ("full", "causal")):
                raise ValueError
            self.batch = 1 if cpu else max(1, tokens // self.seqlen)
            self.heads_q = self.heads_kv = 8 if cpu else max(1, 2048 // self.dim)
            if cpu and self.mask == "padding":  # sequences of different lengths
                self.batch, self.heads_q, self.heads_kv = 4, 2, 2
            if heads:
                self.heads_q, self.heads_kv = [int(x) for x in (heads[0].split("/") * 2)[:2]]
        except ValueError:
            raise SystemExit(f"cell {text!r} is not HEAD_DIM[/HEAD_DIM_V]:SEQLEN:full|causal[:HEADS_Q[/HEADS_KV]], as in "
                             "128:8192:causal or backward:192/128:2048:full:64/8; masks on a CPU are also padding, window and blocks")

    def flops(self):
        pairs = self.batch * self.heads_q * self.seqlen**2 * (0.5 if self.causal else 1)
        return (2.5 if self.op == "backward" else 1) * 2 * pairs * (self.dim + self.dim_v)

    def tflops(self, ms):
        return self.flops() / ms * 1e-9

    def request(self):
        return {"causal": self.causal}

    def flashjit_request(self):
        return {"shapes": [{"batch": self.batch, "seqlen_q": self.seqlen, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}]}


KV_DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2")


def kv_of(option):
    """The kv_dtype and kv_scale that KV_DTYPE[/KV_SCALE] names; a ValueError if there are none such."""
    kv_dtype, kv_scale = (option.split("/") + ["tensor"])[:2]
    if kv_dtype not in KV_DTYPES or kv_scale not in ("tensor", "head", "token_head"):
        raise ValueError
    return kv_dtype, kv_scale


def kv_fields(cell):
    return {"kv_dtype": cell.kv_dtype, "kv_scale": cell.kv_scale} if cell.kv_dtype else {}


class Decode:
    """Query rows against caches: decode:COUNTxKEYS[+COUNTxKEYS...][:HEADS_Q/HEADS_KV][:qROWS][:pPAGE_SIZE][:FORMULA], head_dim 128.
    Without more it has 32/8 heads, a row, no pages and no formula."""

    dim = dim_v = 128
    mask, causal, op, mode = "decode", False, "decode", "fwd"

    def __init__(self, text):
        self.name, self.rows, self.page_size, self.heads_q, self.heads_kv, self.formula = text, 1, 0, 32, 8, None
        self.kv_dtype = self.kv_scale = None
        try:
            _, sizes, *more = text.split(":")
            sizes = [[int(x) for x in size.split("x")] for size in sizes.split("+")]
            self.lengths = [keys for count, keys in sizes for _ in range(count)]
            for option in more:
                if option[0].isdigit():
                    self.heads_q, self.heads_kv = [int(x) for x in option.split("/")]
                elif option.split("/")[0] in KV_DTYPES:
                    self.kv_dtype, self.kv_scale = kv_of(option)
                elif option in DECODE_FORMULAS:
                    self.formula = option
                else:
                    setattr(self, {"q": "rows", "p": "page_size"}[option[0]], int(option[1:]))
            self.batch, self.seqlen, self.ragged = len(self.lengths), max(self.lengths), len(sizes) > 1
        except (ValueError, KeyError, IndexError):
            raise SystemExit(f"cell {text!r} is not decode:COUNTxKEYS[+COUNTxKEYS...][:HEADS_Q/HEADS_KV][:qROWS][:pPAGE_SIZE][:FORMULA]"
                             "[:KV_DTYPE[/KV_SCALE]], as in decode:16x8192:alibi, decode:1x100000+63x500:64/8:q8:p16 or decode:64x8192:int8/token_head")

    def key_elements(self):
        return sum(self.lengths) * self.heads_kv * (self.dim + self.dim_v)

    def bytes(self, element):
        stored = self.key_elements() * (1 if self.kv_dtype else element)
        return stored + sum(self.lengths) * self.heads_kv * 8 * (self.kv_scale == "token_head")

    def flops(self):
        return 2 * self.rows * self.key_elements() * self.heads_q // self.heads_kv

    def compares_with(self, other):
        """Whether the last column is this decode's rate relative to that of `other`."""
        same = (self.lengths, self.heads_q, self.heads_kv) == (other.lengths, other.heads_q, other.heads_kv)
        if self.kv_dtype or self.formula:
            return same and (other.page_size, other.rows, other.formula, other.kv_dtype) == (self.page_size, self.rows, None, None)
        if other.kv_dtype:
            return False
        if self.page_size:
            return same and other.page_size == 0 and other.rows == self.rows
        if other.page_size or other.rows > 1 or other.formula:
            return False
        if self.rows > 1:
            return same
        return (self.heads_q, self.heads_kv) in ((64, 8), (64, 1)) and (other.heads_q, other.heads_kv) == (8, 8) and \
            other.key_elements() == self.key_elements()

    def request(self):
        return {"op": "decode", "sq": self.rows, "lengths": self.lengths if self.ragged else None, "page_size": self.page_size,
                "kv_dtype": self.kv_dtype, "bytes": self.bytes(2)}

    def flashjit_request(self):
        shape = {"seqlen_q": self.rows, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}
        if self.page_size:
            shape["page_size"] = self.page_size
        if self.ragged:
            return {"shapes": [shape], "lengths_k": self.lengths}
        return {"shapes": [{**shape, "batch": self.batch, "seqlen_k": self.seqlen}]}


class Formula:
    """A forward or a backward with a formula: formula:NAME[:causal][:backward][:learned], batch 4, 16 heads, 8,192 keys, head_dim 128.
    learned: with the gradient of its table."""

    dim = dim_v = 128
    batch, heads_q, heads_kv, seqlen = 4, 16, 16, 8192
    mask, op, mode = "formula", "forward", "fwd"

    def __init__(self, text):
        self.name, self.pairs = text, None
        _, self.formula, *more = text.split(":")
        if self.formula not in FORMULAS or not set(more) <= {"causal", "backward", "learned"}:
            raise SystemExit(f"cell {text!r} is not formula:NAME[:causal][:backward][:learned] with a NAME of {', '.join(FORMULAS)}")
        self.causal, self.learned = "causal" in more, "learned" in more
        if "backward" in more:
            self.op, self.mode = "backward", "bwd"
        self.fields, base = FORMULAS[self.formula]
        if self.causal:
            self.fields = {**self.fields, "mask": [*self.fields.get("mask", []), "causal"]}
        if self.learned:
            self.fields = {**self.fields, "tables": {name: {**table, "grad": True} for name, table in self.fields["tables"].items()}}
        self.base = base and "formula:" + ("causal" if self.causal and base == "none" else base) + ":backward" * (self.op == "backward")
        # Each side draws masks of its own, so rates on kept pairs are compared: a side's time is scaled to all pairs.
        self.scales = self.formula == "padding" or self.formula.startswith("blocks_")
        self.density = self.formula.startswith("blocks_") and self.share_of_blocks()

    def compares_with(self, other):
        return other.name == self.base

    def share_of_blocks(self):
        """What FlexAttention's mask keeps: the blocks on the diagonal, and a share of the others."""
        share = float(self.formula.split("_")[1])
        return f"{share + (1 - share) * 128 / self.seqlen:.4f}"

    def request(self):
        return {"op": "formula", "formula": self.formula, "causal": self.causal, "learned": self.learned}

    def flashjit_request(self):
        return {"shapes": [{"batch": self.batch, "seqlen_q": self.seqlen, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}]}

    def all_flops(self):
        return (10 if self.op == "backward" else 4) * self.batch * self.heads_q * self.seqlen**2 * self.dim


class Documents:
    """Documents of 1,500 rows by a formula, with block lists: documents:PART[:causal][:bBATCH]. PART is lists (make_block_lists; the peer's
    block mask), attention (a forward with lists that are there) or whole (both). 16,384 rows, 16 heads, head_dim 128; batch 4 without more."""

    dim = dim_v = 128
    heads_q = heads_kv = 16
    seqlen, length = 16384, 1500
    mask, op, mode = "documents", "forward", "fwd"

    def __init__(self, text):
        self.name, self.batch, self.causal = text, 4, False
        try:
            _, self.part, *more = text.split(":")
            if self.part not in ("whole", "attention", "lists"):
                raise ValueError
            for option in more:
                if option == "causal":
                    self.causal = True
                elif option[0] == "b":
                    self.batch = int(option[1:])
                else:
                    raise ValueError
        except (ValueError, IndexError):
            raise SystemExit(f"cell {text!r} is not documents:whole|attention|lists[:causal][:bBATCH], as in documents:lists:b1")

    def specs(self, dtype):
        """The specs of the launches that the part has, one after the other."""
        ops = {"whole": ["make_block_lists", "forward"], "attention": ["forward"], "lists": ["make_block_lists"]}[self.part]
        masks = [{"kind": "block_sparse", "of_masks": True}, "document[key] == document[position]", *["causal"] * self.causal]
        return [{"op": op, "dtype": dtype, "head_dim": self.dim, "mask": masks,
                 "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}}} for op in ops]

    def write_table(self, path):
        """Writes the documents' numbers as a .npy file."""
        row = array.array("i", (key // self.length for key in range(self.seqlen)))
        header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({self.batch}, {self.seqlen}), }}"
        header += " " * (63 - (len(header) + 10) % 64) + "\n"
        with open(path, "wb") as file:
            file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + row.tobytes() * self.batch)

    def request(self):
        return {"op": "documents", "part": self.part, "causal": self.causal, "length": self.length}

    def flashjit_request(self):
        return {"shapes": [{"batch": self.batch, "seqlen_q": self.seqlen, "num_heads_q": self.heads_q, "num_heads_kv": self.heads_kv}]}


class Append:
    """New tokens with rotary embedding: append:BATCHxTOKENS[:HEADS_Q/HEADS_KV][:q][:pPAGE_SIZE][:KV_DTYPE[/KV_SCALE]], head_dim 128; q: Q is
    rotated in the launch. Without more it has 32/8 heads and no pages."""

    dim = dim_v = 128
    mask, causal, op, mode = "append", False, "append_kv", "fwd"

    def __init__(self, text):
        self.name, self.rotates_q, self.page_size, self.heads_q, self.heads_kv = text, False, 0, 32, 8
        self.kv_dtype = self.kv_scale = None
        try:
            _, sizes, *more = text.split(":")
            self.batch, self.seqlen = [int(x) for x in sizes.split("x")]
            for option in more:
                if option == "q":
                    self.rotates_q = True
                elif option[0] == "p":
                    self.page_size = int(option[1:])
                elif option[0].isdigit():
                    self.heads_q, self.heads_kv = [int(x) for x in option.split("/")]
                else:
                    self.kv_dtype, self.kv_scale = kv_of(option)
        except (ValueError, IndexError):
            raise SystemExit(f"cell {text!r} is not append:BATCHxTOKENS[:HEADS_Q/HEADS_KV][:q][:pPAGE_SIZE][:KV_DTYPE[/KV_SCALE]], as in "
                             "append:16x8192:q:p16 or append:64x1:fp8_e4m3/token_head")

    def bytes(self):
        stored = 2 * self.dim * (1 if self.kv_dtype else 2) + (8 if self.kv_scale == "token_head" else 0)
        of_q = self.heads_q * 2 * 2 * self.dim if self.rotates_q else 0
        return self.batch * self.seqlen * (self.heads_kv * (4 * self.dim + stored) + of_q)

    def flops(self):
        return self.bytes()

    def compares_with(self, other):
        """Whether the last column is this append's rate relative to that of `other`: with pages to the same without."""
        return bool(self.page_size) and other.page_size == 0 and self.name.replace(f":p{self.page_size}", "") == other.name

    def spec(self, dtype):
        return {"op": "append_kv", "dtype": dtype, "head_dim": self.dim, "paged": self.page_size > 0, "rotary": {"q": self.rotates_q},
                **kv_fields(self)}

    def request(self):
        return {"op": "append", "bytes": self.bytes()}

    def flashjit_request(self):
        shape = {"batch": self.batch, "seqlen_q": self.seqlen, "seqlen_k": max(self.seqlen, 16), "num_heads_q": self.heads_q,
                 "num_heads_kv": self.heads_kv}
        return {"shapes": [{**shape, "page_size": self.page_size} if self.page_size else shape]}


class Case:
    """A cell in one dtype on a number of threads."""

    def __init__(self, cell, dtype, threads, options):
        self.cell, self.dtype, self.threads = cell, dtype, threads
        self.name = cell.name if threads is None else f"{dtype} on {threads}: {cell.name}"
        # On a CPU a round takes not much longer than half a second.
        self.samples = options.samples if threads is None else max(2, min(options.samples, int(3e10 * threads / cell.flops())))


def specs_of(case, dtype, options):
    return case.cell.specs(dtype) if case.cell.mask == "documents" else [spec_of(case, dtype, options)]


def spec_of(case, dtype, options):
    cell = case.cell
    if cell.mask == "decode":
        return {"op": "decode", "dtype": dtype, "head_dim": cell.dim, "lse": False, "paged": cell.page_size > 0,
                **DECODE_FORMULAS.get(cell.formula, {}), **kv_fields(cell)}
    if cell.mask == "append":
        return cell.spec(dtype)
    if cell.mask == "formula":
        return {"op": cell.op, "dtype": dtype, "head_dim": cell.dim, **cell.fields}
    return {"op": cell.op, "dtype": dtype, "head_dim": cell.dim, "head_dim_v": cell.dim_v, "mask": MASKS[cell.mask], "lse": True,
            "dropout": options.dropout is not None}


def rows_of(cases, visits, options):
    """Medians of the rounds in the form of `flashjit bench --json`, for `flashjit bench --svg FILE --baseline`: a row for each side, state
    and case. Only full and causal attention have rows, because Cell counts the operations of no other mask."""
    times = {}
    for visit in visits:
        for side, ms in visit["ms"].items():
            if ms:
                times.setdefault((visit["cell"], side, visit["state"]), []).append(ms)
    rows = []
    for case in cases:
        for (name, side, state), of in times.items():
            if name == case.name and case.cell.mask in ("full", "causal"):
                dtype = "fp16" if side == "fp16" else case.dtype
                where = f", {STATES[state].lower()}" if state else f", threads: {case.threads}"
                rows.append({"name": side + where, "spec": spec_of(case, dtype, options), "batch": case.cell.batch,
                             "seqlen_q": case.cell.seqlen, "tflops": case.cell.tflops(statistics.median(of))})
    return rows


class Process:
    """A process that keeps running and answers a line of JSON with lines of JSON."""

    def __init__(self, what, command):
        self.what, self.process = what, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request):
        with contextlib.suppress(BrokenPipeError):  # answer() reports how it ended
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.what} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Peer:
    def __init__(self, name, process, options):
        self.name, self.process, self.dropout, self.version = name, process, options.dropout, ""
        self.failed = set()  # cells whose failure was printed

    def visit(self, case):
        """Milliseconds of a launch; None if the peer cannot run the case."""
        cell = case.cell
        request = dict(d=cell.dim, dv=cell.dim_v, s=cell.seqlen, b=cell.batch, hq=cell.heads_q, hk=cell.heads_kv,
                       peers=[self.name], modes=[cell.mode], **cell.request())
        if cell.mask in ("decode", "append"):
            request["samples"] = case.samples
        if self.dropout is not None:
            request["p"] = self.dropout
        if case.threads is not None:
            request.update(dtype=case.dtype, mask=cell.mask, threads=case.threads, samples=case.samples)
        self.process.ask(request)
        row = self.process.answer()
        while row.get("section") != "serve" or (row.get("mode", cell.mode) != cell.mode and "error" not in row):
            row = self.process.answer()
        self.version = row.get("version", "")
        if "error" in row and case.name not in self.failed:
            self.failed.add(case.name)
            print(f"{case.name}: {self.name}: {row['error']}", file=sys.stderr)
        return row.get("ms")


class Flashjit:
    """A process for each number of threads."""

    def __init__(self, name, options, dtype=None):
        self.name, self.options, self.dtype, self.processes = name, options, dtype, {}
        self.tables = tempfile.TemporaryDirectory()
        self.model = self.target = ""

    def visit(self, case):
        options, cell = self.options, case.cell
        density = getattr(cell, "density", None)
        place = (case.threads, cell.batch if cell.mask == "documents" else 0, density)
        if place not in self.processes:
            command = [options.flashjit, "bench", "--serve", "--device", options.device, *MASK_OPTIONS]
            if case.threads is not None:
                command += ["--num-threads", str(case.threads)]
            if options.dropout is not None:
                command += ["--dropout-p", str(options.dropout)]
            if cell.mask == "decode" and case.threads is None and options.kv_layout == "heads_first":
                command.append("--heads-first")
            if options.target:
                command += ["--target", options.target]
            if density:
                command[command.index("--density") + 1] = density
            if cell.mask == "documents":
                table = os.path.join(self.tables.name, f"document_{cell.batch}.npy")
                cell.write_table(table)
                command += ["--named", f"document={table}"]
            self.processes[place] = Process("flashjit", command)
        process, ms = self.processes[place], 0
        for spec in specs_of(case, self.dtype or case.dtype, options):
            process.ask({"spec": spec, "rounds": case.samples, **cell.flashjit_request()})
            answer = process.answer()
            if "error" in answer:
                raise SystemExit(f"{case.name}: flashjit: {answer['error']['message']}")
            self.model, self.target = answer["model"], answer["target"]
            row = answer["rows"][0]
            ms += row["ms"]
        if cell.mask == "formula":
            if cell.scales:
                ms = cell.all_flops() / row["tflops"] * 1e-9
            cell.pairs = row["tflops"] * ms  # of the tables that it drew, in an arbitrary unit
        return ms

    def close(self):
        for process in self.processes.values():
            process.close()
        self.tables.cleanup()


def measure(cases, sides, states, rounds, minutes):
    """Visits each side in every case, state and round. Returns {round, state, cell, order, ms: {side: milliseconds or
    None}} for each visit. Runs whole rounds only: at least one, and as many as fit `minutes`."""
    started = time.monotonic()
    orders = list(itertools.permutations(sides))

    def progress(text):
        print(f"{time.monotonic() - started:.0f} s: {text}", file=sys.stderr, flush=True)

    def visit(case, order, state):
        ms = {}
        for side in order:
            if state == "rest":
                time.sleep(REST_SECONDS)
            ms[side.name] = side.visit(case)
        return ms

    progress("first visits")
    for case in cases:
        for side in sides:
            progress(f"first visit of {case.name}, {side.name}")
            side.visit(case)
    visits = []
    for number in range(rounds):
        round_started = time.monotonic()
        for state in states:
            progress(f"round {number + 1} of {rounds}{', ' + state if state else ''}")
            for index in range(-HEATING if state == "sustained" else 0, len(cases)):
                case, order = cases[index % len(cases)], orders[(number + index) % len(orders)]
                ms = visit(case, order, state)
                if index >= 0:
                    visits.append({"round": number, "state": state, "cell": case.name, "order": [side.name for side in order], "ms": ms})
        now = time.monotonic()
        if minutes is not None and now - started + (now - round_started) > 60 * minutes:
            break
    progress("measured")
    return visits


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values))


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


class Table:
    """A table of the visits in one state, with a row for each case."""

    def __init__(self, options, visits):
        self.options, self.ratios, self.unit = options, {}, "TFLOP/s"
        self.of = {}
        for visit in visits:
            self.of.setdefault(visit["cell"], []).append(visit["ms"])
        self.cases = []

    def amount(self, case, ms):
        if case.cell.mask == "append":
            return f"{case.cell.bytes() / ms * 1e-9:.2f}"
        if case.cell.mask == "decode":
            return f"{case.cell.bytes(4 if case.dtype == 'fp32' else 2) / ms * 1e-9:.{4 if case.threads else 2}f}"
        return f"{ms:.3g}" if self.unit == "ms" else f"{case.cell.tflops(ms):.0f}"

    def print(self, cases):
        options, self.cases = self.options, cases
        mask = cases[0].cell.mask
        self.unit = "TB/s" if mask in ("decode", "append") else "ms" if cases[0].threads or mask in ("formula", "documents") else "TFLOP/s"
        columns = [("" if cases[0].threads is None else "dtype on threads: ") + (mask if mask in RELATIVE else "head_dim:seqlen:mask"),
                   f"flashjit {self.unit}"]
        for name in options.peers:
            columns += [f"{name} {self.unit}", f"flashjit / {name}"]
        columns += ["flashjit / best peer"] * self.ranks() + ["fp16 / bf16"] * options.fp16 + ["relative to"] * (mask in RELATIVE)
        print("| " + " | ".join(columns) + " |")
        print("|" + " --- |" * len(columns))
        for case in cases:
            print("| " + " | ".join(self.row(case)) + " |")
        for name, values in self.ratios.items():
            print(f"\n{len(values)} cells against {name}: geometric mean {geometric_mean(values):.3f}, worst {min(values):.3f}")

    def ranks(self):
        return len([name for name in self.options.peers if name not in YARDSTICKS]) > 1

    def relative(self, case):
        for other in self.cases:
            if (other.dtype, other.threads) == (case.dtype, case.threads) and case.cell.compares_with(other.cell):
                kept = case.cell.pairs / other.cell.pairs if case.cell.mask == "formula" else 1
                return spread([kept * theirs["flashjit"] / ours["flashjit"]
                               for ours, theirs in zip(self.of[case.name], self.of[other.name])]) + f" {other.cell.name}"
        return "-"

    def row(self, case):
        cell, rounds = case.cell, self.of[case.name]
        row = [case.name, self.amount(case, statistics.median(ms["flashjit"] for ms in rounds))]
        medians, ratios = {}, {}
        for name in self.options.peers:
            both = [(ms[name], ms["flashjit"]) for ms in rounds if ms[name]]
            if not both:
                row += ["-", "-"]
                continue
            medians[name] = statistics.median(peer for peer, _ in both)
            of_rounds = [peer / ours for peer, ours in both]
            ratios[name] = statistics.median(of_rounds)
            row += [self.amount(case, medians[name]), spread(of_rounds)]
            kind = cell.mask if cell.mask in RELATIVE else "full and causal" if cell.mask in ("full", "causal") else "other masks"
            kind = "backward, " * (cell.op == "backward") + kind
            group = name if case.threads is None else f"{name}, {case.dtype} on {case.threads}, {kind}"
            self.ratios.setdefault(group, []).append(ratios[name])
        if self.ranks():
            best = min((name for name in medians if name not in YARDSTICKS), key=medians.get, default=None)
            row.append(f"{ratios[best]:.3f} {best}" if best else "-")
            if best:
                self.ratios.setdefault("the best peer", []).append(ratios[best])
        if self.options.fp16:
            row.append(spread([ms["flashjit"] / ms["fp16"] for ms in rounds]))
        if cell.mask in RELATIVE:
            row.append(self.relative(case))
        return row


def default_peers(options, on_cpu):
    if on_cpu:
        return ["sdpa"]
    if options.decode:
        return ["read", "cudnn", "fa2"]
    if options.op in ("formula", "documents"):
        return ["flex"]
    if options.op == "append":
        return ["copy"]
    if options.op == "backward":  # the peer of the same instructions; FlashAttention-3 has wgmma, but no dropout
        return ["cudnn"] if options.dropout is not None else ["fa3"] if options.target in (None, "sm_90a") else ["fa2"]
    return ["cudnn", "fa3"] if options.dropout is None else ["cudnn", "fa2"]


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", metavar="PEERS", help="the peers' script")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch [this one]")
    parser.add_argument("--flashjit", default="build/release/bin/flashjit", help="the command [%(default)s]")
    parser.add_argument("--device", default="cuda:0", help="[%(default)s]")
    parser.add_argument("--target", help="[the device's best]")
    parser.add_argument("--peers", nargs="+", help="[cudnn fa3, with dropout cudnn fa2; of decode read cudnn fa2; of formulas and documents flex; of append copy; of backward fa3, for "
                                                  "--target sm_90 fa2, with dropout cudnn; on a CPU sdpa]")
    parser.add_argument("--cells", nargs="+", metavar="[backward:]HEAD_DIM[/HEAD_DIM_V]:SEQLEN:MASK[:HEADS_Q[/HEADS_KV]]",
                        help="or grid: 36 cells; backward: 4 cells, backward_grid: 36 cells, backward_dims: 8 cells, backward_gqa: 6 cells; decode: 15 cells of decode; decode_formulas; decode_8bit: 20 cells; formulas: 14 cells, formulas_backward: 11 cells; documents: 6 cells; append: 9 cells; on a CPU grid: 24 cells, masks: those that PyTorch has no flag for, "
                             "backward: 16 cells, backward_masks "
                             "[128:8192:full 128:8192:causal 64:8192:full 64:8192:causal; on a CPU grid masks]")
    parser.add_argument("--states", nargs="+", choices=list(STATES), help="of a GPU [rest sustained]")
    parser.add_argument("--threads", type=int, nargs="+", help="on a CPU, of both sides [1 2]")
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp16", "fp32"], help="on a CPU, of both sides [bf16 fp32]")
    parser.add_argument("--tokens", type=int, default=16384, help="on a GPU batch times seqlen [%(default)s]")
    parser.add_argument("--rounds", type=int, help="a multiple of the orders: 2 with one peer, 6 with two, 24 with three [6 or 24]")
    parser.add_argument("--minutes", type=float, help="as many whole rounds as there is time for, first visits included")
    parser.add_argument("--samples", type=int, help="milliseconds of flashjit in a visit, as long as the peers take; on a CPU samples of "
                                                    "both sides, fewer of long ones [40; on a CPU 25]")
    parser.add_argument("--kv-layout", choices=["heads_first", "seqlen_first"], default="heads_first",
                        help="of flashjit's K and V in decode on a GPU; the peers' is heads_first [%(default)s]")
    parser.add_argument("--dropout", type=float, metavar="P", help="with dropout of that probability on both sides")
    parser.add_argument("--fp16", action="store_true", help="on a GPU measure flashjit in fp16 too, a side more")
    parser.add_argument("--json", metavar="FILE", help="write every visit there, and the medians as rows that flashjit bench --baseline draws")
    options = parser.parse_args(arguments)
    on_cpu = options.device == "cpu"
    if on_cpu and (options.fp16 or options.states):
        raise SystemExit("--fp16 and --states are for GPUs: on a CPU give --dtypes fp16")
    if not on_cpu and (options.threads or options.dtypes):
        raise SystemExit("--threads and --dtypes are for --device cpu")
    ops = {next((op for op in ("decode", "backward", "formula", "documents", "append") if name.startswith(op)), "forward") for name in options.cells or [""]}
    if len(ops) > 1:
        raise SystemExit(f"cells of {' and '.join(sorted(ops))} have a table each: give those of one operation")
    options.op = ops.pop()
    options.decode = options.op == "decode"
    if options.op in ("decode", "formula", "documents", "append") and (options.dropout is not None or options.fp16):
        raise SystemExit(f"cells of {options.op} have no dropout and no --fp16")
    if on_cpu and options.op in ("formula", "documents", "append"):
        raise SystemExit(f"cells of {options.op} are for GPUs")
    options.peers = options.peers or default_peers(options, on_cpu)
    options.samples = options.samples or (25 if on_cpu else 40)
    orders = math.factorial(1 + options.fp16 + len(options.peers))
    options.rounds = options.rounds or orders * -(-6 // orders)
    if options.rounds % orders:
        raise SystemExit(f"--rounds {options.rounds}: {orders} orders take turns, so that a multiple of {orders} is needed")
    return options


def main(arguments=None):
    options = parse(arguments)
    on_cpu = options.device == "cpu"
    names = options.cells or (["grid", "masks"] if on_cpu else ["128:8192:full", "128:8192:causal", "64:8192:full", "64:8192:causal"])
    sets = CPU_CELLS if on_cpu else GPU_CELLS
    kinds = {"decode": Decode, "formula": Formula, "documents": Documents, "append": Append}
    cells = [kinds[options.op](text) if options.op in kinds else Cell(text, None if on_cpu else options.tokens)
             for name in names for text in sets.get(name, [name])]
    if on_cpu:
        cases = [Case(cell, dtype, threads, options)
                 for threads in options.threads or [1, 2] for dtype in options.dtypes or ["bf16", "fp32"] for cell in cells]
    else:
        cases = [Case(cell, "bf16", None, options) for cell in cells]
    states = [None] if on_cpu else options.states or list(STATES)

    process = Process("the peers", [options.python, options.script, "serve"])
    ours = [Flashjit("flashjit", options)] + [Flashjit("fp16", options, "fp16")] * options.fp16
    peers = [Peer(name, process, options) for name in options.peers]
    try:
        visits = measure(cases, ours + peers, states, options.rounds, options.minutes)
    finally:
        for open_process in (process, *ours):
            open_process.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"model": ours[0].model, "target": ours[0].target, "tokens": options.tokens, "visits": visits,
                       "rows": rows_of(cases, visits, options)}, file, indent=1)

    dropout = "" if options.dropout is None else f" with dropout {options.dropout}"
    if options.decode:
        problem = (f"{peers[0].version}; decode" if on_cpu else "bf16 decode") + ", head_dim 128, TB/s of K and V"
    elif options.op == "append":
        problem = "bf16 append with rotary, head_dim 128, TB/s read and written"
    elif options.op == "documents":
        problem = (f"{peers[0].version}; bf16 forward within documents of {Documents.length} rows with lists of blocks, 16,384 rows, "
                   "16 heads, head_dim 128, milliseconds")
    elif options.op == "formula":
        problem = f"{peers[0].version}; bf16 forward with formulas, batch 4, 16 heads, 8,192 keys, head_dim 128, milliseconds"
    else:
        problem = f"{peers[0].version}; {options.op}{dropout}, batch * heads 8, milliseconds" if on_cpu else \
            f"bf16 {options.op}{dropout}, {options.tokens} tokens or one sequence"
    print(f"{ours[0].model}, {ours[0].target}; {problem}; medians of {visits[-1]['round'] + 1} rounds in {math.factorial(len(ours + peers))} "
          "orders; speed relative to a peer with the range of the rounds\n")
    for state in states:
        if state:
            print(f"{STATES[state]}:\n")
        Table(options, [visit for visit in visits if visit["state"] == state]).print(cases)
        print()


if __name__ == "__main__":
    main()
