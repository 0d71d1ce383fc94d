"""Calls of q, k and v alone, whose gradients a node of PyTorch's own computes."""

import unittest
import warnings

import flashjit
import flashjit.torch
import torch
from torch.utils.checkpoint import checkpoint
from torch_test import DEVICE, DTYPE, inputs


@unittest.skipUnless(flashjit.torch.HAS_NODE, "PyTorch lacks what the node needs")
class Node(unittest.TestCase):
    def has_node(self, o):
        return type(o.grad_fn).__name__ == "ScaledDotProductFusedAttentionOverrideableBackward0"

    def test_calls_with_the_node(self):
        q, k, v = inputs()
        for call in ({}, {"mask": "causal", "window": (9, None), "scale": 0.3}, {"score": "softcap", "softcap": 2.0}):
            self.assertTrue(self.has_node(flashjit.attention(q, k, v, **call)), call)
        first = [x.transpose(1, 2) for x in (q, k, v)]
        self.assertTrue(self.has_node(flashjit.attention(*first, heads_first=True)))
        with torch.autocast(DEVICE, torch.bfloat16):
            self.assertTrue(self.has_node(flashjit.attention(*inputs(torch.float32))))
        lengths = torch.tensor([40, 7], dtype=torch.int32)
        self.assertFalse(self.has_node(flashjit.attention(q, k, v, seqlens_k=lengths)))
        self.assertFalse(self.has_node(flashjit.attention(q, k, v, return_lse=True)[0]))

    def test_heads_first(self):
        tensors = inputs()
        do = torch.rand(2, 33, 4, 32, dtype=DTYPE)
        wanted = torch.autograd.grad(flashjit.attention(*tensors, mask="causal"), tensors, do)
        first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]
        made = torch.autograd.grad(flashjit.attention(*first, mask="causal", heads_first=True), first, do.transpose(1, 2))
        for one, of in zip(made, wanted):
            torch.testing.assert_close(one.transpose(1, 2), of)

    def test_more_numbers_than_are_kept(self):
        q, k, v = inputs()
        nodes = []
        for scale in [0.1 + 0.01 * i for i in range(70)] + [0.1]:
            o = flashjit.attention(q, k, v, scale=scale)
            nodes.append(self.has_node(o))
            wanted = torch.autograd.grad(flashjit.attention(q, k, v, scale=scale, return_lse=True)[0].sum(), q)
            torch.testing.assert_close(torch.autograd.grad(o.sum(), q), wanted)
        self.assertTrue(nodes[0] and nodes[-1] and not nodes[-2])

    def test_what_pytorch_does_with_nodes(self):
        q, k, v = inputs()
        wanted = torch.autograd.grad(flashjit.attention(q, k, v).sum(), (q, k, v))
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
            o = flashjit.attention(q, k, v)
        self.assertEqual(len(packed), 5)  # q, k, v, o and lse
        made = torch.autograd.grad(o.sum(), (q, k, v))
        again = torch.autograd.grad(checkpoint(flashjit.attention, q, k, v, use_reentrant=False).sum(), (q, k, v))
        for one, other, of in zip(made, again, wanted):
            torch.testing.assert_close((one, other), (of, of))
        changed = k * 1
        o = flashjit.attention(q, changed, v)
        changed.add_(1)
        with self.assertRaisesRegex(RuntimeError, "inplace"):
            o.sum().backward()

    def test_compiled_autograd(self):
        """It traces the backward with tensors that have no memory."""
        q, k, v = inputs()
        wanted = torch.autograd.grad(flashjit.attention(q, k, v).sum(), (q, k, v))
        with (
            warnings.catch_warnings(action="ignore"),  # of PyTorch, about tensors that it looks at itself
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        ):
            flashjit.attention(q, k, v).sum().backward()
        for one, of in zip((q.grad, k.grad, v.grad), wanted):
            torch.testing.assert_close(one, of)

    def test_only_our_calls_reach_the_kernels(self):
        q, k, v = inputs()
        with self.assertRaisesRegex(RuntimeError, "flashjit.attention alone"):
            torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, k, v)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "last dimension"):  # what a launch refuses
            flashjit.attention(q.repeat(1, 1, 1, 2)[..., ::2], k, v)
        torch.autograd.grad(flashjit.attention(q, k, v).sum(), q)


if __name__ == "__main__":
    unittest.main()
