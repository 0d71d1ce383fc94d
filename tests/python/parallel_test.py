"""Attention over several ranks: threads and processes, layouts, conversions, failures, a process that dies."""

import gc
import itertools
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import flashjit
import numpy as np
import parallel_rank
from flashjit import parallel
from leaks import check_no_leaks
from parallel_rank import SPEC, join, own, run
from reference import ROUNDING, attention, causal, check, random

ENGINE = flashjit.Engine("cpu")
SEQLEN = 48
LIMIT = 30  # seconds within which every rank's call ends once one has failed; ranks look ten times a second


def on_threads(size, work, *args, **keywords):
    """What `work(group, ...)` returns or raises on the thread of each rank."""
    results = [None] * size

    def rank(group):
        try:
            results[group.rank] = work(group, *args, **keywords)
        except BaseException as error:
            error.__traceback__ = None  # whose frames would keep objects of the rank
            results[group.rank] = error

    threads = [threading.Thread(target=rank, args=(group,), daemon=True) for group in parallel.of_threads(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a rank waits for ever"
    return results


def gradients(t, seen):
    """{name: (gradient in float64, bound of a float32 kernel's)} of q, k and v by o, whose gradient is t["do"].

    Weights are off by a factor of their score's and their lse's errors, a float32 sum of n terms by n + 4 roundings of
    the sum of magnitudes. Errors of a factor are carried through each product.
    """
    unit, group = ROUNDING["float32"], t["q"].shape[2] // t["k"].shape[2]
    q, k, v, do = (np.asarray(t[name], np.float64) for name in ("q", "k", "v", "do"))
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    scale, dims, keys = q.shape[3] ** -0.5, q.shape[3] + 4, SEQLEN + 4
    o, lse, bound_o, bound_lse = attention(t["q"], t["k"], t["v"], seen=seen)
    weights = np.where(seen, np.exp(np.einsum("bihd,bjhd->bhij", q, wide_k) * scale - lse[..., None]), 0)
    of_weight = 2 * bound_lse[..., None]  # a score's error is less than its lse's
    dp, size_dp = (np.einsum("bihd,bjhd->bhij", f(do), f(wide_v)) for f in (lambda x: x, abs))
    delta, size_delta = ((f(do) * f(o)).sum(-1).transpose(0, 2, 1)[..., None] for f in (lambda x: x, abs))
    off_delta = (abs(do) * bound_o).sum(-1).transpose(0, 2, 1)[..., None]
    ds = weights * (dp - delta)
    off_ds = weights * ((of_weight + 4 * unit) * abs(dp - delta) + dims * unit * (size_dp + size_delta) + off_delta)

    def summed(left, off_left, right, subscripts):
        value, size = np.einsum(subscripts, left, right), np.einsum(subscripts, abs(left), abs(right))
        return value, np.einsum(subscripts, off_left, abs(right)) + group * keys * unit * size

    def by_group(pair):
        batch, rows, heads, dim = pair[0].shape
        return tuple(x.reshape(batch, rows, heads // group, group, dim).sum(3) for x in pair)

    dq = summed(ds * scale, off_ds * scale, wide_k, "bhij,bjhd->bihd")
    dk = by_group(summed(ds * scale, off_ds * scale, q, "bhij,bihd->bjhd"))
    dv = by_group(summed(weights, of_weight * weights, do, "bhij,bihd->bjhd"))
    return {"dq": dq, "dk": dk, "dv": dv}


class Results(unittest.TestCase):
    def check(self, t, made):
        seen = causal(SEQLEN, SEQLEN)
        o, lse, bound, bound_lse = attention(t["q"], t["k"], t["v"], seen=seen)
        # Partial results are merged: each rank's part is rounded once more, and so is each weight of a merge.
        check(self, made["o"], o, 2 * bound)
        check(self, made["lse"], lse, 2 * bound_lse, "lse")
        for name, (wanted, off) in gradients(t, seen).items():
            check(self, made[name], wanted, 2 * off, name)

    def test_threads(self):
        for size in (1, 2, 3):
            for layout in ("contiguous", "zigzag", "heads", "best"):
                with self.subTest(size=size, layout=layout):
                    t = parallel_rank.tensors(SEQLEN, heads=6, heads_kv=6 if layout == "heads" else 2)
                    ranks = on_threads(size, run, ENGINE, layout, t)
                    chosen = {made.pop("layout") for made in ranks}
                    self.assertEqual(chosen, {"zigzag" if layout == "best" else layout})
                    self.check(t, join(ranks, chosen.pop(), SEQLEN))

    def test_one_engine(self):
        t = parallel_rank.tensors(SEQLEN, heads=6, heads_kv=2)
        o, lse = flashjit.attention(t["q"], t["k"], t["v"], mask="causal", return_lse=True)
        ranks = on_threads(3, run, ENGINE, "zigzag", t)
        made = join(ranks, "zigzag", SEQLEN)
        _, _, bound, bound_lse = attention(t["q"], t["k"], t["v"], seen=causal(SEQLEN, SEQLEN))
        check(self, made["o"], np.asarray(o, np.float64), 3 * bound)
        check(self, made["lse"], np.asarray(lse, np.float64), 3 * bound_lse, "lse")

    def processes(self, size, *words):
        name, children = parallel.name_of_processes(size), []
        for rank in range(size):
            command = [sys.executable, "-W", "error", parallel_rank.__file__, name, str(rank), str(size), *words]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            self.addCleanup(children[-1].communicate)
            self.addCleanup(children[-1].kill)
        return children

    def test_processes(self):
        for size in (2, 3):
            with self.subTest(size=size), tempfile.TemporaryDirectory() as folder:
                children = self.processes(size, "save", folder)
                for child in children:
                    child.communicate(timeout=120)
                self.assertEqual([child.returncode for child in children], [0] * size)
                ranks = [dict(np.load(Path(folder) / f"{rank}.npz")) for rank in range(size)]
                t = parallel_rank.tensors(SEQLEN, heads=6, heads_kv=2)
                made = join(ranks, "zigzag", SEQLEN)
                self.check(t, made)
                of_threads = on_threads(size, run, ENGINE, "zigzag", t)
                for key, value in join(of_threads, "zigzag", SEQLEN).items():
                    self.assertEqual(value.tobytes(), made[key].tobytes(), key)

    def test_a_process_that_dies(self):
        for wait in (0.0, 0.13, 0.4):
            with self.subTest(wait=wait):
                children = self.processes(3, "loop")
                for child in children:
                    self.assertEqual(child.stdout.readline(), "computes\n")
                time.sleep(wait)
                children[1].send_signal(signal.SIGKILL)
                began = time.monotonic()
                said = [child.communicate(timeout=LIMIT)[0] for child in children]
                self.assertLess(time.monotonic() - began, LIMIT)
                self.assertEqual(children[1].returncode, -signal.SIGKILL)
                for rank in (0, 2):
                    self.assertEqual(children[rank].returncode, 0)
                    self.assertIn("DeviceFailedError: the process of rank 1 of the group has ended", said[rank])


class Conversions(unittest.TestCase):
    def test_every_pair(self):
        layouts = ("contiguous", "zigzag", "heads")
        whole = np.arange(2 * 12 * 6 * 3, dtype=np.int32).reshape(2, 12, 6, 3)

        def part(layout, group):
            if layout == "heads":
                return np.ascontiguousarray(np.split(whole, group.size, axis=2)[group.rank])
            return own(whole, 1, layout, group)

        def rank(group, before, after):
            with parallel.LayoutConversion(ENGINE, group, "int32", whole.shape, before, after) as change:
                made = change.convert(part(before, group))
                given = np.full_like(made, -1)
                self.assertIs(change.convert(part(before, group), given), given)
                return made, given, part(after, group)

        for size, before, after in itertools.product((1, 2, 3), layouts, layouts):
            with self.subTest(size=size, before=before, after=after):
                for made, given, wanted in on_threads(size, rank, before, after):
                    np.testing.assert_array_equal(made, wanted)
                    np.testing.assert_array_equal(given, wanted)

    def test_in_place(self):
        def rank(group):
            x = own(np.arange(12, dtype=np.int64)[None], 1, "contiguous", group)
            with parallel.LayoutConversion(ENGINE, group, "int64", (1, 12), "contiguous", "zigzag") as change:
                change.convert(x, x)
            return x.tolist()

        self.assertEqual(on_threads(2, rank), [[[0, 1, 2, 9, 10, 11]], [[3, 4, 5, 6, 7, 8]]])

    def test_refusals(self):
        def rank(group):
            with parallel.LayoutConversion(ENGINE, group, "int32", (1, 12, 2), "contiguous", "heads") as change:
                change.convert(np.zeros((1, 5 if group.rank == 1 else 6, 2), np.int32))

        def make(group, sizes, before):
            parallel.LayoutConversion(ENGINE, group, "int32", sizes, before, "contiguous")

        failed = on_threads(2, rank)
        self.assertEqual([type(one) for one in failed], [flashjit.DeviceFailedError, flashjit.InvalidArgumentError])
        self.assertIn("the rank's share", failed[1].message)
        for sizes, before, text in (
            ((1, 12, 3), "heads", "a multiple of 2"),
            ((1, 13), "zigzag", "a multiple of 4"),
            ((1, 12), "best", "best"),
            ((1, 12), "rings", "contiguous"),
        ):
            for failure in on_threads(2, make, sizes, before):
                self.assertIsInstance(failure, (flashjit.InvalidArgumentError, flashjit.DeviceFailedError))
                self.assertIn(text, failure.message)


class Failures(unittest.TestCase):
    """Every rank raises, and none waits for ever."""

    def failures(self, wanted, rank, **keywords):
        for failure, (kind, text) in zip(on_threads(len(wanted), rank, **keywords), wanted):
            self.assertIs(type(failure), kind, failure)
            self.assertIn(text, str(failure))

    def attention(self, group, **changed):
        given = {"spec": SPEC, "seqlen_q": SEQLEN, "num_heads_q": 6, "num_heads_kv": 2, **changed}
        return parallel.ParallelAttention(ENGINE, given.pop("spec"), group, **given)

    def test_different_specs(self):
        def rank(group):
            self.attention(group, spec={**SPEC, "head_dim": 64} if group.rank == 1 else SPEC)

        told = (flashjit.InvalidArgumentError, '"head_dim": 64')
        self.failures([told] * 3, rank)

    def test_what_no_layout_computes(self):
        told = (flashjit.UnsupportedError, "sink_logits")
        self.failures([told] * 2, self.attention, spec={**SPEC, "sink_logits": True})
        told = (flashjit.InvalidArgumentError, "a multiple of 4")
        self.failures([told] * 2, self.attention, layout="zigzag", seqlen_q=50)
        self.failures([(flashjit.InvalidArgumentError, "zigzag")], self.attention, layout="ring")

    def launch(self, group, **wrong):
        with self.attention(group) as attention:
            q, k, lse = np.ones((1, 16, 6, 32), np.float32), np.ones((1, 16, 2, 32), np.float32), np.ones((1, 6, 16))
            given = {"q": q, "k": k, "v": k, "o": q.copy(), "lse": lse.astype(np.float32)}
            given["workspace"] = attention.workspace(q)
            attention.forward(**{**given, **(wrong if group.rank == 2 else {})})

    def test_a_wrong_argument_of_one_rank(self):
        for wrong, text in (
            ({"k": np.ones((1, 15, 2, 32), np.float32)}, "the rank's share of the whole"),
            ({"q": np.ones((1, 16, 6, 32), np.float16)}, "fp16"),
            ({"v": None}, "v is missing"),
            ({"workspace": None}, "workspace has 0 bytes"),
            ({"lse": 3}, "argument lse"),
            ({"window": 3}, "window"),
        ):
            with self.subTest(wrong=list(wrong)):
                told = (flashjit.DeviceFailedError, text)
                self.failures([told, told, (flashjit.InvalidArgumentError, text)], self.launch, **wrong)

    def test_an_exception_of_the_caller(self):
        def rank(group):
            with self.attention(group) as attention:
                attention.prepare()
                if group.rank == 0:
                    raise ValueError("nothing to read")
                attention.prepare("backward")

        told = (flashjit.DeviceFailedError, "rank 0 of the group failed: ValueError: nothing to read")
        self.failures([(ValueError, "nothing"), told, told], rank)

    def test_an_object_that_is_dropped(self):
        def rank(group):
            attention = self.attention(group)
            attention.prepare()
            if group.rank == 0:
                del attention
                gc.collect()
                group.check()
            attention.prepare("backward")

        told = (flashjit.DeviceFailedError, "close() on every rank")
        self.failures([told] * 2, rank)

    def test_closed_objects_and_groups(self):
        def rank(group):
            attention = self.attention(group)
            attention.close()
            attention.close()
            with self.assertRaisesRegex(flashjit.InvalidArgumentError, "closed"):
                attention.forward()
            group.check()
            self.assertEqual((group.size, attention.group is group), (2, True))

        self.assertEqual(on_threads(2, rank), [None, None])
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "ncclComm_t"):
            parallel.of_nccl(0)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "1 to 1024"):
            parallel.of_threads(0)
        with self.assertRaisesRegex(flashjit.DeviceFailedError, "/dev/shm"):
            parallel.of_processes("/flashjit-none", 0, 2)

    def test_calls_leak_no_references(self):
        q, lse = np.ones((1, 48, 2, 32), np.float32), np.ones((1, 2, 48), np.float32)
        given = {"q": q, "k": q.copy(), "v": q.copy(), "o": q.copy(), "lse": lse}

        def calls():
            group = parallel.of_threads(1)[0]
            with self.attention(group, num_heads_q=2) as attention:
                attention.forward(**given, workspace=attention.workspace(q))
            with parallel.LayoutConversion(ENGINE, group, "fp32", q.shape, "contiguous", "zigzag") as change:
                change.convert(q)
            attention = self.attention(group, num_heads_q=2)
            attention.prepare()
            with self.assertRaises(flashjit.InvalidArgumentError):
                attention.forward(**{**given, "lse": 3})

        check_no_leaks(self, calls, list(given.values()), settling=3, rounds=300, repeats=4)

    def test_numbers_of_the_whole(self):
        t = {"q": random((1, SEQLEN, 2, 32), seed=1), "k": random((1, SEQLEN, 2, 32), seed=2)}
        masks = ["causal", "sliding_window"]
        spec = {**SPEC, "mask": masks, "score": ["score * factor"], "scalars": {"factor": "fp32"}}

        def rank(group):
            with parallel.ParallelAttention(ENGINE, spec, group, seqlen_q=SEQLEN, num_heads_q=2) as attention:
                q, k = (own(t[name], 1, attention.layout, group) for name in ("q", "k"))
                made = {"o": np.empty_like(q), "lse": np.empty((1, 2, q.shape[1]), np.float32)}
                room = attention.workspace(q)
                attention.forward(q=q, k=k, v=k, workspace=room, window_left=9, window_right=0, factor=2.0, **made)
                return made

        row, key = np.indices((SEQLEN, SEQLEN))
        seen = (key <= row) & (key >= row - 9)
        o, _, bound, _ = attention(t["q"], t["k"], t["k"], seen=seen, score=lambda s: 2 * s)
        check(self, join(on_threads(3, rank), "zigzag", SEQLEN)["o"], o, 4 * bound)


if __name__ == "__main__":
    unittest.main()
