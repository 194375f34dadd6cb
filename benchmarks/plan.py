"""The step time of `kway plan --gpu cpu` compared with measured steps on this machine:
`python -m benchmarks.plan [SECTION ...]`.

The cases are those of `benchmarks.heads engine` and `benchmarks.trainer step`. The planner measures
single operations on arbitrary numbers; it does not run a step.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import trainer_step
from benchmarks.head_step import DIM, ENGINE_CASES, Step
from benchmarks.timing import Row, Sections, command_line, report
from heads import ClassHead
from heads.losses import CrossEntropy
from launch.plan.cluster import machine_named
from launch.plan.plan import Plan, PlanRequest, make_plan
from trainer.config import Recipe
from trainer.recipe import build_recipe
from trainer.world import open_world

_ROUNDS = 3
_SECONDS = 20.0


class Features(nn.Module):
    """An encoder that costs almost nothing, for plans of a head alone."""

    dim = DIM

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels[:, :1, 0, 0] + self.bias


def heads() -> Iterator[Row]:
    """Compare forward and backward of dense `ce` heads with the planned phase "head"."""
    for classes, batch, memory_mib, _ in ENGINE_CASES:
        head = ClassHead(DIM, classes, CrossEntropy(), memory_mib=memory_mib)
        features = torch.randn(batch, DIM, requires_grad=True)
        step = Step(head, features, torch.randint(classes, (batch,)))
        recipe = _recipe(batch, memory_mib)
        case = f"head, K = {classes:,}, B = {batch:,}, {memory_mib} MiB"
        yield _compared(case, recipe, classes, step, _seconds_of_head)


def trainer() -> Iterator[Row]:
    """Compare a step of the trainer with the whole plan."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, open_world("cpu") as world, ExitStack() as opened:
        torch.set_num_threads(threads)  # `open_world` has set them to the number of cores
        recipe = trainer_step.network_recipe(Path(folder))
        loader = trainer_step.InMemory(trainer_step.random_batch())
        _, steps = trainer_step.open_trainer(
            recipe, world, loader, opened, num_classes=trainer_step.CLASSES
        )
        yield _compared(
            f"trainer, {trainer_step.CASE}",
            recipe,
            trainer_step.CLASSES,
            lambda: steps(1),
            lambda plan: plan.time.seconds,
        )


def _compared(
    case: str,
    recipe: Recipe,
    num_classes: int,
    step: Callable[[], object],
    planned_seconds: Callable[[Plan], float],
) -> Row:
    """Alternate between plans and measurements, so that both are exposed to the same load."""
    planned, measured, began = [], [], time.perf_counter()
    while len(planned) < _ROUNDS and (not planned or time.perf_counter() - began < _SECONDS):
        machine = machine_named("cpu", link_gbps=None, ranks_per_node=1)
        plan = make_plan(recipe, PlanRequest(machine, 1, 1, num_classes))
        planned.append(planned_seconds(plan))
        measured.append(_median_seconds(step))
    ratios = np.array(planned) / np.array(measured)
    times = " / ".join(f"{1e3 * np.median(times):,.1f}" for times in (planned, measured))
    return Row(
        "planned / measured step",
        case,
        f"{np.median(ratios):.2f}",
        "0.75 to 1.25",
        f"{times} ms, {ratios.min():.2f}-{ratios.max():.2f} of {len(ratios)}",
    )


def _median_seconds(step: Callable[[], object]) -> float:
    step()  # warm up
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 1 and len(times) < 30):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _seconds_of_head(plan: Plan) -> float:
    return next(phase.seconds for phase in plan.time.phases if phase.phase == "head")


def _recipe(batch: int, memory_mib: int) -> Recipe:
    tree: dict[str, Any] = {
        "run": "none",
        "data": {"shards": "none", "image": {"size": 2}},
        "backbone": {"kind": "benchmarks.plan:Features"},
        "head": {"memory_mib": memory_mib},
        "optimizer": {"kind": "sgd", "lr": 0.01},
        "train": {"global_batch": batch, "duration": {"steps": 1}},
    }
    kind = tree["backbone"]["kind"]
    return build_recipe(tree, origin="benchmark", allow_imports=[kind])


SECTIONS: Sections = {"heads": heads, "trainer": trainer}


if __name__ == "__main__":
    report(command_line("plan", __doc__).parse_args(), SECTIONS)
