"""Memory that really runs out, and the line about it."""

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
# What torch 2.13 writes (c10/cuda/CUDACachingAllocator.cpp); there is no device to run out of here.
_CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.50 GiB is free. Of the allocated memory 130.00 GiB is allocated by PyTorch, and "
    "{reserved} is reserved by PyTorch but unallocated."
)


def _recipe(**changes: Any) -> Recipe:
    return glyph_recipe(Path("shards"), Path("run"), **changes)


def _cuda_error(reserved: str = "500.00 MiB") -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(_CUDA_TEXT.format(reserved=reserved))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: np.empty(2**50),
        lambda: bytearray(2**60),
    ],
    ids=["torch", "numpy", "python"],
)
def test_allocations_that_fail_are_out_of_memory(ask: Any) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    assert is_out_of_memory(caught.value)
    assert "\n" not in advice(caught.value, _recipe(), _CPU)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Storage size calculation overflowed"), ValueError("memory"), OSError(2, "x")],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_what_was_asked_for_stands_in_the_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(3 * 2**58, dtype=torch.uint8)
    line = advice(caught.value, _recipe(), _CPU)
    assert line.startswith("the memory of the machine ran out: 768 PiB more were asked for; try ")


def test_what_the_head_asks_for_is_the_heads() -> None:
    vectors, row = torch.ones(2, 1).expand(2, 2**45), torch.tensor([0])
    with pytest.raises(RuntimeError) as caught:
        similarity(vectors, row, row)
    line = advice(caught.value, _recipe(), _CPU)
    assert "ran out in head: " in line
    assert "; try head.memory_mib=128, then " in line


def test_a_head_that_is_too_large_to_build_is_no_matter_of_batches() -> None:
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

    with pytest.raises(MemoryError) as caught:
        build()
    assert is_out_of_memory(caught.value)
    line = advice(caught.value, _recipe(train__class_group="node"), _CUDA)
    assert "ran out in building: 4.00 PiB more were asked for; try " in line
    assert line.endswith("train.class_group=world, then train.strategy.kind=fsdp")


@contextmanager
def _no_more_memory() -> Iterator[None]:
    """This process may have 16 MiB more than it has now."""
    gc.collect()  # what is let go meanwhile would be room
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
def test_a_process_at_its_limit_is_told_the_phase(phase: str, start: Any) -> None:
    act = start()
    with _no_more_memory(), pytest.raises(RuntimeError) as caught:
        act()
    assert is_out_of_memory(caught.value)
    line = f"the memory of the machine ran out in {phase}: 256 MiB more were asked for; try "
    assert advice(caught.value, _recipe(), _CPU).startswith(line)


def test_a_device_that_is_full_is_told_with_what_was_free() -> None:
    line = advice(_cuda_error(), _recipe(), _CUDA)
    assert line == (
        "the memory of cuda device 0 ran out: 2.00 GiB more were asked for, 1.50 GiB of 139.80 GiB "
        "were free; try train.micro_batches=2, then train.precision=bf16, then "
        "train.activation_checkpointing=true, then train.strategy.kind=fsdp"
    )


def test_only_what_is_not_set_is_advised() -> None:
    recipe = _recipe(
        train__micro_batches=2,  # of 3 rows a rank: 4 would leave parts without any
        train__precision="bf16",
        train__activation_checkpointing=True,
        train__strategy={"kind": "deepspeed", "stage": 1},
        train__class_group="node",
    )
    line = advice(_cuda_error(), recipe, _CUDA)
    assert line.endswith(
        "; try train.strategy.stage=2, then train.class_group=world, then head.memory_mib=128"
    )


def test_a_recipe_that_saves_all_it_can_is_told_so() -> None:
    recipe = _recipe(
        train__global_batch=1,
        train__precision="bf16",
        train__activation_checkpointing=True,
        train__strategy={"kind": "fsdp"},
        head__memory_mib=1,
    )
    assert "take more ranks or a smaller backbone" in advice(_cuda_error(), recipe, _CUDA)


def test_lamb_is_never_sent_to_a_stage_of_zero_that_refuses_it() -> None:
    recipe = _recipe(optimizer={"kind": "lamb"}, train__strategy={"kind": "deepspeed", "stage": 0})
    assert "train.strategy.kind=fsdp" in advice(_cuda_error(), recipe, _CUDA)


def test_memory_in_pieces_is_told_before_the_recipe_is_changed() -> None:
    line = advice(_cuda_error(reserved="7.00 GiB"), _recipe(), _CUDA)
    assert "try the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True, then" in line


def test_host_memory_of_a_run_on_cuda_is_the_loaders_first() -> None:
    line = advice(MemoryError(), _recipe(data__workers=8), _CUDA)
    assert line.startswith("the memory of the machine ran out: MemoryError; try data.workers=4")


def test_every_advised_change_is_a_recipe() -> None:
    line = advice(_cuda_error(), _recipe(), _CUDA)
    for change in line.partition("try ")[2].split(", then "):
        key, value = change.split("=")
        _recipe(**{key.replace(".", "__"): value})


def test_an_evaluation_is_advised_in_its_own_options() -> None:
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
    assert line.endswith("its batches cannot be smaller: take a machine with more memory")
