"""Parse the multipart form of `POST /v1/query` strictly and within limits."""

import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Collection

from fastapi import Request
from starlette.datastructures import FormData, Headers, UploadFile
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
    """Rejects truncated forms, from which Starlette's parser drops the last part, and text that is
    invalid in its encoding, which Starlette's parser reads as Latin-1."""

    def __init__(
        self, headers: Headers, body: AsyncIterator[bytes], codec: str, limits: ServingConfig
    ) -> None:
        super().__init__(
            headers,
            self._until_the_end(body),
            # High enough that a form with slightly too many parts reaches the caller, which rejects
            # it with a specific error.
            max_files=limits.max_inputs + 1000,
            max_fields=limits.max_classes + limits.max_inputs + 1000,
        )
        self.spool_max_size = limits.max_body_bytes  # keep all files in memory
        self._is_ended = False
        self._codec = codecs.lookup(codec)
        self._decoder = self._codec.incrementaldecoder()
        self._are_texts: list[bool] = []  # whether each part can be decoded

    async def parse(self) -> FormData:
        form = await super().parse()
        for is_text, (name, value) in zip(self._are_texts, form.multi_items(), strict=True):
            if isinstance(value, str) and not is_text:
                await form.close()
                raise MultiPartException(f"field {name[:80]!r} is not valid {self._codec.name}")
        return form

    def on_part_begin(self) -> None:
        super().on_part_begin()
        self._are_texts.append(True)
        self._decoder = self._codec.incrementaldecoder()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        super().on_part_data(data, start, end)
        self._decode(data[start:end])

    def on_part_end(self) -> None:
        super().on_part_end()
        self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> None:
        if self._are_texts[-1]:
            try:
                self._decoder.decode(data, final)
            except UnicodeDecodeError:
                self._are_texts[-1] = False

    def on_end(self) -> None:
        self._is_ended = True

    async def _until_the_end(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for part in body:
            yield part
        if not self._is_ended:
            raise MultiPartException("the body ends before the final boundary")


async def parse_form(
    request: Request, body: AsyncIterator[bytes], charset: str, limits: ServingConfig
) -> FormData:
    """Read the form into memory, including its files. Close it after use. Raises ApiError 400 or
    415."""
    codec = known_charset(charset)
    try:
        return await _Parser(request.headers, body, codec, limits).parse()
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
