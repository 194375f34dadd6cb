"""What an answer looks like, to servers and clients alike. Free of torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ThresholdSource = Literal["class", "pooled", "request"]
_EXPECTED_PRECISION = (
    "share of the validation samples at or above the threshold that are of the class; if the "
    "threshold is pooled, the mean of that share over all classes. null: unknown"
)


class ClassThreshold(BaseModel):
    """The threshold of one class and its counts in validation. The counts are null if unknown: for
    a threshold that the request sets, and for bundles exported by an older version of kway."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str = Field(alias="class")
    class_id: int
    threshold: float | None = Field(
        description="scores at or above it match; null if there is no threshold for the class"
    )
    threshold_source: ThresholdSource | None = Field(
        description="the class's own threshold, the pooled one of all classes, or the request's"
    )
    expected_precision: float | None = Field(None, description=_EXPECTED_PRECISION)
    threshold_samples: int | None = Field(
        None, description="validation samples it was computed from: of the class, or of all classes"
    )
    class_samples: int | None = Field(None, description="number of validation samples of the class")
    class_reached: int | None = Field(
        None, description="how many of these are at or above the threshold"
    )
    all_reached: int | None = Field(
        None, description="number of validation samples of any class at or above the threshold"
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
        [], description="one per class of the query; empty if it sets no recall or threshold"
    )
    results: list[InputVerdicts]
