"""The busy time of a rank on CUDA, from which slow ranks are detected."""

import time

import pytest
import torch

from trainer.telemetry.phases import Phase, Phases


def multiply(phases: Phases, name: Phase, matrix: torch.Tensor, num_products: int) -> None:
    with phases(name):
        for _ in range(num_products):
            torch.mm(matrix, matrix)


@pytest.mark.gpu
def test_the_busy_time_of_the_stream_excludes_collectives_and_backward(cuda: torch.device) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(4096, 4096, device=device)
    torch.mm(matrix, matrix)  # creates the workspace of cuBLAS
    torch.cuda.synchronize()
    phases = Phases(device)
    multiply(phases, "forward", matrix, 1)
    multiply(phases, "backward", matrix, 100)
    multiply(phases, "communication", matrix, 100)
    started = time.perf_counter()
    early = phases.take_busy()
    waited = time.perf_counter() - started
    torch.cuda.synchronize()
    busy, taken = early + phases.take_busy(), phases.take()
    assert waited < taken["communication"]
    assert taken["forward"] <= busy < taken["communication"]
