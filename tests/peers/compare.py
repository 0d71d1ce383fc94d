#!/usr/bin/env python3
"""Measures `flashjit bench` and the attention kernels of PyTorch in turns, in one job on one GPU, and prints the ratios.

    compare.py PEERS [--flashjit build/release/bin/flashjit] [--cells 128:8192:full 64:8192:causal ...]

PEERS is a script that answers JSON requests, one a line on standard input, with one JSON row per peer and mode:
    {"d": 128, "s": 8192, "causal": true, "b": 2, "hq": 16, "hk": 16, "peers": ["fa2"], "modes": ["fwd"]}
       (with "p": 0.1 for dropout)
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


class Cell:
    """HEAD_DIM[/HEAD_DIM_V]:SEQLEN:MASK[:HEADS_Q[/HEADS_KV]]; heads are 2048 / head_dim unless given."""

    def __init__(self, text, tokens):
        try:
            dims, seqlen, mask, *heads = text.split(":")
            self.dim, self.dim_v = [int(x) for x in (dims.split("/") * 2)[:2]]
            self.seqlen, self.causal = int(seqlen), {"full": False, "causal": True}[mask]
            heads_q, heads_kv = [int(x) for x in (heads[0].split("/") * 2)[:2]] if heads else [max(1, 2048 // self.dim)] * 2
            if len(heads) > 1:
                raise ValueError
        except (ValueError, KeyError):
            raise SystemExit(f"cell {text!r} is not HEAD_DIM[/HEAD_DIM_V]:SEQLEN:full|causal[:HEADS_Q[/HEADS_KV]], as in "
                             "128:8192:causal or 192/128:2048:full:64/8")
        self.name = text
        self.batch, self.heads_q, self.heads_kv = max(1, tokens // self.seqlen), heads_q, heads_kv

    def tflops(self, ms):
        pairs = self.batch * self.heads_q * self.seqlen**2 * (0.5 if self.causal else 1)
        return 2 * pairs * (self.dim + self.dim_v) / ms * 1e-9


class Peers:
    """A process that stays: loading PyTorch takes longer than measuring."""

    def __init__(self, python, script, names, dropout):
        self.names, self.dropout = names, dropout
        self.process = subprocess.Popen([python, script, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def row(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peers' process ended with exit code {self.process.wait()}")
        return json.loads(line)

    def measure(self, cell):
        request = dict(d=cell.dim, dv=cell.dim_v, s=cell.seqlen, causal=cell.causal, b=cell.batch, hq=cell.heads_q,
                       hk=cell.heads_kv, peers=self.names, modes=["fwd"])
        if self.dropout is not None:
            request["p"] = self.dropout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ms = {}
        while len(ms) < len(self.names):
            row = self.row()
            if row.get("section") == "serve":
                if "error" in row:
                    print(f"{cell.name}: {row['peer']}: {row['error']}", file=sys.stderr)
                ms[row["peer"]] = row.get("ms")
        return ms

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure_flashjit(options, cell, dtype):
    spec = {"op": "forward", "dtype": dtype, "head_dim": cell.dim, "head_dim_v": cell.dim_v, "mask": ["causal"] if cell.causal else [],
            "lse": True, "dropout": options.dropout is not None}
    command = [options.flashjit, "bench", json.dumps(spec), "--device", options.device, "--seqlens", str(cell.seqlen), "--batch",
               str(cell.batch), "--heads-q", str(cell.heads_q), "--heads-kv", str(cell.heads_kv), "--rounds", str(options.samples),
               "--json"]
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
    parser.add_argument("--peers", nargs="+", default=["fa2", "cudnn"], help="[fa2 cudnn]")
    parser.add_argument("--cells", nargs="+", metavar="HEAD_DIM[/HEAD_DIM_V]:SEQLEN:MASK[:HEADS_Q[/HEADS_KV]]",
                        default=["128:8192:full", "128:8192:causal", "64:8192:full", "64:8192:causal"],
                        help="or grid: the 36 cells of recorded.json [%(default)s]")
    parser.add_argument("--tokens", type=int, default=16384, help="batch times seqlen [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--samples", type=int, default=25, help="of flashjit in a round, 1 to 2 ms each, as long as the peers take [%(default)s]")
    parser.add_argument("--dropout", type=float, metavar="P", help="with dropout of that probability on both sides")
    parser.add_argument("--fp16", action="store_true", help="measure flashjit in fp16 too")
    parser.add_argument("--json", metavar="FILE", help="write every round's times there")
    options = parser.parse_args()

    with open(RECORDED) as file:
        recorded = json.load(file)["fa3_and_cudnn_tflops"]
    names = [name for name in recorded if name.count(":") == 2] if options.cells == ["grid"] else options.cells
    cells = [Cell(text, options.tokens) for text in names]
    dtypes = ["bf16", "fp16"] if options.fp16 else ["bf16"]
    peers = Peers(options.python, options.script, options.peers, options.dropout)
    times = {cell.name: {name: [] for name in [*dtypes, *options.peers]} for cell in cells}
    for round_number in range(options.rounds):
        for cell in cells:
            print(f"\rround {round_number + 1} of {options.rounds}: {cell.name}    ", end="", file=sys.stderr, flush=True)
            for name, ms in peers.measure(cell).items():
                times[cell.name][name].append(ms)
            for dtype in dtypes:
                answer, ms = measure_flashjit(options, cell, dtype)
                times[cell.name][dtype].append(ms)
    peers.close()
    print(file=sys.stderr)

    dropout = "" if options.dropout is None else f" with dropout {options.dropout}"
    print(f"{answer['model']}, {answer['target']}; bf16 forward{dropout}, {options.tokens} tokens or one sequence; medians of {options.rounds} rounds; "
          "speed relative to a peer with the range of the rounds. Best peer: the faster of cuDNN here and of FlashAttention-3, taken as "
          "cuDNN here times FlashAttention-3 / cuDNN as recorded for the cell\n")
    columns = ["head_dim:seqlen:mask", "flashjit TFLOP/s"]
    for name in options.peers:
        columns += [f"{name} TFLOP/s", f"flashjit / {name}"]
    with_best = options.dropout is None and "cudnn" in options.peers and any(cell.name in recorded for cell in cells)
    columns += ["flashjit / best peer"] * with_best + ["fp16 / bf16"] * options.fp16
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    ratios = {}
    for cell in cells:
        of = times[cell.name]
        row = [cell.name, f"{cell.tflops(statistics.median(of['bf16'])):.0f}"]
        for name in options.peers:
            pairs = [(a, b) for a, b in zip(of["bf16"], of[name]) if b]
            if pairs:
                row += [f"{cell.tflops(statistics.median(b for _, b in pairs)):.0f}", spread([b / a for a, b in pairs])]
                ratios.setdefault(name, []).append(statistics.median(b / a for a, b in pairs))
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
