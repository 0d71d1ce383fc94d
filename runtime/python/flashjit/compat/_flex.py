"""FlexAttention's functions on flashjit: score_mod and mask_mod become formulas, a BlockMask block lists."""

import re
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask, or_masks

from .._engine import Spec
from .._errors import Error, InvalidArgumentError
from .._functions import BlockLists, attention, make_block_lists, parts_of_attention
from .._native import call_alone
from ._attend import contiguous, refuse
from ._captured import Captured
from ._trace import Traced

__all__ = ["BlockMask", "and_masks", "create_block_mask", "flex_attention", "noop_mask", "or_masks"]

_PREFIXES = {"score_mod": "s", "mask_mod": "m"}
UNLISTED = 1 << 30  # the size of a block in a mask without lists, as PyTorch makes where none is given
_WHOLE, _ASKED = -1, -2  # of listed blocks: needs no test; is tested by the mask
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 256


# ---- functions ----


class _Function:
    """A score_mod or mask_mod, traced, with what it has captured."""

    def __init__(self, function, kind, device):
        self.captured, self.device = Captured(function), device
        self.traced = _traced(function, kind, self.captured, device)
        self.formula = self.traced.formula
        # Numbers and tensors by name, with the versions of the tensors that they are copies of. None: made anew in each
        # call, as what PyTorch computes is, and copies with gradients.
        self._named, self._copied = None, []
        self._sizes, self._tables = None, None

    def holds(self, device):
        return device == self.device and self.captured.holds()

    def named(self):
        if self._named is not None:
            for tensor, version in self._copied:
                if tensor._version != version:
                    break
            else:
                return self._named
        made, copied = self.traced.named(self.captured, self.device)
        fixed = self.traced.is_fixed and not any(one.requires_grad or one.is_inference() for one in copied)
        self._named, self._copied = (made, [(one, one._version) for one in copied]) if fixed else (None, [])
        return made

    def tables(self, batch, heads_q, seqlen_q, seqlen_k, named):
        """The dimensions of the tables among `named`, in a launch of these sizes."""
        tables = self.traced.tables
        if not tables:
            return None
        sizes = (batch, heads_q, seqlen_q, seqlen_k, *[named[name].requires_grad for name in tables])
        if sizes != self._sizes:
            of_launch = {"batch": batch, "heads_q": heads_q, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
            self._sizes, self._tables = sizes, self.traced.dimensions(of_launch, named)
        return self._tables


_functions = {kind: WeakKeyDictionary() for kind in _PREFIXES}
_traces: dict = {}


def _function(function, kind, device):
    known = _functions[kind]
    try:
        made = known.get(function)
    except TypeError:  # an object that cannot be a key
        return _Function(function, kind, device)
    if made is None or not made.holds(device):
        made = known[function] = _Function(function, kind, device)
    return made


def _traced(function, kind, captured, device):
    """The trace of a function, with scalars in the places of its numbers where it can be."""

    def trace(symbolic):
        return Traced(function, kind, captured, device, _PREFIXES[kind], symbolic)

    if not captured.is_known:
        return trace(False)
    key = kind, device, captured.key
    made = _traces.get(key)
    if made is None and captured.numbers:
        made = "constants"
        if captured.numbers_are_plain:
            try:
                traced = trace(True)
                if _fits(traced, kind):
                    made = traced
            except Error:  # numbers that decide what the function does, or that an operator must know
                pass
        _traces[key] = made
    if made == "constants":
        key = *key, tuple(map(repr, captured.numbers))
        made = _traces.get(key)
    if made is None:
        made = _traces[key] = trace(False)
    return made


def _fits(traced, kind):
    """Whether the formula's scalars leave it within the limits of a spec: to divide by one costs more."""
    fields = {
        "tables": {
            name: {"dtype": one.table_dtype, "shape": list(one.shape) or [1], "grad": kind == "score_mod" and one.dtype.is_floating_point}
            for name, one in traced.tables.items()
        },
        "scalars": {**dict.fromkeys(traced.sizes, "int32"), **traced.types},
        ("mask" if kind == "mask_mod" else "score"): [traced.formula],
    }
    try:
        for op in ("forward", "backward"):
            Spec({"op": op, "dtype": "bf16", "head_dim": 64, **fields})
    except Error:
        return False
    return True


# ---- block masks ----

_OF_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_lists_of: WeakKeyDictionary = WeakKeyDictionary()


def _sizes(block_size):
    return (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)


def _has_lists(sizes):
    return all(_SMALLEST_BLOCK <= one <= _LARGEST_BLOCK and one % _SMALLEST_BLOCK == 0 for one in sizes)


def _states(counts, indices, blocks, state):
    """For each query block and key block whether it is listed: `state` or 0."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    made = torch.zeros((*counts.shape, blocks + 1), dtype=torch.int32, device=indices.device)
    return made.scatter_(-1, torch.where(listed, indices, blocks).long(), state)[..., :-1]


def _lists_from(block_mask, blocks, of_masks):
    """The BlockLists of a BlockMask with so many blocks of keys."""
    states = _states(block_mask.kv_num_blocks, block_mask.kv_indices, blocks, _ASKED if of_masks else _WHOLE)
    if block_mask.full_kv_num_blocks is not None:
        states = states + _states(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks, _WHOLE)
    batch, heads, rows, _ = states.shape
    kept = states != 0
    room = rows * blocks
    begins = torch.arange(0, batch * heads * room, room, device=states.device).reshape(batch, heads, 1)
    offsets = (torch.nn.functional.pad(kept.sum(-1).cumsum(-1), (1, 0)) + begins).int()
    places = torch.where(kept.flatten(2), kept.flatten(2).cumsum(-1) - 1, room)
    keys = torch.arange(blocks, device=states.device, dtype=torch.int32).expand(batch, heads, rows, blocks)

    def placed(x):
        made = torch.zeros((batch, heads, room + 1), dtype=torch.int32, device=states.device)
        return made.scatter_(-1, places, x.flatten(2))[..., :-1].flatten()

    sizes = block_mask.BLOCK_SIZE
    return BlockLists(offsets, placed(keys), placed(states) if of_masks else None, None, *sizes, heads > 1, of_masks)


def _lists(block_mask, query, key, formula):
    """(BlockLists or None) of a BlockMask."""
    batch, heads, rows, _ = query.shape
    if tuple(block_mask.shape[-2:]) != (rows, key.shape[2]):
        raise InvalidArgumentError(
            f"block_mask is of {block_mask.shape[-2]} rows and {block_mask.shape[-1]} keys, and query and key have {rows} "
            f"and {key.shape[2]}: one of create_block_mask(..., Q_LEN={rows}, KV_LEN={key.shape[2]}) would work"
        )
    of_batch, of_heads = block_mask.kv_num_blocks.shape[:2]
    if of_batch not in (1, batch) or of_heads not in (1, heads):
        raise InvalidArgumentError(
            f"block_mask is of {of_batch} batch entries and {of_heads} heads, and query has {batch} and {heads}: as many, "
            "or 1, would work"
        )
    if not _has_lists(block_mask.BLOCK_SIZE):
        if formula is None:
            raise InvalidArgumentError(
                f"block_mask has blocks of {block_mask.BLOCK_SIZE} and no mask_mod: multiples of {_SMALLEST_BLOCK} up to "
                f"{_LARGEST_BLOCK}, or a mask_mod, would work"
            )
        return None  # an index of the mask alone
    # Lists of all heads or entries, of which the mask keeps different blocks, would be those of the first.
    if of_heads < heads and _reads("head", formula) or of_batch < batch and _reads("batch", formula):
        return None
    made = _lists_of.get(block_mask)
    version = formula is None, *[(id(one), _version(one)) for one in (getattr(block_mask, x) for x in _OF_LISTS)]
    if made is None or made[0] != version:
        made = version, _lists_from(block_mask, -(-key.shape[2] // block_mask.BLOCK_SIZE[1]), formula is not None)
        _lists_of[block_mask] = made
    return made[1]


def _version(tensor):
    """Counts changes of the contents, but not those of tensors of inference mode."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def _reads(name, formula):
    return formula is not None and re.search(rf"\b{name}\b", formula)


def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False, **more):
    """PyTorch's BlockMask of mask_mod(b, h, q_idx, kv_idx), which flashjit makes without the whole mask in memory.

    B, H: batch entries and heads that the mask differs in, or None. BLOCK_SIZE: rows and keys of a block, or both.
    `more` goes to PyTorch's function, as do sizes that flashjit has no lists of.
    """
    sizes = _sizes(BLOCK_SIZE)
    if device is None:
        accelerator = torch.accelerator.current_accelerator()
        device = accelerator.type if accelerator else "cpu"
    if more or not _has_lists(sizes):
        return of_torch.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, **more)
    device = torch.device(device)
    function = _function(mask_mod, "mask_mod", device.type)
    named = function.named()
    per_head = (H or 1) > 1 or bool(_reads("head", function.formula))
    # Sizes alone count of these.
    q, k = (torch.empty((B or 1, length, H or 1, 8), dtype=torch.bfloat16, device=device) for length in (Q_LEN, KV_LEN))
    lists = make_block_lists(
        q, k, mask={"formula": function.formula}, block_m=sizes[0], block_n=sizes[1], per_head=per_head,
        tables=function.tables(B or 1, H or 1, Q_LEN, KV_LEN, named), **named,
    )  # fmt: skip
    batch, heads, rows = lists.block_offsets.shape
    rows, blocks = rows - 1, -(-KV_LEN // sizes[1])
    offsets, room = lists.block_offsets - lists.block_offsets[..., :1], rows * blocks
    places = torch.arange(room, dtype=torch.int32, device=device).expand(batch, heads, room).contiguous()
    of_row = torch.searchsorted(offsets[..., 1:].contiguous(), places, right=True)
    listed = places < offsets[..., -1:]
    target = torch.where(listed, of_row * blocks + lists.block_indices.reshape(places.shape), room)
    states = torch.zeros((batch, heads, room + 1), dtype=torch.int32, device=device)
    states.scatter_(-1, target, lists.block_bitmask_of.reshape(places.shape))
    states = states[..., :-1].reshape(batch, heads, rows, blocks)
    if Q_LEN % sizes[0]:  # PyTorch calls no block whole that ends beyond the lengths
        states[:, :, -1][states[:, :, -1] == _WHOLE] = _ASKED
    if KV_LEN % sizes[1]:
        states[..., -1][states[..., -1] == _WHOLE] = _ASKED
    arrays = []
    for state in (_ASKED, _WHOLE):
        kept = states == state
        arrays += [kept.sum(-1, dtype=torch.int32), kept.int().argsort(dim=-1, descending=True, stable=True).int()]
    return BlockMask.from_kv_blocks(*arrays, BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN))


