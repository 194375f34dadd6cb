"""Parse a query from the body or URL of a request into a checked `QueryRequest`.

Bodies are parsed here rather than by the framework, so that invalid UTF-8, deeply nested JSON and
oversized bodies are rejected with a 4xx status and a specific reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr
from starlette.datastructures import FormData

from serving.answer import Rule
from serving.api_error import TOO_MANY_INPUTS, ApiError, validated
from serving.config import ServingConfig
from serving.http.forms import form_images, known_charset, parse_form, text_fields
from serving.http.request_body import (
    MAX_VALUES,
    content_type,
    image_bytes,
    parameter,
    parse_json,
    read_body,
)
from serving.service import InProgress, Service
from serving.top_classes import MAX_TOP
from trainer.bundle.spec import Reads


class InputParameters(BaseModel):
    """Parameters in the URL, for a body that is a single input. Unknown parameters are rejected,
    not ignored."""

    model_config = ConfigDict(extra="forbid")

    def check(self, limits: ServingConfig) -> None:
        """Raise ApiError if a parameter is missing or exceeds a limit."""


class QueryParameters(InputParameters, Rule):
    """`?classes=A&classes=B&recall=0.9`."""

    classes: list[str] = Field(
        default_factory=list,
        description="class names, or # followed by a class ID; can be repeated",
    )

    def check(self, limits: ServingConfig) -> None:
        if not self.classes:
            raise ApiError(
                422,
                "invalid_query",
                "classes is empty. Add at least one class to the URL, as ?classes=NAME",
            )
        check_class_count(len(self.classes), limits.max_classes)


def check_class_count(count: int, most: int) -> None:
    """Raise ApiError 413 for more than `most` classes in one query."""
    if count > most:
        raise ApiError(
            413,
            "too_many_classes",
            f"the request has {count} classes, but the limit is {most}. Split the request",
        )


Body = TypeVar("Body", bound="InputsBody")


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


class ClassifyParameters(InputParameters, Rule):
    """`?top=3&recall=0.9`."""

    top: int = Field(5, ge=1, le=MAX_TOP, description="number of classes per input")


class ClassifyBody(InputsBody, ClassifyParameters):
    """Which classes does each image or text belong to?"""


@dataclass(frozen=True)
class QueryRequest:
    """A well-formed request. Classes and inputs are not validated yet.

    `inputs` contains images as bytes, or texts, depending on the model.
    """

    classes: list[str | int]
    inputs: Sequence[bytes | str]
    rule: Rule


async def read_query(
    request: Request, parameters: QueryParameters, service: Service, progress: InProgress
) -> QueryRequest:
    """Read and check the body of `POST /v1/query`, in any format, for the model of `service`.

    `parameters` is the query in the URL; it is used if the body is a single input. Acquires a slot
    for `progress` once the body has arrived. Raises ApiError (400, 408, 413, 415, 422, 429) with
    the reason.
    """
    body, inputs = await _read(request, parameters, QueryBody, service, progress)
    query = body or parameters
    check_class_count(len(query.classes), service.config.max_classes)
    return QueryRequest(list(query.classes), inputs, query)


async def read_classification(
    request: Request, parameters: ClassifyParameters, service: Service, progress: InProgress
) -> tuple[Sequence[bytes | str], ClassifyParameters]:
    """Read and check the body of `POST /v1/classify`, like `read_query`. Returns the inputs and the
    other parameters."""
    body, inputs = await _read(request, parameters, ClassifyBody, service, progress)
    return inputs, body or parameters


async def _read(
    request: Request,
    parameters: InputParameters,
    model: type[Body],
    service: Service,
    progress: InProgress,
) -> tuple[Body | None, Sequence[bytes | str]]:
    """Return the body, or None if it is a single input, and the inputs."""
    limits, reads = service.config, service.model.reads
    kind, header = content_type(request)
    found: Body | None = None
    inputs: Sequence[bytes | str]
    if kind in ("multipart/form-data", "application/json", ""):
        _check_not_in_url(parameters)
    else:
        _check_raw(kind, reads)
        parameters.check(limits)
    raw = await read_body(request, service, progress)
    if kind == "multipart/form-data":
        form = await parse_form(raw, header, limits)
        try:
            found, inputs = await _from_form(form, model, reads)
        finally:
            await form.close()
    elif kind in ("application/json", ""):
        found, inputs = await service.parsed(_from_json, raw, model, limits, reads)
    else:
        inputs = [_input(raw, parameter(header, "charset"), reads)]
    _check_inputs(inputs, limits, reads)
    return found, inputs


def _check_not_in_url(parameters: InputParameters) -> None:
    if parameters.model_fields_set:
        raise ApiError(
            422,
            "invalid_query",
            "the query is in the URL, but the body is JSON or a form. Send the query in the body",
        )


def _from_json(
    raw: bytes, model: type[Body], limits: ServingConfig, reads: Reads
) -> tuple[Body, Sequence[bytes | str]]:
    """Return the body and its inputs, decoded."""
    if not raw.strip():
        example = '"images": ["<base64>", …]' if reads == "images" else '"texts": ["…", …]'
        raise ApiError(400, "empty_body", f"the body is empty. Send JSON with {example}")
    body = validated(model, parse_json(raw, max_values(limits)), "invalid_query")
    _check_kind(reads, images=body.images is not None, texts=body.texts is not None)
    sent = (body.texts if reads == "texts" else body.images) or []
    _check_input_count(sent, limits, reads)  # before any input is decoded
    inputs: Sequence[bytes | str] = sent
    if reads == "images":
        inputs = [image_bytes(one, f"images[{position}]") for position, one in enumerate(sent)]
    return body, inputs


def max_values(limits: ServingConfig) -> int:
    """Return the maximum number of values in the JSON of a body. It is high enough that a body with
    slightly too many inputs or classes is rejected with a specific error."""
    return MAX_VALUES + limits.max_inputs + limits.max_classes


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
    if kind == "text/plain":
        _check_kind(reads, images=False, texts=True)
    elif kind.startswith("image/") or kind == "application/octet-stream":
        _check_kind(reads, images=True, texts=False)
    else:
        raise ApiError(
            415,
            "unknown_content_type",
            f"Content-Type {kind[:80]!r} is not supported. Send application/json, "
            "multipart/form-data, an image as image/… or application/octet-stream, or a text as "
            "text/plain",
        )


def _input(raw: bytes, charset: str, reads: Reads) -> bytes | str:
    if not raw:
        what = "image" if reads == "images" else "text"
        raise ApiError(400, "empty_body", f"the body is empty. Send the {what}")
    if reads == "images":
        return raw
    codec = known_charset(charset)
    try:
        return raw.decode(codec)
    except UnicodeDecodeError as error:
        message = f"the text contains invalid {codec} at byte {error.start}. Send UTF-8"
        raise ApiError(400, "not_a_text", message) from error


async def _from_form(
    form: FormData, model: type[Body], reads: Reads
) -> tuple[Body, Sequence[bytes | str]]:
    fields = text_fields(form, model.model_fields)
    _check_kind(reads, images="images" in form, texts="texts" in form)
    texts = fields.pop("texts")
    classes = {"classes": fields.pop("classes")} if "classes" in fields else {}
    single = {name: values[0] for name, values in fields.items() if values}
    found = validated(model, {**classes, **single}, "invalid_query")
    return found, texts if reads == "texts" else await form_images(form)


def _check_input_count(inputs: Sequence[object], limits: ServingConfig, reads: Reads) -> None:
    if not inputs:
        what, field = ("image", "images") if reads == "images" else ("text", "texts")
        raise ApiError(
            400, "no_input", f"the request does not contain any {field}. Send at least one {what}"
        )
    if len(inputs) > limits.max_inputs:
        raise ApiError(
            413,
            TOO_MANY_INPUTS[reads],
            f"the request has {len(inputs)} {reads}, but the limit is {limits.max_inputs}. Split "
            "the request",
        )


def _check_inputs(inputs: Sequence[bytes | str], limits: ServingConfig, reads: Reads) -> None:
    _check_input_count(inputs, limits, reads)
    most = limits.max_text_chars
    for position, one in enumerate(inputs):
        if isinstance(one, str) and len(one) > most:
            raise ApiError(
                413,
                "text_too_long",
                f"texts[{position}] has {len(one)} characters, but the limit is {most}. Shorten "
                "the text",
            )
