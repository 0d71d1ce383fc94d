"""FlashAttention's functions on flashjit: the parameters of its published tests, against attention in float64.

On a GPU if PyTorch has one, with bf16; else on the CPU, with fp32.
"""

import itertools
import random
import sys
import unittest

import flashjit
import torch
import torch_test
from flashjit.compat import flash_attn, flash_attn_interface
from torch_test import DEVICE, DTYPE, inputs, plain


def shifts(rows, keys):
    """How far each key lies behind each row's position, where the last row is at the last key."""
    return torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)


def seen(rows, keys, causal, window):
    shift = shifts(rows, keys)
    left, right = window
    kept = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        kept &= shift >= -left
    return kept & (shift <= right) if right >= 0 else kept


def scored(rows, keys, softcap, slopes):
    """The score's function: a cap, then a bias by distance. slopes: [heads] or [batch, heads]."""

    def score(s):
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - slopes.double().reshape(-1, slopes.shape[-1])[..., None, None] * shifts(rows, keys).abs()
        return s

    return score


def compare(*tensors, **call):
    torch_test.Gradients().compare(*tensors, **call)


def of_version(version):
    if version == 2:
        return lambda *x, return_lse, **call: flash_attn.flash_attn_func(*x, **call, return_attn_probs=return_lse)[:2]
    return lambda *x, return_lse, **call: flash_attn_interface.flash_attn_func(*x, **call, return_attn_probs=return_lse)


class Functions(unittest.TestCase):
    def test_grid(self):
        """Masks, caps and slopes with each other, forward and backward."""
        slopes = {0: None, 1: torch.rand(4), 2: torch.rand(2, 4)}
        masks = (False, (-1, -1)), (True, (-1, -1)), (False, (7, 3)), (True, (9, -1)), (False, (-1, 5)), (True, (6, 4))
        for (causal, window), softcap, biased in itertools.product(masks, (0.0, 15.0), (0, 1, 2)):
            with self.subTest(causal=causal, window=window, softcap=softcap, biased=biased):
                expected = {"seen": seen(33, 65, causal, window), "score": scored(33, 65, softcap, slopes[biased])}
                call = {"causal": causal, "window_size": window, "softcap": softcap}
                if not biased:
                    compare(inputs(), expected, attend=of_version(3), **call)
                else:
                    call["alibi_slopes"] = slopes[biased]
                compare(inputs(), expected, attend=of_version(2), **call)

    def test_heads_and_sizes(self):
        for heads_kv, (rows, keys), dim in itertools.product((1, 2, 4), ((1, 40), (17, 17), (33, 129)), (32, 64)):
            with self.subTest(heads_kv=heads_kv, rows=rows, keys=keys, dim=dim):
                tensors = inputs(rows=rows, keys=keys, heads_kv=heads_kv, dim=dim)
                expected = {"seen": seen(rows, keys, True, (-1, -1)), "scale": 0.2}
                for version in (2, 3):
                    compare(tensors, expected, attend=of_version(version), causal=True,
                                      softmax_scale=0.2)  # fmt: skip

    def test_rows_without_keys(self):
        q, k, v = inputs(rows=20, keys=8)
        o, lse, weights = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        self.assertIsNone(weights)
        self.assertFalse(o[:, :12].any())
        self.assertTrue((lse[..., :12] == -torch.inf).all() and lse[..., 12:].isfinite().all())
        self.assertTrue(torch.autograd.grad(o.sum(), k)[0].isfinite().all())

    def test_packed_tensors(self):
        q, k, v = inputs(rows=20, keys=20, heads_kv=4)
        wanted = flash_attn.flash_attn_func(q, k, v, causal=True)
        gradients = torch.autograd.grad(wanted.square().sum(), (q, k, v))
        qkv, kv = torch.stack([q, k, v], 2), torch.stack([k, v], 2)
        joined = torch.cat([q, k, v], 2)
        for o in (
            flash_attn.flash_attn_qkvpacked_func(qkv, causal=True),
            flash_attn.flash_attn_kvpacked_func(q, kv, causal=True),
            flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True),
            flash_attn_interface.flash_attn_qkvpacked_func(joined, causal=True, num_heads_q=4),
        ):
            torch.testing.assert_close(o, wanted)
            torch.testing.assert_close(torch.autograd.grad(o.square().sum(), (q, k, v)), gradients)

    def test_dropout(self):
        q, k, v = inputs()
        torch.manual_seed(1)
        first = flash_attn.flash_attn_func(q, k, v, 0.3)
        torch.manual_seed(1)
        self.assertTrue(torch.equal(flash_attn.flash_attn_func(q, k, v, dropout_p=0.3), first))
        self.assertFalse(torch.equal(flash_attn.flash_attn_func(q, k, v), first))

    def test_deterministic(self):
        q, k, v = inputs()
        for function in (flash_attn.flash_attn_func, flash_attn_interface.flash_attn_func):
            deterministic = torch_test.kind_of(function(q, k, v, deterministic=True))
            self.assertEqual(deterministic.fields["bits"], "deterministic")
            self.assertEqual(torch_test.kind_of(function(q, k, v)).fields["bits"], "")

    def test_sink_logits(self):
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        attend = lambda *x, return_lse: flash_attn_interface.flash_attn_func(*x, s_aux=sinks, return_attn_probs=True)  # noqa: E731
        compare(inputs(), {"sinks": sinks.double()}, attend=attend)

    def test_last_dimension_of_any_stride(self):
        q, k, v = (x.detach() for x in inputs())
        strided = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
        torch.testing.assert_close(flash_attn.flash_attn_func(*strided), flash_attn.flash_attn_func(q, k, v))


