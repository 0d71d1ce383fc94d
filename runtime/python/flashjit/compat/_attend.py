"""Attention by the arguments that FlashAttention's functions share."""

from functools import partial

import torch

from .._calls import called
from .._errors import InvalidArgumentError, UnsupportedError
from .._functions import append_kv, attention, decode

MOST_DECODED_ROWS = 64
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)

# A function of another library, which tells the call of flashjit's that it makes.
drop_in = partial(
    called,
    renamed={
        "block_table": "page_table", "cache_seqlens": "seqlens_k", "k_cache": "k", "v_cache": "v",
        "seqused_q": "seqlens_q", "seqused_k": "seqlens_k", "s_aux": "sink_logits",
    },
)  # fmt: skip


def refuse(function, **arguments):
    """Refuses those arguments that are given, with what flashjit has in their place."""
    for name, (given, instead) in arguments.items():
        if given:
            raise UnsupportedError(f"{function}() was given {name}, which flashjit does not have: {instead} would work")


def contiguous(x):
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def masks_and_scores(causal, window_size, softcap, alibi_slopes):
    """Keywords of flashjit.attention and flashjit.decode."""
    left, right = (None if side is None or side < 0 else side for side in window_size)
    if causal:
        right = 0
    made = {}
    if left is None and right == 0:
        made["mask"] = "causal"
    elif left is not None or right is not None:
        made["window"] = (left, right)
    score = []
    if softcap:
        score.append("softcap")
        made["softcap"] = float(softcap)
    if alibi_slopes is not None:
        if alibi_slopes.dim() == 1:
            score.append("alibi")
            made["alibi_slopes"] = alibi_slopes
        else:
            score.append("score - slopes[batch, head] * abs(position - key)")
            made["slopes"], made["tables"] = alibi_slopes, {"slopes": ("batch", "heads_q")}
    if score:
        made["score"] = tuple(score)
    return made


def attend(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, **more):
    """What a drop-in tells of an attention."""
    q, k, v = contiguous(q), contiguous(k), contiguous(v)
    return attention.__wrapped__(
        q, k, v, scale=softmax_scale, **masks_and_scores(causal, window_size, softcap, alibi_slopes), **more
    )


def _descales(function, q, k, v, given):
    """Scales of q, k and v: [1, heads_kv] where they are the same for all of the batch, else [batch, heads_kv]."""
    batch, heads = q.shape[0], k.shape[2]
    made = []
    for name, x, one in zip(("q_descale", "k_descale", "v_descale"), (q, k, v), given):
        if one is not None and x.dtype not in EIGHT_BITS:
            raise UnsupportedError(
                f"{function}() was given {name} and {name[0]} of {x.dtype}: none, or 8-bit k, v and {name[0]}, would "
                "work"
            )
        if one is not None and (one.dtype != torch.float32 or (one.shape != (batch, heads) and one.numel() != 1)):
            raise InvalidArgumentError(
                f"{function}() was given {name} of {one.dtype} and shape {list(one.shape)}: float32 [{batch}, {heads}], "
                "batch and heads of k, would work"
            )
        if one is None or batch == 0:
            made.append(torch.ones(1, heads, device=q.device))
        elif one.numel() == 1:
            made.append(one.reshape(1, 1).expand(1, heads))
        else:
            made.append(one[:1] if one.stride(0) == 0 else one)
    return made


def _scaled(function, q, k, v, descales, paged, keys):
    """(q of more bits, scales of k and v as flashjit's keywords), where k and v have 8 bits. keys: what an entry has.

    The scale of a head's queries is a factor of all their scores, as that of its keys is. So k_scale is their product,
    and q's numbers stay what they are: bf16 and fp16 hold 8-bit floats exactly.
    """
    of_q, of_k, of_v = _descales(function, q, k, v, descales)
    scales = of_q * of_k, of_v
    if q.dtype in EIGHT_BITS:
        q = q.to(torch.bfloat16)
    if all(one.shape[0] == 1 for one in scales):
        kind, scales = "head", [one[0] for one in scales]
    elif not paged:
        kind, scales = "token_head", [one[:, None].expand(k.shape[0], keys, k.shape[2]) for one in scales]
    else:
        raise UnsupportedError(
            f"{function}() was given descales of batch entries and pages, which entries may share: descales that are "
            "expanded from [1, heads_k] would work"
        )
    return q, {"k_scale": scales[0], "v_scale": scales[1], "kv_scale": kind}


