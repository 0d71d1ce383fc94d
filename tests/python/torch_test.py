"""Gradients of PyTorch's tensors against autograd of attention in float64; compilation, modes, transforms.

On a GPU if PyTorch has one, with bf16 where a test names no dtype; else on the CPU, with fp32.
"""

import gc
import subprocess
import sys
import unittest
import warnings
from pathlib import Path
from unittest import mock

import flashjit
import flashjit.torch
import functorch.compile
import torch
from leaks import check_no_leaks
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = [dtype for dtype in ROUNDING if DEVICE == "cpu" or dtype != torch.float32]
torch.set_default_device(DEVICE)


def plain(q, k, v, *, seen=None, score=None, scale=None, sinks=None, kept=None):
    """(o, lse, weights) of attention in float64; kept: what dropout multiplies weights by."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if score is None else score(scores)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    more = [] if sinks is None else [sinks[None, :, None, None].expand(*scores.shape[:3], 1)]
    lse = torch.cat([scores, *more], -1).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights if kept is None else weights * kept, v), lse, weights


def causal(rows, keys):
    return torch.arange(keys)[None] <= torch.arange(rows)[:, None] + keys - rows


def inputs(dtype=DTYPE, batch=2, rows=33, keys=65, heads=4, heads_kv=2, dim=32, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = (batch, rows, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim)
    return [(torch.rand(s, generator=generator) * 2 - 1).to(dtype).requires_grad_() for s in shapes]


def kind_of(o):
    """The kind of the call whose output this is."""
    number = getattr(o.grad_fn, "_saved_max_q", None)
    return o.grad_fn.call[0] if number is None else flashjit._native.call_of_node(number)[0]


class Recorder(TorchDispatchMode):
    """Keeps the calls of flashjit's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashjit":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def o_of_both(tensors, more, call):
    return flashjit.attention(*tensors, return_lse=True, **more, **call)[0]


