"""The backends for vLLM and SGLang, on their own interface files, against attention in float64.

FLASHJIT_ENGINES names a folder with files of the engines' wheels, from which the interfaces are imported. What needs a
GPU or an engine's kernels has stand-ins: configurations, schedulers, pools.
"""

import enum
import os
import sys
import types
import unittest
import warnings
from pathlib import Path
from unittest import mock

import engine_files
import flashjit
import torch
from flashjit.compat import plugins
from torch_test import DEVICE, DTYPE, ROUNDING, plain

FOLDER = Path(os.environ.get("FLASHJIT_ENGINES", ""))
if not (FOLDER / "made").exists():
    why = FOLDER / "why"
    print(why.read_text() if why.exists() else f"{FOLDER} has no files of vllm and sglang: tools/test --python makes it")
    sys.exit(77)
engine_files.offer(FOLDER, "vllm", [
    "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry", "vllm.utils.import_utils",
])  # fmt: skip
engine_files.offer(FOLDER, "sglang", [
    "sglang.srt.layers.attention.base_attn_backend", "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.arg_groups.choices",
])  # fmt: skip
HEADS, HEADS_KV, DIM, PAGE, PAGES = 4, 2, 32, 16, 40
# Rows that are new, and keys in all: a decode, a chunk of a prefill, a whole prefill, and a decode of a long sequence.
REQUESTS = [(1, 17), (30, 61), (90, 90), (1, 100)]
DECODES = [(1, 17), (1, 1), (1, 100)]


def uniform(*shape, seed=0):
    return (torch.rand(shape, generator=torch.Generator(DEVICE).manual_seed(seed)) * 2 - 1).to(DTYPE)


