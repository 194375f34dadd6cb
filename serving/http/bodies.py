"""What a client sent -> a checked query. Nothing is read beyond the limits of the server.

Bodies are parsed here and not by the framework: bad UTF-8, deep JSON and endless bodies then get
an answer of 4xx, each with its reason.
"""

import base64
import binascii
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from serving.config import ServingConfig
from serving.errors import ApiError, describe_invalid
from trainer.bundle_spec import Reads


class QueryBody(BaseModel):
    """Is each picture, or each text, of these classes?"""

    model_config = ConfigDict(extra="forbid")

    classes: list[StrictStr | StrictInt] = Field(min_length=1, description="class names, or ids")
    images: list[StrictStr] | None = Field(
        None,
        description="for a model of pictures: files (JPEG, PNG, WebP, BMP, GIF) in base64",
    )
    texts: list[StrictStr] | None = Field(None, description="for a model of texts")
    recall: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="decide by the threshold that reached this recall in validation"
    )
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None, description="decide by this logit; not together with recall"
    )


@dataclass(frozen=True)
class Query:
    """A request whose form is right; classes and inputs are not looked at yet.

    `inputs` are what the model reads: bytes of pictures, or texts.
    """

    classes: list[str | int]
    inputs: Sequence[bytes | str]
    recall: float | None
    threshold: float | None


async def read_query(request: Request, limits: ServingConfig, reads: Reads) -> Query:
    """Read and check the body of `POST /v1/query`, JSON or multipart, for a model that `reads`.

    Raises ApiError (400, 413, 415, 422) with the reason.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    body = _bounded(request, limits.max_body_bytes)
    match kind:
        case "multipart/form-data":
            query = await _from_form(request, body, limits, reads)
        case "application/json" | "":
            query = _from_json(b"".join([part async for part in body]), reads)
        case _:
            raise ApiError(
                415,
                "unknown_content_type",
                f"send application/json or multipart/form-data, not {kind[:80]!r}",
            )
    _check_counts(query, limits, reads)
    return query


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body's parts; too long a body is refused by its stated length, or where it exceeds it."""
    too_large = ApiError(
        413, "body_too_large", f"the body is over {limit} bytes: send less at once"
    )
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or int(stated[:20]) > limit:
        raise too_large
    received = 0
    async for part in request.stream():
        received += len(part)
        if received > limit:
            raise too_large
        yield part


def _from_json(raw: bytes, reads: Reads) -> Query:
    if not raw.strip():
        example = '"images": ["<base64>", …]' if reads == "pictures" else '"texts": ["…", …]'
        raise ApiError(400, "empty_body", f'the body is empty: send {{"classes": […], {example}}}')
    try:
        body = QueryBody.model_validate_json(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        if errors[0]["type"] == "json_invalid":
            raise ApiError(400, "invalid_json", describe_invalid(errors)) from error
        raise ApiError(422, "invalid_query", describe_invalid(errors)) from error
    _check_kind(reads, images=body.images is not None, texts=body.texts is not None)
    if reads == "texts":
        return Query(list(body.classes), body.texts or [], body.recall, body.threshold)
    pictures = [_from_base64(text, place) for place, text in enumerate(body.images or [])]
    return Query(list(body.classes), pictures, body.recall, body.threshold)


def _check_kind(reads: Reads, *, images: bool, texts: bool) -> None:
    """Refuse what the model does not read, before any of it is looked at."""
    if reads == "pictures" and texts:
        raise ApiError(422, "not_a_text_model", "this model reads pictures: send images, not texts")
    if reads == "texts" and images:
        raise ApiError(422, "not_a_picture_model", "this model reads texts: send texts, not images")


def _from_base64(text: str, place: int) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            400, "invalid_base64", f"images[{place}] is not base64 of a picture file ({error})"
        ) from error


class _Parser(MultiPartParser):
    """Refuses text that is not in its encoding, UTF-8 unless stated: starlette's own parser takes
    it for Latin-1."""

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode(self._charset)
            except (UnicodeDecodeError, LookupError) as error:
                name = part.field_name[:80]
                raise MultiPartException(f"{name!r} is no {self._charset}") from error
        super().on_part_end()


async def _from_form(
    request: Request, body: AsyncGenerator[bytes, None], limits: ServingConfig, reads: Reads
) -> Query:
    parser = _Parser(
        request.headers,
        body,
        # A little over the limits is counted, and refused, by name in `_check_counts`.
        max_files=limits.max_inputs + 1000,
        max_fields=limits.max_classes + limits.max_inputs + 1000,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, LookupError, UnicodeError) as error:
        reason = getattr(error, "message", None) or "damaged"
        raise ApiError(
            400, "invalid_form", f"the multipart form cannot be read: {reason}"
        ) from error
    try:
        return await _read_form(form, reads)
    finally:
        await form.close()


async def _read_form(form: FormData, reads: Reads) -> Query:
    unknown = sorted(set(form) - {"classes", "images", "texts", "recall", "threshold"})
    if unknown:
        raise ApiError(
            422,
            "invalid_query",
            f"unknown field {unknown[0][:80]!r}: send classes, images or texts, recall or "
            "threshold",
        )
    _check_kind(reads, images="images" in form, texts="texts" in form)
    fields = {
        name: [value for value in form.getlist(name) if isinstance(value, str)]
        for name in ("classes", "texts", "recall", "threshold")
    }
    for name, what in (("classes", "names or ids as text"), ("texts", "them as text")):
        if len(fields[name]) != len(form.getlist(name)):
            raise ApiError(422, "invalid_query", f"{name} holds a file: send {what}")
    values: dict[str, object] = {"classes": fields["classes"]}
    for name in ("recall", "threshold"):
        if len(form.getlist(name)) > 1 or len(fields[name]) != len(form.getlist(name)):
            raise ApiError(
                422, "invalid_query", f"{name} is a file or stands twice: send it once, as a number"
            )
        if fields[name]:
            values[name] = fields[name][0]
    try:
        body = QueryBody.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise ApiError(422, "invalid_query", describe_invalid(errors)) from error
    inputs = fields["texts"] if reads == "texts" else await _files(form)
    return Query(list(body.classes), inputs, body.recall, body.threshold)


async def _files(form: FormData) -> list[bytes]:
    files = form.getlist("images")
    for place, file in enumerate(files):
        if not isinstance(file, UploadFile):
            raise ApiError(400, "invalid_form", f"images[{place}] is no file: send its bytes")
    return [await file.read() for file in files if isinstance(file, UploadFile)]


def _check_counts(query: Query, limits: ServingConfig, reads: Reads) -> None:
    if not query.inputs:
        what, field = ("picture", "images") if reads == "pictures" else ("text", "texts")
        raise ApiError(400, "no_input", f"there is no {what} in the request: send {field}")
    for name, count, limit in (
        (reads, len(query.inputs), limits.max_inputs),
        ("classes", len(query.classes), limits.max_classes),
    ):
        if count > limit:
            raise ApiError(
                413, f"too_many_{name}", f"{count} {name} in one request, at most {limit}: split it"
            )
    for place, one in enumerate(query.inputs):
        if isinstance(one, str) and len(one) > limits.max_text_chars:
            raise ApiError(
                413,
                "text_too_long",
                f"texts[{place}] has {len(one)} characters, at most {limits.max_text_chars}: "
                "shorten it",
            )
