"""Bytes of a mapping as a DLPack capsule: what a library takes over with the device that it is told.

Owns: the capsule, and that what it looks at stays alive until the last array over it is gone. Does not know: torch, the
driver, which device is right.

`__cuda_array_interface__` has no word for the device, so that a library asks the driver where the memory lies. Of a
segment that lies on another GPU the answer is a GPU on which this process has no context, and often none that it sees.
Whoever computes on it is the GPU that the mapping gave access to, and that is what a capsule says.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

CPU: Final = 1
CUDA: Final = 2
"""DLPack's numbers of kinds of devices."""
_UNSIGNED: Final = 1
_NAME: Final = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("array", _Array), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_kept: Final[dict[int, tuple[Any, ...]]] = {}
"""By the address of its structure, what a capsule, and after it the arrays made of it, need."""


def _drop(address: int, kept: dict[int, tuple[Any, ...]] = _kept) -> None:
    kept.pop(address, None)


_drop_later: Final = _Deleter(_drop)
for _lasting in (_kept, _drop_later):  # arrays may outlive this module when the interpreter ends
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_lasting))

_new_capsule: Final = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Capsule:
    """Some bytes for one library, once. `given`: what its `from_dlpack` takes."""

    def __init__(self, keep: object, *, kind: int, number: int, address: int, size_bytes: int) -> None:
        """Makes the capsule.

        Args:
            keep: what lives at least as long as any array over the bytes.
            kind, number: of the device that computes on them.
            size_bytes: at least 1.
        """
        shape = (ctypes.c_int64 * 1)(size_bytes)
        managed = _Managed(
            array=_Array(
                data=address,
                device=_Device(kind=kind, number=number),
                dimensions=1,
                type=_Type(code=_UNSIGNED, bits=8, lanes=1),
                shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
                strides=None,
                byte_offset=0,
            ),
            context=None,
            deleter=_drop_later,
        )
        self._address = ctypes.addressof(managed)
        _kept[self._address] = (keep, managed, shape)
        self.given: Any = _new_capsule(self._address, _NAME, None)

    def cancel(self) -> None:
        """The library did not take it."""
        _drop(self._address)


def kept() -> int:
    """How many capsules, or arrays made of them, are alive in this process."""
    return len(_kept)
