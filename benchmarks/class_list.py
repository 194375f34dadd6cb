"""A run with millions of classes, from shards to a served query, and what its class list costs:
`python -m benchmarks.class_list [--classes 10000000] [--kind vtree]`.

The samples are a few hundred glyphs. Every class has a generated name and is below one of 1,000
nodes, so that label trees are built from the hierarchy. Each step of the path runs in its own
processes, whose high-water mark is read from the kernel.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data.classes.class_list import ClassInfo, ClassList
from data.shards.manifest import Manifest, SourceInfo
from data.shards.writing.writer import write_shards
from data.skipped import Skipped
from data.sources import Glyphs
from data.sources.source import Modality, Sample, Source
from tests.tiny_networks import TINY_RESNET

_NODES, _SAMPLES = 1_000, 256
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

    def describe(self) -> SourceInfo:
        return SourceInfo(kind=self.kind, parameters={"classes": self.num_classes})

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
        tasks = [(glyphs[i % len(glyphs)], i, int(label)) for i, label in enumerate(labels)]
        return {"train": tasks, "test": tasks[: _SAMPLES // 4]}

    def render(self, task: Any) -> Sample | Skipped:
        glyph, number, label = task
        sample = self._glyphs.render(glyph)
        assert isinstance(sample, Sample)
        return replace(sample, key=f"{number:05d}", label=label)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def recipe(folder: Path, kind: str, *, steps: int) -> dict[str, Any]:
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
        "train": {"duration": {"steps": steps}, "global_batch": 32},
        "evaluation": {"batch": 32},
    }


def measured(title: str, *command: object) -> None:
    """Run a command and print its time and the memory of its largest process."""
    start = time.perf_counter()
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{title}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest child so far
    seconds = time.perf_counter() - start
    print(f"| {title} | {seconds:.0f} s | {peak / 2**20:.2f} GiB |", flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.class_list", description=__doc__)
    parser.add_argument("--classes", type=int, default=10_000_000)
    parser.add_argument("--kind", choices=("dense", "vtree"), default="dense")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--part", choices=("shard", "lookups"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "shard":
        write_shards(ManyClasses(options.classes), options.out / "shards", workers=0)
    elif options.part == "lookups":
        lookups(options.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(options.out or Path(folder), options.classes, options.kind)


def run(folder: Path, num_classes: int, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for steps in (5, 8):
        text = json.dumps(recipe(folder, kind, steps=steps))
        (folder / f"{steps}-steps.yaml").write_text(text)
    own = (sys.executable, "-m", "benchmarks.class_list", "--classes", num_classes, "-o", folder)
    kway = (sys.executable, "-P", "-m", "launch")
    print(f"{num_classes:,} classes, {kind}\n")
    print("| step | time | largest process so far |\n|---|---|---|")
    if not (folder / "shards" / "manifest.json").exists():
        measured("shard", *own, "--part", "shard")
    subprocess.run([*map(str, own), "--part", "lookups"], check=True)
    measured("train, 2 ranks", *kway, "train", folder / "5-steps.yaml", "--nproc", 2)
    measured("resume on 1 rank", *kway, "train", folder / "8-steps.yaml", "--nproc", 1)
    measured("evaluate", *kway, "eval", folder / kind)
    measured("export", *kway, "export", folder / kind, "-o", folder / f"{kind}-bundle", "--force")
    image = folder / "glyph.png"
    image.write_bytes(_png())
    name = f"species {num_classes // 2:09d}"
    measured("query", *kway, "query", folder / f"{kind}-bundle", "--class", name, image)


def _png() -> bytes:
    sample = ManyClasses(1).render(ManyClasses(1).splits()["train"][0])
    assert isinstance(sample, Sample)
    return sample.data


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
