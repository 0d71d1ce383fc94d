"""Attention by tensors alone: the spec follows from the tensors and the keywords."""

from dataclasses import dataclass
from functools import partial, wraps
from inspect import unwrap
from sys import modules
from typing import Any

from . import _native
from ._calls import called, is_left_to_torch
from ._engine import default_engine, functions_of
from ._errors import InvalidArgumentError
from ._specs import KEYWORDS, Maker, frozen

_call = _native.call

_ATTENTION = (
    "q", "k", "v", "softmax_scale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqlens_q",
    "seqlens_k", "page_table", "window_left", "window_right", "num_sinks", "tree_bits", "prefix_lengths",
    "sink_logits", "k_scale", "v_scale", "dropout_p", "dropout_seed", "dropout_offset", "dropout_seed_tensor",
    "dropout_offset_tensor", "block_offsets", "block_indices", "block_bitmask_of", "block_bitmasks", "row_offset",
    "key_offset",
)  # fmt: skip
_DECODE = (
    "q", "k", "v", "softmax_scale", "cu_seqlens_q", "max_seqlen_q", "seqlens_k", "page_table", "window_left",
    "window_right", "num_sinks", "tree_bits", "prefix_lengths", "sink_logits", "k_scale", "v_scale", "k_new", "v_new",
    "q_out", "rotary_positions", "rotary_cos", "rotary_sin", "rotary_base", "rotary_scale", "row_offset",
    "key_offset",
)  # fmt: skip
_APPEND = (
    "q", "k", "v", "k_new", "v_new", "slots", "append_positions", "page_table", "cu_seqlens_q", "k_scale", "v_scale",
    "q_out", "rotary_positions", "rotary_cos", "rotary_sin", "rotary_base", "rotary_scale",
)  # fmt: skip
_COPY = (
    "k", "v", "k_from", "v_from", "k_scale", "v_scale", "k_scale_from", "v_scale_from", "from_slots", "to_slots",
)  # fmt: skip
_LISTS = (
    "q", "k", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqlens_q", "seqlens_k", "window_left",
    "window_right", "num_sinks", "tree_bits", "prefix_lengths", "block_offsets", "block_indices", "block_bitmask_of",
    "block_bitmasks",
)  # fmt: skip

@dataclass(frozen=True)
class BlockLists:
    """Block lists of a mask, as make_block_lists makes them and attention takes them.

    block_offsets: int32 [batch or 1, heads or 1, query blocks + 1]. block_indices and block_bitmask_of: int32 [room].
    block_bitmasks: int32 [bitmasks, block_m, ceil(block_n / 32)], or None. Lists with of_masks index the launch's other
    masks; without it they are a mask of their own.
    """

    block_offsets: Any
    block_indices: Any
    block_bitmask_of: Any = None
    block_bitmasks: Any = None
    block_m: int = 128
    block_n: int = 128
    per_head: bool = False
    of_masks: bool = False

    def _parts(self):
        return (self.block_offsets, self.block_indices, self.block_bitmask_of, self.block_bitmasks, self.block_m,
                self.block_n, self.per_head, self.of_masks)  # fmt: skip

    def _mask(self):
        return {
            "kind": "block_sparse",
            "block_m": self.block_m,
            "block_n": self.block_n,
            "per_head": self.per_head,
            "of_masks": self.of_masks,
        }


def _function(
    cache, key, names, shown, writes_o, writes_lse, maker, kind_of=None, heads_first=False, head_dim_v=None
):
    shown = tuple(shown.get(name, name) for name in names)
    made = _native.Function(maker, names, shown, writes_o, writes_lse, kind_of, heads_first, head_dim_v or 0)
    return cache.setdefault(key, made)


def _is_traced(q):
    """Whether q is PyTorch's, and PyTorch compiles, or has a mode that sees operators."""
    torch = modules.get("torch")
    return (
        torch is not None
        and isinstance(q, torch.Tensor)
        and (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0)
    )


def _check_alone(function, out, engine, stream):
    if not (out is None and engine is None and stream is None):
        raise InvalidArgumentError(
            f"{function}() has out, engine or stream while PyTorch traces it: a call without them would work"
        )


