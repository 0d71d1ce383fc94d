"""Engine, Spec, Kernel and Prepared."""

import gc
import json
import tempfile
import unittest
import weakref

import flashjit
import numpy as np
from leaks import check_no_leaks
from reference import attention, causal, check, random

FORWARD = {"op": "forward", "dtype": "fp32", "head_dim": 32, "mask": ["causal"]}
SIZES = {"batch": 1, "seqlen_q": 16, "seqlen_k": 16, "num_heads_q": 4, "num_heads_kv": 2}


def tensors():
    q, k, v = random((1, 16, 4, 32), seed=1), random((1, 16, 2, 32), seed=2), random((1, 16, 2, 32), seed=3)
    return {"q": q, "k": k, "v": v, "o": np.zeros_like(q), "lse": np.zeros((1, 4, 16), np.float32)}


class Objects(unittest.TestCase):
    engine = flashjit.Engine("cpu")

    def check(self, t):
        wanted, wanted_lse, bound, bound_lse = attention(t["q"], t["k"], t["v"], seen=causal(16, 16))
        check(self, t["o"], wanted, bound)
        check(self, t["lse"], wanted_lse, bound_lse, "lse")

    def test_specs_are_text_or_fields(self):
        for given in (FORWARD, json.dumps(FORWARD), flashjit.Spec(FORWARD)):
            t = tensors()
            self.engine.get(given, **SIZES).launch(**t)
            self.check(t)
        self.assertEqual(json.loads(flashjit.Spec(FORWARD).json), FORWARD)

    def test_info(self):
        info = self.engine.get(FORWARD, **SIZES).info
        self.assertEqual(info["spec"]["mask"], ["causal"])
        self.assertIn("target", info)

    def test_arguments_that_are_none_are_left_out(self):
        t = tensors()
        self.engine.get(FORWARD, **SIZES).launch(**t, softmax_scale=None, stream=None)
        self.check(t)

    def test_named_arguments(self):
        spec = {
            **FORWARD,
            "lse": False,
            "mask": ["key <= last[batch] + more"],
            "score": ["score * factor"],
            "tables": {"last": {"dtype": "int32", "shape": ["batch"]}},
            "scalars": {"more": "int32", "factor": "fp32"},
        }
        t = tensors()
        del t["lse"]
        self.engine.get(spec, **SIZES).launch(**t, last=np.array([4], np.int32), more=2, factor=3, softmax_scale=0.1)
        wanted, _, bound, _ = attention(
            t["q"], t["k"], t["v"], seen=np.arange(16) <= 6, scale=0.1, score=lambda s: 3 * s
        )
        check(self, t["o"], wanted, 3 * bound)

    def test_gradients(self):
        t = tensors()
        self.engine.get(FORWARD, **SIZES).launch(**t)
        backward = self.engine.get({**FORWARD, "op": "backward"}, **SIZES)
        size = backward.workspace_bytes(**SIZES)
        room = np.empty(size + 64, np.uint8)
        room = room[-room.ctypes.data % 64 :][:size]
        made = {name: np.zeros_like(t[name[1]]) for name in ("dq", "dk", "dv")}
        do = random((1, 16, 4, 32), seed=4)
        backward.launch(**t, do=do, workspace=room, **made)
        # The loss is the sum of o * do: its change along a direction of v is linear in v.
        along = random(t["v"].shape, seed=5)
        ahead, _, bound, _ = attention(t["q"], t["k"], along, seen=causal(16, 16))
        self.assertLess(
            abs((ahead * do).sum() - (made["dv"].astype(np.float64) * along).sum()), 4 * (bound * abs(do)).sum()
        )

    def test_prepared(self):
        kernel = self.engine.get(FORWARD, **SIZES)
        t = tensors()
        prepared = kernel.prepare(**t)
        prepared.launch()
        self.check(t)
        t["q"][:] = random((1, 16, 4, 32), seed=9)
        prepared.launch(stream=None)
        self.check(t)