class Gradients(unittest.TestCase):
    def compare(self, tensors, expected=None, more=None, attend=flashjit.attention, **call):
        """Compares o, lse and the gradients of q, k, v and of `more`, tensors by name, with those in float64.

        A weight is off by a factor 1 + w: its score by (d + 4) roundings of the sum of magnitudes, exp by 2^-20, the
        sum by a rounding for each key, and the weight by the dtype's rounding. With |do| and |v| a row's products are
        at most g = max sum |do||v| + |dlse|; so ds = weight (dp - delta) is off by at most 4 w g times the weight, also
        with what dp and delta are off. dq, dk and tables add these over keys, rows or both.
        """
        q, k, v = tensors
        expected, more = expected or {}, more or {}
        o, lse = attend(q, k, v, return_lse=True, **more, **call)
        exact = [x.detach().double().requires_grad_() for x in (*tensors, *more.values())]
        if more:
            expected = expected(*exact[3:])
        wanted, wanted_lse, weights = plain(*exact[:3], **expected)
        generator = torch.Generator(DEVICE).manual_seed(9)
        do, dlse = (torch.rand(x.shape, generator=generator).to(x.dtype) for x in (o, lse))
        computed = torch.autograd.grad((o, lse), (*tensors, *more.values()), (do, dlse))
        gradients = torch.autograd.grad((wanted, wanted_lse), exact, (do.double(), dlse.double()))

        narrow, unit = ROUNDING[q.dtype], 2.0**-24
        scale, group = expected.get("scale") or q.shape[3] ** -0.5, q.shape[2] // k.shape[2]
        most = expected.get("kept", torch.ones(1)).max().item()
        largest = [x.abs().max().item() for x in exact[:3]]
        w = 2 * (q.shape[3] + 4) * unit * q.shape[3] * scale * largest[0] * largest[1] + 2.0**-19
        w += (k.shape[1] + q.shape[3] + 8) * unit + (2 * narrow if narrow > unit else 0)
        g = v.shape[3] * do.double().abs().max().item() * largest[2] * most + dlse.abs().max().item()
        column = weights.sum(2).max().item() * group
        self.near(o, wanted, w * largest[2] * most, narrow)
        if attend is flashjit.attention and "dropout_p" not in call:
            self.compare_without_lse(o, tensors, do, more, call)
        self.near(lse, wanted_lse, w, 2 * unit)
        bounds = (4 * w * g * scale * largest[1], 4 * w * g * scale * largest[0] * column)
        bounds += (2 * w * do.double().abs().max().item() * column * most,)
        bounds += tuple(4 * w * g * weights.sum().item() / min(x.numel(), 4) for x in more.values())
        for one, of, bound in zip(computed, gradients, bounds):
            self.near(one, of, bound, narrow)
        for one, given in zip(computed, (*tensors, *more.values())):
            self.assertEqual(one.dtype, given.dtype)

    def compare_without_lse(self, o, tensors, do, more, call):
        """Another node of autograd may compute the gradients of a call that returns no lse, by the same kernels."""
        wanted = torch.autograd.grad(o_of_both(tensors, more, call), (*tensors, *more.values()), do)
        alone = flashjit.attention(*tensors, **more, **call)
        torch.testing.assert_close(alone, o)
        for one, of in zip(torch.autograd.grad(alone, (*tensors, *more.values()), do), wanted):
            self.assertEqual((one.dtype, one.stride()), (of.dtype, of.stride()))
            torch.testing.assert_close(one, of)

    def near(self, computed, wanted, bound, rounding):
        self.assertEqual(computed.shape, wanted.shape)
        off = (computed.double() - wanted.detach()).abs() - rounding * wanted.detach().abs()
        off = torch.where(computed == wanted, 0, off)
        self.assertLessEqual(off.max().item() if off.numel() else 0, bound)

    def test_dtypes(self):
        for dtype in DTYPES:
            with self.subTest(dtype=dtype):
                self.compare(inputs(dtype), {"seen": causal(33, 65)}, mask="causal")

    def test_arguments(self):
        shift = torch.arange(65)[None] - torch.arange(33)[:, None] - 32
        self.compare(inputs(), {"seen": (shift >= -5) & (shift <= 3), "scale": 0.3}, window=(5, 3), scale=0.3)
        self.compare(inputs(), {"score": lambda s: 2 * torch.tanh(s / 2)}, score="softcap", softcap=2)
        lengths = torch.tensor([40, 7], dtype=torch.int32)
        seen = torch.arange(65) < lengths[:, None, None, None]
        self.compare(inputs(), {"seen": seen}, seqlens_k=lengths)

    def test_layouts(self):
        q, k, v = inputs()
        both = torch.cat([k, v], 2)
        self.compare((q[:, ::2], both[:, :, :2], both[:, :, 2:]))
        self.compare([x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)])

    def test_heads_first(self):
        """Plain, compiled, and as operators."""
        tensors = inputs()
        wanted = flashjit.attention(*tensors, mask="causal", return_lse=True)
        first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]

        def attend(*x):
            return flashjit.attention(*x, mask="causal", return_lse=True, heads_first=True)

        def grads(o, lse, of):
            do = torch.arange(o.numel(), dtype=o.dtype).reshape(wanted[0].shape) / o.numel()
            return torch.autograd.grad((o, lse), of, (do if o is wanted[0] else do.transpose(1, 2), torch.ones_like(lse)))

        of_wanted = grads(*wanted, tensors)
        for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            o, lse = call(*first)
            torch.testing.assert_close((o.transpose(1, 2), lse), wanted)
            for one, of in zip(grads(o, lse, first), of_wanted):
                torch.testing.assert_close(one.transpose(1, 2), of)
        with Recorder() as recorder:
            o, _ = attend(*first)
        self.assertEqual(len(recorder.calls), 1)
        torch.testing.assert_close(o.transpose(1, 2), wanted[0])

    def test_gradients_that_pytorch_lays_out_anyhow(self):
        q, k, v = inputs(torch.bfloat16)
        o = flashjit.attention(q, k, v)
        plain_do = torch.rand_like(o)
        wanted = torch.autograd.grad(o, (q, k, v), plain_do, retain_graph=True)
        wide = torch.zeros(*o.shape[:-1], 2 * o.shape[-1], dtype=o.dtype)
        wide[..., ::2] = plain_do
        odd = torch.empty(*o.shape[:-1], o.shape[-1] + 1, dtype=o.dtype)
        odd[..., 1:] = plain_do
        for do in (wide[..., ::2], odd[..., 1:], plain_do.transpose(0, 2).contiguous().transpose(0, 2)):
            for one, of in zip(torch.autograd.grad(o, (q, k, v), do, retain_graph=True), wanted):
                torch.testing.assert_close(one, of)
        for loss in (o.sum(), o[..., 0].sum(), o[0].sum()):
            loss.backward(retain_graph=True)

    def test_tables(self):
        for shape in ((2, 4, 33, 65), (1, 1, 33, 65), (1, 4, 1, 65)):
            bias = torch.linspace(-1, 1, shape[0] * shape[1] * shape[2] * shape[3]).reshape(shape).requires_grad_()
            self.compare(inputs(), lambda b: {"score": lambda s: s + b}, {"bias": bias}, score="bias")
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)
        distance = (torch.arange(65)[None] - torch.arange(33)[:, None] - 32).abs()
        self.compare(
            inputs(),
            lambda t: {"score": lambda s: s - t[:, None, None] * distance},
            {"alibi_slopes": slopes},
            score=["alibi"],
        )
        gate = torch.rand(2, 4, 65, dtype=torch.float64).to(torch.bfloat16).requires_grad_()
        self.compare(
            inputs(torch.bfloat16),
            lambda t: {"score": lambda s: s + t[:, :, None, :], "seen": causal(33, 65)},
            {"gate": gate},
            mask="causal",
            score="score + gate[batch, head, key]",
            tables={"gate": ["batch", "heads_q", "seqlen_k"]},
        )

    def test_a_bias_of_another_dtype(self):
        bias = torch.rand(1, 4, 33, 65)
        q, k, v = inputs(torch.bfloat16)
        self.compare((q, k, v), {"score": lambda s: s + bias.double()}, score="bias", bias=bias)

    def test_sinks(self):
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
        self.compare(inputs(), lambda t: {"sinks": t}, {"sink_logits": sinks})
        self.compare(inputs(), {"sinks": sinks.detach().double()}, sink_logits=sinks.detach())

    def test_packed(self):
        starts = torch.tensor([0, 5, 5, 21], dtype=torch.int32)
        q, k, v = (x[0].detach().requires_grad_() for x in inputs(batch=1, rows=21, keys=21))
        same = torch.repeat_interleave(torch.arange(3), starts.diff())
        seen = (same[:, None] == same[None]) & causal(21, 21)
        o, lse = flashjit.attention(
            q, k, v, mask="causal", cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=16, max_seqlen_k=16,
            return_lse=True,
        )  # fmt: skip
        self.assertEqual(lse.shape, (4, 21))
        self.assertFalse(lse.grad_fn is None)
        of_q, of_k, of_v = torch.autograd.grad(o.square().sum(), (q, k, v))
        whole = [x[None].detach().requires_grad_() for x in (q, k, v)]
        flash = flashjit.attention(*whole, mask="key <= row && same[key] == same[row]", same=same.int()[None],
                                   tables={"same": ["batch", "seqlen_k"]})  # fmt: skip
        wanted = torch.autograd.grad(flash.square().sum(), whole)
        for one, of in zip((of_q, of_k, of_v), wanted):
            torch.testing.assert_close(one[None], of)
        self.compare(whole, {"seen": seen}, mask="key <= row && same[key] == same[row]", same=same.int()[None],
                     tables={"same": ["batch", "seqlen_k"]})  # fmt: skip

    def test_block_lists(self):
        q, k, v = inputs(rows=300, keys=300)
        document = (torch.arange(300, dtype=torch.int32) // 90)[None].repeat(2, 1)
        mask, tables = ["causal", "document[key] == document[position]"], {"document": ["batch", "seqlen_k"]}
        with torch.no_grad():
            lists = flashjit.make_block_lists(q, k, mask=mask, tables=tables, document=document)
        seen = causal(300, 300) & (document[0][None] == document[0][:, None])
        self.compare((q, k, v), {"seen": seen}, mask=mask, tables=tables, document=document, block_lists=lists)

    def test_outputs_of_fp32(self):
        q, k, v = inputs(torch.bfloat16)
        o = flashjit.attention(q, k, v, out_dtype="fp32")
        self.assertEqual(o.dtype, torch.float32)
        of_k = torch.autograd.grad(o.square().sum(), k)[0]
        wanted, _, _ = plain(*(x.double() for x in (q, k, v)))
        torch.testing.assert_close(of_k, torch.autograd.grad(wanted.square().sum(), k)[0], rtol=0.05, atol=0.02)

    def test_numbers_and_unused_outputs(self):
        """Numbers of both kinds reach the backward; an output that the loss does not use has no gradient."""
        q, k, v = inputs()
        call = {"window": (5, 3), "scale": 0.3, "score": "softcap", "softcap": 2.0, "num_sinks": 2}
        o, lse = flashjit.attention(q, k, v, return_lse=True, **call)
        wanted = torch.autograd.grad(o.sum() + 0 * lse.sum(), (q, k, v), retain_graph=True)
        for one, of in zip(torch.autograd.grad(o.sum(), (q, k, v)), wanted):
            torch.testing.assert_close(one, of)
        for name, other in (("scale", 0.4), ("softcap", 3.0), ("window", (0, 0)), ("num_sinks", 0)):
            changed = torch.autograd.grad(flashjit.attention(q, k, v, **{**call, name: other}).sum(), (q, k, v))
            self.assertFalse(torch.equal(changed[0], wanted[0]), name)

    def test_calls_leak_no_references(self):
        q, k, v = inputs()
        bias = torch.rand(1, 4, 33, 65, requires_grad=True)
        cap = 1234567.5
        watched = [q, k, v, bias, cap]

        def calls():
            flashjit.attention(q, k, v, scale=cap).sum().backward()
            o, lse = flashjit.attention(q, k, v, score=["bias", "softcap"], softcap=cap, bias=bias, return_lse=True)
            torch.autograd.grad(o.sum(), (k, bias), retain_graph=True)
            torch.autograd.grad(lse.sum(), (v, bias))
            for wrong in ({"v": v[:1]}, {"scale": "x"}, {"out": bias}):
                with self.assertRaises(flashjit.Error):
                    flashjit.attention(**{"q": q, "k": k, "v": v, "score": "bias", "bias": bias, **wrong})
            q.grad = k.grad = v.grad = None

        check_no_leaks(self, calls, watched, settling=40, rounds=80, repeats=7)

    def test_others_hold_new_objects(self):
        """gc.get_objects() in another thread takes references to all that a call has made while it has no GIL."""
        q, k, v = inputs()
        bias = torch.rand(2, 4, 33, 65, requires_grad=True)
        held, make = [], flashjit._specs.Spec

        def spec(fields):
            held.append(gc.get_objects())
            return make(fields)

        call = {"score": ("bias", "softcap"), "softcap": 2.0, "bias": bias, "num_sinks": 1, "window": (40, 3)}
        with mock.patch.object(flashjit._specs, "Spec", spec):
            made = torch.autograd.grad(flashjit.attention(q, k, v, **call).sum(), (q, k, v, bias))
        self.assertTrue(held)
        wanted = torch.autograd.grad(flashjit.attention(q, k, v, **call).sum(), (q, k, v, bias))
        for one, of in zip(made, wanted):
            torch.testing.assert_close(one, of)

    def test_only_some_want_a_gradient(self):
        q, k, v = inputs()
        wanted = torch.autograd.grad(flashjit.attention(q, k, v).sum(), v)[0]
        o, lse = flashjit.attention(q.detach(), k.detach(), v, return_lse=True)
        torch.testing.assert_close(torch.autograd.grad(o.sum(), v)[0], wanted)
        of_lse = torch.autograd.grad(flashjit.attention(q, k, v, return_lse=True)[1].sum(), (q, k))
        wanted = torch.autograd.grad(plain(*(x.double() for x in (q, k, v)))[1].sum(), (q, k))
        torch.testing.assert_close(of_lse, wanted, rtol=0.02, atol=0.01)
        with torch.no_grad():
            self.assertIsNone(flashjit.attention(q, k, v).grad_fn)


class Dropout(unittest.TestCase):
    def kept(self, keys, **seeds):
        """What a call with these seeds multiplies weights by."""
        q, k = torch.zeros(2, 33, 4, keys, dtype=DTYPE), torch.zeros(2, keys, 4, keys, dtype=DTYPE)
        eye = torch.eye(keys, dtype=DTYPE)[None, :, None].expand(2, keys, 4, keys).contiguous()
        with torch.no_grad():
            return flashjit.attention(q, k, eye, dropout_p=0.25, **seeds).permute(0, 2, 1, 3) * keys

    def test_gradients(self):
        seeds = {"dropout_seed": 5, "dropout_offset": 2}
        kept = (self.kept(64, **seeds) > 0).double() / 0.75
        q, k, v = inputs(keys=64)
        Gradients.compare(Gradients(), (q, k, v), {"kept": kept}, dropout_p=0.25, **seeds)

    def test_seeds_come_from_pytorchs_generator(self):
        torch.manual_seed(3)
        first, second = self.kept(64), self.kept(64)
        torch.manual_seed(3)
        self.assertTrue(torch.equal(first, self.kept(64)))
        self.assertFalse(torch.equal(first, second))

    def test_checkpoints_drop_the_same(self):
        for reentrant in (False, True):
            gradients = []
            for wrap in (False, True):
                q, k, v = inputs()
                torch.manual_seed(4)
                call = lambda q, k, v: flashjit.attention(q, k, v, dropout_p=0.5)  # noqa: E731
                o = checkpoint(call, q, k, v, use_reentrant=reentrant) if wrap else call(q, k, v)
                o.square().sum().backward()
                gradients.append(torch.cat([x.grad.flatten() for x in (q, k, v)]))
            torch.testing.assert_close(*gradients)


class Operators(unittest.TestCase):
    def calls(self, **call):
        """The calls of both operators that a forward and a backward make."""
        q, k, v = inputs(rows=16, keys=16)
        with Recorder() as recorder:
            flashjit.attention(q, k, v, **call).sum().backward()
        return recorder.calls

    def test_opcheck(self):
        bias = torch.rand(1, 4, 16, 16, requires_grad=True)
        for forward, backward in (self.calls(mask="causal", window=(3, 0)), self.calls(score="bias", bias=bias)):
            detach = lambda one: one.detach() if isinstance(one, torch.Tensor) else one  # noqa: E731
            with warnings.catch_warnings(action="ignore"):  # opcheck's own
                text, *tensors, integers, reals = forward[1]
                tensors = tensors[0] if isinstance(tensors[0], list) else tensors
                opcheck(torch.ops.flashjit.attention.default, (text, tensors, integers, reals))
                for operator, arguments in (forward, backward):  # have no gradients of their own
                    opcheck(operator, torch.utils._pytree.tree_map(detach, arguments))

    def test_no_gradient_no_lse(self):
        q, k, v = inputs()
        with Recorder() as recorder, torch.no_grad():
            flashjit.attention(q, k, v)
        self.assertIn('"lse": false', recorder.calls[0][1][0])

    def test_deterministic_algorithms(self):
        self.assertIn('"bits": ""', self.calls()[1][1][0])
        torch.use_deterministic_algorithms(True)
        try:
            with mock.patch("flashjit.torch.Maker", wraps=flashjit.torch.Maker) as maker:
                self.assertIn('"bits": "deterministic"', self.calls()[1][1][0])
        finally:
            torch.use_deterministic_algorithms(False)
        fields = {call.args[1]: call.args[5] for call in maker.call_args_list}
        self.assertEqual(fields, {"forward": {"lse": True}, "backward": {"deterministic": True}})

    def test_batch_invariant(self):
        q, k, v = (torch.randn(3, 130, heads, 64) for heads in (4, 2, 2))
        do = torch.randn(3, 130, 4, 64)

        def results(some):
            given = [one[some].clone().requires_grad_() for one in (q, k, v)]
            o = flashjit.attention(*given, mask="causal", batch_invariant=True)
            o.backward(do[some])
            return [o, *(one.grad for one in given)]

        for whole, alone in zip(results(slice(0, 3)), results(slice(1, 2))):
            self.assertTrue(torch.equal(whole[1], alone[0]))

    def test_compile(self):
        frames = []

        def backend(module, example):
            frames.append(module)
            return torch._dynamo.backends.debugging.aot_eager(module, example)

        def loss(q, k, v, bias, cap):
            o, lse = flashjit.attention(2 * q, k, v, mask="causal", window=(cap, None), score=["bias", "softcap"],
                                        softcap=2.5, bias=bias, return_lse=True)  # fmt: skip
            return (o.square().sum() + lse.sum()) / 3

        compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=True)
        counts = []
        for length in (16, 24, 41):
            tensors = [*inputs(rows=length, keys=length), torch.rand(1, 4, length, length, requires_grad=True)]
            gradients = [torch.autograd.grad(f(*tensors, 5 + length), tensors) for f in (loss, compiled)]
            for one, of in zip(*gradients):
                torch.testing.assert_close(one, of)
            counts.append(len(frames))
        self.assertEqual(counts, counts[:1] * 3)
        # torch.compile would guard all that it looked into.
        self.assertIn(flashjit.torch.attention_in_graph, {node.target for node in frames[0].graph.nodes})

    def test_compiled_graphs_hold_operators_without_gradients(self):
        graphs = []

        def keep(module, _):
            graphs.append({str(node.target) for node in module.graph.nodes if "flashjit" in str(node.target)})
            return functorch.compile.make_boxed_func(module.forward)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        q, k, v = inputs()
        torch.compile(lambda *x: flashjit.attention(*x), fullgraph=True, backend=backend)(q, k, v).sum().backward()
        name = "qkv" if flashjit.torch.HAS_GRAPH_OPERATORS else "attention"
        self.assertEqual(graphs, [{f"flashjit.{name}_forward.default"}, {f"flashjit.{name}_backward.default"}])

    def test_plain_calls_go_past_the_dispatcher(self):
        with mock.patch.object(flashjit.torch, "attention_of_torch", side_effect=AssertionError):
            q, k, v = inputs()
            flashjit.attention(q, k, v, mask="causal").sum().backward()
        self.assertIsNotNone(q.grad)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "by flashjit.attention alone"):
            flashjit.torch._Kind.apply(q, k, v)  # the call before has left nothing

    def test_compile_with_dropout_and_without_gradients(self):
        q, k, v = inputs()
        call = lambda q: flashjit.attention(q, k.detach(), v.detach(), dropout_p=0.5)  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.manual_seed(1)
        first = compiled(q.detach())
        self.assertFalse(torch.equal(first, compiled(q.detach())))
        torch.manual_seed(1)
        self.assertTrue(torch.equal(first, compiled(q.detach())))

    def test_fake_tensors(self):
        with torch._subclasses.FakeTensorMode():
            q, k = torch.empty(2, 8, 4, 32, dtype=torch.bfloat16), torch.empty(2, 9, 2, 32, dtype=torch.bfloat16)
            o, lse = flashjit.attention(q, k, k, return_lse=True)
        self.assertEqual((o.shape, o.dtype, lse.shape), ((2, 8, 4, 32), torch.bfloat16, (2, 4, 8)))
        q = torch.empty(2, 8, 4, 32, device="meta", requires_grad=True)
        flashjit.attention(q, q, q).sum().backward()
        self.assertEqual(q.grad.shape, q.shape)

    def test_autocast(self):
        q, k, v = inputs(torch.float32)
        with torch.autocast(DEVICE, torch.bfloat16):
            o = flashjit.attention(q, k, v)
            with torch.no_grad():
                self.assertEqual(flashjit.attention(q, k, v).dtype, torch.bfloat16)
        self.assertEqual(o.dtype, torch.bfloat16)
        self.assertEqual(torch.autograd.grad(o.sum(), q)[0].dtype, torch.float32)

    def test_transforms(self):
        q, k, v = (x.detach() for x in inputs())
        loss = lambda *x: flashjit.attention(*x, mask="causal").square().sum()  # noqa: E731
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(loss(*tensors), tensors)
        for one, of in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), wanted):
            torch.testing.assert_close(one, of)
        each = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q[:, None], k[:, None], v[:, None])
        for one, of in zip(each, wanted):
            torch.testing.assert_close(one[:, 0], of)
        call = torch.func.vmap(lambda q: flashjit.attention(q, k[:1], v[:1], return_lse=True), 2, 2)
        o, lse = call(torch.stack([q[:1], q[1:]], 2))
        for i in range(2):
            wanted_o, wanted_lse = flashjit.attention(q[i : i + 1], k[:1], v[:1], return_lse=True)
            torch.testing.assert_close((o.select(2, i), lse.select(2, i)), (wanted_o, wanted_lse))


