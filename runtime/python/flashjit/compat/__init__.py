"""The interfaces of other attention libraries, on flashjit: see drop_ins.md."""

_FLEX = ("BlockMask", "and_masks", "create_block_mask", "flex_attention", "noop_mask", "or_masks")


def __getattr__(name):
    if name in _FLEX:
        from . import _flex  # takes PyTorch's compiler, which the others need not load

        return getattr(_flex, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