def _drawn(q):
    """Seed and offset of dropout from the generator of PyTorch on q's device."""
    torch = modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        raise InvalidArgumentError(
            "dropout_p is given without dropout_seed: a number that no other call has, or tensors of PyTorch, from "
            "whose generator it is drawn, would work"
        )
    return torch.randint(2**63 - 1, (2, 1), dtype=torch.int64, device=q.device).unbind()


def _attending(parts):
    """What `called` takes, of attention whose parts are told by this function, which has its signature."""

    @wraps(parts)
    def tells(q, k, v=None, **keywords):
        torch = modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            from .torch import attention_in_graph

            lists = keywords.get("block_lists")
            if lists is not None:
                keywords = {**keywords, "block_lists": lists._parts()}
            return attention_in_graph(q, k, v, keywords), None
        function, stream, out, alone, values, of_torch = parts(q, k, v, **keywords)
        made = NotImplemented
        if not (alone and is_left_to_torch(q)):
            made = _call(function, stream, out, *values)
        if made is not NotImplemented:
            return made, (function, _ATTENTION + of_torch[0], values) if alone else None
        # PyTorch has to see the call, or its arguments are not plain.
        if not alone:
            raise InvalidArgumentError(
                "a tensor of PyTorch requires a gradient, for which out, engine and stream have no meaning: a call "
                "without them, or under torch.no_grad(), would work"
            )
        from .torch import attention_of_torch  # takes a microsecond once PyTorch is there

        return attention_of_torch(values, *of_torch), None

    return tells


_RENAMED = {"scale": "softmax_scale"}


