"""Attention in float64, and how far a kernel may be from it."""

import numpy as np

# Half a unit in the last place of a number near 1.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def random(shape, dtype=np.float32, seed=0, low=-1.0, high=1.0):
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(dtype)


def attention(q, k, v, *, seen=None, score=None, scale=None, sinks=None):
    """(o, lse, bound of o, bound of lse).

    q: [batch, rows, heads_q, head_dim]; seen: broadcasts to [batch, heads_q, rows, keys]; score: a function of the
    scaled products.

    A product's float32 sum of d terms errs by d + 1 roundings of the sum of magnitudes, and exp by 2^-20. Every weight
    is then off by that factor, the sum of weights by the same and by a rounding for each key. Before they meet V,
    weights are rounded to the dtype, and so is the output.
    """
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k64, v64 = (np.repeat(x, group, axis=2) for x in (k64, v64))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    raw = np.einsum("bihd,bjhd->bhij", q64, k64) * scale
    sizes = np.einsum("bihd,bjhd->bhij", abs(q64), abs(k64)) * abs(scale)
    scores = raw if score is None else score(raw)
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[None, :, None, None])
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None, None] - top)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    o = np.einsum("bhij,bjhd->bihd", weights / np.where(total > 0, total, 1), v64)

    unit, narrow = ROUNDING["float32"], ROUNDING[np.dtype(q.dtype).name]
    of_score = (q.shape[3] + 4) * unit * sizes.max() + 2.0**-20
    of_weight = 2 * of_score + (k.shape[1] + 4) * unit + (narrow if narrow > unit else 0)
    largest = abs(v64).max() if v64.size else 0
    return o, lse, of_weight * largest + narrow * abs(o), of_score + (k.shape[1] + 4) * unit + 2 * unit * abs(lse)


def causal(rows, keys):
    return np.arange(keys)[None, :] <= np.arange(rows)[:, None] + keys - rows


def check(test, computed, wanted, bound, what="o"):
    computed = np.asarray(computed, np.float64)
    test.assertEqual(computed.shape, wanted.shape, what)
    off = np.where(computed == wanted, 0, abs(computed - wanted))
    worst = np.unravel_index(np.nanargmax(off - bound), off.shape) if off.size else None
    test.assertTrue(
        off.size == 0 or bool(np.all(off <= bound)),
        f"{what}: {computed[worst] if worst else ''} at {worst}, wanted {wanted[worst] if worst else ''}",
    )
