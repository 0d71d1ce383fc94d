"""flashjit as an attention implementation of Hugging Face's transformers.

    import flashjit.compat.transformers

    flashjit.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashjit")

transformers describes masks by functions of indices, which become formulas as FlexAttention's mask_mods do.
"""

import sys

import torch
import transformers.utils.generic as of_names
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from .._errors import InvalidArgumentError, UnsupportedError
from .._functions import attention, decode
from ._attend import MOST_DECODED_ROWS, contiguous, refuse
from ._flex import UNLISTED, _plan, create_block_mask

_LISTED_ROWS = 128  # with fewer there is less than a block to skip
_PADDED_KEYS = 256  # masks of padding are this long or a multiple, so that not each length is traced anew
_KEEP = ("batch or 1", "heads_q or 1", "seqlen_q or 1", "seqlen_k")


def register(name="flashjit"):
    """Makes attn_implementation=name compute attention by flashjit, and masks as formulas."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    _names.add(name)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] == "transformers":
            if vars(module).get("is_flash_attention_requested") is _is_flash_attention_requested:
                module.is_flash_attention_requested = is_flash_attention_requested


_names: set = set()
_is_flash_attention_requested = of_names.is_flash_attention_requested


def is_flash_attention_requested(config=None, requested_attention_implementation=None, version=None):
    """transformers' function, which takes each name with "flash" in it for one of FlashAttention, and loads that."""
    name = requested_attention_implementation if config is None else config._attn_implementation
    more = {} if version is None else {"version": version}
    return name not in _names and _is_flash_attention_requested(config, requested_attention_implementation, **more)


# ---- masks ----


def make_mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=None,
              attention_mask=None, local_size=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=False,
              device=None, cache_position=None, **more):  # fmt: skip
    """A mask as transformers' AttentionMaskInterface asks for: a BlockMask of mask_function, or None where causal
    attention, or all keys, are what it describes."""
    if cache_position is not None:  # of transformers 5.0
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    is_local = local_size is not None and kv_length >= local_size
    if attention_mask is None and not is_local:
        if allow_is_bidirectional_skip or allow_is_causal_skip and (q_length == 1 or q_length == kv_length):
            return None
    return _make_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, is_local,
                      allow_is_causal_skip, allow_is_bidirectional_skip, device)  # fmt: skip


@torch.compiler.disable
def _make_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, is_local,
               allow_is_causal_skip, allow_is_bidirectional_skip, device):  # fmt: skip
    pads = attention_mask is not None and not attention_mask[:, kv_offset : kv_offset + kv_length].all()
    if attention_mask is not None and attention_mask.shape[1] < kv_offset + kv_length:
        pads = True
    if not is_local:
        if not pads and (
            allow_is_bidirectional_skip or allow_is_causal_skip and (q_length == 1 or q_length == kv_length)
        ):
            return None
        # A prefill of a cache with room behind it: a row sees none of the keys that are not there yet.
        if allow_is_causal_skip and q_length > 1 and kv_offset == 0 and q_offset == 0:
            if not pads or attention_mask[:, :q_length].all() and not attention_mask[:, q_length:].any():
                return None
    keeps = None
    if pads:
        length = -(-(kv_offset + kv_length) // _PADDED_KEYS) * _PADDED_KEYS
        keeps = torch.zeros((batch_size, max(length, attention_mask.shape[1])), dtype=torch.bool, device=device)
        keeps[:, : attention_mask.shape[1]] = attention_mask
    moved = _moved(mask_function, q_offset, kv_offset, keeps)
    if q_length >= _LISTED_ROWS:
        return create_block_mask(moved, batch_size, None, q_length, kv_length, device)
    one = torch.zeros((batch_size, 1, 1), dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        one, one[..., None], BLOCK_SIZE=UNLISTED, mask_mod=moved, seq_lengths=(q_length, kv_length)
    )


def _moved(mask_function, q_offset, kv_offset, keeps):
    """The mask_function of a launch, whose rows and keys are counted from 0, without keys that are padding."""
    is_moved = isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor) or q_offset or kv_offset
    if not is_moved and keeps is None:
        return mask_function
    if keeps is None:
        return lambda b, h, q, k: mask_function(b, h, q + q_offset, k + kv_offset)
    return lambda b, h, q, k: mask_function(b, h, q + q_offset, k + kv_offset) & keeps[b, k + kv_offset]


