"""The spec of a call, from its tensors' dtypes and its keywords."""

import re

from ._engine import Spec, default_engine
from ._errors import InvalidArgumentError

# Names that stand for formulas, and the table or scalar that each reads.
_BUILT_IN = {"softcap": "softcap", "alibi": "alibi_slopes", "bias": "bias", "prefix_lm": "prefix"}
# The sizes that such tables are declared with if they have a gradient or another dtype than this (None: the spec's).
_BUILT_IN_TABLES = {
    "alibi_slopes": (["heads_q"], "fp32"),
    "bias": (["batch or 1", "heads_q or 1", "seqlen_q or 1", "seqlen_k"], None),
}
_DTYPES = {"bf16", "fp16", "fp32"}


def frozen(value):
    """The value as part of a key: dicts and lists by their contents."""
    if isinstance(value, dict):
        return ("dict",) + tuple((name, frozen(one)) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen(one) for one in value)
    return value


def _items(value):
    if value is None:
        return []
    return [value] if isinstance(value, (str, dict)) else list(value)


def _formula(item):
    return item.get("formula", "") if isinstance(item, dict) else item


class Maker:
    """Writes the spec of a call when its tensors' dtypes and dims come for the first time."""

    def __init__(self, name, op, engine, mask, score, fields, tables, named, block_mask):
        self.name, self.op, self.engine = name, op, engine
        self.mask, self.score, self.fields = _items(mask), _items(score), fields
        self.tables, self.named, self.block_mask = dict(tables or {}), named, block_mask

    def __call__(self, device, dtypes, head_dim, head_dim_v, out_dtype):
        dtype = dtypes.get("q") or dtypes.get("k_new")
        if self.op == "copy_kv":  # an 8-bit row is copied alike, whatever its numbers were rounded from
            dtype = dtypes["k"] if dtypes["k"] in _DTYPES else "bf16"
        if dtype not in _DTYPES:
            raise InvalidArgumentError(f"argument q has dtype {dtype}: bf16, fp16 and, on CPUs, fp32 would work")
        fields = {"op": self.op, "dtype": dtype, "head_dim": head_dim}
        if head_dim_v != head_dim:
            fields["head_dim_v"] = head_dim_v
        if self.op == "make_block_lists":
            fields["dtype"] = dtype
        elif dtypes["k"] != dtype:
            if dtypes["k"] in _DTYPES:
                raise InvalidArgumentError(
                    f"argument k has dtype {dtypes['k']} and q {dtype}: k of dtype {dtype}, or an 8-bit cache in pages "
                    "or for decode, would work"
                )
            # Bytes are the rows of one format only.
            fields["kv_dtype"] = "fp8_ds_mla" if dtypes["k"] == "uint8" else dtypes["k"]
        o_dtype = dtype
        if self.op in ("forward", "decode"):
            o_dtype = self.fields.get("o_dtype") or out_dtype or dtype
        elif self.op == "backward":
            o_dtype = dtypes["o"]
        if o_dtype != dtype:
            fields["o_dtype"] = o_dtype
        fields.update((name, value) for name, value in self.fields.items() if name not in ("o_dtype", "kv_scale"))
        if "kv_dtype" in fields and self.fields.get("kv_scale"):
            fields["kv_scale"] = self.fields["kv_scale"]
        if "rotary" in fields and "rotary_cos" in dtypes:
            fields["rotary"] = {"tables": dtypes["rotary_cos"], **fields["rotary"]}
        mask = self.masks(dtypes)
        if mask:
            fields["mask"] = mask
        if self.score:
            fields["score"] = self.score
        fields["varlen"] = "cu_seqlens_q" in dtypes or self.fields.get("varlen", False)
        fields["paged"] = "page_table" in dtypes
        for name in ("varlen", "paged"):
            if not fields[name]:
                del fields[name]
        if "sink_logits" in dtypes:
            fields["sink_logits"] = True
        if "row_offset" in dtypes or "key_offset" in dtypes:
            fields["offsets"] = True
        self.declare(fields, dtypes)
        return self.engine or default_engine(device), Spec(fields), o_dtype

    def masks(self, dtypes):
        mask = list(self.mask)
        kinds = {one if isinstance(one, str) else one.get("kind") for one in mask}

        def add(kind, **fields):
            if kind not in kinds:
                mask.append({"kind": kind, **fields} if fields else kind)

        if self.op != "append_kv":
            aligned = {one["align"] for one in mask if isinstance(one, dict) and "align" in one}
            if dtypes.keys() & {"window_left", "window_right", "num_sinks"}:
                more = {"sinks": True} if "num_sinks" in dtypes else {}
                if len(aligned) == 1:
                    more["align"] = next(iter(aligned))
                add("sliding_window", **more)
            counts_keys = self.op == "decode" or "page_table" in dtypes
            if "seqlens_q" in dtypes or "seqlens_k" in dtypes and not counts_keys:
                add("padding")
            if "tree_bits" in dtypes:
                add("tree")
        if self.block_mask:
            mask.insert(0, self.block_mask)
        return mask

    def declare(self, fields, dtypes):
        """Declares the tables and scalars that the call was given by keyword."""
        given = _BUILT_IN.keys() & {one for one in (*self.mask, *self.score) if isinstance(one, str)}
        built_in = {_BUILT_IN[one] for one in given}
        words = set(re.findall(r"[A-Za-z_]\w*", " ".join(_formula(one) for one in (*self.mask, *self.score))))
        tables, scalars = {}, {}
        for name in self.named:
            if name not in dtypes and name in built_in | words:
                raise InvalidArgumentError(f"argument {name} is None, and a formula reads it: a tensor or number would work")
            if name in built_in:
                sizes, dtype = _BUILT_IN_TABLES.get(name, ((), None))
                with_gradient = f"d_{name}" in dtypes
                if sizes and (with_gradient or dtypes[name] != (dtype or fields["dtype"])):
                    tables[name] = {"dtype": dtypes[name], "shape": sizes, "grad": with_gradient}
                continue
            if name not in words:
                raise unknown_keyword(self.name, name)
            if dtypes.get(name) in ("float", "int"):
                scalars[name] = "fp32" if dtypes[name] == "float" else "int32"
                continue
            declared = self.tables.get(name)
            if declared is None:
                raise InvalidArgumentError(
                    f"table '{name}' has no shape: tables={{'{name}': ('batch', 'seqlen_k')}}, with the names of its "
                    "own dimensions, would work"
                )
            if not isinstance(declared, dict):
                declared = {"shape": list(declared)}
            tables[name] = {"dtype": dtypes.get(name), **declared}
            if self.op == "backward":
                tables[name]["grad"] = f"d_{name}" in dtypes
        for name in self.tables:
            if name not in self.named:
                raise InvalidArgumentError(f"table '{name}' is declared, but not given: {name}=tensor would work")
        if tables:
            fields["tables"] = tables
        if scalars:
            fields["scalars"] = scalars


KEYWORDS: dict = {}


def unknown_keyword(function, name):
    import difflib  # only failures need it

    known = KEYWORDS[function]
    near = difflib.get_close_matches(name, known, 1)
    return InvalidArgumentError(
        f"{function}() has no keyword '{name}', and no formula of mask or score reads it: "
        + (f"'{near[0]}'" if near else "one of " + ", ".join(sorted(known)))
        + " would work"
    )
