"""A file's bytes as an array, mapped and shared by all processes, without an open file.

Python's own `mmap` keeps a descriptor for each (numpy's, too), and a split may have more shards
than a process may have files.
"""

import ctypes
import errno
import mmap
import os
import weakref
from typing import IO

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def mapped(file: IO[bytes]) -> np.ndarray:
    """The bytes of `file`, uint8 [n], read-only; `file` may be closed then.

    They are unmapped with the last array that shows them. Raises OSError where they cannot be
    mapped, as an empty file cannot.
    """
    size = os.fstat(file.fileno()).st_size
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        many = "make fewer, larger shards, or raise the system's vm.max_map_count"
        remedy = many if code == errno.ENOMEM else "copy it to another disk"
        raise OSError(f"{file.name} cannot be mapped ({os.strerror(code)}): {remedy}")
    held = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit, when threads may still read: the system unmaps then.
    weakref.finalize(held, _libc.munmap, address, size).atexit = False
    array: np.ndarray = np.ctypeslib.as_array(held)
    array.flags.writeable = False
    return array


def keep_apart(first: np.ndarray, last: np.ndarray) -> None:
    """From `first` to `last`, parts of one mapped file, what is used comes into memory by itself.

    Without that, the pages around a page that is read are mapped with it, up to a whole file.
    """
    start = first.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    # Any advice makes a mapping of its own, and what is read ahead stays in it. It may be refused.
    _libc.madvise(start, last.ctypes.data + last.nbytes - start, mmap.MADV_RANDOM)
