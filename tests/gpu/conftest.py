"""Device fixtures, which run tests on a CUDA device and on the CPU.

The runs on the CPU show that the tests still work, even on machines without a GPU. They are slow
tests, because other tests check the same claims on the CPU.
"""

import pytest
import torch

_REASON = "needs a CUDA device, which torch does not find"
_DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.slow),
]


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test that runs both on CUDA and on the CPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(_REASON)
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """The device of a CUDA-only test. Mark such a test with `gpu`."""
    if not torch.cuda.is_available():
        pytest.skip(_REASON)
    return torch.device("cuda")


@pytest.fixture(params=_DEVICES)
def two(request: pytest.FixtureRequest) -> str:
    """The device type of a test with two ranks, each with its own device."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, but torch finds {torch.cuda.device_count()}")
    return str(request.param)
