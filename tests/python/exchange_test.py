"""DLPack's C exchange API, by a type of tensors that has nothing else."""

import ctypes
import unittest

import flashjit
import numpy as np
from reference import attention, check, random

PyObject, Pointer = ctypes.py_object, ctypes.c_void_p
REAL = 2  # DLPack's code of floating-point numbers


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", Pointer),
        ("device", Device),
        ("rank", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class Managed(ctypes.Structure):
    _fields_ = [("version", Version), ("context", Pointer), ("deleter", Pointer), ("flags", ctypes.c_uint64),
                ("tensor", Tensor)]  # fmt: skip


SetError = ctypes.PYFUNCTYPE(None, Pointer, ctypes.c_char_p, ctypes.c_char_p)
Allocate = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Tensor), ctypes.POINTER(ctypes.POINTER(Managed)), Pointer, SetError
)
FromManaged = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(Managed), ctypes.POINTER(Pointer))
FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, PyObject, ctypes.POINTER(Tensor))
Stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(Pointer))


class Api(ctypes.Structure):
    _fields_ = [("version", Version), ("previous", Pointer), ("allocate", Allocate), ("managed", Pointer),
                ("from_managed", FromManaged), ("from_object", FromObject), ("stream", Stream)]  # fmt: skip


def filled(tensor, array):
    """Describes the array; what it points to lives as long as the array's owner keeps the result."""
    sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))
    tensor.data, tensor.device, tensor.rank = array.ctypes.data, Device(1, 0), array.ndim
    tensor.dtype, tensor.byte_offset = DataType(REAL, 8 * array.itemsize, 1), 0
    tensor.shape, tensor.strides = sizes, strides
    return sizes, strides


class Array:
    """A tensor around an array of NumPy."""

    full = False

    def __init__(self, array):
        self.array, self.kept = array, None


made = {}  # arrays behind managed tensors, by address


@Allocate
def allocate(like, result, context, set_error):
    if Array.full:
        set_error(context, b"MemoryError", b"nothing is left")
        return -1
    tensor = like.contents
    dtype = {16: np.float16, 32: np.float32, 8: np.uint8}[tensor.dtype.bits]
    array, managed = np.empty([tensor.shape[i] for i in range(tensor.rank)], dtype), Managed()
    made[ctypes.addressof(managed)] = array, managed, filled(managed.tensor, array)
    result[0] = ctypes.pointer(managed)
    return 0


@FromManaged
def from_managed(managed, result):
    wrapped = Array(made.pop(ctypes.addressof(managed.contents))[0])
    ctypes.pythonapi.Py_IncRef(PyObject(wrapped))
    result[0] = id(wrapped)
    return 0


@FromObject
def from_object(wrapped, result):
    if wrapped.array is None:
        return -1  # callbacks of ctypes cannot leave an exception
    wrapped.kept = filled(result.contents, wrapped.array)
    return 0


@Stream
def stream(kind, index, result):
    return 0


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = PyObject, [Pointer, ctypes.c_char_p, Pointer]
known = Api(Version(1, 3), None, allocate, None, from_managed, from_object, stream)
newer = Api(Version(7, 0), ctypes.addressof(known), Allocate(), None, FromManaged(), FromObject(), Stream())


class Newer(Array):
    """Its functions are of a version that nobody knows yet; known ones are behind them."""


Array.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(known), b"dlpack_exchange_api", None)
Newer.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(newer), b"dlpack_exchange_api", None)


class Exchange(unittest.TestCase):
    def inputs(self, kind, dtype=np.float32):
        return [kind(random((1, 9, heads, 32), dtype, seed)) for seed, heads in enumerate((4, 2, 2))]

    def test_results(self):
        for kind in (Array, Newer):
            for dtype in (np.float32, np.float16):
                with self.subTest(kind=kind, dtype=dtype):
                    q, k, v = self.inputs(kind, dtype)
                    o, lse = flashjit.attention(q, k, v, return_lse=True)
                    self.assertIsInstance(o, Array)
                    wanted, wanted_lse, bound, bound_lse = attention(q.array, k.array, v.array)
                    check(self, o.array, wanted, bound)
                    check(self, lse.array, wanted_lse, bound_lse, "lse")
        self.assertFalse(made)

    def test_strides(self):
        q, k, v = self.inputs(Array)
        turned = Array(np.ascontiguousarray(q.array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3))
        np.testing.assert_array_equal(flashjit.attention(turned, k, v).array, flashjit.attention(q, k, v).array)

    def test_failures(self):
        q, k, v = self.inputs(Array)
        with self.assertRaisesRegex(flashjit.InvalidArgumentError, "argument k: the framework gave no reason"):
            flashjit.attention(q, Array(None), v)
        Array.full = True
        try:
            with self.assertRaisesRegex(flashjit.DeviceFailedError, "MemoryError: nothing is left"):
                flashjit.attention(q, k, v)
        finally:
            Array.full = False


if __name__ == "__main__":
    unittest.main()