class CallsLikeEarlierOnes(unittest.TestCase):
    """A call like an earlier one finds its function in C++. It means what it says all the same."""

    def setUp(self):
        self.tensors = [x.detach() for x in inputs()]
        self.slopes = torch.rand(2, 4)

    def each(self, *calls, function=flash_attn.flash_attn_func):
        """Makes the calls three times in turn, and compares each with the function that Python has for the first."""
        wanted = [function.__wrapped__(*tensors, **call)[0] for tensors, call in calls]
        for turn in range(3):
            for i, (tensors, call) in enumerate(calls):
                with self.subTest(turn=turn, **{name: str(one) for name, one in call.items()}):
                    torch.testing.assert_close(function(*tensors, **call), wanted[i])
        for i, one in enumerate(wanted):
            for other in wanted[i + 1 :]:
                self.assertFalse(type(one) is type(other) and torch.equal(one, other))

    def test_arguments_that_decide_the_mask_and_the_score(self):
        same = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
        changes = ({}, {"causal": True}, {"softcap": 3.0}, {"causal": True, "softcap": 3.0}, {"softcap": 2}, {"softcap": 0.25},
                   {"softmax_scale": 0.5}, {"window_size": (4, 2)}, {"window_size": [5, 2]},
                   {"alibi_slopes": self.slopes[0]}, {"alibi_slopes": self.slopes[1]}, {"alibi_slopes": self.slopes})  # fmt: skip
        calls = [{**same, **change} for change in changes]
        self.each(*[(self.tensors, call) for call in calls])
        # In another order, in which others are the earlier ones.
        self.each(*[(self.tensors, dict(reversed(call.items()))) for call in reversed(calls)])

    def test_tensors_of_other_strides(self):
        q, k, v = self.tensors
        strided = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, v, k)]
        self.each(((q, k, v), {}), (strided, {}), ((q, v, k), {"softmax_scale": 0.3}))

    def test_results(self):
        for _ in range(3):
            made = flash_attn.flash_attn_func(*self.tensors, return_attn_probs=True)
            self.assertEqual((len(made), made[2]), (3, None))
            made = flash_attn_interface.flash_attn_func(*self.tensors, return_attn_probs=True)
            self.assertEqual(len(made), 2)
            made = flash_attn.flash_attn_func(*self.tensors, return_attn_probs=False)
            self.assertIsInstance(made, torch.Tensor)

    def test_lists_that_change(self):
        window, wanted = [4, 2], flash_attn.flash_attn_func(*self.tensors, window_size=(0, 0))
        flash_attn.flash_attn_func(*self.tensors, window_size=window)
        window[:] = 0, 0
        torch.testing.assert_close(flash_attn.flash_attn_func(*self.tensors, window_size=window), wanted)

    def test_dropout_draws_in_each_call(self):
        made = [flash_attn.flash_attn_func(*self.tensors, dropout_p=0.3) for _ in range(3)]
        self.assertFalse(torch.equal(made[0], made[1]) or torch.equal(made[1], made[2]))

    def test_rows_of_caches(self):
        q, k, v = (x.detach() for x in inputs(rows=70, keys=160))
        lengths = torch.tensor([85, 71], dtype=torch.int32)
        few = {"causal": True, "cache_seqlens": lengths}
        self.each(((q[:, :3], k, v), few), ((q, k, v), few), ((q[:, :3], k, v), {"causal": True, "cache_seqlens": 60}),
                  ((q[:, :3], k, v), {"causal": True, "cache_seqlens": lengths - 2}),
                  function=flash_attn.flash_attn_with_kvcache)  # fmt: skip

    def test_they_do_not_come_to_python(self):
        """But for the first of them, and for those that PyTorch has to see."""
        q, k, v = self.tensors
        starts, lengths = torch.tensor([0, 33, 66], dtype=torch.int32), torch.tensor([9, 8], dtype=torch.int32)
        packed = [x.flatten(0, 1) for x in (q, k[:, :33], v[:, :33])]
        came = []

        def trace(frame, event, argument):
            if event == "call" and frame.f_code.co_filename.endswith("_attend.py"):
                came.append(frame.f_code.co_name)

        for name, call in {
            "func": lambda: flash_attn.flash_attn_func(q, k, v, causal=True, softmax_scale=random.random() + 0.1),
            "biased": lambda: flash_attn.flash_attn_func(q, k, v, 0.0, None, True, alibi_slopes=torch.rand(4)),
            "func of 3": lambda: flash_attn_interface.flash_attn_func(q, k, v, s_aux=torch.rand(4)),
            "varlen": lambda: flash_attn.flash_attn_varlen_func(*packed, starts, starts, 33, 33, causal=True),
            "caches": lambda: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths + 1, causal=True),
            "with gradients": lambda: flash_attn.flash_attn_func(*inputs(), causal=True).sum().backward(),
        }.items():
            with self.subTest(name):
                call()
                sys.setprofile(trace)
                try:
                    call()
                finally:
                    sys.setprofile(None)
                self.assertEqual(came, [])


