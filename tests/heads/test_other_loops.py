"""The head in other training loops: summed gradients, and the examples in docs/extending.md."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from heads import BatchCrossEntropy, ClassHead, sum_gradients, sum_sharded_gradients
from tests.ranks import rank_mesh, run_on_ranks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
LIBRARY = {
    "head_in_trainer.py": "accelerate",  # transformers' Trainer needs it
    "head_with_accelerate.py": "accelerate",
    "head_in_lightning.py": "lightning",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU())


def gradients(wrap: str) -> list[np.ndarray]:
    """The gradients of the backbone, from this rank's rows of one batch."""
    import torch.distributed as dist

    rank, size = (dist.get_rank(), dist.get_world_size()) if wrap else (0, 1)
    backbone = network()
    inputs, labels = torch.randn(32, 20), torch.randint(50, (32,))
    head = ClassHead(64, 50, BatchCrossEntropy(), mesh=rank_mesh() if wrap else None)
    module = backbone
    if wrap == "ddp":
        module = DistributedDataParallel(backbone)
        module.register_comm_hook(None, sum_gradients)
    elif wrap == "fsdp":
        fully_shard(backbone)
        sum_sharded_gradients(backbone)
    rows = slice(rank * 32 // size, (rank + 1) * 32 // size)
    head(module(inputs[rows]), labels[rows]).backward()
    return [full_array(parameter.grad) for parameter in backbone.parameters()]


def full_array(gradient: torch.Tensor) -> np.ndarray:
    found = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found.numpy().copy()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_summed_gradients_of_two_ranks_equal_the_gradients_of_one_process(wrap):
    expected = gradients("")
    for found in run_on_ranks(2, gradients, wrap):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY)
def test_the_examples_of_the_page_train_like_a_single_process(name, tmp_path):
    library = LIBRARY[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    (code,) = re.findall(rf"^```python\n(# {name}\n.*?)^```$", PAGE.read_text(), re.S | re.M)
    (tmp_path / name).write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    completed = subprocess.run(
        [*command, name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    # These libraries do not destroy all objects of a process group before Python exits, so that
    # gloo's threads may abort a rank that has finished.
    aborted = "terminate called without an active exception" in completed.stderr
    assert completed.returncode == 0 or aborted, completed.stderr
    (found,) = re.findall(r"weights: ([\d.]+)", completed.stdout)
    assert float(found) == pytest.approx(weights_of_one_process(), abs=2e-6)


def weights_of_one_process() -> float:
    backbone = network()
    head = ClassHead(64, 1000, BatchCrossEntropy())
    inputs, labels = torch.randn(32, 20), torch.randint(1000, (32,))
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        head(backbone(inputs), labels).backward()
        optimizer.step()
    return sum(p.detach().double().norm().item() for p in backbone.parameters())
