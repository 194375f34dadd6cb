"""The interface of a loss.

A loss consists of statistics of each row's logits, which can be merged over blocks of classes (a
commutative monoid), and a function of the merged statistics.

Shape legend: B rows, C classes of a block, K all classes, m rows of the global batch, P labels of
these rows: one per row, so that P = B, or with label sets any number per row.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import pydantic
import torch
from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo
from torch import Tensor

from heads.label_sets import LabelSets
from heads.losses.tile import Reduction, Tile
from heads.tree import LabelTree

Stats = tuple[Tensor, ...]
ScoreKind = Literal["logit", "taylor", "spherical"]

# Losses are pydantic dataclasses, so creating a loss with an unknown option or an out-of-range
# value raises an error, both in Python code and in a recipe.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class ClassFacts:
    """Information about the classes that a loss may need.

    This includes the number of classes K, the number of training samples per class [K], the label
    vectors [K, D], and the label tree if its nodes are the classes.
    """

    num_classes: int
    counts: Tensor | None = None
    label_vectors: Tensor | None = None
    tree: LabelTree | None = None


@dataclass(frozen=True)
class HeldClasses:
    """The classes that a rank holds, `class_ids` [n], in the order of their nodes.

    `position` [K] is the position of every class in this order over all ranks, int32, or None if it
    is the class ID. `first` is the position of this rank's first class.
    """

    class_ids: Tensor
    position: Tensor | None
    first: int

    def positions(self, class_ids: Tensor) -> Tensor:
        """Return the positions of classes [n] among those of this rank; for other classes, numbers
        outside of 0 ... len(self.class_ids) - 1."""
        if self.position is None:
            return class_ids - self.first
        # `index_select` is faster than indexing with a tensor. With few classes, this matters.
        return self.position.index_select(0, class_ids).long() - self.first

    def nearest(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask of the given classes that this rank holds, and their positions among all
        classes that it holds; those of other classes are arbitrary. This rank must hold a class."""
        positions = self.positions(class_ids)
        nearest = positions.clamp(0, len(self.class_ids) - 1)
        return nearest == positions, nearest

    def find(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask of the given classes that this rank holds, and the positions of these
        classes among all classes that it holds."""
        positions = self.positions(class_ids)
        here = (positions >= 0) & (positions < len(self.class_ids))
        return here, positions[here]


@dataclass(frozen=True)
class Choice:
    """The classes of a rank that a step computes, as ascending `positions` [n].

    A sum over all classes is estimated by the sum over these classes times `weights` [n]. If
    `weights` is None, that sum is exact.
    """

    positions: Tensor
    weights: Tensor | None = None


class LabelPositions(NamedTuple):
    """The positions of the rows' labels in a block.

    `here` [P] is true for labels in this block. `columns` [P] are their columns, and any column for
    labels in other blocks. `rows` [P] are the rows of label sets; None: one label per row. Every
    label has an entry, because only the device knows how many labels are in the block: a shorter
    list of positions would make the host wait for that number.
    """

    here: Tensor
    columns: Tensor
    rows: Tensor | None = None

    @classmethod
    def of(cls, columns: Tensor, num_classes: int, rows: Tensor | None = None) -> "LabelPositions":
        """Create the positions from `columns` [P]; labels in other blocks have columns outside
        0..`num_classes` - 1."""
        nearest = columns.clamp(0, num_classes - 1)
        return cls(nearest == columns, nearest, rows)

    def take(self, matrix_BC: Tensor) -> Tensor:
        """Return the elements [P] at the labels, 0 for labels in other blocks."""
        return self._elements(matrix_BC).where(self.here, 0)

    def put(self, matrix_BC: Tensor, values: Tensor | float) -> Tensor:
        """Write `values`, a scalar or [P], at the labels, in place."""
        kept = self._elements(matrix_BC)
        new = torch.where(self.here, values, kept).to(kept.dtype)
        if self.rows is None:
            return matrix_BC.scatter_(1, self.columns.unsqueeze(1), new.unsqueeze(1))
        if not len(new):
            return matrix_BC
        # A label in another block may have the position of a label in this block, and writing the
        # old element there could undo the write of the latter. So all labels in other blocks write
        # what one label in this block writes. If there is none, they write an old element.
        one = self.here.to(torch.uint8).argmax(0, keepdim=True)
        rows, columns, new = (
            each.where(self.here, each[one]) for each in (self.rows, self.columns, new)
        )
        return matrix_BC.index_put_((rows, columns), new)

    def add(self, matrix_BC: Tensor, values: Tensor) -> Tensor:
        """Add `values` [P] at the labels, in place."""
        added = values.where(self.here, 0)
        if self.rows is None:
            return matrix_BC.scatter_add_(1, self.columns.unsqueeze(1), added.unsqueeze(1))
        return matrix_BC.index_put_((self.rows, self.columns), added, accumulate=True)

    def _elements(self, matrix_BC: Tensor) -> Tensor:
        if self.rows is None:
            return matrix_BC.gather(1, self.columns.unsqueeze(1)).squeeze(1)
        return matrix_BC[self.rows, self.columns]


@dataclass(frozen=True)
class Block:
    """A block of classes, and the positions of the rows' labels in it.

    `class_ids` [C] are the classes of the columns, and `labels` [P] are the classes of the rows.
    `positions` are the positions of the labels in this block. `true` [P] is z_y for the labels in
    this block and 0 for the others, so the sum over blocks is z_y. It is a separate autograd leaf:
    its gradient has P elements, whereas a gradient through the logits would have B x C. `weights`
    [C] are the weights of a `Choice`.
    """

    class_ids: Tensor
    labels: Tensor
    positions: LabelPositions
    true: Tensor
    weights: Tensor | None = None

    @classmethod
    def of(
        cls,
        class_ids: Tensor,
        labels: Tensor,
        columns: "Tensor | LabelPositions",
        logits_BC: Tensor,
        weights: Tensor | None = None,
    ) -> "Block":
        """Create a block from the `columns` [B] of one label per row, or from the positions of the
        labels; labels in other blocks have columns outside 0..C-1."""
        positions = (
            LabelPositions.of(columns, len(class_ids)) if isinstance(columns, Tensor) else columns
        )
        true = positions.take(logits_BC.detach())
        true.requires_grad_(logits_BC.requires_grad)
        return cls(class_ids, labels, positions, true, weights)

    @property
    def label_columns(self) -> Tensor:
        """The columns [P] of the labels, -1 for labels in other blocks."""
        return self.positions.columns.where(self.positions.here, -1)

    def false_logits(self, logits_BC: Tensor) -> Tensor:
        """Return the logits with -inf at the labels of each row."""
        result: Tensor = _WithoutLabels.apply(logits_BC, self.positions)
        return result


class _WithoutLabels(torch.autograd.Function):
    """Replaces the elements at the labels with -inf, whose gradient is 0."""

    @staticmethod
    def forward(ctx: Any, matrix_BC: Tensor, positions: LabelPositions) -> Tensor:
        ctx.positions = positions
        return positions.put(matrix_BC.clone(), -torch.inf)

    @staticmethod
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor, None]:
        positions: LabelPositions = ctx.positions
        return positions.put(grad_BC.clone(memory_format=torch.contiguous_format), 0), None


@dataclass(frozen=True)
class Rows:
    """The m rows of the global batch, for `Loss.value`.

    `labels` [P] are their classes and `weights` [m] their weights in the mean (None: uniform).
    `sets` are their label sets (None: one label per row). With sets and a loss whose `label_sets`
    is "labels", `weights` [P] are the weights of the labels.
    """

    num_classes: int
    labels: Tensor
    weights: Tensor | None = None
    sets: LabelSets | None = None

    def mean(self, per_row: Tensor) -> Tensor:
        """Return the weighted mean of `per_row` [m], or 0 if all weights are 0."""
        if self.weights is None:
            return per_row.mean()
        total = self.weights.sum()
        return (self.weights * per_row).sum() / total.where(total > 0, 1)

    def at_labels(self, per_row: Tensor) -> Tensor:
        """Return the element [P] of `per_row` [m] for the row of each label."""
        return per_row if self.sets is None else per_row.index_select(0, self.sets.row_of_label)

    def over_labels(self, per_label: Tensor) -> Tensor:
        """Return the sum [m] of `per_label` [P] over the labels of each row."""
        return per_label if self.sets is None else self.sets.sums(per_label)

    def mean_over_labels(self, per_label: Tensor, *, summed: bool = False) -> Tensor:
        """Return the mean over rows of the weighted mean of `per_label` [P] over the labels of a
        row, or of its weighted sum if `summed`.

        With weights w of the n labels of a row, the weight of the row is sum(w) / n; a row without
        labels has the weight 0.
        """
        if self.sets is None:
            return self.mean(per_label)
        shares = 1 / self.at_labels(self.sets.sizes).to(per_label.dtype)
        weights = torch.ones_like(shares) if self.weights is None else self.weights
        total = (weights * shares).sum()
        terms = weights * per_label * (1 if summed else shares)
        return terms.sum() / total.where(total > 0, 1)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Loss(ABC):
    """A loss over the logits of all classes, computed from statistics of blocks of classes.

    A subclass is a frozen pydantic dataclass whose fields are the options in a recipe. Losses with
    the same options are equal. `kind` is the name in a recipe: a literal for a built-in loss, the
    import path for any other loss. The head calls `prepare` with information about the classes.

    `aligned_if` is the condition under which `aligned` is true, if it depends on the options.
    `couples_rows`: `value` is not a mean of per-row terms. `reductions` has one entry per
    statistic, by which it is merged over blocks and over ranks. A loss with other merge rules has
    no `reductions`; it overrides `merge` and `identity`.
    `num_power_sums` is n if the statistics are the last n of (sum z, sum z^2, z_y), and 0 for a
    loss that needs individual logits. `over_nodes`: the columns are the nodes of a label tree.
    `tile` computes the statistics in a GPU kernel; if it is None, `without_tile` is the reason.
    `accepts_mixed_labels`: a row may occur twice with two different labels, as in mixup.

    `label_sets` states whether the rows may have label sets. "no": every row has one label. "rows":
    the loss is a mean over all rows, also over those without labels. "labels": it consists of terms
    of labels, which class weights multiply; a row without labels has the weight 0. With sets, the
    last statistic is z_y [P], which has one element per label.
    """

    kind: str = Field(default="", kw_only=True, repr=False)

    paper: ClassVar[str]
    statistic: ClassVar[str]
    aligned_if: ClassVar[str] = ""
    couples_rows: ClassVar[bool] = False
    score_kind: ClassVar[ScoreKind] = "logit"
    score_eps: ClassVar[float] = 0.0
    num_power_sums: ClassVar[int] = 0
    over_nodes: ClassVar[bool] = False
    accepts_mixed_labels: ClassVar[bool] = True
    label_sets: ClassVar[Literal["no", "rows", "labels"]] = "no"
    reductions: ClassVar[tuple[Reduction, ...]] = ()
    tile: ClassVar[Tile | None] = None
    without_tile: ClassVar[str] = "it does not define a tile"

    def __post_init__(self) -> None:
        if not self.kind:
            path = f"{type(self).__module__}:{type(self).__qualname__}"
            object.__setattr__(self, "kind", path)  # the dataclass is frozen

    @property
    @abstractmethod
    def aligned(self) -> bool:
        """Whether the loss is aligned with the Principle of Logit Separation (definition 1 of paper
        002).

        It is aligned if, for every batch, a value close enough to the infimum implies that every
        true score is above every false score of any row. For a loss that is estimated by sampling,
        the expected value must imply this, as in appendix D of paper 002 for losses over random
        batches.
        """

    def check_batch(self, num_rows: int) -> None:
        """Raise ValueError if a training step has too few rows for a loss that compares rows."""
        if self.couples_rows and num_rows < 2:
            raise ValueError(
                f"{self.kind} needs a global batch of at least 2 rows, got {num_rows}: "
                "increase train.global_batch"
            )

    @property
    def needs_class_counts(self) -> bool:
        """Whether `prepare` needs the number of training samples of each class."""
        return False

    def prepare(self, facts: ClassFacts) -> Self:
        """Return a copy with the constants that the loss computes from `facts`.

        A loss that is already prepared keeps constants that `facts` do not provide. Raises
        ValueError if constants are missing or do not match the classes.
        """
        self.check_classes(facts.num_classes)
        return self

    def check_classes(self, num_classes: int) -> None:
        """Raise ValueError if options or constants do not match this number of classes."""
        for constant in self.constants().values():
            if len(constant) != num_classes:
                raise ValueError(
                    f"{self.kind} was prepared for {len(constant)} classes, but the head has "
                    f"{num_classes}: create a new head for all classes"
                )

    def to(self, device: torch.device) -> Self:
        """Return a copy with its constants on `device`."""
        return self.with_constants(
            **{name: constant.to(device) for name, constant in self.constants().items()}
        )

    def constants(self) -> dict[str, Tensor]:
        """Return the tensors that `prepare` added, by attribute name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def with_constants(self, **constants: Any) -> Self:
        """Return a copy with these attributes set; they are not options."""
        prepared = copy.copy(self)
        for name, value in constants.items():
            object.__setattr__(prepared, name, value)  # the dataclass is frozen
        return prepared

    @classmethod
    def option_fields(cls) -> dict[str, FieldInfo]:
        """Return the options by name, without `kind`."""
        declared: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
        return {name: field for name, field in declared.items() if name != "kind"}

    def sampled(self, num_classes: int, num_labels: int) -> float | None:
        """Return the expected number of classes that a training step computes if its rows have
        `num_labels` distinct labels, or None for all classes."""
        return None

    def choose(self, held: HeldClasses, labels: Tensor, draw: int | None) -> Choice | None:
        """Return the classes of a rank that a step computes, or None for all of them.

        `labels` [P] are the labels of the global batch. A loss that samples classes uses the step
        number `draw` as its seed, so that all ranks draw the same classes. If `draw` is None, all
        classes are computed.
        """
        return None

    @abstractmethod
    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        """Return the statistics [B, ...] of each row's logits over the block's classes."""

    def merge(self, parts: Sequence[Stats]) -> Stats:
        """Merge the statistics of disjoint blocks. The operation is associative and commutative."""
        if len(parts) == 1:
            return parts[0]
        return tuple(
            logsumexp(torch.stack(column, dim=1))
            if reduction is Reduction.LOGSUMEXP
            else torch.stack(column).sum(0)
            for reduction, column in zip(self.reductions, zip(*parts, strict=True), strict=True)
        )

    def identity(self, like: Tensor) -> Stats:
        """Return the statistics of an empty set of classes, for the rows of `like` [B]."""
        return tuple(
            torch.full_like(like, -torch.inf if reduction is Reduction.LOGSUMEXP else 0)
            for reduction in self.reductions
        )

    @abstractmethod
    def value(self, total: Stats, rows: Rows) -> Tensor:
        """Return the loss, a scalar, from the statistics of all classes and the rows of the global
        batch."""

    def score(self, logits: Tensor) -> Tensor:
        """Convert logits of any shape to the scores that evaluation and serving compare.

        A larger score means that the class is more likely.
        """
        return score(self.score_kind, logits, eps=self.score_eps)

    def initial_bias(self, num_classes: int) -> float:
        """Return the initial bias of every class, if the head has a bias."""
        return 0.0


def score(kind: ScoreKind, logits: Tensor, *, eps: float = 0.0) -> Tensor:
    """Convert logits of any shape to the scores that evaluation and serving compare.

    A larger score means that the class is more likely. `taylor` is 1 + z + z^2 / 2, and `spherical`
    is z^2 + eps (paper 004). In both cases, a very negative logit also has a high score, so the
    logits themselves must not be compared.
    """
    match kind:
        case "logit":
            return logits
        case "taylor":
            return 1 + logits + logits.square() / 2
        case "spherical":
            return logits.square() + eps


class _LogSumExp(torch.autograd.Function):
    """logsumexp over dim 1, whose gradient is zero instead of NaN for a row of -inf.

    Forward saves exp(z - max), so that backward does not recompute it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        top = logits.amax(1, keepdim=True).nan_to_num_(nan=0, posinf=0, neginf=0)
        powers = (logits - top).exp_()
        total = powers.sum(1)
        ctx.save_for_backward(powers, total)
        return total.log().add_(top.squeeze(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        powers, total = ctx.saved_tensors
        # The total is at least exp(0), or 0 for a row of -inf.
        return powers * (grad / total.clamp(min=1)).unsqueeze(1)


def logsumexp(logits_BC: Tensor) -> Tensor:
    """Return log(sum(exp(z))) over dim 1; -inf with a zero gradient if every z is -inf."""
    result: Tensor = _LogSumExp.apply(logits_BC)
    return result
