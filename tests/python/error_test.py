"""Bad input: each exception says what was asked, what is wrong and what would work."""

import pickle
import unittest

import flashjit
import numpy as np
from reference import random

Q, K = random((2, 16, 4, 32)), random((2, 16, 2, 32))


class Errors(unittest.TestCase):
    def refused(self, error, *texts, call=flashjit.attention, args=(Q, K, K), **keywords):
        with self.assertRaises(error) as caught:
            call(*args, **keywords)
        for text in texts:
            self.assertIn(text, caught.exception.message)
        self.assertEqual(caught.exception.code, error.code)
        return caught.exception

    def test_one_class_for_each_code(self):
        kinds = [getattr(flashjit, name) for name in flashjit.__all__ if name.endswith("Error")]
        self.assertEqual(len(kinds), 13)
        self.assertTrue(all(issubclass(kind, flashjit.Error) for kind in kinds))
        self.assertEqual(len({kind.code for kind in kinds}), 12)

    def test_errors_can_be_pickled(self):
        error = self.refused(flashjit.InvalidArgumentError, args=(Q, K, 3))
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(again), again.message, again.detail), (type(error), error.message, error.detail))

    def test_no_tensors(self):
        self.refused(flashjit.InvalidArgumentError, "argument k is of type list", "NumPy", args=(Q, [1.0], K))
        self.refused(flashjit.InvalidArgumentError, "argument q is missing", args=(None, K, K))
        self.refused(flashjit.InvalidArgumentError, "argument v is missing", args=(Q, K, None))
        self.refused(flashjit.InvalidArgumentError, "argument k", args=(Q, None, K))

    def test_keywords(self):
        self.refused(flashjit.InvalidArgumentError, "no keyword 'causal'", causal=True)
        self.refused(flashjit.InvalidArgumentError, "'seqlen_k'", "'seqlens_k' would work", seqlen_k=Q)
        self.refused(flashjit.InvalidArgumentError, "no keyword 'seqlens_q'", call=flashjit.decode, seqlens_q=Q)
        self.refused(flashjit.InvalidArgumentError, "window is 3", "(left, right)", window=3)
        self.refused(flashjit.InvalidArgumentError, "scale is of type str", "float", scale="large")
        self.refused(
            flashjit.InvalidArgumentError,
            "max_seqlen_q",
            max_seqlen_q=2.5,
            cu_seqlens_q=np.array([0, 1], np.int32),
            args=(Q[0], K[0], K[0]),
        )
        self.refused(flashjit.InvalidArgumentError, "dropout_seed", dropout_p=0.1)
        seed = np.array([1], np.int64)
        self.refused(flashjit.InvalidArgumentError, "two int64 tensors", dropout_p=0.5, dropout_seed=seed)
        self.refused(
            flashjit.InvalidArgumentError, "two int64 tensors", dropout_p=0.5, dropout_seed=1, dropout_offset=seed
        )
        self.refused(flashjit.InvalidArgumentError, "dropout_p", dropout_p=1.5, dropout_seed=1)
        self.refused(flashjit.InvalidArgumentError, "seqlens_k", "tensor would work", seqlens_k=3)
        self.refused(flashjit.InvalidArgumentError, "scale is a tensor", scale=np.ones(1, np.float32))
        self.refused(flashjit.InvalidArgumentError, "stream is of type str", stream="current")
        for name in ("bias", "softcap"):
            self.refused(flashjit.InvalidArgumentError, f"argument {name} is None", score=name, **{name: None})

    def test_dtypes(self):
        self.refused(
            flashjit.InvalidArgumentError, "argument q has dtype float64", "fp32", args=(Q.astype(float), K, K)
        )
        self.refused(flashjit.InvalidArgumentError, "argument q has dtype int32", args=(Q.astype(np.int32), K, K))
        self.refused(
            flashjit.InvalidArgumentError, "argument k has dtype fp16 and q fp32", args=(Q, K.astype(np.float16), K)
        )
        self.refused(flashjit.InvalidArgumentError, "v", "fp16", args=(Q, K, K.astype(np.float16)))
        self.refused(flashjit.InvalidArgumentError, "seqlens_k", "int32", seqlens_k=np.ones(2, np.int64))
        self.refused(flashjit.InvalidSpecError, "o_dtype", out_dtype="fp64")

    def test_shapes(self):
        self.refused(flashjit.InvalidArgumentError, "argument q has 3 dimensions", "cu_seqlens_q", args=(Q[0], K, K))
        self.refused(flashjit.InvalidArgumentError, "argument k has 2 dimensions", args=(Q, K[0, 0], K))
        self.refused(flashjit.InvalidArgumentError, "packed", cu_seqlens_q=np.array([0, 16], np.int32))
        self.refused(flashjit.InvalidArgumentError, "at most 6", args=(Q, K[None, None, None], K))
        self.refused(flashjit.InvalidArgumentError, "k", args=(Q, K[:1], K))
        self.refused(flashjit.InvalidArgumentError, "heads", args=(Q[:, :, :3], K, K))
        self.refused(flashjit.InvalidSpecError, "head_dim", args=(Q[..., :7].copy(), K[..., :7].copy(), K))
        self.refused(flashjit.InvalidArgumentError, "parts_o has 2 dimensions", call=flashjit.merge, args=(K[0, 0], K))

    def test_last_dimension_has_gaps(self):
        wide = random((2, 16, 4, 64))[..., ::2]
        self.refused(flashjit.InvalidArgumentError, "q", "contiguous", args=(wide, K, K))

    def test_output(self):
        self.refused(flashjit.InvalidArgumentError, "o", out=np.empty((2, 16, 4, 16), np.float32))
        fixed = np.empty_like(Q)
        fixed.flags.writeable = False
        self.refused(flashjit.InvalidArgumentError, "argument out is read-only", "copy", out=fixed)
        self.refused(flashjit.InvalidArgumentError, "share", out=Q)

    def test_read_only_gradients(self):
        bias = {"dtype": "fp32", "shape": ["batch or 1", "heads_q or 1", "seqlen_q or 1", "seqlen_k"], "grad": True}
        spec = {"op": "backward", "dtype": "fp32", "head_dim": 32, "score": ["bias"], "tables": {"bias": bias}}
        kernel = flashjit.Engine("cpu").get(spec)
        fixed = np.zeros((1, 1, 16, 16), np.float32)
        given = {"bias": fixed, "d_bias": fixed.copy()}
        for name in ("dq", "d_bias"):
            with self.subTest(name=name):
                wrong = {**given, name: fixed}
                fixed.flags.writeable = False
                self.refused(
                    flashjit.InvalidArgumentError, f"argument {name} is read-only", call=kernel.launch, args=(), **wrong
                )

    def test_read_only_inputs_are_read(self):
        fixed = Q.copy()
        fixed.flags.writeable = False
        np.testing.assert_array_equal(flashjit.attention(fixed, K, K), flashjit.attention(Q, K, K))

    def test_formulas(self):
        self.refused(flashjit.InvalidSpecError, "score", score="score +")
        self.refused(flashjit.InvalidSpecError, "cap", score="score * cap")
        self.refused(
            flashjit.InvalidArgumentError,
            "table 'bias_of' has no shape",
            "tables=",
            score="score + bias_of[key]",
            bias_of=np.ones(16, np.float32),
        )
        self.refused(
            flashjit.InvalidArgumentError, "is declared, but not given", tables={"x": ["batch"]}, score="x[batch]"
        )
        self.refused(flashjit.InvalidSpecError, "banana", mask="banana")

    def test_objects(self):
        new = flashjit.InvalidArgumentError
        self.refused(flashjit.InvalidSpecError, call=flashjit.Spec, args=("{",))
        self.refused(
            flashjit.InvalidSpecError,
            "colour",
            call=flashjit.Spec,
            args=({"op": "forward", "dtype": "fp32", "head_dim": 32, "colour": 1},),
        )
        self.refused(new, "spec", call=flashjit.Spec, args=({1, 2},))
        self.refused(new, "policy is 'fast'", "heuristic", call=flashjit.Engine, args=(), policy="fast")
        self.refused(new, "cache_dir is of type int", call=flashjit.Engine, args=(), cache_dir=3)
        self.refused(new, "threads", call=flashjit.Engine, args=(), threads=3)
        self.refused(new, "device", call=flashjit.Engine, args=("tpu",))
        self.refused(new, "device is of type int", call=flashjit.Engine, args=(0,))
        engine = flashjit.Engine("cpu")
        spec = {"op": "forward", "dtype": "fp32", "head_dim": 32, "lse": False}
        self.refused(new, "seqlen", call=engine.get, args=(spec,), seqlen=3)
        self.refused(new, call=engine.get, args=(spec,), seqlen_q=-3)
        kernel = engine.get(spec)
        self.refused(new, "by name", call=kernel.launch, args=(Q,))
        self.refused(new, '"query"', call=kernel.launch, args=(), query=Q)
        self.refused(new, "k", call=kernel.launch, args=(), q=Q)
        self.refused(new, "stream", call=kernel.launch, args=(), q=Q, k=K, v=K, o=Q.copy(), stream=3)
        self.refused(new, "window_left", call=kernel.launch, args=(), q=Q, k=K, v=K, o=Q.copy(), window_left=1)

    def test_no_compiler_is_needed_but_a_kernel(self):
        engine = flashjit.Engine("cpu", cache_dir="", cache_path="", policy="require_prebuilt")
        self.refused(flashjit.NotPrebuiltError, "prebuil", engine=engine)

    def test_limits(self):
        engine = flashjit.Engine("cpu", cache_dir="", cache_path="", compile_bytes=1000)
        self.refused(flashjit.LimitExceededError, "1000", engine=engine)

    def test_no_gpu(self):
        with self.assertRaises(flashjit.Error) as caught:
            flashjit.Engine("cuda:99")
        self.assertIn(caught.exception.code, ("target_unavailable", "device_failed", "invalid_argument"))


if __name__ == "__main__":
    unittest.main()
