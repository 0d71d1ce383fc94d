"""An attention backend of SGLang: python -m sglang.launch_server --attention-backend flashjit --page-size 64 ...

SGLang finds it by the entry point sglang.srt.plugins of this package.
"""

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from .._functions import attention, decode
from ._attend import MOST_DECODED_ROWS, contiguous, masks_and_scores, refuse

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class FlashjitMetadata:
    """What the launches of a step take."""

    page_table: torch.Tensor  # int32 [batch, pages]
    seqlens_k: torch.Tensor  # int32 [batch]
    cu_seqlens_q: torch.Tensor | None  # None: one row of each request
    max_seqlen_q: int
    window_page_table: torch.Tensor | None  # of layers whose keys are in a pool of their own
    window_slots: torch.Tensor | None  # of the new rows in that pool


class FlashjitBackend(AttentionBackend):
    needs_cpu_seq_lens = True

    def __init__(self, runner):
        super().__init__()
        refuse(
            "FlashjitBackend",
            **{
                "a model with multi-head latent attention": (
                    getattr(runner, "use_mla_backend", False), "another backend, or flashjit.attention with head_dim_v,"),
            },
        )  # fmt: skip
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.page_size = getattr(runner, "page_size", None) or 1
        self.context_len = runner.model_config.context_len
        self.has_window_pool = getattr(self.token_to_kv_pool, "swa_layer_nums", 0) > 0
        self.forward_metadata, self._ones, self._sinks = None, None, {}

    # ---- a step ----

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        longest = forward_batch.seq_lens_cpu.max() if forward_batch.seq_lens_cpu is not None else forward_batch.seq_lens.max()
        self.forward_metadata = self._metadata(forward_batch, int(longest))

    def init_forward_metadata_in_graph(self, forward_batch):
        """Of a CUDA graph, whose replays have sequences up to the longest that the model takes."""
        self.forward_metadata = self._metadata(forward_batch, self.context_len)

    def _metadata(self, forward_batch, longest):
        mode = forward_batch.forward_mode
        refuse(
            "FlashjitBackend",
            **{
                "speculative decoding": (
                    mode.is_target_verify() or mode.is_draft_extend_v2(), "a server without a draft model"),
                "a decoder of diffusion": (mode.is_dllm_extend(), "another backend"),
                "an encoder's lengths": (forward_batch.encoder_lens is not None, "another backend"),
            },
        )  # fmt: skip
        starts = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : longest : self.page_size]
        rows, most = None, 1
        if not mode.is_decode():
            lengths = forward_batch.extend_seq_lens
            rows = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            of_cpu = forward_batch.extend_seq_lens_cpu
            most = int(max(of_cpu) if of_cpu is not None else lengths.max())
        window_table = window_slots = None
        if self.has_window_pool:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            window_table = self._pages(translate(starts))
            if forward_batch.out_cache_loc is not None:
                window_slots = translate(forward_batch.out_cache_loc)
        return FlashjitMetadata(
            self._pages(starts), forward_batch.seq_lens.int(), rows, most, window_table, window_slots
        )

    def _pages(self, starts):
        """The pages that begin at these rows of a pool."""
        return (starts // self.page_size).int()

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        """All of a graph's tensors are made while it is captured."""

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    # ---- a layer ----

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **more):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **more):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks, more):
        for name, value in more.items():
            refuse("FlashjitBackend.forward", **{name: (value is not None and value is not False, "another backend")})
        refuse(
            "FlashjitBackend.forward",
            **{
                "a layer with cross attention": (layer.is_cross_attention, "another backend"),
                f"a layer of attn_type {layer.attn_type}": (layer.attn_type.value == "decoder_bidirectional", "another backend"),
            },
        )
        m = self.forward_metadata
        local = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, m.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        q = contiguous(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
        causal, window = layer.attn_type.value != "encoder_only", (None, None)
        if local:  # SGLang counts the keys before a row's own
            window = layer.sliding_window_size, None if causal else layer.sliding_window_size
        keys, values = (
            one(layer.layer_id).view(-1, self.page_size, layer.tp_k_head_num, dim)
            for one, dim in (
                (self.token_to_kv_pool.get_key_buffer, layer.qk_head_dim),
                (self.token_to_kv_pool.get_value_buffer, layer.v_head_dim),
            )
        )
        call = {
            "scale": layer.scaling, "seqlens_k": m.seqlens_k, "sink_logits": self._sinks_of(layer, sinks),
            "page_table": m.window_page_table if local and self.has_window_pool else m.page_table,
            **masks_and_scores(causal, window, layer.logit_cap, None), **self._scales(layer, keys),
        }  # fmt: skip
        if m.cu_seqlens_q is None:
            o = decode(q.unsqueeze(1), keys, values, **call)
        else:
            launch = decode if m.max_seqlen_q <= MOST_DECODED_ROWS else attention
            o = launch(q, keys, values, cu_seqlens_q=m.cu_seqlens_q, max_seqlen_q=m.max_seqlen_q, **call)
        return o.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _sinks_of(self, layer, sinks):
        if sinks is None:
            return None
        made = self._sinks.get(layer.layer_id)
        if made is None:
            made = self._sinks[layer.layer_id] = sinks.detach().float()
        return made

    def _scales(self, layer, keys):
        if keys.dtype not in _EIGHT_BITS:
            return {}
        if self._ones is None:
            self._ones = torch.ones(1, device=keys.device)
        k, v = (self._ones if one is None else one for one in (layer.k_scale, layer.v_scale))
        return {"k_scale": k, "v_scale": v, "kv_scale": "tensor"}

    def support_triton(self):
        return False