@partial(called, renamed=_RENAMED)
@_attending
def attention(q, k, v=None, *, mask=(), score=(), scale=None, dropout_p=0.0, dropout_seed=None, dropout_offset=None,
              window=None, num_sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
              seqlens_q=None, seqlens_k=None, page_table=None, tree_bits=None, prefix_lengths=None, block_lists=None,
              sink_logits=None, k_scale=None, v_scale=None, kv_scale=None, return_lse=False, out=None, out_dtype=None,
              row_offset=None, key_offset=None, tables=None, deterministic=False, batch_invariant=False,
              heads_first=False, head_dim_v=None, engine=None, stream=None, **named):  # fmt: skip
    """Exact attention, softmax(scale * q k^T + mask) v, of tensors of PyTorch, CuPy, JAX (CPU) or NumPy.

    q: [batch, seqlen_q, heads_q, head_dim]; k: [batch, seqlen_k, heads_kv, head_dim]; v: [batch, seqlen_k, heads_kv,
    head_dim_v]; heads_q is a multiple of heads_kv. bf16, fp16 and, on CPUs, fp32. The last dimension is contiguous.
    Packed sequences are [total, heads, head_dim] with cu_seqlens_q and cu_seqlens_k, int32 [batch + 1]; max_seqlen_q
    and max_seqlen_k bound their lengths. With page_table, int32 [batch, max_pages], k and v are pages [num_pages,
    page_size, heads_kv, head_dim], and seqlens_k counts keys.

    Returns o [batch, seqlen_q, heads_q, head_dim_v], made by q's framework unless out is given; with return_lse a pair
    of it and the log-sum-exp of each row, float32 [batch, heads_q, seqlen_q] (packed [heads_q, total_q]).

    mask: names, formulas or dicts of tools/spec.schema.json; a row sees the keys that all of them keep. score: formulas
    or names. A formula's tables and scalars are given by keyword; tables says the dimensions of each table.
    scale: 1 / sqrt(head_dim) unless given. window: (left, right), keys before and after a row's own, None for all.
    num_sinks: first keys that a window always shows. seqlens_q, seqlens_k: int32 [batch], true lengths.
    dropout_p: 0 to 1, with dropout_seed and dropout_offset, 64-bit numbers or int64 tensors [1] on the device;
    PyTorch's generator draws them unless they are given.
    block_lists: of make_block_lists. sink_logits: float32 [heads_q]. k_scale, v_scale: of 8-bit k and v, shared as
    kv_scale says ("tensor", "head", "token_head"). out_dtype: "fp32", or q's dtype.
    row_offset, key_offset: int64 [batch], where the rows and keys begin in a longer whole, for masks, formulas and
    dropout. Partial results of some keys are merged by merge.
    stream: the address of a CUDA stream; the framework's current stream unless given. A launch on the current stream
    needs no care; with another stream the caller keeps all tensors alive until it has run.

    heads_first: q, k, v and o are [batch, heads, seqlen, head_dim], and pages [num_pages, heads_kv, page_size, head_dim].
    deterministic: gradients have the same bits run after run, as with torch.use_deterministic_algorithms.
    batch_invariant: the bits of a row of o, and of gradients, do not depend on the rest of the batch, nor on how a
    prompt is cut into calls. It implies deterministic.
    head_dim_v, without v: v is the first head_dim_v columns of k, as latent caches hold it; no gradients.

    Tensors of PyTorch have gradients: of q, k, v, sink_logits and tables that a score reads, by o and by its
    log-sum-exp (flashjit.torch says more).

    >>> import numpy as np, flashjit
    >>> x = np.ones((1, 4, 2, 64), np.float32)
    >>> o = flashjit.attention(x, x, x, mask="causal")
    >>> o.shape, float(o[0, 0, 0, 0])
    ((1, 4, 2, 64), 1.0)
    >>> o, lse = flashjit.attention(x, x, x, score="cap * tanh(score / cap)", cap=30.0, return_lse=True)
    >>> lse.shape
    (1, 2, 4)
    """
    seed_tensor = offset_tensor = None
    if dropout_p:
        p, seed, offset = dropout_p, dropout_seed, dropout_offset
        if seed is None:
            seed, offset = _drawn(q)
        if not isinstance(seed, int):
            seed, seed_tensor = None, seed
        if offset is not None and not isinstance(offset, int):
            offset, offset_tensor = None, offset
        if (seed_tensor is None) != (offset_tensor is None):
            raise InvalidArgumentError(
                "one of dropout_seed and dropout_offset is a tensor: two int64 tensors [1] on the device, or two "
                "numbers, would work"
            )
    else:
        p = seed = offset = None
    left, right = _sides(window)
    if block_lists is None:
        lists, block_mask = _NO_LISTS, None
    else:
        b = block_lists
        lists = (b.block_offsets, b.block_indices, b.block_bitmask_of, b.block_bitmasks)
        block_mask = b._mask()
    values = (q, k, v, scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlens_q, seqlens_k, page_table,
              left, right, num_sinks, tree_bits, prefix_lengths, sink_logits, k_scale, v_scale, p, seed, offset,
              seed_tensor, offset_tensor, *lists, row_offset, key_offset, *named.values())  # fmt: skip
    alone = out is None and engine is None and stream is None
    if head_dim_v is not None:
        _check_values_in_keys("attention", v, head_dim_v, alone and is_left_to_torch(q))

    bits = "batch_invariant" if batch_invariant else "deterministic" if deterministic else ""
    cache = functions_of(engine)
    key = ("attention", mask, score, return_lse, out_dtype, kv_scale, p is None, bits, heads_first, head_dim_v)
    if named or tables or block_mask:
        key = (*key, *named, frozen(tables), frozen(block_mask))
    try:
        function = cache.get(key)
    except TypeError:
        key = frozen(key)
        function = cache.get(key)
    if function is None:
        fields = _forward_fields(return_lse, p, out_dtype, kv_scale, bits)
        if head_dim_v is not None:
            fields["v_in_k"] = True
        maker = Maker("attention", "forward", engine, mask, score, fields, tables, tuple(named), block_mask)
        call = (mask, score, tables, block_mask, tuple(named), out_dtype, kv_scale, bits, heads_first)
        kind_of = partial(_kind_of, *call) if engine is None else _no_kind
        function = _function(
            cache, key, _ATTENTION + tuple(named), _SHOWN, True, bool(return_lse), maker, kind_of,
            bool(heads_first), head_dim_v,
        )  # fmt: skip
    of_torch = (tuple(named), mask, score, tables, block_mask, return_lse, out_dtype, kv_scale, bits, heads_first)
    return function, stream, out, alone, values, of_torch


parts_of_attention = unwrap(attention)


def _check_values_in_keys(function, v, head_dim_v, is_traced):
    if v is not None or is_traced or not isinstance(head_dim_v, int) or head_dim_v <= 0:
        given = "beside v" if v is not None else "while PyTorch sees the call" if is_traced else f"{head_dim_v!r}"
        raise InvalidArgumentError(
            f"{function}() has head_dim_v {given}: a number of k's first columns without v, or v=k[..., :head_dim_v], "
            "would work"
        )


