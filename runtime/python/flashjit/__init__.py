"""Attention kernels from specs, at run time, on the CPU and on NVIDIA GPUs.

>>> import numpy as np, flashjit
>>> x = np.ones((1, 8, 2, 64), np.float32)
>>> flashjit.attention(x, x, x, mask="causal").shape
(1, 8, 2, 64)
"""

import sys

if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(
        "flashjit does not support free-threaded builds of CPython: its extension is for the limited API, which they "
        "do not have. A build of CPython with the GIL would work."
    )

from ._engine import Engine, Spec, default_engine
from ._errors import (
    CacheFailedError,
    CancelledError,
    CompileFailedError,
    CompilerUnavailableError,
    DeviceFailedError,
    Error,
    InternalError,
    InvalidArgumentError,
    InvalidSpecError,
    LimitExceededError,
    NotPrebuiltError,
    TargetUnavailableError,
    UnsupportedError,
)
from ._functions import BlockLists, append_kv, attention, copy_kv, decode, make_block_lists, merge
from ._native import Kernel, Prepared, version

# Loaded when they are first used, as is flashjit.parallel: a program that computes needs none.
_VIEWS = ("Picture", "Report", "draw_mask", "tune")


def __getattr__(name):
    if name in _VIEWS:
        from . import _views

        return getattr(_views, name)
    if name == "parallel":
        import importlib

        return importlib.import_module(".parallel", __name__)
    raise AttributeError(f"module 'flashjit' has no attribute '{name}'")


__version__ = version()

__all__ = [
    "BlockLists",
    "CacheFailedError",
    "CancelledError",
    "CompileFailedError",
    "CompilerUnavailableError",
    "DeviceFailedError",
    "Engine",
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "InvalidSpecError",
    "Kernel",
    "LimitExceededError",
    "NotPrebuiltError",
    "Picture",
    "Prepared",
    "Report",
    "Spec",
    "TargetUnavailableError",
    "UnsupportedError",
    "append_kv",
    "attention",
    "copy_kv",
    "decode",
    "default_engine",
    "draw_mask",
    "make_block_lists",
    "merge",
    "tune",
    "version",
]
