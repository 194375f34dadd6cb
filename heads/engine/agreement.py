"""What the ranks must know about each other's batch before they compute its loss.

Ranks wait for each other in collectives, so an error on one rank alone would leave the others
waiting. Therefore all ranks first exchange sizes, dtypes and errors, and raise the same exception.
A caller that already knows the number of rows of every rank can do without this exchange. If a loss
is NaN, the ranks exchange the reasons.
"""

import warnings
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, all_gather_rows, group_rank, group_size
from heads.engine.constants import Engine
from heads.engine.inputs import (
    LARGEST_WEIGHT,
    NO_LABELS,
    NOTHING_COUNTS,
    Batch,
    Parameters,
    Required,
    check_label_sets,
    is_integral,
    loss_weights,
)
from heads.label_sets import LabelSets, class_ids_of
from heads.rows.node_values import FP8

_NAMED_ROWS = 8
_NAMED_RANKS = 8

# Shape legend: b rows of this rank, m rows of the global batch, d features, n nodes of this rank.


class RowCounts(NamedTuple):
    """The number of rows of each rank in the class group, `sizes`, and of each class group along
    `data`, `group_sizes`. The numbers of labels have the same form."""

    sizes: list[int]
    group_sizes: list[int]

    def gather(self, engine: Engine, tensor: Tensor) -> Tensor:
        """Gather the rows [b, ...] of each rank as [m, ...], the global batch (collective)."""
        of_group = all_gather_rows(tensor, self.sizes, engine.class_group)
        return all_gather_rows(of_group, self.group_sizes, engine.data_group)


def known_rows(
    engine: Engine,
    batch: Batch,
    rows_of_ranks: Sequence[int],
    labels_of_ranks: Sequence[int] | None = None,
) -> tuple[RowCounts, RowCounts, Batch]:
    """Return the numbers of rows and of labels of a caller that knows them, without an exchange,
    and the batch with as many rows as the other ranks expect.

    `rows_of_ranks` is in the order of a mesh with the axes `data` and `class`, and so is
    `labels_of_ranks`, which several ranks with label sets need. The other ranks would wait for a
    rank that raised an error, so a wrong number of rows or labels becomes rows of NaN and a
    RuntimeWarning, and the loss is NaN on every rank. Raises ValueError if no other rank waits, or
    if this rank should have no rows.
    """
    features, labels, row_weights = batch
    num_rows, counts = _of_ranks(engine, rows_of_ranks, "rows_of_ranks")
    num_labels, label_counts = num_rows, counts
    if isinstance(labels, LabelSets):
        check_label_sets(engine.loss, engine.class_weights)
        if labels_of_ranks is None and len(rows_of_ranks) == 1:
            labels_of_ranks = [len(labels.labels)]
        num_labels, label_counts = _of_ranks(engine, labels_of_ranks or (), "labels_of_ranks")
    has_labels = len(class_ids_of(labels)) == num_labels
    if len(features) == len(labels) == num_rows and has_labels:
        return counts, label_counts, batch
    message = (
        f"rows_of_ranks lists {num_rows} rows for this rank, but features have {len(features)} "
        f"rows and there are {len(labels)} labels: pass the number of rows of every rank"
    )
    if not has_labels and isinstance(labels, LabelSets):
        message = (
            f"labels_of_ranks lists {num_labels} labels for this rank, but there are "
            f"{len(labels.labels)}: pass the number of labels of every rank"
        )
    if len(rows_of_ranks) == 1 or not num_rows:
        raise ValueError(message)
    warnings.warn(f"the loss is NaN, because {message}", RuntimeWarning, stacklevel=2)
    given = features[:num_rows]
    missing = num_rows - len(given)
    # A function of the features, so that backward calls the collectives of the backbone, too.
    features = torch.nn.functional.pad(given, (0, 0, 0, missing)) * torch.nan
    ids = class_ids_of(labels).new_zeros(num_labels)
    if isinstance(labels, LabelSets):
        labels = LabelSets(ids, labels.offsets.new_zeros(num_rows + 1))
        labels.offsets[1:] = num_labels
    else:
        labels = ids
    weights = None if row_weights is None else row_weights.new_ones(num_rows)
    return counts, label_counts, Batch(features, labels, weights)


def _of_ranks(engine: Engine, numbers: Sequence[int], name: str) -> tuple[int, RowCounts]:
    """Return the number of this rank, and the `numbers` of all ranks by their groups."""
    width, groups = group_size(engine.class_group), group_size(engine.data_group)
    if len(numbers) != width * groups:
        raise ValueError(
            f"{name} has {len(numbers)} numbers, but the head is sharded over {width * groups} "
            "ranks: pass one number per rank"
        )
    of_groups = [list(numbers[start : start + width]) for start in range(0, len(numbers), width)]
    sizes = of_groups[group_rank(engine.data_group)]
    return sizes[group_rank(engine.class_group)], RowCounts(sizes, [*map(sum, of_groups)])


