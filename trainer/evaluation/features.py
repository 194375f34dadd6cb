"""Features of a split. Each rank computes its share, and the ranks of a class group gather their
shares.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.loading.batch import Batch
from heads.collectives import all_gather_equal, all_gather_rows
from trainer.task import Task
from trainer.world import World


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split that one class group evaluates: `features` [n, d] and `labels` [n]. All
    ranks of the group have the same rows."""

    features: Tensor
    labels: Tensor


def gathered_rows(
    task: Task,
    batches: Iterable[Batch],
    world: World,
    *,
    progress: Callable[[int], None] = lambda samples: None,
    check: Callable[[], None] = lambda: None,
) -> SplitRows:
    """Run the backbone over this rank's `batches` and gather its class group's rows (collective).

    Every rank must have the same number of batches, including empty ones, because the forward pass
    of a sharded backbone is collective. `check` is called before each batch.
    """
    # Ranks without a batch need the right shape, too.
    features = [torch.empty((0, task.head.dim), device=world.device)]
    labels = [torch.empty(0, dtype=torch.int64, device=world.device)]
    for batch in batches:
        check()
        features.append(task.features(batch.inputs))
        labels.append(batch.labels.to(world.device))
        if len(batch.labels):
            progress(len(batch.labels))
    mine = torch.cat(features)
    features.clear()  # otherwise they would be in memory twice during the gather
    group = task.head.engine.class_group
    return SplitRows(all_rows(mine, group), all_rows(torch.cat(labels), group))


def all_rows(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather tensors [b, ...] from all ranks in `group`, in rank order (collective). b may differ
    between ranks.
    """
    count = torch.tensor([len(tensor)], device=tensor.device)
    sizes = torch.cat(all_gather_equal(count, group)).tolist()
    return all_gather_rows(tensor, sizes, group)
