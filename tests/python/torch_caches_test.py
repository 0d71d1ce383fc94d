"""decode, append_kv and copy_kv under torch.compile and as operators: the results of direct calls, and what is refused.

On a GPU if PyTorch has one, with bf16; else on the CPU, with fp32.
"""

import unittest
import warnings

import flashjit
import torch
from torch.library import opcheck
from torch_test import DTYPE, Recorder

TABLE = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32)


def random(*shape, seed=0, dtype=DTYPE):
    generator = torch.Generator(TABLE.device).manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 2 - 1).to(dtype)


def caches(seed=1):
    return random(6, 16, 2, 32, seed=seed), random(6, 16, 2, 32, seed=seed + 1)


class Caches(unittest.TestCase):
    def setUp(self):
        self.q, self.lengths = random(2, 3, 4, 32), torch.tensor([20, 9], dtype=torch.int32)
        self.new = random(2, 3, 2, 32, seed=7), random(2, 3, 2, 32, seed=8)
        angles = random(64, 16, seed=9, dtype=torch.float32)
        self.rotary = {"rotary": {"style": "half"}, "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}

    def decode(self, q, k, v, lengths, k_new=None, v_new=None, **more):
        return flashjit.decode(q, k, v, page_table=TABLE, seqlens_k=lengths, k_new=k_new, v_new=v_new, mask="causal",
                               score="softcap", softcap=3.0, **more)  # fmt: skip

    def append(self, k, v, k_new, v_new, positions, q=None, **more):
        return flashjit.append_kv(k, v, k_new, v_new, q=q, append_positions=positions, page_table=TABLE, **more)

    def compare(self, call, tensors, **keywords):
        """The compiled call returns and writes the bits of the direct one."""
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: call(*x, **keywords), fullgraph=True, backend="aot_eager")
        both = [[x.clone() for x in tensors] for _ in range(2)]
        wanted, computed = call(*both[0], **keywords), compiled(*both[1])
        torch.testing.assert_close((computed, both[1]), (wanted, both[0]), rtol=0, atol=0)

    def test_decode(self):
        k, v = caches()
        self.compare(self.decode, (self.q, k, v, self.lengths))
        self.compare(self.decode, (self.q, k, v, self.lengths), return_lse=True, window=(7, None), out_dtype="fp32")

    def test_decode_that_appends(self):
        k, v = caches()
        self.compare(self.decode, (self.q, k, v, self.lengths, *self.new), return_lse=True)
        out = torch.zeros_like(self.q)
        call = lambda q, k, v, n, kn, vn, out: self.decode(q, k, v, n, kn, vn, q_out=out, **self.rotary)  # noqa: E731
        self.compare(call, (self.q, k, v, self.lengths, *self.new, out))

    def test_append(self):
        k, v = caches()
        positions = torch.tensor([4, 13], dtype=torch.int32)
        self.compare(self.append, (k, v, *self.new, positions))
        self.compare(self.append, (k, v, *self.new, positions, self.q), **self.rotary)
        slots = torch.tensor([5, -1, 40])
        call = lambda k, v, kn, vn: flashjit.append_kv(k, v, kn[0], vn[0], slots=slots)  # noqa: E731
        self.compare(call, (k, v, *self.new))

    def test_copy(self):
        slots = torch.tensor([5, 40, 6, -1]), torch.tensor([40, 6, 5, 3])
        self.compare(flashjit.copy_kv, (*caches(), *slots))
        scales = (random(6, 16, 2, seed=s, dtype=torch.float32) for s in (5, 6))
        k, v = (x.to(torch.float8_e4m3fn) for x in caches())
        call = lambda k, v, ks, vs, a, b: flashjit.copy_kv(k, v, a, b, k_scale=ks, v_scale=vs)  # noqa: E731
        self.compare(call, (k, v, *scales, *slots))
        call = lambda k, v, a, b, kf, vf: flashjit.copy_kv(k, v, a, b, k_from=kf, v_from=vf)  # noqa: E731
        self.compare(call, (*caches(), *slots, *caches(3)))

    def test_dynamic_lengths_compile_once(self):
        count = 0

        def backend(module, example):
            nonlocal count
            count += 1
            return module

        torch._dynamo.reset()
        call = torch.compile(lambda q, k, v, n: self.decode(q, k, v, n), fullgraph=True, dynamic=True, backend=backend)
        for rows in (7, 9, 5):
            q, (k, v) = random(2, rows, 4, 32), caches()
            torch.testing.assert_close(call(q, k, v, self.lengths), self.decode(q, k, v, self.lengths))
        self.assertEqual(count, 1)

    def test_opcheck(self):
        k, v = caches()
        with Recorder() as recorder:
            self.decode(self.q, k, v, self.lengths)
            self.decode(self.q, k, v, self.lengths, *self.new)
            self.append(k, v, *self.new, self.lengths - 9)
            flashjit.copy_kv(k, v, torch.tensor([1]), torch.tensor([2]), k_from=k.clone(), v_from=v.clone())
        self.assertEqual(len(recorder.calls), 4)
        with warnings.catch_warnings(action="ignore"):  # opcheck's own
            for operator, arguments in recorder.calls:
                opcheck(operator, arguments)

    def test_refusals(self):
        k, v = caches()
        for name, call in (("q", self.decode), ("k_new", self.decode)):
            tensors = [self.q, k, v, self.lengths, *self.new]
            place = {"q": 0, "k_new": 4}[name]
            tensors[place] = tensors[place].clone().requires_grad_()
            with Recorder(), self.assertRaisesRegex(flashjit.InvalidArgumentError, f"{name} requires a gradient"):
                call(*tensors)
        with Recorder():
            for wrong in ({"out": torch.empty_like(self.q)}, {"engine": flashjit.Engine("cpu")}, {"stream": 0}):
                with self.assertRaisesRegex(flashjit.InvalidArgumentError, "while PyTorch traces it"):
                    self.decode(self.q, k, v, self.lengths, **wrong)
            with self.assertRaisesRegex(flashjit.InvalidArgumentError, "argument k_new is of type list"):
                self.decode(self.q, k, v, self.lengths, [1.0], v)


if __name__ == "__main__":
    unittest.main()
