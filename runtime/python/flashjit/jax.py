"""Attention of JAX's arrays, as a function that jax.jit and jax.grad know.

>>> import jax.numpy as jnp, flashjit.jax
>>> x = jnp.ones((1, 8, 2, 64), jnp.float32)
>>> flashjit.jax.attention(x, x, x, mask="causal").shape
(1, 8, 2, 64)
"""

from functools import partial
from itertools import starmap

import jax
import jax.numpy as jnp

from . import _native
from ._engine import _offer_nvrtc
from ._errors import InvalidArgumentError
from ._functions import _SHOWN, _forward_fields, _window
from ._specs import KEYWORDS, Maker, frozen

_offer_nvrtc()
for _platform, _handler in zip(("cpu", "CUDA"), _native.xla_handlers()):
    jax.ffi.register_ffi_target("flashjit", _handler, platform=_platform)

_REALS = {"softmax_scale", "dropout_p", "softcap"}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bool": "uint8", "uint32": "int64"}


def attention(q, k, v, *, mask=(), score=(), scale=None, dropout_p=0.0, dropout_key=None, window=None, num_sinks=None,
              cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqlens_q=None,
              seqlens_k=None, tree_bits=None, prefix_lengths=None, sink_logits=None, row_offset=None,
              key_offset=None, return_lse=False, out_dtype=None, tables=None, **named):  # fmt: skip
    """Exact attention as flashjit.attention computes it, of arrays of JAX on CPUs and CUDA devices.

    q: [batch, seqlen_q, heads_q, head_dim]; k: [batch, seqlen_k, heads_kv, head_dim]; v: [batch, seqlen_k, heads_kv,
    head_dim_v], or packed. Arguments and shapes are those of flashjit.attention. Arrays may be traced; numbers may not.
    Returns o, or with return_lse a pair of it and its log-sum-exp.

    There are gradients of q, k, v, sink_logits and tables that a score reads, by o and by the log-sum-exp; none of
    gradients. jax.vmap computes one entry after the other. dropout_key: a key of jax.random, which may be traced.

    >>> import jax, jax.numpy as jnp, flashjit.jax
    >>> q = jnp.ones((1, 4, 2, 64), jnp.float32)
    >>> loss = lambda q: flashjit.jax.attention(q, q, q, score="score * 2").sum()
    >>> jax.jit(jax.grad(loss))(q).shape
    (1, 4, 2, 64)
    """
    left, right = (None, None) if window is None else _window(window)
    values = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqlens_q": seqlens_q,
        "seqlens_k": seqlens_k, "tree_bits": tree_bits, "prefix_lengths": prefix_lengths, "sink_logits": sink_logits,
        "softmax_scale": scale, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "window_left": left,
        "window_right": right, "num_sinks": num_sinks, "row_offset": row_offset, "key_offset": key_offset,
    }  # fmt: skip
    if dropout_p:
        if dropout_key is None:
            raise InvalidArgumentError("dropout_p is given without dropout_key: a key of jax.random would work")
        is_key = jnp.issubdtype(dropout_key.dtype, jax.dtypes.prng_key)
        seed = jax.random.key_data(dropout_key) if is_key else dropout_key
        values |= {"dropout_p": dropout_p, "dropout_seed_tensor": seed.reshape(-1)[-2:].astype(jnp.uint32)}
        values["dropout_offset_tensor"] = jnp.zeros(2, jnp.uint32)
    values |= named
    arrays, numbers = {}, []
    for name, value in values.items():
        if value is None and name not in ("q", "k", "v"):
            continue
        if isinstance(value, (int, float)) or hasattr(value, "__float__") and not hasattr(value, "dtype"):
            numbers.append((name, float(value) if isinstance(value, float) or name in _REALS else int(value)))
        else:
            _refuse_others(name, value, named)
            arrays[name] = value
    kind = _Kind(frozen((mask, score, tables)), (mask, score, tables), tuple(named), tuple(numbers), out_dtype,
                 bool(return_lse), tuple(arrays))  # fmt: skip
    return _attend(kind, *arrays.values())


KEYWORDS["flashjit.jax.attention"] = attention.__kwdefaults__.keys()


def _refuse_others(name, value, named):
    if name in named and hasattr(value, "dtype") and value.ndim == 0:
        raise InvalidArgumentError(f"argument {name} is a traced or device scalar: a number of Python would work")
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise InvalidArgumentError(
            f"argument {_SHOWN.get(name, name)} is of type {type(value).__name__}, which is no array: one of JAX or "
            "NumPy would work"
        )


