#!/usr/bin/env python3
"""Measures flashjit and other attention kernels in turns, in one job on one device, and prints the ratios of their
speeds.

    compare.py PEERS [--flashjit build/release/bin/flashjit] [--peers cudnn fa3]
               [--cells grid | 128:8192:full ...] [--states rest sustained]
    compare.py cpu_peers.py --device cpu [--threads 1 2] [--dtypes bf16 fp32] [--cells grid masks few_rows decode]
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
For the peer "earlier" it also has "arguments" and "requests", those of `flashjit bench --serve`.
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
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

from cells import CPU_CELLS, GPU_CELLS, Documents, cell_of

REST_SECONDS = 0.2
STATES = {"rest": "At rest", "sustained": "Sustained"}
HEATING = 5  # uncounted visits of all sides before the sustained ones of a round: about a second
MASK_OPTIONS = ["--window-left", "1023", "--density", "0.2", "--partial", "0"]
YARDSTICKS = ("read", "copy", "gemm")
RELATIVE = ("decode", "formula", "append")  # cells whose last column compares them with another one


class Case:
    """A cell in one dtype on a number of threads."""

    def __init__(self, cell, dtype, threads, options):
        self.cell, self.dtype, self.threads = cell, dtype, threads
        self.name = cell.name if threads is None else f"{dtype} on {threads}: {cell.name}"
        # On a CPU a round takes not much longer than half a second.
        self.samples = options.samples if threads is None else max(2, min(options.samples, int(3e10 * threads / cell.flops())))


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
    def __init__(self, name, process, options, ours):
        self.name, self.process, self.dropout, self.version = name, process, options.dropout, ""
        self.ours = ours if name == "earlier" else None
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
        if self.ours:
            request.update(arguments=self.ours.arguments(case), requests=self.ours.requests(case, {}))
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

    def arguments(self, case):
        """Those of the process that measures the case."""
        options, cell = self.options, case.cell
        density = getattr(cell, "density", None)
        arguments = ["bench", "--serve", "--device", options.device, *MASK_OPTIONS]
        if case.threads is not None:
            arguments += ["--num-threads", str(case.threads)]
        if options.dropout is not None:
            arguments += ["--dropout-p", str(options.dropout)]
        if cell.mask == "decode" and case.threads is None and options.kv_layout == "heads_first":
            arguments.append("--heads-first")
        if options.target:
            arguments += ["--target", options.target]
        if density:
            arguments[arguments.index("--density") + 1] = density
        if cell.mask == "documents":
            table = os.path.join(self.tables.name, f"document_{cell.batch}.npy")
            if not os.path.exists(table):
                cell.write_table(table)
            arguments += ["--named", f"document={table}"]
        return arguments

    def requests(self, case, fields):
        """Those of the case's launches, whose specs have these fields beside the cell's."""
        specs = case.cell.specs(self.dtype or case.dtype, self.options.dropout is not None)
        return [{"spec": {**spec, **fields}, "rounds": case.samples, **case.cell.flashjit_request()} for spec in specs]

    def visit(self, case):
        options, cell = self.options, case.cell
        arguments = self.arguments(case)
        process = self.processes.get(tuple(arguments))
        if not process:
            process = self.processes[tuple(arguments)] = Process("flashjit", [options.flashjit, *arguments])
        ms = 0
        for request in self.requests(case, options.fields):
            process.ask(request)
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
                        help="or grid: 36 cells; backward: 4 cells, backward_grid: 36 cells, backward_dims: 8 cells, backward_gqa: 6 cells; decode: 15 cells of decode; decode_formulas; decode_8bit: 20 cells; formulas: 14 cells, formulas_backward: 11 cells; documents: 6 cells; append: 9 cells; on a CPU grid: 24 cells, masks: those that PyTorch has no flag for, few_rows: 40 cells, "
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
    parser.add_argument("--fields", type=json.loads, default={}, metavar="JSON", help="fields of flashjit's specs beside those of the cells; "
                        "the peer earlier has none of them")
    parser.add_argument("--dropout", type=float, metavar="P", help="with dropout of that probability on both sides")
    parser.add_argument("--fp16", action="store_true", help="on a GPU measure flashjit in fp16 too, a side more")
    parser.add_argument("--json", metavar="FILE", help="write every visit there; tests/bench/figures --record makes a result of them")
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
    cells = [cell_of(text, None if on_cpu else options.tokens) for name in names for text in sets.get(name, [name])]
    if on_cpu:
        cases = [Case(cell, dtype, threads, options)
                 for threads in options.threads or [1, 2] for dtype in options.dtypes or ["bf16", "fp32"] for cell in cells]
    else:
        cases = [Case(cell, "bf16", None, options) for cell in cells]
    states = [None] if on_cpu else options.states or list(STATES)

    process = Process("the peers", [options.python, options.script, "serve"])
    ours = [Flashjit("flashjit", options)] + [Flashjit("fp16", options, "fp16")] * options.fp16
    peers = [Peer(name, process, options, ours[0]) for name in options.peers]
    try:
        visits = measure(cases, ours + peers, states, options.rounds, options.minutes)
    finally:
        for open_process in (process, *ours):
            open_process.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"model": ours[0].model, "target": ours[0].target, "tokens": options.tokens, "visits": visits}, file, indent=1)

    dropout = "" if options.dropout is None else f" with dropout {options.dropout}"
    if options.decode:
        problem = (f"{peers[0].version}; decode" if on_cpu else "bf16 decode") + ", head_dim 128, TB/s of K and V"
    elif options.op == "append":
        problem = "bf16 append with rotary, head_dim 128, TB/s read and written"
    elif options.op == "documents":
        problem = (f"{peers[0].version}; bf16 forward within documents of {Documents.length} rows with lists of blocks, 16,384 rows, "
                   "16 heads, head_dim 128, milliseconds")
    elif options.op == "formula":
        ops = " and ".join(sorted({cell.op for cell in cells}))
        problem = f"{peers[0].version}; bf16 {ops} with formulas, batch 4, 16 heads, 8,192 keys, head_dim 128, milliseconds"
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
