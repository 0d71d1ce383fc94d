"""Attention of PyTorch's tensors with gradients, as operators that torch.compile knows.

flashjit.attention comes here by itself where PyTorch traces, compiles, transforms (torch.func) or casts (autocast), and
for each kind of call in which a tensor requires a gradient. Traces record the operators flashjit::attention_forward and
flashjit::attention_backward, or flashjit::qkv_forward and flashjit::qkv_backward.

- Gradients: of q, k, v, of sink_logits, and of tables that a score reads, by the output and by its log-sum-exp. There
  are no gradients of gradients. Keys in pages and 8-bit caches have none.
- torch.compile takes a call with fullgraph=True; lengths may be dynamic. CUDA graphs capture forward and backward, once
  their kernels have been used outside of a capture.
- Dropout takes seed and offset from PyTorch's generator of the device. So torch.manual_seed repeats it, checkpointing
  drops the same weights again, and each replay of a CUDA graph drops others.
- torch.use_deterministic_algorithms(True) at the time of the forward makes the gradients' bits repeatable;
  batch_invariant makes those of o and of gradients the same in any batch.
- torch.func.vmap maps over q, k and v as over further batch entries. With arguments that have a batch dimension of
  their own it is refused.
"""

import json
from functools import lru_cache

import torch

from . import _native
from ._errors import InvalidArgumentError, UnsupportedError
from ._functions import _ATTENTION, _SHOWN, BlockLists, _forward_fields, parts_of_attention
from ._specs import Maker, frozen

_call = _native.call


class _Kind:
    """A kind of call: the functions of its forward and backward, by names of arguments."""

    def __init__(self, text):
        f = self.fields = json.loads(text)
        self.text = text
        self.lse = f["lse"]
        tensors = f["tensors"]
        # Tensors whose gradients are asked for, and those whose gradients the backward computes beside q, k and v, by
        # place. It computes that of sinks in any case.
        self.wanted = [tensors.index(name) for name in ("q", "k", "v", *f["gradients"])]
        computed = dict.fromkeys(f["gradients"] + ["sink_logits"] * ("sink_logits" in tensors))
        self.computed = [tensors.index(name) for name in computed]
        # For each tensor the place of its gradient among those that the backward writes.
        written = [0, 1, 2, *self.computed]
        self.placing = tuple(written.index(i) if i in self.wanted else None for i in range(len(tensors)))
        self.returned = tuple(self.placing[i] for i in self.wanted)  # autograd converts them to their tensors' dtypes
        # Such calls have a node of PyTorch's own, where there is one, and operators without Python.
        self.of_qkv, self.heads_first = tensors == ["q", "k", "v"], bool(f["heads_first"])
        self.may_have_node = f["with_gradient"] and self.of_qkv
        self.empty_like, self.more_gradients = torch.empty_like, self._of_computed if self.computed else None

        names = (*tensors, *f["integers"], *f["reals"])
        p = True if "dropout_p" in names else None
        make = self._maker("forward", _forward_fields(f["lse"], p, f["out_dtype"], f["kv_scale"], f["bits"]))
        if f["with_gradient"]:
            fields = {"dropout": True} if p else {}
            if f["bits"]:
                fields[f["bits"]] = True
            make_forward, make_backward = make, self._maker("backward", fields)
            written = ("dq", "dk", "dv", *("d_" + tensors[i] for i in self.computed))
            self.backward = _function(
                make_backward, (*names, "o", "lse", "do", "dlse", *written), False, False, f["heads_first"]
            )

            def make(device, dtypes, head_dim, head_dim_v, out_dtype):
                made = make_forward(device, dtypes, head_dim, head_dim_v, out_dtype)
                of_backward = {**dtypes, **dict.fromkeys(written, "fp32"), "o": made[2]}
                make_backward(device, of_backward, head_dim, head_dim_v, None)  # else it would be refused too late
                return made

        self.forward = _function(make, names, True, self.lse, f["heads_first"])

    def _maker(self, op, fields):
        f = self.fields
        return Maker(
            "attention", op, None, f["mask"], f["score"], fields, f["tables"], tuple(f["named"]), f["block_mask"]
        )

    def _of_computed(self, tensors):
        return tuple(torch.empty_like(tensors[i], dtype=torch.float32) for i in self.computed)


