#!/usr/bin/env python3
"""Runs compare.py against stand-ins for flashjit and the peers."""
import collections
import contextlib
import io
import itertools
import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

FOLDER = os.path.dirname(os.path.abspath(__file__))
COMPARE, FIGURES = os.path.join(FOLDER, "compare.py"), os.path.join(FOLDER, "../bench/figures")
sys.path.insert(0, FOLDER)
import cells
import compare

# Both stand-ins write to the file TURNS that they were asked. "broken"
# always fails, "moody" every second time; fa3 is slower without a rest.
PEERS = """
import json, os, sys
print(json.dumps({"section": "env", "torch": "none"}), flush=True)
asked = 0
for line in sys.stdin:
    request = json.loads(line)
    assert request["modes"] == ["fwd"] and len(request["peers"]) == 1, request
    peer, ms = request["peers"][0], 3.0 if request["causal"] else 6.0
    with open(os.environ["TURNS"], "a+") as file:
        file.seek(0)
        rested = file.read().endswith("rest\\n")
        file.write(peer + "\\n")
    asked += 1
    if peer == "fa3": ms *= 0.5 if request["causal"] else 0.75 if rested else 0.8
    ms *= 1 + 10 * request.get("p", 0)
    failed = peer == "broken" or peer == "moody" and asked % 2
    row = {"section": "serve", "peer": peer, "mode": "fwd"}
    print(json.dumps({**row, **({"error": "no such peer"} if failed else {"ms": ms})}), flush=True)
"""
FLASHJIT = """#!{python}
import json, os, sys
args = sys.argv[1:]
assert args[:4] == ["bench", "--serve", "--device", "cuda:0"], args
if "--target" in args: sys.exit(4)
for line in sys.stdin:
    request = json.loads(line)
    with open(os.environ["TURNS"], "a") as file: file.write("flashjit\\n")
    spec, shape = request["spec"], request["shapes"][0]
    assert (shape["batch"], shape["num_heads_q"], shape["num_heads_kv"], request["rounds"]) == (2, 16, 16, 40), request
    ms = (2.0 if spec["mask"] else 4.0) * (0.5 if spec["dtype"] == "fp16" else 1)
    if spec["dropout"]: ms *= 1 + float(args[args.index("--dropout-p") + 1])
    answer = {{"model": "Imaginary", "target": "sm_90", "rows": [{{"ms": ms}}]}}
    if spec["head_dim"] == 136: answer = {{"error": {{"message": "too wide"}}}}
    print(json.dumps(answer), flush=True)
"""

CPU_PEERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    assert request["peers"] == ["sdpa"] and request["dtype"] in ("bf16", "fp32") and request["threads"] in (1, 2), request
    assert request["b"] * request["hq"] == 8 and request["samples"] == (25 if request["s"] == 128 else 2), request
    ms = {"full": 6.0, "causal": 6.0, "padding": 20.0, "window": 40.0, "blocks": 10.0}[request["mask"]] / request["threads"]
    print(json.dumps({"section": "serve", "peer": "sdpa", "mode": "fwd", "version": "PyTorch 0", "ms": ms}), flush=True)
"""
CPU_FLASHJIT = """#!{python}
import json, sys
args = sys.argv[1:]
value = lambda name: args[args.index(name) + 1]
assert args[:2] == ["bench", "--serve"] and value("--device") == "cpu", args
assert (value("--window-left"), value("--density"), value("--partial")) == ("1023", "0.2", "0"), args
for line in sys.stdin:
    request = json.loads(line)
    shape = request["shapes"][0]
    kinds = [mask if isinstance(mask, str) else mask["kind"] for mask in request["spec"]["mask"]]
    assert shape["batch"] * shape["num_heads_q"] == 8 and request["rounds"] == (25 if shape["seqlen_q"] == 128 else 2), request
    if "padding" in kinds: assert shape["batch"] == 4, request
    ms = (2.0 if "causal" in kinds else 4.0) / int(value("--num-threads"))
    print(json.dumps({{"model": "Imaginary", "target": "x86-64-v3", "rows": [{{"ms": ms}}]}}), flush=True)
"""


# Decode takes 4 ms by read, 5 by cudnn and 6 by fa2, both only without pages.
DECODE_PEERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    assert request["op"] == "decode" and request["samples"] == 40 and request["sq"] in (1, 8), request
    assert request["lengths"] in (None, [300, 20, 20]), request
    peer = request["peers"][0]
    row = {"section": "serve", "peer": peer, "mode": "fwd", "ms": {"read": 4.0, "cudnn": 5.0, "fa2": 6.0}[peer]}
    if peer != "read" and (request["page_size"] or request["lengths"]): row = {"section": "serve", "peer": peer, "error": "no pages"}
    print(json.dumps(row), flush=True)
"""
DECODE_FLASHJIT = """#!{python}
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    spec, shape = request["spec"], request["shapes"][0]
    assert spec["op"] == "decode" and spec["paged"] == ("page_size" in shape) and request["rounds"] == 40, request
    assert ("lengths_k" in request) != ("seqlen_k" in shape), request
    ms = 4.0 if spec["paged"] else 5.0 if shape["seqlen_q"] == 8 else 2.5 if shape["num_heads_q"] == 8 else 2.0
    print(json.dumps({{"model": "Imaginary", "target": "sm_90", "rows": [{{"ms": ms}}]}}), flush=True)
"""


