"""The engine's options for stores over the network, with Redis on loopback."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import flashjit

SPEC = {"op": "forward", "dtype": "fp32", "head_dim": 16}
SIZES = {"batch": 1, "seqlen_q": 16, "seqlen_k": 16, "num_heads_q": 1, "num_heads_kv": 1}
COMMAND = Path(os.environ["FLASHJIT_BUILD"]) / "bin/flashjit"
PLUGIN = Path(os.environ["FLASHJIT_BUILD"]) / "lib/libflashjit-remote.so"


@unittest.skipUnless(PLUGIN.exists(), "this build has no plugin for remote stores")
@unittest.skipUnless(shutil.which("redis-server"), "redis-server is not installed")
class Remote(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = subprocess.Popen(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", self.folder],
            stdout=subprocess.DEVNULL,
        )
        self.addCleanup(server.wait)
        self.addCleanup(server.terminate)
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        self.url = f"redis://127.0.0.1:{port}#answer_ms=60000,timeout_ms=60000"

    def key(self, name):
        path = self.folder / name
        done = subprocess.run(
            [COMMAND, "cache", "keygen", path, "--name", name], check=True, capture_output=True, text=True
        )
        return {"cache_trust": done.stdout.split()[0], "signing_key": str(path)}

    def origin(self, **options):
        with tempfile.TemporaryDirectory() as own:
            engine = flashjit.Engine("cpu", cache_dir=own, cache_path="", cache_remote=self.url, **options)
            return engine.get(SPEC, **SIZES).info["origin"]

    def test_options(self):
        key = self.key("ci")
        reader = {**key, "signing_key": ""}
        with self.assertRaises(flashjit.Error) as refused:
            self.origin(**reader, store_configs=True)
        self.assertEqual(refused.exception.code, "not_prebuilt")
        self.assertEqual(self.origin(**key), "compiled")
        self.assertEqual(self.origin(**reader, store_configs=True), "remote")
        self.assertEqual(self.origin(**{**self.key("other"), "signing_key": ""}), "compiled")

    def test_options_that_cannot_be_read(self):
        for name in ("cache_remote", "cache_trust", "signing_key"):
            with self.assertRaisesRegex(flashjit.InvalidArgumentError, name):
                flashjit.Engine("cpu", **{name: 1})
        with self.assertRaises(flashjit.Error) as refused:
            flashjit.Engine("cpu", cache_remote="ftp://kernels")
        self.assertEqual(refused.exception.code, "cache_failed")


if __name__ == "__main__":
    unittest.main()
