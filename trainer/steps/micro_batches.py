"""The micro-batches of a rank's share of a batch: their rows, targets and random numbers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data.loading.batch import Batch


def split_batch(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Split a batch into `num_parts` batches of consecutive rows, some of which may be empty."""
    rows = len(batch.labels)
    for part in range(num_parts):
        begin, end = rows * part // num_parts, rows * (part + 1) // num_parts
        yield batch.each(lambda tensor, begin=begin, end=end: tensor[begin:end])  # type: ignore[misc]


def rows_of_ranks(rank_rows: Sequence[int], num_parts: int, first: int, stop: int) -> list[int]:
    """Return the number of rows of each rank in the parts `first` to `stop` - 1 of `num_parts`.
    `rank_rows` contains the number of rows of each rank in all parts together."""
    return [rows * stop // num_parts - rows * first // num_parts for rows in rank_rows]


def targets(parts: Sequence[Batch]) -> tuple[Tensor, Tensor | None]:
    """Return the labels of `parts` and their weights. The weights are None if there are no mixed
    rows.

    With mixed rows, the labels [2 b] are the first classes of all rows followed by their second
    classes. The loss of a mixed row is then the weighted mean of the losses for its two classes.
    With `batch_ce`, the loss is larger by log 2, because the partition sum contains every row
    twice.
    """
    labels = [part.labels for part in parts]
    second = [part.mixed for part in parts if part.mixed is not None]
    if not second:
        return torch.cat(labels), None
    shares = torch.cat([mixed.weights for mixed in second])
    labels += [mixed.labels for mixed in second]
    return torch.cat(labels), torch.cat([shares, 1 - shares])


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of torch's random number generators on the CPU and on `device`."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
