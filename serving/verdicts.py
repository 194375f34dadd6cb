"""What an answer looks like, to servers and clients alike. Free of torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Verdict(BaseModel):
    """One class for one input."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str = Field(alias="class")
    class_id: int
    score: float = Field(
        description="the logit; where `loss.score` of /v1/model is another, that of the logit"
    )
    threshold: float | None
    threshold_source: Literal["class", "pooled", "request"] | None = Field(
        description="the class's own threshold, the pooled one of all classes, or the request's"
    )
    match: bool | None = Field(description="score >= threshold; null without a threshold")


class InputVerdicts(BaseModel):
    """What the model says of one input, in the order of the classes asked for."""

    input: int = Field(description="position of the input in the request")
    verdicts: list[Verdict]


class Answer(BaseModel):
    """`aligned`: the loss follows the Principle of Logit Separation, so one logit says enough."""

    aligned: bool
    notice: str | None
    results: list[InputVerdicts]
