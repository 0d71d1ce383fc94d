"""PyTorch's own attention on flashjit: scaled_dot_product_attention and varlen_attn, by their hook for FlashAttention.

    import flashjit.compat.sdpa, torch

    flashjit.compat.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("flashjit")

PyTorch then calls flashjit wherever it would call FlashAttention on a GPU. Needs PyTorch 2.11.
"""

import warnings
from dataclasses import dataclass

import torch

from .. import _native
from .._errors import InvalidArgumentError, UnsupportedError
from .._functions import _ATTENTION, decode
from ..torch import _kind, _places, _text_of
from ._attend import MOST_DECODED_ROWS, masks_and_scores, refuse


def register(name="flashjit"):
    """Offers flashjit to torch.nn.attention.activate_flash_attention_impl(name)."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no hook for implementations of FlashAttention: PyTorch 2.11 or newer, or "
            "flashjit.attention, would work"
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=provide)


@dataclass
class Provided:
    """Keeps PyTorch's operators replaced until remove()."""

    library: torch.library.Library | None

    def remove(self):
        self.library = None


def provide(device="CUDA"):
    """Replaces PyTorch's operators of FlashAttention on this kind of device."""
    library = torch.library.Library("aten", "IMPL", device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*other operators may also be overridden")  # which is what is asked for
        for name, function in _OPERATORS.items():
            if hasattr(torch.ops.aten, name):  # PyTorch 2.11 has not all of them
                library.impl(name, _adapted(getattr(torch.ops.aten, name).default, function), device)
    return Provided(library)


# Other versions of PyTorch have these names for arguments and results of the operators.
_NAMES = {
    "philox_seed": "rng_state", "philox_offset": "unused", "softmax_logsumexp": "logsumexp",
    "cum_seq_q": "cu_seqlens_q", "cum_seq_k": "cu_seqlens_k",
}  # fmt: skip


def _adapted(operator, function):
    """The function, which takes keywords and returns a dict or a tuple, as the operator's schema wants it."""
    schema = operator._schema
    code = function.__code__
    known = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    arguments = [(_NAMES.get(x.name, x.name), x.default_value) for x in schema.arguments]
    names = tuple(name for name, _ in arguments)
    defaults = {name: default for name, default in arguments if name in known}
    unknown = [name for name in names if name not in known]
    returned = [_NAMES.get(x.name, x.name) for x in schema.returns]

    def call(*args, **kwargs):
        given = dict(defaults)
        given.update(zip(names, args))
        for name, value in kwargs.items():
            given[_NAMES.get(name, name)] = value
        for name in unknown:
            if given.pop(name, None) is not None:
                raise UnsupportedError(
                    f"{schema.name} was given {name}, which flashjit does not know: PyTorch's own implementation, after "
                    "torch.nn.attention.restore_flash_attention_impl(), would work"
                )
        with torch.no_grad():  # gradients are those of PyTorch's operator
            made = function(**given)
        return tuple(made[name] for name in returned) if isinstance(made, dict) else made

    return call


# ---- calls ----

_known_places: dict = {}
_kinds: dict = {}


def _call(given, causal, window, alibi_slopes, heads_first):
    """The kind of a launch, its tensors and its numbers."""
    more = masks_and_scores(causal, window, 0.0, alibi_slopes)
    mask, score, tables = more.pop("mask", ()), more.pop("score", ()), more.pop("tables", None)
    given["window_left"], given["window_right"] = more.pop("window", (None, None))
    values = (*map(given.get, _ATTENTION), *more.values())
    named = tuple(more)
    types = (*named, *map(type, values))
    places = _known_places.get(types)
    if places is None:
        places = _known_places[types] = _places(_ATTENTION + named, values)
    of_tensors, of_integers, of_reals = places
    bits = "deterministic" if torch.are_deterministic_algorithms_enabled() else ""
    key = mask, score, named, places, bits, heads_first
    kind = _kinds.get(key)
    if kind is None:
        paged = values[_ATTENTION.index("page_table")] is not None  # has no backward
        wants = tuple([place < 3 and not paged for place in of_tensors])  # q, k and v
        kind = _kinds[key] = _kind(
            _text_of(mask, score, tables, None, named, True, None, None, bits, wants, places, heads_first)
        )
    return kind, [values[i] for i in of_tensors], tuple([values[i] for i in (*of_integers, *of_reals)])


def _arguments(query, key, value, scale, dropout_p, rng, **more):
    given = {"q": query, "k": key, "v": value, "softmax_scale": scale, **more}
    if dropout_p:
        rng = rng.view(torch.int64)
        given.update(dropout_p=dropout_p, dropout_seed_tensor=rng[:1], dropout_offset_tensor=rng[1:])
    return given


def _rng(query, dropout_p):
    """Seed and offset of dropout, from the generator of the device; without dropout nothing reads them."""
    if dropout_p:
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=query.device).view(torch.uint64)
    return torch.empty((2,), dtype=torch.uint64, device=query.device)