# ---- attention ----


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                      softcap=None, s_aux=None, position_bias=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                      max_length_q=None, max_length_k=None, output_attentions=False, block_table=None,
                      **more):  # fmt: skip
    """Attention as transformers' AttentionInterface asks for: (o [batch, rows, heads, head_dim], None).

    query [batch, heads, rows, head_dim], key and value [batch, heads_kv, keys, head_dim]. attention_mask: of make_mask,
    or a tensor [batch or 1, heads or 1, rows or 1, keys], of bool or to be added to scores.
    """
    refuse(
        "attention_forward",
        output_attentions=(output_attentions, "attn_implementation='eager'"),
        block_table=(block_table is not None, "generate() without continuous batching, or an engine's backend,"),
    )
    rows, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and rows > 1 and bool(causal)
    if causal and keys > rows and cu_seq_lens_q is None:  # keys of a cache that are not there yet
        key, value = key[:, :, :rows], value[:, :, :rows]
        position_bias = None if position_bias is None else position_bias[..., :rows]
        keys = rows
    q, k, v = (contiguous(x.transpose(1, 2)) for x in (query, key, value))
    call = {"scale": scaling, "mask": ("causal",) if causal else (), "score": (), "tables": {}}
    if s_aux is not None:
        call["sink_logits"] = s_aux.float()
    if softcap:
        call["score"], call["softcap"] = ("softcap",), float(softcap)
    bias = position_bias
    if isinstance(attention_mask, torch.Tensor):
        if attention_mask.dim() != 4:
            raise InvalidArgumentError(
                f"attention_mask has {attention_mask.dim()} dimensions: a tensor [batch, heads, rows, keys] would work"
            )
        given = attention_mask[..., :keys]
        if given.dtype == torch.bool:
            call["mask"] += ("keeps[batch, head, row, key] != 0",)
            call["keeps"], call["tables"]["keeps"] = given.view(torch.uint8), _KEEP
        else:
            bias = given if bias is None else bias + given
    if bias is not None:
        call["score"] += ("bias",)
        call["bias"] = bias
    if dropout:
        call["dropout_p"] = dropout
    if isinstance(attention_mask, BlockMask):
        return _masked(query, key, attention_mask, q, k, v, call, cu_seq_lens_q, cu_seq_lens_k), None
    if cu_seq_lens_q is not None:
        if isinstance(attention_mask, torch.Tensor) or bias is not None:
            raise UnsupportedError(
                "attention_forward() was given cu_seq_lens_q with a mask or bias of tensors, which count rows of "
                "the whole batch: position_ids that begin again in each sequence would work"
            )
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        del call["tables"]
        made = attention(
            *packed, cu_seqlens_q=cu_seq_lens_q.int(), cu_seqlens_k=cu_seq_lens_k.int(), max_seqlen_q=max_length_q,
            max_seqlen_k=max_length_k, **call,
        )  # fmt: skip
        return made.unflatten(0, q.shape[:2]), None
    return _attend(q, k, v, call), None


@torch.compiler.disable
def _masked(query, key, block_mask, q, k, v, call, cu_seqlens_q, cu_seqlens_k):
    """Attention with a BlockMask."""
    plan = _plan(query, key, None, block_mask, True)
    of_mask = dict(plan.keywords())
    call["mask"] += of_mask.pop("mask", ())
    call["tables"].update(of_mask.pop("tables", {}))
    call.update(of_mask)
    for name, cu_seqlens, place, length in (
        ("document_q", cu_seqlens_q, "seqlen_q", q.shape[1]),
        ("document_k", cu_seqlens_k, "seqlen_k", k.shape[1]),
    ):
        if cu_seqlens is not None:
            places = torch.arange(length, dtype=cu_seqlens.dtype, device=q.device)
            call[name] = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True, out_int32=True)
            call["tables"][name] = (place,)
    if cu_seqlens_q is not None:
        call["mask"] += ("document_q[row] == document_k[key]",)
    return _attend(q, k, v, call)


def _attend(q, k, v, call):
    decodes = q.shape[1] <= MOST_DECODED_ROWS and not torch.is_grad_enabled()
    if decodes and "dropout_p" not in call and "block_lists" not in call:
        return decode(q, k, v, **call)
    return attention(q, k, v, **call)