class Varlen(unittest.TestCase):
    STARTS_Q, STARTS_K = [0, 5, 5, 21], [0, 9, 12, 40]

    def setUp(self):
        q, k, v = inputs(batch=1, rows=21, keys=40)
        self.tensors = [x[0].detach().requires_grad_() for x in (q, k, v)]
        self.starts = [torch.tensor(x, dtype=torch.int32) for x in (self.STARTS_Q, self.STARTS_K)]

    def of_each(self, used_q=None, used_k=None, **call):
        """(o, lse) of the sequences, one after the other."""
        q, k, v = self.tensors
        parts = []
        for i in range(3):
            (a, b), (c, d) = self.STARTS_Q[i : i + 2], self.STARTS_K[i : i + 2]
            b, d = (b if used_q is None else a + used_q[i]), (d if used_k is None else c + used_k[i])
            if a < b:
                one = flash_attn.flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], return_attn_probs=True, **call)
                parts.append((one[0][0], one[1][0]))
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def check(self, made, wanted):
        for one, of in zip(made, wanted):
            torch.testing.assert_close(one, of)
        gradients = [torch.autograd.grad(o.square().sum(), self.tensors) for o in (made[0], wanted[0])]
        torch.testing.assert_close(*gradients)

    def test_sequences(self):
        slopes = torch.rand(4)
        for call in ({}, {"causal": True}, {"window_size": (4, 2), "softcap": 9.0}, {"alibi_slopes": slopes}):
            made = flash_attn.flash_attn_varlen_func(*self.tensors, *self.starts, 16, 28, return_attn_probs=True, **call)
            self.assertEqual(made[1].shape, (4, 21))
            self.check(made[:2], self.of_each(**call))
            if "alibi_slopes" not in call:
                made = flash_attn_interface.flash_attn_varlen_func(*self.tensors, *self.starts, 16, 28, **call,
                                                                   return_attn_probs=True)  # fmt: skip
                self.check(made, self.of_each(**call))

    def test_packed_tensors(self):
        q, k, v = self.tensors
        wanted = self.of_each(causal=True)[0]
        kv = torch.stack([k, v], 1)
        o = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *self.starts, 16, 28, causal=True)
        torch.testing.assert_close(o, wanted)
        qkv = torch.stack([q, q * 2, q * 3], 1)
        o = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, self.starts[0], 16, causal=True)
        self.tensors, self.STARTS_K = [q, (q * 2).detach(), (q * 3).detach()], self.STARTS_Q
        torch.testing.assert_close(o, self.of_each(causal=True)[0])

    def test_used_lengths(self):
        used_q, used_k = [4, 0, 9], [7, 3, 11]
        lengths = [torch.tensor(x, dtype=torch.int32) for x in (used_q, used_k)]
        o = flash_attn_interface.flash_attn_varlen_func(*self.tensors, *self.starts, 16, 28, *lengths, causal=True)
        rows = torch.tensor([*range(0, 4), *range(5, 14)])
        torch.testing.assert_close(o[rows], self.of_each(used_q, used_k, causal=True)[0])

    def test_block_table(self):
        q, k, v = (x.detach() for x in self.tensors)
        pages_k, pages_v = (torch.zeros(6, 16, 2, 32, dtype=DTYPE) for _ in range(2))
        table = torch.tensor([[4, 0], [2, 0], [5, 1]], dtype=torch.int32)
        for i, (a, b) in enumerate(itertools.pairwise(self.STARTS_K)):
            for pages, x in ((pages_k, k), (pages_v, v)):
                for j in range(b - a):
                    pages[table[i, j // 16], j % 16] = x[a + j]
        o = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, *self.starts, 16, 28, causal=True, block_table=table)
        torch.testing.assert_close(o, self.of_each(causal=True)[0], rtol=2.0**-6, atol=2.0**-6)


class Caches(unittest.TestCase):
    def wanted(self, q, k, v, lengths, causal, window=(-1, -1), softcap=0.0, slopes=None):
        made = []
        for i, n in enumerate(lengths):
            rows = q.shape[1]
            slope = slopes if slopes is None or slopes.dim() == 1 else slopes[i : i + 1]
            x = [t[i : i + 1].double() for t in (q, k[:, :n], v[:, :n])]
            made.append(plain(*x, seen=seen(rows, n, causal, window), score=scored(rows, n, softcap, slope))[:2])
        return torch.cat([o for o, _ in made]), torch.cat([lse for _, lse in made])

    def near(self, made, wanted):
        bound = 2.0**-6 if DTYPE == torch.bfloat16 else 2.0**-16
        torch.testing.assert_close(made[0].double(), wanted[0], rtol=bound, atol=bound)
        torch.testing.assert_close(made[1].double(), wanted[1], rtol=bound, atol=bound)

    def test_caches(self):
        slopes = torch.rand(2, 4)
        for rows, new, paged in itertools.product((1, 3, 70), (False, True), (False, True)):
            q, k, v = (x.detach() for x in inputs(rows=rows, keys=160))
            lengths = torch.tensor([85, 71], dtype=torch.int32)
            fresh = [x.detach() for x in inputs(rows=1, keys=rows, seed=5)[1:]] if new else (None, None)
            for causal, more in ((False, {}), (True, {"softcap": 9.0}), (True, {"window_size": (20, -1)}),
                                 (True, {"alibi_slopes": slopes})):  # fmt: skip
                with self.subTest(rows=rows, new=new, paged=paged, causal=causal, more=more):
                    caches, table = [k.clone(), v.clone()], {}
                    if paged:
                        order = torch.randperm(20)
                        pages = [torch.empty(20, 16, 2, 32, dtype=DTYPE) for _ in range(2)]
                        for page, x in zip(pages, caches):
                            page[order] = x.reshape(20, 16, 2, 32)
                        table, caches = {"block_table": order.int().reshape(2, 10)}, pages
                    made = flash_attn.flash_attn_with_kvcache(
                        q, *caches, *fresh, cache_seqlens=lengths, causal=causal, return_softmax_lse=True, **table, **more
                    )
                    whole, ends = [k.clone(), v.clone()], lengths.tolist()
                    if new:
                        for i, n in enumerate(lengths.tolist()):
                            for x, one in zip(whole, fresh):
                                x[i, n : n + rows] = one[i]
                        ends = [n + rows for n in ends]
                    mine = {"softcap": more.get("softcap", 0.0), "slopes": more.get("alibi_slopes")}
                    window = more.get("window_size", (-1, -1))
                    self.near(made, self.wanted(q, *whole, ends, causal, window, **mine))
                    if paged:
                        caches = [x[order].reshape(2, 160, 2, 32) for x in caches]
                    self.assertTrue(all(torch.equal(x, y) for x, y in zip(caches, whole)))

    def test_rotary(self):
        q, k, v = (x.detach() for x in inputs(rows=3, keys=64))
        fresh = [x.detach() for x in inputs(rows=1, keys=3, seed=5)[1:]]
        angles = torch.rand(64, 16)
        cos, sin = angles.cos(), angles.sin()
        for interleaved in (True, False):
            caches = [k.clone(), v.clone()]
            made = flash_attn_interface.flash_attn_with_kvcache(
                q, *caches, *fresh, rotary_cos=cos, rotary_sin=sin, cache_seqlens=9, causal=True,
                rotary_interleaved=interleaved, return_softmax_lse=True,
            )  # fmt: skip

            def turned(x, interleaved=interleaved):
                c, s = (t[9:12, None] for t in (cos, sin))
                a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
                both = a * c - b * s, a * s + b * c
                return torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)

            new_k = turned(fresh[0].double()).to(DTYPE)
            bound = 2.0**-7 if DTYPE == torch.bfloat16 else 2.0**-20
            torch.testing.assert_close(caches[0][:, 9:12], new_k, rtol=bound, atol=bound)
            self.near(made, self.wanted(turned(q.double()), *caches, [12, 12], True))

    def test_all_keys(self):
        q, k, v = (x.detach() for x in inputs(rows=2, keys=40))
        for module in (flash_attn, flash_attn_interface):
            made = module.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
            self.near(made, self.wanted(q, k, v, [40, 40], False))