# ---- attention ----


def flex_attention(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
                   kernel_options=None, *, return_aux=None):  # fmt: skip
    """Attention of query [B, Hq, L, E] to key [B, Hkv, S, E] and value [B, Hkv, S, Ev], with gradients.

    score_mod(score, b, h, q_idx, kv_idx) changes scores, block_mask says which keys a row sees. Both are compiled into
    the kernel: tensors that they read become tables, numbers arguments of the launch. kernel_options are hints to
    PyTorch's kernels, and change nothing here.

    Returns o [B, Hq, L, Ev]; with return_lse a pair of it and the log-sum-exp, float32 [B, Hq, L]; with return_aux a pair
    of it and an AuxOutput.
    """
    if torch.compiler.is_compiling():
        return _uncompiled(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)
    return _attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)


class _Plan:
    """What flashjit.attention is called with, for one score_mod and block_mask, and tensors of these sizes."""

    def __init__(self, query, key, score_mod, block_mask, enable_gqa):
        device = "cuda" if query.is_cuda else query.device.type
        self._sizes = query.shape, key.shape, query.is_cuda, enable_gqa
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise InvalidArgumentError(
                f"query has {query.shape[1]} heads and key {key.shape[1]}: as many, or enable_gqa=True, would work"
            )
        batch, heads, rows, _ = query.shape
        self._launch = batch, heads, rows, key.shape[2]
        self._score = None if score_mod is None else _function(score_mod, "score_mod", device)
        self._mask_mod = None if block_mask is None else block_mask.mask_mod
        self._mask = None if self._mask_mod in (None, noop_mask) else _function(self._mask_mod, "mask_mod", device)
        used = {"score": (self._score, "score"), "mask": (self._mask, "(0 == 0)")}
        used = {name: one for name, (one, nothing) in used.items() if one and one.formula != nothing}
        self._functions = list(used.values())
        self.fields = {name: (one.formula,) for name, one in used.items()}
        self._lists = [(name, getattr(block_mask, name)) for name in _OF_LISTS] if block_mask is not None else []
        self._lists = [(name, one, _version(one)) for name, one in self._lists if one is not None]
        if block_mask is not None and block_mask.BLOCK_SIZE[0] < UNLISTED:
            self.fields["block_lists"] = _lists(block_mask, query, key, self.fields.get("mask", (None,))[0])
        self.expands = key.shape[0] == 1 and batch > 1
        # The keywords, what they were made of, and by return_lse the native function and its arguments after scale.
        self._keywords, self._named, self._wants, self._bound = None, None, [], {}

    def holds(self, query, key, block_mask, enable_gqa):
        return (
            (query.shape, key.shape, query.is_cuda, enable_gqa) == self._sizes
            and (self._score is None or self._score.captured.holds())
            and (
                block_mask is None
                or block_mask.mask_mod is self._mask_mod
                and (self._mask is None or self._mask.captured.holds())
                and self._has_same_lists(block_mask)
            )
        )

    def _has_same_lists(self, block_mask):
        for name, one, version in self._lists:
            if getattr(block_mask, name) is not one or version is not None and one._version != version:
                return False
        return True

    def keywords(self):
        """Those of flashjit.attention: masks, scores, lists, tables and scalars."""
        named = [one.named() for one in self._functions]
        if self._keywords is not None and self._are_those_before(named):
            return self._keywords
        tables = [one.tables(*self._launch, of_one) for one, of_one in zip(self._functions, named)]
        made = dict(self.fields)
        for one in named:
            made.update(one)
        if any(tables):
            made["tables"] = {name: value for one in tables if one for name, value in one.items()}
        self._keywords, self._named, self._bound = made, named, {}
        self._wants = [(x, x.requires_grad) for one in self._functions for x in one.captured.tensors]
        return made

    def _are_those_before(self, named):
        for one, before in zip(named, self._named):
            if one is not before:
                return False
        for tensor, wants in self._wants:
            if tensor.requires_grad is not wants:
                return False
        return True

    def call(self, query, key, value, scale, return_lse):
        keywords, bound = self.keywords(), self._bound.get(return_lse)
        if bound is None:
            function, _, _, _, values, _ = parts_of_attention(
                query, key, value, return_lse=return_lse, heads_first=True, **keywords
            )
            bound = self._bound[return_lse] = function, values[4:]
        function, more = bound
        made = call_alone(function, query, key, value, scale, *more)
        if made is NotImplemented:  # PyTorch has to see the call
            return attention(query, key, value, scale=scale, return_lse=return_lse, heads_first=True, **keywords)
        return made


