"""Plugins for inference engines, which load these by the entry points of the package."""

import warnings


def vllm():
    """Makes vLLM's --attention-backend CUSTOM flashjit's backend."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        warnings.warn(f"flashjit offers no attention backend to this vLLM, 0.33 or newer would work: {error}", stacklevel=2)
        return
    if not AttentionBackendEnum.CUSTOM.is_overridden():  # by another plugin
        register_backend(AttentionBackendEnum.CUSTOM, "flashjit.compat.vllm.FlashjitBackend")


def sglang():
    """Adds flashjit to SGLang's --attention-backend."""
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        warnings.warn(
            f"flashjit offers no attention backend to this SGLang, 0.5.23 or newer would work: {error}", stacklevel=2
        )
        return
    if "flashjit" not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices(["flashjit"])
    register_attention_backend("flashjit")(_sglang_backend)


def _sglang_backend(runner):
    from .sglang import FlashjitBackend

    return FlashjitBackend(runner)
