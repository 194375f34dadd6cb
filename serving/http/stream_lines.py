"""The lines of `POST /v1/query:stream`: what one is in, and what comes out for it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from serving.config import ServingConfig
from serving.errors import ApiError, ErrorDetail, describe_invalid
from serving.http.bodies import one_input
from serving.verdicts import Answer, Verdict
from trainer.bundle_spec import Reads

Id = (
    Annotated[StrictStr, Field(max_length=200)] | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
)


class _WithId(BaseModel):
    id: Id | None = Field(None, description="comes back with whatever is said of this line")


class LineIn(_WithId):
    """One picture, or one text."""

    model_config = ConfigDict(extra="forbid")

    image: StrictStr | None = Field(None, description="a picture file in base64, or its data URL")
    text: StrictStr | None = None


class Hit(BaseModel):
    """What the model says of one line; only the classes that match, unless all were asked for."""

    line: int = Field(description="the line's place in the body, from 0; empty lines count")
    id: Id | None = None
    verdicts: list[Verdict]
    notice: str | None = Field(None, description="only there where the model's loss is not aligned")


class LineError(BaseModel):
    """What is wrong with one line, or, without `line`, why the stream ends before the body does."""

    line: int | None = None
    id: Id | None = None
    error: ErrorDetail


class Counts(BaseModel):
    inputs: int = Field(description="lines that were answered")
    hits: int | None = Field(description="of these, with a match; null without a threshold")
    errors: int = Field(description="lines that were refused")


class Done(BaseModel):
    """The last line: all that was read has been answered."""

    done: Counts


def id_of(found: object) -> Id | None:
    """The id of a line, even of a wrong one, if it has a usable one."""
    try:
        return _WithId.model_validate(found).id
    except ValidationError:
        return None


def input_of(found: object, reads: Reads, limits: ServingConfig) -> bytes | str:
    """The picture or text of a line of JSON.

    Raises ApiError where it has none, both, what the model does not read or what is no base64.
    """
    try:
        line = LineIn.model_validate(found)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        raise ApiError(422, "invalid_line", describe_invalid(errors)) from error
    return one_input(line.image, line.text, "invalid_line", reads, limits)


def verdicts_of(answer: Answer, is_short: bool) -> list[Verdict]:
    """The verdicts of an answer about one input, or, if `is_short`, its matches alone."""
    (result,) = answer.results
    return [one for one in result.verdicts if one.match or not is_short]