_plans: dict = {}


def _plan(query, key, score_mod, block_mask, enable_gqa):
    place = id(score_mod), id(block_mask)
    known = _plans.get(place)
    if known is not None:
        plan, of_score, of_mask = known
        if (
            (of_score is None or of_score() is score_mod)
            and (of_mask is None or of_mask() is block_mask)
            and plan.holds(query, key, block_mask, enable_gqa)
        ):
            return plan
    plan = _Plan(query, key, score_mod, block_mask, enable_gqa)

    def forget(_):
        _plans.pop(place, None)

    try:
        refs = [None if one is None else ref(one, forget) for one in (score_mod, block_mask)]
    except TypeError:  # an object without weak references
        return plan
    _plans[place] = plan, *refs
    return plan


def _attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux):
    plan = _plan(query, key, score_mod, block_mask, enable_gqa)
    if plan.expands:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    lse = return_lse
    if return_aux is not None:
        refuse("flex_attention", max_scores=(return_aux.max_scores, "the log-sum-exp"))
        lse = return_aux.lse
    made = plan.call(
        query if query.is_contiguous() else contiguous(query), key if key.is_contiguous() else contiguous(key),
        value if value.is_contiguous() else contiguous(value), scale, bool(lse),
    )  # fmt: skip
    if return_aux is None:
        return made
    return made[0] if lse else made, of_torch.AuxOutput(lse=made[1] if lse else None)


_uncompiled = torch.compiler.disable(_attend)
