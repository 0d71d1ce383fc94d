"""PyTorch's operators as text of formulas."""

import math

import torch


class Refused(Exception):
    """What a function does that formulas cannot."""


class Expression:
    """A formula without a name. type: integer, real or condition.

    at_least_0: whether that is known. has_gradient: whether a gradient of it can be asked for. value: of literals.
    declare: declares the table or scalar that it is.
    """

    def __init__(self, text, type, at_least_0=False, has_gradient=False, value=None, parts=(), declare=None):
        self.text, self.type, self.at_least_0, self.value = text, type, at_least_0, value
        self.has_gradient = has_gradient or any(one.has_gradient for one in parts)
        self._parts, self._declare = parts, declare

    def declare(self):
        """Declares the tables and scalars that the text reads, once."""
        parts, self._parts = self._parts, ()
        for one in parts:
            one.declare()
        if self._declare:
            self._declare()

    def to(self, type):
        if self.type == type:
            return self
        if self.value is not None:
            return literal({"condition": bool, "integer": int, "real": float}[type](self.value))
        if type == "condition":
            return _make(f"({self.text} != 0)", type, self)
        if self.type == "condition":
            return _make(f"({self.text} ? {'1 : 0' if type == 'integer' else '1.0 : 0.0'})", type, self, at_least_0=True)
        if type == "real":
            return _make(f"({self.text} * 1.0)", type, self)
        whole = f"floor({self.text})" if self.at_least_0 else f"({self.text} < 0.0 ? -floor(-{self.text}) : floor({self.text}))"
        return _make(whole, type, self)

    def number(self):
        return self.to("integer") if self.type == "condition" else self


def _make(text, type, *parts, at_least_0=False):
    return Expression(text, type, at_least_0, parts=parts)


def type_of(dtype):
    return "condition" if dtype == torch.bool else "real" if dtype.is_floating_point else "integer"


def literal(value):
    if isinstance(value, bool):
        return Expression("(0 == 0)" if value else "(0 == 1)", "condition", value=value)
    if isinstance(value, int):
        if abs(value) >= 2**31:
            raise Refused(f"uses the integer {value}, which has more than 32 bits")
        return Expression(str(value) if value >= 0 else f"({value})", "integer", value >= 0, value=value)
    if math.isnan(value):
        raise Refused("uses nan")
    text = repr(abs(value)).replace("e+", "e")
    return Expression(text if math.copysign(1, value) > 0 else f"(-{text})", "real", value >= 0, value=value)


# ---- arithmetic ----


def _add(dtype, a, b, alpha=1, sign="+"):
    if alpha != 1:
        b = _multiply(dtype, b, literal(alpha))
    if dtype == torch.bool:
        return _either(dtype, a, b)
    a, b = a.number(), b.number()
    return _make(f"({a.text} {sign} {b.text})", _joined(a, b), a, b, at_least_0=sign == "+" and a.at_least_0 and b.at_least_0)


def _joined(a, b):
    return "real" if "real" in (a.type, b.type) else "integer"


def _subtract(dtype, a, b, alpha=1):
    return _add(dtype, a, b, alpha, "-")


def _multiply(dtype, a, b):
    if dtype == torch.bool:
        return _both(dtype, a, b)
    a, b = a.number(), b.number()
    if a.text.startswith("tanh("):  # cap * tanh(score / cap) has a shorter path
        a, b = b, a
    return _make(f"({a.text} * {b.text})", _joined(a, b), a, b, at_least_0=a.at_least_0 and b.at_least_0)


def _divide(dtype, a, b, rounding_mode=None):
    if rounding_mode:
        return _floor_divide(dtype, a, b) if rounding_mode == "floor" else _truncated(dtype, a, b)
    return _make(f"({a.to('real').text} / {b.to('real').text})", "real", a, b, at_least_0=a.at_least_0 and b.at_least_0)


def _divisor(dtype, a, b):
    if dtype.is_floating_point:
        raise Refused("divides reals with a remainder")
    if not b.at_least_0 or b.value == 0:
        raise Refused("divides integers by one that may be negative")
    return a.number(), b.number()


def _floor_divide(dtype, a, b):
    a, b = _divisor(dtype, a, b)
    if a.at_least_0:
        return _make(f"({a.text} / {b.text})", "integer", a, b, at_least_0=True)
    return _make(f"({a.text} < 0 ? -(({b.text} - 1 - {a.text}) / {b.text}) : {a.text} / {b.text})", "integer", a, b)


