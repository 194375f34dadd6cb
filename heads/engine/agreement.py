"""What the ranks must know about each other's batch before they compute its loss.

Ranks wait for each other in collectives, so an error on one rank alone would leave the others
waiting. Therefore all ranks first exchange sizes, dtypes and errors, and raise the same exception.
A caller that already knows the number of rows of every rank can do without this exchange.
"""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, group_rank, group_size
from heads.engine.inputs import (
    LARGEST_WEIGHT,
    NOTHING_COUNTS,
    Batch,
    Parameters,
    Required,
    RowWeighting,
    class_ids,
    is_integral,
)

# Shape legend: b rows of this rank, d features, n nodes of this rank.


@dataclass(frozen=True)
class Agreement:
    """The results of the exchange before a computation, on which all ranks base their decisions.

    `sizes` lists the number of rows of each rank in the class group, and `group_sizes` the number
    of rows of each class group along `data`. Ranks may require different gradients, but all ranks
    that contribute to a gradient must compute their terms. `needs`: the gradients of features that
    a rank of the class group requires, and those of parameters that any rank requires.
    `partly_frozen`: only some ranks require the gradient of a parameter. `needs_backward`: at least
    one rank requires a gradient, so every rank runs a backward pass. `is_checked`: the ranks have
    checked the batch, for which the host waits for the device.
    """

    sizes: list[int]
    group_sizes: list[int]
    needs: Required
    needs_backward: bool
    partly_frozen: bool
    is_checked: bool

    def anchor(self, device: torch.device) -> Tensor:
        """Return a zero that makes the loss differentiable on every rank or on none.

        Without it, `backward` would fail on a rank whose inputs are all frozen, while the other
        ranks wait for it in a collective.
        """
        return torch.zeros((), device=device, requires_grad=self.needs_backward)


def known_rows(
    batch: Batch,
    parameters: Parameters,
    rows_of_ranks: Sequence[int],
    *,
    ignore_index: int | None,
    class_group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> tuple[Agreement, Batch]:
    """Return the agreement of a caller that knows the number of rows of every rank, without an
    exchange, and the batch with as many rows as the other ranks expect.

    `rows_of_ranks` is in the order of a mesh with the axes `data` and `class`. All ranks must
    require the same gradients. The other ranks would wait for a rank that raised an error, so a
    wrong number of rows becomes rows of NaN and a RuntimeWarning, and the loss is NaN on every
    rank. Raises ValueError if no other rank waits, or if this rank should have no rows.
    """
    width, groups = group_size(class_group), group_size(data_group)
    if len(rows_of_ranks) != width * groups:
        raise ValueError(
            f"rows_of_ranks has {len(rows_of_ranks)} numbers, but the head is sharded over "
            f"{width * groups} ranks: pass one number per rank"
        )
    of_groups = [
        list(rows_of_ranks[start : start + width]) for start in range(0, len(rows_of_ranks), width)
    ]
    needs, sizes = Required.of(batch.features, parameters), of_groups[group_rank(data_group)]
    agreement = Agreement(
        sizes,
        [sum(rows) for rows in of_groups],
        needs=needs,
        needs_backward=any(needs),
        partly_frozen=False,
        is_checked=False,
    )
    features, labels, row_weights = batch
    num_rows = sizes[group_rank(class_group)]
    if len(features) == len(labels) == num_rows:
        return agreement, batch
    message = (
        f"rows_of_ranks lists {num_rows} rows for this rank, but features have {len(features)} "
        f"rows and there are {len(labels)} labels: pass the number of rows of every rank"
    )
    if len(rows_of_ranks) == 1 or not num_rows:
        raise ValueError(message)
    warnings.warn(f"the loss is NaN, because {message}", RuntimeWarning, stacklevel=2)
    given = features[:num_rows]
    missing = num_rows - len(given)
    # A function of the features, so that backward calls the collectives of the backbone, too.
    features = torch.nn.functional.pad(given, (0, 0, 0, missing)) * torch.nan
    labels = labels.new_full((num_rows,), int(ignore_index == 0))  # a class that counts
    weights = None if row_weights is None else row_weights.new_ones(num_rows)
    return agreement, Batch(features, labels, weights)


def agree(
    batch: Batch,
    parameters: Parameters,
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
    features, labels, row_weights = batch
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
        of_weights = "" if row_weights is None else f" and row weights {_shown(row_weights)}"
        raise ValueError(
            f"inputs are invalid on {sum(misfits)} of {len(sizes) * len(group_sizes)} ranks; this "
            f"rank has {'valid' if fits else 'invalid'} features {_shown(features)} and labels "
            f"{_shown(labels)}{of_weights}: pass features as a float tensor "
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
        is_checked=True,
    )


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