def tables(requests):
    """Pages of each request, in no order."""
    order = torch.randperm(PAGES, generator=torch.Generator(DEVICE).manual_seed(1)).int()
    width = -(-max(keys for _, keys in requests) // PAGE)
    made, taken = torch.zeros(len(requests), width, dtype=torch.int32), 0
    for i, (_, keys) in enumerate(requests):
        count = -(-keys // PAGE)
        made[i, :count] = order[taken : taken + count]
        taken += count
    return made


def slots_of(table, i, begin, end):
    places = torch.arange(begin, end)
    return table[i, places // PAGE].long() * PAGE + places % PAGE


class Case:
    """A step: rows of several requests, whose earlier keys are in the cache."""

    def __init__(self, requests, window=None, cap=None, sinks=None, slopes=None, stored=None, scale=1.0):
        self.requests, self.table = requests, tables(requests)
        rows = sum(rows for rows, _ in requests)
        self.q, self.k, self.v = (uniform(rows, n, DIM, seed=i) for i, n in enumerate((HEADS, HEADS_KV, HEADS_KV)))
        self.history = uniform(2, len(requests), 100, HEADS_KV, DIM, seed=5)
        self.begins = torch.tensor([0, *[rows for rows, _ in requests]]).cumsum(0).int()
        self.lengths = torch.tensor([keys for _, keys in requests], dtype=torch.int32)
        new = [slots_of(self.table, i, keys - rows, keys) for i, (rows, keys) in enumerate(requests)]
        self.slots = torch.cat(new)
        self.window, self.cap, self.sinks, self.slopes = window, cap, sinks, slopes
        self.stored, self.scale = stored, scale  # the dtype of a cache of 8 bits, and what its numbers are divided by
        if stored is not None:  # fp32 has no such caches
            self.q, self.k, self.v, self.history = (x.bfloat16() for x in (self.q, self.k, self.v, self.history))

    def fill(self, write):
        """Writes the earlier keys by write(slots, k, v)."""
        for i, (rows, keys) in enumerate(self.requests):
            if keys > rows:
                write(slots_of(self.table, i, 0, keys - rows), *(x[i, : keys - rows] for x in self.history))

    def wanted(self):
        made = []
        for i, (rows, keys) in enumerate(self.requests):
            begin = self.begins[i]
            k, v = (
                torch.cat([x[i, : keys - rows], y[begin : begin + rows]]).double()
                for x, y in zip(self.history, (self.k, self.v))
            )
            if self.stored is not None:
                k, v = ((x.float() / self.scale).to(self.stored).double() * self.scale for x in (k, v))
            distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
            seen = distance <= 0
            if self.window is not None:
                seen &= distance > -self.window
            cap = self.cap

            def score(s):
                s = cap * torch.tanh(s / cap) if cap else s
                return s if self.slopes is None else s + self.slopes.double()[:, None, None] * distance

            sinks = None if self.sinks is None else self.sinks.double()
            q = self.q[None, begin : begin + rows].double()
            made.append(plain(q, k[None], v[None], seen=seen, score=score, sinks=sinks)[0][0])
        return torch.cat(made)


class Compared(unittest.TestCase):
    def near(self, o, case):
        """Off by roundings of the dtype, which products of 8-bit keys have on GPUs, and by those of sums and exp."""
        off = (o.view(-1, HEADS, DIM).double() - case.wanted()).abs().max().item()
        self.assertLessEqual(off, 4 * ROUNDING[case.q.dtype] + 2.0**-17 + (2.0**-16 if case.cap else 0))

    def cases(self):
        for requests in (REQUESTS, DECODES):
            yield requests, {}
            yield requests, {"window": 9}
            yield requests, {"cap": 2.0}
            yield requests, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}


class Vllm(Compared):
    @classmethod
    def setUpClass(cls):
        """As vLLM starts: parallel groups of one, and its plugins."""
        import vllm.config as configs
        import vllm.distributed.parallel_state as groups

        configs.get_current_vllm_config_or_none.return_value = None
        groups.get_dcp_world_size_and_rank.return_value = 1, 0
        groups.get_pcp_group.return_value = types.SimpleNamespace(world_size=1, rank_in_group=0)
        plugins.vllm()
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        cls.backend = AttentionBackendEnum.CUSTOM.get_class()

    def metadata(self, case, **more):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        common = CommonAttentionMetadata(
            query_start_loc=case.begins, query_start_loc_cpu=case.begins, seq_lens=case.lengths,
            num_reqs=len(case.requests), num_actual_tokens=len(case.q), max_query_len=max(r for r, _ in case.requests),
            max_seq_len=int(case.lengths.max()), block_table_tensor=case.table, slot_mapping=case.slots, **more,
        )  # fmt: skip
        builder = self.backend.get_builder_cls()(None, ["layer"], None, torch.device(DEVICE))
        return builder, builder.build(0, common)

    def run_case(self, case, dtype="auto", **more):
        impl = self.backend.get_impl_cls()(
            HEADS, DIM, DIM**-0.5, HEADS_KV, kv_cache_dtype=dtype, sliding_window=case.window, logits_soft_cap=case.cap,
            sinks=case.sinks, alibi_slopes=None if case.slopes is None else case.slopes.tolist(), **more,
        )  # fmt: skip
        kind = torch.uint8 if dtype.startswith("fp8") else DTYPE
        cache = torch.zeros(PAGES, PAGE, HEADS_KV, 2 * DIM, dtype=kind).transpose(1, 2)  # as vLLM lays it out
        scale = torch.tensor(case.scale)
        layer = types.SimpleNamespace(_k_scale=scale, _v_scale=scale)
        case.fill(lambda slots, k, v: impl.do_kv_cache_update(layer, k, v, cache, slots))
        _, metadata = self.metadata(case)
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3)) for x in (case.q, case.k, case.v)]
        impl.do_kv_cache_update(layer, *padded[1:], cache, metadata.slot_mapping)
        if case.stored is not None:  # an engine moves caches between backends: their numbers have its meaning
            written = cache.transpose(1, 2).view(case.stored).flatten(0, 1)[case.slots]
            wanted = torch.cat([case.k, case.v], -1).float() / case.scale
            self.assertTrue(torch.equal(written.float(), wanted.to(case.stored).float()))
        output = torch.full((len(padded[0]), HEADS * DIM), 7.0, dtype=case.q.dtype)
        o = impl.forward(layer, *padded, cache, metadata, output)
        self.assertIs(o, output)
        self.assertTrue((o[-3:] == 7).all())  # rows of padding
        return o[:-3]

    def test_steps(self):
        """Prefills, chunks and decodes in one batch, and decodes alone."""
        for requests, more in self.cases():
            with self.subTest(rows=[rows for rows, _ in requests], **more):
                case = Case(requests, **more)
                self.near(self.run_case(case), case)
        case = Case(REQUESTS, slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]))
        self.near(self.run_case(case), case)

    def test_caches_of_8_bits(self):
        """vLLM's scale of a layer, which stored numbers are divided by."""
        for dtype, stored in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
            case = Case(REQUESTS, stored=stored, scale=0.5)
            with self.subTest(dtype):
                self.near(self.run_case(case, dtype), case)

    def test_encoders(self):
        from vllm.v1.attention.backend import AttentionType

        case = Case([(20, 20), (70, 70)])
        impl = self.backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, HEADS_KV, attn_type=AttentionType.ENCODER_ONLY)
        _, metadata = self.metadata(case)
        o = impl.forward(None, case.q, case.k, case.v, torch.empty(0), metadata, torch.empty(90, HEADS * DIM, dtype=DTYPE))
        parts = [x.tensor_split([20]) for x in (case.q, case.k, case.v)]
        wanted = torch.cat([plain(*(x[None].double() for x in one))[0][0] for one in zip(*parts)])
        off = (o.view(-1, HEADS, DIM).double() - wanted).abs().max().item()
        self.assertLessEqual(off, 4 * ROUNDING[DTYPE] + 2.0**-17)

    def test_engine_chooses_it(self):
        """What vLLM asks before it takes a backend, and what it may do with its metadata."""
        import vllm.v1.attention.backend as interface

        wanted = {
            "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 32, "use_mla": False,
            "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
            "device_capability": None, "attn_type": interface.AttentionType.DECODER, "has_sliding_window": True,
        }  # fmt: skip
        for head_size in (128, 576):
            self.assertEqual(self.backend.validate_configuration(**{**wanted, "head_size": head_size}), [])
        for change in ({"head_size": 100}, {"head_size": 584}, {"dtype": torch.float32}, {"use_mla": True},
                       {"block_size": 12}, {"kv_cache_dtype": "int8_per_token_head"},
                       {"use_mm_prefix": True}):  # fmt: skip
            self.assertTrue(self.backend.validate_configuration(**{**wanted, **change}), change)
        builder, metadata = self.metadata(Case(DECODES))
        moved = builder.update_block_table(metadata, metadata.block_table + 1, metadata.slot_mapping)
        self.assertTrue(torch.equal(moved.block_table, metadata.block_table + 1))
        self.assertIs(moved.seq_lens, metadata.seq_lens)
        support = builder.get_cudagraph_support(None, None)
        self.assertEqual(support, interface.AttentionCGSupport.UNIFORM_BATCH)
        output = torch.ones(3, 4)
        impl = self.backend.get_impl_cls()(HEADS, DIM, 1.0)
        self.assertEqual(impl.forward(None, *[None] * 4, None, output).sum(), 0)

    def test_refused(self):
        impl = self.backend.get_impl_cls()
        case = Case(DECODES)
        ranges = {"mm_req_doc_ranges": {0: [(0, 4)]}}
        for call, what in (
            (lambda: self.metadata(case, **ranges), "mm_req_doc_ranges"),
            (lambda: self.metadata(case, causal=torch.ones(3, dtype=torch.bool)), "causal"),
            (lambda: impl(HEADS, DIM, 1.0, use_alibi_sqrt=True), "use_alibi_sqrt"),
            (lambda: impl(HEADS, DIM, 1.0, attn_type="encoder_decoder"), "encoder_decoder"),
        ):
            with self.subTest(what), self.assertRaisesRegex(flashjit.UnsupportedError, what + ".*would work"):
                call()

    def test_other_plugins_stay(self):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
        plugins.vllm()
        self.assertEqual(AttentionBackendEnum.CUSTOM.get_path(), "another.Backend")
        AttentionBackendEnum.CUSTOM.clear_override()
        plugins.vllm()
        self.assertIs(AttentionBackendEnum.CUSTOM.get_class(), self.backend)