def _truncated(dtype, a, b):
    if dtype.is_floating_point:
        raise Refused("divides reals with a remainder")
    a, b = a.number(), b.number()
    return _make(f"({a.text} / {b.text})", "integer", a, b, at_least_0=a.at_least_0 and b.at_least_0)


def _remainder(dtype, a, b):
    a, b = _divisor(dtype, a, b)
    text = f"({a.text} % {b.text})" if a.at_least_0 else f"(({a.text} % {b.text} + {b.text}) % {b.text})"
    return _make(text, "integer", a, b, at_least_0=True)


def _fmod(dtype, a, b):
    if dtype.is_floating_point:
        raise Refused("divides reals with a remainder")
    return _make(f"({a.text} % {b.text})", "integer", a, b, at_least_0=a.at_least_0)


def _negate(dtype, a):
    return _make(f"(-{a.number().text})", a.number().type, a)


def _absolute(dtype, a):
    return _make(f"abs({a.number().text})", a.number().type, a, at_least_0=True)


def _power(dtype, a, b):
    if b.value is None:
        if dtype.is_floating_point and a.value is not None and a.value > 0:
            return _make(f"exp({b.to('real').text} * {literal(math.log(a.value)).text})", "real", b, at_least_0=True)
        raise Refused("uses pow with an exponent that is no number, of a base that is not a number above 0")
    exponent = b.value
    if exponent == int(exponent) and 0 <= abs(exponent) <= 8:
        made = literal(1.0 if dtype.is_floating_point else 1)
        for i in range(int(abs(exponent))):
            made = _multiply(dtype, made, a) if i else a.number()
        return made if exponent >= 0 else _divide(dtype, literal(1.0), made)
    if exponent == 0.5:
        return _function("sqrt")(dtype, a)
    if exponent == -0.5:
        return _rsqrt(dtype, a)
    raise Refused(f"uses pow with the exponent {exponent}")


# ---- functions of reals ----


def _function(name, of="{}", then="{}", at_least_0=False):
    def apply(dtype, a):
        a = a.to("real")
        return _make(then.format(f"{name}({of.format(a.text)})"), "real", a, at_least_0=at_least_0)

    return apply


def _text(pattern, at_least_0=False):
    """A function of one real, x."""

    def apply(dtype, a):
        a = a.to("real")
        return _make(pattern.replace("$", a.text), "real", a, at_least_0=at_least_0)

    return apply


_rsqrt = _text("(1.0 / sqrt($))", True)
_SIGMOID = "(0.5 * tanh(0.5 * $) + 0.5)"


def _gelu(dtype, a, approximate="none"):
    if approximate != "tanh":
        raise Refused("uses gelu with erf; approximate='tanh' would work")
    return _text("(0.5 * $ * (1.0 + tanh(0.7978845608028654 * ($ + 0.044715 * $ * $ * $))))")(dtype, a)


def _softplus(dtype, a, beta=None, threshold=None):
    beta, threshold = beta or literal(1.0), threshold or literal(20.0)
    scaled = _multiply(dtype, a.to("real"), beta) if beta.value != 1 else a.to("real")
    made = _text(f"($ > {threshold.to('real').text} ? $ : max($, 0.0) + log(1.0 + exp(-abs($))))")(dtype, scaled)
    return _divide(dtype, made, beta) if beta.value != 1 else made


def _leaky_relu(dtype, a, slope=None):
    slope = slope or literal(0.01)
    return _make(f"({a.text} > 0.0 ? {a.text} : {slope.text} * {a.text})", "real", a, slope)


def _elu(dtype, a, alpha=None, scale=None, input_scale=None):
    alpha, scale, input_scale = (x or literal(1.0) for x in (alpha, scale, input_scale))
    return _text(
        f"({scale.text} * ($ > 0.0 ? $ : {alpha.text} * (exp({input_scale.text} * $) - 1.0)))"
    )(dtype, a)


def _floor(dtype, a):
    # floor() of formulas is an integer; reals from 2^23 on have no fractions.
    return a if a.type == "integer" else _text("(abs($) < 8388608.0 ? floor($) * 1.0 : $)")(dtype, a)


def _ceil(dtype, a):
    return a if a.type == "integer" else _text("(abs($) < 8388608.0 ? -floor(-$) * 1.0 : $)")(dtype, a)


