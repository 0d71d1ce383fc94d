#!/usr/bin/env python3
"""Measures `flashjit bench` and the attention kernels of PyTorch in turns, in one job on one device, and prints the ratios.

    compare.py PEERS [--flashjit build/release/bin/flashjit] [--cells 128:8192:full 64:8192:causal ...]
    compare.py cpu_peers.py --device cpu [--threads 1 2] [--dtypes bf16 fp32] [--cells grid masks]

PEERS is a script that answers JSON requests, one a line on standard input, with one JSON row per peer and mode:
    {"d": 128, "dv": 128, "s": 8192, "causal": true, "b": 2, "hq": 16, "hk": 16, "peers": ["fa2"], "modes": ["fwd"]}
       (with "p": 0.1 for dropout; on a CPU with "dtype": "bf16", "mask": "window", "threads": 2, "samples": 25)
    -> {"section": "serve", "peer": "fa2", "mode": "fwd", "ms": 2.1, ...}    or    {..., "error": "why"}

Against FlashAttention-3, which PyTorch does not hold, cells of recorded.json have its speed relative to cuDNN as measured elsewhere.
Clocks fall as a card warms, so rounds alternate and every ratio is of two neighbours; the table has the median of the rounds
and their range. Above 1: flashjit is faster. Needs Python's standard library only (PEERS may need more).
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys


RECORDED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "recorded.json")

# Of the spec, and what the bench needs to make data for it. The last three, on a CPU: PyTorch has no flag for them.
MASKS = {
    "full": ([], []),
    "causal": (["causal"], []),
    "padding": (["padding"], []),
    "window": (["sliding_window"], ["--window-left", "1023"]),
    "blocks": ([{"kind": "block_sparse", "block_m": 128, "block_n": 128}], ["--density", "0.2", "--partial", "0"]),
}
CPU_GRID = [f"{dim}:{seqlen}:{mask}" for dim in (64, 80, 128) for mask in ("full", "causal") for seqlen in (128, 512, 1024, 4096)]
CPU_MASKS = [f"128:4096:{mask}" for mask in ("padding", "window", "blocks")]


class Cell:
    """HEAD_DIM[/HEAD_DIM_V]:SEQLEN:MASK[:HEADS_Q[/HEADS_KV]]. Heads are 2048 / head_dim unless given; on a CPU, where `tokens` is
    None, batch * heads is 8."""

    def __init__(self, text, tokens):
        cpu = tokens is None
        try:
            dims, seqlen, self.mask, *heads = text.split(":")
            self.dim, self.dim_v = [int(x) for x in (dims.split("/") * 2)[:2]]
            self.seqlen, self.causal = int(seqlen), self.mask == "causal"
            if len(heads) > 1 or self.mask not in (MASKS if cpu else ("full", "causal")):
                raise ValueError
            self.batch = 1 if cpu else max(1, tokens // self.seqlen)
            self.heads_q = self.heads_kv = 8 if cpu else max(1, 2048 // self.dim)
            if cpu and self.mask == "padding":  # of different lengths
                self.batch, self.heads_q, self.heads_kv = 4, 2, 2
            if heads:
                self.heads_q, self.heads_kv = [int(x) for x in (heads[0].split("/") * 2)[:2]]
        except ValueError:
            raise SystemExit(f"cell {text!r} is not HEAD_DIM[/HEAD_DIM_V]:SEQLEN:full|causal[:HEADS_Q[/HEADS_KV]], as in "
                             "128:8192:causal or 192/128:2048:full:64/8; masks on a CPU are also padding, window and blocks")
        self.name = text

    def flops(self):
        pairs = self.batch * self.heads_q * self.seqlen**2 * (0.5 if self.causal else 1)
        return 2 * pairs * (self.dim + self.dim_v)

    def tflops(self, ms):
        return self.flops() / ms * 1e-9


class Case:
    """A cell in one dtype on so many threads."""

    def __init__(self, cell, dtype, threads, options):
        self.cell, self.dtype, self.threads = cell, dtype, threads
        self.name = cell.name if threads is None else f"{dtype} on {threads}: {cell.name}"
        # On a CPU not much longer than half a second a round.
        self.samples = options.samples if threads is None else max(2, min(options.samples, int(3e10 * threads / cell.flops())))


class Peers:
    """A process that stays: loading PyTorch takes longer than measuring."""

    def __init__(self, python, script, names, dropout):
        self.names, self.dropout, self.version = names, dropout, ""
        self.process = subprocess.Popen([python, script, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def row(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peers' process ended with exit code {self.process.wait()}")
        return json.loads(line)

    def measure(self, case):
        cell = case.cell
        request = dict(d=cell.dim, dv=cell.dim_v, s=cell.seqlen, causal=cell.causal, b=cell.batch, hq=cell.heads_q,
                       hk=cell.heads_kv, peers=self.names, modes=["fwd"])
        if self.dropout is not None:
            request["p"] = self.dropout
        if case.threads is not None:
            request.update(dtype=case.dtype, mask=cell.mask, threads=case.threads, samples=case.samples)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ms = {}
        while len(ms) < len(self.names):
            row = self.row()
            if row.get("section") == "serve":
                if "error" in row:
                    print(f"{case.name}: {row['peer']}: {row['error']}", file=sys.stderr)
                self.version = row.get("version", "")
                ms[row["peer"]] = row.get("ms")
        return ms

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure_flashjit(options, case, dtype):
    cell = case.cell
    mask, mask_options = MASKS[cell.mask]
    spec = {"op": "forward", "dtype": dtype, "head_dim": cell.dim, "head_dim_v": cell.dim_v, "mask": mask, "lse": True,
            "dropout": options.dropout is not None}
    command = [options.flashjit, "bench", json.dumps(spec), "--device", options.device, "--seqlens", str(cell.seqlen), "--batch",
               str(cell.batch), "--heads-q", str(cell.heads_q), "--heads-kv", str(cell.heads_kv), "--rounds", str(case.samples),
               "--json", *mask_options]
    if case.threads is not None:
        command += ["--num-threads", str(case.threads)]
    if options.dropout is not None:
        command += ["--dropout-p", str(options.dropout)]
    if options.target:
        command += ["--target", options.target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}")
    answer = json.loads(done.stdout)
    return answer, answer["rows"][0]["ms"]


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values))


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", metavar="PEERS", help="the peers' script")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch [this one]")
    parser.add_argument("--flashjit", default="build/release/bin/flashjit", help="the command [%(default)s]")
    parser.add_argument("--device", default="cuda:0", help="[%(default)s]")
    parser.add_argument("--target", help="[the device's best]")
    parser.add_argument("--peers", nargs="+", help="[fa2 cudnn; on a CPU sdpa]")
    parser.add_argument("--cells", nargs="+", metavar="HEAD_DIM[/HEAD_DIM_V]:SEQLEN:MASK[:HEADS_Q[/HEADS_KV]]",
                        help="or grid: the 36 cells of recorded.json; on a CPU grid: 24 cells, masks: those that PyTorch has no flag for "
                             "[128:8192:full 128:8192:causal 64:8192:full 64:8192:causal; on a CPU grid masks]")
    parser.add_argument("--threads", type=int, nargs="+", help="on a CPU, of both sides [1 2]")
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp16", "fp32"], help="on a CPU, of both sides [bf16 fp32]")
    parser.add_argument("--tokens", type=int, default=16384, help="on a GPU batch times seqlen [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--samples", type=int, default=25, help="of flashjit in a round, 1 to 2 ms each, as long as the peers take; on a CPU of both sides, fewer of long ones [%(default)s]")
    parser.add_argument("--dropout", type=float, metavar="P", help="with dropout of that probability on both sides")
    parser.add_argument("--fp16", action="store_true", help="on a GPU measure flashjit in fp16 too")
    parser.add_argument("--json", metavar="FILE", help="write every round's times there")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    if on_cpu and options.fp16:
        raise SystemExit("--fp16 is for GPUs: give --dtypes fp16")
    if not on_cpu and (options.threads or options.dtypes):
        raise SystemExit("--threads and --dtypes are for --device cpu")
    options.peers = options.peers or (["sdpa"] if on_cpu else ["fa2", "cudnn"])

    with open(RECORDED) as file:
        recorded = {} if on_cpu else json.load(file)["fa3_and_cudnn_tflops"]
    grids = {"grid": CPU_GRID, "masks": CPU_MASKS} if on_cpu else {"grid": [name for name in recorded if name.count(":") == 2]}
    names = options.cells or (["grid", "masks"] if on_cpu else ["128:8192:full", "128:8192:causal", "64:8192:full", "64:8192:causal"])
    cells = [Cell(text, None if on_cpu else options.tokens) for name in names for text in grids.get(name, [name])]
    if on_cpu:
        cases = [Case(cell, dtype, threads, options)
                 for threads in options.threads or [1, 2] for dtype in options.dtypes or ["bf16", "fp32"] for cell in cells]
    else:
        cases = [Case(cell, "bf16", None, options) for cell in cells]
    extra = ["fp16"] * options.fp16
    peers = Peers(options.python, options.script, options.peers, options.dropout)
    times = {case.name: {name: [] for name in [case.dtype, *extra, *options.peers]} for case in cases}
    for round_number in range(options.rounds):
        for case in cases:
            print(f"\rround {round_number + 1} of {options.rounds}: {case.name}    ", end="", file=sys.stderr, flush=True)
            for name, ms in peers.measure(case).items():
                times[case.name][name].append(ms)
            for dtype in [case.dtype, *extra]:
                answer, ms = measure_flashjit(options, case, dtype)
                times[case.name][dtype].append(ms)
    peers.close()
    print(file=sys.stderr)

    dropout = "" if options.dropout is None else f" with dropout {options.dropout}"
    print(f"{answer['model']}, {answer['target']}; ", end="")
    if on_cpu:
        print(f"{peers.version}; forward{dropout}, batch * heads 8, milliseconds; medians of {options.rounds} rounds; speed relative to a peer "
              "with the range of the rounds\n")
    else:
        print(f"bf16 forward{dropout}, {options.tokens} tokens or one sequence; medians of {options.rounds} rounds; "
              "speed relative to a peer with the range of the rounds. Best peer: the faster of cuDNN here and of FlashAttention-3, taken as "
              "cuDNN here times FlashAttention-3 / cuDNN as recorded for the cell\n")
    unit = "ms" if on_cpu else "TFLOP/s"
    amount = (lambda cell, ms: f"{ms:.3g}") if on_cpu else (lambda cell, ms: f"{cell.tflops(ms):.0f}")
    columns = [("dtype on threads: " if on_cpu else "") + "head_dim:seqlen:mask", f"flashjit {unit}"]
    for name in options.peers:
        columns += [f"{name} {unit}", f"flashjit / {name}"]
    with_best = options.dropout is None and "cudnn" in options.peers and any(cell.name in recorded for cell in cells)
    columns += ["flashjit / best peer"] * with_best + ["fp16 / bf16"] * options.fp16
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    ratios = {}
    for case in cases:
        cell, of = case.cell, times[case.name]
        ours = of[case.dtype]
        row = [case.name, amount(cell, statistics.median(ours))]
        for name in options.peers:
            pairs = [(a, b) for a, b in zip(ours, of[name]) if b]
            if pairs:
                row += [amount(cell, statistics.median(b for _, b in pairs)), spread([b / a for a, b in pairs])]
                group = name if case.threads is None else \
                    f"{name}, {case.dtype} on {case.threads}, {'full and causal' if cell.mask in ('full', 'causal') else 'other masks'}"
                ratios.setdefault(group, []).append(statistics.median(b / a for a, b in pairs))
            else:
                row += ["-", "-"]
        if with_best:
            ratio = best_peer_ratio(of, recorded.get(cell.name))
            row.append(f"{ratio:.3f}" if ratio else "-")
            if ratio:
                ratios.setdefault("best peer", []).append(ratio)
        if options.fp16:
            row.append(spread([a / b for a, b in zip(of["bf16"], of["fp16"])]))
        print("| " + " | ".join(row) + " |")
    for name, values in ratios.items():
        print(f"\n{len(values)} cells against {name}: geometric mean {geometric_mean(values):.3f}, worst {min(values):.3f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"model": answer["model"], "target": answer["target"], "ms": times}, file, indent=1)


def best_peer_ratio(of, record):
    pairs = [(a, b) for a, b in zip(of["bf16"], of["cudnn"]) if b]
    if not record or not pairs:
        return None
    fa3, cudnn = record
    return statistics.median(b / a for a, b in pairs) / max(1.0, fa3 / cudnn)


if __name__ == "__main__":
    main()