def _readable(x):
    """The tensor with a layout that kernels read, which take 16 bytes at once."""
    strides = x.stride()
    regular = strides[-1] == 1 and x.data_ptr() % 16 == 0
    return x if regular and not any(stride * x.element_size() % 16 for stride in strides[:-1]) else x.contiguous()


def _empty_output(query, value):
    """A tensor for the output, whose dimensions lie in memory as query's do."""
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query)
    order = sorted(range(query.dim()), key=query.stride().__getitem__, reverse=True)
    shape = (*query.shape[:-1], value.shape[-1])
    made = torch.empty([shape[i] for i in order], dtype=query.dtype, device=query.device)
    return made.permute([order.index(i) for i in range(query.dim())])


def _results(query, o, lse, rng):
    return {
        "output": o, "logsumexp": lse, "rng_state": rng, "cu_seqlens_q": None, "cu_seqlens_k": None,
        "unused": torch.empty((), dtype=torch.uint64, device=query.device),
        "debug_attn_mask": torch.empty(0, dtype=query.dtype, device=query.device),
    }  # fmt: skip


def _check(function, return_debug_mask):
    refuse(function, return_debug_mask=(return_debug_mask, "return_debug_mask=False"))


# ---- scaled_dot_product_attention: [batch, heads, seqlen, head_dim] ----


def _sdpa(query, key, value, dropout_p, is_causal, return_debug_mask, scale):
    _check("scaled_dot_product_attention", return_debug_mask)
    rng, o = _rng(query, dropout_p), _empty_output(query, value)
    given = _arguments(*map(_readable, (query, key, value)), scale, dropout_p, rng)
    kind, tensors, numbers = _call(given, is_causal, (None, None), None, True)
    o, lse = _native.call(kind.forward, None, o, *tensors, *numbers)
    return {**_results(query, o, lse, rng), "max_q": query.shape[2], "max_k": key.shape[2]}


def _sdpa_backward(grad_out, query, key, value, out, logsumexp, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p,
                   is_causal, rng_state, unused, scale):  # fmt: skip
    given = _arguments(*map(_readable, (query, key, value)), scale, dropout_p, rng_state)
    kind, tensors, numbers = _call(given, is_causal, (None, None), None, True)
    return _native.gradients(kind, numbers, tuple(tensors), _readable(out), logsumexp, grad_out, None)


# ---- varlen_attn: [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim] ----


def _flash(query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
           scale, window_size_left, window_size_right, seqused_k, alibi_slopes, block_table=None, num_splits=None,
           out=None):  # fmt: skip
    _check("the operator _flash_attention_forward", return_debug_mask)
    rng = _rng(query, dropout_p)
    o = _empty_output(query, value) if out is None else out
    q, k, v = map(_readable, (query, key, value))
    packed = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_q}
    if block_table is not None:
        if seqused_k is None:
            raise InvalidArgumentError("block_table was given without seqused_k: with it, int32 [batch], it would work")
        packed["page_table"] = block_table
    elif cu_seqlens_k is not None:
        packed.update(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_k)
    if seqused_k is not None:
        packed["seqlens_k"] = seqused_k
    window = window_size_left, window_size_right
    if block_table is not None and max_q <= MOST_DECODED_ROWS and not dropout_p:
        _, lse = decode(
            q, k, v, scale=scale, return_lse=True, out=o, batch_invariant=num_splits == 1, **packed,
            **masks_and_scores(is_causal, window, 0.0, alibi_slopes),
        )  # fmt: skip
        return _results(query, o, lse, rng)
    kind, tensors, numbers = _call(
        _arguments(q, k, v, scale, dropout_p, rng, **packed), is_causal, window, alibi_slopes, False
    )
    o, lse = _native.call(kind.forward, None, o, *tensors, *numbers)
    return _results(query, o, lse, rng)


def _flash_inplace(out, query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, is_causal,
                   return_debug_mask, scale, window_size_left, window_size_right, seqused_k, alibi_slopes,
                   block_table=None, num_splits=None):  # fmt: skip
    made = _flash(query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
                  scale, window_size_left, window_size_right, seqused_k, alibi_slopes, block_table, num_splits,
                  out)  # fmt: skip
    return made["logsumexp"]


def _flash_backward(grad_out, query, key, value, out, logsumexp, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p,
                    is_causal, rng_state, unused, scale, window_size_left, window_size_right):  # fmt: skip
    packed = {} if cu_seqlens_q is None else {
        "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_k
    }  # fmt: skip
    given = _arguments(*map(_readable, (query, key, value)), scale, dropout_p, rng_state, **packed)
    kind, tensors, numbers = _call(given, is_causal, (window_size_left, window_size_right), None, False)
    return _native.gradients(kind, numbers, tuple(tensors), _readable(out), logsumexp, grad_out, None)


_OPERATORS = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_inplace,
    "_flash_attention_backward": _flash_backward,
}
