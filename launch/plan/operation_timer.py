"""Measures the operations of a step on the CPU of this machine.

On a CPU, the time of an operation depends on its kind, its shapes and the caches, which a peak rate
does not describe. The planner therefore runs each distinct operation of the step a few times, with
its shapes, on arbitrary numbers.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from launch.plan.operations import Call, Operation, TensorShape

_ROUNDS = 5
_SECONDS = 0.05  # stop after this time, but run each operation at least twice
_LIMIT_SECONDS = 60.0  # for all operations; later ones get the time at the machine's rates


class OperationTimer:
    """Runs operations with `threads` threads and remembers their times."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._known: dict[Call, float] = {}
        self._spent = 0.0

    def seconds(self, operation: Operation, *, otherwise: float) -> float:
        """Return the time of an operation; `otherwise`, if it cannot be measured."""
        call = operation.call
        if call is None:
            return otherwise
        if call not in self._known:
            if self._spent > _LIMIT_SECONDS:
                return otherwise
            self._known[call] = self._measure(call)
        return self._known[call]

    def _measure(self, call: Call) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.random.fork_rng(devices=[]), torch.inference_mode():
                return self._median(call)
        finally:
            torch.set_num_threads(threads)

    def _median(self, call: Call) -> float:
        began = time.perf_counter()
        arguments = _tensors(call.arguments)
        options = {name: _tensors(value) for name, value in call.options}
        call.function(*arguments, **options)  # warm up
        times: list[float] = []
        while len(times) < _ROUNDS and (len(times) < 2 or sum(times) < _SECONDS):
            started = time.perf_counter()
            call.function(*arguments, **options)
            times.append(time.perf_counter() - started)
        self._spent += time.perf_counter() - began
        return statistics.median(times)


def _tensors(tree: Any) -> Any:
    if isinstance(tree, TensorShape):
        return _tensor(tree)
    return [_tensors(each) for each in tree] if isinstance(tree, tuple) else tree


def _tensor(like: TensorShape) -> Tensor:
    ends = ((length - 1) * step for length, step in zip(like.shape, like.stride, strict=True))
    storage = torch.zeros(sum(ends) + 1, dtype=like.dtype)
    if like.dtype.is_floating_point:
        storage.normal_()
    return storage.as_strided(like.shape, like.stride)  # integers are 0, which is a valid index
