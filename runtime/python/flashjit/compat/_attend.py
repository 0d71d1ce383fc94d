"""Attention by the arguments that FlashAttention's functions share."""

from functools import partial

import torch

from .._calls import called
from .._errors import InvalidArgumentError, UnsupportedError
from .._functions import append_kv, attention, decode

MOST_DECODED_ROWS = 64

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


def attend_cache(function, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens,
                 page_table, softmax_scale, causal, window_size, softcap, alibi_slopes, return_lse, **more):  # fmt: skip
    """What a drop-in tells that writes k and v into caches, behind cache_seqlens keys of each entry, and attends to all."""
    q, k, v = contiguous(q), contiguous(k), contiguous(v)
    batch, rows = q.shape[:2]
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
        turned = append_kv(k_cache, v_cache, k, v, append_positions=cache_seqlens, page_table=page_table, **rotated)
        q = q if turned is None else turned
        lengths = cache_seqlens + k.shape[1]
    call = decode if rows <= MOST_DECODED_ROWS else attention
    made, told = call.__wrapped__(
        q, k_cache, v_cache, scale=softmax_scale, seqlens_k=lengths, page_table=page_table, return_lse=return_lse,
        **masks_and_scores(causal, window_size, softcap, alibi_slopes), **more,
    )  # fmt: skip
    # More rows are another function's, which takes fewer, too.
    return made, told if k is None and call is decode else None
