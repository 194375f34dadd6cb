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
from data.loading.batch import Batch
from launch.plan.cluster import machine_named
from launch.plan.plan import Plan
from launch.plan.request import PlanRequest
from trainer.config import Recipe
from trainer.recipe import load_recipe
from trainer.step import take_step
from trainer.task import build_task
from trainer.world import open_world

_BERT = "backbone={config: {model_type: bert, vocab_size: 119547}, pooling: mean}"
# Recipe, overrides, classes and steps.
CASES: dict[str, tuple[str, list[str], int, int]] = {
    "resnet50": ("imagenet-resnet50", ["train.global_batch=16"], 1_000, 4),
    "mbert": ("twitter-mbert", [_BERT, "train.global_batch=16"], 1_000, 4),
    "mbert-large-head": ("twitter-mbert", [_BERT, "train.global_batch=16"], 200_000, 4),
    "resnet10-large-head": (
        "imagenet-resnet50",
        [
            "train.global_batch=64",
            "data.image={size: 32}",
            "backbone.config={model_type: resnet, depths: [1, 1, 1, 1], layer_type: basic, "
            "hidden_sizes: [64, 128, 256, 512]}",
        ],
        100_000,
        8,
    ),
}


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
    name, overrides, num_classes, num_steps = CASES[case]
    overrides = [*overrides, "train.precision=fp32", "checkpoint.in_background=false"]
    recipe = load_recipe(Path(launch.__file__).parent / "recipes" / f"{name}.yaml", overrides)
    planned, measured, plan = [], [], None
    with open_world("cpu") as world:
        torch.set_num_threads(threads)  # `open_world` has set them to the number of cores
        names = [f"class {label}" for label in range(num_classes)]
        task = build_task(recipe, class_names=names, label_vectors=None, world=world)
        task.train().start_training()
        batch = random_batch(recipe, num_classes)
        take_step(task, batch, 1.0, step=1)
        for step in range(2, num_steps + 2):
            machine = machine_named("cpu", link_gbps=None, ranks_per_node=1)
            plan = Plan(recipe, machine, PlanRequest(classes=num_classes))
            planned.append(plan.seconds)
            started = time.perf_counter()
            take_step(task, batch, 1.0, step=step)
            measured.append(time.perf_counter() - started)
        task.close()
    assert plan is not None
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return plan.host.peak, peak * 1024, statistics.median(planned), statistics.median(measured)


def random_batch(recipe: Recipe, num_classes: int) -> Batch:
    rows, text = recipe.train.global_batch, recipe.data.text
    labels = torch.randint(num_classes, (rows,))
    if text is not None:
        tokens = torch.randint(1000, (rows, text.max_length))
        return Batch(
            {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, labels, labels
        )
    side = recipe.data.image.size
    pixels = torch.randint(256, (rows, 3, side, side), dtype=torch.uint8)
    return Batch({"pixel_values": pixels}, labels, torch.arange(rows))


if __name__ == "__main__":
    main()
