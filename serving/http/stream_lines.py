"""A line that comes in by `POST /v1/query:stream`; what goes out is in `serving/streamed.py`."""

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from serving.config import ServingConfig
from serving.errors import invalid
from serving.http.bodies import one_input
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
        raise invalid("invalid_line", error) from error
    return one_input(line.image, line.text, "invalid_line", reads, limits)


def verdicts_of(answer: Answer, is_short: bool) -> list[Verdict]:
    """The verdicts of an answer about one input, or, if `is_short`, its matches alone."""
    (result,) = answer.results
    return [one for one in result.verdicts if one.match or not is_short]
