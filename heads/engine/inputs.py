"""The inputs of a head, and their collective validation.

Ranks wait for each other in collectives, so an error on one rank alone would leave the others
waiting. Therefore all ranks first exchange sizes, dtypes and errors, and raise the same exception.
"""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, group_rank, group_size
from heads.rows.node_values import FP8

NOTHING_COUNTS = (
    "the global batch has no rows with a positive weight: pass at least one row that is not "
    "ignored and has a weight above 0"
)
_LARGEST = torch.iinfo(torch.int64).max
_NAMED_ROWS = 8
_NAMED_RANKS = 8
# Of a row or a class. Sums and products of larger weights could overflow float32.
LARGEST_WEIGHT = 1e15

# Shape legend: b rows of this rank, d features, n nodes of this rank, K all classes.


def is_integral(labels: Tensor) -> bool:
    """Return whether labels have an integer dtype."""
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


def class_ids(labels: Tensor) -> Tensor:
    """Convert integer labels to int64, which torch supports in comparisons and as indices.

    A uint64 above the range of int64 becomes the maximum of int64, which is outside the classes. A
    cast would wrap it to a negative number, possibly to `ignore_index`.
    """
    if labels.dtype != torch.uint64:
        return labels.long()
    ids = labels.view(torch.int64)
    return ids.where(ids >= 0, _LARGEST)


class Parameters(NamedTuple):
    """The parameters of a head that this rank holds.

    These are the node vectors [n, d], the bias of the nodes [n], and two scalars: the logarithm of
    the scale, and the offset. A parameter that is not learned is None. `row_scales` [n] are the
    scales of fp8 node vectors, which are not learned.
    """

    vectors: Tensor
    bias: Tensor | None = None
    log_scale: Tensor | None = None
    offset: Tensor | None = None
    row_scales: Tensor | None = None


class Required(NamedTuple):
    """Which gradients are required: that of the features, and those of the `Parameters`."""

    features: bool
    vectors: bool
    bias: bool
    log_scale: bool
    offset: bool

    @classmethod
    def of(cls, features: object, parameters: Parameters) -> "Required":
        inputs = features, *parameters[:4]
        return cls(*(isinstance(each, Tensor) and each.requires_grad for each in inputs))


