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
    features, labels, num_views = [], [], 1
    for batch in batches:
        if should_stop():
            raise EvaluationStopped("the evaluation was stopped before it finished")
        pixels = batch.inputs.get("pixel_values")
        if separate_views and pixels is not None and pixels.ndim == 5:
            num_views = pixels.shape[1]
            views = task.features({**batch.inputs, "pixel_values": pixels.flatten(0, 1)})
            features.append(views.unflatten(0, pixels.shape[:2]))
        else:
            features.append(task.features(batch.inputs).unsqueeze(1))
        labels.append(batch.labels.to(world.device))
        if len(batch.labels):
            progress(len(batch.labels))
    # Ranks without a batch need the right shape, too.
    most_views = all_reduce_max(torch.tensor(num_views, device=world.device), world.group)
    no_features = torch.empty((0, int(most_views), task.head.dim), device=world.device)
    no_labels = torch.empty(0, dtype=torch.int64, device=world.device)
    mine = torch.cat([no_features, *features])
    features.clear()  # otherwise they would be in memory twice during the gather
    group = task.head.engine.class_group
    return SplitRows(all_rows(mine, group), all_rows(torch.cat([no_labels, *labels]), group))


def all_rows(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather tensors [b, ...] from all ranks in `group`, in rank order (collective). b may differ
    between ranks.
    """
    count = torch.tensor([len(tensor)], device=tensor.device)
    sizes = torch.cat(all_gather_equal(count, group)).tolist()
    return all_gather_rows(tensor, sizes, group)
