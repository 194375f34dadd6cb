"""Measures the operations of a step on the CPU of this machine.

On a CPU, the time of an operation depends on its kind, its shapes and the caches, which a peak rate
does not describe. The planner therefore runs each distinct operation of the step a few times, with
its shapes, on numbers from 0 to 1. The numbers affect the time: elementary functions take up to 20
times as long on infinities, on NaN and outside their domain (the logarithm of a negative number).

If the step needs more than half of `_CACHE_BYTES`, all tensors of an operation are evicted from the
caches before each run, because other operations of a real step would evict most of them. In a real
step, some of them are still in the caches, but time also passes between operations. The planner
includes neither effect (docs/plan.md).
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from launch.plan.operations import Call, Operation, TensorShape

_ROUNDS = 5
_SECONDS = 0.3  # stop after this time, but run each operation at least twice
_LIMIT_SECONDS = 60.0  # for all operations; the others get the time at the machine's rates
# The usual size of the last-level cache that a group of cores shares on server CPUs. Python's
# `os.sysconf` has no name for this size. On some CPUs, glibc reports the sum over all groups, even
# if a virtual machine has the cores of only one group.
_CACHE_BYTES = 32 << 20


class OperationTimer:
    """Runs operations with `threads` threads and stores their times."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._known: dict[tuple[Call, bool], float | None] = {}
        self._spent = 0.0

    def seconds(self, operation: Operation, *, step_bytes: int, otherwise: float) -> float:
        """Return the time of an operation in a step that needs `step_bytes` of memory, or
        `otherwise` if it cannot be measured."""
        call, evicted = operation.call, step_bytes > _CACHE_BYTES // 2
        if call is None:
            return otherwise
        if (call, evicted) not in self._known:
            if self._spent > _LIMIT_SECONDS:
                return otherwise
            began, threads = time.perf_counter(), torch.get_num_threads()
            torch.set_num_threads(self._threads)
            with torch.random.fork_rng(devices=[]), torch.inference_mode():
                self._known[call, evicted] = self._measured(call, evicted=evicted)
            torch.set_num_threads(threads)
            self._spent += time.perf_counter() - began
        known = self._known[call, evicted]
        return otherwise if known is None else known

    def _measured(self, call: Call, *, evicted: bool) -> float | None:
        arguments = _tensors(call.arguments)
        options = {name: _tensors(value) for name, value in call.options}
        written = _written(call.function, arguments, options)
        other = torch.zeros(2 * _CACHE_BYTES // 4) if evicted else torch.zeros(0)
        try:
            call.function(*arguments, **options)  # warm up
        except RuntimeError:
            # For a few operations, the dtypes of results differ between fake and real tensors: the
            # moments of a bf16 batch norm are float32, but bf16 on fake tensors (torch 2.13). The
            # operation that reads such a result rejects it.
            return None
        times: list[float] = []
        while len(times) < _ROUNDS and (len(times) < 2 or sum(times) < _SECONDS):
            # An operation that changes its operands would otherwise read its own results. With
            # `exp_`, they become infinite after a few runs.
            for tensor in written:
                tensor.fill_(1)
            other.add_(1)
            started = time.perf_counter()
            call.function(*arguments, **options)
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def _tensors(tree: Any) -> Any:
    if isinstance(tree, TensorShape):
        return _tensor(tree)
    return [_tensors(each) for each in tree] if isinstance(tree, tuple) else tree


def _written(function: Any, arguments: Any, options: dict[str, Any]) -> list[Tensor]:
    """Return the floating-point tensors that an operation changes, according to its schema."""
    parameters = function._schema.arguments
    passed = {each.name: value for each, value in zip(parameters, arguments, strict=False)}
    passed |= options
    changed = tree_leaves([passed.get(each.name) for each in parameters if each.is_write])
    return [leaf for leaf in changed if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _tensor(like: TensorShape) -> Tensor:
    ends = ((length - 1) * step for length, step in zip(like.shape, like.stride, strict=True))
    size = max(0, sum(ends) + 1)
    if like.dtype.is_floating_point:
        storage = torch.rand(size).to(like.dtype)
    else:
        storage = torch.zeros(size, dtype=like.dtype)
    return storage.as_strided(like.shape, like.stride)  # integers are 0, which is a valid index
