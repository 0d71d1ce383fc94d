"""flashjit.jax.attention and its gradients against attention in float64, on JAX's default device."""

import doctest
import unittest

import flashjit
import flashjit.jax
import jax
import jax.numpy as jnp
import numpy as np
from reference import ROUNDING, causal, random

jax.config.update("jax_enable_x64", True)
ON_CPU = jax.default_backend() == "cpu"
DTYPE = jnp.float32 if ON_CPU else jnp.bfloat16
attention = flashjit.jax.attention


def load_tests(loader, tests, pattern):
    if ON_CPU:
        tests.addTests(doctest.DocTestSuite(flashjit.jax))
    return tests


def plain(q, k, v, *, seen=None, score=None, sinks=None, kept=None):
    """(o, lse, weights); kept: what dropout multiplies weights by."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    scores = scores if score is None else score(scores)
    scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
    more = [] if sinks is None else [jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))]
    lse = jax.nn.logsumexp(jnp.concatenate([scores, *more], -1), -1)
    weights = jnp.exp(scores - lse[..., None])
    return jnp.einsum("bhij,bjhd->bihd", weights if kept is None else weights * kept, v), lse, weights


def inputs(dtype=DTYPE, batch=2, rows=33, keys=65, heads=4, heads_kv=2, dim=32):
    shapes = (batch, rows, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim)
    return [jnp.asarray(random(shape, np.dtype(dtype), seed)) for seed, shape in enumerate(shapes)]


class Attention(unittest.TestCase):
    def compare(self, tensors, expected=lambda: {}, more=None, **call):
        """Compares o, lse and gradients of q, k, v and `more`, arrays by name; torch_test.py derives the bounds."""
        more = more or {}
        count = len(tensors)
        exact = [x.astype(jnp.float64) for x in (*tensors, *more.values())]
        generator = np.random.default_rng(1)
        shape = (*tensors[0].shape[:3], tensors[2].shape[3])
        do = jnp.asarray(generator.uniform(0, 1, shape)).astype(tensors[0].dtype)
        dlse = jnp.asarray(generator.uniform(0, 1, (shape[0], shape[2], shape[1])), jnp.float32)

        @jax.jit
        def ours(*arrays):
            named = dict(zip(more, arrays[count:]))
            return attention(*arrays[:count], return_lse=True, **named, **call)

        def theirs(*arrays):
            return plain(*arrays[:count], **expected(*arrays[count:]))[:2]

        (o, lse), backward = jax.vjp(ours, *tensors, *more.values())
        (wanted, wanted_lse), wanted_backward = jax.vjp(theirs, *exact)
        gradients = backward((do, dlse))
        wanted_gradients = wanted_backward((do.astype(jnp.float64), dlse.astype(jnp.float64)))

        q, k, v = tensors
        narrow, unit = ROUNDING[q.dtype.name], 2.0**-24
        scale, group = q.shape[3] ** -0.5, q.shape[2] // k.shape[2]
        settings = expected(*exact[count:])
        weights = plain(*exact[:count], **settings)[2]
        most = float(jnp.max(settings.get("kept", jnp.ones(1))))
        largest = [float(abs(x).max()) for x in exact[:3]]
        w = 2 * (q.shape[3] + 4) * unit * q.shape[3] * scale * largest[0] * largest[1] + 2.0**-19
        w += (k.shape[1] + q.shape[3] + 8) * unit + (2 * narrow if narrow > unit else 0)
        g = v.shape[3] * float(abs(do).max()) * largest[2] * most + float(abs(dlse).max())
        column = float(weights.sum(2).max()) * group
        bounds = [4 * w * g * scale * largest[1], 4 * w * g * scale * largest[0] * column]
        bounds += [2 * w * float(abs(do).max()) * column * most]
        bounds += [4 * w * g * float(weights.sum()) / min(x.size, 4) for x in more.values()]
        self.near(o, wanted, w * largest[2] * most, narrow)
        self.near(lse, wanted_lse, w, 2 * unit)
        for one, of, bound, given in zip(gradients, wanted_gradients, bounds, (*tensors, *more.values())):
            self.near(one, of, bound, narrow)
            self.assertEqual((one.shape, one.dtype), (given.shape, given.dtype))

    def near(self, computed, wanted, bound, rounding):
        off = abs(np.asarray(computed, np.float64) - np.asarray(wanted)) - rounding * abs(np.asarray(wanted))
        self.assertLessEqual(np.where(np.asarray(computed) == wanted, 0, off).max(), bound)

    def test_dtypes(self):
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16) if ON_CPU else (jnp.float16, jnp.bfloat16):
            with self.subTest(dtype=dtype):
                self.compare(inputs(dtype), lambda: {"seen": causal(33, 65)}, mask="causal")

    def test_arguments(self):
        shift = np.arange(65)[None] - np.arange(33)[:, None] - 32
        self.compare(inputs(), lambda: {"seen": (shift >= -5) & (shift <= 3)}, window=(5, 3))
        self.compare(inputs(), lambda: {"score": lambda s: 2 * jnp.tanh(s / 2)}, score="softcap", softcap=2)
        lengths = jnp.asarray([40, 7], jnp.int32)
        seen = np.arange(65) < np.asarray(lengths)[:, None, None, None]
        self.compare(inputs(), lambda: {"seen": seen}, seqlens_k=lengths)

    def test_tables(self):
        bias = jnp.asarray(random((1, 4, 33, 65)))
        self.compare(inputs(), lambda b: {"score": lambda s: s + b}, {"bias": bias}, score="bias")
        self.compare(inputs(), lambda t: {"sinks": t}, {"sink_logits": jnp.asarray([0.5, -1, 2, 0], jnp.float32)})
        document = jnp.asarray(np.arange(65) // 20, jnp.int32)[None].repeat(2, 0)
        seen = (document[:, None, 32:, None] == document[:, None, None, :]) & causal(33, 65)
        self.compare(
            inputs(),
            lambda: {"seen": seen},
            mask=["causal", "document[key] == document[position]"],
            document=document,
            tables={"document": ["batch", "seqlen_k"]},
        )

    def test_packed(self):
        starts = jnp.asarray([0, 5, 5, 21], jnp.int32)
        q, k, v = (x[0] for x in inputs(batch=1, rows=21, keys=21))
        call = {"mask": "causal", "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 16,
                "max_seqlen_k": 16}  # fmt: skip
        o, lse = attention(q, k, v, return_lse=True, **call)
        self.assertEqual(lse.shape, (4, 21))
        of_k = jax.grad(lambda k: attention(q, k, v, **call).astype(jnp.float32).sum())(k)
        for begin, end in ((0, 5), (5, 21)):
            some = [x[None, begin:end] for x in (q, k, v)]
            np.testing.assert_allclose(o[None, begin:end], attention(*some, mask="causal"), rtol=0.01, atol=1e-6)
            loss = lambda k: attention(some[0], k, some[2], mask="causal").astype(jnp.float32).sum()  # noqa: B023, E731
            np.testing.assert_allclose(of_k[None, begin:end], jax.grad(loss)(some[1]), rtol=0.02, atol=1e-5)

    def test_dropout(self):
        q, k = jnp.zeros((2, 33, 4, 64), DTYPE), jnp.zeros((2, 64, 4, 64), DTYPE)
        eye = jnp.broadcast_to(jnp.eye(64, dtype=DTYPE)[None, :, None], k.shape)
        drop = jax.jit(lambda q, k, v, key: attention(q, k, v, dropout_p=0.25, dropout_key=key))
        keys = jax.random.key(3), jax.random.key(4)
        first, second = (drop(q, k, eye, key) for key in keys)
        self.assertTrue(jnp.array_equal(first, drop(q, k, eye, keys[0])))
        self.assertFalse(jnp.array_equal(first, second))
        kept = (jnp.transpose(first, (0, 2, 1, 3)) > 0) / 0.75
        self.compare(inputs(keys=64), lambda: {"kept": kept}, dropout_p=0.25, dropout_key=keys[0])

    def test_transforms(self):
        q, k, v = inputs()
        compiled = jax.jit(lambda *x: attention(*x, mask=["causal"], window=(9, None)))
        for _ in range(3):
            compiled(q, k, v)
        self.assertEqual(compiled._cache_size(), 1)
        each = jax.vmap(lambda *x: attention(*x))(q[:, None], k[:, None], v[:, None])
        np.testing.assert_allclose(each[:, 0], attention(q, k, v), rtol=0.01, atol=1e-6)
        o = attention(q, k, v, out_dtype="fp32")
        self.assertEqual(o.dtype, jnp.float32)


class Errors(unittest.TestCase):
    def refused(self, error, *texts, args=None, **call):
        with self.assertRaises(error) as caught:
            jax.block_until_ready(attention(*(inputs() if args is None else args), **call))
        for text in texts:
            self.assertIn(text, str(caught.exception))

    def test_bad_input(self):
        q, k, v = inputs()
        wrong = flashjit.InvalidArgumentError
        self.refused(wrong, "no keyword 'casual'", casual=True)
        self.refused(wrong, "argument k is of type list", args=(q, [1.0], v))
        self.refused(wrong, "dimensions", args=(q[0], k, v))
        self.refused(wrong, "dropout_key", dropout_p=0.5)
        self.refused(wrong, "argument cap", score="score * cap", cap=jnp.float32(2))
        self.refused(wrong, "dtype fp16", args=(q, k.astype(jnp.float16), v))
        self.refused(flashjit.InvalidSpecError, "unknown name", mask="key <= nothing")
        self.refused(jax.errors.JaxRuntimeError, "k has shape", args=(q, k[:1], v))
        self.refused(jax.errors.JaxRuntimeError, "window_left", window=(-7, 0))

    def test_second_derivatives(self):
        loss = lambda q: attention(q, q, q).astype(jnp.float32).sum()  # noqa: E731
        with self.assertRaisesRegex(ValueError, "cannot be differentiated"):
            jax.grad(lambda q: jax.grad(loss)(q).sum())(inputs()[0])


if __name__ == "__main__":
    unittest.main()
