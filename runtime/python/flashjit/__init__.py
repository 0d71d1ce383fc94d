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
from ._functions import BlockLists, append_kv, attention, decode, make_block_lists, merge
from ._native import Kernel, Prepared, version

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
    "Prepared",
    "Spec",
    "TargetUnavailableError",
    "UnsupportedError",
    "append_kv",
    "attention",
    "decode",
    "default_engine",
    "make_block_lists",
    "merge",
    "version",
]
