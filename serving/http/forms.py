"""Parse multipart forms strictly and within limits."""

import asyncio
from collections.abc import AsyncGenerator
from email.message import Message

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.http.request_body import check_charset, parameter

_PIECE = 2**16
# The final boundary is in this many bytes at the end of a form, even if other data follows it.
_EPILOGUE = 2**16


async def parse_form(
    raw: bytes, header: Message, limits: ServingConfig
) -> dict[str, list[str | bytes]]:
    """Return the values of each field of the form `raw`: texts, and files as bytes. Files stay in
    memory. Raises ApiError 400 or 415.

    Starlette drops the last part of a truncated form and reads text that is not UTF-8 as Latin-1,
    so both are checked here.
    """
    check_charset(header)
    boundary = parameter(header, "boundary")
    if f"--{boundary}--".encode("latin-1", "replace") not in raw[-_EPILOGUE:]:
        raise invalid_form("the body does not end with the final boundary")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(raw), _PIECE):
            yield raw[start : start + _PIECE]
            await asyncio.sleep(0)  # let other requests run

    def decoded(text: str, name: str) -> str:
        try:
            return text.encode("latin-1").decode()
        except UnicodeError as error:
            raise invalid_form(f"field {name[:80]!r} is not valid UTF-8") from error

    # Every byte is a character of Latin-1, so that the text can be decoded strictly afterwards.
    quoted = boundary.replace("\\", "\\\\").replace('"', '\\"')
    kind = f'multipart/form-data; boundary="{quoted}"; charset=latin-1'
    # High enough that a form with slightly too many parts reaches the caller, which rejects it with
    # a specific error.
    parser = MultiPartParser(
        Headers({"content-type": kind}),
        pieces(),
        max_files=limits.max_inputs + 1000,
        max_fields=limits.max_classes + limits.max_inputs + 1000,
        max_part_size=limits.max_body_bytes,
    )
    parser.spool_max_size = limits.max_body_bytes  # keep all files in memory
    try:
        form = await parser.parse()
    except (MultiPartException, LookupError, UnicodeError) as error:
        raise invalid_form(getattr(error, "message", None) or "the body is malformed") from error
    fields: dict[str, list[str | bytes]] = {}
    try:
        for name, value in form.multi_items():
            content = decoded(value, name) if isinstance(value, str) else await value.read()
            fields.setdefault(decoded(name, name), []).append(content)
    finally:
        await form.close()
    return fields


def invalid_form(reason: str) -> ApiError:
    return ApiError(400, "invalid_form", f"invalid multipart form: {reason}")
