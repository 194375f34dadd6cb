"""Finds the members of an uncompressed tar, and any damage, from its headers.

Python's tarfile parses the headers: USTAR, GNU and pax. By default, tar readers stop without an
error at the first bad header. This module reports it and continues at the next valid header. It
does not read the content of members.
"""

import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import IO, NamedTuple

BLOCK = tarfile.BLOCKSIZE
_CLOSING = 2 * BLOCK
_LOOK_BACK = 8 * BLOCK
_CHUNK = 1 << 20


class Member(NamedTuple):
    """A file in a tar: its name and the byte range of its content."""

    name: str
    offset: int
    size: int


class Fault(NamedTuple):
    """A defect in a tar, and its byte offset.

    ends_tar: whether nothing after the fault can be read, in which case samples may be missing.
    """

    offset: int
    what: str
    ends_tar: bool = False


def walk(file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[Member | Fault]:
    """Yield every member of the tar in file order, and a fault for each unusable part.

    If the tar does not end with two zero blocks, that is also reported as a fault, because the tar
    may have been truncated between two members. start, stop: the bytes of the tar in `file`; by
    default, all of them.
    """
    stop = file.seek(0, os.SEEK_END) if stop is None else stop
    end = start  # of the last member
    while True:
        found, following = _next_member(file, end)
        if found is None or found.offset >= stop:
            break
        if (gap := found.offset - end) and not _is_global_header(file, end):
            yield Fault(end, f"{gap:,} bytes without a valid header: damage, or concatenated tars")
        name = found.name if found.name.isprintable() else ascii(found.name)
        if following > stop:
            what = f"{name} is truncated: the tar ends before its {found.size:,} bytes"
            yield Fault(found.offset, what, ends_tar=True)
            return
        if found.isfile() and not found.issparse():
            yield Member(found.name, found.offset_data, found.size)
        elif not found.isdir():
            what = "is a link, a device or a sparse file, whose content is not in the tar"
            yield Fault(found.offset, f"{name} {what}")
        end = following
    if not _is_zero(file, end, stop):
        yield Fault(end, f"the last {stop - end:,} bytes have no valid header", ends_tar=True)
    elif stop - end < _CLOSING:
        what = "the zero blocks at the end are missing: the tar is truncated or unfinished"
        yield Fault(end, what, ends_tar=True)


def _next_member(file: IO[bytes], offset: int) -> tuple[tarfile.TarInfo | None, int]:
    """Return the next member at or after `offset`, and the offset of the header that follows it."""
    while True:
        file.seek(offset)
        try:
            # With `ignore_zeros`, tarfile continues after zero blocks and after invalid headers.
            tar = tarfile.TarFile(fileobj=file, ignore_zeros=True, encoding="utf-8")
        except (tarfile.TarError, ValueError):  # a header with a long name, and none after it
            offset += BLOCK
            continue
        return tar.next(), tar.offset


def _is_global_header(file: IO[bytes], offset: int) -> bool:
    """Return whether there is a pax header for all following members, which has no name."""
    file.seek(offset)
    with suppress(tarfile.HeaderError):
        header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
        return header.type == tarfile.XGLTYPE
    return False


def _is_zero(file: IO[bytes], start: int, stop: int) -> bool:
    for offset in range(start, stop, _CHUNK):
        file.seek(offset)
        if file.read(min(_CHUNK, stop - offset)).strip(b"\0"):
            return False
    return True


def member_name(descriptor: int, block: int) -> str:
    """Return the name of the member whose content starts at block number `block`, in blocks of 512
    bytes. Raises ValueError if the header is damaged.
    """
    start = max(0, block * BLOCK - _LOOK_BACK)
    headers = BytesIO(os.pread(descriptor, block * BLOCK - start, start))
    size = len(headers.getvalue())
    # A long name is stored in an extra header before the member's own header, which contains only
    # its beginning. Therefore, try the earlier blocks first.
    for offset in range(0, size, BLOCK):
        headers.seek(offset)
        with suppress(tarfile.TarError, ValueError):
            found = tarfile.TarFile(fileobj=headers, encoding="utf-8").next()
            if found is not None and (found.offset, found.offset_data) == (offset, size):
                return found.name
    raise ValueError("bad checksum")