class Views(unittest.TestCase):
    """What a notebook shows."""

    def test_spec(self):
        self.assertEqual(flashjit.Spec(FORWARD)._repr_json_(), FORWARD)

    def test_mask(self):
        picture = flashjit.draw_mask(flashjit.Spec(FORWARD), seqlen_q=64, tile_m=16, tile_n=16)
        self.assertIn("<svg", picture._repr_svg_())
        self.assertEqual(flashjit.draw_mask(json.dumps(FORWARD), seqlen_q=64, tile_m=16, tile_n=16).svg, picture.svg)
        with self.assertRaisesRegex(flashjit.InvalidSpecError, "colour"):
            flashjit.draw_mask({**FORWARD, "colour": 3})
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "--rows"):
            flashjit.draw_mask(FORWARD, rows=3)

    def test_tuning(self):
        with tempfile.TemporaryDirectory() as folder:
            report = flashjit.tune(FORWARD, seqlens=16, heads_q=1, budget="0.2s", cache_dir=folder)
        self.assertIn("</html>", report._repr_html_())
        self.assertIsInstance(report.facts, dict)


class Lifetimes(unittest.TestCase):
    def test_kernel_keeps_engine_alive(self):
        engine = flashjit.Engine("cpu")
        gone = weakref.ref(engine)
        kernel = engine.get(FORWARD, **SIZES)
        del engine
        gc.collect()
        self.assertIsNotNone(gone())
        kernel.launch(**tensors())
        del kernel
        gc.collect()
        self.assertIsNone(gone())

    def test_engine_with_cached_calls_dies(self):
        engine = flashjit.Engine("cpu")
        x = random((1, 16, 4, 32))
        flashjit.attention(x, x, x, engine=engine)
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        self.assertIsNone(gone())

    def test_prepared_keeps_tensors_alive(self):
        class Array(np.ndarray):
            pass

        t = {name: array.view(Array) for name, array in tensors().items()}
        watched = [weakref.ref(array) for array in t.values()]
        q, o = np.array(t["q"]), weakref.ref(t["o"])
        kernel = flashjit.Engine("cpu").get(FORWARD, **SIZES)
        prepared = kernel.prepare(**t)
        k, v = np.array(t["k"]), np.array(t["v"])
        del t, kernel
        gc.collect()
        prepared.launch()
        wanted, _, bound, _ = attention(q, k, v, seen=causal(16, 16))
        check(self, o(), wanted, bound)
        del prepared
        gc.collect()
        self.assertEqual([one() for one in watched], [None] * 5)

    def test_calls_leak_no_references(self):
        q, k, v = random((1, 16, 4, 32), seed=1), random((1, 16, 2, 32), seed=2), random((1, 16, 2, 32), seed=3)
        out, slopes, lengths = np.empty_like(q), np.ones(4, np.float32), np.array([9], np.int32)
        t = tensors()
        kernel = flashjit.Engine("cpu").get(FORWARD, **SIZES)
        new = random((1, 1, 2, 32), seed=4)
        slots = np.array([3, 5])
        stream, cap = None, 1234567.5
        watched = [q, k, v, out, slopes, lengths, slots, cap, *t.values(), kernel]

        def calls():
            flashjit.attention(q, k, v, mask="causal", out=out, stream=stream)
            flashjit.attention(q, k, v, mask=["causal"], score=["alibi"], alibi_slopes=slopes, return_lse=True)
            flashjit.attention(q, k, v, score="softcap", softcap=cap, scale=cap)
            flashjit.decode(q, k, v, seqlens_k=lengths)
            flashjit.append_kv(k, v, new, new, append_positions=lengths)
            flashjit.copy_kv(k, v, slots, slots)
            flashjit.merge(out[None], np.zeros((1, 1, 4, 16), np.float32), return_lse=True)
            flashjit.make_block_lists(q, k, mask="causal")
            kernel.launch(**t)
            kernel.prepare(**t).launch()
            for bad in ({"q": 3}, {"q": out[..., :8]}, {"nothing": q}, {"softmax_scale": "x"}):
                with self.assertRaises(flashjit.Error):
                    kernel.launch(**{**t, **bad})
            for bad in ({"k": "text"}, {"k": k[0]}, {"alibi_slope": slopes}, {"window": 3}, {"scale": "x"}):
                with self.assertRaises(flashjit.Error):
                    flashjit.attention(**{"q": q, "k": k, "v": v, "score": ["alibi"], **bad})

        check_no_leaks(self, calls, watched, settling=3, rounds=100, repeats=4)


if __name__ == "__main__":
    unittest.main()
