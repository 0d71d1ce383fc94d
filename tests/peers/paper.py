#!/usr/bin/env python3
"""The table of the FlashAttention paper made anew on a GPU: standard attention and that of Rabe and Staats beside flashjit,
forward and backward: operations, bytes of device memory, time, and memory that is allocated, over sequence length.

    PYTHONPATH=... tests/peers/paper.py [--json FILE] [--ncu PROGRAM | --no-bytes] [--seqlens N...] [--device cpu]

Standard attention keeps its matrices of scores and weights (Dao et al. 2022, algorithms 0 and 3). That of Rabe and Staats
(2021) takes 1,024 rows and 4,096 keys at a time, adds up parts, and computes them again in the backward. Both are written in
PyTorch, in the dtype of their inputs. Bytes are those that ncu counts: the script runs itself under it, with a kernel of
another name between two cells. Times are medians of Triton's do_bench, which clears the second-level cache before each
launch. Operations are those of matrix products: PyTorch counts its own; flashjit's forward has two, its backward five.
A backward's memory is that of a forward and a backward together. On a CPU results are compared, and nothing else is done.
Needs the package flashjit and PyTorch 2.9 or newer.
"""
import argparse
import json
import math
import os
import shutil
import subprocess
import sys

MARK = "spin_kernel"  # the kernel of torch.cuda._sleep
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NAMES = ("standard", "rabe_staats", "flashjit")
DIRECTIONS = ("forward", "backward")


def read_counts(output):
    """[(bytes read, bytes written, kernels)] of the kernels between marks, from ncu --csv --page raw --print-units base."""
    import csv

    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = csv.reader(lines)
    names = next(rows, [])
    if not all(metric in names for metric in METRICS):
        raise SystemExit("paper.py: ncu counted nothing:\n" + output[-2000:])
    at = [names.index(metric) for metric in METRICS]
    kernel = names.index("Kernel Name")
    counts = []
    for row in rows:
        try:
            values = [float(row[i].replace(",", "")) for i in at]
        except ValueError:  # the line of units
            continue
        if MARK in row[kernel]:
            counts.append((0.0, 0.0, 0))
        elif counts:
            read, written, kernels = counts[-1]
            counts[-1] = (read + values[0], written + values[1], kernels + 1)
    return counts


def standard(q, k, v):
    weights = ((q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))).softmax(-1)
    return weights @ v


def rabe_staats(q, k, v, rows=1024, keys=4096):
    import torch
    from torch.utils.checkpoint import checkpoint

    def part(q, k, v):
        scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
        maximum = scores.amax(-1, keepdim=True).detach()
        weights = (scores - maximum).exp()
        return weights @ v, weights.sum(-1, keepdim=True, dtype=torch.float32), maximum.float()

    outputs = []
    for of_rows in q.split(rows, -2):
        parts = [checkpoint(part, of_rows, of_k, of_v, use_reentrant=False)
                 for of_k, of_v in zip(k.split(keys, -2), v.split(keys, -2))]
        maximum = torch.stack([one[2] for one in parts]).amax(0)
        factors = [(one[2] - maximum).exp() for one in parts]
        total = sum(one[1] * factor for one, factor in zip(parts, factors))
        outputs.append((sum(one[0] * factor for one, factor in zip(parts, factors)) / total).to(q.dtype))
    return torch.cat(outputs, -2)


def flashjit_attention(q, k, v):
    import flashjit

    return flashjit.attention(q, k, v)