def _function(make, names, writes_o, writes_lse, heads_first):
    shown = tuple(_SHOWN.get(name, name) for name in names)
    return _native.Function(make, names, shown, writes_o, writes_lse, None, heads_first)


_kind = lru_cache(None)(_Kind)
_kinds: dict = {}  # by the arguments of _text_of


def _text(mask, score, tables, block_mask, named, lse, out_dtype, kv_scale, with_gradient, bits, heads_first,
          tensors, integers, reals, gradients):  # fmt: skip
    """The kind of a call as text, by which the operators know it."""
    return json.dumps(locals())



# ---- kernels ----


def _forward(kind, numbers, tensors):
    made = _call(kind.forward, None, None, *tensors, *numbers)
    return made if kind.lse else _with_empty_lse(made)


def _with_empty_lse(o):
    return o, o.new_empty(0, dtype=torch.float32)


def _readable(do, o, q):
    """A gradient of o that kernels can read, which read 16 bytes at once. PyTorch makes gradients of any strides."""
    if do is None:
        return torch.zeros_like(o, dtype=q.dtype)
    do = do.to(q.dtype)
    if do.data_ptr() % 16:
        return do.clone(memory_format=torch.contiguous_format)
    regular = do.is_contiguous() or do.stride(-1) == 1 and all(stride % 8 == 0 for stride in do.stride()[:-1])
    return do if regular else do.contiguous()


def _backward_of_graph(kind, numbers, do, dlse, o, lse, tensors):
    """A backward whose gradients have gradients, which are refused if they are asked for."""
    count = len(kind.fields["integers"])
    made = _TransformedBackward.apply(kind.text, numbers[:count], numbers[count:], do, dlse, o, lse, *tensors)
    return tuple(_placed(kind, made))


class _Attention(torch.autograd.Function):
    """Both kernels without PyTorch's dispatcher, which would cost more time than they do."""

    # forward(ctx, *tensors), of a call that native code knows, and backward(ctx, do, dlse=None)
    forward, backward = staticmethod(_native.forward), staticmethod(_native.backward)


_Attention._backward_cls.apply = _native.method_of(torch._C._FunctionBase)
# Past what torch.func's transforms need.
_Kind.apply = super(torch.autograd.Function, _Attention).apply


