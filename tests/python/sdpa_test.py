"""PyTorch's operators of FlashAttention on flashjit, against attention in float64.

On a GPU if PyTorch has one, with bf16, through torch.nn.attention's hook; else on the CPU, with fp32, by the operators
themselves, which PyTorch has for GPUs alone.
"""

import inspect
import math
import unittest

import flashjit
import flashjit.compat.sdpa as drop_in
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch_test import DEVICE, DTYPE, ROUNDING, inputs, plain

aten = torch.ops.aten
HOOK = hasattr(torch.nn.attention, "register_flash_attention_impl")
if HOOK:
    from torch.nn.attention.varlen import varlen_attn


def seen_by(rows, keys, left=None, right=None):
    """Which keys a row sees in a window, or with right=0 causally."""
    distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= distance >= -left if left is not None and left >= 0 else True
    return seen & (distance <= right if right is not None and right >= 0 else True)


class WithOperators(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if DEVICE == "cuda":
            drop_in.register()
            torch.nn.attention.activate_flash_attention_impl("flashjit")
            cls.addClassCleanup(torch.nn.attention.restore_flash_attention_impl)
        else:
            cls.addClassCleanup(drop_in.provide("CPU").remove)

    def near(self, computed, wanted, magnitude=1.0):
        """Off by roundings of the dtype, and by those of sums and exponentials, which are 2^-18 at most."""
        self.assertEqual(computed.shape, wanted.shape)
        off = (computed.double() - wanted).abs().max().item()
        bound = (4 * ROUNDING[DTYPE] + 2.0**-17) * max(1.0, wanted.abs().max().item()) * magnitude
        self.assertLessEqual(off, bound)

    def compare(self, tensors, call, wanted, groups=1):
        """o, lse and gradients of `call` of these tensors, and of `wanted`, which is float64."""
        o, lse = call(*tensors)
        exact = [x.detach().double().requires_grad_() for x in tensors]
        exact_o, exact_lse = wanted(*exact)
        self.near(o, exact_o)
        self.near(lse, exact_lse)
        do = torch.rand(o.shape, generator=torch.Generator(DEVICE).manual_seed(3))
        gradients = torch.autograd.grad(o, tensors, do.to(o.dtype))
        of_exact = torch.autograd.grad(exact_o, exact, do.to(o.dtype).double())
        for one, of_one in zip(gradients, of_exact):
            self.near(one, of_one, 8 * groups)


class Dense(WithOperators):
    def test_sdpa(self):
        """[batch, heads, seqlen, head_dim] of several layouts; head dims as PyTorch pads them."""
        for dim, causal, scale, layout in (
            (32, False, None, "heads first"), (64, True, 0.3, "rows first"), (40, True, None, "rows first"),
            (32, True, None, "odd strides"),
        ):  # fmt: skip
            q, k, v = (x.detach().transpose(1, 2) for x in inputs(rows=49, keys=49, heads=4, heads_kv=4, dim=dim))
            if layout == "heads first":
                q, k, v = (x.contiguous() for x in (q, k, v))
            elif layout == "odd strides":
                q, k, v = (torch.nn.functional.pad(x, (0, 3))[..., :dim] for x in (q, k, v))
            tensors = [x.requires_grad_() for x in (q, k, v)]
            seen = seen_by(49, 49, right=0) if causal else None

            def wanted(*exact):
                o, lse, _ = plain(*(x.transpose(1, 2) for x in exact), seen=seen, scale=scale)
                return o.transpose(1, 2), lse

            def call(*given):
                made = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, scale=scale)
                self.assertEqual(made[0].stride(), torch.empty_like(given[0]).stride())
                return made[:2]

            with self.subTest(dim=dim, causal=causal, layout=layout):
                self.compare(tensors, call, wanted)

    def test_results_are_as_pytorch_expects(self):
        """Shapes, dtypes and strides are those of PyTorch's fake implementations, which compiled graphs rely on."""
        q, k, v = (x.detach().transpose(1, 2) for x in inputs(heads=4, heads_kv=4, rows=33, keys=33))
        lengths = torch.tensor([0, 20, 66], dtype=torch.int32)
        dense = [x.transpose(1, 2) for x in (q, k, v)]
        packed = [x.flatten(0, 1) for x in dense]
        for operator, tensors, more in (
            (aten._scaled_dot_product_flash_attention, (q, k, v), (0.0, True)),
            (aten._flash_attention_forward, dense, (None, None, 33, 33, 0.0, True, False)),
            (aten._flash_attention_forward, packed, (lengths, lengths, 46, 46, 0.0, True, False)),
        ):
            made = operator(*tensors, *more)
            with FakeTensorMode() as mode:
                fakes = operator(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in (*tensors, *more)])
            for one, fake in zip(made, fakes):
                if isinstance(one, torch.Tensor):
                    self.assertEqual((one.shape, one.dtype, one.stride()), (fake.shape, fake.dtype, fake.stride()))
                else:
                    self.assertEqual(one, fake)

    def test_dropout(self):
        """The generator draws seed and offset; the backward drops the same weights."""
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in inputs(heads=4, heads_kv=4, rows=64, keys=64))
        eye = torch.eye(64, dtype=DTYPE).expand(2, 4, 64, 64).contiguous()  # o is the weights

        def weights(seed):
            torch.manual_seed(seed)
            return aten._scaled_dot_product_flash_attention(q, k, eye, 0.25)[0]

        one, again, other = weights(1), weights(1), weights(2)
        self.assertTrue(torch.equal(one, again))
        self.assertFalse(torch.equal(one, other))
        whole = aten._scaled_dot_product_flash_attention(q, k, eye, 0.0)[0]
        kept = one > 0
        count = kept.numel()
        self.assertLess(abs(kept.double().mean().item() - 0.75), 6 * math.sqrt(0.75 * 0.25 / count))
        self.near(one, (whole.double() * kept / 0.75).detach(), 4)
        torch.manual_seed(1)
        o = aten._scaled_dot_product_flash_attention(q, k, v, 0.25)[0]
        do = torch.rand(o.shape, generator=torch.Generator(DEVICE).manual_seed(4)).to(DTYPE)
        gradients = torch.autograd.grad(o, (q, k, v), do)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        of_exact, _, _ = plain(*(x.transpose(1, 2) for x in exact), kept=kept.double() / 0.75)
        wanted = torch.autograd.grad(of_exact.transpose(1, 2), exact, do.double())
        self.near(o, of_exact.transpose(1, 2).detach(), 4)
        for one, of_one in zip(gradients, wanted):
            self.near(one, of_one, 16)

    def test_windows_and_slopes(self):
        """_flash_attention_forward with [batch, seqlen, heads, head_dim], and fewer heads of keys."""
        tensors = inputs(rows=33, keys=65)
        slopes = torch.linspace(0.1, 0.8, 4)
        for causal, left, right in ((False, 20, 5), (True, None, None), (True, 7, -1), (False, None, None)):
            seen = seen_by(33, 65, left, 0 if causal else right)

            def call(*given):
                return aten._flash_attention_forward(*given, None, None, 33, 65, 0.0, causal, False,
                    window_size_left=left, window_size_right=right)[:2]  # fmt: skip

            with self.subTest(causal=causal, left=left, right=right):
                self.compare(tensors, call, lambda *exact: plain(*exact, seen=seen)[:2], groups=2)
        with torch.no_grad():
            o = aten._flash_attention_forward(*tensors, None, None, 33, 65, 0.0, False, False, alibi_slopes=slopes)[0]
            distance = (torch.arange(65)[None] - torch.arange(33)[:, None] - 32).abs()
            exact = [x.double() for x in tensors]
            self.near(o, plain(*exact, score=lambda s: s - slopes.double()[:, None, None] * distance)[0])


