"""Lines out of a body that is still coming: of any length in, of a limited length out."""

import asyncio
import re
from collections.abc import AsyncIterator

_BLANK = re.compile(rb"\s*\n")


async def split_lines(parts: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes | None]:
    """The lines of `parts` without their ends; None in place of one of more than `limit` bytes.

    Blank lines that come together are one item, in which their ends stand between them: a body of
    them alone would else be millions of items, and hold up all others. Of a line that is too long
    nothing more is kept. The last one needs no end; an empty last one is none.
    """
    held = bytearray()
    is_too_long = False
    async for part in parts:
        start = 0
        while start < len(part):
            is_new = not held and not is_too_long
            if is_new and (blank := _BLANK.match(part, start, start + limit)):
                yield part[start : blank.end() - 1]
                start = blank.end()
                continue
            end = part.find(b"\n", start)
            held += part[start : len(part) if end < 0 else end]
            if is_too_long or len(held) > limit:
                held, is_too_long = bytearray(), True
            if end < 0:
                break
            yield None if is_too_long else bytes(held)
            held, is_too_long = bytearray(), False
            start = end + 1
        await asyncio.sleep(0)  # parts may be there already: others have their turn
    if held or is_too_long:
        yield None if is_too_long else bytes(held)


def count_lines(item: bytes | None) -> int:
    """How many lines an item of `split_lines` stands for."""
    return 1 if item is None else 1 + item.count(b"\n")
