"""What an answer looks like, to servers and clients alike. Free of torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ThresholdSource = Literal["class", "pooled", "request"]
_EXPECTED_PRECISION = (
    "of validation samples at or above the threshold the share that are of the class; where the "
    "threshold is pooled, the mean of that share over all classes. null: not known"
)


class ClassThreshold(BaseModel):
    """What decides one class, and what validation showed of it. Counts are null where they are not
    known: for a threshold of the request, and for bundles that an older kway exported."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str = Field(alias="class")
    class_id: int
    threshold: float | None = Field(
        description="what scores are compared with; null where nothing decides"
    )
    threshold_source: ThresholdSource | None = Field(
        description="the class's own threshold, the pooled one of all classes, or the request's"
    )
    expected_precision: float | None = Field(None, description=_EXPECTED_PRECISION)
    threshold_samples: int | None = Field(
        None, description="validation samples that set it: of the class, or, if pooled, of all"
    )
    class_samples: int | None = Field(None, description="validation samples of the class")
    class_reached: int | None = Field(
        None, description="of these, how many are at or above the threshold"
    )
    all_reached: int | None = Field(
        None, description="validation samples of any class that are at or above the threshold"
    )


class Verdict(BaseModel):
    """One class for one input."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str = Field(alias="class")
    class_id: int
    score: float = Field(
        description="the logit; where `loss.score` of /v1/model is another, that of the logit"
    )
    threshold: float | None
    threshold_source: ThresholdSource | None = Field(
        description="the class's own threshold, the pooled one of all classes, or the request's"
    )
    expected_precision: float | None = Field(None, description=_EXPECTED_PRECISION)
    match: bool | None = Field(description="score >= threshold; null without a threshold")


class InputVerdicts(BaseModel):
    """What the model says of one input, in the order of the classes asked for."""

    input: int = Field(description="position of the input in the request")
    verdicts: list[Verdict]


class Answer(BaseModel):
    """`aligned`: the loss follows the Principle of Logit Separation, so one logit says enough."""

    aligned: bool
    notice: str | None
    thresholds: list[ClassThreshold] = Field(
        [], description="of each class asked for, in that order; empty where nothing decides"
    )
    results: list[InputVerdicts]
