"""The `head` section of a recipe: class weights, logit map, loss and options."""

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

from heads.engine.block_size import CPU_MEMORY_MIB
from heads.logit_maps import Dot, LogitMapConfig
from heads.losses import LOSSES, CrossEntropy, LossConfig

_BASE = 1.3


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DenseConfig(_Config):
    """One independent row of weights per class."""

    kind: Literal["dense"] = "dense"


class LabelTreeConfig(_Config):
    """The source of a label tree.

    The tree is a cover tree of the label vectors in the shards, the class hierarchy in the shards,
    or a tree from a file.
    """

    kind: Literal["vectors", "hierarchy"] = Field(
        "vectors",
        description="data in the shards from which to build the tree: the label vectors or the "
        "class hierarchy",
    )
    base: float = Field(
        _BASE,
        ge=1.001,
        le=1000,
        description="base of the cover tree; smaller values give deeper, narrower trees (section "
        "5 of paper 000)",
    )
    file: Path | None = Field(None, description="tree file written by `kway tree build`")

    @model_validator(mode="after")
    def _one_origin(self) -> "LabelTreeConfig":
        if self.base != _BASE and (self.file is not None or self.kind == "hierarchy"):
            other = "file" if self.file is not None else "kind=hierarchy"
            raise ValueError(f"base applies only to trees of label vectors: remove base or {other}")
        if self.file is not None and self.kind == "hierarchy":
            raise ValueError(
                "a tree is built from either a file or the shards: remove file or kind"
            )
        return self


class _TreeConfig(_Config):
    tree: LabelTreeConfig = LabelTreeConfig()
    gradient_damping: float = Field(
        0.0,
        ge=0,
        le=1,
        description="exponent p: the gradient of an inner node is divided by the number of classes "
        "below it to the power p",
    )


class UTreeConfig(_TreeConfig):
    """Rows are sums of class vectors along the path to the root (paper 000, section 4.1)."""

    kind: Literal["utree"] = "utree"

    @model_validator(mode="after")
    def _every_node_a_class(self) -> "UTreeConfig":
        if self.tree.kind == "hierarchy":
            raise ValueError(
                "a utree needs a class at every node, but the inner nodes of a hierarchy are not "
                "classes: set weights.kind=vtree"
            )
        return self


class VTreeConfig(_TreeConfig):
    """Rows are sums of node vectors on the path from leaf to root (paper 000, section 4.2)."""

    kind: Literal["vtree"] = "vtree"


class FactoredConfig(_Config):
    """Dense rows, stored as a product, with a training cost independent of the number of classes.

    Supports only losses that are functions of sum z, sum z^2 and z_y. A bias is not supported.
    Training uses plain SGD without momentum, with the optimizer's lr and weight_decay.
    """

    kind: Literal["factored"] = "factored"


WeightsConfig = Annotated[
    DenseConfig | UTreeConfig | VTreeConfig | FactoredConfig, Field(discriminator="kind")
]


class HeadConfig(_Config):
    """A head: class weights, a logit map and a loss."""

    weights: WeightsConfig = DenseConfig()
    logits: LogitMapConfig = Dot()
    loss: LossConfig = CrossEntropy()
    num_classes: int | None = Field(
        None, gt=0, description="expected number of classes; a mismatch with the data is an error"
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="class weights of the loss; balanced: inversely proportional to the class "
        "frequency",
    )
    bias: bool = Field(
        default=None,
        validate_default=True,
        description="whether the head has a bias: one entry per node, summed along the path of "
        "each class; default: true for dot logits, unless the weights are factored",
    )
    dtype: Literal["fp32", "bf16", "fp8"] = Field(
        "fp32",
        description="number format of the class rows in memory and in checkpoints; fp8 is e4m3 "
        "with a scale per row and needs optimizer.head.fused_sgd",
    )
    init: Literal["means"] | Path | None = Field(
        None,
        description="bundle from which the initial rows and biases are loaded; its classes are "
        "matched by name, and other classes get random rows. means: the initial rows are the mean "
        "features of the training samples of each class, before the first step",
    )
    min_init_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="smallest share of the classes that must have a row in the bundle of init",
    )
    init_std: float = Field(0.01, ge=0, description="standard deviation of the initial rows")
    memory_mib: int | None = Field(
        None,
        gt=0,
        description="memory limit for logits per rank, in MiB; default: 1/32 of the memory of a "
        f"GPU, {CPU_MEMORY_MIB} on a CPU",
    )
    tiles: bool = Field(
        False,
        description="compute the logits in Triton kernels, without writing them to memory; needs "
        "an NVIDIA GPU and a loss that supports it",
    )

    @property
    def has_class_rows(self) -> bool:
        """Whether the classes have rows, which may be bf16 or fp8 and updated by `FusedSGD`."""
        return self.weights.kind != "factored" and not self.loss.over_nodes

    @property
    def needs_hierarchy(self) -> bool:
        """Whether the label tree is the hierarchy in the shards."""
        return isinstance(self.weights, VTreeConfig) and self.weights.tree.kind == "hierarchy"

    @field_validator("bias", mode="before")
    @classmethod
    def _default_bias(cls, bias: Any, info: ValidationInfo) -> Any:
        weights, logits = info.data.get("weights"), info.data.get("logits")
        if bias is not None:
            return bias
        if weights is None or logits is None:  # they are invalid, which is the only error to report
            return False
        return weights.kind != "factored" and not logits.normalizes

    @model_validator(mode="after")
    def _parts_fit(self) -> "HeadConfig":
        weights, loss, logits = self.weights, self.loss, self.logits
        special = loss.kind if loss.over_nodes else weights.kind
        if not self.has_class_rows and not logits.is_plain:
            raise ValueError(
                f"{special} supports only dot logits without a scale, offset or prior: remove "
                "head.logits, or set weights.kind=dense and a loss over classes"
            )
        if not self.has_class_rows and self.dtype != "fp32":
            raise ValueError(f"{special} supports only float32 rows: set dtype=fp32")
        if logits.normalizes and self.bias:
            raise ValueError(f"{logits.kind} logits do not support a bias: set bias=false")
        if loss.over_nodes:
            if not isinstance(weights, _TreeConfig) or self.class_weights != "none":
                raise ValueError(
                    f"{loss.kind} needs a tree and does not support class weights: set "
                    "weights.kind=vtree and class_weights=none"
                )
            if weights.gradient_damping:
                raise ValueError(
                    f"{loss.kind} does not sum gradients over subtrees: set "
                    "weights.gradient_damping=0"
                )
        elif weights.kind == "factored" and not loss.num_power_sums:
            family = [kind for kind, each in LOSSES.items() if each.num_power_sums]
            raise ValueError(
                f"factored weights do not support {loss.kind}: set weights.kind=dense, or set "
                f"loss.kind to one of {', '.join(family)}"
            )
        if self.init is not None and (weights.kind != "dense" or self.dtype != "fp32"):
            raise ValueError(
                "init loads one float32 row per class: set weights.kind=dense and dtype=fp32"
            )
        if weights.kind == "factored" and self.bias:
            raise ValueError("factored weights do not support a bias: set bias=false")
        if weights.kind == "factored" and self.tiles:
            raise ValueError("factored weights do not compute logits: set tiles=false")
        if self.tiles and loss.tile is None:
            raise ValueError(
                f"{loss.kind} does not support tiles, because {loss.without_tile}: set tiles=false"
            )
        return self