# As torch_peers.py does, it answers a request for a backward by the forward's row first. A causal backward fails.
BACKWARD_PEERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    assert request["modes"] == ["bwd"] and request["b"] * request["s"] == 16384 and request["hq"] * request["d"] == 2048, request
    row = {"section": "serve", "peer": request["peers"][0]}
    print(json.dumps({**row, "mode": "fwd", "ms": 1.0}), flush=True)
    print(json.dumps({**row, **({"error": "not causal"} if request["causal"] else {"mode": "bwd", "ms": 9.0})}), flush=True)
"""
BACKWARD_FLASHJIT = """#!{python}
import json, sys
for line in sys.stdin:
    spec = json.loads(line)["spec"]
    assert spec["op"] == "backward" and spec["lse"], spec
    ms = 6.0 if "sm_90" in sys.argv else 4.0
    print(json.dumps({{"model": "Imaginary", "target": "sm_90", "rows": [{{"ms": ms}}]}}), flush=True)
"""


# The plain forward takes 2 ms, a formula 4 ms on half of the pairs. FlexAttention takes 6 ms.
FLEX_PEERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    assert request["op"] == "formula" and (request["s"], request["d"], request["b"]) == (8192, 128, 4), request
    print(json.dumps({"section": "serve", "peer": "flex", "mode": "fwd", "version": "PyTorch 0", "ms": 6.0}), flush=True)
"""
FLEX_FLASHJIT = """#!{python}
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    spec = request["spec"]
    plain = "score" not in spec and "mask" not in spec
    row = {{"ms": 2.0, "tflops": 600.0}} if plain else {{"ms": 4.0, "tflops": 150.0}}
    print(json.dumps({{"model": "Imaginary", "target": "sm_90", "rows": [row]}}), flush=True)
"""

# The forward takes 2 ms, the lists 0.5 ms a batch entry; FlexAttention 3 ms for a part and 6 ms for both.
DOCUMENT_PEERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    assert request["op"] == "documents" and (request["s"], request["d"], request["length"]) == (16384, 128, 1500), request
    ms = {"whole": 6.0, "attention": 3.0, "lists": 3.0}[request["part"]]
    print(json.dumps({"section": "serve", "peer": "flex", "mode": "fwd", "version": "PyTorch 0", "ms": ms}), flush=True)
"""
DOCUMENT_FLASHJIT = """#!{python}
import array, json, sys
with open(sys.argv[sys.argv.index("--named") + 1].removeprefix("document="), "rb") as file: table = file.read()
assert len(table) % 128 == 0 and table[8:10] == bytes([118, 0]) and table[127:128] == bytes([10]), table[:128]
for line in sys.stdin:
    request = json.loads(line)
    batch = request["shapes"][0]["batch"]
    ids = array.array("i", table[128:])
    assert len(ids) == batch * 16384 and ids[1499:1501] == array.array("i", [0, 1]), (len(ids), batch)
    ms = 2.0 if request["spec"]["op"] == "forward" else 0.5 * batch
    print(json.dumps({{"model": "Imaginary", "target": "sm_90", "rows": [{{"ms": ms}}]}}), flush=True)
