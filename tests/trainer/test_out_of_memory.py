"""Real out-of-memory errors and the suggestions for them."""

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heads.build import build_head
from heads.config import HeadConfig
from heads.similarity import similarity
from tests.shards import glyph_recipe
from trainer.config import Recipe
from trainer.faults import advice, is_out_of_memory
from trainer.world import World

_CPU = World(0, 1, 0, 1, torch.device("cpu"), None)
_CUDA = World(0, 4, 0, 2, torch.device("cuda", 0), None)
# The message of torch 2.13 (c10/cuda/CUDACachingAllocator.cpp). It is copied here because these
# tests also run without a CUDA device.
_CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.50 GiB is free. Of the allocated memory 130.00 GiB is allocated by PyTorch, and "
    "{reserved} is reserved by PyTorch but unallocated."
)


def _recipe(**changes: Any) -> Recipe:
    # The default depends on the GPU, and these tests also run without one.
    changes = {"head__memory_mib": 512} | changes
    return glyph_recipe(Path("shards"), Path("run"), **changes)


def _cuda_error(reserved: str = "500.00 MiB") -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(_CUDA_TEXT.format(reserved=reserved))


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: np.empty(2**50),
        lambda: bytearray(2**60),
    ],
    ids=["torch", "numpy", "python"],
)
def test_failed_allocations_are_detected(allocate: Any) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)
    assert "\n" not in advice(caught.value, _recipe(), _CPU)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Storage size calculation overflowed"), ValueError("memory"), OSError(2, "x")],
)
def test_other_errors_are_not_treated_as_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_settings_of_the_head_are_suggested_for_an_error_in_the_head() -> None:
    vectors, row = torch.ones(2, 1).expand(2, 2**45), torch.tensor([0])
    with pytest.raises(RuntimeError) as caught:
        similarity(vectors, row, row)
    for memory_mib, half in ((None, 256), (64, 32)):  # the default on a CPU is 512
        line = advice(caught.value, _recipe(head__memory_mib=memory_mib), _CPU)
        assert "ran out of memory in head: " in line
        assert f"; try head.memory_mib={half}, then " in line


def test_a_head_too_large_to_build_does_not_suggest_smaller_batches() -> None:
    def build() -> None:
        build_head(
            HeadConfig(),
            dim=2**48,
            num_classes=4,
            label_vectors=None,
            mesh=None,
            seed=0,
            device=torch.device("cpu"),
        )

    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        build()
    assert is_out_of_memory(caught.value)
    line = advice(caught.value, _recipe(train__class_group="node"), _CUDA)
    assert "ran out of memory in building: an allocation of 4.19e+06 GiB failed; try " in line
    assert line.endswith(
        "train.class_group=world, then train.strategy.kind=fsdp, then head.dtype=bf16"
    )


@contextmanager
def _no_more_memory() -> Iterator[None]:
    """Limit the memory of this process to 16 MiB more than it uses now."""
    gc.collect()  # memory that is freed later would not count as used
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _backward() -> Callable[[], Any]:
    return torch.ones(2**26, requires_grad=True).exp().sum().backward


def _update() -> Callable[[], Any]:
    weights = torch.nn.Parameter(torch.ones(2**26))
    weights.grad = torch.ones(2**26)
    return torch.optim.AdamW([weights]).step


@pytest.mark.parametrize(("phase", "start"), [("backward", _backward), ("optimizer", _update)])
def test_the_message_contains_the_phase(phase: str, start: Any) -> None:
    act = start()
    with _no_more_memory(), pytest.raises(RuntimeError) as caught:
        act()
    assert is_out_of_memory(caught.value)
    line = f"the machine ran out of memory in {phase}: an allocation of 0.25 GiB failed; try "
    assert advice(caught.value, _recipe(), _CPU).startswith(line)


def test_the_message_for_a_device_contains_the_requested_and_the_free_memory() -> None:
    line = advice(_cuda_error(), _recipe(), _CUDA)
    assert line == (
        "cuda device 0 ran out of memory: an allocation of 2.00 GiB failed with 1.50 GiB of 139.80 "
        "GiB free; try train.micro_batches=2, then train.precision=bf16, then "
        "train.activation_checkpointing=true, then train.strategy.kind=fsdp"
    )


def test_settings_in_use_are_not_suggested() -> None:
    recipe = _recipe(
        train__micro_batches=2,  # of 3 rows per rank: 4 parts would include an empty one
        train__precision="bf16",
        train__activation_checkpointing=True,
        train__strategy={"kind": "deepspeed", "stage": 1},
        train__class_group="node",
    )
    line = advice(_cuda_error(), recipe, _CUDA)
    assert line.endswith(
        "; try train.strategy.stage=2, then train.class_group=world, then head.memory_mib=256"
    )


def test_expandable_segments_are_suggested_first_for_fragmented_memory() -> None:
    line = advice(_cuda_error(reserved="7.00 GiB"), _recipe(), _CUDA)
    assert "try the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True, then" in line


def test_running_out_of_host_memory_in_a_cuda_run_suggests_fewer_loader_workers_first() -> None:
    line = advice(MemoryError(), _recipe(data__workers=8), _CUDA)
    assert line.startswith("the machine ran out of memory: MemoryError; try data.workers=4")


def test_options_of_kway_eval_are_suggested_for_an_evaluation() -> None:
    two = World(0, 2, 0, 2, torch.device("cpu"), None)
    recipe = _recipe(data__workers=2)
    line = advice(MemoryError(), recipe, two, evaluating=True)
    assert line.endswith(
        "; try --set evaluation.batch=256, then --set data.workers=1, then --nproc 1"
    )
    line = advice(MemoryError(), recipe, _CUDA, evaluating=True)
    assert "; try --set data.workers=1, then --set evaluation.batch=256, then" in line
    line = advice(_cuda_error(), recipe, _CUDA, evaluating=True)
    assert line.endswith("; try --set evaluation.batch=256, then --nproc 8")
    line = advice(MemoryError(), _recipe(evaluation__batch=1), _CPU, evaluating=True)
    assert line.endswith("use a machine with more memory")
