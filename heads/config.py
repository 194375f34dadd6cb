"""What a recipe may say about the head: class weights and loss. Free of torch: it loads at once."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DenseConfig(_Config):
    """One free row of weights a class."""

    kind: Literal["dense"] = "dense"


class CoverTreeConfig(_Config):
    """A label tree built from the label vectors that travel with the class list."""

    base: float = Field(
        1.3, ge=1.001, le=1000, description="smaller: taller, narrower trees (paper 000, 5)"
    )


class UTreeConfig(_Config):
    """Rows are sums of class vectors on the path to the root (paper 000, section 4.1)."""

    kind: Literal["utree"] = "utree"
    tree: CoverTreeConfig = CoverTreeConfig()


class VTreeConfig(_Config):
    """Rows are sums over leaves (classes) and inner pseudoclasses (paper 000, section 4.2)."""

    kind: Literal["vtree"] = "vtree"
    tree: CoverTreeConfig = CoverTreeConfig()


class CrossEntropyConfig(_Config):
    kind: Literal["ce"] = "ce"


class BatchCrossEntropyConfig(_Config):
    kind: Literal["batch_ce"] = "batch_ce"


class BinaryCrossEntropyConfig(_Config):
    kind: Literal["bce"] = "bce"


WeightsConfig = Annotated[DenseConfig | UTreeConfig | VTreeConfig, Field(discriminator="kind")]
LossConfig = Annotated[
    CrossEntropyConfig | BatchCrossEntropyConfig | BinaryCrossEntropyConfig,
    Field(discriminator="kind"),
]


class HeadConfig(_Config):
    """A head = class weights x a loss."""

    weights: WeightsConfig = DenseConfig()
    loss: LossConfig = CrossEntropyConfig()
    num_classes: int | None = Field(None, gt=0, description="if given, the data must have as many")
    bias: bool = Field(True, description="a constant-1 feature column")
    init_std: float = Field(0.01, ge=0, description="standard deviation of the initial rows")
    memory_mib: int = Field(256, gt=0, description="budget for the logits held at one time, a rank")
