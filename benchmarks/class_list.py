"""A run with millions of classes, from shards to a served query, and what its class list costs:
`python -m benchmarks.class_list [--classes 10000000] [--kind vtree] [--share 512]`.

The samples are a few hundred glyphs. Every class has a generated name and is below one of 1,000
nodes, so that label trees are built from the hierarchy. Each step of the path runs in its own
processes, whose memory is polled. The memory of the largest one is compared with `kway plan`, and
shown without the pages of mapped files, such as the class list and the code of libraries.

With `--share N`, one process trains and evaluates as the first of N ranks, which divide the classes
among themselves. The others are simulated: torch's fake process group returns the data of this rank
for all of them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from data.classes.class_list import ClassInfo, ClassList
from data.loading.batch import Cursor
from data.shards.manifest import Manifest
from data.shards.mixture import load_manifest
from data.shards.writing.writer import write_shards
from data.skipped import Skipped
from data.sources import Glyphs
from data.sources.source import Modality, Sample, Source
from launch.plan.cluster import machine_named
from launch.plan.plan import Plan
from launch.plan.request import PlanRequest
from tests.tiny_networks import TINY_RESNET
from trainer.evaluation import evaluate_split, save_evaluation
from trainer.recipe import load_recipe
from trainer.run.training_data import RunData
from trainer.step import take_step
from trainer.world import World

_NODES, _SAMPLES = 1_000, 1_024
_RANKS_PER_NODE = 8
_POLL_SECONDS = 0.1
_LOOKUPS = 10_000


class ManyClasses(Source):
    """Glyphs with random labels out of `num_classes` classes."""

    kind: ClassVar[str] = "many-classes"
    modality: ClassVar[Modality] = "image"
    reads: ClassVar[str] = ""
    held_out: ClassVar[str] = ""

    def __init__(self, num_classes: int) -> None:
        self._glyphs = Glyphs(16, samples=1, size=16)
        self.num_classes = num_classes

    def parameters(self) -> dict[str, Any]:
        return {"classes": self.num_classes}

    def classes(self) -> Sequence[ClassInfo]:
        return ClassList.of(
            ClassInfo.model_construct(
                name=f"species {number:09d}",
                attributes={"path": f"family {number * _NODES // self.num_classes:03d}"},
            )
            for number in range(self.num_classes)
        )

    def splits(self) -> dict[str, Sequence[Any]]:
        glyphs = self._glyphs.splits()["train"]
        labels = np.random.default_rng(0).integers(self.num_classes, size=_SAMPLES)
        labels[::2] = 0  # the first rank has this class, and evaluates some of its samples
        tasks = [(glyphs[i % len(glyphs)], i, int(label)) for i, label in enumerate(labels)]
        return {"train": tasks, "test": tasks}

    def render(self, task: Any) -> Sample | Skipped:
        glyph, number, label = task
        sample = self._glyphs.render(glyph)
        assert isinstance(sample, Sample)
        return sample._replace(key=f"{number:05d}", label=label)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def recipe(folder: Path, kind: str, *, steps: int, batch: int) -> dict[str, Any]:
    weights: dict[str, Any] = {"kind": kind}
    if kind != "dense":
        weights["tree"] = {"kind": "hierarchy"}
    return {
        "run": str(folder / kind),
        "data": {
            "shards": str(folder / "shards"),
            "image": {"size": 16, "channels": 1, "mean": [0.5], "std": [0.25]},
            "augment": {"crop_area": None, "flip": 0},
            "workers": 0,
        },
        "backbone": {"config": {**TINY_RESNET, "num_channels": 1}},
        "head": {"weights": weights, "loss": {"kind": "ce"}},
        "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0},
        "train": {"duration": {"steps": steps}, "global_batch": batch},
        "checkpoint": {"every": {"steps": 2}},  # written while the next step runs
        "evaluation": {"batch": 32},
    }


def measured(title: str, command: Sequence[object], planned: int | None = None) -> None:
    """Run a command and print its time, the memory of its largest process with and without mapped
    files, and the planned memory.
    """
    start, whole, own = time.perf_counter(), 0, 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
        root = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for each in (root, *root.children(recursive=True)):
                    memory = each.memory_info()
                    whole = max(whole, memory.rss)
                    own = max(own, memory.rss - memory.shared)
            time.sleep(_POLL_SECONDS)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{title}: exit code {process.returncode}\n{output.read()}")
    compared = "- | -" if planned is None else f"{planned / 2**30:.2f} GiB | {whole / planned:.2f}"
    seconds, sizes = time.perf_counter() - start, f"{whole / 2**30:.2f} GiB | {own / 2**30:.2f} GiB"
    print(f"| {title} | {seconds:.0f} s | {sizes} | {compared} |", flush=True)


def planned(path: Path, *, nodes: int = 1, ranks: int) -> Mapping[str, int]:
    """Return the main memory of a rank in each phase according to `kway plan`."""
    machine = machine_named("cpu", link_gbps=None, ranks_per_node=ranks)
    plan = Plan(load_recipe(path), machine, PlanRequest(nodes=nodes, gpus=ranks, gpu="cpu"))
    return plan.host.totals


def lookups(folder: Path) -> None:
    """Print the time to open the class list and to look up a name, and the memory that this adds to
    a process that shares the file with another one."""
    before = private_bytes()
    start = time.perf_counter()
    manifest = Manifest.read(folder / "shards")
    opened = time.perf_counter() - start
    num = len(manifest.classes)
    chosen = np.random.default_rng(1).integers(num, size=_LOOKUPS).tolist()
    names = [manifest.class_names[number] for number in chosen]
    start = time.perf_counter()
    assert [manifest.classes.find(name) for name in names] == chosen
    each = (time.perf_counter() - start) / _LOOKUPS
    size = (folder / "shards" / "classes.safetensors").stat().st_size / num
    print(
        f"{num:,} classes: {size:.1f} bytes per class and machine; opened in {1e3 * opened:.1f} "
        f"ms; {1e6 * each:.0f} us per lookup; "
        f"{(private_bytes() - before) / 2**20:.1f} MiB per process"
    )


def private_bytes() -> int:
    """Return the memory of this process that it cannot share, as it can share pages of files."""
    text = Path("/proc/self/smaps_rollup").read_text()
    sizes = {line.split()[0]: line.split()[1] for line in text.splitlines()[1:]}
    return 1024 * int(sizes["Private_Dirty:"])


def train_share(path: Path, ranks: int, steps: int) -> None:
    """Train and evaluate as the first of `ranks` ranks."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "class"))
    world = World(0, ranks, 0, _RANKS_PER_NODE, torch.device("cpu"), mesh)
    settings = load_recipe(path)
    data = RunData.open(settings, load_manifest(settings.data))
    task = data.build_task(settings, world)
    task.train().start_training()
    batches = iter(data.open_loader(settings, world, Cursor(settings.seed)))
    for step in range(1, steps + 1):
        take_step(task, next(batches), 1.0, step=step)
    found = evaluate_split(task, settings, world, label_vectors=None, manifest=data.manifest)
    save_evaluation(settings.run / "evaluations", found, step=steps)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.class_list", description=__doc__)
    parser.add_argument("--classes", type=int, default=10_000_000)
    parser.add_argument("--kind", choices=("dense", "vtree"), default="dense")
    parser.add_argument("--share", type=int, metavar="N", help="train as one of N ranks")
    parser.add_argument("-o", "--out", type=Path, help="folder; its shards are used again")
    parser.add_argument("--part", choices=("shard", "lookups", "share"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None and (options.share < 1 or options.share % _RANKS_PER_NODE):
        parser.error(f"--share {options.share}: pass a multiple of {_RANKS_PER_NODE}")
    if options.part == "shard":
        write_shards(ManyClasses(options.classes), options.out / "shards", workers=0)
    elif options.part == "lookups":
        lookups(options.out)
    elif options.part == "share":
        train_share(options.out / "5-steps.yaml", options.share, 5)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(options.out or Path(folder), options.classes, options.kind, options.share)


def run(folder: Path, num_classes: int, kind: str, share: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / kind, ignore_errors=True)  # of an earlier call
    five, eight = (folder / f"{steps}-steps.yaml" for steps in (5, 8))
    for steps, path in ((5, five), (8, eight)):
        settings = recipe(folder, kind, steps=steps, batch=share or 32)
        if share is not None:  # DistributedDataParallel does not support the fake group
            settings["train"]["strategy"] = {"kind": "fsdp"}
        path.write_text(json.dumps(settings))
    own = (sys.executable, "-m", "benchmarks.class_list", "--classes", num_classes, "-o", folder)
    kway = (sys.executable, "-P", "-m", "launch")
    print(f"{num_classes:,} classes, {kind}\n")
    print("| step | time | largest process | without files | planned | ratio |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    if not (folder / "shards" / "manifest.json").exists():
        measured("shard", (*own, "--part", "shard"))
    if share is not None:
        phases = planned(five, nodes=share // _RANKS_PER_NODE, ranks=_RANKS_PER_NODE)
        command = (*own, "--part", "share", "--share", share)
        measured(f"1 of {share} ranks", command, max(phases.values()))
    else:
        train, bundle, image = (*kway, "train"), folder / f"{kind}-bundle", folder / "glyph.png"
        two, alone = planned(five, ranks=2), planned(eight, ranks=1)
        measured("train, 2 ranks", (*train, five, "--nproc", 2), max(two.values()))
        measured("resume on 1 rank", (*train, eight, "--nproc", 1), max(alone.values()))
        measured("evaluate", (*kway, "eval", folder / kind), alone["evaluating"])
        measured("export", (*kway, "export", folder / kind, "-o", bundle, "--force"))
        image.write_bytes(_png())
        name = f"species {num_classes // 2:09d}"
        measured("query", (*kway, "query", bundle, "--class", name, image))
    subprocess.run([*map(str, own), "--part", "lookups"], check=True)


def _png() -> bytes:
    sample = ManyClasses(1).render(ManyClasses(1).splits()["train"][0])
    assert isinstance(sample, Sample)
    return sample.data


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