class Packed(WithOperators):
    LENGTHS = [(20, 31), (1, 17), (45, 45)]

    def packed(self):
        generator = torch.Generator(DEVICE).manual_seed(0)
        rows, keys = (sum(x) for x in zip(*self.LENGTHS))
        shapes = (rows, 4, 32), (keys, 2, 32), (keys, 2, 32)
        tensors = [(torch.rand(s, generator=generator) * 2 - 1).to(DTYPE).requires_grad_() for s in shapes]
        begins = [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*self.LENGTHS)]
        return tensors, begins

    def wanted(self, q, k, v, causal=False, left=None, used=None):
        made, row, key = [], 0, 0
        for i, (rows, keys) in enumerate(self.LENGTHS):
            count = keys if used is None else used[i]
            seen = seen_by(rows, count, left, 0 if causal else None)
            one = plain(q[None, row : row + rows], k[None, key : key + count], v[None, key : key + count], seen=seen)
            made.append((one[0][0], one[1][0]))
            row, key = row + rows, key + keys
        return torch.cat([o for o, _ in made]), torch.cat([lse for _, lse in made], 1)

    def test_packed(self):
        tensors, (of_q, of_k) = self.packed()
        for causal, left in ((False, None), (True, None), (True, 9)):
            def call(*given):
                return aten._flash_attention_forward(*given, of_q, of_k, 45, 45, 0.0, causal, False,
                    window_size_left=left, window_size_right=0 if causal else None)[:2]  # fmt: skip

            with self.subTest(causal=causal, left=left):
                self.compare(tensors, call, lambda *exact: self.wanted(*exact, causal, left), groups=2)

    def test_lengths_used(self):
        tensors, (of_q, of_k) = self.packed()
        used = [25, 9, 45]
        with torch.no_grad():
            o, lse = aten._flash_attention_forward(*tensors, of_q, of_k, 45, 45, 0.0, True, False,
                seqused_k=torch.tensor(used, dtype=torch.int32))[:2]  # fmt: skip
        exact = self.wanted(*(x.detach().double() for x in tensors), True, None, used)
        self.near(o, exact[0])
        self.near(lse, exact[1])

    @unittest.skipUnless(HOOK, "PyTorch has no hook")
    def test_varlen_attn(self):
        """PyTorch's function, with gradients, and with keys in pages where it has them."""
        tensors, (of_q, of_k) = self.packed()

        def call(*given):
            made = torch.ops.torch_attn._varlen_attn.default
            names = [x.name for x in made._schema.arguments]
            more = {"is_causal": True, "enable_gqa": True, "window_size": [-1, 0]}
            more = {name: value for name, value in more.items() if name in names}
            return made(*given, of_q, of_k, 45, 45, **more)[:2]

        self.compare(tensors, call, lambda *exact: self.wanted(*exact, True), groups=2)
        with torch.no_grad():
            if DEVICE == "cuda":
                groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # else they need no saying
                more = {"enable_gqa": True} if groups else {}
                o = varlen_attn(*tensors, of_q, of_k, 45, 45, window_size=(-1, 0), **more)
                self.near(o, call(*tensors)[0].double())

    @unittest.skipUnless(hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), "PyTorch has no such operator")
    def test_pages(self):
        generator = torch.Generator(DEVICE).manual_seed(0)
        pages = (torch.rand((2, 12, 16, 2, 32), generator=generator) * 2 - 1).to(DTYPE)
        table = torch.randperm(12, generator=generator).reshape(3, 4).int()
        used = torch.tensor([64, 17, 33], dtype=torch.int32)
        keys, values = (x[table.long()].flatten(1, 2).double() for x in pages)
        for rows in (1, 5, 70):
            q = (torch.rand((3 * rows, 4, 32), generator=generator) * 2 - 1).to(DTYPE)
            begins = torch.arange(4, dtype=torch.int32) * rows
            wanted = [
                plain(q[None, i * rows : (i + 1) * rows].double(), keys[None, i, :n], values[None, i, :n],
                      seen=seen_by(rows, n, right=0)) for i, n in enumerate(used.tolist())]  # fmt: skip
            for splits in (None, 1):
                out = torch.empty_like(q)
                more = {"seqused_k": used, "block_table": table, "num_splits": splits}
                call = q, *pages, begins, None, rows, 64, 0.0, True, False
                o, lse = aten._flash_attention_forward(*call, **more)[:2]
                self.assertTrue(torch.equal(aten._flash_attention_forward_no_dropout_inplace(out, *call, **more), lse))
                self.assertTrue(torch.equal(out, o))
                empty = lse.isinf()
                self.near(o, torch.cat([x[0][0] for x in wanted]).nan_to_num(0))
                self.near(lse[~empty], torch.cat([x[1][0] for x in wanted], 1)[~empty])


