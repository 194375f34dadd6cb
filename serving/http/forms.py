"""Parse the multipart form of `POST /v1/query` strictly and within limits."""

import codecs
from collections.abc import AsyncGenerator, Collection

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from serving.api_error import ApiError
from serving.config import ServingConfig

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


class _Parser(MultiPartParser):
    """Rejects truncated forms, and text that is invalid in its encoding (UTF-8 by default).
    Starlette's own parser falls back to Latin-1 for invalid text and drops the last part of a
    truncated form."""

    is_begun = is_ended = False

    def on_part_begin(self) -> None:
        self.is_begun = True
        super().on_part_begin()

    def on_end(self) -> None:
        self.is_ended = True

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode(self._charset)
            except UnicodeDecodeError as error:
                name = part.field_name[:80]
                raise MultiPartException(f"field {name!r} is not valid {self._charset}") from error
        super().on_part_end()


async def parse_form(
    request: Request, body: AsyncGenerator[bytes, None], charset: str, limits: ServingConfig
) -> FormData:
    """Read the form into memory, including its files. Close it after use. Raises ApiError 400 or
    415."""
    known_charset(charset)
    parser = _Parser(
        request.headers,
        body,
        # High enough that a form with slightly too many parts reaches the caller, which rejects it
        # with a specific error.
        max_files=limits.max_inputs + 1000,
        max_fields=limits.max_classes + limits.max_inputs + 1000,
    )
    parser.spool_max_size = limits.max_body_bytes  # keep all files in memory; never write to disk
    try:
        form = await parser.parse()
        if parser.is_begun and not parser.is_ended:
            for file in parser._files_to_close_on_error:  # the unfinished file is not in the form
                file.close()
            raise MultiPartException("the body ends before the final boundary")
        return form
    except (MultiPartException, LookupError, UnicodeError) as error:
        reason = getattr(error, "message", None) or "the body is malformed"
        message = f"invalid multipart form: {reason}"
        raise ApiError(400, "invalid_form", message) from error


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
            message = f"{name} either is a file or occurs more than once. Send a single number"
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
