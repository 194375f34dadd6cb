"""Parse multipart forms strictly and within limits."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Collection
from email.message import Message as Headers

from starlette.datastructures import FormData, UploadFile
from starlette.datastructures import Headers as FormHeaders
from starlette.formparsers import MultiPartException, MultiPartParser

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.http.request_body import parameter

_PIECE = 2**16
# The final boundary is in this many bytes at the end of a form, even if other data follows it.
_EPILOGUE = 2**16

# Fields that can occur several times, and what their values are.
_LISTS = {"classes": "names or ids", "texts": "texts"}
# Some of Python's other codecs take quadratic time, or do not decode to text.
_CHARSETS = frozenset({"utf-8", "ascii", "iso8859-1", "cp1252"})


def known_charset(name: str) -> str:
    """Return the codec for the `charset` of a request, or UTF-8 if the charset is empty.

    Raises ApiError 415 for an unsupported charset.
    """
    try:
        codec = codecs.lookup(name or "utf-8").name
    except (LookupError, ValueError):
        codec = ""
    if codec not in _CHARSETS:
        raise ApiError(
            415, "unknown_charset", f"charset {name[:40]!r} is not supported. Send UTF-8"
        )
    return codec


async def parse_form(raw: bytes, header: Headers, limits: ServingConfig) -> FormData:
    """Parse the form `raw` in memory, including its files. Close it after use. Raises ApiError 400
    or 415.

    Starlette drops the last part of a truncated form and reads text that is invalid in its encoding
    as Latin-1, so both are checked here.
    """
    codec = known_charset(parameter(header, "charset"))
    boundary = parameter(header, "boundary")
    if f"--{boundary}--".encode("latin-1", "replace") not in raw[-_EPILOGUE:]:
        raise _invalid_form("the body does not end with the final boundary")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(raw), _PIECE):
            yield raw[start : start + _PIECE]
            await asyncio.sleep(0)  # let other requests run

    # Every byte is a character of Latin-1, so that the text can be decoded strictly afterwards.
    quoted = boundary.replace("\\", "\\\\").replace('"', '\\"')
    kind = f'multipart/form-data; boundary="{quoted}"; charset=latin-1'
    # High enough that a form with slightly too many parts reaches the caller, which rejects it with
    # a specific error.
    parser = MultiPartParser(
        FormHeaders({"content-type": kind}),
        pieces(),
        max_files=limits.max_inputs + 1000,
        max_fields=limits.max_classes + limits.max_inputs + 1000,
        max_part_size=limits.max_body_bytes,
    )
    parser.spool_max_size = limits.max_body_bytes  # keep all files in memory
    try:
        form = await parser.parse()
    except (MultiPartException, LookupError, UnicodeError) as error:
        raise _invalid_form(getattr(error, "message", None) or "the body is malformed") from error
    try:
        return FormData(
            [
                (
                    _decoded(name, codec, name),
                    _decoded(value, codec, name) if isinstance(value, str) else value,
                )
                for name, value in form.multi_items()
            ]
        )
    except ApiError:
        await form.close()
        raise


def _decoded(text: str, codec: str, name: str) -> str:
    try:
        return text.encode("latin-1").decode(codec)
    except UnicodeError as error:
        raise _invalid_form(f"field {name[:80]!r} is not valid {codec}") from error


def _invalid_form(reason: str) -> ApiError:
    return ApiError(400, "invalid_form", f"invalid multipart form: {reason}")


def text_fields(form: FormData, known: Collection[str]) -> dict[str, list[str]]:
    """Return the fields that contain text, for the `known` fields. Raises ApiError 422 for an
    invalid or unknown field."""
    unknown = sorted(set(form) - set(known))
    if unknown:
        raise ApiError(
            422,
            "invalid_query",
            f"unknown field {unknown[0][:80]!r}. Known fields are {', '.join(known)}",
        )
    fields = {
        name: [value for value in form.getlist(name) if isinstance(value, str)]
        for name in known
        if name != "images"
    }
    for name, values in fields.items():
        has_file = len(values) != len(form.getlist(name))
        if name in _LISTS and has_file:
            message = f"{name} contains a file. Send {_LISTS[name]} as plain form fields"
            raise ApiError(422, "invalid_query", message)
        if name not in _LISTS and (has_file or len(values) > 1):
            message = f"{name} either is a file or occurs more than once. Send a single value"
            raise ApiError(422, "invalid_query", message)
    return fields


async def form_images(form: FormData) -> list[bytes]:
    """Return the bytes of the files in `images`. Raises ApiError 400 for a value that is not a
    file."""
    files = form.getlist("images")
    for position, file in enumerate(files):
        if not isinstance(file, UploadFile):
            raise ApiError(
                400, "invalid_form", f"images[{position}] is not a file. Upload the image as a file"
            )
    return [await file.read() for file in files if isinstance(file, UploadFile)]
