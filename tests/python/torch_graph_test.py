"""Operators in graphs that torch.compile makes of calls of q, k and v alone."""

import itertools
import unittest

import flashjit
import flashjit.torch
import torch
from torch_test import DTYPE, Recorder, inputs


@unittest.skipUnless(flashjit.torch.HAS_GRAPH_OPERATORS, "PyTorch lacks what the operators need")
class Graphs(unittest.TestCase):
    def test_calls(self):
        cases = (
            {}, {"mask": "causal", "window": (9, None), "scale": 0.3}, {"score": "softcap", "softcap": 2.0},
            {"heads_first": True}, {"out_dtype": "fp32"}, {"batch_invariant": True}, {"return_lse": True},
            {"mask": "key <= position + far", "far": 3},
        )  # fmt: skip

        def results(call, tensors, gradients):
            made = call(*tensors)
            outputs = list(made) if isinstance(made, tuple) else [made]
            of = [one.sin() for one in outputs]  # no gradient is a number all over, so wrong strides would show
            return outputs + (list(torch.autograd.grad(sum(x.sum() for x in of), tensors)) if gradients else [])

        for case in cases:
            call = lambda *x, case=case: flashjit.attention(*x, **case)  # noqa: E731
            torch._dynamo.reset()  # it counts what it compiles for each lambda expression
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
            for size in ({}, {"rows": 50, "keys": 70}, {"heads": 2, "heads_kv": 2}, {"batch": 0}):
                tensors = inputs(**size)
                if "heads_first" in case:
                    tensors = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]
                for gradients in (True, False):
                    with torch.set_grad_enabled(gradients), self.subTest(case=case, size=size, gradients=gradients):
                        for one, of in zip(results(compiled, tensors, gradients), results(call, tensors, gradients)):
                            torch.testing.assert_close(one, of)

    def test_strides_of_gradients(self):
        """Graphs know them as torch.empty_like() makes them."""
        size = {"b": 2, "s": 5, "h": 4, "d": 32}
        random = lambda *sizes: torch.rand(*sizes, dtype=DTYPE)  # noqa: E731
        given = [random(2, 5, 7, 32)[:, :, :4], random(2, 10, 4, 32)[:, ::2], random(2, 5, 4, 64)[..., :32]]
        for one in "bsh":
            for order in map("".join, itertools.permutations("bsh")):
                alone = random(*(1 if x == one else size[x] for x in order + "d"))
                for x in (alone, alone.expand(*(size[x] for x in order + "d"))):
                    given.append(x.permute(*map(order.index, "bsh"), 3))
        with Recorder() as recorder:
            flashjit.attention(*inputs()).sum().backward()
        text = recorder.calls[0][1][0]
        for x in given:
            o, lse = torch.ops.flashjit.qkv_forward(text, x, x, x, [], [])
            made = torch.ops.flashjit.qkv_backward(text, x, x, x, [], [], o, lse, torch.ones_like(o))
            self.assertEqual({y.stride() for y in made}, {torch.empty_like(x).stride()}, (x.shape, x.stride()))

    def test_refusals(self):
        q, k, v = inputs()
        compiled = torch.compile(lambda *x: flashjit.attention(*x), fullgraph=True, backend="aot_eager")
        for tensors, why in (((q, k[..., :16], v), "k"), ((q, k, v[:, :9]), "v"), ((q, k.half(), v), "fp16")):
            with self.assertRaisesRegex(RuntimeError, f"flashjit: .*{why}"):
                compiled(*(x.detach().requires_grad_() for x in tensors))


if __name__ == "__main__":
    unittest.main()
