"""FlashAttention-3's functions, with its signatures and layouts, on flashjit.

    from flashjit.compat.flash_attn_interface import flash_attn_func

num_splits, pack_gqa, sm_margin and scheduler_metadata are hints to FlashAttention's kernels, and change nothing here.
The log-sum-exp of a row that sees no key is -inf. s_aux: float32 [heads], logits of a key without a value.
q_descale, k_descale, v_descale: float32 [batch, heads_k], what q, k and v of float8_e4m3fn are multiplied by; 1 if
None. With q of 8 bits o is bf16. q may have more bits than k and v, and then has no q_descale. 8-bit tensors have no
gradients.
"""

from ._attend import EIGHT_BITS, attend, attend_cache, contiguous, drop_in, refuse


def _refuse(function, qv, attention_chunk):
    refuse(
        function,
        qv=(qv is not None, "q and k that hold its head_dims, too,"),
        attention_chunk=(attention_chunk, "flashjit.attention with the mask 'key / chunk == position / chunk'"),
    )


def _descales(k, *given):
    return given if k.dtype in EIGHT_BITS or any(one is not None for one in given) else None


@drop_in
def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False, s_aux=None):  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, head_dim] to k and v [batch, seqlen_k, heads_k, head_dim].

    Returns o, or with return_attn_probs (o, lse [batch, heads, seqlen_q]).
    """
    name = "flash_attn_func"
    _refuse(name, qv, attention_chunk)
    descales = _descales(k, q_descale, k_descale, v_descale)
    if descales is not None:
        return attend_cache(
            name, q, contiguous(k), contiguous(v), None, None, None, None, None, None, None, softmax_scale, causal,
            window_size, softcap, None, return_attn_probs, descales, sink_logits=s_aux,
        )  # fmt: skip
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, None, deterministic=deterministic,
                  return_lse=return_attn_probs, sink_logits=s_aux)  # fmt: skip


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
                              num_heads_q=None, sm_margin=0, return_attn_probs=False):  # fmt: skip
    """flash_attn_func of qkv [batch, seqlen, 3, heads, head_dim], or [batch, seqlen, heads of all, head_dim] of which
    the first num_heads_q are q's."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    else:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], -2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
                           attention_chunk, softcap, deterministic=deterministic,
                           return_attn_probs=return_attn_probs)  # fmt: skip


@drop_in
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
                           s_aux=None):  # fmt: skip
    """Attention of packed sequences: q [total_q, heads, head_dim], k and v [total_k, heads_k, head_dim].

    seqused_q, seqused_k: int32 [batch], how much of each sequence counts. Returns o, or with return_attn_probs
    (o, lse [heads, total_q]).
    """
    name = "flash_attn_varlen_func"
    _refuse(name, qv, attention_chunk)
    given = any(one is not None for one in (q_descale, k_descale, v_descale))
    refuse(name, descales=(given, "flash_attn_func, or k and v of bf16 or fp16,"))
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, None, deterministic=deterministic,
                  return_lse=return_attn_probs, sink_logits=s_aux, cu_seqlens_q=cu_seqlens_q,
                  cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                  seqlens_q=seqused_q, seqlens_k=seqused_k)  # fmt: skip


@drop_in
def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False, s_aux=None):  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, head_dim] to caches, into which k and v are written first.

    k_cache, v_cache: [batch, seqlen_cache, heads_k, head_dim], or with page_table pages [num_pages, page_size,
    heads_k, head_dim]. cache_seqlens: an int or int32 [batch], keys before the new ones. Has no gradients.
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, qv, attention_chunk)
    refuse(
        name,
        cache_batch_idx=(cache_batch_idx is not None, "a page_table of such entries"),
        cache_leftpad=(cache_leftpad is not None, "a cache whose keys begin at 0"),
        cu_seqlens_q=(cu_seqlens_q is not None, "flash_attn_varlen_func, or flashjit.decode,"),
        cu_seqlens_k_new=(cu_seqlens_k_new is not None, "flashjit.append_kv"),
        rotary_seqlens=(rotary_seqlens is not None, "flashjit.append_kv with rotary_positions"),
    )
    return attend_cache(
        name, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, page_table,
        softmax_scale, causal, window_size, softcap, None, return_softmax_lse,
        _descales(k_cache, q_descale, k_descale, v_descale), sink_logits=s_aux,
    )  # fmt: skip
