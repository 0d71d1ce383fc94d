"""An attention backend of vLLM: vllm serve MODEL --attention-backend CUSTOM.

vLLM finds it by the entry point vllm.general_plugins of this package. Caches are in pages, as vLLM shapes them.
"""

from dataclasses import dataclass, replace

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from .._errors import UnsupportedError
from .._functions import append_kv, attention, decode
from ._attend import MOST_DECODED_ROWS, masks_and_scores, refuse

_EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class FlashjitBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *_EIGHT_BITS]
    forward_includes_kv_cache_update = False  # the engine calls do_kv_cache_update

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return FlashjitImpl

    @staticmethod
    def get_builder_cls():
        return FlashjitMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size):
        return head_size % 8 == 0 and 8 <= head_size <= 576

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True


@dataclass
class FlashjitMetadata:
    """What a step's launches take; vLLM's own tensors, so that CUDA graphs see what it writes into them."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool


class FlashjitMetadataBuilder(AttentionMetadataBuilder[FlashjitMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        refuse(
            "FlashjitMetadataBuilder.build",
            **{
                "mm_req_doc_ranges": (common.mm_req_doc_ranges is not None, "another backend"),
                "rswa_prefix_lens": (common.rswa_prefix_lens is not None, "another backend"),
                "causal of each request": (isinstance(common.causal, torch.Tensor), "one for all requests"),
            },
        )
        return FlashjitMetadata(
            common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.seq_lens,
            common.block_table_tensor, common.slot_mapping, common.causal,
        )  # fmt: skip

    def update_block_table(self, metadata, blk_table, slot_mapping):
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class FlashjitImpl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, sinks=None, **more):  # fmt: skip
        for name, value in more.items():
            refuse("FlashjitImpl", **{name: (value not in (None, False, -1), "another backend")})
        if attn_type not in (AttentionType.DECODER, *_ENCODERS):
            raise UnsupportedError(f"attn_type is {attn_type}, which flashjit does not have: another backend would work")
        if kv_cache_dtype.startswith("fp8") and attn_type in _ENCODERS:
            raise UnsupportedError(f"kv_cache_dtype is {kv_cache_dtype} of an encoder: 'auto' would work")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks, self.logits_soft_cap = sinks, logits_soft_cap or 0.0
        before = None if sliding_window is None else sliding_window - 1  # the row's own key counts
        self.window = before, before if attn_type in _ENCODERS else None
        self._is_moved = False

    def _move(self, device):
        """Puts what the layer reads in each step onto its device."""
        self._is_moved = True
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(device)
        if self.sinks is not None:
            self.sinks = self.sinks.detach().to(device, torch.float32)

    def _pages(self, kv_cache):
        """Keys and values [pages, page size, heads, head size], of a cache [pages, heads, page size, keys and values]."""
        pages = kv_cache.transpose(1, 2)
        if self.kv_cache_dtype in _EIGHT_BITS:
            pages = pages.view(_EIGHT_BITS[self.kv_cache_dtype])
        return pages[..., : self.head_size], pages[..., self.head_size :]

    def _scales(self, layer):
        if self.kv_cache_dtype not in _EIGHT_BITS:
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale, "kv_scale": "tensor"}

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Writes the rows of new tokens to their slots."""
        if self.attn_type in _ENCODERS:
            return
        tokens = slot_mapping.shape[0]
        append_kv(*self._pages(kv_cache), key[:tokens], value[:tokens], slots=slot_mapping, **self._scales(layer))

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):  # fmt: skip
        """Attention of query [tokens, heads, head size] into output, [tokens, heads * head size] or of three dimensions."""
        if attn_metadata is None:  # vLLM looks at how much memory a step takes
            return output.fill_(0)
        refuse(
            "FlashjitImpl.forward",
            output_scale=(output_scale is not None, "an output that is not quantized"),
            output_block_scale=(output_block_scale is not None, "an output that is not quantized"),
        )
        if not self._is_moved:
            self._move(query.device)
        m, tokens = attn_metadata, attn_metadata.num_actual_tokens
        call = {
            "scale": self.scale, "cu_seqlens_q": m.query_start_loc, "max_seqlen_q": m.max_query_len,
            "out": output.view(output.shape[0], self.num_heads, -1)[:tokens], "sink_logits": self.sinks,
        }  # fmt: skip
        causal = m.causal and self.attn_type not in _ENCODERS
        call.update(masks_and_scores(causal, self.window, self.logits_soft_cap, self.alibi_slopes))
        if self.attn_type in _ENCODERS:
            call.update(cu_seqlens_k=m.query_start_loc, max_seqlen_k=m.max_query_len)
            attention(query[:tokens], key[:tokens], value[:tokens], **call)
            return output
        launch = decode if m.max_query_len <= MOST_DECODED_ROWS else attention
        launch(
            query[:tokens], *self._pages(kv_cache), seqlens_k=m.seq_lens, page_table=m.block_table,
            **call, **self._scales(layer),
        )  # fmt: skip
        return output
