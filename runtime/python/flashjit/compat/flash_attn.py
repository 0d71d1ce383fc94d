"""FlashAttention-2's functions, with its signatures and layouts, on flashjit.

    from flashjit.compat.flash_attn import flash_attn_func

Where FlashAttention-2 differs: the log-sum-exp of a row that sees no key is -inf here, and weights are not returned.
num_splits is flashjit's own choice.
"""

from functools import partial

from ._attend import attend, attend_cache, drop_in, refuse

_WEIGHTS = "return_attn_probs without dropout, for the log-sum-exp,"


def _with_no_weights(made):
    return (*made, None) if type(made) is tuple else made


def _refuse_weights(function, dropout_p, return_attn_probs):
    refuse(function, dropped_weights=(dropout_p and return_attn_probs, _WEIGHTS))


@partial(drop_in, finish=_with_no_weights)
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, head_dim] to k and v [batch, seqlen_k, heads_k, head_dim].

    Returns o, or with return_attn_probs (o, lse [batch, heads, seqlen_q], None).
    """
    _refuse_weights("flash_attn_func", dropout_p, return_attn_probs)
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p=dropout_p,
                  deterministic=deterministic, return_lse=return_attn_probs)  # fmt: skip


def flash_attn_kvpacked_func(q, kv, *arguments, **keywords):
    """flash_attn_func of kv [batch, seqlen_k, 2, heads_k, head_dim]."""
    return flash_attn_func(q, *kv.unbind(-3), *arguments, **keywords)


def flash_attn_qkvpacked_func(qkv, *arguments, **keywords):
    """flash_attn_func of qkv [batch, seqlen, 3, heads, head_dim]."""
    return flash_attn_func(*qkv.unbind(-3), *arguments, **keywords)


@partial(drop_in, finish=_with_no_weights)
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):  # fmt: skip
    """Attention of packed sequences: q [total_q, heads, head_dim], k and v [total_k, heads_k, head_dim].

    With block_table, int32 [batch, max_pages], k and v are pages [num_pages, page_size, heads_k, head_dim].
    Returns o, or with return_attn_probs (o, lse [heads, total_q], None).
    """
    _refuse_weights("flash_attn_varlen_func", dropout_p, return_attn_probs)
    if block_table is None:
        keys = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
    else:
        keys = {"page_table": block_table, "seqlens_k": cu_seqlens_k.diff()}
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p=dropout_p,
                  deterministic=deterministic, return_lse=return_attn_probs, cu_seqlens_q=cu_seqlens_q,
                  max_seqlen_q=max_seqlen_q, **keys)  # fmt: skip


def flash_attn_varlen_kvpacked_func(q, kv, *arguments, **keywords):
    """flash_attn_varlen_func of kv [total_k, 2, heads_k, head_dim]."""
    return flash_attn_varlen_func(q, *kv.unbind(-3), *arguments, **keywords)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *arguments, **keywords):
    """flash_attn_varlen_func of qkv [total, 3, heads, head_dim]."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **keywords)


@drop_in
def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False):  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, head_dim] to caches, into which k and v are written first.

    k_cache, v_cache: [batch, seqlen_cache, heads_k, head_dim], or with block_table pages [num_pages, page_size,
    heads_k, head_dim]. cache_seqlens: an int or int32 [batch], keys before the new ones. Has no gradients.
    """
    refuse("flash_attn_with_kvcache", cache_batch_idx=(cache_batch_idx is not None, "a block_table of such entries"),
           cache_leftpad=(cache_leftpad is not None, "a cache whose keys begin at 0"))  # fmt: skip
    return attend_cache(
        "flash_attn_with_kvcache", q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved,
        cache_seqlens, block_table, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse,
    )  # fmt: skip
