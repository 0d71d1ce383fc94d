"""score_mod and mask_mod of FlexAttention as formulas: what PyTorch records of them, node for node."""

import sys
from functools import partial
from types import MethodType

import torch
from torch._decomp import get_decompositions
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from .._errors import Error, InvalidArgumentError, UnsupportedError
from ._operators import OPERATORS, Expression, Refused, literal, type_of

_INDICES = ("batch", "head", "row", "key")
_TABLES = {
    torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.bfloat16,
    torch.float64: torch.float32, torch.int32: torch.int32, torch.int8: torch.int8, torch.uint8: torch.uint8,
    torch.int64: torch.int32, torch.int16: torch.int32, torch.bool: torch.uint8,
}  # fmt: skip
_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "int32", torch.int8: "int8",
    torch.uint8: "uint8",
}  # fmt: skip
# Operators that PyTorch writes as several others.
_aten = torch.ops.aten
_WRITTEN_OUT = get_decompositions([
    _aten.masked_fill, _aten.lerp, _aten.addcmul, _aten.addcdiv, _aten.logaddexp, _aten.logaddexp2, _aten.frac,
    _aten.hardsigmoid, _aten.hardswish, _aten.mish, _aten.log_sigmoid_forward, _aten.threshold,
    _aten.celu, _aten.selu, _aten.softshrink, _aten.hardshrink, _aten.heaviside, _aten.sinc, _aten.logit, _aten.xlogy,
])  # fmt: skip
_DIMENSIONS = {"batch": "batch", "head": "heads_q", "row": "seqlen_q", "key": "seqlen_k"}
_OF_RESULTS = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}


class Outside:
    """A tensor that does not depend on the indices: a captured one, or one that PyTorch computes before the launch."""

    def __init__(self, place, shape, dtype):
        self.place, self.shape, self.dtype = place, shape, dtype

    @property
    def table_dtype(self):
        return _NAMES[_TABLES[self.dtype]]


class Part:
    """A tensor from outside, some of whose dimensions have an index."""

    def __init__(self, outside, indices):
        self.outside, self.indices = outside, indices


