"""Memory and time of a training step on this machine's CPU, as measured and as planned by
`kway plan --gpu cpu`: `python -m benchmarks.plan [CASE ...]`.

Each case is a shipped recipe in float32 with random weights and a small batch, and runs in its own
process, whose high-water mark is read from the kernel. Measurements of the machine's rates and of
steps alternate, so that both are exposed to the same load.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import launch
from benchmarks.gpu.tasks import random_batch
from benchmarks.timing import resident
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
NUM_CLASSES, BATCH, NUM_STEPS = 1_000, 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(options.threads)
        print(json.dumps(compare(options.one, options.threads)))
        return
    print(f"{options.threads} threads, torch {torch.__version__}")
    print("| case | memory planned | measured | ratio | time planned | measured | ratio |")
    print("|---|---|---|---|---|---|---|")
    for case in options.cases or CASES:
        command = [sys.executable, "-m", "benchmarks.plan", "--one", case]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        memory, peak, planned, measured = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {case} | {memory / 2**30:.2f} GiB | {peak / 2**30:.2f} GiB | {memory / peak:.2f} "
            f"| {planned:.2f} s | {measured:.2f} s | {planned / measured:.2f} |",
            flush=True,
        )


def compare(case: str, threads: int) -> tuple[float, float, float, float]:
    """Return the planned and the measured peak of the main memory in bytes, and the planned and the
    measured seconds of a step."""
    name, overrides = CASES[case]
    overrides = [*overrides, f"train.global_batch={BATCH}", "train.precision=fp32"]
    overrides.append("checkpoint.in_background=false")
    recipe = load_recipe(Path(launch.__file__).parent / "recipes" / f"{name}.yaml", overrides)
    planned, measured, plan = [], [], None
    with open_world("cpu") as world:
        torch.set_num_threads(threads)  # `open_world` has set them to the number of cores
        names = [f"class {label}" for label in range(NUM_CLASSES)]
        task = build_task(recipe, class_names=names, label_vectors=None, world=world)
        task.train().start_training()
        batch = random_batch(recipe, NUM_CLASSES, world.device)
        take_step(task, batch, 1.0, step=1)
        for step in range(2, NUM_STEPS + 2):
            machine = machine_named("cpu", link_gbps=None, ranks_per_node=1)
            plan = Plan(recipe, machine, PlanRequest(classes=NUM_CLASSES))
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