class Cell:
    """A problem of one length: `tokens` in all, so that a longer sequence has a smaller batch."""

    def __init__(self, options, name, seqlen):
        import torch

        self.name, self.seqlen, self.options = name, seqlen, options
        self.function = {"standard": standard, "rabe_staats": rabe_staats, "flashjit": flashjit_attention}[name]
        self.batch = max(options.tokens // seqlen, 1)
        # flashjit takes [batch, seqlen, heads, head_dim], products of matrices [batch, heads, seqlen, head_dim].
        sizes = ((self.batch, seqlen, options.heads, options.head_dim) if name == "flashjit" else
                 (self.batch, options.heads, seqlen, options.head_dim))
        generator = torch.Generator(options.device).manual_seed(seqlen)
        made = torch.randn((4, self.batch, seqlen, options.heads, options.head_dim), generator=generator,
                           device=options.device).to(options.dtype)
        if name != "flashjit":
            made = made.transpose(2, 3).contiguous()
        self.q, self.k, self.v, self.d_o = (one.view(sizes).clone() for one in made)

    def inputs(self, direction):
        return [one.detach().requires_grad_(direction == "backward") for one in (self.q, self.k, self.v)]

    def gradients(self, inputs, output):
        import torch

        return torch.autograd.grad(output, inputs, self.d_o, retain_graph=True)

    def flops(self, direction):
        if self.name == "flashjit":
            products = {"forward": 2, "backward": 5}[direction]
            return products * 2 * self.batch * self.options.heads * self.seqlen**2 * self.options.head_dim
        from torch.utils.flop_counter import FlopCounterMode

        inputs = self.inputs(direction)
        if direction == "forward":
            with FlopCounterMode(display=False) as counter:
                self.function(*inputs)
        else:
            output = self.function(*inputs)
            with FlopCounterMode(display=False) as counter:
                self.gradients(inputs, output)
        return counter.get_total_flops()

    def milliseconds(self, direction):
        from triton.testing import do_bench

        inputs = self.inputs(direction)
        if direction == "forward":
            return do_bench(lambda: self.function(*inputs), warmup=20, rep=60, return_mode="median")
        output = self.function(*inputs)
        return do_bench(lambda: self.gradients(inputs, output), warmup=20, rep=60, return_mode="median")

    def allocated(self, direction):
        """Bytes beyond inputs and the output's gradient."""
        import torch

        inputs = self.inputs(direction)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = self.function(*inputs)
        if direction == "backward":
            self.gradients(inputs, output)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def launch(self, direction):
        """For ncu: the mark, and the kernels of one forward or one backward."""
        import torch

        inputs = self.inputs(direction)
        output = self.function(*inputs)
        if direction == "backward":
            self.gradients(inputs, output)  # loads and compiles; the forward has done so already
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        if direction == "forward":
            self.function(*inputs)
        else:
            self.gradients(inputs, output)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    def checked(self, expected=None):
        """Output and gradients as [batch, heads, seqlen, head_dim] in float64."""
        inputs = self.inputs("backward")
        output = self.function(*inputs)
        results = [output, *self.gradients(inputs, output)]
        return [(one.transpose(1, 2) if self.name == "flashjit" else one).detach().double() for one in results]

    def least(self, direction):
        """Bytes of the inputs, each read once, and of the outputs, each written once. One has `one` bytes."""
        one = self.q.numel() * self.q.element_size()
        lse = self.batch * self.options.heads * self.seqlen * 4
        return 4 * one + lse if direction == "forward" else 8 * one + lse


def cells(options):
    for seqlen in options.seqlens:
        for name in NAMES:
            yield Cell(options, name, seqlen)


def check(options):
    """The three agree: their differences are those of roundings to the dtype."""
    for seqlen in options.seqlens:
        results = {name: Cell(options, name, seqlen).checked() for name in NAMES}
        for name in NAMES[1:]:
            for i, (one, other) in enumerate(zip(results[name], results["standard"])):
                difference = (one - other).abs().max().item() / other.abs().max().item()
                if not difference < {2: 0.05, 4: 1e-4}[options.dtype.itemsize]:
                    raise SystemExit(f"paper.py: {name} differs from standard attention at {seqlen}, result {i}: {difference}")


def count(options, ncu):
    words = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off", "--cache-control", "none",
             "--clock-control", "none", "--metrics", ",".join(METRICS), sys.executable, os.path.abspath(__file__), "--launch",
             "--seqlens", *map(str, options.seqlens), "--tokens", str(options.tokens), "--heads", str(options.heads),
             "--head-dim", str(options.head_dim)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return read_counts(done.stdout)


def report(rows):
    print("| seqlen | | GFLOP | GB read | GB written | of least | ms | MB allocated |\n| --- " + "| --- " * 7 + "|")
    for row in rows:
        read, written = row.get("read"), row.get("written")
        gb = [f"{one / 1e9:.3f}" if one is not None else "-" for one in (read, written)]
        of_least = f"{(read + written) / row['least']:.2f}" if read is not None else "-"
        print(f"| {row['seqlen']:,} | {row['name']}, {row['direction']} | {row['flops'] / 1e9:.0f} | {gb[0]} | {gb[1]} | "
              f"{of_least} | {row['ms']:.3f} | {row['allocated'] / 1e6:,.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    parser.add_argument("--ncu", default=shutil.which("ncu") or "/usr/local/cuda/bin/ncu")
    parser.add_argument("--no-bytes", action="store_true")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.launch:
        for cell in cells(options):
            for direction in DIRECTIONS:
                cell.launch(direction)
            torch.cuda.empty_cache()
        return
    check(options)
    if options.device == "cpu":
        print("the three agree")
        return
    rows = []
    for cell in cells(options):
        for direction in DIRECTIONS:
            rows.append({"name": cell.name, "direction": direction, "seqlen": cell.seqlen, "batch": cell.batch,
                         "flops": cell.flops(direction), "ms": cell.milliseconds(direction),
                         "allocated": cell.allocated(direction), "least": cell.least(direction)})
            torch.cuda.empty_cache()
    if not options.no_bytes:
        counts = count(options, options.ncu)
        if len(counts) != len(rows):
            raise SystemExit(f"paper.py: ncu counted {len(counts)} cells of {len(rows)}")
        for row, (read, written, kernels) in zip(rows, counts):
            row.update(read=read, written=written, kernels=kernels)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: bf16, head_dim {options.head_dim}, {options.heads} heads, "
          f"{options.tokens:,} tokens, no mask\n")
    report(rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "options": {name: str(value) for name, value in
                                                                            vars(options).items()}, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
