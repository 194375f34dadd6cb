"""Memory and time of a training step on this machine's CPU, as measured and as planned by
`kway plan --gpu cpu`: `python -m benchmarks.plan [CASE ...] [--classes K ...]`.

Each case is a shipped recipe in float32 with random weights and a small batch, and runs in its own
process, whose high-water mark is read from the kernel. Measurements of the machine's rates and of
steps alternate, so that both are exposed to the same load. The process has the rows of K classes:
125,000 for the share of one of 8 ranks of 10^6 classes, 195,313 for one of 512 ranks of 10^8.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch

import launch
from benchmarks.gpu.tasks import random_batch
from benchmarks.timing import numbers_of_a_process, resident
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--classes", type=int, nargs="+", default=[1_000])
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(options.threads)
        print(*compare(options.one, options.classes[0], options.threads))
        return
    print(f"{options.threads} threads, torch {torch.__version__}")
    print(
        "| case | classes | memory planned | measured | ratio | time planned | measured | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case, classes in itertools.product(options.cases or CASES, options.classes):
        one = ("--one", case, "--classes", str(classes), "--threads", str(options.threads))
        memory, peak, planned, measured = numbers_of_a_process("benchmarks.plan", *one)
        print(
            f"| {case} | {classes:,} | {memory / 2**30:.2f} GiB | {peak / 2**30:.2f} GiB "
            f"| {memory / peak:.2f} | {planned:.2f} s | {measured:.2f} s "
            f"| {planned / measured:.2f} |",
            flush=True,
        )


def compare(case: str, num_classes: int, threads: int) -> tuple[float, float, float, float]:
    """Return the planned and the measured peak of the main memory in bytes, and the planned and the
    measured seconds of a step."""
    name, overrides = CASES[case]
    overrides = [*overrides, f"train.global_batch={BATCH}", "train.precision=fp32"]
    overrides.append("checkpoint.in_background=false")
    recipe = load_recipe(Path(launch.__file__).parent / "recipes" / f"{name}.yaml", overrides)
    planned, measured, plan = [], [], None
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
    assert plan is not None
    peak = resident("VmHWM")
    return plan.host.peak, peak, statistics.median(planned), statistics.median(measured)


if __name__ == "__main__":
    main()
