"""Batches are copied to a CUDA device while the previous step is running."""

import pytest
import torch

from data.loading.batch import Batch
from data.loading.loader import _copy_next, prefetch_to_device


def pinned_batches(num_batches: int) -> list[Batch]:
    """Return batches of 16 MiB in page-locked memory, each filled with its number."""
    return [
        Batch(
            {"pixel_values": torch.full((64, 1, 512, 512), number, dtype=torch.uint8)},
            torch.full((64,), number),
            torch.arange(64),
        ).pin_memory()
        for number in range(num_batches)
    ]


def keep_busy(matrix: torch.Tensor, num_products: int) -> torch.cuda.Event:
    """Launch matrix products on the current stream, and return an event that follows them."""
    for _ in range(num_products):
        torch.mm(matrix, matrix)
    done = torch.cuda.Event()
    done.record()
    return done


@pytest.mark.gpu
def test_the_copy_of_a_batch_does_not_wait_for_the_running_step(cuda: torch.device) -> None:
    matrix, copies = torch.randn(8192, 8192, device=cuda), torch.cuda.Stream(cuda)
    keep_busy(matrix, 1).synchronize()  # creates the workspace of cuBLAS
    step = keep_busy(matrix, 50)  # takes a hundred times as long as the copy
    batch = _copy_next(iter(pinned_batches(1)), cuda, copies)
    copies.synchronize()
    assert not step.query()
    assert batch is not None
    assert batch.labels.device.type == "cuda"


@pytest.mark.gpu
def test_a_late_step_reads_its_own_batch(cuda: torch.device) -> None:
    """The device is several steps behind the host, so batches are freed before they are read."""
    matrix = torch.randn(8192, 8192, device=cuda)
    means = []
    for batch in prefetch_to_device(iter(pinned_batches(8)), cuda):
        keep_busy(matrix, 5)
        means.append(batch.inputs["pixel_values"].float().mean())
        del batch
    assert torch.stack(means).tolist() == [float(number) for number in range(8)]
