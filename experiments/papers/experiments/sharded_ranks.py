"""Train heads for a few steps on a mesh of ranks.

    python -m experiments.papers.experiments.sharded_ranks FOLDER [--launch N]

FOLDER contains `settings.json`. With --launch, the command starts N ranks with kway's launcher;
without it, the process is one of these ranks.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor
from torch.optim import SGD

from heads import ClassHead, FactoredHead, build_head
from heads.config import HeadConfig
from launch.ranks.placement import Placement
from trainer.world import World, leave, open_world

SETTINGS, MEASURES = "settings.json", "measures.json"
_TIMEOUT_SECONDS = 120


def rows_file(rank: int) -> str:
    """Return the name of the file in FOLDER with the rows of a rank."""
    return f"rows-{rank}.safetensors"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launch", type=int)
    options = parser.parse_args()
    if options.launch is not None:
        from launch.ranks.run import run_ranks

        module = "experiments.papers.experiments.sharded_ranks"
        return run_ranks(module, [str(options.folder)], Placement(num_processes=options.launch))
    settings = json.loads((options.folder / SETTINGS).read_text())
    group = settings["class_group"]
    with open_world("cpu", class_group=group, timeout_seconds=_TIMEOUT_SECONDS) as world:
        measures, rows = measure(settings, world)
        save_file(rows, options.folder / rows_file(world.rank))
        if world.is_main:
            (options.folder / MEASURES).write_text(json.dumps(measures))
    return 0


def measure(settings: Mapping[str, Any], world: World) -> tuple[Any, dict[str, np.ndarray]]:
    """Return the losses and step times, and this rank's rows after the last step.

    Losses and rows are keyed by case (`weights loss`); step times are those of a larger head.
    """
    losses, rows = {}, {}
    for case in settings["cases"]:
        head = _head(settings, case, world)
        losses[case] = [loss for _, loss in _trained(head, settings, world)]
        blocks = list(head.class_rows())
        rows[f"{case} ids"] = torch.cat([block.class_ids for block in blocks]).numpy()
        rows[f"{case} rows"] = torch.cat([block.rows for block in blocks]).numpy()
    large = {**settings, **settings["timed"]}
    head = _head(large, "dense ce", world)
    seconds = [taken for taken, _ in _trained(head, large, world)]
    return {"losses": losses, "seconds": seconds[1:]}, rows  # the first step is warm-up


def _head(settings: Mapping[str, Any], case: str, world: World) -> ClassHead:
    weights, loss = case.split()
    num_classes = settings["classes"]
    # Clusters, so that the tree has inner nodes.
    draw = np.random.default_rng(0)
    centers = draw.normal(size=(10, 8))
    vectors = centers[np.arange(num_classes) % 10] + 0.1 * draw.normal(size=(num_classes, 8))
    return build_head(
        HeadConfig.model_validate(
            {"weights": {"kind": weights}, "loss": {"kind": loss}, "bias": weights != "factored"}
        ),
        dim=settings["dim"],
        num_classes=num_classes,
        label_vectors=vectors.astype(np.float32) if num_classes < 10_000 else None,
        mesh=world.mesh,
        seed=0,
        device=world.device,
        class_counts=np.arange(1, num_classes + 1),
    )


def _trained(
    head: ClassHead, settings: Mapping[str, Any], world: World
) -> Iterator[tuple[float, float]]:
    """Yield seconds and loss of each step.

    All meshes use the same global batches. Each rank gets its share of the rows; the shares differ
    by at most one row.
    """
    draw = torch.Generator().manual_seed(0)
    factored = isinstance(head, FactoredHead)
    sgd = None if factored else SGD(head.parameters(), lr=settings["rate"])
    for _ in range(settings["steps"]):
        features = torch.randn(settings["batch"], head.dim, generator=draw)
        labels = torch.randint(head.num_classes, (settings["batch"],), generator=draw)
        mine = torch.arange(world.rank, len(labels), world.size)
        world.barrier()
        started = time.perf_counter()
        loss = _step(head, sgd, features[mine].requires_grad_(), labels[mine], settings["rate"])
        yield time.perf_counter() - started, loss


def _step(head: ClassHead, sgd: SGD | None, features: Tensor, labels: Tensor, rate: float) -> float:
    loss: Tensor = head(features, labels)
    loss.backward()
    if sgd is not None:
        sgd.step()
        sgd.zero_grad()
    elif isinstance(head, FactoredHead):
        head.step(rate)
    return float(loss.detach())


if __name__ == "__main__":
    if code := main():
        leave(code)
