"""Real out-of-memory errors and the suggestions for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heads.similarity import similarity
from tests.shards import glyph_recipe
from trainer.config import Recipe
from trainer.faults import advice, is_out_of_memory
from trainer.world import World

_CPU = World(0, 1, 0, 1, torch.device("cpu"), None)
_CUDA = World(0, 4, 0, 2, torch.device("cuda", 0), None)


def _recipe(**changes: Any) -> Recipe:
    # The default depends on the GPU, and these tests also run without one.
    changes = {"head__memory_mib": 512} | changes
    return glyph_recipe(Path("shards"), Path("run"), **changes)


def _cuda_error() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


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


def test_the_cheapest_changes_are_suggested_first() -> None:
    assert advice(_cuda_error(), _recipe(), _CUDA) == (
        "cuda device 0 ran out of memory in step: CUDA out of memory. Tried to allocate 2.00 GiB.; "
        "try train.micro_batches=2, then train.precision=bf16, then "
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
    assert line.endswith("; try train.class_group=world, then train.strategy.stage=2")


def test_options_of_kway_eval_are_suggested_for_an_evaluation() -> None:
    two = World(0, 2, 0, 2, torch.device("cpu"), None)
    recipe = _recipe(data__workers=2)
    line = advice(MemoryError(), recipe, two, evaluating=True)
    assert line.endswith(
        "; try --set evaluation.batch=256, then --set data.workers=1, then --nproc 1"
    )
    line = advice(MemoryError(), recipe, _CUDA, evaluating=True)
    assert "; try --set evaluation.batch=256, then --set data.workers=1, then" in line
    line = advice(_cuda_error(), recipe, _CUDA, evaluating=True)
    assert line.endswith("; try --set evaluation.batch=256, then --nproc 8")
    line = advice(MemoryError(), _recipe(evaluation__batch=1), _CPU, evaluating=True)
    assert line.endswith("use a machine with more memory")
