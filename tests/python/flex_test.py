"""FlexAttention's functions on flashjit: its published mods, against attention in float64.

On a GPU if PyTorch has one, with bf16; else on the CPU, with fp32.
"""

import gc
import itertools
import math
import re
import unittest
import weakref

import flashjit
import flex_mods
import torch
import torch.nn.attention.flex_attention as of_torch
from flashjit.compat import _flex, create_block_mask, flex_attention
from flex_mods import B, H, S
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch_test import DEVICE, DTYPE, ROUNDING

of_torch._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # its eager form: what is compared with is not compiled
BLOCK = 32


def inputs(heads_kv=H, rows=S, keys=S, dim=32, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = (B, H, rows, dim), (B, heads_kv, keys, dim), (B, heads_kv, keys, dim)
    return [(torch.rand(s, generator=generator) * 2 - 1).to(DTYPE).requires_grad_() for s in shapes]


def everywhere(mod, scores):
    """The mod's values for all entries, heads, rows and keys, with gradients."""
    b, h, q, k = (torch.arange(n) for n in scores.shape)
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, None, None)):
        mod = torch.vmap(mod, in_dims=dims)
    with TransformGetItemToIndex():
        return mod(scores, b, h, q, k)


def block_mask(mask_mod, make=create_block_mask, rows=S, keys=S):
    return make(mask_mod, B, H, rows, keys, device=DEVICE, BLOCK_SIZE=BLOCK)


# Cases that read the batch entry, or are common.
ALONE = {
    "identity", "everything", "causal", "entry offset", "one index after the other", "bias", "documents of entries",
    "checkerboard", "prefix", "lengths",
}  # fmt: skip


def in_pairs(mods, make):
    """The mods by name, each with another one, which is that of the second batch entry, but for those in ALONE."""
    names = [name for name in mods if name not in ALONE]
    made = {name: mods[name] for name in mods if name in ALONE}
    for first, second in itertools.zip_longest(names[::2], names[1::2]):
        made[f"{first}, {second}"] = make(mods[first], mods[second]) if second else mods[first]
    return made


def of_scores(first, second):
    mods = first[0], second[0]
    return lambda s, b, h, q, k: torch.where(b == 0, *[mod(s, b, h, q, k) for mod in mods]), (*first[1], *second[1])


def of_masks(first, second):
    return lambda b, h, q, k: torch.where(b == 0, first(b, h, q, k), second(b, h, q, k))


