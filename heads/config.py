"""What a recipe may say about the head: class weights and loss. Free of torch: it loads at once."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

_BASE = 1.3


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DenseConfig(_Config):
    """One free row of weights a class."""

    kind: Literal["dense"] = "dense"


class LabelTreeConfig(_Config):
    """A cover tree of the label vectors that travel with the class list, the hierarchy that does,
    or a tree from a file."""

    kind: Literal["vectors", "hierarchy"] = Field("vectors", description="of the shards")
    base: float = Field(
        _BASE, ge=1.001, le=1000, description="smaller: taller, narrower trees (paper 000, 5)"
    )
    file: Path | None = Field(None, description="a tree that `kway tree build` wrote")

    @model_validator(mode="after")
    def _one_origin(self) -> "LabelTreeConfig":
        if self.base != _BASE and (self.file is not None or self.kind == "hierarchy"):
            other = "file" if self.file is not None else "kind=hierarchy"
            raise ValueError(f"base shapes the tree of label vectors: leave out base or {other}")
        if self.file is not None and self.kind == "hierarchy":
            raise ValueError("one tree is of a file or of the shards: leave out file or kind")
        return self


class _TreeConfig(_Config):
    tree: LabelTreeConfig = LabelTreeConfig()
    gradient_damping: float = Field(
        0.0,
        ge=0,
        le=1,
        description="the gradient of an inner node is divided by (classes below it)^this",
    )


class UTreeConfig(_TreeConfig):
    """Rows are sums of class vectors on the path to the root (paper 000, section 4.1)."""

    kind: Literal["utree"] = "utree"

    @model_validator(mode="after")
    def _every_node_a_class(self) -> "UTreeConfig":
        if self.tree.kind == "hierarchy":
            raise ValueError("nodes of a hierarchy are no classes: choose weights.kind=vtree")
        return self


class VTreeConfig(_TreeConfig):
    """Rows are sums over leaves (classes) and inner pseudoclasses (paper 000, section 4.2)."""

    kind: Literal["vtree"] = "vtree"


class FactoredConfig(_Config):
    """Dense rows trained at a cost that does not depend on their number, for losses of sum z,
    sum z^2 and z_y, without bias: by SGD with the optimizer's lr and weight_decay, no momentum."""

    kind: Literal["factored"] = "factored"


class CrossEntropyConfig(_Config):
    kind: Literal["ce"] = "ce"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    z_loss: float = Field(0.0, ge=0, description="weight of logsumexp(z)^2")
    sample_rate: float = Field(
        1.0, gt=0, le=1, description="share of the classes without a row that a step computes"
    )


class BatchCrossEntropyConfig(_Config):
    kind: Literal["batch_ce"] = "batch_ce"


class SelfNormalisationConfig(_Config):
    kind: Literal["self_norm"] = "self_norm"
    alpha: float = Field(0.1, gt=0)


class MaxMarginConfig(_Config):
    kind: Literal["max_margin"] = "max_margin"
    gamma: float = Field(1.0, gt=0)


class BatchMaxMarginConfig(_Config):
    kind: Literal["batch_max_margin"] = "batch_max_margin"
    gamma: float = Field(1.0, gt=0)


class NoiseContrastiveConfig(_Config):
    kind: Literal["nce"] = "nce"
    t: int = Field(10, gt=0, description="noise samples a row")
    samples: int | None = Field(
        None, gt=0, description="classes drawn a step; default: the exact expectation"
    )
    noise: Literal["uniform", "frequency"] = Field(
        "frequency", description="q: the same for every class, or its share of the training labels"
    )


class BinaryCrossEntropyConfig(_Config):
    kind: Literal["bce"] = "bce"


class SoftmaxCauchySchwarzConfig(_Config):
    kind: Literal["softmax_cs"] = "softmax_cs"


class SigmoidCauchySchwarzConfig(_Config):
    kind: Literal["sigmoid_cs"] = "sigmoid_cs"


class SoftmaxTanimotoConfig(_Config):
    kind: Literal["softmax_tanimoto"] = "softmax_tanimoto"


class SigmoidTanimotoConfig(_Config):
    kind: Literal["sigmoid_tanimoto"] = "sigmoid_tanimoto"


class TopKHingeConfig(_Config):
    kind: Literal["topk_hinge"] = "topk_hinge"
    k: int = Field(5, gt=0)
    alpha: float = Field(1.0, ge=0, description="margin")


