"""What flashjit has to know of an array framework beyond DLPack. A framework is imported only if its tensors come."""

import sys

from ._errors import UnsupportedError


def facts_of(kind):
    """What flashjit knows of a type of tensors: (is_numpy, has_memory, is_grad_enabled, is_deterministic, allocate,
    finish, current_stream, watching).

    has_memory is False of types whose tensors may stand for others. is_grad_enabled() says whether the framework wants
    gradients by tensors with requires_grad, is_deterministic() whether their bits have to repeat. allocate(like, shape,
    dtype) makes a tensor on the device of `like`. finish(output) is the form that a caller gets, or None.
    current_stream(device_index) is the address of a CUDA stream. watching: functions; if one of them says something, the
    framework has to see each call.
    """
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "numpy" in modules:
        return True, True, None, None, _numpy_empty, None, None, ()
    if "torch" in modules:
        torch = sys.modules["torch"]
        plain = kind in (torch.Tensor, torch.nn.Parameter)
        deterministic = torch._C._get_deterministic_algorithms  # what PyTorch's function in Python calls
        watching = (
            torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled,
            torch._C._are_functorch_transforms_active,
        )  # fmt: skip
        return False, plain, torch.is_grad_enabled, deterministic, _torch_empty, None, _torch_stream, watching
    if "cupy" in modules:
        return False, True, None, None, _cupy_empty, None, _cupy_stream, ()
    if modules & {"jax", "jaxlib"}:
        return False, True, None, None, _jax_empty, _jax_array, None, ()
    return False, True, None, None, _namespace_empty, None, _no_stream, ()


def _numpy_empty(like, shape, dtype):
    numpy = sys.modules["numpy"]
    if dtype == "uint8":  # scratch memory, which begins at a multiple of 64 bytes
        room = numpy.empty(shape[0] + 63, numpy.uint8)
        begin = -room.ctypes.data % 64
        return room[begin : begin + shape[0]]
    if dtype == "bf16":
        import ml_dtypes

        return numpy.empty(shape, ml_dtypes.bfloat16)
    return numpy.empty(shape, _NAMES.get(dtype, dtype))


_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _torch_empty(like, shape, dtype):
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, _NAMES.get(dtype, dtype)), device=like.device)


def _torch_stream(index):
    return sys.modules["torch"].cuda.current_stream(index).cuda_stream


def _cupy_empty(like, shape, dtype):
    cupy = sys.modules["cupy"]
    if dtype == "bf16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    with like.device:
        return cupy.empty(shape, _NAMES.get(dtype, dtype))


def _cupy_stream(index):
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(index):
        return cupy.cuda.get_current_stream().ptr


def _jax_empty(like, shape, dtype):
    import numpy  # noqa: F401

    if next(iter(like.devices())).platform != "cpu":
        raise UnsupportedError(
            "JAX's arrays cannot be written in place, and JAX tells no stream, so this function takes its arrays on "
            "CPUs alone: flashjit.jax.attention, or torch.from_dlpack(array), would work"
        )
    return _numpy_empty(like, shape, dtype)


def _jax_array(output):
    import jax

    return jax.numpy.asarray(output)


def _namespace_empty(like, shape, dtype):
    namespace = like.__array_namespace__()
    return namespace.empty(shape, dtype=getattr(namespace, _NAMES.get(dtype, dtype)), device=like.device)


def _no_stream(index):
    raise UnsupportedError(
        "flashjit does not know the current stream of this framework: the keyword stream, the address of a CUDA "
        "stream, would work"
    )
