"""Features of a split. Each rank computes its share, and the ranks of a class group gather their
shares.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.loading.batch import Batch
from heads.collectives import all_gather_equal, all_gather_rows, all_reduce_max
from trainer.evaluation.stopping import EvaluationStopped, ShouldStop
from trainer.task import Task
from trainer.world import World


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split that one class group evaluates. All ranks of the group have the same
    rows.

    `features` has shape [n, V, d], where V is the number of views (crops) of an image if they are
    kept separate, otherwise 1. `labels` has shape [n].
    """

    features: Tensor
    labels: Tensor


def gathered_rows(
    task: Task,
    batches: Iterable[Batch],
    world: World,
    *,
    separate_views: bool,
    progress: Callable[[int], None],
    should_stop: ShouldStop,
) -> SplitRows:
    """Run the backbone over this rank's `batches` and gather its class group's rows (collective).

    Every rank must have the same number of batches, including empty ones, because the forward pass
    of a sharded backbone is collective. `should_stop` is called before each batch.
    """
    features, labels = [], []
    for batch in batches:
        if should_stop():
            raise EvaluationStopped("the evaluation was stopped before it finished")
        features.append(_views(task, batch.inputs, separate=separate_views))
        labels.append(batch.labels.to(world.device))
        if len(batch.labels):
            progress(len(batch.labels))
    nothing = torch.empty(0, dtype=torch.int64, device=world.device)
    mine = torch.cat([_no_features(task, features, world), *features])
    features.clear()  # otherwise they would be in memory twice during the gather
    group = task.head.engine.class_group
    return SplitRows(all_rows(mine, group), all_rows(torch.cat([nothing, *labels]), group))


def _views(task: Task, inputs: dict[str, Tensor], *, separate: bool) -> Tensor:
    """Return the features [b, V, d] of a batch."""
    pixels = inputs.get("pixel_values")
    if not separate or pixels is None or pixels.ndim < 5:
        return task.features(inputs).unsqueeze(1)
    views = task.features({**inputs, "pixel_values": pixels.flatten(0, 1)})
    return views.unflatten(0, (pixels.shape[0], pixels.shape[1]))


def _no_features(task: Task, features: list[Tensor], world: World) -> Tensor:
    """Return an empty tensor [0, V, d], so that ranks without a batch have the right shape
    (collective)."""
    num_views = torch.tensor(max([1, *(part.shape[1] for part in features)]), device=world.device)
    shape = 0, int(all_reduce_max(num_views, world.group)), task.head.dim
    return torch.empty(shape, device=world.device)


def all_rows(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather tensors [b, ...] from all ranks in `group`, in rank order (collective). b may differ
    between ranks.
    """
    count = torch.tensor([len(tensor)], device=tensor.device)
    sizes = torch.cat(all_gather_equal(count, group)).tolist()
    return all_gather_rows(tensor, sizes, group)
