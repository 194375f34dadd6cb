"""Reads the headers of an uncompressed tar to find the name and location of each member, and any
damage.

Python's tarfile stops silently at the first bad header. This reader reports it and continues at the
next valid header. It supports USTAR, GNU and pax headers, and does not read the content of members.
"""

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

BLOCK = tarfile.BLOCKSIZE
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_WITHOUT_BYTES = (tarfile.DIRTYPE, tarfile.XGLTYPE)
# A longer name counts as damage. This bounds the number of bytes that are read for a name.
_MAX_EXTENSION = 1 << 20
_ZEROS = bytes(BLOCK)
_CLOSING = 2 * BLOCK
_LOOK_BACK = 8
_SCAN = 1 << 20


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
    """Yield every member of the tar in file order, and a fault for each unusable member.

    After a bad header, or zero blocks at which other readers stop, reading continues at the next
    valid header. If the tar does not end with two zero blocks, that is also reported as a fault,
    because the tar may have been truncated between two members. start, stop: the bytes of the tar
    in `file`; by default, all of them.
    """
    end = file.seek(0, os.SEEK_END) if stop is None else stop

    def read(at: int, size: int) -> bytes:
        file.seek(at)
        return file.read(max(0, min(size, end - at)))

    offset, zeros, extra = start, 0, dict[str, str]()
    while block := read(offset, BLOCK):
        if block == _ZEROS[: len(block)]:  # the last block may be incomplete
            offset, zeros = offset + len(block), zeros + len(block)
            continue
        header = _parse(block)
        if header is None:
            valid = _next_header(read, offset + len(block))
            what = f"invalid tar header, skipped {(valid - offset + zeros):,} bytes"
            last = valid >= end
            yield Fault(offset - zeros, what, ends_tar=last)
            if last:
                return
            offset, zeros, extra = valid, 0, {}
            continue
        if zeros:
            what = f"{zeros:,} zero bytes before a header: concatenated tars or overwritten members"
            yield Fault(offset - zeros, what)
            zeros = 0
        first, size = offset + BLOCK, header.size
        if "size" in extra and extra["size"].isdecimal():
            size = int(extra["size"])
        if first + size > end:
            name = extra.get("path", header.name)
            what = f"{_shown(name)} is truncated: the tar ends before its {size:,} bytes"
            yield Fault(offset, what, ends_tar=True)
            return
        offset = first + -(-size // BLOCK) * BLOCK
        if header.type in _PAX or header.type in _LONG:
            extra |= _extension(header, read(first, min(size, _MAX_EXTENSION)))
            continue
        if header.type in _REGULAR:
            yield Member(extra.get("path", header.name), first, size)
        elif header.type not in _WITHOUT_BYTES:
            what = "is a link, a device or a sparse file, whose content is not in the tar"
            yield Fault(first - BLOCK, f"{_shown(extra.get('path', header.name))} {what}")
        extra = {}
    if zeros < _CLOSING:
        what = "the zero blocks at the end are missing: the tar is truncated or unfinished"
        yield Fault(offset, what, ends_tar=True)


def member_name(descriptor: int, block: int) -> str:
    """Return the name of the member whose content starts at block number `block`, in blocks of 512
    bytes.

    A long name is stored in an extra header that precedes the member's header. Raises ValueError if
    the header is damaged.
    """
    header = _parse(os.pread(descriptor, BLOCK, (block - 1) * BLOCK))
    if header is None:
        raise ValueError("bad checksum")
    for back in range(1, min(_LOOK_BACK, block - 2) + 1):
        start = (block - 1 - back) * BLOCK
        before = _parse(os.pread(descriptor, BLOCK, start - BLOCK))
        if before is None or -(-before.size // BLOCK) != back:
            continue
        if before.type in _PAX or before.type == tarfile.GNUTYPE_LONGNAME:
            return _extension(before, os.pread(descriptor, before.size, start)).get(
                "path", header.name
            )
    return header.name


def _parse(block: bytes) -> tarfile.TarInfo | None:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return header if header.size >= 0 else None


def _extension(header: tarfile.TarInfo, data: bytes) -> dict[str, str]:
    """Return `path` and `size` from a GNU long name or a pax header (POSIX.1-2008, pax)."""
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    found = {}
    while header.type in _PAX and (record := re.match(rb"(\d{1,9}) ([^=]+)=", data)):
        length = int(record[1])
        if length <= record.end():
            break
        if record[2] in (b"path", b"size"):
            value = data[record.end() : length - 1]
            found[record[2].decode()] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return found


def _next_header(read: Callable[[int, int], bytes], offset: int) -> int:
    """Return the offset of the next block that is certainly a header, or the end of the tar."""
    while chunk := read(offset, _SCAN):
        for index in range(0, len(chunk), BLOCK):
            block = chunk[index : index + BLOCK]
            if block[257:262] == b"ustar" and _parse(block) is not None:
                return offset + index
        offset += len(chunk)
    return offset


def _shown(name: str) -> str:
    return ascii(name) if not name.isprintable() else name
