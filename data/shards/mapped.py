"""Maps the bytes of a file to an array that all processes share, without keeping the file open.

Python's `mmap` and numpy's `memmap` keep a file descriptor open for each mapping, but a split may
have more shards than a process may have open files.
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
    """Map the bytes of `file` to a read-only uint8 array [n]. `file` may be closed afterwards.

    The mapping is released with the last array that uses it. Raises OSError if the file cannot be
    mapped, for example because it is empty.
    """
    size = os.fstat(file.fileno()).st_size
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        many = "use fewer, larger shards, or raise the system's vm.max_map_count"
        remedy = many if code == errno.ENOMEM else "copy it to another disk"
        raise OSError(f"{file.name} cannot be mapped ({os.strerror(code)}): {remedy}")
    buffer = (ctypes.c_ubyte * size).from_address(address)
    # Do not unmap at exit, because threads may still be reading. The operating system removes the
    # mapping.
    weakref.finalize(buffer, _libc.munmap, address, size).atexit = False
    array: np.ndarray = np.ctypeslib.as_array(buffer)
    array.flags.writeable = False
    return array


def disable_readahead(first: np.ndarray, last: np.ndarray) -> None:
    """Disable readahead from the start of `first` to the end of `last`, two parts of the same
    mapped file.

    By default, when a page is read, the kernel also maps the pages around it, possibly the entire
    file.
    """
    start = first.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    # Any advice turns the range into a separate mapping, and readahead stops at its boundaries. If
    # madvise fails, nothing breaks.
    _libc.madvise(start, last.ctypes.data + last.nbytes - start, mmap.MADV_RANDOM)
