"""Memory and time of a training step on this machine's CPU, as measured and as planned by
`kway plan --gpu cpu`: `python -m benchmarks.plan [CASE …] [--classes K]`.

Each case is a shipped recipe in float32 with random weights and a small batch, and runs in its own
process, whose high-water mark is read from the kernel. Measurements of the machine's rates and of
steps alternate, so that both are exposed to the same load. The process has the rows of K classes:
125,000 for the share of one of 8 ranks of 10^6 classes, 195,313 for one of 512 ranks of 10^8.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

import launch
from benchmarks.gpu.tasks import random_batch
from benchmarks.timing import Row, command_line, numbers_of_a_process, report, resident
from launch.plan.cluster import machine_named
from launch.plan.plan import Plan
from launch.plan.request import PlanRequest
from trainer.recipe import load_recipe
from trainer.step import take_step
from trainer.task import build_task
from trainer.world import open_world

# Recipe, and overrides.
CASES: dict[str, tuple[str, list[str]]] = {
    "resnet50": ("imagenet-resnet50", []),
    "mbert": (
        "twitter-mbert",
        ["backbone={config: {model_type: bert, vocab_size: 119547}, pooling: mean}"],
    ),
}
BATCH, NUM_STEPS = 16, 4


def rows(case: str, num_classes: int) -> Iterator[Row]:
    one = ("--one", case, "--classes", str(num_classes), "--threads", str(torch.get_num_threads()))
    memory, peak, planned, measured = numbers_of_a_process("benchmarks.plan", *one)
    case = f"{case}, {num_classes:,} classes"
    details = f"{memory / 2**30:.2f} / {peak / 2**30:.2f} GiB"
    yield Row("memory, planned / measured", case, f"{memory / peak:.2f}", details=details)
    details = f"{planned:.2f} / {measured:.2f} s"
    yield Row("time, planned / measured", case, f"{planned / measured:.2f}", details=details)


def compare(case: str, num_classes: int, threads: int) -> tuple[float, float, float, float]:
    """Return the planned and the measured peak of the main memory in bytes, and the planned and the
    measured seconds of a step."""
    name, overrides = CASES[case]
    overrides = [*overrides, f"train.global_batch={BATCH}", "train.precision=fp32"]
    overrides.append("checkpoint.in_background=false")
    recipe = load_recipe(Path(launch.__file__).parent / "recipes" / f"{name}.yaml", overrides)
    planned, measured = [], []
    with open_world("cpu") as world:
        torch.set_num_threads(threads)  # `open_world` has set them to the number of cores
        names = [f"class {label}" for label in range(num_classes)]
        task = build_task(recipe, class_names=names, label_vectors=None, world=world)
        task.train().start_training()
        batch = random_batch(recipe, num_classes, world.device)
        take_step(task, batch, 1.0, step=1)
        for step in range(2, NUM_STEPS + 2):
            machine = machine_named("cpu", link_gbps=None, ranks_per_node=1)
            plan = Plan(recipe, machine, PlanRequest(classes=num_classes))
            planned.append(plan.seconds)
            started = time.perf_counter()
            take_step(task, batch, 1.0, step=step)
            measured.append(time.perf_counter() - started)
        task.close()
    peak = resident("VmHWM")
    return plan.host.peak, peak, float(np.median(planned)), float(np.median(measured))


if __name__ == "__main__":
    parser = command_line("plan", __doc__)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(options.threads)
        print(*compare(options.one, options.classes, options.threads))
    else:
        report(options, {case: partial(rows, case, options.classes) for case in CASES})
