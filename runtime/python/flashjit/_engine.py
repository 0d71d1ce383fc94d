"""Engines: those that callers make, and one for each device that functions use by default."""

import os
import sys
import threading

from . import _native


class Engine(_native.Engine):
    """A device, its compiler and its caches.

    Engine(device="cpu", *, target=None, cache_dir=None, cache_path=None, cache_max_bytes=0, num_threads=0,
    policy="heuristic", tune_seconds=0, compile_seconds=0, compile_bytes=0, cache_remote=None, cache_trust=None,
    signing_key=None, store_configs=False)

    device is "cpu" or "cuda:N". Options that are 0 or None have the defaults of EngineOptions in flashjit.hpp.
    Ctrl-C ends a compilation or a tuning that the main thread waits for. In a child of fork() engines of CPUs work, and
    those of GPUs refuse.

    >>> import flashjit
    >>> engine = flashjit.Engine("cpu")
    >>> spec = flashjit.Spec({"op": "forward", "dtype": "fp32", "head_dim": 64})
    >>> kernel = engine.get(spec, batch=2, seqlen_q=128, seqlen_k=128, num_heads_q=4, num_heads_kv=2)
    >>> kernel.info["spec"]["op"]
    'forward'
    """

    def __new__(cls, device="cpu", **options):
        if isinstance(device, str) and device.startswith("cuda"):
            _offer_nvrtc()
        return super().__new__(cls, device, **options)

    def __init__(self, device="cpu", **options):
        self.device = device
        self._functions = {}

    def get(self, spec, /, **shape):
        """The Kernel for the spec (a Spec, JSON text or a dict) at sizes like these.

        Sizes: batch, seqlen_q, seqlen_k, num_heads_q (each 1 by default), num_heads_kv (num_heads_q), page_size,
        total_q, total_k (0). The first call compiles or loads the kernel. The kernel keeps its engine alive.
        """
        return super().get(spec if isinstance(spec, _native.Spec) else Spec(spec), **shape)


class Spec(_native.Spec):
    """A kernel's computation, from JSON text or a dict of the fields in tools/spec.schema.json.

    >>> import flashjit
    >>> flashjit.Spec({"op": "forward", "dtype": "fp32", "head_dim": 64})
    Spec('{"op": "forward", "dtype": "fp32", "head_dim": 64}')
    """

    def __repr__(self):
        return f"Spec({self.json!r})"

    def _repr_json_(self):
        import json

        return json.loads(self.json)


_engines: dict = {}
_functions: dict = {}
_lock = threading.Lock()


def default_engine(device):
    """The engine of this device ("cpu", "cuda:N") that functions use unless they are given another."""
    engine = _engines.get(device)
    if engine is None:
        with _lock:
            engine = _engines.get(device)
            if engine is None:
                engine = _engines[device] = Engine(device)
    return engine


def functions_of(engine):
    """The cache of calls of this engine; of None: of the default engines."""
    return _functions if engine is None else engine._functions


def _forked():
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _offer_nvrtc():
    """Names the NVRTC of pip's wheels, unless the environment names one."""
    if any(os.environ.get(name) for name in ("FLASHJIT_NVRTC", "CUDA_HOME", "CUDA_PATH")):
        return
    for folder in sys.path:
        for place in ("cu13/lib", "cuda_nvrtc/lib"):
            path = os.path.join(folder, "nvidia", place)
            if folder and os.path.isdir(path) and any(n.startswith("libnvrtc.so") for n in os.listdir(path)):
                os.environ["FLASHJIT_NVRTC"] = path
                return