class Mods(unittest.TestCase):
    def compare(self, tensors, score_mod, mask_mod, more=(), steep=1.0, **call):
        """Compares o, lse and gradients with those of float64.

        The mod moves a score's error, (d + 4) roundings of the sum of magnitudes, by at most its steepest derivative,
        and adds some of its own: a function's, 2^-19 (on GPUs tanh's 2^-16), and roundings, both of its largest value.
        A weight is off by twice that, by a rounding for each key, and by the dtype's. ds = weight (dp - delta) mod' is
        off by what weight, dp and delta are, and by what mod' is: its curvature times the score's error, and roundings.
        `steep`: the most that a table's element changes a score by.
        """
        q, k, v = tensors
        mask = None if mask_mod is None else block_mask(mask_mod, rows=q.shape[2], keys=k.shape[2])
        grouped = q.shape[1] != k.shape[1]
        o, lse = flex_attention(*tensors, score_mod, mask, enable_gqa=grouped, return_lse=True, **call)
        exact = [x.detach().double().requires_grad_() for x in tensors]
        scale = call.get("scale") or q.shape[3] ** -0.5
        heads = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in exact[1:]]
        raw = exact[0] @ heads[0].transpose(2, 3) * scale
        scores = raw if score_mod is None else everywhere(score_mod, raw)
        kept = torch.ones_like(raw, dtype=torch.bool)
        if mask_mod is not None:
            kept = everywhere(lambda s, *x: mask_mod(*x), raw)
        kept = kept & (scores > -math.inf)
        wanted_lse = scores.masked_fill(~kept, -math.inf).logsumexp(-1)
        weights = torch.where(kept, scores - wanted_lse[..., None], -math.inf).exp()
        wanted = weights @ heads[1]

        seen = kept.any(-1)
        generator = torch.Generator(DEVICE).manual_seed(9)
        do, dlse = (torch.rand(x.shape, generator=generator).to(x.dtype) for x in (o, lse))
        dlse = torch.where(seen, dlse, 0)
        computed = torch.autograd.grad((o, lse), (*tensors, *more), (do, dlse), allow_unused=True)
        gradients = torch.autograd.grad((wanted, wanted_lse), (*exact, *more), (do.double(), dlse.double()), retain_graph=True)

        chosen = torch.where(kept, scores, 0)
        slope, = torch.autograd.grad(chosen.sum(), raw, create_graph=True)
        curved = torch.autograd.grad(slope.sum(), raw, allow_unused=True)[0] if slope.requires_grad else None
        slope = slope.abs().max().item()
        curvature = 0 if curved is None else curved.abs().max().item()
        narrow, unit = ROUNDING[DTYPE], 2.0**-24
        own = (2.0**-19 if DEVICE == "cpu" else 2.0**-16) + 32 * unit
        magnitude = max(1, raw.abs().max().item(), chosen.abs().max().item())
        largest = [x.abs().max().item() for x in exact]
        of_raw = (q.shape[3] + 4) * unit * q.shape[3] * scale * largest[0] * largest[1]
        of_score = slope * of_raw + (own if score_mod else unit) * magnitude
        w = 2 * of_score + (k.shape[2] + 8) * unit + 2.0**-19 + (2 * narrow if narrow > unit else 0)
        self.near(o, wanted, w * largest[2], narrow)
        self.near(lse[seen], wanted_lse[seen], w, 2 * unit)
        self.assertTrue((lse[~seen] == -math.inf).all())
        g = v.shape[3] * do.abs().max().item() * largest[2] + dlse.abs().max().item()
        column = weights.sum(2).max().item() * q.shape[1] // k.shape[1] + 1
        of_ds = 4 * g * (w * slope + curvature * of_raw + own * max(1, slope))
        bounds = [of_ds * scale * largest[1], of_ds * scale * largest[0] * column, 2 * w * do.abs().max().item() * column]
        bounds += [4 * g * (w + own) * steep * weights.sum().item() for _ in more]
        for i, (one, of, bound) in enumerate(zip(computed, gradients, bounds)):
            one = torch.zeros_like(of) if one is None else one
            self.near(one, of, bound, narrow if i < 3 else max(unit, ROUNDING.get(of.dtype, 0)))

        with torch.no_grad():  # and PyTorch's own eager form
            own_mask = None if mask_mod is None else block_mask(mask_mod, of_torch.create_block_mask, q.shape[2], k.shape[2])
            of_eager = of_torch.flex_attention(*(x.double() for x in tensors), score_mod, own_mask, enable_gqa=grouped, **call)
        self.near(wanted, of_eager, 2.0**-18 * magnitude * largest[2], 2.0**-18)  # indices there are float32

    def near(self, computed, wanted, bound, rounding):
        self.assertEqual(computed.shape, wanted.shape)
        off = (computed.double() - wanted.detach()).abs() - rounding * wanted.detach().abs()
        off = torch.where(computed == wanted, 0, off)
        self.assertLessEqual(off.max().item() if off.numel() else 0, bound)

    def test_each_with_one_of_the_others(self):
        """Every score_mod and every mask_mod, forward and backward.

        Pairs, one for each batch entry, take half as many kernels.
        """
        t = flex_mods.tables(device=DEVICE)
        scores = in_pairs(flex_mods.score_mods(t), of_scores)
        masks = in_pairs(flex_mods.mask_mods(t), of_masks)
        pairs = itertools.zip_longest(scores.items(), masks.items(), fillvalue=(None, (None, ())))
        for (of_score, (score_mod, read)), (of_mask, mask_mod) in pairs:
            if of_mask is None:
                mask_mod = None
            with self.subTest(score_mod=of_score, mask_mod=of_mask):
                self.compare(inputs(), score_mod, mask_mod, [t[name] for name in read], steep=5.0)