"""


class CompareTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.peers, self.flashjit, self.out, self.turns_file = (
            os.path.join(self.folder.name, name) for name in ("peers.py", "flashjit", "out.json", "turns"))
        self.stand_in(PEERS, FLASHJIT)
        environment = mock.patch.dict(os.environ, TURNS=self.turns_file)
        environment.start()
        self.addCleanup(environment.stop)
        self.addCleanup(self.folder.cleanup)

    def stand_in(self, peers, flashjit):
        with open(self.peers, "w") as file:
            file.write(peers)
        with open(self.flashjit, "w") as file:
            file.write(flashjit.format(python=sys.executable))
        os.chmod(self.flashjit, stat.S_IRWXU)

    def run_compare(self, *more):
        """Returns the exit code, stdout and stderr of compare.py. A rest takes no time and is recorded as a turn."""
        self.rests = []

        def rest(seconds):
            self.rests.append(seconds)
            with open(self.turns_file, "a") as file:
                file.write("rest\n")

        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("compare.time.sleep", rest):
            try:
                compare.main([self.peers, "--flashjit", self.flashjit, "--json", self.out, *more])
            except SystemExit as exit:
                code = exit.code
        return subprocess.CompletedProcess(more, code, out.getvalue(), err.getvalue())

    def visits(self, **of):
        with open(self.out) as file:
            return [visit for visit in json.load(file)["visits"] if all(visit[name] == value for name, value in of.items())]

    def turns(self):
        with open(self.turns_file) as file:
            return file.read().split()

    def test_ratios(self):
        done = self.run_compare("--cells", "128:8192:full", "128:8192:causal", "--states", "sustained")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Imaginary, sm_90; bf16 forward, 16384 tokens or one sequence; medians of 6 rounds in 6 orders", done.stdout)
        # 4 * 2 * 16 * 8192^2 * 128 operations in 4 ms are 275 TFLOP/s. cudnn takes 6 ms, fa3 4.8.
        self.assertIn("| 128:8192:full | 275 | 183 | 1.50 (1.50-1.50) | 229 | 1.20 (1.20-1.20) | 1.200 fa3 |\n", done.stdout)
        self.assertIn("| 128:8192:causal | 275 | 183 | 1.50 (1.50-1.50) | 367 | 0.75 (0.75-0.75) | 0.750 fa3 |\n", done.stdout)
        self.assertIn("2 cells against cudnn: geometric mean 1.500, worst 1.500\n", done.stdout)
        self.assertIn("2 cells against the best peer: geometric mean 0.949, worst 0.750\n", done.stdout)

    def test_ratios_are_of_one_round_and_their_median_and_the_best_peer_is_one(self):
        times = [{"flashjit": 1.0, "cudnn": 3.0, "fa3": 1.9}, {"flashjit": 2.0, "cudnn": 2.0, "fa3": 2.2},
                 {"flashjit": 1.0, "cudnn": 1.1, "fa3": 1.0}]
        options = compare.parse(["peers.py"])
        case = compare.Case(cells.Cell("128:8192:full", 16384), "bf16", None, options)
        row = compare.Table(options, [{"cell": case.name, "ms": ms} for ms in times]).row(case)
        # Choosing the best peer in each round would give 1.00.
        self.assertEqual([row[3], row[5], row[6]], ["1.10 (1.00-3.00)", "1.10 (1.00-1.90)", "1.100 fa3"])

    def test_every_order_in_every_state(self):
        done = self.run_compare("--cells", "128:8192:full", "128:8192:causal")
        self.assertEqual(done.returncode, 0, done.stderr)
        orders = set(itertools.permutations(["flashjit", "cudnn", "fa3"]))
        for cell in ("128:8192:full", "128:8192:causal"):
            for state in ("rest", "sustained"):
                of = self.visits(cell=cell, state=state)
                self.assertEqual([visit["round"] for visit in of], list(range(6)))
                self.assertEqual({tuple(visit["order"]) for visit in of}, orders)
                for visit in of:
                    self.assertEqual(sorted(visit["ms"]), ["cudnn", "fa3", "flashjit"])
        rest, sustained = done.stdout[done.stdout.index("At rest:"):].split("Sustained:")
        self.assertIn("| 128:8192:full | 275 | 183 | 1.50 (1.50-1.50) | 244 | 1.12 (1.12-1.12) | 1.125 fa3 |\n", rest)
        self.assertIn("| 128:8192:full | 275 | 183 | 1.50 (1.50-1.50) | 229 | 1.20 (1.20-1.20) | 1.200 fa3 |\n", sustained)

    def test_who_was_asked_when(self):
        done = self.run_compare("--cells", "128:8192:full", "128:8192:causal", "--rounds", "6")
        self.assertEqual(done.returncode, 0, done.stderr)
        turns = self.turns()
        self.assertEqual(turns[:6], ["flashjit", "cudnn", "fa3"] * 2, "first visits, which are not counted")
        per_round = 2 * 2 * 3 + (compare.HEATING + 2) * 3
        self.assertEqual(len(turns), 6 + 6 * per_round)
        for number in range(6):
            of = turns[6 + number * per_round:][:per_round]
            rest = [side for visit in self.visits(round=number, state="rest") for side in visit["order"]]
            sustained = [side for visit in self.visits(round=number, state="sustained") for side in visit["order"]]
            self.assertEqual(of[:12], [turn for side in rest for turn in ("rest", side)])
            self.assertEqual(of[-6:], sustained)
            self.assertEqual(len(of[12:]), (compare.HEATING + 2) * 3)
            self.assertNotIn("rest", of[12:])
        self.assertEqual(self.rests, [0.2] * 6 * 6)

    def test_orders_are_balanced_over_the_cells_of_a_round(self):
        done = self.run_compare("--cells", *["128:8192:full", "128:8192:causal"] * 3, "--states", "rest", "--minutes", "0")
        self.assertEqual(done.returncode, 0, done.stderr)
        counts = collections.Counter(tuple(visit["order"]) for visit in self.visits())
        self.assertEqual(sorted(counts.values()), [1] * 6, "one round, which is whole")
        self.assertIn("medians of 1 rounds in 6 orders", done.stdout)
        self.assertEqual(self.run_compare("--cells", "128:8192:full", "--minutes", "60").returncode, 0)
        self.assertEqual(len(self.visits(state="rest")), 6)

    def test_rounds_take_every_order_alike(self):
        for more in (["--rounds", "4"], ["--peers", "fa2", "--rounds", "3"], ["--fp16", "--rounds", "6"]):
            done = self.run_compare("--cells", "128:8192:full", *more)
            self.assertIn("a multiple of", str(done.returncode), more)
        self.assertEqual(self.run_compare("--cells", "128:8192:full", "--peers", "fa2", "--rounds", "4").returncode, 0)
        self.assertEqual(len(self.visits(state="rest")), 4)

    def test_dropout(self):
        done = self.run_compare("--cells", "128:8192:full", "--dropout", "0.1", "--states", "rest")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("with dropout 0.1", done.stdout)
        # flashjit takes 4.4 ms, the peers 12. FlashAttention-3 has no dropout, so it is no peer unless asked for.
        self.assertIn("| cudnn TFLOP/s | flashjit / cudnn | fa2 TFLOP/s |", done.stdout)
        self.assertIn("| 128:8192:full | 250 | 92 | 2.73 (2.73-2.73) | 92 | 2.73 (2.73-2.73) |", done.stdout)

    def test_fp16(self):
        done = self.run_compare("--cells", "128:8192:full", "--peers", "fa2", "--fp16", "--states", "sustained")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| 128:8192:full | 275 | 183 | 1.50 (1.50-1.50) | 2.00 (2.00-2.00) |\n", done.stdout)
        self.assertEqual(len({tuple(visit["order"]) for visit in self.visits()}), 6)

    def test_on_a_cpu(self):
        self.stand_in(CPU_PEERS, CPU_FLASHJIT)
        done = self.run_compare("--device", "cpu", "--rounds", "2", "--cells", "64:128:full", "128:4096:causal", "masks")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Imaginary, x86-64-v3; PyTorch 0; forward, batch * heads 8, milliseconds; medians of 2 rounds in 2 orders", done.stdout)
        for dtype in ("bf16", "fp32"):
            self.assertIn(f"| {dtype} on 1: 64:128:full | 4 | 6 | 1.50 (1.50-1.50) |\n", done.stdout)
            self.assertIn(f"| {dtype} on 2: 128:4096:causal | 1 | 3 | 3.00 (3.00-3.00) |\n", done.stdout)
            self.assertIn(f"| {dtype} on 2: 128:4096:window | 2 | 20 | 10.00 (10.00-10.00) |\n", done.stdout)
            self.assertIn(f"2 cells against sdpa, {dtype} on 1, full and causal: geometric mean 2.121, worst 1.500\n", done.stdout)
            self.assertIn(f"3 cells against sdpa, {dtype} on 2, other masks: geometric mean 5.000, worst 2.500\n", done.stdout)
        of = self.visits(cell="bf16 on 2: 64:128:full")
        self.assertEqual([(visit["order"], visit["state"]) for visit in of], [(["flashjit", "sdpa"], None), (["sdpa", "flashjit"], None)])
        self.assertEqual([visit["ms"] for visit in of], [{"flashjit": 2.0, "sdpa": 3.0}] * 2)
        self.assertEqual(self.rests, [])

    def test_decode(self):
        self.stand_in(DECODE_PEERS, DECODE_FLASHJIT)
        done = self.run_compare("--states", "rest", "--cells", "decode:2x1000", "decode:2x1000:p16", "decode:2x1000:q8", "decode:2x1000:8/8",
                                "decode:16x1000:64/1", "decode:1x300+2x20:p1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Imaginary, sm_90; bf16 decode, head_dim 128, TB/s of K and V; medians of 24 rounds in 24 orders", done.stdout)
        self.assertIn("| decode | flashjit TB/s | read TB/s | flashjit / read | cudnn TB/s |", done.stdout)
        # 2,000 keys of 8 heads, 512 bytes each, are 8.2 MB: 0.0041 TB/s in 2 ms. The yardstick is not the best peer.
        for row in ("decode:2x1000 | 0.00 | 0.00 | 2.00 (2.00-2.00) | 0.00 | 2.50 (2.50-2.50) | 0.00 | 3.00 (3.00-3.00) | 2.500 cudnn | -",
                    "decode:2x1000:p16 | 0.00 | 0.00 | 1.00 (1.00-1.00) | - | - | - | - | - | 0.50 (0.50-0.50) decode:2x1000",
                    "decode:2x1000:q8 | 0.00 | 0.00 | 0.80 (0.80-0.80) | 0.00 | 1.00 (1.00-1.00) | 0.00 | 1.20 (1.20-1.20) | 1.000 cudnn | "
                    "0.40 (0.40-0.40) decode:2x1000",
                    "decode:16x1000:64/1 | 0.00 | 0.00 | 2.00 (2.00-2.00) | 0.00 | 2.50 (2.50-2.50) | 0.00 | 3.00 (3.00-3.00) | 2.500 cudnn | "
                    "1.25 (1.25-1.25) decode:2x1000:8/8",
                    "decode:1x300+2x20:p1 | 0.00 | 0.00 | 1.00 (1.00-1.00) | - | - | - | - | - | -"):
            self.assertIn(f"| {row} |\n", done.stdout)
        self.assertEqual(cells.Decode("decode:1x300+2x20:64/8").key_elements() * 2, 340 * 8 * 512)
        self.assertEqual(len(cells.GPU_CELLS["decode"]), 15)
        for cell in cells.GPU_CELLS["decode"]:
            cells.Decode(cell)

    def test_decode_of_8_bits(self):
        self.stand_in(DECODE_PEERS, DECODE_FLASHJIT)
        done = self.run_compare("--states", "rest", "--peers", "read", "--cells", "decode:2x1000", "decode:2x1000:p16",
                                "decode:2x1000:fp8_e4m3/token_head", "decode:2x1000:p16:int8")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        for cell, base in (("decode:2x1000:fp8_e4m3/token_head", "decode:2x1000"), ("decode:2x1000:p16:int8", "decode:2x1000:p16")):
            self.assertTrue(any(line.startswith(f"| {cell} |") and line.endswith(f") {base} |") for line in lines), done.stdout)
        int8 = cells.Decode("decode:2x1000:int8/token_head")
        self.assertEqual(int8.bytes(2), 2000 * 8 * (256 + 8))
        self.assertEqual(cells.Decode("decode:2x1000").bytes(2), 2000 * 8 * 512)
        self.assertEqual(cells.kv_fields(int8), {"kv_dtype": "int8", "kv_scale": "token_head"})
        for wrong in ("int4", "int8/row"):
            with self.assertRaises(SystemExit):
                cells.Decode("decode:2x1000:" + wrong)

    def test_every_named_cell_is_one(self):
        for sets, tokens in ((cells.GPU_CELLS, 16384), (cells.CPU_CELLS, None)):
            for name, of_set in sets.items():
                for text in of_set:
                    with self.subTest(set=name, cell=text):
                        self.assertEqual(cells.cell_of(text, tokens).name, text)

    def test_rows_keys_heads_and_batch(self):
        cell = cells.Cell("backward:64:448x1500:causal:20/10:b8", 16384)
        self.assertEqual((cell.batch, cell.seqlen, cell.seqlen_k, cell.heads_q, cell.heads_kv), (8, 448, 1500, 20, 10))
        self.assertEqual(cell.request(), {"causal": True, "flops": 2.5 * 2 * 8 * 20 * 448 * (1500 - 224) * 128, "sk": 1500})
        self.assertEqual(cell.flashjit_request()["shapes"],
                         [{"batch": 8, "seqlen_q": 448, "seqlen_k": 1500, "num_heads_q": 20, "num_heads_kv": 10}])
        self.assertEqual(cell.flops(), 2.5 * 2 * 8 * 20 * 448 * (1500 - 224) * 128)
        for wrong in ("64:448x:causal", "64:4x8x9:full", "64:448:full:b", "64:448:full:b1:b2"):
            with self.assertRaises(SystemExit):
                cells.Cell(wrong, 16384)

    def test_latent_caches(self):
        cell = cells.Decode("decode:1x300+2x20:16/1:q2:p64:latent")
        self.assertEqual(cell.bytes(2), 340 * 576 * 2)  # V is part of K
        self.assertEqual(cell.flops(), 2 * 2 * 16 * 340 * (576 + 512))
        spec = cell.specs("bf16", False)[0]
        self.assertEqual((spec["head_dim"], spec["head_dim_v"], spec["v_in_k"], spec["mask"]), (576, 512, True, ["causal"]))
        self.assertTrue(cell.request()["latent"])
        self.assertFalse(cell.compares_with(cells.Decode("decode:1x300+2x20:16/1:q2")))
        bits = cells.Decode("decode:1x300+2x20:16/1:q2:p64:latent:fp8_e4m3")
        self.assertEqual(bits.bytes(2), 340 * 576)
        self.assertTrue(bits.compares_with(cell))
        self.assertFalse(cell.compares_with(bits))

    def test_wide_decodes(self):
        cell = cells.Decode("decode:16x8192:16/4:d512")
        self.assertEqual(cell.bytes(2), 16 * 8192 * 4 * 1024 * 2)
        self.assertEqual((cell.specs("bf16", False)[0]["head_dim"], cell.dim_v), (512, 512))
        self.assertTrue(cells.Decode("decode:16x8192:16/4:d512:p64").compares_with(cell))
        self.assertFalse(cell.compares_with(cells.Decode("decode:16x8192:16/4")))

    def test_formulas(self):
        self.stand_in(FLEX_PEERS, FLEX_FLASHJIT)
        done = self.run_compare("--states", "rest", "--cells", "formula:none", "formula:prefix_lm", "formula:alibi:causal")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| formula:none | 2 | 6 | 3.00 (3.00-3.00) | - |\n", done.stdout)
        # Half of the pairs in twice the time: a quarter of the rate.
        self.assertIn("| formula:prefix_lm | 4 | 6 | 1.50 (1.50-1.50) | 0.25 (0.25-0.25) formula:none |\n", done.stdout)
        self.assertIn("| formula:alibi:causal | 4 | 6 | 1.50 (1.50-1.50) | - |\n", done.stdout)
        for name in cells.GPU_CELLS["formulas"]:
            self.assertIn(cells.Formula(name).base, (None, *cells.GPU_CELLS["formulas"]))
        self.assertEqual(cells.Formula("formula:alibi:causal").base, "formula:causal")
        self.assertEqual([cells.Decode(cell).formula for cell in cells.GPU_CELLS["decode_formulas"]],
                         [None, "alibi", "softcap", "sinks"])

    def test_documents(self):
        self.stand_in(DOCUMENT_PEERS, DOCUMENT_FLASHJIT)
        done = self.run_compare("--states", "rest", "--cells", "documents")
        self.assertEqual(done.returncode, 0, done.stderr)
        for row in ("whole | 4 | 6 | 1.50 (1.50-1.50)", "attention:causal | 2 | 3 | 1.50 (1.50-1.50)", "lists:b1 | 0.5 | 3 | 6.00 (6.00-6.00)"):
            self.assertIn("| documents:" + row + " |\n", done.stdout)

    def test_decode_on_a_cpu(self):
        self.stand_in(CPU_PEERS.replace('request["b"] * request["hq"] == 8 and ', 'request["sq"] == 1 and ')
                      .replace('(25 if request["s"] == 128 else 2)', "25").replace('"full": 6.0', '"decode": 6.0'),
                      DECODE_FLASHJIT.replace("== 40", "== 25"))
        done = self.run_compare("--device", "cpu", "--rounds", "2", "--cells", "decode", "--threads", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        # 32,768 keys of 8 heads with 512 bytes are 134 MB, in 2 ms.
        self.assertIn("| bf16 on 1: decode:1x32768 | 0.0671 | 0.0224 | 3.00 (3.00-3.00) | - |\n", done.stdout)
        self.assertIn("| fp32 on 1: decode:1x32768 | 0.1342 | 0.0447 | 3.00 (3.00-3.00) | - |\n", done.stdout)

    def test_append(self):
        self.stand_in("""
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    assert request["op"] == "append" and request["peers"] == ["copy"] and request["samples"] == 40, request
    print(json.dumps({"section": "serve", "peer": "copy", "mode": "fwd", "ms": 1.0}), flush=True)
