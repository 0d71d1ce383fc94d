"""What a function of Python reads from outside of itself: variables of closures, globals, defaults, attributes."""

import math
import numbers
import sys
import types
from functools import partial

import torch

_PLAIN = (type(None), bool, str, bytes, complex, slice, torch.dtype, torch.device, torch.layout, torch.Size)
_FIXED = {"torch", "numpy", *sys.stdlib_module_names}


class Captured:
    """Tensors and numbers that a function reads, in an order that `key` fixes.

    Functions with equal keys differ in their tensors' contents and in their numbers alone. `numbers` has those that
    `rebuilt` can replace; all others are part of the key by their values. `holds` says cheaply whether the function
    still reads the same objects.
    """

    def __init__(self, function):
        self._names, count = set(), -1
        while len(self._names) != count:  # attributes that any of the functions names are looked at
            count = len(self._names)
            self.tensors, self.numbers = [], []
            self.is_known = True  # whether a change of anything that the function reads is noticed
            self.numbers_are_plain = True  # whether a tensor can stand in a number's place
            self._cells, self._items, self._attributes, self._lengths = [], [], [], []
            self._places, self._met, self._kept = {}, {}, []
            self._objects, self._places_of_objects = {}, {}
            self.key, self._make = self._visit(function)
        self.numbers_are_plain &= not self._names & {"isinstance", "type"}
        del self._places, self._met, self._kept, self._objects, self._places_of_objects

    def holds(self):
        try:
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    return False
            for container, place, value in self._items:
                if container[place] is not value:
                    return False
            if self._attributes or self._lengths:
                for owner, name, value in self._attributes:
                    if getattr(owner, name) is not value:
                        return False
                for container, length in self._lengths:
                    if len(container) != length:
                        return False
        except (AttributeError, IndexError, KeyError, ValueError):
            return False
        return self.is_known

    def rebuilt(self, function, stands):
        """The function with `stands` in the places of its numbers."""
        return self._make(stands) if self._make else function

    # Each of the following returns a part of the key, and None or a function that makes the value from stands.

    def _visit(self, value):
        kind = type(value)
        if isinstance(value, torch.Tensor):
            place = self._places.setdefault(id(value), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(value)
            return ("tensor", place, value.shape, value.dtype, value.device), None
        if kind in (int, float) and math.isfinite(value) and abs(value) < 2**31:
            place = len(self.numbers)
            self.numbers.append(value)
            return (kind, value >= 0 if kind is int else None), lambda stands: stands[place]
        if kind in _PLAIN or isinstance(value, numbers.Number):
            return (kind, repr(value)), None
        if isinstance(value, (types.FunctionType, types.MethodType, partial, tuple, list, dict)):
            return self._composed(value, kind)
        if isinstance(value, (type, types.ModuleType)):
            name = value.__module__ if isinstance(value, type) else value.__name__
            return (value, None) if name.partition(".")[0] in _FIXED else self._object(value)
        if isinstance(value, (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return ("built in", getattr(value, "__qualname__", str(value))), None
        return self._object(value)

    def _composed(self, value, kind):
        if id(value) in self._met:
            self.numbers_are_plain = False  # a cycle, which is not made anew
            return ("again", self._met[id(value)]), None
        self._met[id(value)] = len(self._met)
        if isinstance(value, types.FunctionType):
            made = self._function(value)
        elif isinstance(value, types.MethodType):
            made = self._parts("method", (value.__func__, value.__self__), lambda parts: types.MethodType(*parts))
        elif isinstance(value, partial):
            parts = value.func, value.args, value.keywords
            made = self._parts("partial", parts, lambda parts: partial(parts[0], *parts[1], **parts[2]))
        elif isinstance(value, dict):
            self._items += [(value, name, one) for name, one in value.items()]
            self._lengths.append((value, len(value)))
            named = tuple(value)
            made = self._parts(("dict", repr(named)), value.values(), lambda parts: dict(zip(named, parts)))
        else:
            if kind is not tuple:
                self._items += [(value, place, one) for place, one in enumerate(value)]
                self._lengths.append((value, len(value)))
            make = kind._make if hasattr(kind, "_make") else kind
            made = self._parts(kind, value, make)
        del self._met[id(value)]
        return made

    def _parts(self, name, values, make):
        values = list(values)
        visited = [self._visit(one) for one in values]
        key = (name, *[key for key, _ in visited])
        if not any(made for _, made in visited):
            return key, None
        return key, lambda stands: make([made(stands) if made else one for one, (_, made) in zip(values, visited)])

    def _function(self, function):
        code, seen = function.__code__, function.__globals__
        library = (function.__module__ or "").partition(".")[0] in _FIXED
        if library and not function.__closure__:
            return ("function", code), None
        names = _names(code)
        self._names |= names
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # a variable without a value yet
                self.is_known = False
                cells.append(None)
            self._cells.append((cell, cells[-1]))
        read = {} if library else {name: seen[name] for name in sorted(names) if name in seen}
        self._items += [(seen, name, value) for name, value in read.items()]
        more = function.__kwdefaults__ or {}

        def make(parts):
            of_cells, defaults, of_globals, of_keywords = parts
            made = types.FunctionType(
                code, {**seen, **of_globals}, function.__name__, defaults, tuple(map(types.CellType, of_cells)) or None
            )
            made.__kwdefaults__ = of_keywords or None
            return made

        key, make = self._parts("function", (tuple(cells), function.__defaults__, read, more), make)
        return (code, tuple(read), key), make

    def _object(self, value):
        """An object by those of its attributes that the functions name."""
        if id(value) in self._objects:
            key, make = self._objects[id(value)]
            self.numbers_are_plain &= key is not None  # a cycle is not made anew
            return ("again", self._places_of_objects[id(value)]), make
        if not hasattr(value, "__dict__"):
            self.is_known = False
            return ("unknown", id(value)), None
        self._places_of_objects[id(value)] = len(self._objects)
        self._objects[id(value)] = None, None
        self._kept.append(value)  # so that no other object has its id
        key, made = ["object", value if isinstance(value, type) else type(value)], {}
        call = "forward" if isinstance(value, torch.nn.Module) else "__call__"
        called = getattr(type(value), call, None)
        if isinstance(called, types.FunctionType) and not isinstance(value, type):
            of_call, make = self._visit(called)
            key.append(of_call)
            made["__call__"] = partial(_method, make, called)
        numbers = len(self.numbers)
        for name in sorted(self._names):
            try:
                one = getattr(value, name)
            except AttributeError:
                continue
            is_method = isinstance(one, types.MethodType) and one.__self__ is value
            if is_method:
                one = one.__func__
            else:
                self._attributes.append((value, name, one))
            of_one, make = self._visit(one)
            key.append((name, of_one))
            if is_method:
                made[name] = partial(_method, make, one)
            elif make:
                made[name] = lambda stands, own, make=make: make(stands)
        has_numbers = len(self.numbers) > numbers
        make = (lambda stands: _Stand(value, made, stands)) if has_numbers and not isinstance(value, type) else None
        self.numbers_are_plain &= not (has_numbers and make is None)
        self._objects[id(value)] = made_key, make = tuple(key), make
        return made_key, make


def _method(make, function, stands, own):
    return types.MethodType(make(stands) if make else function, own)


class _Stand:
    """An object with `stands` in the places of numbers among its attributes."""

    def __init__(self, value, made, stands):
        own = self.__dict__
        own["_value"] = value
        own.update({name: make(stands, self) for name, make in made.items()})

    def __getattr__(self, name):
        return getattr(self._value, name)

    def __call__(self, *arguments):
        return self.__dict__["__call__"](*arguments)


def _names(code):
    """Names of globals and attributes that the code and the functions inside it have."""
    names = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            names |= _names(one)
    return names