class _Kind:
    """What is no array of a call. Equal kinds are compiled once."""

    def __init__(self, key, formulas, named, numbers, out_dtype, return_lse, names):
        self.formulas, self.named, self.numbers, self.out_dtype = formulas, named, numbers, out_dtype
        self.return_lse, self.names = return_lse, names
        self._key = (key, named, numbers, out_dtype, return_lse, names)

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return isinstance(other, _Kind) and self._key == other._key

    def call(self, op, fields, arrays, results):
        """Runs the op on arrays by name; results: shapes and dtypes by name."""
        dtypes = {name: _DTYPES.get(one.dtype.name, one.dtype.name) for name, one in (arrays | results).items()}
        dtypes |= {name: "float" if isinstance(value, float) else "int" for name, value in self.numbers}
        if any(name == "dropout_p" for name, _ in self.numbers):
            fields = fields | {"dropout": True}
        mask, score, tables = self.formulas
        maker = Maker("flashjit.jax.attention", op, "none", mask, score, fields, tables, self.named, None)
        q, v = arrays["q"], arrays["v"]
        _, spec, _ = maker("", dtypes, q.shape[-1], v.shape[-1], self.out_dtype)
        numbers = " ".join(f"{n}={'r' if isinstance(x, float) else 'i'}{x!r}" for n, x in self.numbers)
        text = "\n".join([" ".join(arrays), " ".join(results), numbers, spec.json])
        run = jax.ffi.ffi_call("flashjit", tuple(results.values()), vmap_method="sequential")
        return run(*arrays.values(), call=text)

    def forward(self, arrays, lse):
        arrays = dict(zip(self.names, arrays))
        q, v = arrays["q"], arrays["v"]
        if q.ndim not in (3, 4) or v.ndim != q.ndim:
            raise InvalidArgumentError(
                f"argument q has {q.ndim} dimensions and v {v.ndim}: [batch, seqlen, heads, head_dim], or packed "
                "[total, heads, head_dim], would work"
            )
        *rows, heads, _ = q.shape
        dtype = jnp.float32 if self.out_dtype == "fp32" else q.dtype
        results = {"o": jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), dtype)}
        if lse:
            results["lse"] = jax.ShapeDtypeStruct((*rows[:-1], heads, rows[-1]), jnp.float32)
        return self.call("forward", _forward_fields(lse, None, self.out_dtype, None, ""), arrays, results)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kind, *arrays):
    made = kind.forward(arrays, kind.return_lse)
    return tuple(made) if kind.return_lse else made[0]


def _attend_forward(kind, *arrays):
    # A pytree without leaves says of which arrays a gradient is asked for.
    wanted = tuple(() if one.perturbed else None for one in arrays)
    arrays = tuple(one.value for one in arrays)
    o, lse = kind.forward(arrays, True)
    return ((o, lse) if kind.return_lse else o), (arrays, o, lse, wanted)


def _attend_backward(kind, kept, cotangents):
    arrays, o, lse, wanted = kept
    do, dlse = cotangents if kind.return_lse else (cotangents, None)
    is_zero = lambda one: one is None or isinstance(one, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    given = dict(zip(kind.names, arrays))
    gradients = [name for name, one in zip(kind.names, wanted) if one is not None and name not in ("q", "k", "v")]
    results = {f"d{name}": jax.ShapeDtypeStruct(given[name].shape, given[name].dtype) for name in ("q", "k", "v")}
    for name in dict.fromkeys(gradients + ["sink_logits"] * ("sink_logits" in given)):
        results[f"d_{name}"] = jax.ShapeDtypeStruct(given[name].shape, jnp.float32)
    do = jnp.zeros(o.shape, given["q"].dtype) if is_zero(do) else do.astype(given["q"].dtype)
    inputs = given | {"o": o, "lse": lse, "do": do} | ({} if is_zero(dlse) else {"dlse": dlse})
    made = dict(zip(results, kind.call("backward", {}, inputs, results)))

    def of(name, one, array):
        if one is None:
            return None
        return made[f"d{name}" if name in ("q", "k", "v") else f"d_{name}"].astype(array.dtype)

    return tuple(starmap(of, zip(kind.names, wanted, arrays)))


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
