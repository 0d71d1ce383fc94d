"""Hot calls of attention: keywords like those of an earlier call go to native code at once."""

from functools import wraps
from sys import intern, modules

from . import _native
from ._errors import InvalidArgumentError

_attend, _call = _native.attend, _native.call

_ATTENTION = (
    "q", "k", "v", "softmax_scale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqlens_q",
    "seqlens_k", "page_table", "window_left", "window_right", "num_sinks", "tree_bits", "prefix_lengths",
    "sink_logits", "k_scale", "v_scale", "dropout_p", "dropout_seed", "dropout_offset", "dropout_seed_tensor",
    "dropout_offset_tensor", "block_offsets", "block_indices", "block_bitmask_of", "block_bitmasks", "row_offset",
    "key_offset",
)  # fmt: skip
# The place of an argument by the keyword that gives it as it is; of others a call learns what they are fixed to.
_PLACES = {
    {"softmax_scale": "scale"}.get(name, name): place
    for place, name in enumerate(_ATTENTION)
    if name not in ("q", "k", "v") and not name.startswith(("window_", "dropout_", "block_"))
}
_WINDOW_AT = _ATTENTION.index("window_left")
_LISTS_AT = _ATTENTION.index("block_offsets")
_LEARNED = {"mask", "score", "tables", "return_lse", "out_dtype", "kv_scale", "deterministic", "heads_first"}
_FIXED, _A_WINDOW, _LISTS = -1, -2, -3  # as native/calls.cpp has them
_MOST_PATTERNS = 64
_patterns: list = []


def _learn(keywords, function, named):
    """Makes the native function attend take calls with keywords like these."""
    places = []
    for name, value in keywords.items():
        if name in _PLACES:
            places.append(_PLACES[name])
        elif name in named:
            places.append(len(_ATTENTION) + list(named).index(name))
        elif name == "window" and value is not None:
            places.append(_A_WINDOW)
        elif name == "block_lists" and value is not None:
            places.append(_LISTS)
        elif value is None or name in _LEARNED and _is_constant(value) or name == "dropout_p" and value == 0.0:
            places.append(_FIXED)
        else:
            return
    kept = tuple([_copied(one) if place == _FIXED else _sizes(one) if place == _LISTS else None
                  for place, one in zip(places, keywords.values())])  # fmt: skip
    if len(_patterns) == _MOST_PATTERNS:
        _patterns.clear()
    _patterns.append((function, len(_ATTENTION) + len(named), _WINDOW_AT, _LISTS_AT, tuple(map(intern, keywords)),
                      tuple(places), kept))  # fmt: skip


def _sizes(lists):
    return lists.block_m, lists.block_n, lists.per_head, lists.of_masks


def _is_constant(value):
    if type(value) in (list, tuple):
        return all(map(_is_constant, value))
    return type(value) in (bool, str) or type(value) is dict and all(map(_is_constant, (*value, *value.values())))


def _copied(value):
    """A constant that stays as it is, whatever is done to the caller's."""
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def called(parts):
    """The function of a call whose parts are told by this one, which has its signature."""

    @wraps(parts)
    def attention(q, k, v=None, **keywords):
        torch = modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            from .torch import attention_in_graph

            lists = keywords.get("block_lists")
            return attention_in_graph(q, k, v, keywords if lists is None else {**keywords, "block_lists": lists._parts()})
        made = _attend(_patterns, q, k, v, keywords)
        if made is not NotImplemented:
            return made
        function, stream, out, alone, values, of_torch = parts(q, k, v, **keywords)
        if not (alone and is_left_to_torch(q)):
            made = _call(function, stream, out, *values)
        if made is not NotImplemented:
            if alone:
                _learn(keywords, function, of_torch[0])
            return made
        # PyTorch has to see the call, or its arguments are not plain.
        if not alone:
            raise InvalidArgumentError(
                "a tensor of PyTorch requires a gradient, for which out, engine and stream have no meaning: a call "
                "without them, or under torch.no_grad(), would work"
            )
        from .torch import attention_of_torch  # takes a microsecond once PyTorch is there

        return attention_of_torch(values, *of_torch)

    return attention


def is_left_to_torch(q):
    """Whether q is PyTorch's, and PyTorch compiles, transforms, has a mode that sees operators, or casts."""
    torch = modules.get("torch")
    return (
        torch is not None
        and isinstance(q, torch.Tensor)
        and (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._is_any_autocast_enabled()
            or torch._C._are_functorch_transforms_active()
        )
    )
