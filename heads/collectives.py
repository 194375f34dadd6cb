"""The collectives of the head and of the trainer: sums, and rows gathered or scattered unevenly.

A group of None is one process alone; then every call is the identity. Ranks may hold different
numbers of rows, none included; `sizes` lists them in rank order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_listener: ContextVar[Callable[[str], AbstractContextManager[None]] | None] = ContextVar(
    "listener", default=None
)


@contextmanager
def listening(around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside the context, each collective of this thread runs within `around(name)`.

    On CUDA, autograd runs backward in separate threads, whose collectives are not covered unless
    `torch.autograd.set_multithreading_enabled(False)` is set.
    """
    token = _listener.set(around)
    try:
        yield
    finally:
        _listener.reset(token)


def announced(name: str) -> AbstractContextManager[None]:
    """Surround a collective that is called outside this module, so that the hook runs for it."""
    around = _listener.get()
    return nullcontext() if around is None else around(name)


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def all_reduce_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the group, in place; the same tensor is returned."""
    if group is not None and group_size(group) > 1:
        with announced("all_reduce_sum"):
            dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_max(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Maximum over the group, in place; the same tensor is returned."""
    if group is not None and group_size(group) > 1:
        with announced("all_reduce_max"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def broadcast(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The first rank's tensor, in place; the same tensor is returned."""
    if group is not None and group_size(group) > 1:
        with announced("broadcast"):
            dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def all_gather_equal(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensor, all of one shape, in rank order."""
    size = group_size(group)
    if size == 1 or tensor.numel() == 0:
        return [tensor] * size
    gathered = tensor.new_empty((size * tensor.numel(),))
    with announced("all_gather"):
        dist.all_gather_single(gathered, tensor.contiguous().view(-1), group=group)
    return [part.view(tensor.shape) for part in gathered.chunk(size)]


def all_gather_rows(tensor: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """[b, ...] on each rank -> [sum(sizes), ...] on all; this rank's b is sizes[rank]."""
    if group_size(group) == 1:
        return tensor
    parts = all_gather_equal(_padded(tensor, max(sizes)), group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter_rows(tensor: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """[sum(sizes), ...] on each rank -> their sum's rows of this rank, [sizes[rank], ...]."""
    longest = max(sizes)
    if group_size(group) == 1 or longest == 0:
        return tensor
    padded = torch.cat([_padded(part, longest) for part in tensor.split(list(sizes))])
    mine = tensor.new_empty((longest, *tensor.shape[1:]))
    with announced("reduce_scatter"):
        dist.reduce_scatter_single(mine, padded.contiguous(), group=group)
    return mine[: sizes[group_rank(group)]]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
