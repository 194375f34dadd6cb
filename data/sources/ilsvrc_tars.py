"""Where the members of a tar lie, and those of the tars inside it, from their headers alone.

Strict where Python's tarfile just stops: a bad header, a cut and a missing end are errors, because
each would lose pictures without a word.
"""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from data.tars.headers import BLOCK, Member

_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE)


def tar_members(path: Path, inside: Member | None = None) -> list[Member]:
    """The files of the tar `path`, or of the tar that is its member `inside`, in their order.

    One `pread` of 512 bytes a member. Raises ValueError, which names the tar, the place and the
    remedy, for a damaged header, a cut, and members that are neither files nor folders.
    """
    with path.open("rb", buffering=0) as file:
        start, size = 0, os.fstat(file.fileno()).st_size
        where = str(path)
        if inside is not None:
            where, start, size = f"{path}, {inside.name} in it", inside.offset, inside.size
        try:
            members = list(_members(file.fileno(), start, start + size))
            _check_names(members)
        except ValueError as error:
            raise ValueError(f"{where}: {error}: download the tar again") from error
    return members


def _members(descriptor: int, at: int, stop: int) -> Iterator[Member]:
    while True:
        header = os.pread(descriptor, min(BLOCK, stop - at), at)
        if len(header) < BLOCK:
            raise ValueError(f"it is cut off at byte {at:,}, without the mark of its end")
        if header == bytes(BLOCK):
            _check_rest(descriptor, at, stop)
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise ValueError(f"the header at byte {at:,} is damaged ({error})") from error
        at += BLOCK
        if at + info.size > stop:
            raise ValueError(f"it is cut off inside {info.name}, at byte {stop:,}")
        if info.type in _FILES:
            yield Member(info.name, at, info.size)
        elif info.type in _PAX:
            _check_pax(os.pread(descriptor, info.size, at), info.name)
        elif info.type != tarfile.DIRTYPE:
            raise ValueError(f"{info.name} is of tar type {info.type!r}, not a plain file")
        at += -(-info.size // BLOCK) * BLOCK


def _check_names(members: list[Member]) -> None:
    seen: set[str] = set()
    for member in members:
        if member.name in seen:
            raise ValueError(f"it holds {member.name} twice")
        seen.add(member.name)


def _check_rest(descriptor: int, at: int, stop: int) -> None:
    """What follows the mark of the end is padding; members there would be lost."""
    while at < stop:
        chunk = os.pread(descriptor, min(1 << 20, stop - at), at)
        if not chunk or chunk.count(0) != len(chunk):
            raise ValueError(f"there is data behind the mark of its end, after byte {at:,}")
        at += len(chunk)


def _check_pax(records: bytes, name: str) -> None:
    """Extended headers may tell times and owners; names and sizes are read from plain headers."""
    if b" path=" in records or b" size=" in records:
        raise ValueError(f"{name} is an extended header with a name or size, which is not read")