@dataclass(frozen=True)
class RowWeighting:
    """The weight of each row in the mean: the entry of its label in `class_weights` [K] (None: 1),
    or 0 if the label is `ignore_index`."""

    class_weights: Tensor | None = None
    ignore_index: int | None = None

    @property
    def is_uniform(self) -> bool:
        """Whether every row has the weight 1."""
        return self.class_weights is None and self.ignore_index is None

    def counts(self, labels: Tensor) -> Tensor:
        """Return a mask of the rows that are not ignored, bool [b]."""
        if self.ignore_index is None:
            return torch.ones_like(labels, dtype=torch.bool)
        return labels != self.ignore_index

    def __call__(self, labels: Tensor, factors: Tensor | None = None) -> Tensor:
        """Return the weights of rows [b], times `factors` [b].

        Labels outside the classes get an arbitrary weight; `agree` rejects them.
        """
        counts = self.counts(labels)
        weights = counts.to(torch.float32)
        if self.class_weights is not None:
            known = labels.clamp(0, len(self.class_weights) - 1)
            weights = torch.where(counts, self.class_weights[known], 0)
        return weights if factors is None else weights * factors

    def masked(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return `features` [b, d] with zeros in the ignored rows.

        Ignored rows may contain NaN, and 0 times NaN is NaN.
        """
        if self.ignore_index is None:
            return features
        return features.where(self.counts(labels).unsqueeze(1), 0)

    def to(self, device: torch.device) -> "RowWeighting":
        weights = self.class_weights
        return replace(self, class_weights=None if weights is None else weights.to(device))


@dataclass(frozen=True)
class Agreement:
    """The results of the exchange before a computation, on which all ranks base their decisions.

    `sizes` lists the number of rows of each rank in the class group, and `group_sizes` the number
    of rows of each class group along `data`. Ranks may require different gradients, but all ranks
    that contribute to a gradient must compute their terms. `needs`: the gradients of features that
    a rank of the class group requires, and those of parameters that any rank requires.
    `partly_frozen`: only some ranks require the gradient of a parameter. `needs_backward`: at least
    one rank requires a gradient, so every rank runs a backward pass.
    """

    sizes: list[int]
    group_sizes: list[int]
    needs: Required
    needs_backward: bool
    partly_frozen: bool

    @classmethod
    def of_known_rows(
        cls,
        rows_of_ranks: Sequence[int],
        features: Tensor,
        parameters: Parameters,
        class_group: ProcessGroup | None,
        data_group: ProcessGroup | None,
    ) -> "Agreement":
        """Create the agreement without an exchange, if the caller knows the number of rows of every
        rank and all ranks require the same gradients.

        `rows_of_ranks` is in the order of a mesh with the axes `data` and `class`.
        """
        width, groups = group_size(class_group), group_size(data_group)
        if len(rows_of_ranks) != width * groups:
            raise ValueError(
                f"rows_of_ranks has {len(rows_of_ranks)} numbers, but the head is sharded over "
                f"{width * groups} ranks: pass one number per rank"
            )
        of_groups = [
            list(rows_of_ranks[start : start + width])
            for start in range(0, len(rows_of_ranks), width)
        ]
        needs = Required.of(features, parameters)
        return cls(
            of_groups[group_rank(data_group)],
            [sum(rows) for rows in of_groups],
            needs=needs,
            needs_backward=any(needs),
            partly_frozen=False,
        )

    def anchor(self, device: torch.device) -> Tensor:
        """Return a zero that makes the loss differentiable on every rank or on none.

        Without it, `backward` would fail on a rank whose inputs are all frozen, while the other
        ranks wait for it in a collective.
        """
        return torch.zeros((), device=device, requires_grad=self.needs_backward)


def with_known_rows(
    features: Tensor,
    labels: Tensor,
    row_weights: Tensor | None,
    num_rows: int,
    *,
    is_alone: bool,
    ignore_index: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return features, labels and row weights with `num_rows` rows, the number that the other ranks
    expect.

    They would wait for a rank that raised an error, so a wrong number of rows becomes `num_rows`
    rows of NaN and a RuntimeWarning, and the loss is NaN on every rank. Raises ValueError if no
    other rank waits, or if this rank should have no rows.
    """
    if len(features) == len(labels) == num_rows:
        return features, labels, row_weights
    message = (
        f"rows_of_ranks lists {num_rows} rows for this rank, but features have {len(features)} "
        f"rows and there are {len(labels)} labels: pass the number of rows of every rank"
    )
    if is_alone or not num_rows:
        raise ValueError(message)
    warnings.warn(f"the loss is NaN, because {message}", RuntimeWarning, stacklevel=2)
    given = features[:num_rows]
    missing = num_rows - len(given)
    # A function of the features, so that backward calls the collectives of the backbone, too.
    features = torch.nn.functional.pad(given, (0, 0, 0, missing)) * torch.nan
    labels = labels.new_full((num_rows,), int(ignore_index == 0))  # a class that counts
    return features, labels, None if row_weights is None else row_weights.new_ones(num_rows)


def agree(
    features: Tensor,
    labels: Tensor,
    parameters: Parameters,
    row_weights: Tensor | None,
    *,
    settings: Mapping[str, str],
    num_classes: int,
    row_weighting: RowWeighting,
    class_group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> Agreement:
    """Exchange the sizes and errors of a batch, what must be equal on every rank, and which
    gradients are required (collective).

    `settings` are texts that must be equal, by what they describe. One all-gather per group carries
    everything as a vector of integers. Raises ValueError on every rank if the inputs of any rank
    are invalid or if something differs.
    """
    held = parameters.vectors
    num_counting = outside = 0
    if fits := _fits(features, labels, held, row_weights):
        num_counting, outside = _counts(class_ids(labels), row_weights, row_weighting, num_classes)
    num_rows = len(labels) if fits else 0
    equal = {**settings, **_call_settings(features, parameters, row_weights)}
    needs = Required.of(features, parameters)
    digests = [zlib.crc32(text.encode()) for text in equal.values()]
    numbers = [*needs, num_rows, num_counting, outside, not fits, *digests]
    group_ranks = _exchanged([int(number) for number in numbers], class_group, held.device)
    total = [sum(column) for column in zip(*group_ranks, strict=True)]
    groups = _exchanged(total, data_group, held.device)
    columns, all_columns = (
        list(map(list, zip(*each, strict=True))) for each in (group_ranks, groups)
    )
    sizes, _, _, _, *of_ranks = columns[len(needs) :]
    group_sizes, counting, outsides, misfits, *of_groups = all_columns[len(needs) :]
    needing = [sum(column) for column in all_columns[: len(needs)]]
    if any(misfits):
        raise ValueError(
            f"inputs are invalid on {sum(misfits)} of {len(sizes) * len(group_sizes)} ranks; this "
            f"rank has {'valid' if fits else 'invalid'} features {_shown(features)} and labels "
            f"{_shown(labels)}{_described(row_weights)}: pass features as a float tensor "
            f"[b, {held.shape[1]}], labels as an integer tensor [b] and any row weights as a float "
            f"tensor [b] between 0 and {LARGEST_WEIGHT:g}, all on {held.device}"
        )
    differing = [
        f"{name} ({text} on this rank)"
        for (name, text), ranks, totals in zip(equal.items(), of_ranks, of_groups, strict=True)
        if len({*ranks}) > 1 or len({*totals}) > 1
    ]
    if differing:
        raise ValueError(
            f"the heads of the ranks differ in their {', '.join(differing)}: create and call the "
            "head in the same way on every rank"
        )
    if any(outsides):
        raise ValueError(
            f"labels are outside 0..{num_classes - 1} ({sum(outsides)} in the global batch, "
            f"{outside} on this rank): check that the data and the head have the same classes"
        )
    if not any(counting):
        raise ValueError(NOTHING_COUNTS)
    return Agreement(
        sizes,
        group_sizes,
        needs=Required(any(columns[0]), *map(bool, needing[1:])),
        needs_backward=any(needing),
        partly_frozen=any(0 < num < len(sizes) * len(group_sizes) for num in needing[1:]),
    )


def options_of(component: object) -> str:
    """Return the class of a loss or a logit map and its options, as a text that is the same on
    every rank."""
    simple = {
        name: value
        for name, value in sorted(vars(component).items())
        if isinstance(value, bool | int | float | str | None)
    }
    return f"{type(component).__qualname__}({', '.join(f'{k}={v}' for k, v in simple.items())})"


def _call_settings(
    features: Tensor, parameters: Parameters, row_weights: Tensor | None
) -> dict[str, str]:
    """Return what must be equal on every rank apart from the constants of the head."""
    held = parameters.vectors
    dtype = features.dtype if isinstance(features, Tensor) else None
    device = held.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    has = [name for name, value in parameters._asdict().items() if value is not None]
    return {
        "parameters": f"{', '.join(has)} with {held.shape[1]} features of {held.dtype}",
        "dtype of features": f"{dtype}, autocast {autocast}",
        # If only some ranks had row weights, they would call a collective that the others do not.
        "use of row weights": "without" if row_weights is None else "with",
    }


def _counts(
    ids: Tensor, row_weights: Tensor | None, row_weighting: RowWeighting, num_classes: int
) -> tuple[int, int]:
    """Return how many rows have a positive weight, and how many labels are outside the classes."""
    if row_weights is None and row_weighting.is_uniform and len(ids):
        lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
        if lowest >= 0 and highest < num_classes:
            return len(ids), 0
    unknown = ((ids < 0) | (ids >= num_classes)) & row_weighting.counts(ids)
    weights = row_weighting(ids, row_weights).where(~unknown, 1)
    return int((weights > 0).sum()), int(unknown.sum())


def _exchanged(
    numbers: list[int], group: ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """Return the numbers of all ranks of a group (collective)."""
    if group is None:
        return [numbers]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.stack(all_gather_equal(mine, group)).tolist()


def _fits(features: Tensor, labels: Tensor, held: Tensor, row_weights: Tensor | None) -> bool:
    """Return whether the inputs are valid for vectors `held` [n, d] and on the same device.

    Features must be floats [b, d], labels integers [b], and row weights floats [b] between 0 and
    `LARGEST_WEIGHT`.
    """
    given = (features, labels) if row_weights is None else (features, labels, row_weights)
    if not all(isinstance(each, Tensor) for each in given):
        return False
    shapes = features.shape == (*labels.shape, held.shape[1]) and labels.dim() == 1
    together = features.device == labels.device == held.device
    fits = is_integral(labels) and shapes and features.is_floating_point() and together
    if row_weights is None or not fits:
        return fits
    if row_weights.shape != labels.shape or row_weights.device != labels.device:
        return False
    sound = (row_weights >= 0) & (row_weights <= LARGEST_WEIGHT)
    return row_weights.is_floating_point() and bool(sound.all())


def _shown(value: object) -> str:
    """Return the shape, dtype and device of a tensor, or the type of another value."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{list(value.shape)} of {value.dtype} on {value.device}"


def _described(row_weights: Tensor | None) -> str:
    return "" if row_weights is None else f" and row weights {_shown(row_weights)}"


# ---------------------------------------------------------------------------- a loss that is NaN


def non_finite_rows(features: Tensor) -> Tensor:
    """Return the number of rows of `features` [b, d] that are not finite, and the positions of the
    first 8 of them, padded with -1; int64 [1 + 8] on the device of `features`."""
    broken = ~features.isfinite().all(1)
    num_rows = len(broken)
    positions = torch.arange(num_rows, device=features.device).where(broken, num_rows)
    padded = torch.nn.functional.pad(positions, (0, _NAMED_ROWS), value=num_rows)
    first = padded.topk(_NAMED_ROWS, largest=False).values
    return torch.cat([broken.sum().unsqueeze(0), first.where(first < num_rows, -1)])


def nan_loss(
    num_rows: int,
    broken_rows: Tensor,
    held: Tensor,
    bias: Tensor | None,
    class_group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> FloatingPointError:
    """Return the error for a NaN loss, the same on every rank (collective).

    The message lists the ranks whose features, vectors [n, d] or `bias` [n] are not finite.
    `broken_rows` are the `non_finite_rows` of this rank's `num_rows` features. Rows are counted
    from 0.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    finite = _are_finite(held).all(1)
    if bias is not None:
        finite &= bias.isfinite()
    numbers = torch.tensor([rank, num_rows, len(held)], device=held.device)
    mine = torch.cat([numbers, (~finite).sum().unsqueeze(0), broken_rows])
    of_group = torch.stack(all_gather_equal(mine, class_group))
    ranks = torch.cat(all_gather_equal(of_group, data_group)).tolist()
    lines = [line for numbers in ranks if (line := _line(*numbers))]
    if len(lines) > _NAMED_RANKS:
        lines = [*lines[:_NAMED_RANKS], f"and {len(lines) - _NAMED_RANKS} more ranks"]
    where = "; ".join(lines) or "features and weight vectors are finite on every rank"
    return FloatingPointError(
        f"the loss is NaN; {where}: lower the learning rate, or check the inputs"
    )


def _are_finite(held: Tensor) -> Tensor:
    if held.dtype != FP8:
        return held.isfinite()
    # torch has no isfinite for fp8. e4m3 has no infinity. In NaN, all bits except the sign are set.
    return held.view(torch.uint8) & 0x7F != 0x7F


def _line(rank: int, num_rows: int, num_vectors: int, vectors: int, rows: int, *named: int) -> str:
    if not rows and not vectors:
        return ""
    shown = ", ".join(str(row) for row in named if row >= 0) + (", …" if rows > len(named) else "")
    which = f" (row{'s' if rows > 1 else ''} {shown})" if rows else ""
    return (
        f"on rank {rank}, {rows} of {num_rows} rows of features{which} and {vectors} of "
        f"{num_vectors} weight vectors are not finite"
    )
