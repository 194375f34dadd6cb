"""What a bundle says about itself in `bundle.json`: preprocessing, logits, loss, recalls.

What grows with the classes lies in files of its own: `trainer/bundle/class_list.py`,
`trainer/bundle/thresholds.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data.images.config import ImageConfig
from heads.logits import Dot, LogitMapConfig
from heads.scores import ScoreKind

Reads = Literal["pictures", "texts"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Spec(BaseModel):
    """Strict: what is not known here is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClassEntry(Spec):
    """A class; its place in the list is its id and its row."""

    name: str = Field(min_length=1)
    attributes: dict[str, str] = {}


class LossSpec(Spec):
    """What the rows were trained with; `aligned`: with the Principle of Logit Separation."""

    kind: str
    aligned: bool
    score: ScoreKind = Field("logit", description="what thresholds are compared with")
    eps: float = Field(0.0, description="of the score `spherical`")


class RecallSpec(Spec):
    """A recall that there are thresholds for: scores at or above which validation showed it."""

    recall: float = Field(gt=0, le=1)
    pooled: Finite | None = Field(None, description="over the positives of all classes")
    pooled_samples: int | None = Field(
        None, gt=0, description="validation samples that the pooled threshold was computed from"
    )
    pooled_precision: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the samples at or above it that are of the class: the mean over the "
        "classes with samples, where a class that no sample reaches counts as 0",
    )
    min_positives: int = Field(
        gt=0, description="a class with fewer in validation takes the pooled threshold"
    )


class TextSpec(Spec):
    """How a text becomes tokens; the tokenizer itself lies beside."""

    max_length: int = Field(gt=0, description="tokens a text keeps, the special ones among them")


class BackboneSpec(Spec):
    """A backbone whose code is not in the bundle: its import path, its options and the version of
    its source at the export."""

    kind: str
    options: dict[str, Any]
    source: str


class BundleSpec(Spec):
    """All of it but the checksums; a model reads pictures or texts."""

    pooling: Literal["auto", "cls", "mean"] = "auto"
    backbone: BackboneSpec | None = Field(
        None, description="of an imported one; others are described in encoder/config.json"
    )
    image: ImageConfig | None = Field(None, description="of a model of pictures")
    text: TextSpec | None = Field(None, description="of a model of texts")
    num_classes: int = Field(gt=0)
    loss: LossSpec
    logits: LogitMapConfig = Field(
        Dot(), description="how features and rows become logits; formats before 4 have none"
    )
    bias: bool
    dim: int = Field(gt=0)
    recalls: tuple[RecallSpec, ...] = Field((), description="there are thresholds for these")

    @model_validator(mode="after")
    def _reads_one_thing(self) -> "BundleSpec":
        if (self.image is None) == (self.text is None):
            raise ValueError("a model reads pictures or texts: give exactly one of image, text")
        return self

    @property
    def reads(self) -> Reads:
        return "texts" if self.image is None else "pictures"

    @property
    def width(self) -> int:
        """Numbers that the file of class weights holds per class: its row, then its bias."""
        return self.dim + self.bias
