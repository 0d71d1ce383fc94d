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


class CompareTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.peers = os.path.join(self.folder.name, "peers.py")
        self.flashjit = os.path.join(self.folder.name, "flashjit")
        with open(self.peers, "w") as file:
            file.write(PEERS)
        with open(self.flashjit, "w") as file:
            file.write(FLASHJIT.format(python=sys.executable))
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
