"""A line that comes in by `POST /v1/query:stream`; what goes out is in `serving/streamed.py`."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from serving.config import ServingConfig
from serving.errors import ApiError, invalid
from serving.http.bodies import one_input
from serving.http.strict_json import parse_json
from serving.streamed import Id
from serving.verdicts import Answer, Verdict
from trainer.bundle_spec import Reads


class _WithId(BaseModel):
    id: Id | None = Field(None, description="comes back with whatever is said of this line")


class LineIn(_WithId):
    """One picture, or one text."""

    model_config = ConfigDict(extra="forbid")

    image: StrictStr | None = Field(None, description="a picture file in base64, or its data URL")
    text: StrictStr | None = None


@dataclass(frozen=True)
class Line:
    """`id`: the line's own, if it has a usable one; `content`: what the model reads, or what is
    wrong with it."""

    id: Id | None
    content: bytes | str | ApiError


def parse_line(raw: bytes, reads: Reads, limits: ServingConfig) -> Line:
    """A line of JSON -> its picture or text.

    Raises ApiError for what is no JSON; all else that is wrong is the line's content.
    """
    found = parse_json(raw)
    try:
        said = LineIn.model_validate(found)
    except ValidationError as error:
        return Line(_id_of(found), invalid("invalid_line", error))
    try:
        content = one_input(said.image, said.text, "invalid_line", reads, limits)
    except ApiError as error:
        return Line(said.id, error)
    return Line(said.id, content)


def _id_of(found: object) -> Id | None:
    """The id of a wrong line."""
    try:
        return _WithId.model_validate(found).id
    except ValidationError:
        return None


def verdicts_of(answer: Answer, is_short: bool) -> list[Verdict]:
    """The verdicts of an answer about one input, or, if `is_short`, its matches alone."""
    (result,) = answer.results
    return [one for one in result.verdicts if one.match or not is_short]