def _trunc(dtype, a):
    if a.type == "integer":
        return a
    return _text("(abs($) < 8388608.0 ? ($ < 0.0 ? -floor(-$) : floor($)) * 1.0 : $)")(dtype, a)


def _sign(dtype, a):
    a = a.number()
    if a.type == "integer":
        return _make(f"({a.text} > 0 ? 1 : {a.text} < 0 ? -1 : 0)", "integer", a)
    return _text("($ > 0.0 ? 1.0 : $ < 0.0 ? -1.0 : 0.0)")(dtype, a)


# ---- extrema ----


def _extremum(name, comparison):
    def apply(dtype, a, b):
        a, b = a.number(), b.number()
        type = _joined(a, b)
        least = (a.at_least_0 or b.at_least_0) if name == "max" else (a.at_least_0 and b.at_least_0)
        if type == "integer":
            return _make(f"{name}({a.text}, {b.text})", type, a, b, at_least_0=least)
        a, b = a.to("real"), b.to("real")
        # As in PyTorch NaN wins, and equal operands share the gradient.
        same = f"0.5 * {a.text} + 0.5 * {b.text}" if a.has_gradient or b.has_gradient else a.text
        return _make(
            f"({a.text} == {b.text} ? {same} : {a.text} {comparison} {b.text} || {a.text} != {a.text} ? {a.text} : "
            f"{b.text})", type, a, b, at_least_0=least,
        )  # fmt: skip

    return apply


_minimum, _maximum = _extremum("min", "<"), _extremum("max", ">")


def _clamp(dtype, a, low=None, high=None):
    a = a.number()
    for bound, name, comparison in ((low, "max", "<"), (high, "min", ">")):
        if bound is None:
            continue
        if a.type == bound.number().type == "integer":
            a = (_maximum if name == "max" else _minimum)(dtype, a, bound)
        else:  # within the bounds the gradient is that of the value; NaN stays
            x, y = a.to("real"), bound.to("real")
            least = x.at_least_0 or y.at_least_0 if name == "max" else x.at_least_0 and y.at_least_0
            a = _make(f"({x.text} {comparison} {y.text} ? {y.text} : {x.text})", "real", x, y, at_least_0=least)
    return a


def _clamp_min(dtype, a, low):
    return _clamp(dtype, a, low)


def _clamp_max(dtype, a, high):
    return _clamp(dtype, a, None, high)


# ---- conditions ----


def _comparison(sign):
    def apply(dtype, a, b):
        if a.type == b.type == "condition" and sign in ("==", "!="):  # conditions have neither
            yes, no = (b.text, f"!{b.text}") if sign == "==" else (f"!{b.text}", b.text)
            return _make(f"({a.text} ? {yes} : {no})", "condition", a, b)
        a, b = a.number(), b.number()
        return _make(f"({a.text} {sign} {b.text})", "condition", a, b)

    return apply


def _both(dtype, a, b):
    return _connected(dtype, a, b, "&&", True)


def _either(dtype, a, b):
    return _connected(dtype, a, b, "||", False)


def _connected(dtype, a, b, sign, neutral):
    a, b = a.to("condition"), b.to("condition")
    for one, other in ((a, b), (b, a)):
        if one.value is not None:
            return other if one.value is neutral else one
    return _make(f"({a.text} {sign} {b.text})", "condition", a, b)


def _not(dtype, a):
    a = a.to("condition")
    return literal(not a.value) if a.value is not None else _make(f"(!{a.text})", "condition", a)


def _differ(dtype, a, b):
    return _comparison("!=")(dtype, a.to("condition"), b.to("condition"))


def _where(dtype, condition, a, b):
    condition = condition.to("condition")
    if condition.value is not None:
        return a if condition.value else b
    type = type_of(dtype)
    a, b = a.to(type), b.to(type)
    return _make(f"({condition.text} ? {a.text} : {b.text})", type, condition, a, b, at_least_0=a.at_least_0 and b.at_least_0)


# ---- bits ----


def _bits(name, of_conditions):
    def apply(dtype, a, b):
        if dtype == torch.bool:
            return of_conditions(dtype, a, b)
        for one, other in ((a, b), (b, a)):
            if name == "bitwise_and" and one.value is not None and one.value > 0 and not one.value & one.value + 1:
                return _remainder(dtype, other, literal(one.value + 1))
        raise Refused(f"uses {name} of integers")

    return apply


def _bitwise_not(dtype, a):
    if dtype == torch.bool:
        return _not(dtype, a)
    return _make(f"(-1 - {a.text})", "integer", a)