def agree(
    engine: Engine, batch: Batch, parameters: Parameters, *, call: str = ""
) -> tuple[RowCounts, RowCounts]:
    """Exchange the sizes and errors of a batch and what must be equal on every rank (collective).
    Return the numbers of rows and of labels.

    `call` describes the mode and the draw, which must be equal. One all-gather per group carries
    everything as a vector of integers. Raises ValueError on every rank if the inputs of any rank
    are invalid or if something differs.
    """
    features, labels, row_weights = batch
    held, num_classes = parameters.vectors, engine.num_classes
    num_counting = outside = 0
    if fits := _fits(features, labels, held, row_weights):
        num_counting, outside = _counts(engine, labels.long(), row_weights)
    num_rows, num_labels = (len(labels), len(class_ids_of(labels))) if fits else (0, 0)
    of_sets = isinstance(labels, LabelSets)
    equal = _equal_on_all_ranks(engine, batch, parameters, call)
    digests = [zlib.crc32(text.encode()) for text in equal.values()]
    numbers = [num_rows, num_labels, num_counting, outside, int(not fits), *digests]
    group_ranks = _exchanged(numbers, engine.class_group, held.device)
    total = [sum(column) for column in zip(*group_ranks, strict=True)]
    groups = _exchanged(total, engine.data_group, held.device)
    sizes, of_labels, _, _, _, *of_ranks = map(list, zip(*group_ranks, strict=True))
    group_sizes, group_labels, counting, outsides, misfits, *of_groups = map(
        list, zip(*groups, strict=True)
    )
    if any(misfits):
        of_weights = "" if row_weights is None else f" and row weights {_shown(row_weights)}"
        raise ValueError(
            f"inputs are invalid on {sum(misfits)} of {len(sizes) * len(group_sizes)} ranks; this "
            f"rank has {'valid' if fits else 'invalid'} features {_shown(features)} and labels "
            f"{_shown(labels)}{of_weights}: pass features as a float tensor "
            f"[b, {held.shape[1]}], labels as an integer tensor [b] or as LabelSets of b rows with "
            "distinct labels in ascending order and any row weights as a float tensor [b] between "
            f"0 and {LARGEST_WEIGHT:g}, all on {held.device}"
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
    if of_sets:
        check_label_sets(engine.loss, engine.class_weights)
    if any(outsides):
        raise ValueError(
            f"labels are outside 0..{num_classes - 1} ({sum(outsides)} in the global batch, "
            f"{outside} on this rank): check that the data and the head have the same classes"
        )
    if not any(counting):
        raise ValueError(NO_LABELS if of_sets and not any(group_labels) else NOTHING_COUNTS)
    return RowCounts(sizes, group_sizes), RowCounts(of_labels, group_labels)


def _equal_on_all_ranks(
    engine: Engine, batch: Batch, parameters: Parameters, call: str
) -> dict[str, str]:
    """Describe what must be equal on every rank; nothing if there is only one rank."""
    if engine.class_group is None and engine.data_group is None:
        return {}
    (features, labels, row_weights), held = batch, parameters.vectors
    device = held.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    has = [name for name, value in parameters._asdict().items() if value is not None]
    return {
        **engine.settings,
        "mode and draw": call,
        "parameters": f"{', '.join(has)} with {held.shape[1]} features of {held.dtype}",
        "dtype of features": f"{_dtype_of(features)}, autocast {autocast}",
        # If only some ranks had row weights, they would call a collective that the others do not.
        "labels": "label sets" if isinstance(labels, LabelSets) else "one per row",
        "row weights": "none" if row_weights is None else _dtype_of(row_weights),
        "required gradients": f"of {', '.join(Required.of(features, parameters).names())}",
    }


def _counts(
    engine: Engine, labels: Tensor | LabelSets, row_weights: Tensor | None
) -> tuple[int, int]:
    """Return how many rows or labels have a positive weight, and how many labels are outside the
    classes."""
    ids, num_classes = class_ids_of(labels), engine.num_classes
    weights = loss_weights(engine.loss, engine.class_weights, labels, row_weights)
    # All rows count, or all labels.
    num = len(ids if engine.loss.label_sets == "labels" else labels)
    if weights is None and len(ids):
        lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
        if lowest >= 0 and highest < num_classes:
            return num, 0
    unknown = int(((ids < 0) | (ids >= num_classes)).sum())
    return unknown + (num if weights is None else int((weights > 0).sum())), unknown


def _exchanged(
    numbers: list[int], group: ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """Return the numbers of all ranks of a group (collective)."""
    if group is None:
        return [numbers]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.stack(all_gather_equal(mine, group)).tolist()


def _fits(
    features: Tensor, labels: Tensor | LabelSets, held: Tensor, row_weights: Tensor | None
) -> bool:
    """Return whether the inputs are valid for vectors `held` [n, d] and on the same device.

    Features must be floats [b, d], labels integers [b] or valid label sets of b rows, and row
    weights floats [b] between 0 and `LARGEST_WEIGHT`.
    """
    sets = labels if isinstance(labels, LabelSets) else None
    integers = [class_ids_of(labels)] if sets is None else [sets.labels, sets.offsets]
    given = (features, *integers) if row_weights is None else (features, *integers, row_weights)
    if not all(isinstance(each, Tensor) for each in given):
        return False
    if not all(is_integral(each) and each.dim() == 1 for each in integers):
        return False
    if sets is not None and not len(sets.offsets):
        return False
    shapes = features.shape == (len(labels), held.shape[1])
    together = all(each.device == held.device for each in (features, *integers))
    fits = shapes and features.is_floating_point() and together
    if sets is not None and fits:
        fits = _are_valid(sets)
    if row_weights is None or not fits:
        return fits
    if row_weights.shape != features.shape[:1] or row_weights.device != held.device:
        return False
    sound = (row_weights >= 0) & (row_weights <= LARGEST_WEIGHT)
    return row_weights.is_floating_point() and bool(sound.all())


def _are_valid(sets: LabelSets) -> bool:
    """Return whether the offsets ascend from 0 to the number of labels, and the labels of each row
    ascend."""
    sets, num_labels = sets.long(), len(sets.labels)
    ends_fit = (sets.offsets[0] == 0) & (sets.offsets[-1] == num_labels) & (sets.sizes >= 0).all()
    if not ends_fit:
        return False
    begins = sets.row_of_label.diff() > 0
    return bool((begins | (sets.labels.diff() > 0)).all())


def _dtype_of(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else "not a tensor"


def _shown(value: object) -> str:
    """Return the shape, dtype and device of a tensor, or the type of another value."""
    if isinstance(value, LabelSets):
        return f"as LabelSets({_shown(value.labels)}, {_shown(value.offsets)})"
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{list(value.shape)} of {value.dtype} on {value.device}"


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
    engine: Engine, num_rows: int, broken_rows: Tensor, parameters: Parameters
) -> FloatingPointError:
    """Return the error for a NaN loss, the same on every rank (collective).

    The message lists the ranks whose features, vectors or biases are not finite.
    `broken_rows` are the `non_finite_rows` of this rank's `num_rows` features. Rows are counted
    from 0.
    """
    rank, held = dist.get_rank() if dist.is_initialized() else 0, parameters.vectors.detach()
    # torch has no isfinite for fp8. e4m3 has no infinity. In NaN, all bits except the sign are set.
    is_fp8 = held.dtype == FP8
    finite = held.view(torch.uint8) & 0x7F != 0x7F if is_fp8 else held.isfinite()
    finite = finite.all(1)
    if parameters.bias is not None:
        finite &= parameters.bias.isfinite()
    numbers = torch.tensor([rank, num_rows, len(held)], device=held.device)
    mine = torch.cat([numbers, (~finite).sum().unsqueeze(0), broken_rows])
    of_group = torch.stack(all_gather_equal(mine, engine.class_group))
    ranks = torch.cat(all_gather_equal(of_group, engine.data_group)).tolist()
    lines = [line for numbers in ranks if (line := _line(*numbers))]
    if len(lines) > _NAMED_RANKS:
        lines = [*lines[:_NAMED_RANKS], f"and {len(lines) - _NAMED_RANKS} more ranks"]
    where = "; ".join(lines) or "features and weight vectors are finite on every rank"
    return FloatingPointError(
        f"the loss is NaN; {where}: lower the learning rate, or check the inputs"
    )


def _line(rank: int, num_rows: int, num_vectors: int, vectors: int, rows: int, *named: int) -> str:
    if not rows and not vectors:
        return ""
    shown = ", ".join(str(row) for row in named if row >= 0) + (", …" if rows > len(named) else "")
    which = f" (row{'s' if rows > 1 else ''} {shown})" if rows else ""
    return (
        f"on rank {rank}, {rows} of {num_rows} rows of features{which} and {vectors} of "
        f"{num_vectors} weight vectors are not finite"
    )