def _entries_as_pages(k, v, lengths, keys):
    """(k, v, page_table, lengths), where each batch entry is one page of so many keys."""
    batch, more = k.shape[0], keys - k.shape[1]
    if lengths is None:
        lengths = torch.full((batch,), k.shape[1], dtype=torch.int32, device=k.device)
    if more:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, more)) for x in (k, v))
    return k, v, torch.arange(batch, dtype=torch.int32, device=k.device)[:, None], lengths


def attend_cache(function, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens,
                 page_table, softmax_scale, causal, window_size, softcap, alibi_slopes, return_lse, descales=None,
                 **more):  # fmt: skip
    """What a drop-in tells that writes k and v into caches, behind cache_seqlens keys of each entry, and attends to all."""
    q, k, v = contiguous(q), contiguous(k), contiguous(v)
    batch, rows = q.shape[:2]
    call = decode if rows <= MOST_DECODED_ROWS else attention
    appended = {}
    if descales is not None:
        # The forward takes 8-bit keys in pages alone, of a multiple of 16 keys.
        needs_pages = call is attention and page_table is None
        keys = k_cache.shape[1] + (-k_cache.shape[1] % 16 if needs_pages else 0)
        q, scales = _scaled(function, q, k_cache, v_cache, descales, page_table is not None, keys)
        more.update(scales)
        if k is not None and v is not None:
            refuse(function, rotary_cos=(rotary_cos is not None, "8-bit keys that are rotated before"))
            if (k.dtype, v.dtype) != (k_cache.dtype, v_cache.dtype):
                raise UnsupportedError(
                    f"{function}() was given k and v of {k.dtype} and {v.dtype} for caches of {k_cache.dtype}: those of "
                    "its dtype and scale, or flashjit.append_kv, would work"
                )
            # They have the caches' scales already, so they are stored as they are.
            k, v, one = k.to(q.dtype), v.to(q.dtype), torch.ones(1, device=q.device)
            appended = {"k_scale": one, "v_scale": one}
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if (k is None) != (v is None):
        raise InvalidArgumentError(f"{function}() was given one of k and v: both or none would work")
    if k is None and rotary_cos is not None:
        raise InvalidArgumentError(f"{function}() was given rotary_cos without k and v: with them it would work")
    lengths = cache_seqlens
    if k is not None:
        if cache_seqlens is None:
            raise InvalidArgumentError(f"{function}() was given k and v without cache_seqlens: with it it would work")
        rotated = {}
        if rotary_cos is not None:
            local = causal or any(side is not None and side >= 0 for side in window_size)
            if not local and rows > 1:
                raise UnsupportedError(
                    f"{function}() was given rotary_cos and {rows} rows that all see each other, which FlashAttention "
                    "puts at one position: causal=True, or rows that are rotated before, would work"
                )
            style = "interleaved" if rotary_interleaved else "half"
            rotated = {"q": q, "rotary": style, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        turned = append_kv(k_cache, v_cache, k, v, append_positions=cache_seqlens, page_table=page_table,
                           **rotated, **appended)  # fmt: skip
        q = q if turned is None else turned
        lengths = cache_seqlens + k.shape[1]
    if descales is not None and needs_pages:
        k_cache, v_cache, page_table, lengths = _entries_as_pages(k_cache, v_cache, lengths, keys)
    made, told = call.__wrapped__(
        q, k_cache, v_cache, scale=softmax_scale, seqlens_k=lengths, page_table=page_table, return_lse=return_lse,
        **masks_and_scores(causal, window_size, softcap, alibi_slopes), **more,
    )  # fmt: skip
    # More rows are another function's, which takes fewer, too.
    return made, told if k is None and call is decode else None