def _shift(name):
    def apply(dtype, a, b):
        if b.value is None or not 0 <= b.value < 31:
            raise Refused(f"uses {name} by a number that is not known")
        factor = literal(2**b.value)
        return _multiply(dtype, a, factor) if "left" in name else _floor_divide(dtype, a, factor)

    return apply


# ---- conversions ----


def _same(dtype, a, *_):
    return a


def _detach(dtype, a):
    if a.has_gradient:
        raise Refused("uses detach of a value that has a gradient")
    return a


def _to_copy(dtype, a, *_):
    wide = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
    if a.type == "real" and wide.get(dtype, 24) < 24:
        raise Refused(f"rounds to {dtype}, and formulas compute in float32")
    return a.to(type_of(dtype))


def _filled(value):
    def apply(dtype, *_):
        return literal(value).to(type_of(dtype))

    return apply


def _full(dtype, _, value):
    return value.to(type_of(dtype))


def _scalar_tensor(dtype, value):
    return value.to(type_of(dtype))


OPERATORS = {
    "add": _add, "sub": _subtract, "rsub": lambda dtype, a, b, alpha=1: _subtract(dtype, b, a, alpha),
    "mul": _multiply, "div": _divide, "floor_divide": _floor_divide, "remainder": _remainder, "fmod": _fmod,
    "neg": _negate, "abs": _absolute, "pow": _power, "reciprocal": _text("(1.0 / $)"), "rsqrt": _rsqrt,
    "sqrt": _function("sqrt", at_least_0=True), "exp": _function("exp", at_least_0=True), "log": _function("log"),
    "tanh": _function("tanh"), "exp2": _function("exp", "{} * 0.6931471805599453", at_least_0=True),
    "expm1": _function("exp", then="({} - 1.0)"), "log2": _function("log", then="({} * 1.4426950408889634)"),
    "log10": _function("log", then="({} * 0.4342944819032518)"), "log1p": _function("log", "1.0 + {}"),
    "sigmoid": _text(_SIGMOID, True), "silu": _text(f"($ * {_SIGMOID})"), "gelu": _gelu, "softplus": _softplus,
    "relu": _text("($ <= 0.0 ? 0.0 : $)", True), "leaky_relu": _leaky_relu, "elu": _elu,
    "hardtanh": lambda dtype, a, low=None, high=None: _clamp(dtype, a, low or literal(-1.0), high or literal(1.0)),
    "floor": _floor, "ceil": _ceil, "trunc": _trunc, "sign": _sign, "sgn": _sign,
    "minimum": _minimum, "maximum": _maximum, "clamp": _clamp, "clamp_min": _clamp_min, "clamp_max": _clamp_max,
    "eq": _comparison("=="), "ne": _comparison("!="), "lt": _comparison("<"), "le": _comparison("<="),
    "gt": _comparison(">"), "ge": _comparison(">="), "where": _where,
    "logical_and": _both, "logical_or": _either, "logical_not": _not, "logical_xor": _differ,
    "bitwise_and": _bits("bitwise_and", _both), "bitwise_or": _bits("bitwise_or", _either),
    "bitwise_xor": _bits("bitwise_xor", _differ), "bitwise_not": _bitwise_not,
    "__and__": _bits("bitwise_and", _both), "__or__": _bits("bitwise_or", _either),
    "__xor__": _bits("bitwise_xor", _differ),
    "bitwise_left_shift": _shift("bitwise_left_shift"), "bitwise_right_shift": _shift("bitwise_right_shift"),
    "__lshift__": _shift("bitwise_left_shift"), "__rshift__": _shift("bitwise_right_shift"),
    "isnan": lambda dtype, a: _make(f"({a.text} != {a.text})", "condition", a),
    "isinf": lambda dtype, a: _make(f"(abs({a.to('real').text}) == inf)", "condition", a),
    "alias": _same, "clone": _same, "lift_fresh": _same, "lift_fresh_copy": _same, "expand": _same, "view": _same,
    "detach": _detach, "_to_copy": _to_copy, "convert_element_type": _to_copy,
    "zeros": _filled(0), "ones": _filled(1), "zeros_like": _filled(0), "ones_like": _filled(1),
    "new_zeros": _filled(0), "new_ones": _filled(1),
    "full": _full, "full_like": _full, "new_full": lambda dtype, _, size, value: value.to(type_of(dtype)),
    "scalar_tensor": _scalar_tensor,
}  # fmt: skip