class Functions(unittest.TestCase):
    @unittest.skipUnless(HOOK, "PyTorch has no hook")
    def test_hook(self):
        """PyTorch lists it, and takes it and its own in turn."""
        drop_in.register()
        self.assertIn("flashjit", torch.nn.attention.list_flash_attention_impls())
        torch.nn.attention.activate_flash_attention_impl("flashjit")
        self.assertEqual(torch.nn.attention.current_flash_attention_impl(), "flashjit")
        torch.nn.attention.restore_flash_attention_impl()
        self.assertIsNone(torch.nn.attention.current_flash_attention_impl())
        q = torch.rand(1, 2, 16, 32, dtype=DTYPE, requires_grad=True)
        scaled_dot_product_attention(q, q, q).sum().backward()

    def test_versions(self):
        """An operator with other names or further arguments; those that flashjit does not know are refused."""
        library = torch.library.Library("flashjit_test", "DEF")
        self.addCleanup(library._destroy)
        library.define(
            "sdpa(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, float? scale=None,"
            " Tensor? bias=None, bool return_debug_mask=False) -> (Tensor softmax_logsumexp, Tensor output)"
        )
        library.impl("sdpa", drop_in._adapted(torch.ops.flashjit_test.sdpa.default, drop_in._sdpa), "CompositeExplicitAutograd")
        q = torch.rand(1, 2, 16, 32, dtype=DTYPE)
        lse, o = torch.ops.flashjit_test.sdpa(q, q, q, 0.0, True, scale=0.5)
        wanted = plain(*[q.transpose(1, 2).double()] * 3, seen=seen_by(16, 16, right=0), scale=0.5)
        torch.testing.assert_close(o.double(), wanted[0].transpose(1, 2), rtol=2.0**-6, atol=2.0**-6)
        torch.testing.assert_close(lse.double(), wanted[1], rtol=2.0**-6, atol=2.0**-6)
        with self.assertRaisesRegex(flashjit.UnsupportedError, "bias.*would work"):
            torch.ops.flashjit_test.sdpa(q, q, q, bias=q)
        with self.assertRaisesRegex(flashjit.UnsupportedError, "return_debug_mask.*would work"):
            torch.ops.flashjit_test.sdpa(q, q, q, return_debug_mask=True)


if __name__ == "__main__":
    unittest.main()
