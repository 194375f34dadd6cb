"""Lines out of a body that is still coming: of any length in, of a limited length out."""

from collections.abc import AsyncIterator


async def split_lines(parts: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes | None]:
    """The lines of `parts` without their ends; None in place of one of more than `limit` bytes.

    Of a line that is too long nothing more is kept. The last one needs no end; an empty last one
    is none.
    """
    held = bytearray()
    is_too_long = False
    async for part in parts:
        *ended, rest = part.split(b"\n")
        for piece in ended:
            held += piece
            yield None if is_too_long or len(held) > limit else bytes(held)
            held, is_too_long = bytearray(), False
        held += rest
        if is_too_long or len(held) > limit:
            held, is_too_long = bytearray(), True
    if held or is_too_long:
        yield None if is_too_long else bytes(held)
