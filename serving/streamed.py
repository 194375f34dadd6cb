"""What a stream of lines answers, to servers and clients alike. Free of torch."""

from typing import Annotated

from pydantic import BaseModel, Field, StrictInt, StrictStr

from serving.refusals import ErrorDetail
from serving.verdicts import Verdict

Id = (
    Annotated[StrictStr, Field(max_length=200)] | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
)


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