class Functions(unittest.TestCase):
    def setUp(self):
        self.tensors = inputs()

    def formulas_of(self, run):
        """How many formulas the calls of `run` are made of."""
        before = set(_flex._traces)
        run()
        return len(set(_flex._traces) - before)

    def test_numbers_are_arguments(self):
        """A new value of a captured number makes no new formula."""
        q, k, v = self.tensors

        def run(cap, width):
            t = flex_mods.tables(device=DEVICE)
            score_mod, mask_mod = flex_mods.score_mods(t, cap=cap)["softcap"][0], flex_mods.mask_mods(t, width)["window"]
            o = flex_attention(q, k, v, score_mod, block_mask(mask_mod))
            s = cap * torch.tanh((q @ k.mT).double() * q.shape[-1] ** -0.5 / cap)
            s = s.masked_fill(~everywhere(lambda s, *x: mask_mod(*x), s), -math.inf)
            torch.testing.assert_close(o.double(), s.softmax(-1) @ v.double(), rtol=2.0**-6, atol=2.0**-6)

        run(3.0, 20)
        self.assertEqual(self.formulas_of(lambda: [run(2.0 + i, 30 + i) for i in range(3)]), 0)

        class Capped:
            def __init__(self, cap):
                self.cap = cap

            def __call__(self, s, b, h, q, k):
                return self.cap * self.of_one(s / self.cap)

            def of_one(self, s):
                return torch.tanh(s) + 0 * self.cap

        def capped(cap):
            o = flex_attention(q, k, v, Capped(cap))
            s = cap * torch.tanh((q @ k.mT).double() * q.shape[-1] ** -0.5 / cap)
            torch.testing.assert_close(o.double(), s.softmax(-1) @ v.double(), rtol=2.0**-6, atol=2.0**-6)

        capped(3.0)
        self.assertEqual(self.formulas_of(lambda: [capped(0.25), capped(7.0)]), 0)

    def test_numbers_that_decide(self):
        """Numbers that the function looks at are part of the formula."""

        def mod(power, more):
            def score_mod(score, b, h, q, k):
                made = score
                for _ in range(power):
                    made = made * score
                return made + 1 if more else made

            return score_mod

        raw = (self.tensors[0] @ self.tensors[1].mT).double() * self.tensors[0].shape[-1] ** -0.5
        for power, more in ((0, 0), (1, 1), (2, 0)):
            o = flex_attention(*self.tensors, mod(power, more))
            wanted = (raw ** (power + 1)).softmax(-1) @ self.tensors[2].double()
            torch.testing.assert_close(o.double(), wanted, rtol=2.0**-6, atol=2.0**-6)

    def test_changes_are_seen(self):
        """What a function reads may change between calls: variables, globals, attributes, elements, contents."""
        q, k, v = self.tensors
        shift, items, model = torch.zeros(H), [torch.zeros(H)], flex_mods.Model(torch.zeros(S), 1.0)
        factor = 1.0

        def score_mod(score, b, h, q, k):
            return model.shifted(score * factor + shift[h] + items[0][h] * (k - q), b, h, q, k)

        def changed():
            o = flex_attention(q, k, v, score_mod)
            raw = everywhere(score_mod, (q @ k.mT).double() * q.shape[-1] ** -0.5)
            torch.testing.assert_close(o.double(), raw.softmax(-1) @ v.double(), rtol=2.0**-6, atol=2.0**-6)
            return o.detach()

        made = [changed()]
        factor = 3.0
        made.append(changed())
        items[0] = torch.linspace(-1, 1, H)
        made.append(changed())
        model.bias = torch.linspace(-9, 9, S)
        made.append(changed())
        model.gain = 0.125
        made.append(changed())
        documents = torch.zeros(S, dtype=torch.int64)
        mask = block_mask(lambda b, h, q, k: documents[k] == 0)
        made.append(flex_attention(q, k, v, None, mask))
        documents[S // 2 :] = 1  # in blocks that remain the mask's
        made.append(flex_attention(q, k, v, None, of_torch.BlockMask.from_kv_blocks(
            mask.kv_num_blocks + mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=BLOCK, mask_mod=mask.mask_mod,
            seq_lengths=(S, S))))  # fmt: skip
        for one, other in itertools.pairwise(made):
            self.assertFalse(torch.allclose(one, other))
        torch.testing.assert_close(made[-1], flex_attention(q, k[:, :, : S // 2], v[:, :, : S // 2]))

    def test_callables(self):
        q, k, v = self.tensors
        scaled = flex_mods.Scaled(torch.rand(H), 2.0)
        o = flex_attention(q, k, v, scaled)
        scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        wanted = scaled(scores, None, torch.arange(H)[:, None, None], None, None).softmax(-1) @ v.double()
        torch.testing.assert_close(o.double(), wanted, rtol=2.0**-6, atol=2.0**-6)
        gradients = [torch.autograd.grad(x.square().sum(), scaled.weights)[0] for x in (o, wanted)]
        torch.testing.assert_close(*gradients, rtol=2.0**-4, atol=2.0**-6)

    def test_sizes(self):
        """Groups of heads, other lengths, a scale, and lists of all entries and heads."""
        t = flex_mods.tables(device=DEVICE)
        mask = flex_mods.mask_mods(t)["first keys"]
        for heads_kv, (rows, keys), scale in ((1, (33, 70), 0.3), (2, (70, 33), None), (4, (1, 96), None)):
            with self.subTest(heads_kv=heads_kv, rows=rows, keys=keys):
                tensors = inputs(heads_kv, rows, keys)
                made = Mods()
                made.compare(tensors, None, mask, scale=scale)
        shared = create_block_mask(mask, None, None, S, S, device=DEVICE, BLOCK_SIZE=BLOCK)
        own = block_mask(mask)
        torch.testing.assert_close(*(flex_attention(*self.tensors, block_mask=one) for one in (shared, own)))
        theirs = of_torch.create_block_mask(mask, None, None, S, S, device=DEVICE, BLOCK_SIZE=(16, 200))
        torch.testing.assert_close(*(flex_attention(*self.tensors, block_mask=one) for one in (theirs, own)))

    def test_block_masks_are_those_of_pytorch(self):
        for name, mask_mod in flex_mods.mask_mods(flex_mods.tables(device=DEVICE)).items():
            if name not in ("causal documents", "windows of heads", "rows without keys", "everything"):
                continue
            for blocks in (32, (16, 64)):
                ours, theirs = (
                    make(mask_mod, B, H, S, S - 10, device=DEVICE, BLOCK_SIZE=blocks)
                    for make in (create_block_mask, of_torch.create_block_mask)
                )
                for one in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices"):
                    self.assertTrue(torch.equal(getattr(ours, one), getattr(theirs, one)), (name, one))
                self.assertEqual(ours.shape, theirs.shape)

    def test_lists_without_a_mask(self):
        """Blocks that were given as such."""
        counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor([[[[1, 0, 2], [0, 1, 2], [2, 1, 0]]]])
        mask = of_torch.BlockMask.from_kv_blocks(counts, indices.int(), BLOCK_SIZE=BLOCK)
        o = flex_attention(*self.tensors, block_mask=mask)
        q, k, v = (x.unflatten(2, (3, BLOCK)) for x in self.tensors)
        order = [1, 0, 2]
        raw = q @ k[:, :, order].mT * q.shape[-1] ** -0.5
        torch.testing.assert_close(o, (raw.softmax(-1) @ v[:, :, order]).flatten(2, 3), rtol=2.0**-6, atol=2.0**-6)

    def test_lists_that_change(self):
        q, k, v = (x[:, :, :BLOCK] for x in self.tensors)
        counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32)
        mask = of_torch.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, seq_lengths=(BLOCK, S))
        for listed in (1, 2, 3):
            mask.kv_num_blocks.fill_(listed)
            wanted = flex_attention(q, *(x[:, :, : listed * BLOCK] for x in self.tensors[1:]))
            torch.testing.assert_close(flex_attention(q, *self.tensors[1:], block_mask=mask), wanted)

    def test_modes(self):
        mod = flex_mods.score_mods(flex_mods.tables(device=DEVICE), cap=2.5)["composed"][0]
        wanted = flex_attention(*self.tensors, mod)
        with torch.inference_mode():
            fresh = lambda s, *x: mod(s, *x) + 0  # noqa: E731
            torch.testing.assert_close(flex_attention(*self.tensors, fresh), wanted)
        with torch.autocast(DEVICE, torch.bfloat16):
            again = lambda s, *x: mod(s, *x) - 0  # noqa: E731
            o = flex_attention(*self.tensors, again)
        self.assertEqual(o.dtype, torch.bfloat16)
        torch.testing.assert_close(o.to(wanted.dtype), wanted, rtol=2.0**-5, atol=2.0**-5)

    def test_results(self):
        o, lse = flex_attention(*self.tensors, return_lse=True)
        self.assertEqual((o.shape, lse.shape), (self.tensors[0].shape, (B, H, S)))
        if hasattr(of_torch, "AuxRequest"):
            same, aux = flex_attention(*self.tensors, return_aux=of_torch.AuxRequest(lse=True))
            self.assertTrue(torch.equal(same, o) and torch.equal(aux.lse, lse))

    def test_compiled(self):
        compiled = torch.compile(flex_attention, backend="eager")
        causal = block_mask(flex_mods.causal)
        call = self.tensors, None, causal
        torch.testing.assert_close(compiled(*call[0], None, causal), flex_attention(*call[0], None, causal))

    def test_functions_die(self):
        t = torch.zeros(H)
        score_mod = lambda s, b, h, q, k: s + t[h]  # noqa: E731
        flex_attention(*self.tensors, score_mod)
        alive = weakref.ref(score_mod), weakref.ref(t)
        del score_mod, t
        gc.collect()
        self.assertEqual([one() for one in alive], [None, None])


class Refusals(unittest.TestCase):
    def test_operators_by_name_and_line(self):
        tensors, vectors = inputs(), torch.rand(S, 8)

        def outer(score, b, h, q, k):
            return inner(score + 1)

        def inner(score):
            return torch.erf(score)

        for score_mod, line, what in (
            (outer, inner.__code__.co_firstlineno + 1, "erf"),
            (lambda s, b, h, q, k: s + vectors[q] @ vectors[k], None, "dot"),
            (lambda s, b, h, q, k: s if q > k else s + 1, None, "cannot be traced"),
            (lambda s, b, h, q, k: s + (q ^ k), None, "bitwise_xor"),
            (lambda s, b, h, q, k: s.detach(), None, "detach"),
            (lambda s, b, h, q, k: s.half().float(), None, "rounds"),
            (lambda s, b, h, q, k: torch.cumsum(vectors[q], 0)[0] + s, None, "cumsum"),
        ):
            line = line or score_mod.__code__.co_firstlineno
            with self.subTest(what), self.assertRaises(flashjit.UnsupportedError) as raised:
                flex_attention(*tensors, score_mod)
            self.assertRegex(str(raised.exception), what)
            self.assertIn(f"{re.sub('pyc$', 'py', __file__)}:{line} ", str(raised.exception))
            self.assertIn("would work", str(raised.exception))

    def test_arguments(self):
        q, k, v = inputs(heads_kv=2)
        large = torch.tensor([0, 2**40])
        causal = block_mask(flex_mods.causal)
        for call, what in (
            (lambda: flex_attention(q, k, v), "enable_gqa=True"),
            (lambda: flex_attention(q[:, :, :9], k, v, None, causal, enable_gqa=True), "9 and 96: .*Q_LEN=9"),
            (lambda: flex_attention(q[:1], k[:1], v[:1], None, causal, enable_gqa=True), "2 batch entries"),
            (lambda: flex_attention(q, q, q, lambda s, b, h, q, k: s + large[b]), "more than 32 bits"),
            (lambda: create_block_mask(lambda b, h, q, k: q, B, H, S, S, device=DEVICE), "returns torch.int32"),
        ):
            with self.subTest(what), self.assertRaisesRegex(flashjit.Error, what):
                call()
        if hasattr(of_torch, "AuxRequest"):
            with self.assertRaisesRegex(flashjit.UnsupportedError, "max_scores"):
                flex_attention(q, q, q, return_aux=of_torch.AuxRequest(max_scores=True))


if __name__ == "__main__":
    unittest.main()