class Traced:
    """A formula, and how its tables and scalars follow from what its function has captured."""

    def __init__(self, function, kind, captured, device, prefix, symbolic):
        self.kind, self.prefix = kind, prefix
        self.tables, self.scalars, self.sizes = {}, {}, {}  # by name: Outside; place of a number; (Outside, dimension)
        self.types = {}  # of the scalars
        self._uses = {}  # of the tables: the indices of each place that reads it
        self._names = {}
        self._steps, self._constants = [], []  # what PyTorch computes before the launch; tensors that the function makes
        self._captured, self._function = captured, function
        inputs = [torch.zeros((), dtype=torch.int32, device=device) for _ in _INDICES]
        if kind == "score_mod":
            inputs.insert(0, torch.zeros((), device=device))
        numbers = [torch.tensor(one, device=device) for one in captured.numbers] if symbolic else []

        def called(*values):
            stands = values[len(inputs) :]
            return (captured.rebuilt(function, stands) if stands else function)(*values[: len(inputs)])

        self._call = called, (*inputs, *numbers)
        try:
            with TransformGetItemToIndex(), torch.no_grad(), torch.autocast(device, enabled=False):
                make = make_fx(called, _WRITTEN_OUT, tracing_mode="fake", _allow_non_fake_inputs=True)
                module = make(*inputs, *numbers)
        except Error:
            raise
        except Exception as error:
            raise self._refused(
                f"cannot be traced: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", error
            ) from error
        self.formula = self._formula(module, symbolic)
        del self._call, self._captured, self._function, self._names

    def _formula(self, module, symbolic):
        known = {id(one): Outside(place, one.shape, one.dtype) for place, one in enumerate(self._captured.tensors)}
        names = (("score",) if self.kind == "score_mod" else ()) + _INDICES
        values, inputs, seen = {}, 0, {}
        for node in module.graph.find_nodes(op="get_attr"):
            tensor = getattr(module, node.target)
            if id(tensor) not in known:
                known[id(tensor)] = self._constant(tensor, len(known))
        for node in module.graph.nodes:
            if node.op == "placeholder":
                if inputs < len(names):
                    name = names[inputs]
                    is_score = name == "score"
                    made = Expression(name, "real" if is_score else "integer", not is_score, is_score)
                else:
                    made = self._scalar(inputs - len(names))
                inputs += 1
                values[node] = made
            elif node.op == "get_attr":
                values[node] = known[id(getattr(module, node.target))]
            elif node.op == "call_function":
                name = node.target.__name__.partition(".")[0] if hasattr(node.target, "_schema") else str(node.target)
                seen[node.target] = seen.get(node.target, 0) + 1
                try:
                    values[node] = self._value(name, node, values)
                except Refused as refused:
                    raise self._refused(str(refused), None, node.target, seen[node.target]) from None
            else:
                result = node.args[0]
                if not isinstance(result, torch.fx.Node):
                    raise self._refused(f"returns {type(result).__name__}")
                made = values[result]
                if made is None or result.meta["val"].dim():
                    raise self._refused(f"returns a tensor of {result.meta['val'].dim()} dimensions")
                made = self._number(made)
                if self.kind == "mask_mod" and made.type != "condition":
                    raise self._refused(f"returns {result.meta['val'].dtype}")
                made.declare()
                return made.to("real" if self.kind == "score_mod" else "condition").text

    def _value(self, name, node, values):
        def given(one):
            if isinstance(one, torch.fx.Node):
                return values[one]
            return [given(x) for x in one] if isinstance(one, (list, tuple)) else one

        def numbers(one):
            if isinstance(one, (Outside, Part)):
                return self._number(one)
            if isinstance(one, list):
                return [numbers(x) for x in one]
            return literal(one) if isinstance(one, (bool, int, float)) else one

        args, kwargs = given(node.args), {key: given(one) for key, one in node.kwargs.items()}
        every = kwargs
        kwargs = {key: one for key, one in kwargs.items() if key not in _OF_RESULTS}
        value = node.meta.get("val")
        flat = [*args, *kwargs.values()]
        flat += [x for one in flat if isinstance(one, list) for x in one]
        parts = [one for one in flat if isinstance(one, (Outside, Part))]
        inside = [one for one in flat if isinstance(one, (Expression, Part))]
        if not isinstance(value, torch.Tensor):
            raise Refused(f"uses {name}, which needs the value of a tensor")
        if parts and not inside:
            self._steps.append((node.target, args, every))
            place = len(self._captured.tensors) + len(self._constants) + len(self._steps) - 1
            return Outside(place, value.shape, value.dtype)
        if parts and name in ("index", "select", "slice") and isinstance(args[0], (Outside, Part)):
            return self._indexed(name, *args)
        if value.dim():
            raise Refused(f"uses {name} of a tensor with {value.dim()} dimensions that depends on an index")
        if name not in OPERATORS:
            raise Refused(f"uses {name}, which formulas do not have")
        operands = [node.args[0].meta["val"].dtype] if node.args and isinstance(node.args[0], torch.fx.Node) else []
        kwargs = {key: numbers(one) if isinstance(one, (Part, Outside)) else one for key, one in kwargs.items()}
        made = OPERATORS[name](value.dtype, *map(numbers, args), **kwargs)
        same = name in ("alias", "clone", "where") or name == "_to_copy" and operands == [value.dtype]
        if value.dtype in (torch.int8, torch.uint8, torch.int16) and not same:
            raise Refused(f"computes {name} in {value.dtype}, and formulas have integers of 32 bits")
        return made.to(type_of(value.dtype))

    def _scalar(self, place):
        number, name = self._captured.numbers[place], f"{self.prefix}n{place}"
        whole = isinstance(number, int)  # of which the sign is part of the key

        def declare():
            self.scalars[name], self.types[name] = place, "int32" if whole else "fp32"

        return Expression(name, "integer" if whole else "real", whole and number >= 0, declare=declare)

    def _constant(self, tensor, place):
        """A tensor that the function makes, out of numbers of its own."""
        self._constants.append(tensor)
        return Outside(place, tensor.shape, tensor.dtype) if tensor.dim() else literal(tensor.item())

    def _indexed(self, name, of, *args):
        indices = list(of.indices) if isinstance(of, Part) else [None] * len(of.shape)
        outside = of.outside if isinstance(of, Part) else of
        free = [place for place, one in enumerate(indices) if one is None]
        if name == "slice":
            dim, begin, end, step = (*args, *(0, None, None, 1)[len(args) :])
            if begin or (end or sys.maxsize) < outside.shape[free[dim]] or step != 1:
                raise Refused("uses slice of a tensor that an index chose from")
            return Part(outside, indices)
        chosen = {args[0]: literal(args[1])} if name == "select" else dict(enumerate(args[0]))
        for place, one in chosen.items():
            if one is None:
                continue
            one = self._number(one)
            if one.type != "integer":
                raise Refused(f"uses index with a {one.type}")
            indices[free[place]] = one
        return Part(outside, indices)

    def _number(self, value):
        """The formula of a value without dimensions."""
        if isinstance(value, Outside):
            value = Part(value, [None] * len(value.shape))
        if not isinstance(value, Part):
            return value
        outside, indices = value.outside, value.indices
        if None in indices:
            raise Refused(f"uses a tensor of {indices.count(None)} dimensions that depends on an index")
        if outside.dtype not in _TABLES:
            raise Refused(f"reads a tensor of {outside.dtype}")
        if not all(outside.shape):
            raise Refused(f"reads a tensor of the shape {list(outside.shape)}")
        name = self._names.setdefault(outside, f"{self.prefix}t{len(self._names)}")
        texts = [self._index(name, dim, one) for dim, one in enumerate(indices)]

        def declare():
            self.tables[name] = outside
            self._uses.setdefault(name, []).append(texts)
            self.sizes.update({f"{name}_size{dim}": (outside, dim) for dim, one in enumerate(indices) if not one.at_least_0})

        real, least_0 = outside.dtype.is_floating_point, outside.dtype in (torch.bool, torch.uint8)
        made = Expression(f"{name}[{', '.join(texts) or '0'}]", "real" if real else "integer", least_0, real,
                          parts=indices, declare=declare)  # fmt: skip
        return made.to("condition") if outside.dtype == torch.bool else made

    def _index(self, name, dim, index):
        """The index, which counts from the end where it is negative."""
        if index.at_least_0:
            return index.text
        counted = f"{index.text} + {name}_size{dim}"
        return counted if index.value is not None else f"({index.text} < 0 ? {counted} : {index.text})"

    def dimensions(self, sizes, named):
        """What flashjit.attention is told of the tables: the dimensions of each, by names or numbers.

        sizes: of the launch, by name of a dimension. A table with a gradient has no free dimensions, since the
        workspace of a backward depends on its sizes.
        """
        made = {}
        for name, one in self.tables.items():
            free = not (named[name].requires_grad and one.dtype.is_floating_point)
            own = [f"{name}_{dim}" if free else size for dim, size in enumerate(named[name].shape)]
            for dim, size in enumerate(one.shape):
                texts = {use[dim] for use in self._uses[name]}
                of_launch = _DIMENSIONS.get(texts.pop()) if len(texts) == 1 else None
                if of_launch and size == sizes[of_launch]:
                    own[dim] = of_launch
            made[name] = tuple(own)
        return made

    @property
    def is_fixed(self):
        return not self._steps

    def named(self, captured, device):
        """Tables and scalars of a call by name, and the tensors that some of them are copies of."""
        tensors, made, copied = [*captured.tensors, *self._constants], {}, []
        for target, args, kwargs in self._steps:
            tensors.append(target(*_filled(args, tensors), **dict(zip(kwargs, _filled(kwargs.values(), tensors)))))
        for name, one in self.tables.items():
            tensor = tensors[one.place]
            made[name] = self._table(tensor, device)
            if made[name].data_ptr() != tensor.data_ptr():
                copied.append(tensor)
        for name, place in self.scalars.items():
            made[name] = captured.numbers[place]
        for name, (one, dim) in self.sizes.items():
            made[name] = one.shape[dim]
        return made, copied

    def _table(self, tensor, device):
        """The tensor with dimensions and a dtype that tables have."""
        dtype = _TABLES[tensor.dtype]
        if self.kind == "mask_mod":
            tensor = tensor.detach()
        if not tensor.dim():
            tensor = tensor.reshape(1)
        if tensor.dtype == torch.bool:
            return tensor.view(dtype)
        if tensor.dtype == torch.int64 and (tensor != tensor.int()).any():
            raise InvalidArgumentError(
                f"{self.kind} reads a tensor of int64 with numbers of more than 32 bits: smaller ones would work"
            )
        return tensor.to(device, dtype)  # the tensor itself if it has them

    def _refused(self, what, error=None, target=None, count=0):
        return UnsupportedError(
            f"{self.kind} at {self._place(error, target, count)} {what}: operators that drop_ins.md lists, or a tensor of "
            "values that the function reads by index, would work"
        )

    def _place(self, error, target, count):
        """File and line of the user's function."""
        if error is None and target is not None:
            finder = _Finder(target, count)
            call, inputs = self._call
            try:
                with TransformGetItemToIndex(), torch.no_grad(), torch._subclasses.FakeTensorMode(
                    allow_non_fake_inputs=True
                ) as mode, finder:
                    call(*map(mode.from_tensor, inputs))
            except Exception:  # the place is for the message alone
                pass
            if finder.place:
                return finder.place
        frames, trace = [], error and error.__traceback__
        while trace:
            frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
        frames = [f"{file}:{line}" for file, line in frames if not _is_library(file)]
        return frames[-1] if frames else _defined(self._function)


def _defined(function):
    """Where the function begins."""
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


class _Finder(TorchDispatchMode):
    """Finds the line that calls an operator for the nth time."""

    def __init__(self, target, count):
        super().__init__()
        self.target, self.count, self.place = target, count, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func == self.target:
            self.count -= 1
            frame = sys._getframe()
            while frame and _is_library(frame.f_code.co_filename):
                frame = frame.f_back
            if not self.count and frame:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return func(*args, **(kwargs or {}))


_LIBRARIES = tuple(__file__.rpartition("/")[0] + "/" if x is None else x.__file__.rpartition("/")[0] + "/" for x in (None, torch))


def _is_library(file):
    return file.startswith(_LIBRARIES) or not file.endswith(".py") and not file.startswith("<")


def _filled(args, tensors):
    return [
        _filled(one, tensors) if isinstance(one, list) else tensors[one.place] if isinstance(one, Outside) else one
        for one in args
    ]