class EightBits(unittest.TestCase):
    """q, k and v of float8_e4m3fn with descales, against attention of what they mean."""

    def setUp(self):
        generator = torch.Generator(DEVICE).manual_seed(3)
        drawn = lambda *shape: torch.rand(shape, generator=generator)  # noqa: E731
        self.make = lambda rows, keys: [
            ((drawn(2, n, heads, 32) * 2 - 1) * 7).to(torch.float8_e4m3fn) for n, heads in ((rows, 4), (keys, 2), (keys, 2))
        ]
        # Factors that differ by much more than the bound, and are no powers of two.
        self.descales = [drawn(2, 2) * 0.3 + 0.05 + torch.arange(4).reshape(2, 2) * 0.1 for _ in range(3)]

    def true(self, tensors, descales):
        """Tensors in float64, times their scales."""
        made = []
        for x, scale in zip(tensors, descales):
            group = x.shape[2] // 2
            scale = 1 if scale is None else scale.double().repeat_interleave(group, 1)[:, None, :, None]
            made.append(x.double() * scale)
        return made

    def check(self, made, tensors, lengths, causal, softcap=0.0):
        """Compares o and lse with those in float64.

        A score is off by (d + 4) roundings of its terms' sum of magnitudes: stored values are exact, and the products
        of scales round twice. A soft cap adds 2^-16 of itself. A weight has this, 2^-19 of exp, a rounding for each key,
        and three of bf16: its own, the sum's, and its value's or the value's scale's. o rounds once more.
        """
        wanted = Caches.wanted(self, *tensors, lengths, causal, softcap=softcap)
        q, k, v = (x.abs().max().item() for x in tensors)
        dim, narrow, unit = tensors[0].shape[3], 2.0**-8, 2.0**-24
        w = 2 * (dim + 4) * unit * dim**0.5 * q * k + softcap * 2.0**-16 + 2.0**-19 + (max(lengths) + 8) * unit
        for one, of, bound, rounding in zip(made, wanted, ((w + 3 * narrow) * v, w), (narrow, 2 * unit)):
            off = (one.double() - of).abs() - rounding * of.abs()
            self.assertLessEqual(torch.where(one == of, 0, off).max().item(), bound)

    def given(self, some):
        """Descales by name, of those of q, k and v that are given."""
        return {name: x for name, x in zip(("q_descale", "k_descale", "v_descale"), some) if x is not None}

    def test_descales_of_batch_entries(self):
        q, k, v = self.descales
        call = flash_attn_interface.flash_attn_func
        for rows, some in itertools.product((1, 5, 70), ((q, k, v), (q, None, None), (None, k, None), (None, None, v))):
            with self.subTest(rows=rows, given=list(self.given(some))):
                tensors = self.make(rows, 90)
                call(*[x.to(torch.bfloat16) for x in tensors], causal=True, return_attn_probs=True)  # like the next one
                made = call(*tensors, causal=True, return_attn_probs=True, **self.given(some))
                self.assertEqual(made[0].dtype, torch.bfloat16)
                self.check(made, self.true(tensors, some), [90, 90], True)

    def test_caches(self):
        for rows, softcap in itertools.product((3, 70), (0.0, 9.0)):
            with self.subTest(rows=rows, softcap=softcap):
                q, k, v = self.make(rows, 160)
                lengths = torch.tensor([85, 71], dtype=torch.int32)
                made = flash_attn_interface.flash_attn_with_kvcache(
                    q, k, v, cache_seqlens=lengths, causal=True, softcap=softcap, return_softmax_lse=True,
                    **self.given(self.descales),
                )  # fmt: skip
                self.check(made, self.true((q, k, v), self.descales), [85, 71], True, softcap)

    def test_queries_of_more_bits(self):
        q, k, v = self.make(3, 40)
        q, some = (q.float() * 0.3).to(torch.bfloat16), (None, *self.descales[1:])
        made = flash_attn_interface.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **self.given(some))
        self.check(made, self.true((q, k, v), some), [40, 40], False)

    def test_pages_and_new_keys(self):
        """Pages have scales of heads; new keys are stored as they are."""
        of_heads = [x[:1].expand(2, 2) for x in self.descales]
        of_all = [x[:1, :1].expand(2, 2) for x in self.descales]
        for rows, some in itertools.product((3, 70), (of_heads, of_all, [x[0, 0] for x in of_all])):
            with self.subTest(rows=rows, shapes=[x.stride() for x in some]):
                q, k, v = self.make(rows, 160)
                fresh = self.make(1, rows)[1:]
                order = torch.randperm(20)
                pages = [torch.empty_like(x.reshape(20, 16, 2, 32)) for x in (k, v)]
                for page, x in zip(pages, (k, v)):
                    page.view(torch.uint8)[order] = x.reshape(20, 16, 2, 32).view(torch.uint8)
                made = flash_attn_interface.flash_attn_with_kvcache(
                    q, *pages, *fresh, cache_seqlens=torch.tensor([85, 71], dtype=torch.int32), causal=True,
                    page_table=order.int().reshape(2, 10), return_softmax_lse=True, **self.given(some),
                )  # fmt: skip
                for page, x, one in zip(pages, (k, v), fresh):
                    for i, n in enumerate((85, 71)):
                        x.view(torch.uint8)[i, n : n + rows] = one.view(torch.uint8)[i]
                    self.assertTrue(torch.equal(page.view(torch.uint8)[order], x.view(torch.uint8).reshape(20, 16, 2, 32)))
                scales = [x.expand(2, 2) for x in some]
                self.check(made, self.true((q, k, v), scales), [85 + rows, 71 + rows], True)

    def test_refusals(self):
        q, k, v = self.make(3, 32)
        wide = [x.to(torch.bfloat16) for x in (q, k, v)]
        starts, scale = torch.tensor([0, 3, 6], dtype=torch.int32), self.descales[0]
        table = torch.zeros(2, 1, dtype=torch.int32)
        three = flash_attn_interface
        cached = lambda *x, **more: three.flash_attn_with_kvcache(*x, cache_seqlens=starts[:2], **more)  # noqa: E731
        for reason, call in {
            "q_descale and q of torch.bfloat16": lambda: three.flash_attn_func(wide[0], k, v, q_descale=scale),
            "k_descale and k of torch.bfloat16": lambda: three.flash_attn_func(*wide, k_descale=scale),
            "v_descale and v of torch.bfloat16": lambda: cached(*wide, v_descale=scale),
            "pages, which entries may share": lambda: cached(q, k, v, page_table=table, v_descale=scale),
            "given descales": lambda: three.flash_attn_varlen_func(
                *[x.flatten(0, 1) for x in (q, k, v)], starts, starts, 3, 3, v_descale=scale
            ),
            "k and v of torch.bfloat16": lambda: cached(q, k, v, wide[1], wide[2]),
            "rotary_cos": lambda: cached(q, k, v, k[:, :3], v[:, :3], rotary_cos=scale, rotary_sin=scale),
        }.items():
            with self.assertRaisesRegex(flashjit.UnsupportedError, f"{reason}.*would work"):
                call()
        for wrong in (scale.double(), scale[:1], scale[0]):
            with self.assertRaisesRegex(flashjit.InvalidArgumentError, r"k_descale.*float32 \[2, 2\].*would work"):
                three.flash_attn_func(q, k, v, k_descale=wrong)


class Refusals(unittest.TestCase):
    def test_by_name(self):
        q, k, v = inputs()
        starts = torch.tensor([0, 33, 66], dtype=torch.int32)
        two, three = flash_attn, flash_attn_interface
        for name, call in {
            "dropped_weights": lambda: two.flash_attn_func(q, k, v, 0.1, return_attn_probs=True),
            "cache_batch_idx": lambda: two.flash_attn_with_kvcache(q, k, v, cache_batch_idx=starts),
            "cache_leftpad": lambda: three.flash_attn_with_kvcache(q, k, v, cache_leftpad=starts),
            "qv": lambda: three.flash_attn_func(q, k, v, qv=q),
            "attention_chunk": lambda: three.flash_attn_func(q, k, v, attention_chunk=16),
            "cu_seqlens_k_new": lambda: three.flash_attn_with_kvcache(q, k, v, cu_seqlens_k_new=starts),
        }.items():
            with self.assertRaisesRegex(flashjit.UnsupportedError, f"{name}.*would work"):
                call()
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "one of k and v"):
            two.flash_attn_with_kvcache(q, k, v, k=k)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "requires a gradient"):
            two.flash_attn_with_kvcache(q, k, v)


if __name__ == "__main__":
    unittest.main()
