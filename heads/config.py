"""The part of a recipe that describes the head: class weights, loss and options."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from heads.logits import Dot, LogitMapConfig
from heads.losses import LOSSES, CrossEntropy, LossConfig

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


WeightsConfig = Annotated[
    DenseConfig | UTreeConfig | VTreeConfig | FactoredConfig, Field(discriminator="kind")
]


class HeadConfig(_Config):
    """A head = class weights x a logit map x a loss."""

    weights: WeightsConfig = DenseConfig()
    logits: LogitMapConfig = Dot()
    loss: LossConfig = CrossEntropy()
    num_classes: int | None = Field(None, gt=0, description="if given, the data must have as many")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: rows weigh the inverse of their class's frequency"
    )
    bias: bool = Field(
        default=None,
        validate_default=True,
        description="one entry a node, summed along the path of a class; by default for dot logits "
        "of weights that are not factored",
    )
    init_std: float = Field(0.01, ge=0, description="standard deviation of the initial rows")
    memory_mib: int = Field(256, gt=0, description="budget for the logits held at one time, a rank")

    @property
    def needs_hierarchy(self) -> bool:
        """Whether the label tree is the hierarchy of the class list."""
        return isinstance(self.weights, VTreeConfig) and self.weights.tree.kind == "hierarchy"

    @field_validator("bias", mode="before")
    @classmethod
    def _bias_where_it_is_possible(cls, bias: Any, info: ValidationInfo) -> Any:
        weights, logits = info.data.get("weights"), info.data.get("logits")
        if bias is not None or weights is None or logits is None:
            return bias
        return weights.kind != "factored" and not logits.normalizes

    @model_validator(mode="after")
    def _logits_fit(self) -> "HeadConfig":
        logits = self.logits
        special = self.loss.kind if self.loss.over_nodes else self.weights.kind
        if not logits.is_plain and (self.loss.over_nodes or special == "factored"):
            raise ValueError(
                f"{special} has dot logits without scale, offset and prior: leave out head.logits, "
                "or choose weights.kind=dense and a loss over classes"
            )
        if logits.normalizes and self.bias:
            raise ValueError(f"{logits.kind} logits have no bias: leave out bias")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "HeadConfig":
        weights, loss = self.weights.kind, self.loss
        if loss.over_nodes:
            if weights not in ("utree", "vtree") or self.class_weights != "none":
                raise ValueError(
                    f"{loss.kind} needs a tree and no class weights: choose weights.kind=vtree and "
                    "class_weights=none"
                )
            if (
                isinstance(self.weights, UTreeConfig | VTreeConfig)
                and self.weights.gradient_damping
            ):
                raise ValueError(
                    f"{loss.kind} sums no gradients over subtrees: leave weights.gradient_damping "
                    "at 0"
                )
        elif weights == "factored" and not loss.num_power_sums:
            family = [kind for kind, each in LOSSES.items() if each.num_power_sums]
            raise ValueError(
                f"factored weights cannot train {loss.kind}: choose weights.kind=dense, or "
                f"loss.kind of {', '.join(family)}"
            )
        if weights == "factored" and self.bias:
            raise ValueError("factored weights have no bias: set bias=false")
        return self