def _kind_of(*call):
    """The kind of a call of which PyTorch wants gradients: see flashjit.torch.kind_of."""
    from .torch import kind_of  # only such calls need it

    return kind_of(*call)


def _no_kind(*places):
    return NotImplemented


def _forward_fields(return_lse, p, out_dtype, kv_scale, bits):
    fields = {"lse": bool(return_lse)}
    if p is not None:
        fields["dropout"] = True
    if out_dtype:
        fields["o_dtype"] = out_dtype
    if kv_scale:
        fields["kv_scale"] = kv_scale
    if bits == "batch_invariant":  # a forward is deterministic in any case
        fields[bits] = True
    return fields


_SHOWN = {there: here for here, there in _RENAMED.items()}
_NO_LISTS = (None,) * 4
_ALL = (None, None)


def _sides(window):
    return _ALL if window is None else _window(window)


def _window(window):
    try:
        left, right = window
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"window is {window!r}: a pair (left, right) of the keys before and after a row's own, None for all, would "
            "work"
        ) from None
    # Both absent would not tell that there is a window at all.
    return (2**31 - 1 if left is None and right is None else left), right


def _rotary(rotary, q):
    """The spec's field, from True, a style or a dict."""
    if rotary is None or rotary is False:
        return None
    fields = {} if rotary is True else {"style": rotary} if isinstance(rotary, str) else dict(rotary)
    if q is not None:
        fields["q"] = True
    return fields


@partial(called, renamed=_RENAMED)
def decode(q, k, v=None, *, mask=(), score=(), scale=None, window=None, num_sinks=None, cu_seqlens_q=None,
           max_seqlen_q=None, seqlens_k=None, page_table=None, tree_bits=None, prefix_lengths=None, sink_logits=None,
           k_scale=None, v_scale=None, kv_scale=None, k_new=None, v_new=None, rotary=None, q_out=None,
           rotary_positions=None, rotary_cos=None, rotary_sin=None, rotary_base=None, rotary_scale=None,
           row_offset=None, key_offset=None, batch_invariant=False, return_lse=False, out=None, out_dtype=None,
           tables=None, head_dim_v=None, engine=None, stream=None, **named):  # fmt: skip
    """Attention of 1 to 64 new rows of each batch entry against a cache of keys and values.

    q: [batch, seqlen_q, heads_q, head_dim], or packed [total, heads_q, head_dim] with cu_seqlens_q. k, v: the caches
    [batch, seqlen_k, heads_kv, head_dim], or with page_table pages. seqlens_k: int32 [batch], keys of each entry, new
    ones included. The other arguments are those of attention.

    With k_new and v_new, of q's rows, the launch first writes them into the caches as the last keys, rotated if rotary
    says so: True, a style ("half", "interleaved") or a dict of the spec's fields. q_out takes the rotated q.
    batch_invariant: a row's bits do not depend on the rest of the batch.
    head_dim_v, without v: v is the first head_dim_v columns of k, as latent caches (MLA) hold it.
    A uint8 k of 656 columns is one of fp8_ds_mla, on CPUs, and in pages on sm_90a.

    >>> import numpy as np, flashjit
    >>> cache = np.ones((2, 16, 2, 64), np.float32)
    >>> q = np.ones((2, 1, 4, 64), np.float32)
    >>> flashjit.decode(q, cache, cache, seqlens_k=np.array([3, 16], np.int32)).shape
    (2, 1, 4, 64)
    """
    values = (q, k, v, scale, cu_seqlens_q, max_seqlen_q, seqlens_k, page_table, *_sides(window), num_sinks, tree_bits,
              prefix_lengths, sink_logits, k_scale, v_scale, k_new, v_new, q_out, rotary_positions, rotary_cos,
              rotary_sin, rotary_base, rotary_scale, row_offset, key_offset, *named.values())  # fmt: skip
    if head_dim_v is not None:
        _check_values_in_keys("decode", v, head_dim_v, _is_traced(q))
    if _is_traced(q):
        _check_alone("decode", out, engine, stream)
        from ._torch_caches import launch_of_torch

        fields = _decode_fields(return_lse, batch_invariant, out_dtype, kv_scale, k_new, rotary, q_out)
        writes = () if k_new is None else ("k", "v", "q_out")
        names = _DECODE + tuple(named)
        made = launch_of_torch("decode", names, values, writes, mask, score, fields, tables, tuple(named))
        return (made if return_lse else made[0]), None
    cache = functions_of(engine)
    key = ("decode", mask, score, return_lse, out_dtype, kv_scale, batch_invariant, head_dim_v)
    if named or tables or rotary is not None or k_new is not None:
        key = (*key, *named, frozen(tables), frozen(rotary), q_out is not None, k_new is not None)
    try:
        function = cache.get(key)
    except TypeError:
        key = frozen(key)
        function = cache.get(key)
    if function is None:
        fields = _decode_fields(return_lse, batch_invariant, out_dtype, kv_scale, k_new, rotary, q_out)
        if head_dim_v is not None:
            fields["v_in_k"] = True
        maker = Maker("decode", "decode", engine, mask, score, fields, tables, tuple(named), None)
        function = _function(
            cache, key, _DECODE + tuple(named), _SHOWN, True, bool(return_lse), maker, head_dim_v=head_dim_v
        )
    told = (function, _DECODE + tuple(named), values) if out is None and engine is None and stream is None else None
    return _call(function, stream, out, *values), told


