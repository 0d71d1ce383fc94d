#!/usr/bin/env python3
"""Measures `flashjit bench` and the attention kernels of PyTorch in turns, in one job on one GPU, and prints the ratios.

    compare.py PEERS [--flashjit build/release/bin/flashjit] [--cells 128:8192:full 64:8192:causal ...]

PEERS is a script that answers JSON requests, one a line on standard input, with one JSON row per peer and mode:
    {"d": 128, "s": 8192, "causal": true, "b": 2, "hq": 16, "hk": 16, "peers": ["fa2"], "modes": ["fwd"]}
    -> {"section": "serve", "peer": "fa2", "mode": "fwd", "ms": 2.1, ...}    or    {..., "error": "why"}

Clocks fall as a card warms, so rounds alternate and every ratio is of two neighbours; the table has the median of the rounds
and their range. Above 1: flashjit is faster. Needs Python's standard library only (PEERS may need more).
"""
import argparse
import json
import statistics
import subprocess
import sys


class Cell:
    def __init__(self, text, tokens):
        try:
            dim, seqlen, mask = text.split(":")
            self.dim, self.seqlen, self.causal = int(dim), int(seqlen), {"full": False, "causal": True}[mask]
        except (ValueError, KeyError):
            raise SystemExit(f"cell {text!r} is not head_dim:seqlen:full or head_dim:seqlen:causal, as in 128:8192:causal")
        self.name = text
        self.batch, self.heads = max(1, tokens // self.seqlen), max(1, 2048 // self.dim)

    def tflops(self, ms):
        pairs = self.batch * self.heads * self.seqlen**2 * (0.5 if self.causal else 1)
        return 4 * pairs * self.dim / ms * 1e-9


class Peers:
    """A process that stays: loading PyTorch takes longer than measuring."""

    def __init__(self, python, script, names):
        self.names = names
        self.process = subprocess.Popen([python, script, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def row(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peers' process ended with exit code {self.process.wait()}")
        return json.loads(line)

    def measure(self, cell):
        request = dict(d=cell.dim, s=cell.seqlen, causal=cell.causal, b=cell.batch, hq=cell.heads, hk=cell.heads,
                       peers=self.names, modes=["fwd"])
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


def measure_flashjit(options, cell):
    spec = {"op": "forward", "dtype": "bf16", "head_dim": cell.dim, "mask": ["causal"] if cell.causal else [], "lse": True}
    command = [options.flashjit, "bench", json.dumps(spec), "--device", options.device, "--seqlens", str(cell.seqlen), "--batch",
               str(cell.batch), "--heads-q", str(cell.heads), "--rounds", str(options.samples), "--json"]
    if options.target:
        command += ["--target", options.target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}")
    answer = json.loads(done.stdout)
    return answer, answer["rows"][0]["ms"]


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
    parser.add_argument("--cells", nargs="+", metavar="HEAD_DIM:SEQLEN:MASK",
                        default=["128:8192:full", "128:8192:causal", "64:8192:full", "64:8192:causal"])
    parser.add_argument("--tokens", type=int, default=16384, help="batch times seqlen [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--samples", type=int, default=5, help="of flashjit in a round [%(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write every round's times there")
    options = parser.parse_args()

    cells = [Cell(text, options.tokens) for text in options.cells]
    peers = Peers(options.python, options.script, options.peers)
    times = {cell.name: {name: [] for name in ["flashjit", *options.peers]} for cell in cells}
    for round_number in range(options.rounds):
        for cell in cells:
            print(f"\rround {round_number + 1} of {options.rounds}: {cell.name}    ", end="", file=sys.stderr, flush=True)
            theirs = peers.measure(cell)
            answer, ours = measure_flashjit(options, cell)
            times[cell.name]["flashjit"].append(ours)
            for name, ms in theirs.items():
                times[cell.name][name].append(ms)
    peers.close()
    print(file=sys.stderr)

    print(f"{answer['model']}, {answer['target']}; bf16 forward, {options.tokens} tokens, heads = 2048 / head_dim; medians of "
          f"{options.rounds} rounds; speed relative to a peer with the range of the rounds\n")
    print("| head_dim:seqlen:mask | flashjit TFLOP/s | " + " | ".join(f"{name} TFLOP/s | flashjit / {name}" for name in options.peers) + " |")
    print("|" + " --- |" * (2 + 2 * len(options.peers)))
    for cell in cells:
        ours = times[cell.name]["flashjit"]
        columns = [cell.name, f"{cell.tflops(statistics.median(ours)):.0f}"]
        for name in options.peers:
            pairs = [(a, b) for a, b in zip(ours, times[cell.name][name]) if b]
            if pairs:
                columns += [f"{cell.tflops(statistics.median(b for _, b in pairs)):.0f}", spread([b / a for a, b in pairs])]
            else:
                columns += ["-", "-"]
        print("| " + " | ".join(columns) + " |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"model": answer["model"], "target": answer["target"], "ms": times}, file, indent=1)


if __name__ == "__main__":
    main()