class Examples(unittest.TestCase):
    def test_training_step(self):
        path = Path(__file__).resolve().parents[2] / "tools/examples/python/training_step.py"
        done = subprocess.run([sys.executable, path], check=False, capture_output=True, text=True)
        self.assertEqual((done.stdout, done.returncode), ("the loss falls: True\n", 0), done.stderr)


class Refusals(unittest.TestCase):
    def refused(self, error, *texts, call=flashjit.attention, args=None, **keywords):
        with self.assertRaises(error) as caught:
            call(*(inputs() if args is None else args), **keywords)
        for text in texts:
            self.assertIn(text, str(caught.exception))

    def test_second_derivatives(self):
        q, k, v = inputs()
        of_q = torch.autograd.grad(flashjit.attention(q, k, v).square().sum(), q, create_graph=True)[0]
        self.refused(flashjit.UnsupportedError, "gradient of a gradient", call=of_q.sum().backward, args=())

    def test_no_backward(self):
        q, k, v = inputs()
        pages, table = torch.rand(6, 16, 2, 32, dtype=DTYPE), torch.zeros(2, 2, dtype=torch.int32)
        self.refused(flashjit.UnsupportedError, "paged", "backward", args=(q, pages, pages), page_table=table)
        scale = torch.ones(1, requires_grad=True)
        self.refused(flashjit.UnsupportedError, "k_scale.detach()", k_scale=scale)
        self.refused(flashjit.InvalidArgumentError, "out", "no_grad", out=torch.empty(2, 33, 4, 32))
        self.refused(flashjit.InvalidArgumentError, "out", "no_grad", engine=flashjit.Engine("cpu"))
        self.refused(flashjit.InvalidArgumentError, "argument q requires a gradient", "flashjit.attention",
                     call=flashjit.decode)  # fmt: skip
        table = torch.ones(65, requires_grad=True)
        self.refused(flashjit.InvalidSpecError, "masks have no gradients", mask="key < limit[position]", limit=table,
                     tables={"limit": ["seqlen_k"]})  # fmt: skip

    def test_bad_input(self):
        q, k, v = inputs()
        self.refused(flashjit.InvalidArgumentError, "no keyword 'casual'", casual=True)
        self.refused(flashjit.InvalidArgumentError, "argument k is of type list", args=(q, [1.0], v))
        self.refused(flashjit.InvalidArgumentError, "argument v", args=(q, k, None))
        self.refused(flashjit.InvalidArgumentError, "scale is of type str", scale="large")
        self.refused(flashjit.InvalidArgumentError, "last dimension", args=(q.repeat(1, 1, 1, 2)[..., ::2], k, v))
        self.refused(flashjit.InvalidArgumentError, "dtype fp16", args=(q, k.half(), v))
        self.refused(flashjit.InvalidArgumentError, "complex64", args=(q.to(torch.complex64), k, v))
        self.refused(flashjit.InvalidSpecError, "unknown name", mask="key <= nothing")

    def test_compiled_calls_drop_no_argument(self):
        q, k, v = inputs()
        call = torch.compile(lambda *x, **y: flashjit.attention(*x, **y), backend="eager")
        for wrong in ({"scale": "large"}, {"seqlens_k": [3, 4]}):
            with (
                warnings.catch_warnings(action="ignore"),  # of torch.compile, which falls back
                self.assertRaisesRegex(Exception, f"{next(iter(wrong))}.* is of type"),
            ):
                call(q, k, v, **wrong)

    def test_vmap_over_arguments_of_batch_entries(self):
        q, k, v = (x.detach() for x in inputs())
        lengths = torch.tensor([[3], [5]], dtype=torch.int32)
        call = torch.func.vmap(lambda q, k, v, n: flashjit.attention(q, k, v, seqlens_k=n))
        self.refused(flashjit.UnsupportedError, "vmap", "seqlens_k", call=call,
                     args=(q[:, None], k[:, None], v[:, None], lengths))  # fmt: skip


if __name__ == "__main__":
    unittest.main()