def _decode_fields(return_lse, batch_invariant, out_dtype, kv_scale, k_new, rotary, q_out):
    fields = {"lse": bool(return_lse)}
    if batch_invariant:
        fields["batch_invariant"] = True
    if out_dtype:
        fields["o_dtype"] = out_dtype
    if k_new is not None:
        fields["append"] = True
    return {**fields, **_cache_fields(rotary, q_out, kv_scale)}


def _cache_fields(rotary, q, kv_scale):
    fields = {}
    turned = _rotary(rotary, q)
    if turned is not None:
        fields["rotary"] = turned
    if kv_scale:
        fields["kv_scale"] = kv_scale
    return fields


def append_kv(k, v, k_new, v_new=None, *, slots=None, append_positions=None, page_table=None, cu_seqlens_q=None,
              q=None, q_out=None, rotary=None, rotary_positions=None, rotary_cos=None, rotary_sin=None,
              rotary_base=None, rotary_scale=None, k_scale=None, v_scale=None, kv_scale=None, head_dim_v=None,
              engine=None, stream=None):  # fmt: skip
    """Writes the rows k_new and v_new into the caches k and v.

    k, v: [batch, seqlen_k, heads_kv, head_dim], or pages [num_pages, page_size, heads_kv, head_dim]. k_new, v_new:
    [batch, seqlen, heads_kv, head_dim], or packed [total, heads_kv, head_dim]. Either slots, int64, the row of each new
    token among those of the caches (negative: none), or append_positions, int32 [batch], the place of each entry's
    first new token, with page_table for pages and cu_seqlens_q for packed rows.

    rotary: True, a style ("half", "interleaved") or a dict of the spec's fields rotates the keys, and q if it is given.
    Returns the rotated q, q_out or a new tensor, and None without q. k_scale, v_scale: scales of 8-bit caches.
    head_dim_v, with v None and no v_new: v is the first head_dim_v columns of k, as latent caches (MLA) hold it.
    A uint8 k of 656 columns is one of fp8_ds_mla.

    >>> import numpy as np, flashjit
    >>> k, v = np.zeros((1, 8, 2, 64), np.float32), np.zeros((1, 8, 2, 64), np.float32)
    >>> new = np.ones((1, 2, 2, 64), np.float32)
    >>> flashjit.append_kv(k, v, new, new, append_positions=np.array([3], np.int32))
    >>> k[0, :, 0, 0].tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    makes_q = q is not None and q_out is None
    if head_dim_v is not None:
        _check_values_in_keys("append_kv", v, head_dim_v, _is_traced(k))
    if _is_traced(k):
        _check_alone("append_kv", None, engine, stream)
        from ._torch_caches import launch_of_torch

        if makes_q:
            q_out = q.new_empty(q.shape)
        values = (q, k, v, k_new, v_new, slots, append_positions, page_table, cu_seqlens_q, k_scale, v_scale, q_out,
                  rotary_positions, rotary_cos, rotary_sin, rotary_base, rotary_scale)  # fmt: skip
        fields = _cache_fields(rotary, q, kv_scale)
        if k_new.dim() == 3:
            fields["varlen"] = True
        launch_of_torch("append_kv", _APPEND, values, ("k", "v", "q_out"), (), (), fields, None, ())
        return q_out
    if makes_q:
        shape, dtype, _ = _native.describe(q, "q")
        q_out = _native.empty_like(q, shape, dtype)
    paged = page_table is not None
    rank = len(_native.describe(k_new, "k_new")[0])
    cache = functions_of(engine)
    key = ("append_kv", frozen(rotary), kv_scale, rank, paged, q is not None, head_dim_v)
    function = cache.get(key)
    if function is None:
        fields = _cache_fields(rotary, q, kv_scale)
        if rank == 3:
            fields["varlen"] = True
        if head_dim_v is not None:
            fields["v_in_k"] = True
        maker = Maker("append_kv", "append_kv", engine, (), (), fields, None, (), None)
        function = _function(cache, key, _APPEND, {}, False, False, maker, head_dim_v=head_dim_v)
    _call(function, stream, None, q, k, v, k_new, v_new, slots, append_positions, page_table, cu_seqlens_q, k_scale,
          v_scale, q_out, rotary_positions, rotary_cos, rotary_sin, rotary_base, rotary_scale)  # fmt: skip
    return _native.finished(q, q_out) if makes_q else q_out


def copy_kv(k, v, from_slots, to_slots, *, k_from=None, v_from=None, k_scale=None, v_scale=None, k_scale_from=None,
            v_scale_from=None, head_dim_v=None, engine=None, stream=None):  # fmt: skip
    """Copies rows of the caches k and v to other places of them, as accepted drafts, other pages and beams need.

    k, v: [batch, seqlen_k, heads_kv, head_dim], or pages [num_pages, page_size, heads_kv, head_dim]. from_slots,
    to_slots: int64 [rows], the row of each among those of the caches; one that is negative or beyond them skips the
    row. All rows are read before one is written, so rows may change places. Two rows with one place leave it undefined.

    k_scale, v_scale: float32 scales of tokens of 8-bit caches, [..., heads_kv], which are copied with their rows. Scales
    of a tensor or of heads stay out. k_from, v_from, k_scale_from, v_scale_from: other caches that rows are copied from,
    with pages of any size. head_dim_v, with v None: v is the first head_dim_v columns of k, as in latent caches (MLA).

    >>> import numpy as np, flashjit
    >>> k = np.arange(8, dtype=np.float32).repeat(64).reshape(1, 8, 1, 64)
    >>> v = -k
    >>> flashjit.copy_kv(k, v, np.array([3, 5, 4]), np.array([2, 3, 5]))
    >>> k[0, :, 0, 0].tolist()
    [0.0, 1.0, 3.0, 5.0, 4.0, 4.0, 6.0, 7.0]
    """
    if head_dim_v is not None:
        _check_values_in_keys("copy_kv", v, head_dim_v, _is_traced(k))
    if k_from is None and v_from is None:
        k_from, v_from, k_scale_from, v_scale_from = k, v, k_scale, v_scale
    values = (k, v, k_from, v_from, k_scale, v_scale, k_scale_from, v_scale_from, from_slots, to_slots)
    fields = {} if k_scale is None else {"kv_scale": "token_head"}
    if _is_traced(k):
        _check_alone("copy_kv", None, engine, stream)
        from ._torch_caches import launch_of_torch

        launch_of_torch("copy_kv", _COPY, values, ("k", "v", "k_scale", "v_scale"), (), (), fields, None, ())
        return
    cache = functions_of(engine)
    key = ("copy_kv", k_scale is None, head_dim_v)
    function = cache.get(key)
    if function is None:
        if head_dim_v is not None:
            fields["v_in_k"] = True
        maker = Maker("copy_kv", "copy_kv", engine, (), (), fields, None, (), None)
        function = _function(cache, key, _COPY, {}, False, False, maker, head_dim_v=head_dim_v)
    _call(function, stream, None, *values)


def merge(parts_o, parts_lse, *, return_lse=False, out=None, out_dtype=None, engine=None, stream=None):
    """Merges partial results of attention, each over keys of its own.

    parts_o: [n, batch, seqlen, heads, head_dim], packed [n, total, heads, head_dim], float32 or of the output's dtype.
    parts_lse: float32 [n, batch, heads, seqlen], packed [n, heads, total]. Returns o, of out_dtype or of parts_o's
    dtype; with return_lse a pair of it and its log-sum-exp.

    >>> import numpy as np, flashjit
    >>> o, lse = np.ones((2, 1, 4, 2, 64), np.float32), np.zeros((2, 1, 2, 4), np.float32)
    >>> merged, total = flashjit.merge(o, lse, return_lse=True)
    >>> float(merged[0, 0, 0, 0]), round(float(total[0, 0, 0]), 4)
    (1.0, 0.6931)
    """
    shape, dtype, device = _native.describe(parts_o, "parts_o")
    if len(shape) not in (4, 5):
        raise InvalidArgumentError(
            f"argument parts_o has {len(shape)} dimensions: [n, batch, seqlen, heads, head_dim], or packed [n, total, "
            "heads, head_dim], would work"
        )
    makes_o = out is None
    if makes_o:
        out = _native.empty_like(parts_o, shape[1:], out_dtype or dtype)
    lse = None
    if return_lse:
        batch = shape[1:-3]
        lse = _native.empty_like(parts_o, (*batch, shape[-2], shape[-3]), "fp32")
    (engine or default_engine(device))._merge(stream, out, parts_o, parts_lse, lse)
    if makes_o:
        out = _native.finished(parts_o, out)
    return (out, _native.finished(parts_o, lse)) if return_lse else out


def make_block_lists(q, k, *, mask, block_m=128, block_n=128, per_head=False, bitmasks=0, window=None, num_sinks=None,
                     cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqlens_q=None,
                     seqlens_k=None, tree_bits=None, prefix_lengths=None, tables=None, engine=None, stream=None,
                     **named):  # fmt: skip
    """BlockLists of a mask, with which attention skips blocks that the mask does not keep.

    q and k: of the attention that takes the lists; their sizes count, not their elements. mask and its arguments are
    those of attention. block_m, block_n: rows and keys of a block, 16 to 256. bitmasks: room for that many partly kept
    blocks whose bits are stored, which is faster than asking the mask again.

    >>> import numpy as np, flashjit
    >>> x = np.ones((1, 256, 2, 64), np.float32)
    >>> lists = flashjit.make_block_lists(x, x, mask="causal")
    >>> lists.block_offsets.tolist()
    [[[0, 1, 3]]]
    >>> flashjit.attention(x, x, x, mask="causal", block_lists=lists).shape
    (1, 256, 2, 64)
    """
    (rows, _, _), (keys, _, _) = _native.describe(q, "q"), _native.describe(k, "k")
    if cu_seqlens_q is None:
        batch, seqlen_q, seqlen_k = rows[0], rows[1], keys[1]
    else:
        batch = _native.describe(cu_seqlens_q, "cu_seqlens_q")[0][0] - 1
        seqlen_q = rows[0] if max_seqlen_q is None else max_seqlen_q
        seqlen_k = keys[0] if max_seqlen_k is None else max_seqlen_k
    heads = rows[-2] if per_head else 1
    room = _native.most_listed_blocks(block_m, block_n, per_head, batch, heads, seqlen_q, seqlen_k)
    offsets = _native.empty_like(q, (batch, heads, -(-seqlen_q // block_m) + 1), "int32")
    indices = _native.empty_like(q, (room,), "int32")
    bitmask_of = _native.empty_like(q, (room,), "int32")
    bits = _native.empty_like(q, (bitmasks, block_m, -(-block_n // 32)), "int32") if bitmasks else None
    made = (offsets, indices, bitmask_of, bits)
    lists = BlockLists(*made, block_m, block_n, per_head, True)

    left, right = _sides(window)
    cache = functions_of(engine)
    key = frozen(("make_block_lists", mask, tuple(named), tables, lists._mask()))
    function = cache.get(key)
    if function is None:
        maker = Maker(
            "make_block_lists", "make_block_lists", engine, mask, (), {}, tables, tuple(named), lists._mask()
        )
        function = _function(cache, key, _LISTS + tuple(named), {}, False, False, maker)
    _call(function, stream, None, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlens_q, seqlens_k,
          left, right, num_sinks, tree_bits, prefix_lengths, offsets, indices, bitmask_of, bits,
          *named.values())  # fmt: skip
    made = (one if one is None else _native.finished(q, one) for one in made)
    return BlockLists(*made, block_m, block_n, per_head, True)


def _keywords(function):
    code = unwrap(function).__code__
    count = code.co_argcount
    return code.co_varnames[count : count + code.co_kwonlyargcount]


KEYWORDS.update({one.__name__: _keywords(one) for one in (attention, decode, make_block_lists)})