class Mode(enum.Enum):
    """A stand-in for SGLang's ForwardMode."""

    EXTEND, DECODE, IDLE, TARGET_VERIFY = range(4)

    def is_decode(self):
        return self is Mode.DECODE

    def is_idle(self):
        return self is Mode.IDLE

    def is_target_verify(self):
        return self is Mode.TARGET_VERIFY

    def is_mixed(self):
        return False

    is_draft_extend_v2 = is_dllm_extend = is_mixed


class Pool:
    """A stand-in for SGLang's pools of keys and values. Layers with windows may have one of their own, in another order."""

    def __init__(self, dtype, has_windows):
        self.buffers = torch.zeros(2, 2, PAGES * PAGE, HEADS_KV, DIM, dtype=dtype)  # [pool, keys or values, ...]
        self.swa_layer_nums = int(has_windows)
        self.pool = 0  # of the layer that is asked for

    def translate_loc_from_full_to_swa(self, slots):
        return (PAGES - 1 - slots // PAGE) * PAGE + slots % PAGE

    def set_kv_buffer(self, layer, slots, k, v, k_scale=None, v_scale=None):
        to = slots.swa_loc if self.pool else slots.loc
        for buffer, one, scale in zip(self.buffers[self.pool], (k, v), (k_scale, v_scale)):
            buffer[to] = (one if scale is None else one / scale).to(buffer.dtype)

    def get_key_buffer(self, layer_id):
        return self.buffers[self.pool, 0]

    def get_value_buffer(self, layer_id):
        return self.buffers[self.pool, 1]


class Sglang(Compared):
    @classmethod
    def setUpClass(cls):
        import sglang.kernels.kernel_api_logging as logs
        import sglang.srt.mem_cache.memory_pool as pools

        logs.debug_kernel_api = lambda function: function
        pools.KVWriteLoc = lambda loc, swa_loc: types.SimpleNamespace(loc=loc, swa_loc=swa_loc)
        plugins.sglang()
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        cls.make = staticmethod(ATTENTION_BACKENDS["flashjit"])

    def step(self, case, dtype=DTYPE, has_windows=False, scale=None, context=128, in_graph=False):
        pool = Pool(dtype, has_windows)
        width = case.table.shape[1] * PAGE
        tokens = torch.zeros(8, context, dtype=torch.int32)
        rows = torch.tensor([5, 0, 7, 3][: len(case.requests)])
        tokens[rows, :width] = (case.table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :context].int()
        runner = types.SimpleNamespace(
            req_to_token_pool=types.SimpleNamespace(req_to_token=tokens), token_to_kv_pool=pool, page_size=PAGE,
            model_config=types.SimpleNamespace(context_len=context), use_mla_backend=False,
        )  # fmt: skip
        layer = types.SimpleNamespace(
            layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=HEADS_KV, qk_head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5,
            logit_cap=case.cap or 0.0, sliding_window_size=-1 if case.window is None else case.window - 1,
            is_cross_attention=False, k_scale=scale, v_scale=scale, attn_type=types.SimpleNamespace(value="decoder"),
        )  # fmt: skip
        pool.pool = int(has_windows and case.window is not None)

        def write(slots, k, v):
            both = types.SimpleNamespace(loc=slots, swa_loc=pool.translate_loc_from_full_to_swa(slots))
            pool.set_kv_buffer(layer, both, k, v, scale, scale)

        case.fill(write)
        new = torch.tensor([rows for rows, _ in case.requests])
        batch = types.SimpleNamespace(
            forward_mode=Mode.DECODE if max(new) == 1 else Mode.EXTEND, req_pool_indices=rows, encoder_lens=None,
            seq_lens=case.lengths.long(), seq_lens_cpu=case.lengths.cpu(), out_cache_loc=case.slots,
            extend_seq_lens=new, extend_seq_lens_cpu=new.tolist(),
        )  # fmt: skip
        backend = self.make(runner)
        if in_graph:
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_in_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        flat = [x.flatten(1) for x in (case.q, case.k, case.v)]
        k, v = (x.view(-1, HEADS_KV, DIM) for x in flat[1:])
        more = {} if case.sinks is None else {"sinks": case.sinks}
        return backend.forward(flat[0], k, v, layer, batch, **more)

    def test_steps(self):
        for requests, more in self.cases():
            with self.subTest(rows=[rows for rows, _ in requests], **more):
                case = Case(requests, **more)
                self.near(self.step(case), case)
        self.assertIn("flashjit", sys.modules["sglang.srt.arg_groups.choices"].ATTENTION_BACKEND_CHOICES)

    def test_graphs_and_pools(self):
        """The metadata of a CUDA graph, and layers with windows, whose keys have a pool of their own."""
        case = Case(DECODES)
        self.near(self.step(case, in_graph=True), case)
        for requests in (REQUESTS, DECODES):
            case = Case(requests, window=9)
            self.near(self.step(case, has_windows=True), case)

    def test_caches_of_8_bits(self):
        for scale in (0.5, 1.0):
            case = Case(REQUESTS, stored=torch.float8_e4m3fn, scale=scale)
            scale = None if scale == 1 else torch.tensor(scale)
            self.near(self.step(case, torch.float8_e4m3fn, scale=scale), case)

    def test_refused(self):
        case, pools = Case(DECODES), {"req_to_token_pool": None, "token_to_kv_pool": None}
        with self.assertRaisesRegex(flashjit.UnsupportedError, "latent.*would work"):
            self.make(types.SimpleNamespace(use_mla_backend=True))
        backend = self.make(types.SimpleNamespace(**pools, model_config=types.SimpleNamespace(context_len=64)))
        batch = types.SimpleNamespace(forward_mode=Mode.TARGET_VERIFY, encoder_lens=None, seq_lens_cpu=case.lengths)
        with self.assertRaisesRegex(flashjit.UnsupportedError, "speculative.*would work"):
            backend.init_forward_metadata(batch)


class Others(unittest.TestCase):
    def test_older_engines(self):
        """An engine without the interfaces keeps working, with a warning."""
        for call, module in (
            (plugins.vllm, "vllm.v1.attention.backends.registry"),
            (plugins.sglang, "sglang.srt.arg_groups.choices"),
        ):
            empty = {module: types.ModuleType(module)}
            with mock.patch.dict(sys.modules, empty), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                call()
            self.assertRegex(str(said[0].message), "would work")


if __name__ == "__main__":
    unittest.main()
