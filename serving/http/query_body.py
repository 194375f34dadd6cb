"""Parse a query from the body or URL of a request.

Bodies are parsed here rather than by the framework, so that invalid UTF-8, deeply nested JSON and
oversized bodies are rejected with a 4xx status and a specific reason.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from serving.answer import MAX_TOP, Rule
from serving.api_error import ApiError, validated
from serving.config import ServingConfig
from serving.http.request_body import (
    check_charset,
    content_type,
    image_bytes,
    parse_json,
    read_body,
)
from serving.limits import check_inputs
from serving.service import InProgress, Service
from trainer.bundle.spec import Reads

# The final boundary is in this many bytes at the end of a form, even if other data follows it.
_EPILOGUE = 2**16


class QueryParameters(Rule):
    """`?classes=A&classes=B&recall=0.9`. Parameters in the URL, for a body that is a single input.
    Unknown parameters are rejected, not ignored."""

    model_config = ConfigDict(extra="forbid")

    classes: list[str] = Field(
        default_factory=list,
        description="class names, or # followed by a class ID; can be repeated",
    )


class InputsBody(BaseModel):
    """The inputs in a JSON body."""

    model_config = ConfigDict(extra="forbid")

    # fail_fast: otherwise pydantic creates an error for every invalid element of a list.
    images: Annotated[list[StrictStr], Field(fail_fast=True)] | None = Field(
        None,
        description="for a model that accepts images: base64-encoded files (JPEG, PNG, "
        "WebP, BMP, GIF) or data URLs",
    )
    texts: Annotated[list[StrictStr], Field(fail_fast=True)] | None = Field(
        None, description="for a model that accepts texts"
    )


class ClassesBody(BaseModel):
    """The classes in a JSON body."""

    classes: Annotated[list[StrictStr | StrictInt], Field(fail_fast=True)] = Field(
        min_length=1, description="class names or ids"
    )


class QueryBody(InputsBody, ClassesBody, Rule):
    """Does each image or text belong to these classes?"""


class ClassifyParameters(Rule):
    """`?top=3&recall=0.9`."""

    model_config = ConfigDict(extra="forbid")

    top: int = Field(5, ge=1, le=MAX_TOP, description="number of classes per input")


class ClassifyBody(InputsBody, ClassifyParameters):
    """Which classes does each image or text belong to?"""


Body = TypeVar("Body", bound=InputsBody)
Parameters = TypeVar("Parameters", QueryParameters, ClassifyParameters)
Inputs = Sequence[bytes | str]


async def read_query(
    request: Request,
    parameters: Parameters,
    model: type[Body],
    service: Service,
    progress: InProgress,
) -> tuple[Body | Parameters, Inputs]:
    """Read and check the body of a request, in any format, for the model of `service`. Returns the
    query, which is `parameters`, the query in the URL, if the body is a single input; and the
    inputs: images as bytes, or texts.

    Acquires a slot for `progress` once the body has arrived. Classes and images are not validated
    yet. Raises ApiError (400, 408, 413, 415, 422, 429) with the reason.
    """
    limits, reads = service.config, service.model.reads
    kind, of_kind = content_type(request)
    query: Body | Parameters = parameters
    if kind not in ("multipart/form-data", "application/json", ""):
        _check_raw(kind, reads)
    elif parameters.model_fields_set:
        raise ApiError(
            422,
            "invalid_query",
            "the query is in the URL, but the body is JSON or a form. Send the query in the body",
        )
    raw = await read_body(request, service, progress)
    inputs: Inputs
    if kind == "multipart/form-data":
        query, inputs = _from_form(await _parse_form(raw, of_kind, limits), model, reads)
    elif kind in ("application/json", ""):
        query, inputs = await service.parsed(_from_json, raw, model, limits, reads)
    else:
        inputs = [_input(raw, of_kind, reads)]
    check_inputs(inputs, reads, limits)
    return query, inputs


def _from_json(
    raw: bytes, model: type[Body], limits: ServingConfig, reads: Reads
) -> tuple[Body, Inputs]:
    """Return the body and its inputs, decoded."""
    if not raw.strip():
        example = '"images": ["<base64>", …]' if reads == "images" else '"texts": ["…", …]'
        raise ApiError(400, "empty_body", f"the body is empty. Send JSON with {example}")
    body = parse_json(model, raw, limits, "invalid_query")
    _check_kind(reads, images=body.images is not None, texts=body.texts is not None)
    sent = (body.texts if reads == "texts" else body.images) or []
    check_inputs(sent, reads, limits)  # before any image is decoded
    if reads == "texts":
        return body, sent
    return body, [image_bytes(one, f"images[{index}]") for index, one in enumerate(sent)]


async def _parse_form(
    raw: bytes, parameters: Mapping[str, str], limits: ServingConfig
) -> dict[str, list[str | bytes]]:
    """Return the values of each field of the form `raw`: texts, and files as bytes. Files stay in
    memory. Raises ApiError 400 or 415.

    Starlette drops the last part of a truncated form and reads text that is not UTF-8 as Latin-1,
    so both are checked here.
    """
    check_charset(parameters)
    boundary = parameters.get("boundary", "")
    if f"--{boundary}--".encode("latin-1", "replace") not in raw[-_EPILOGUE:]:
        raise _invalid_form("the body does not end with the final boundary")

    async def body() -> AsyncGenerator[bytes, None]:
        yield raw

    def decoded(text: str, name: str) -> str:
        try:
            return text.encode("latin-1").decode()
        except UnicodeError as error:
            raise _invalid_form(f"field {name[:80]!r} is not valid UTF-8") from error

    # Every byte is a character of Latin-1, so that the text can be decoded strictly afterwards.
    quoted = boundary.replace("\\", "\\\\").replace('"', '\\"')
    kind = f'multipart/form-data; boundary="{quoted}"; charset=latin-1'
    # High enough that a form with slightly too many parts reaches the caller, which rejects it with
    # a specific error.
    parser = MultiPartParser(
        Headers({"content-type": kind}),
        body(),
        max_files=limits.max_inputs + 1000,
        max_fields=limits.max_classes + limits.max_inputs + 1000,
        max_part_size=limits.max_body_bytes,
    )
    parser.spool_max_size = limits.max_body_bytes  # keep all files in memory
    try:
        form = await parser.parse()
    except (MultiPartException, LookupError, UnicodeError) as error:
        raise _invalid_form(getattr(error, "message", None) or "the body is malformed") from error
    fields: dict[str, list[str | bytes]] = {}
    try:
        for name, value in form.multi_items():
            content = decoded(value, name) if isinstance(value, str) else await value.read()
            fields.setdefault(decoded(name, name), []).append(content)
    finally:
        await form.close()
    return fields


def _invalid_form(reason: str) -> ApiError:
    return ApiError(400, "invalid_form", f"invalid multipart form: {reason}")


def _from_form(
    fields: Mapping[str, list[str | bytes]], model: type[Body], reads: Reads
) -> tuple[Body, Inputs]:
    """Return the body in the `fields` of a form, and its inputs."""
    _check_kind(reads, images="images" in fields, texts="texts" in fields)
    body = validated(
        model,
        {
            name: values if name == "classes" or len(values) > 1 else values[0]
            for name, values in fields.items()
            if name != reads
        },
        "invalid_query",
    )
    inputs = fields.get(reads, [])
    for position, one in enumerate(inputs):
        if isinstance(one, bytes) != (reads == "images"):
            what = "not a file" if reads == "images" else "a file"
            raise _invalid_form(f"{reads}[{position}] is {what}")
    return body, inputs


def _input(raw: bytes, parameters: Mapping[str, str], reads: Reads) -> bytes | str:
    if not raw:
        what = "image" if reads == "images" else "text"
        raise ApiError(400, "empty_body", f"the body is empty. Send the {what}")
    if reads == "images":
        return raw
    check_charset(parameters)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        message = f"the text contains invalid UTF-8 at byte {error.start}. Send UTF-8"
        raise ApiError(400, "not_a_text", message) from error


def _check_kind(reads: Reads, *, images: bool, texts: bool) -> None:
    """Before any input is decoded, reject a kind of input that the model does not accept."""
    if reads == "images" and texts:
        raise ApiError(422, "not_a_text_model", "this model accepts images. Send images, not texts")
    if reads == "texts" and images:
        raise ApiError(
            422, "not_a_picture_model", "this model accepts texts. Send texts, not images"
        )


def _check_raw(kind: str, reads: Reads) -> None:
    """Reject a body that is neither an image nor a text, or whose kind the model does not
    accept."""
    is_text = kind == "text/plain"
    if not (is_text or kind.startswith("image/") or kind == "application/octet-stream"):
        raise ApiError(
            415,
            "unknown_content_type",
            f"Content-Type {kind[:80]!r} is not supported. Send application/json, "
            "multipart/form-data, an image as image/… or application/octet-stream, or a text as "
            "text/plain",
        )
    _check_kind(reads, images=not is_text, texts=is_text)
