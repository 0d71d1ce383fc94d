"""flashjit.attention against attention in float64."""

import tracemalloc
import unittest

import flashjit
import ml_dtypes
import numpy as np
from reference import attention, causal, check, random


class Attention(unittest.TestCase):
    def inputs(self, dtype=np.float32, batch=2, rows=33, keys=65, heads=4, heads_kv=2, dim=32, dim_v=None):
        return (
            random((batch, rows, heads, dim), dtype, 1),
            random((batch, keys, heads_kv, dim), dtype, 2),
            random((batch, keys, heads_kv, dim_v or dim), dtype, 3),
        )

    def compare(self, inputs, expected={}, **call):
        o, lse = flashjit.attention(*inputs, return_lse=True, **call)
        self.assertEqual(o.dtype, inputs[0].dtype)
        wanted, wanted_lse, bound, bound_lse = attention(*inputs, **expected)
        check(self, o, wanted, bound)
        check(self, lse, wanted_lse, bound_lse, "lse")

    def test_dtypes(self):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            with self.subTest(dtype=dtype):
                self.compare(self.inputs(dtype), {"seen": causal(33, 65)}, mask="causal")

    def test_head_dims_differ(self):
        self.compare(self.inputs(dim=40, dim_v=24))

    def test_scale(self):
        self.compare(self.inputs(), {"scale": 0.3}, scale=0.3)
        self.compare(self.inputs(), {"scale": 1.0}, scale=1)

    def test_window(self):
        shift = np.arange(65)[None, :] - np.arange(33)[:, None] - 32
        self.compare(self.inputs(), {"seen": (shift >= -5) & (shift <= 3)}, window=(5, 3))
        self.compare(self.inputs(), {"seen": shift <= 0}, window=(None, 0))
        self.compare(self.inputs(), {}, window=(None, None))
        sinks = (shift >= -5) & (shift <= 0) | (np.arange(65) < 2)[None, :] & (shift <= 0)
        self.compare(self.inputs(), {"seen": sinks}, mask="causal", window=(5, None), num_sinks=2)
        top_left = np.arange(65)[None, :] - np.arange(33)[:, None]
        self.compare(
            self.inputs(),
            {"seen": (top_left <= 0) & (top_left >= -4)},
            mask=[{"kind": "causal", "align": "top_left"}],
            window=(4, None),
        )

    def test_padding(self):
        lengths = np.array([40, 7], np.int32)
        seen = np.arange(65)[None, None, None, :] < lengths[:, None, None, None]
        self.compare(self.inputs(), {"seen": seen}, seqlens_k=lengths)

    def test_strides(self):
        q, k, v = self.inputs()
        packed = np.ascontiguousarray(np.concatenate([k, v], axis=2))
        self.compare((q[:, ::2], packed[:, :, :2], packed[:, :, 2:]))

    def test_heads_first(self):
        q, k, v = self.inputs()
        wanted = flashjit.attention(q, k, v, mask="causal", return_lse=True)
        first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
        o, lse = flashjit.attention(*first, mask="causal", return_lse=True, heads_first=True)
        self.assertTrue(o.flags.c_contiguous)
        np.testing.assert_array_equal(o.swapaxes(1, 2), wanted[0])
        np.testing.assert_array_equal(lse, wanted[1])
        out = np.empty_like(o)
        self.assertIs(flashjit.attention(*first, mask="causal", heads_first=True, out=out), out)
        np.testing.assert_array_equal(out, o)

    def test_packed(self):
        starts_q, starts_k = np.array([0, 5, 5, 21], np.int32), np.array([0, 9, 12, 40], np.int32)
        q, k, v = random((21, 4, 32), seed=1), random((40, 2, 32), seed=2), random((40, 2, 32), seed=3)
        for bounds in ({}, {"max_seqlen_q": 16, "max_seqlen_k": 28}):
            o, lse = flashjit.attention(
                q, k, v, mask="causal", cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, return_lse=True, **bounds
            )
            self.assertEqual(lse.shape, (4, 21))
            for i in range(3):
                rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
                if rows.start == rows.stop:
                    continue
                wanted, wanted_lse, bound, bound_lse = attention(
                    q[None, rows],
                    k[None, keys],
                    v[None, keys],
                    seen=causal(rows.stop - rows.start, keys.stop - keys.start),
                )
                check(self, o[None, rows], wanted, bound)
                check(self, lse[None, :, rows], wanted_lse, bound_lse, "lse")

    def test_pages(self):
        pages, table = random((6, 16, 2, 32), seed=2), np.array([[4, 0], [5, 2]], np.int32)
        q, lengths = random((2, 8, 4, 32), seed=1), np.array([20, 9], np.int32)
        o = flashjit.attention(q, pages, pages, page_table=table, seqlens_k=lengths)
        keys = pages[table].reshape(2, 32, 2, 32)
        wanted, _, bound, _ = attention(q, keys, keys, seen=np.arange(32) < lengths[:, None, None, None])
        check(self, o, wanted, bound)

    def test_formulas(self):
        inputs = self.inputs()
        document = np.repeat(np.arange(7, dtype=np.int32), 10)[:65][None].repeat(2, 0)
        rows = document[:, 32:]
        seen = (document[:, None, None, :] == rows[:, None, :, None]) & causal(33, 65)
        self.compare(
            inputs,
            {"seen": seen},
            mask=("causal", "document[key] == document[position]"),
            document=document,
            tables={"document": ("batch", "seqlen_k")},
        )
        self.compare(inputs, {"score": lambda s: 2.5 * np.tanh(s / 2.5)}, score="softcap", softcap=2.5)
        for cap in (2, np.float32(2), np.int64(2)):
            self.compare(inputs, {"score": lambda s: 2 * np.tanh(s / 2)}, score="softcap", softcap=cap)
            self.compare(inputs, {"score": lambda s: s * 2}, score="score * factor", factor=cap)
        self.compare(
            inputs,
            {"seen": np.arange(65)[None, :] <= np.arange(33)[:, None] + 32 + 3},
            mask="key <= position + ahead",
            ahead=3,
        )
        slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
        distance = abs(np.arange(65)[None, :] - np.arange(33)[:, None] - 32)
        self.compare(
            inputs, {"score": lambda s: s - slopes[:, None, None] * distance}, score=["alibi"], alibi_slopes=slopes
        )

    def test_block_lists(self):
        inputs = self.inputs(rows=300, keys=300)
        document = (np.arange(300, dtype=np.int32) // 90)[None].repeat(2, 0)
        mask, named = ["causal", "document[key] == document[position]"], {"document": document}
        tables = {"document": ["batch", "seqlen_k"]}
        seen = causal(300, 300) & (document[0][None, :] == document[0][:, None])
        for more in ({}, {"bitmasks": 8}, {"per_head": True, "block_m": 64, "block_n": 64}):
            lists = flashjit.make_block_lists(*inputs[:2], mask=mask, tables=tables, **named, **more)
            self.compare(inputs, {"seen": seen}, mask=mask, tables=tables, block_lists=lists, **named)
        # A list of its own, without other masks, shows exactly its blocks.
        own = flashjit.BlockLists(np.array([[[0, 1, 2, 3]]], np.int32), np.array([2, 0, 1], np.int32))
        blocks = np.zeros((3, 3), bool)
        blocks[[0, 1, 2], [2, 0, 1]] = True
        self.compare(inputs, {"seen": np.repeat(np.repeat(blocks, 128, 0), 128, 1)[:300, :300]}, block_lists=own)

    def test_sink_logits(self):
        sinks = np.array([0.5, -1, 2, 0], np.float32)
        self.compare(self.inputs(), {"sinks": sinks.astype(np.float64)}, sink_logits=sinks)

    def test_chunks_of_keys_merge_into_the_whole(self):
        q, k, v = self.inputs(rows=65)
        whole, lse = flashjit.attention(q, k, v, mask="causal", return_lse=True)
        cut, batch = k.shape[1] // 3, q.shape[0]
        parts = [
            flashjit.attention(
                q, k[:, some], v[:, some], mask="causal", return_lse=True, row_offset=np.zeros(batch, np.int64),
                key_offset=np.full(batch, some.start, np.int64)
            )
            for some in (slice(0, cut), slice(cut, k.shape[1]))
        ]  # fmt: skip
        merged, merged_lse = flashjit.merge(*(np.stack(one) for one in zip(*parts)), return_lse=True)
        np.testing.assert_allclose(merged, whole, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(merged_lse, lse, rtol=1e-5, atol=1e-5)
        rows = slice(cut, q.shape[1])
        chunk = flashjit.attention(
            q[:, rows], k, v, mask="causal", row_offset=np.full(batch, cut, np.int64), key_offset=np.zeros(batch, np.int64)
        )
        np.testing.assert_allclose(chunk, whole[:, rows], rtol=1e-5, atol=1e-5)

    def test_dropout(self):
        q = np.zeros((1, 64, 2, 32), np.float32)
        eye = np.tile(np.eye(64, 64, dtype=np.float32)[None, :, None], (1, 1, 2, 1))
        kept = flashjit.attention(q, q, eye, dropout_p=0.25, dropout_seed=2**64 - 1, dropout_offset=3)
        self.assertLessEqual(set(np.round(np.unique(kept) * 64 * 0.75, 4)), {0.0, 1.0})
        share = (kept > 0).mean()  # of 8,192 weights: a standard deviation is 0.005
        self.assertLess(abs(share - 0.75), 0.04)
        in_memory = flashjit.attention(
            q, q, eye, dropout_p=0.25, dropout_seed=np.array([-1], np.int64), dropout_offset=np.array([3], np.int64)
        )
        np.testing.assert_array_equal(kept, in_memory)
        other = flashjit.attention(q, q, eye, dropout_p=0.25, dropout_seed=7)
        self.assertFalse(np.array_equal(kept, other))

    def test_out(self):
        q, k, v = self.inputs(np.float16)
        wanted, _, bound, _ = attention(q, k, v)
        out = np.empty(q.shape, np.float16)
        self.assertIs(flashjit.attention(q, k, v, out=out), out)
        check(self, out, wanted, bound)
        for o in (
            flashjit.attention(q, k, v, out_dtype="fp32"),
            flashjit.attention(q, k, v, out=np.empty(q.shape, np.float32)),
        ):
            self.assertEqual(o.dtype, np.float32)
            check(self, o, wanted, bound)

    def test_calls_like_earlier_ones(self):
        """Keywords of the same names, with other values: each means what it says, however often it comes."""
        q, k, v = self.inputs(rows=40, keys=40)
        names, cap = ["causal"], np.full((4,), 0.5, np.float32)
        shift = np.arange(40)[None, :] - np.arange(40)[:, None]
        lists = [flashjit.make_block_lists(q, k, mask="causal", block_m=size, block_n=16) for size in (16, 32)]
        tables = {"cap": ["heads_q"]}
        calls = [({"mask": names}, {"seen": shift <= 0}), ({"mask": "causal"}, {"seen": shift <= 0}), ({"mask": ()}, {}),
                 ({"window": (3, 0)}, {"seen": (shift <= 0) & (shift >= -3)}), ({"window": (None, 2)}, {"seen": shift <= 2}),
                 ({"window": (None, None)}, {}), ({"scale": 0.3}, {"scale": 0.3}), ({"scale": None}, {}),
                 ({"mask": "causal", "block_lists": lists[0]}, {"seen": shift <= 0}),
                 ({"mask": "causal", "block_lists": lists[1]}, {"seen": shift <= 0}),
                 ({"score": "score * cap[head]", "cap": cap, "tables": tables}, {"scale": 0.5 / 32**0.5})]  # fmt: skip
        for _ in range(3):
            for call, expected in calls:
                with self.subTest(**{name: str(one)[:20] for name, one in call.items()}):
                    self.compare((q, k, v), expected, **call)
                    o = flashjit.attention(q, k, v, **call)
                    self.assertIsInstance(o, np.ndarray)
        names[0] = "row == key"
        self.compare((q, k, v), {"seen": shift == 0}, mask=names)
        cap[:] = 0.25
        self.compare((q, k, v), {"scale": 0.25 / 32**0.5}, score="score * cap[head]", cap=cap, tables=tables)
        tables["other"] = ["n"]
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "other"):
            self.compare((q, k, v), {}, score="score * cap[head]", cap=cap, tables=tables)

    def test_engine_of_the_caller(self):
        engine = flashjit.Engine("cpu", num_threads=1)
        self.compare(self.inputs(), engine=engine)
        self.compare(self.inputs(batch=1, rows=3), engine=engine)


    def test_batch_invariant(self):
        q, k, v = random((2, 200, 4, 64), seed=1), random((2, 200, 2, 64), seed=2), random((2, 200, 2, 64), seed=3)
        whole = flashjit.attention(q, k, v, mask="causal", batch_invariant=True)
        for begin, end in ((0, 200), (147, 150), (199, 200)):
            cut = flashjit.attention(
                q[1:, begin:end], k[1:, :end], v[1:, :end], mask="causal", batch_invariant=True
            )
            np.testing.assert_array_equal(cut, whole[1:, begin:end])


class Others(unittest.TestCase):
    def test_decode(self):
        cache_k, cache_v = random((2, 50, 2, 32), seed=2), random((2, 50, 2, 32), seed=3)
        q, lengths = random((2, 3, 4, 32), seed=1), np.array([50, 9], np.int32)
        place = lengths[:, None] - 3 + np.arange(3)
        seen = np.arange(50) <= place[:, None, :, None]
        o, lse = flashjit.decode(q, cache_k, cache_v, mask="causal", seqlens_k=lengths, return_lse=True)
        wanted, wanted_lse, bound, bound_lse = attention(q, cache_k, cache_v, seen=seen)
        check(self, o, wanted, bound)
        check(self, lse, wanted_lse, bound_lse, "lse")
        again = flashjit.decode(
            q.reshape(6, 4, 32),
            cache_k,
            cache_v,
            mask="causal",
            seqlens_k=lengths,
            cu_seqlens_q=np.array([0, 3, 6], np.int32),
            batch_invariant=True,
        )
        check(self, again.reshape(o.shape), wanted, bound)

    def test_values_in_keys(self):
        q, k = random((2, 5, 4, 40), seed=1), random((2, 9, 2, 40), seed=2)
        v = k[..., :24]
        for call in (flashjit.attention, flashjit.decode):
            o, lse = call(q, k, head_dim_v=24, return_lse=True)
            wanted, wanted_lse = call(q, k, v, return_lse=True)
            np.testing.assert_array_equal(o, wanted)
            np.testing.assert_array_equal(lse, wanted_lse)
            for given, more, text in (
                ((q, k, v), {"head_dim_v": 24}, "beside v"),
                ((q, k), {"head_dim_v": "24"}, "'24'"),
                ((q, k), {}, "argument v is missing"),
            ):
                with self.assertRaisesRegex(flashjit.InvalidArgumentError, text):
                    call(*given, **more)
            with self.assertRaisesRegex(flashjit.InvalidSpecError, "head_dim_v 48 is more than head_dim 40"):
                call(q, k, head_dim_v=48)

    def test_decode_that_appends(self):
        k, v = random((1, 16, 2, 32), seed=2), random((1, 16, 2, 32), seed=3)
        new_k, new_v, q = (random((1, 1, h, 32), seed=s) for h, s in ((2, 4), (2, 5), (4, 1)))
        o = flashjit.decode(q, k, v, seqlens_k=np.array([9], np.int32), k_new=new_k, v_new=new_v)
        np.testing.assert_array_equal(k[0, 8], new_k[0, 0])
        wanted, _, bound, _ = attention(q, k[:, :9], v[:, :9])
        check(self, o, wanted, bound)

    def test_append(self):
        k, v = np.zeros((4, 8, 2, 32), np.float32), np.zeros((4, 8, 2, 32), np.float32)
        new_k, new_v = random((3, 2, 32), seed=1), random((3, 2, 32), seed=2)
        table = np.array([[3, 1]], np.int32)
        slots = np.array([5, -1, 30], np.int64)
        self.assertIsNone(flashjit.append_kv(k, v, new_k, new_v, slots=slots))
        np.testing.assert_array_equal(k.reshape(32, 2, 32)[[5, 30]], new_k[[0, 2]])
        self.assertEqual(np.count_nonzero(v.any((2, 3))), 2)
        flashjit.append_kv(k, v, new_k[None], new_v[None], append_positions=np.array([6], np.int32), page_table=table)
        np.testing.assert_array_equal(v[3, 6:], new_v[:2])
        np.testing.assert_array_equal(v[1, 0], new_v[2])

    def test_copy(self):
        k, v = random((3, 8, 2, 32), seed=1), random((3, 8, 2, 32), seed=2)
        before = k.copy(), v.copy()
        slots, places = np.array([5, 6, -1, 9, 24]), np.array([6, 5, 0, 20, 1])
        self.assertIsNone(flashjit.copy_kv(k, v, slots, places))
        for now, then in ((k, before[0]), (v, before[1])):
            wanted = then.reshape(24, 2, 32).copy()
            wanted[[6, 5, 20]] = wanted[[5, 6, 9]]
            np.testing.assert_array_equal(now.reshape(24, 2, 32), wanted)
        other = np.zeros((24, 1, 2, 32), np.float32), np.zeros((24, 1, 2, 32), np.float32)
        flashjit.copy_kv(*other, np.arange(24), np.arange(24), k_from=k, v_from=v)
        np.testing.assert_array_equal(other[1].reshape(v.shape), v)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "v_from is missing"):
            flashjit.copy_kv(*other, np.arange(24), np.arange(24), k_from=k)
        for bad in (3, np.zeros((2, 2), np.int64), None):
            with self.assertRaisesRegex(flashjit.InvalidArgumentError, "from_slots"):
                flashjit.copy_kv(k, v, bad, places)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "argument k "):
            flashjit.copy_kv(k[0], v[0], slots, places)

    def test_copy_between_caches_allocates_nothing(self):
        k, v = random((1, 1024, 4, 64), seed=1), random((1, 1024, 4, 64), seed=2)
        rows = np.arange(512)

        def peak_from(first):  # row `first` of the caches on
            source = slice(first, first + 512)
            call = lambda: flashjit.copy_kv(  # noqa: E731
                k[:, :512], v[:, :512], rows, rows, k_from=k[:, source], v_from=v[:, source]
            )
            call()
            tracemalloc.start()
            call()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

        self.assertLess(peak_from(512), k.nbytes / 2)
        self.assertGreater(peak_from(511), k.nbytes / 2)  # the rows lie in a workspace between

    def test_copy_of_8_bits(self):
        k, v = (random((2, 4, 3, 64), np.float32, s).astype(ml_dtypes.float8_e4m3fn) for s in (1, 2))
        k_scale, v_scale = random((2, 4, 3), seed=3), random((2, 4, 3), seed=4)
        caches = k, v, k_scale, v_scale
        before = [x.reshape(8, 3, -1).copy() for x in caches]
        flashjit.copy_kv(k, v, np.arange(8), (np.arange(8) + 3) % 8, k_scale=k_scale, v_scale=v_scale)
        for now, then in zip(caches, before):
            np.testing.assert_array_equal(now.reshape(8, 3, -1), np.roll(then, 3, 0))
        flashjit.copy_kv(k, v, np.array([1]), np.array([0]))  # scales of a tensor or of heads
        np.testing.assert_array_equal(k[0, 0], k[0, 1])

    def test_append_rotates(self):
        k, v = (np.zeros((1, 8, 2, 32), np.float32) for _ in range(2))
        new, q = random((1, 2, 2, 32), seed=1), random((1, 2, 4, 32), seed=2)
        turned = flashjit.append_kv(k, v, new, new, append_positions=np.array([4], np.int32), q=q, rotary=True)
        angle = np.arange(4, 6)[:, None] * 10000.0 ** (-np.arange(16) / 16)
        c, s = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
        for given, made in ((q, turned), (new, k[:, 4:6])):
            x, y = given[..., :16].astype(np.float64), given[..., 16:].astype(np.float64)
            # Cosine and sine err by 2^-22, two products and a sum round three times; |x|, |y| <= 1.
            np.testing.assert_allclose(made, np.concatenate([x * c - y * s, x * s + y * c], -1), rtol=0, atol=2.0**-20)

    def test_latent_cache(self):
        cache = np.zeros((1, 8, 1, 72), np.float32)
        new, q = random((1, 2, 1, 72), seed=1), random((1, 2, 4, 72), seed=2)
        turned = flashjit.append_kv(
            cache, None, new, head_dim_v=40, append_positions=np.array([4], np.int32), q=q, rotary={"first": 40}
        )
        np.testing.assert_array_equal(cache[0, 4:6, :, :40], new[0, ..., :40])
        np.testing.assert_array_equal(turned[..., :40], q[..., :40])
        # The rotated columns are those of a cache that has no others.
        k, v = (np.zeros((1, 8, 1, 32), np.float32) for _ in range(2))
        wanted = flashjit.append_kv(
            k, v, new[..., 40:], new[..., 40:], append_positions=np.array([4], np.int32), q=q[..., 40:], rotary=True
        )
        np.testing.assert_array_equal(cache[..., 40:], k)
        np.testing.assert_array_equal(turned[..., 40:], wanted)

        flashjit.copy_kv(cache, None, np.array([4]), np.array([0]), head_dim_v=40)
        np.testing.assert_array_equal(cache[0, 0], cache[0, 4])
        cache[0, 0] = 0
        o = flashjit.decode(turned, cache, head_dim_v=40, seqlens_k=np.array([6], np.int32), mask="causal")
        both, out = np.zeros_like(cache), np.empty_like(q)
        at_once = flashjit.decode(
            q, both, head_dim_v=40, seqlens_k=np.array([6], np.int32), mask="causal", k_new=new, q_out=out,
            rotary={"first": 40},
        )  # fmt: skip
        np.testing.assert_array_equal(both, cache)
        np.testing.assert_array_equal(at_once, o)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "v_new.*is no argument of the spec"):
            flashjit.append_kv(cache, None, new, new, head_dim_v=40, append_positions=np.array([4], np.int32))

    def test_ds_mla_cache(self):
        cache, new = np.zeros((1, 8, 1, 656), np.uint8), random((1, 8, 1, 576), ml_dtypes.bfloat16, 1)
        flashjit.append_kv(cache, None, new, head_dim_v=512, append_positions=np.array([0], np.int32))
        columns, scales = cache[..., :512].view(ml_dtypes.float8_e4m3fn), cache[..., 512:528].view(np.float32)
        latent = (columns.astype(np.float32).reshape(8, 4, 128) * scales.reshape(8, 4, 1)).reshape(1, 8, 1, 512)
        np.testing.assert_array_equal(cache[..., 528:].view(ml_dtypes.bfloat16), new[..., 512:])
        # Half a unit of three bits, or of the smallest subnormal times the scale.
        wanted = new[..., :512].astype(np.float32)
        np.testing.assert_allclose(latent, wanted, rtol=2.0**-4, atol=2.0**-10 * scales.max())
        q = random((1, 1, 4, 576), ml_dtypes.bfloat16, 2)
        o = flashjit.decode(q, cache, head_dim_v=512)
        k = np.concatenate([latent, new[..., 512:].astype(np.float32)], -1)
        wanted, _, bound, _ = attention(q, k, latent)
        check(self, o, wanted, bound)

    def test_8_bit_cache(self):
        k, v = (np.zeros((1, 8, 2, 64), ml_dtypes.float8_e4m3fn) for _ in range(2))
        scales = [np.ones((1, 8, 2), np.float32) for _ in range(2)]
        new = random((1, 8, 2, 64), ml_dtypes.bfloat16, 1)
        flashjit.append_kv(
            k,
            v,
            new,
            new,
            append_positions=np.array([0], np.int32),
            k_scale=scales[0],
            v_scale=scales[1],
            kv_scale="token_head",
        )
        true_k = k.astype(np.float32) * scales[0][..., None]
        # Half a unit of three bits, or of the smallest subnormal times the scale.
        np.testing.assert_allclose(true_k, new.astype(np.float32), rtol=2.0**-4, atol=2.0**-10 * scales[0].max())
        q = random((1, 1, 2, 64), ml_dtypes.bfloat16, 2)
        o = flashjit.decode(q, k, v, k_scale=scales[0], v_scale=scales[1], kv_scale="token_head")
        wanted, _, bound, _ = attention(q, true_k, v.astype(np.float32) * scales[1][..., None])
        check(self, o, wanted, bound)

    def test_merge(self):
        q, k, v = random((2, 9, 4, 32), seed=1), random((2, 40, 2, 32), seed=2), random((2, 40, 2, 32), seed=3)
        parts = [flashjit.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 13), slice(13, 40))]
        o, lse = flashjit.merge(*(np.stack(x) for x in zip(*parts)), return_lse=True)
        wanted, wanted_lse, bound, bound_lse = attention(q, k, v)
        check(self, o, wanted, 2 * bound)  # that of the parts, and of merging them
        check(self, lse, wanted_lse, 2 * bound_lse, "lse")


if __name__ == "__main__":
    unittest.main()