class SmoothTopKConfig(_Config):
    kind: Literal["smooth_topk"] = "smooth_topk"
    k: int = Field(5, ge=1, le=100)
    tau: float = Field(1.0, gt=0, allow_inf_nan=False, description="temperature; 0: topk_hinge")
    alpha: float = Field(1.0, ge=0, allow_inf_nan=False, description="margin")


class QuadraticConfig(_Config):
    kind: Literal["quadratic"] = "quadratic"


class CorrectClassQuadraticConfig(_Config):
    kind: Literal["ccql"] = "ccql"
    w: float | None = Field(None, ge=0, description="default: sqrt(K - 1) - 1")


class TaylorSoftmaxConfig(_Config):
    kind: Literal["taylor_softmax"] = "taylor_softmax"


class SphericalSoftmaxConfig(_Config):
    kind: Literal["spherical_softmax"] = "spherical_softmax"
    eps: float = Field(1e-2, gt=0)


class SphericalBoundConfig(_Config):
    kind: Literal["spherical_bound"] = "spherical_bound"
    xi: float = Field(1.0, gt=0)


class SimLossConfig(_Config):
    kind: Literal["simloss"] = "simloss"
    lower: float = Field(0.0, ge=-1, lt=1, description="cosine at and below which S is 0")


class HierarchicalSoftmaxConfig(_Config):
    """A softmax at every inner node of `head.weights`' tree; it has no class rows to export."""

    kind: Literal["hierarchical_softmax"] = "hierarchical_softmax"


WeightsConfig = Annotated[
    DenseConfig | UTreeConfig | VTreeConfig | FactoredConfig, Field(discriminator="kind")
]
LossConfig = Annotated[
    CrossEntropyConfig
    | BatchCrossEntropyConfig
    | MaxMarginConfig
    | BatchMaxMarginConfig
    | SelfNormalisationConfig
    | NoiseContrastiveConfig
    | BinaryCrossEntropyConfig
    | SoftmaxCauchySchwarzConfig
    | SigmoidCauchySchwarzConfig
    | SoftmaxTanimotoConfig
    | SigmoidTanimotoConfig
    | TopKHingeConfig
    | SmoothTopKConfig
    | QuadraticConfig
    | CorrectClassQuadraticConfig
    | TaylorSoftmaxConfig
    | SphericalSoftmaxConfig
    | SphericalBoundConfig
    | SimLossConfig
    | HierarchicalSoftmaxConfig,
    Field(discriminator="kind"),
]


def loss_config(kind: str) -> LossConfig:
    """The loss `kind` with its default hyperparameters."""
    config: LossConfig = TypeAdapter[LossConfig](LossConfig).validate_python({"kind": kind})
    return config


_FACTORED_LOSSES = (
    "quadratic",
    "ccql",
    "taylor_softmax",
    "spherical_softmax",
    "spherical_bound",
)


class HeadConfig(_Config):
    """A head = class weights x a loss."""

    weights: WeightsConfig = DenseConfig()
    loss: LossConfig = CrossEntropyConfig()
    num_classes: int | None = Field(None, gt=0, description="if given, the data must have as many")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: rows weigh the inverse of their class's frequency"
    )
    bias: bool = Field(True, description="a constant-1 feature column")
    init_std: float = Field(0.01, ge=0, description="standard deviation of the initial rows")
    memory_mib: int = Field(256, gt=0, description="budget for the logits held at one time, a rank")

    @property
    def needs_hierarchy(self) -> bool:
        """Whether the label tree is the hierarchy of the class list."""
        return isinstance(self.weights, VTreeConfig) and self.weights.tree.kind == "hierarchy"

    @model_validator(mode="after")
    def _parts_fit(self) -> "HeadConfig":
        weights, loss = self.weights.kind, self.loss.kind
        if loss == "hierarchical_softmax":
            if weights not in ("utree", "vtree") or self.class_weights != "none":
                raise ValueError(
                    "hierarchical_softmax needs a tree and no class weights: choose "
                    "weights.kind=vtree and class_weights=none"
                )
            if (
                isinstance(self.weights, UTreeConfig | VTreeConfig)
                and self.weights.gradient_damping
            ):
                raise ValueError(
                    "hierarchical_softmax sums no gradients over subtrees: leave "
                    "weights.gradient_damping at 0"
                )
        elif weights == "factored" and loss not in _FACTORED_LOSSES:
            raise ValueError(
                f"factored weights cannot train {loss}: choose weights.kind=dense, or loss.kind "
                f"of {', '.join(_FACTORED_LOSSES)}"
            )
        if weights == "factored" and self.bias:
            raise ValueError("factored weights have no bias: set bias=false")
        return self