class _Transformed(torch.autograd.Function):
    """Both operators, in the form that torch.func's transforms take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(text, integers, reals, *tensors):
        if _is_for_native(text):
            return torch.ops.flashjit.qkv_forward(text, *tensors, integers, reals)
        return torch.ops.flashjit.attention_forward(text, tensors, integers, reals)

    @staticmethod
    def setup_context(ctx, inputs, output):
        text, integers, reals, *tensors = inputs
        ctx.call = text, integers, reals
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, do, dlse):
        text, integers, reals = ctx.call
        made = _TransformedBackward.apply(text, integers, reals, do, dlse, *ctx.saved_tensors)
        return (None, None, None, *_placed(_kind(text), made))


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(text, integers, reals, do, dlse, o, lse, *tensors):
        if dlse is None and do is not None and _is_for_native(text):
            return torch.ops.flashjit.qkv_backward(text, *tensors, integers, reals, o, lse, do)
        return tuple(torch.ops.flashjit.attention_backward(text, tensors, integers, reals, o, lse, do, dlse))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        _differentiate_twice(ctx, *gradients)


def _placed(kind, gradients):
    placed = [None] * len(kind.fields["tensors"])
    for place, gradient in zip(kind.wanted, gradients):
        placed[place] = gradient
    return placed


# ---- operators ----

_library = torch.library.Library("flashjit", "DEF")
for _name in ("attention", "attention_forward"):
    _library.define(
        f"{_name}(str kind, Tensor[] tensors, SymInt[] integers, float[] reals) -> (Tensor, Tensor)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
_library.define(
    "attention_backward(str kind, Tensor[] tensors, SymInt[] integers, float[] reals, Tensor o, Tensor lse, "
    "Tensor? do, Tensor? dlse) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# Graphs hold these for calls of q, k and v alone: their kernels are the extension's and take no GIL.
_library.define(
    "qkv_forward(str kind, Tensor q, Tensor k, Tensor v, SymInt[] integers, float[] reals) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "qkv_backward(str kind, Tensor q, Tensor k, Tensor v, SymInt[] integers, float[] reals, Tensor o, Tensor lse, "
    "Tensor do) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _is_for_native(text):
    """Whether a graph is to hold the operators without Python."""
    traced = torch._C._len_torch_dispatch_stack() > 0 and not torch._C._are_functorch_transforms_active()
    return traced and HAS_GRAPH_OPERATORS and _kind(text).of_qkv


def _attention(text, tensors, integers, reals):
    return _Transformed.apply(text, integers, reals, *tensors)


# The operator attention is for autograd, which takes it apart. The others have no gradients of their own, so that what
# torch.compile makes of them costs no more than their kernels.
_library.impl("attention", _attention, "Autograd")
for _name in ("attention_forward", "attention_backward", "qkv_forward", "qkv_backward"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
for _device in ("CPU", "CUDA"):
    _library.impl("attention", _native.forward_of_operator, _device)
    _library.impl("attention_forward", _native.forward_of_operator, _device)
    _library.impl("attention_backward", _native.backward_of_operator, _device)
HAS_GRAPH_OPERATORS = _native.register_graph_operators()


@torch.library.register_fake("flashjit::attention", lib=_library)
@torch.library.register_fake("flashjit::attention_forward", lib=_library)
def _forward_fake(text, tensors, integers, reals):
    kind, (q, _, v) = _kind(text), tensors[:3]
    return _outputs_fake(q, v, kind.fields["out_dtype"], kind.lse)


def _outputs_fake(q, v, out_dtype, with_lse):
    o_dtype = torch.float32 if out_dtype == "fp32" else q.dtype
    *rows, heads, _ = q.shape  # [batch, seqlen] or [total]
    lse = (*rows[:-1], heads, rows[-1]) if with_lse else (0,)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=o_dtype), q.new_empty(lse, dtype=torch.float32)


@torch.library.register_fake("flashjit::attention_backward", lib=_library)
def _backward_fake(text, tensors, integers, reals, o, lse, do, dlse):
    kind = _kind(text)
    written = *map(torch.empty_like, tensors[:3]), *kind._of_computed(tensors)
    return [written[place] for place in kind.returned]


@torch.library.register_fake("flashjit::qkv_forward", lib=_library)
def _qkv_forward_fake(text, q, k, v, integers, reals):
    return _forward_fake(text, (q, k, v), integers, reals)


@torch.library.register_fake("flashjit::qkv_backward", lib=_library)
def _qkv_backward_fake(text, q, k, v, integers, reals, o, lse, do):
    return tuple(map(torch.empty_like, (q, k, v)))


_library.define(
    "attention_backward_of_node(int node, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do) -> "
    "(Tensor, Tensor, Tensor)"
)


def _backward_of_node(node, q, k, v, o, lse, do):
    kind, numbers = _native.call_of_node(node)
    return _backward_of_graph(kind, numbers, do, None, o, lse, (q, k, v))


_library.impl("attention_backward_of_node", _backward_of_node, "CompositeImplicitAutograd")

# PyTorch's own node takes calls of q, k and v alone, if this is the operator that the extension knows.
_NODE_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool "
    "return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor "
    "cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"
)
_NODE_BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor attn_bias, bool[4] grad_input_mask, Tensor out, "
    "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
    "Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor "
    "grad_value, Tensor grad_attn_bias)"
)


def _register_node():
    name = "_scaled_dot_product_fused_attention_overrideable"
    ops = [getattr(getattr(torch.ops.aten, one, None), "default", None) for one in (name, name + "_backward")]
    schemas = [str(getattr(op, "_schema", "")).partition(name)[2] for op in ops]
    return schemas == [_NODE_SCHEMA, "_backward" + _NODE_BACKWARD_SCHEMA] and _native.register_node(ops[0]._op)


HAS_NODE = _register_node()


def _differentiate_twice(ctx, *gradients):
    raise UnsupportedError(
        "a gradient of a gradient of attention was asked for, and flashjit has no kernel for it: a loss without "
        "create_graph=True, or torch.nn.functional.scaled_dot_product_attention on its math backend, would work"
    )


_OF_ENTRIES = {"q", "k", "v", "o", "lse", "do", "dlse", "row_offset", "key_offset"}
_OF_ALL_ENTRIES = {"sink_logits", "alibi_slopes", "dropout_seed_tensor", "dropout_offset_tensor"}


def _folded(info, kind, tensors, dims):
    """The tensors with vmap's dimension as part of their batch dimension."""
    names, made = (*kind.fields["tensors"], "o", "lse", "do", "dlse"), []
    for name, one, dim in zip(names, tensors, dims):
        shared = name in _OF_ALL_ENTRIES and dim is None and name not in kind.fields["gradients"]
        if not shared and name not in _OF_ENTRIES or "cu_seqlens_q" in names:
            raise UnsupportedError(
                f"vmap of attention with {name}: q, k and v [batch, seqlen, heads, head_dim] alone can be mapped; the "
                "mapped dimension as part of the batch dimension of all arguments would work"
            )
        if not shared and one is not None:
            one = one.unsqueeze(0).expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            one = one.reshape(one.shape[0] * one.shape[1], *one.shape[2:])
        made.append(one)
    return made


