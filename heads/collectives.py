"""Collectives for the head and the trainer, with support for uneven numbers of rows.

If the group is None, there is a single process and every call is the identity. In a group of one
rank, the collectives are still called (see `axis_group`). The number of rows may differ
across ranks and may be 0; `sizes` lists the row counts in rank order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# torch 2.11, which `benchmarks.gpu` also supports, has only the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_hook: ContextVar[Callable[[str], AbstractContextManager[None]] | None] = ContextVar(
    "hook", default=None
)


@contextmanager
def collective_hook(hook: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """While the context is active, run each collective of this thread inside `hook(name)`.

    On CUDA, autograd runs backward in separate threads, whose collectives are not covered unless
    `torch.autograd.set_multithreading_enabled(False)` is set.
    """
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


def hooked(name: str) -> AbstractContextManager[None]:
    """Return the active hook's context manager, for a collective called outside this module."""
    hook = _hook.get()
    return nullcontext() if hook is None else hook(name)


def axis_group(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    """Return the group of an axis of `mesh`, or None if the axis has a single rank.

    The axes of a mesh with a single rank do have groups, so that every collective is called.
    Training never creates such a mesh; it is used to run the collectives on one device.
    """
    if mesh is None or (mesh[axis].size() == 1 and mesh.size() > 1):
        return None
    return mesh.get_group(axis)


def hook_pre_forward(module: nn.Module, name: str) -> None:
    """Call the hook of `collective_hook` around the existing forward pre-hooks of `module`, as for
    the collective `name`. The pre-hooks of FSDP2 wait until the weights are gathered.
    """
    running = ExitStack()

    @torch.compiler.disable
    def begin(*_: object) -> None:
        running.enter_context(hooked(name))

    @torch.compiler.disable
    def end(*_: object) -> None:
        running.close()

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_pre_hook(end)


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def all_reduce_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum `tensor` over the group in place, and return it."""
    if group is not None:
        with hooked("all_reduce_sum"):
            dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_max(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Take the maximum of `tensor` over the group in place, and return it."""
    if group is not None:
        with hooked("all_reduce_max"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def broadcast(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Overwrite `tensor` with the tensor of the group's first rank, and return it."""
    if group is not None:
        with hooked("broadcast"):
            dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def all_gather_equal(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order. They must all have the same shape."""
    size = group_size(group)
    if group is None or tensor.numel() == 0:
        return [tensor] * size
    gathered = tensor.new_empty((size * tensor.numel(),))
    with hooked("all_gather"):
        _all_gather(gathered, tensor.contiguous().view(-1), group=group)
    return [part.view(tensor.shape) for part in gathered.chunk(size)]


def all_gather_rows(tensor: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Gather the rows [b, ...] of each rank as [sum(sizes), ...] on every rank; b is sizes[rank].

    Shorter tensors are padded to max(sizes), because the collective requires equal shapes.
    """
    if group is None:
        return tensor
    parts = all_gather_equal(_padded(tensor, max(sizes)), group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter_rows(tensor: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Sum [sum(sizes), ...] over ranks and return this rank's rows, [sizes[rank], ...].

    This is the transpose of `all_gather_rows`.
    """
    longest = max(sizes)
    if group is None or longest == 0:
        return tensor
    padded = torch.cat([_padded(part, longest) for part in tensor.split(list(sizes))])
    mine = tensor.new_empty((longest, *tensor.shape[1:]))
    with hooked("reduce_scatter"):
        _reduce_scatter(mine, padded.contiguous(), group=group)
    return mine[: sizes[group_rank(group)]]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
