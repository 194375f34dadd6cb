"""Where the tests of this folder run: on a CUDA device, and the same bodies on the CPU, which keeps
them sound on machines without one."""

import pytest
import torch

_REASON = "needs a CUDA device, and torch sees none"


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test that runs on both."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(_REASON)
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """The device of a test that has no meaning on a CPU; it carries the marker `gpu` itself."""
    if not torch.cuda.is_available():
        pytest.skip(_REASON)
    return torch.device("cuda")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def two(request: pytest.FixtureRequest) -> str:
    """A kind of device of which there are two, one for each of two ranks."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, and torch sees {torch.cuda.device_count()}")
    return str(request.param)