""", """#!{python}
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    spec, shape = request["spec"], request["shapes"][0]
    assert spec["op"] == "append_kv" and spec["paged"] == ("page_size" in shape) and "--heads-first" not in sys.argv, request
    ms = 1.25 if spec["paged"] else 0.5 if "kv_dtype" in spec else 1.0
    print(json.dumps({{"model": "Imaginary", "target": "sm_90", "rows": [{{"ms": ms}}]}}), flush=True)
""")
        done = self.run_compare("--states", "rest", "--cells", "append:16x8192", "append:16x8192:p16", "append:16x8192:int8/token_head")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("bf16 append with rotary, head_dim 128, TB/s read and written; medians of 6 rounds in 2 orders", done.stdout)
        # 131,072 tokens of 8 heads: 1,024 bytes each in bf16, 776 of int8 and scales.
        self.assertIn("| append:16x8192 | 1.07 | 1.07 | 1.00 (1.00-1.00) | - |\n", done.stdout)
        self.assertIn("| append:16x8192:p16 | 0.86 | 1.07 | 0.80 (0.80-0.80) | 0.80 (0.80-0.80) append:16x8192 |\n", done.stdout)
        self.assertIn("| append:16x8192:int8/token_head | 1.63 | 0.81 | 2.00 (2.00-2.00) | - |\n", done.stdout)
        self.assertEqual(cells.Append("append:2x3:4/2:q").bytes(), 6 * (2 * 1024 + 4 * 512))
        for cell in cells.GPU_CELLS["append"]:
            cells.Append(cell)

    def test_backward(self):
        self.stand_in(BACKWARD_PEERS, BACKWARD_FLASHJIT)
        done = self.run_compare("--cells", "backward")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Imaginary, sm_90; bf16 backward, 16384 tokens or one sequence; medians of 6 rounds in 2 orders", done.stdout)
        # 2.5 * 4 * 2 * 16 * 8192^2 * 128 operations in 4 ms are 687 TFLOP/s.
        self.assertIn("| head_dim:seqlen:mask | flashjit TFLOP/s | fa3 TFLOP/s | flashjit / fa3 |\n", done.stdout)
        self.assertIn("| backward:128:8192:full | 687 | 305 | 2.25 (2.25-2.25) |\n", done.stdout)
        self.assertIn("| backward:64:8192:causal | 344 | - | - |\n", done.stdout)
        self.assertIn("2 cells against fa3: geometric mean 2.250, worst 2.250\n", done.stdout)
        self.assertEqual(done.stderr.count("backward:64:8192:causal: fa3: not causal"), 1)
        for state in ("rest", "sustained"):
            orders = [tuple(visit["order"]) for visit in self.visits(cell="backward:128:8192:full", state=state)]
            self.assertEqual(sorted(orders), 3 * [("fa3", "flashjit")] + 3 * [("flashjit", "fa3")])

    def test_backward_of_mma_sync_meets_flash_attention_2(self):
        self.stand_in(BACKWARD_PEERS, BACKWARD_FLASHJIT)
        done = self.run_compare("--cells", "backward:64:8192:full", "--target", "sm_90", "--states", "rest", "--rounds", "2")
        self.assertIn("| backward:64:8192:full | 458 | 305 | 1.50 (1.50-1.50) |\n", done.stdout)
        self.assertIn("1 cells against fa2", done.stdout)
        self.assertEqual(compare.parse(["peers.py", "--cells", "backward", "--dropout", "0.1"]).peers, ["cudnn"])
        self.assertEqual(compare.parse(["peers.py", "--cells", "backward", "--target", "sm_90a"]).peers, ["fa3"])

    def test_backward_on_a_cpu(self):
        self.stand_in(CPU_PEERS.replace('request["peers"]', 'request["modes"] == ["bwd"] and request["peers"]', 1)
                      .replace('"mode": "fwd"', '"mode": "bwd"').replace('(25 if request["s"] == 128 else 2)', 'request["samples"]'),
                      CPU_FLASHJIT.replace('(25 if shape["seqlen_q"] == 128 else 2)', 'request["rounds"]'))
        done = self.run_compare("--device", "cpu", "--rounds", "2", "--cells", "backward", "backward_masks", "--threads", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("; PyTorch 0; backward, batch * heads 8, milliseconds;", done.stdout)
        self.assertIn("| bf16 on 1: backward:128:4096:causal | 2 | 6 | 3.00 (3.00-3.00) |\n", done.stdout)
        self.assertIn("16 cells against sdpa, fp32 on 1, backward, full and causal: geometric mean 2.121, worst 1.500\n", done.stdout)
        self.assertIn("3 cells against sdpa, bf16 on 1, backward, other masks: geometric mean 5.000, worst 2.500\n", done.stdout)

    def test_what_is_of_the_other_device_is_refused(self):
        for more in (["--device", "cpu", "--fp16"], ["--device", "cpu", "--states", "rest"], ["--threads", "2"], ["--dtypes", "fp32"],
                     ["--cells", "128:8192:window"], ["--cells", "128:8192"], ["--states", "warm"], ["--cells", "decode:16"],
                     ["--cells", "decode:1x2:z3"], ["--cells", "decode", "128:8192:full"], ["--cells", "decode", "--fp16"],
                     ["--cells", "append:1"], ["--cells", "append:1x2:int4"], ["--cells", "formula:tanh"], ["--cells", "formula:none:full"],
                     ["--cells", "documents:half"], ["--cells", "documents:whole:x"],
                     ["--cells", "formula:none", "--dropout", "0.1"], ["--cells", "backward", "128:8192:full"], ["--cells", "backward:128:8192:window"], ["--cells", "backward:128"]):
            self.assertNotEqual(self.run_compare(*more).returncode, 0, more)

    def test_an_earlier_build(self):
        self.stand_in(BACKWARD_PEERS, BACKWARD_FLASHJIT)
        earlier = os.path.join(self.folder.name, "earlier")
        with open(earlier, "w") as file:
            file.write(BACKWARD_FLASHJIT.format(python=sys.executable).replace("else 4.0", "else 5.0"))
        os.chmod(earlier, stat.S_IRWXU)
        self.peers = os.path.join(FOLDER, "earlier_build.py")
        with mock.patch.dict(os.environ, FLASHJIT_EARLIER=earlier):
            done = self.run_compare("--cells", "backward:128:8192:causal", "--peers", "earlier", "--states", "rest")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| 1.25 (1.25-1.25) |", done.stdout)
        self.assertIn("1 cells against earlier: geometric mean 1.250, worst 1.250\n", done.stdout)

    def test_fields_beside_those_of_the_cells(self):
        self.stand_in(BACKWARD_PEERS, BACKWARD_FLASHJIT.replace("else 4.0", 'else 5.0 if spec.get("deterministic") else 4.0'))
        self.peers = os.path.join(FOLDER, "earlier_build.py")
        with mock.patch.dict(os.environ, FLASHJIT_EARLIER=self.flashjit):
            done = self.run_compare("--cells", "backward:128:8192:causal", "--peers", "earlier", "--states", "rest",
                                    "--fields", '{"deterministic": true}')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 cells against earlier: geometric mean 0.800, worst 0.800\n", done.stdout)

    def test_a_peer_that_fails(self):
        done = self.run_compare("--cells", "128:8192:full", "--peers", "broken", "fa2", "--states", "rest")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("128:8192:full: broken: no such peer"), 1)
        self.assertIn("| 128:8192:full | 275 | - | - | 183 | 1.50 (1.50-1.50) | 1.500 fa2 |", done.stdout)
        self.assertNotIn("against broken", done.stdout)
        self.assertEqual({visit["ms"]["broken"] for visit in self.visits()}, {None})
        done = self.run_compare("--cells", "128:8192:full", "--peers", "broken", "--states", "rest")
        self.assertIn("| 128:8192:full | 275 | - | - |\n", done.stdout)
        done = self.run_compare("--cells", "128:8192:full", "--peers", "moody", "--states", "rest")
        self.assertEqual([visit["ms"]["moody"] for visit in self.visits()], [6.0, None] * 3)
        self.assertIn("| 128:8192:full | 275 | 183 | 1.50 (1.50-1.50) |\n", done.stdout)

    def test_failures_are_reported(self):
        self.assertIn("flashjit ended with exit code 4", str(self.run_compare("--target", "sm_80").returncode))
        self.assertIn("136:8192:full:16: flashjit: too wide", str(self.run_compare("--cells", "136:8192:full:16").returncode))
        with open(self.peers, "w") as file:
            file.write("import sys; sys.exit(3)")
        self.assertIn("the peers ended with exit code 3", str(self.run_compare("--cells", "128:8192:full").returncode))

    def test_record(self):
        self.stand_in(PEERS, FLASHJIT.replace("(2, 16, 16, 40)", "(2, 16, 16, 40) or True"))
        done = self.run_compare("--cells", "128:8192:full", "128:8192:causal", "--peers", "cudnn", "fa3", "--minutes", "0")
        self.assertEqual(done.returncode, 0, done.stderr)
        recorded = os.path.join(self.folder.name, "recorded.json")
        with open(recorded, "w") as file:
            json.dump({"title": "kept", "cells": [{"model": "a model", "cell": "128:8192:full"}]}, file)
        subprocess.run([FIGURES, "--record", recorded, self.out], check=True)
        with open(recorded) as file:
            result = json.load(file)
        self.assertEqual((result["title"], [cell["model"] for cell in result["cells"]]), ("kept", ["a model", "128:8192:causal"]))
        for cell in result["cells"]:
            self.assertEqual(cell["forward"]["peer"], "fa3")
        values = result["series"]["forward"]["values"]
        of_rest = [cell["forward"]["rest"] for cell in result["cells"]]
        self.assertAlmostEqual(values["rest_worst"], min(of_rest), delta=0.006)
        self.assertAlmostEqual(values["rest_mean"], (of_rest[0] * of_rest[1]) ** 0.5, delta=0.01)
        self.assertEqual(result["series"]["forward"]["templates"], ["cuda/forward_sm90a.cuh"])

    def test_peers_scripts_are_python(self):
        for name in ("cpu_peers.py", "decode_peers.py", "flex_peers.py", "paper.py"):
            with open(os.path.join(FOLDER, name)) as file:
                compile(file.read(), name, "exec")

    def test_bytes_of_the_paper_are_those_between_marks(self):
        import paper

        rows = [("kernel of PyTorch", "7", "7"), ("spin_kernel(long)", "1", "1"), ("softmax<float, 1>", "1,000", "20"),
                ("gemm", "5", "6"), ("at::cuda::spin_kernel(long)", "1", "1"), ("flashjit_forward", "30", "40")]
        output = '==PROF== Connected\n"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"\n"","","byte","byte"\n'
        output += "".join(f'"{i}","{name}","{read}","{written}"\n' for i, (name, read, written) in enumerate(rows))
        self.assertEqual(paper.read_counts(output), [(1005, 26, 2), (30, 40, 1)])
        with self.assertRaises(SystemExit):
            paper.read_counts("==ERROR== ERR_NVGPUCTRPERM")

    def test_as_a_program(self):
        done = subprocess.run([COMPARE, self.peers, "--flashjit", self.flashjit, "--cells", "128:8192:full", "--states", "sustained"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 cells against the best peer: geometric mean 1.200, worst 1.200\n", done.stdout)


if __name__ == "__main__":
    unittest.main()
