"""Forks, threads, signals, and places that the package may lie in."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import flashjit
from reference import attention, check, random

Q, K = random((1, 64, 4, 32), seed=1), random((1, 64, 2, 32), seed=2)


class Processes(unittest.TestCase):
    def right(self, **call):
        wanted, _, bound, _ = attention(Q, K, K)
        check(self, flashjit.attention(Q, K, K, **call), wanted, bound)

    def python(self, code, **environment):
        return subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
        )

    def test_forked_children_compute(self):
        code = """
import os, warnings
warnings.simplefilter("ignore")  # CPython's own, of threads in a process that forks
import numpy as np, flashjit
x = np.ones((1, 64, 4, 32), np.float32)
engine = flashjit.Engine("cpu", num_threads=2)
flashjit.attention(x, x, x, engine=engine)
flashjit.attention(x, x, x)
child = os.fork()
for one in (engine, None):
    assert flashjit.attention(x, x, x, engine=one)[0, 0, 0, 0] == 1
    assert flashjit.attention(x, x, x, engine=one, mask="key <= position + 5")[0, 0, 0, 0] == 1
if child == 0:
    del engine
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
        done = self.python(code)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_threads_share_an_engine(self):
        engine = flashjit.Engine("cpu", cache_dir="")
        failures = []

        def work(i):
            try:
                for masks in ((), "causal", "key <= position + 9"):
                    flashjit.attention(Q[:, : 8 + i], K, K, mask=masks, engine=engine)
                self.right(engine=engine)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def released(self, call):
        """Whether another thread runs while `call` does."""
        began, ended = threading.Event(), []

        def other():
            began.wait()
            ended.append(time.monotonic_ns())

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # no thread gets the GIL unless another gives it away
        try:
            thread = threading.Thread(target=other)
            thread.start()
            began.set()
            call()
            done = time.monotonic_ns()
            thread.join()
        finally:
            sys.setswitchinterval(interval)
        return ended[0] < done

    def test_other_threads_run_while_a_kernel_compiles(self):
        engine = flashjit.Engine("cpu", cache_dir="", cache_path="")
        spec = flashjit.Spec({"op": "forward", "dtype": "fp32", "head_dim": 32})
        self.assertTrue(self.released(lambda: engine.get(spec)))

    def test_other_threads_run_while_a_kernel_runs(self):
        x = random((1, 1024, 4, 64))
        flashjit.attention(x, x, x)
        self.assertTrue(self.released(lambda: flashjit.attention(x, x, x)))

    def interrupted(self, options):
        code = f"""
import sys, flashjit
engine = flashjit.Engine("cpu", cache_dir="", cache_path="", {options})
spec = {{"op": "forward", "dtype": "fp32", "head_dim": 64, "score": ["score" + " + exp(score * 0.1)" * 24]}}
print("begins", flush=True)
try:
    engine.get(spec, batch=1, seqlen_q=2048, seqlen_k=2048, num_heads_q=8)
    print("done")
except KeyboardInterrupt:
    print("interrupted")
"""
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.assertEqual(child.stdout.readline(), "begins\n")
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        return out, err

    def test_control_c_ends_a_compilation(self):
        self.assertEqual(self.interrupted(""), ("interrupted\n", ""))

    def test_control_c_ends_a_tuning(self):
        # Without it the tuning would go on for 600 seconds.
        self.assertEqual(self.interrupted("policy='tune_on_first_use', tune_seconds=600"), ("interrupted\n", ""))

    def test_installed_read_only_in_a_folder_with_spaces(self):
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder) / "site packages"
            subprocess.run(
                ["cmake", "--install", os.environ["FLASHJIT_BUILD"], "--component", "python", "--prefix", site],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            for path in (site, *site.rglob("*")):
                path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
            code = """
import numpy as np, flashjit
x = np.ones((1, 8, 2, 64), np.float32)
engine = flashjit.Engine("cpu", cache_dir="", cache_path="")
print(flashjit.__file__, flashjit.attention(x, x, x, engine=engine)[0, 0, 0, 0])
"""
            try:
                done = self.python(code, PYTHONPATH=str(site))
                self.assertEqual((done.stdout, done.stderr), (f"{site}/flashjit/__init__.py 1.0\n", ""))
                command = subprocess.run(
                    [sys.executable, "-m", "flashjit", "--version"],
                    capture_output=True,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(site)},
                )
                self.assertIn(flashjit.__version__, command.stdout)
                self.assertFalse(list(site.rglob("*.pyc")))
            finally:
                for path in site.rglob("*"):
                    if path.is_dir():
                        path.chmod(0o755)
                site.chmod(0o755)

    def test_command_of_the_build_tree(self):
        done = subprocess.run(
            [sys.executable, "-m", "flashjit", "mask", "nothing.json"], capture_output=True, text=True
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("nothing.json", done.stderr)

    def test_nvrtc_of_a_wheel_is_found(self):
        code = """
import os, flashjit
try:
    flashjit.Engine("cuda:99")
except flashjit.Error:
    print(os.environ["FLASHJIT_NVRTC"])
"""
        clear = dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "FLASHJIT_NVRTC"), "")
        for place in ("cu13/lib", "cuda_nvrtc/lib"):
            with self.subTest(place=place), tempfile.TemporaryDirectory() as site:
                folder = Path(site) / "nvidia" / place
                folder.mkdir(parents=True)
                (folder / "libnvrtc.so.13").touch()
                path = os.environ["PYTHONPATH"] + os.pathsep + site
                self.assertEqual(self.python(code, PYTHONPATH=path, **clear).stdout, f"{folder}\n")
                set_by_user = self.python(code, PYTHONPATH=path, **{**clear, "FLASHJIT_NVRTC": "/mine"})
                self.assertEqual(set_by_user.stdout, "/mine\n")

    def test_no_framework_is_imported(self):
        done = self.python("import sys, flashjit; print({'numpy', 'torch', 'jax', 'cupy'} & set(sys.modules))")
        self.assertEqual((done.stdout, done.stderr), ("set()\n", ""))


if __name__ == "__main__":
    unittest.main()
