"""Hot calls: those like an earlier one go to native code at once."""

from functools import wraps
from inspect import unwrap
from sys import intern, modules

from . import _native
from ._errors import Error

_attend = _native.attend

_FIXED, _LISTS = -1, -2  # as native/calls.cpp has them
_MOST_PATTERNS = 64


def called(tells, renamed=(), finish=None):
    """The function that returns what `tells` makes of its arguments, and has its signature.

    tells(*arguments, **keywords) is (result, told). told is (function, its names, its values) where a native function
    makes the result, else None. A call like an earlier one of which it was told does not come to `tells` again: the
    native function attend puts its arguments in their places. renamed: names of the native function's arguments by
    those that are called otherwise here. finish(result) is what the caller gets.
    """
    patterns, code = [], unwrap(tells).__code__
    positional, renamed = code.co_varnames[: code.co_argcount], dict(renamed)

    @wraps(tells)
    def function(*arguments, **keywords):
        torch = modules.get("torch")
        made = NotImplemented
        if torch is None or not torch.compiler.is_dynamo_compiling():
            try:
                made = _attend(patterns, arguments, keywords)
            except Error:  # of tensors of other strides and ranks `tells` may make others, or says what is wrong
                pass
        if made is NotImplemented:
            made, told = tells(*arguments, **keywords)
            if told is not None:
                _learn(patterns, [*zip(positional, arguments), *keywords.items()], len(arguments), renamed, *told)
        return made if finish is None else finish(made)

    return function


def _learn(patterns, given, positional, renamed, function, names, values):
    """Makes the native function attend take calls like this one."""
    constants, places, kept = list(values), [], []
    for name, value in given:
        place = names.index(renamed.get(name, name)) if renamed.get(name, name) in names else None
        if name == "block_lists" and value is not None:
            at = names.index("block_offsets")
            constants[at : at + 4] = [None] * 4
            place, one = _LISTS, (value.block_m, value.block_n, value.per_head, value.of_masks)
        elif _is_variable(value) and place is not None and values[place] is value:
            constants[place], one = None, type(value)
        elif _is_constant(value):
            place, one = _FIXED, _copied(value)
        else:
            return
        places.append(place)
        kept.append(one)
    if not _is_constant(constants):
        return
    if len(patterns) == _MOST_PATTERNS:
        patterns.clear()
    lists_at = names.index("block_offsets") if "block_offsets" in names else 0
    keywords = tuple([intern(name) for name, _ in given[positional:]])
    placed = tuple([x for place, one in enumerate(constants) if one is not None for x in (place, one)])
    patterns.append((function, len(names), placed, lists_at, keywords, tuple(places), tuple(kept)))


def _is_variable(value):
    """Whether others of its type mean the same in its place. A number that is 0, and None, may say that there is none."""
    return value is not None and (value != 0 if isinstance(value, (int, float)) else not _is_constant(value))


def _is_constant(value):
    if type(value) in (list, tuple):
        return all(map(_is_constant, value))
    if type(value) is dict:
        return all(map(_is_constant, (*value, *value.values())))
    return value is None or type(value) in (bool, int, float, str)


def _copied(value):
    """A constant that stays as it is, whatever is done to the caller's."""
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


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
