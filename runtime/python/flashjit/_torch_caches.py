"""decode, append_kv and copy_kv as operators of PyTorch, flashjit::decode and so on, for what PyTorch traces.

They list the tensors that they write apart from those that they read. They have no gradients.
"""

import json
from functools import lru_cache

import torch

from . import _native
from ._errors import InvalidArgumentError
from ._functions import _SHOWN
from ._specs import Maker
from .torch import _arguments, _library, _outputs_fake, _places

_WRITTEN = ("k", "v", "q_out", "k_scale", "v_scale")


class _Kind:
    """A kind of launch: its function, by names of arguments."""

    def __init__(self, text):
        f = json.loads(text)
        self.lse, self.out_dtype = f["fields"].get("lse", False), f["fields"].get("o_dtype")
        self.tensors = [*f["written"], *f["tensors"]]
        names = (*self.tensors, *f["integers"], *f["reals"])
        maker = Maker(f["op"], f["op"], None, f["mask"], f["score"], f["fields"], f["tables"], tuple(f["named"]), None)
        shown = tuple(_SHOWN.get(name, name) for name in names)
        self.function = _native.Function(maker, names, shown, f["op"] == "decode", self.lse, None)

    def launch(self, written, tensors, integers, reals):
        return _native.call(self.function, None, None, *written, *tensors, *integers, *reals)


_kind = lru_cache(None)(_Kind)


def _text(op, mask, score, fields, tables, named, written, tensors, integers, reals):
    """The kind of a launch as text, by which the operators know it."""
    return json.dumps(locals())


_text._dynamo_marked_constant = True  # torch.compile computes it while it traces


_ARGUMENTS = "str kind, Tensor(a!)[] written, Tensor[] tensors, SymInt[] integers, float[] reals"
for _name, _returned in (("decode", "(Tensor, Tensor)"), ("append_kv", "()"), ("copy_kv", "()")):
    _library.define(f"{_name}({_ARGUMENTS}) -> {_returned}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def _decode(text, written, tensors, integers, reals):
    kind = _kind(text)
    made = kind.launch(written, tensors, integers, reals)
    return made if kind.lse else (made, made.new_empty(0, dtype=torch.float32))


def _write(text, written, tensors, integers, reals):
    _kind(text).launch(written, tensors, integers, reals)


for _device in ("CPU", "CUDA"):
    _library.impl("decode", _decode, _device)
    _library.impl("append_kv", _write, _device)
    _library.impl("copy_kv", _write, _device)


@torch.library.register_fake("flashjit::decode", lib=_library)
def _decode_fake(text, written, tensors, integers, reals):
    kind = _kind(text)
    of = dict(zip(kind.tensors, [*written, *tensors]))
    return _outputs_fake(of["q"], of["v"], kind.out_dtype, kind.lse)


@torch.library.register_fake("flashjit::append_kv", lib=_library)
@torch.library.register_fake("flashjit::copy_kv", lib=_library)
def _write_fake(text, written, tensors, integers, reals):
    pass


def launch_of_torch(op, names, values, writes, mask, score, fields, tables, named):
    """A launch of the operator `op`, of arguments in the order of their names, of which it writes those in `writes`."""
    if not torch.compiler.is_compiling():
        values = _arguments(names, values)
    places = [[names[place] for place in some] for some in _places(names, values)]
    of = dict(zip(names, values))
    if torch.is_grad_enabled():
        for name in places[0]:
            if of[name].requires_grad:
                raise InvalidArgumentError(
                    f"argument {name} requires a gradient, and {op} computes none: a call under torch.no_grad(), or "
                    f"with {name}.detach(), would work"
                )
    written = [name for name in _WRITTEN if name in writes and of[name] is not None]
    tensors = [name for name in places[0] if name not in written]
    text = _text(op, mask, score, fields, tables, named, written, tensors, *places[1:])
    arguments = [[of[name] for name in some] for some in (written, tensors, *places[1:])]
    return getattr(torch.ops.flashjit, op)(text, *arguments)