def _unfolded(info, one):
    return one.reshape(info.batch_size, one.shape[0] // info.batch_size, *one.shape[1:])


@torch.library.register_vmap("flashjit::attention_forward", lib=_library)
def _forward_vmap(info, dims, text, tensors, integers, reals):
    kind = _kind(text)
    o, lse = torch.ops.flashjit.attention_forward(text, _folded(info, kind, tensors, dims[1]), integers, reals)
    return (_unfolded(info, o), _unfolded(info, lse) if kind.lse else lse), (0, 0 if kind.lse else None)


@torch.library.register_vmap("flashjit::attention_backward", lib=_library)
def _backward_vmap(info, dims, text, tensors, integers, reals, *more):
    folded = _folded(info, _kind(text), [*tensors, *more], [*dims[1], *dims[4:]])
    count = len(tensors)
    made = torch.ops.flashjit.attention_backward(text, folded[:count], integers, reals, *folded[count:])
    return [_unfolded(info, one) for one in made], [0] * len(made)


# ---- the call ----

_INTEGERS, _REALS = (int, torch.SymInt), (float, torch.SymFloat)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def attention_of_torch(values, named, mask, score, tables, block_mask, return_lse, out_dtype, kv_scale, bits,
                       heads_first=False):  # fmt: skip
    """flashjit.attention, of arguments in the order of their names, which are _ATTENTION and `named`."""
    if heads_first:  # the operators have one layout
        values = (*[one.transpose(1, 2) if isinstance(one, torch.Tensor) else one for one in values[:3]], *values[3:])
        made = attention_of_torch(
            values, named, mask, score, tables, block_mask, return_lse, out_dtype, kv_scale, bits
        )
        return (made[0].transpose(1, 2), made[1]) if return_lse else made.transpose(1, 2)
    names, types = _ATTENTION + named, tuple(map(type, values))
    places = _known_places.get(types)
    if places is None:
        values = _arguments(names, values)
        types = tuple(map(type, values))
        places = _known_places[types] = _places(names, values)
    for name, value in zip(("q", "k", "v"), values):
        if not isinstance(value, torch.Tensor):
            raise InvalidArgumentError(
                f"argument {name} is of type {type(value).__name__}: a tensor of PyTorch would work"
            )
    of_tensors, of_integers, of_reals = places
    tensors = [values[i] for i in of_tensors]
    integers, reals = [values[i] for i in of_integers], [values[i] for i in of_reals]
    device = tensors[0].device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors[:3] = [one.to(dtype) if one.dtype.is_floating_point else one for one in tensors[:3]]
    wants = tuple([one.requires_grad for one in tensors]) if torch.is_grad_enabled() else ()
    with_gradient = True in wants
    lse = return_lse or with_gradient
    if bits != "batch_invariant":
        deterministic = with_gradient and (bits or torch.are_deterministic_algorithms_enabled())
        bits = "deterministic" if deterministic else ""
    key = (mask, score, tables, block_mask, named, lse, out_dtype, kv_scale, bits, wants, places)
    if _is_traced(tensors):
        made = torch.ops.flashjit.attention(_text_of(*key), tensors, integers, reals)
    elif torch._C._are_functorch_transforms_active():
        made = _Transformed.apply(_text_of(*key), integers, reals, *tensors)
    else:
        try:
            kind = _kinds.get(key)
        except TypeError:
            kind = _kinds.get(frozen(key))
        if kind is None:
            kind = _kinds[frozen(key)] = _kind(_text_of(*key))
        numbers = (*integers, *reals)
        if with_gradient:
            return _native.attend_recorded((kind, numbers, bool(return_lse)), *tensors)
        made = _forward(kind, numbers, tensors)
    return made if return_lse else made[0]


@torch.compiler.allow_in_graph
def attention_in_graph(q, k, v, keywords):
    """flashjit.attention while torch.compile traces it, which does not look into this: each value that it looked at
    would be guarded, and asked for in each call."""
    lists = keywords.get("block_lists")
    if lists is not None:
        keywords = {**keywords, "block_lists": BlockLists(*lists)}
    _, _, _, alone, values, of_torch = parts_of_attention(q, k, v, **keywords)
    if not alone:
        raise InvalidArgumentError(
            "attention() has out, engine or stream while PyTorch traces it: a call without them would work"
        )
    return attention_of_torch(values, *of_torch)


def kind_of(mask, score, tables, block_mask, named, out_dtype, kv_scale, bits, heads_first, tensors, integers,
            reals, wants, all_deterministic):  # fmt: skip
    """The kind of a call with gradients, from places of arguments whose names are _ATTENTION and `named`."""
    wants, places = [place in wants for place in tensors], (tensors, integers, reals)
    bits = bits or ("deterministic" if all_deterministic else "")
    return _kind(
        _text_of(
            mask, score, tables, block_mask, named, True, out_dtype, kv_scale, bits, wants, places, bool(heads_first)
        )
    )


def _text_of(mask, score, tables, block_mask, named, lse, out_dtype, kv_scale, bits, wants, places,
             heads_first=False):  # fmt: skip
    names = _ATTENTION + named
    tensors, integers, reals = ([names[i] for i in some] for some in places)
    gradients = [name for name, one in zip(tensors, wants) if one and name not in ("q", "k", "v")]
    for name in gradients:
        if name in _ATTENTION and name != "sink_logits":
            raise UnsupportedError(
                f"argument {name} requires a gradient, and flashjit computes none for it: {name}.detach() would work"
            )
    return _text(mask, score, tables, block_mask, named, bool(lse), out_dtype, kv_scale, True in wants, bits,
                 heads_first, tensors, integers, reals, gradients)  # fmt: skip


_known_places: dict = {}


def _places(names, values):
    """The places of the tensors, of the integers and of the reals among arguments; others are None."""
    tensors, integers, reals = [], [], []
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            tensors.append(place)
        elif isinstance(value, _INTEGERS):
            integers.append(place)
        elif isinstance(value, _REALS):
            reals.append(place)
        elif value is not None:
            raise InvalidArgumentError(
                f"argument {names[place]} is of type {type(value).__name__}: a tensor of PyTorch or a number would work"
            )
    return tuple(tensors), tuple(integers), tuple(reals)


def _is_traced(tensors):
    """Whether somebody has to see the operators, or there is no memory behind a tensor."""
    return (
        tensors[0].is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or not all([type(one) in _PLAIN for one in tensors])
    )


def _arguments(names, values):
    """Tensors of PyTorch and numbers of Python, from those of NumPy, too."""
    return tuple(_argument(value, name) for value, name in zip(values, names))


def _argument(value, name):
    """A tensor or a number of Python, from those of NumPy, too."""
    if value is None or isinstance(value, (torch.Tensor, *_INTEGERS, *_REALS)):
        return value
    if hasattr(value, "__float__") and not hasattr(value, "__dlpack__"):
        return value.__index__() if hasattr(value, "__index__") else float(value)
    _native.describe(value, _SHOWN.get(name, name))  # refuses what is no tensor
    return torch.from_dlpack(value)
