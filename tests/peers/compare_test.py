#!/usr/bin/env python3
"""Runs compare.py against stand-ins for flashjit and for the peers."""
import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest

COMPARE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare.py")

PEERS = """
import json, sys
print(json.dumps({"section": "env", "torch": "none"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    for peer in request["peers"]:
        row = {"section": "serve", "peer": peer, "mode": "fwd"}
        row.update({"error": "no such peer"} if peer == "broken" else {"ms": (3.0 if request["causal"] else 6.0) * (1 + 10 * request.get("p", 0))})
        print(json.dumps(row), flush=True)
"""
FLASHJIT = """#!{python}
import json, sys
args = sys.argv[1:]
assert args[0] == "bench" and args[args.index("--batch") + 1] == "2" and args[args.index("--heads-q") + 1] == "16", args
ms = 2.0 if json.loads(args[1])["mask"] else 4.0
if "--target" in args: sys.exit(4)
if json.loads(args[1])["dropout"]: ms *= 1 + float(args[args.index("--dropout-p") + 1])
print(json.dumps({{"model": "Imaginary", "target": "sm_90", "rows": [{{"ms": ms}}]}}))
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
spec = json.loads(args[1])
assert value("--device") == "cpu" and int(value("--batch")) * int(value("--heads-q")) == 8, args
kinds = [mask if isinstance(mask, str) else mask["kind"] for mask in spec["mask"]]
if "sliding_window" in kinds: assert value("--window-left") == "1023", args
if "block_sparse" in kinds: assert value("--density") == "0.2", args
if "padding" in kinds: assert value("--batch") == "4", args
ms = (2.0 if "causal" in kinds else 4.0) / int(value("--num-threads"))
print(json.dumps({{"model": "Imaginary", "target": "x86-64-v3", "rows": [{{"ms": ms}}]}}))
"""


class CompareTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.peers = os.path.join(self.folder.name, "peers.py")
        self.flashjit = os.path.join(self.folder.name, "flashjit")
        self.stand_in(PEERS, FLASHJIT)

    def stand_in(self, peers, flashjit):
        with open(self.peers, "w") as file:
            file.write(peers)
        with open(self.flashjit, "w") as file:
            file.write(flashjit.format(python=sys.executable))
        os.chmod(self.flashjit, stat.S_IRWXU)

    def tearDown(self):
        self.folder.cleanup()

    def run_compare(self, *more):
        return subprocess.run([sys.executable, COMPARE, self.peers, "--flashjit", self.flashjit, *more], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=600)

    def test_ratios(self):
        out = os.path.join(self.folder.name, "out.json")
        done = self.run_compare("--cells", "128:8192:full", "128:8192:causal", "--rounds", "3", "--json", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Imaginary, sm_90", done.stdout)
        # 4 * 2 * 16 * 8192^2 * 128 operations in 4 ms are 275 TFLOP/s; the peers take 6 ms.
        self.assertIn("| 128:8192:full | 275 | 183 | 1.50 (1.50-1.50) | 183 | 1.50 (1.50-1.50) | 1.473 |", done.stdout)
        self.assertIn("| 128:8192:causal | 275 | 183 | 1.50 (1.50-1.50) |", done.stdout)
        with open(out) as file:
            self.assertEqual(json.load(file)["ms"]["128:8192:full"]["fa2"], [6.0, 6.0, 6.0])

    def test_dropout(self):
        done = self.run_compare("--cells", "128:8192:full", "--rounds", "1", "--dropout", "0.1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("with dropout 0.1", done.stdout)
        # 4.4 ms against 12; FlashAttention-3 has none and is no peer.
        self.assertIn("| 128:8192:full | 250 | 92 | 2.73 (2.73-2.73) | 92 | 2.73 (2.73-2.73) |\n", done.stdout)

    def test_on_a_cpu(self):
        self.stand_in(CPU_PEERS, CPU_FLASHJIT)
        out = os.path.join(self.folder.name, "out.json")
        done = self.run_compare("--device", "cpu", "--rounds", "2", "--cells", "64:128:full", "128:4096:causal", "masks", "--json", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Imaginary, x86-64-v3; PyTorch 0; forward, batch * heads 8, milliseconds", done.stdout)
        for dtype in ("bf16", "fp32"):
            self.assertIn(f"| {dtype} on 1: 64:128:full | 4 | 6 | 1.50 (1.50-1.50) |\n", done.stdout)
            self.assertIn(f"| {dtype} on 2: 128:4096:causal | 1 | 3 | 3.00 (3.00-3.00) |\n", done.stdout)
            self.assertIn(f"| {dtype} on 2: 128:4096:window | 2 | 20 | 10.00 (10.00-10.00) |\n", done.stdout)
            self.assertIn(f"2 cells against sdpa, {dtype} on 1, full and causal: geometric mean 2.121, worst 1.500\n", done.stdout)
            self.assertIn(f"3 cells against sdpa, {dtype} on 2, other masks: geometric mean 5.000, worst 2.500\n", done.stdout)
        with open(out) as file:
            self.assertEqual(json.load(file)["ms"]["bf16 on 2: 64:128:full"], {"bf16": [2.0, 2.0], "sdpa": [3.0, 3.0]})

    def test_what_is_of_the_other_device_is_refused(self):
        for more in (["--device", "cpu", "--fp16"], ["--threads", "2"], ["--dtypes", "fp32"], ["--cells", "128:8192:window"]):
            self.assertNotEqual(self.run_compare(*more).returncode, 0, more)

    def test_a_peer_that_fails(self):
        done = self.run_compare("--cells", "128:8192:full", "--peers", "broken", "fa2", "--rounds", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("broken: no such peer", done.stderr)
        self.assertIn("| 128:8192:full | 275 | - | - | 183 |", done.stdout)

    def test_failures_are_reported(self):
        self.assertNotEqual(self.run_compare("--cells", "128:8192").returncode, 0)
        done = self.run_compare("--cells", "128:8192:full", "--target", "sm_80")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("exit code 4", done.stderr)
        with open(self.peers, "w") as file:
            file.write("import sys; sys.exit(3)")
        done = self.run_compare("--cells", "128:8192:full")
        self.assertNotEqual(done.returncode, 0)


if __name__ == "__main__":
    unittest.main()
