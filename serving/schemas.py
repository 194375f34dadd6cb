"""The JSON that the server returns and the client parses.

Covers the verdicts of `/v1/query`, galleries and error bodies. Does not import torch or FastAPI.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

ThresholdSource = Literal["guaranteed", "shrunk", "pooled", "empirical", "override", "request"]
# What a query can require of the thresholds of its classes.
Required = Literal["guaranteed"]
_THRESHOLD_SOURCE = (
    "what the threshold promises. `guaranteed`: with `confidence`, at least the fraction `recall` "
    "of new samples of the class pass. `shrunk`: an estimate from the class and similar classes. "
    "`pooled`: one threshold for all classes. `empirical`: the fraction `recall` of the class's "
    "validation samples pass (bundles of older versions). `override`: set by the operator of the "
    "server, without a promise. `request`: set by the request"
)
_EXPECTED_PRECISION = (
    "fraction of the validation samples at or above the threshold that belong to the class; null "
    "if unknown"
)
_VERSION = Field(
    None,
    description="version of the model that computed the response; identifies the contents of its "
    "bundle (null from older servers)",
)
Interval = tuple[float, float]


class ModelLogits(BaseModel):
    """How the model computes a logit: `scale` times the dot product of features and class weights,
    or their cosine, plus `offset`. With dot products, a class may also have a bias."""

    kind: Literal["dot", "cosine"]
    scale: float = Field(description="scale factor; the final value if it was trained")
    offset: float = Field(description="offset; the final value if it was trained")


class Limits(BaseModel):
    """Limits on one request."""

    max_inputs: PositiveInt
    max_classes: PositiveInt
    max_text_chars: PositiveInt
    max_body_bytes: PositiveInt
    max_pixels: PositiveInt


class ClassFound(BaseModel):
    id: int
    name: str
    attributes: dict[str, str]
    positives: int | None


class ClassPage(BaseModel):
    """One page of the classes that match a search. `total` is the number of matching classes on all
    pages."""

    total: int
    classes: list[ClassFound]


class ErrorDetail(BaseModel):
    code: str
    message: str


class ErrorBody(BaseModel):
    """The body of every response whose status is 4xx or 5xx."""

    error: ErrorDetail


class ClassThreshold(BaseModel):
    """The threshold of one class, what it promises, and its validation counts. Unknown values are
    null. If the request sets the threshold, only `class_samples` is known. Bundles exported by
    older versions of kway contain no pass rates or no counts."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str = Field(alias="class")
    class_id: int
    threshold: float | None = Field(
        description="minimum score of a match; null if the class does not have a threshold, or not "
        "one that is required"
    )
    threshold_source: ThresholdSource | None = Field(description=_THRESHOLD_SOURCE)
    reason: str | None = Field(
        None, description="why there is no threshold, although the query requires a guaranteed one"
    )
    recall: float | None = Field(None, description="recall for which the threshold was computed")
    confidence: float | None = Field(
        None, description="confidence of the guarantee and of the intervals"
    )
    pass_rate: float | None = Field(
        None, description="estimated fraction of new samples of the class that pass"
    )
    pass_rate_interval: Interval | None = Field(
        None, description="interval of `pass_rate`; for a guaranteed threshold, one-sided"
    )
    expected_precision: float | None = Field(None, description=_EXPECTED_PRECISION)
    expected_precision_interval: Interval | None = Field(
        None, description="interval of `expected_precision`"
    )
    classes_below_recall: float | None = Field(
        None,
        description="for a pooled threshold: fraction of the classes with validation samples in "
        "which fewer of them than `recall` pass",
    )
    class_samples: int | None = Field(None, description="number of validation samples of the class")
    class_reached: int | None = Field(
        None, description="number of the class's validation samples at or above the threshold"
    )
    all_reached: int | None = Field(
        None, description="number of validation samples of any class at or above the threshold"
    )


class Verdict(BaseModel):
    """The decision on one class for one input."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str = Field(alias="class")
    class_id: int
    score: float = Field(
        description="the logit, or the score computed from the logit as specified by "
        "`loss.score` in /v1/model"
    )
    threshold: float | None = None
    threshold_source: ThresholdSource | None = Field(None, description=_THRESHOLD_SOURCE)
    expected_precision: float | None = Field(None, description=_EXPECTED_PRECISION)
    match: bool | None = Field(
        None, description="whether score >= threshold; null if there is no threshold"
    )


class InputVerdicts(BaseModel):
    """The verdicts on one input, in the order of the requested classes."""

    input: int = Field(description="position of the input in the request")
    verdicts: list[Verdict]


class Answer(BaseModel):
    """Verdicts for all inputs of a request. `aligned` is true if the loss is aligned with the
    Principle of Logit Separation, which makes the logit of a single class meaningful on its own."""

    version: str | None = _VERSION
    aligned: bool
    notice: str | None
    thresholds: list[ClassThreshold] = Field(
        [],
        description="one per class of the query; empty if the query sets neither a recall nor a "
        "threshold",
    )
    results: list[InputVerdicts]


class InputClasses(BaseModel):
    """The classes with the largest scores for one input, in descending order of score."""

    input: int = Field(description="position of the input in the request")
    classes: list[Verdict]


class Classification(BaseModel):
    """The classes with the largest scores for each input of a request."""

    version: str | None = _VERSION
    results: list[InputClasses]


class GalleryIndex(BaseModel):
    """The approximate index of a gallery."""

    is_default: bool = Field(
        description="whether searches for the first 100 hits use it unless they set `exact`"
    )
    num_queries: int = Field(description="number of queries with which the recall was measured")
    recall: dict[int, float] = Field(
        description="mean share of the k best items that a search finds, for each k"
    )


class GalleryFound(BaseModel):
    name: str
    unavailable: str | None = Field(None, description="why the gallery cannot be searched")
    num_items: int
    reads: Literal["images", "texts"]
    thumbnails: bool
    index: GalleryIndex | None = Field(None, description="null if all searches are exact")


class GalleryList(BaseModel):
    galleries: list[GalleryFound]


class GalleryHit(Verdict):
    """The verdict on one class for one item of a gallery."""

    id: str = Field("", description="id of the item; changes if the gallery is built again")
    item: int = Field(description="index of the item in the gallery's files")
    name: str = Field(description="path of the item in the collection, or its line number")
    text: str | None = Field(description="beginning of the text; null for images")


class ClassHits(ClassThreshold):
    """One page of a gallery's items, sorted by descending score for the class."""

    total: int = Field(
        description="total number of hits across all pages: the matching items, or all items if "
        "there is no threshold; for an approximate search, at most 100 that it finds"
    )
    matches: int | None = Field(
        description="number of items at or above the threshold; null if there is no threshold or "
        "the search is approximate"
    )
    hits: list[GalleryHit]


class Hits(BaseModel):
    """Search results in a gallery for each class, in the order of the request."""

    version: str | None = _VERSION
    aligned: bool
    notice: str | None
    num_items: int
    exact: bool = Field(True, description="whether all items were scored")
    results: list[ClassHits]
