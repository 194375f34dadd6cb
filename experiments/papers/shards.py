"""Shards for the experiments, made from the published files below the user's `data`.

Experiments request shards by a `Dataset`; equal datasets share their shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.classes.class_list import ClassInfo
from data.shards.hierarchy import PATH
from data.shards.writing.writer import write_shards
from data.skipped import Skipped
from data.sources import Cifar100
from data.sources.packing import lossless
from data.sources.source import Modality, Sample, Source
from experiments.papers.job import FOLDER, Folders, Job, Measures

CIFAR_100 = "cifar-100-binary.tar.gz"  # below the user's data
# Label vectors that encode a class and its coarse class. The coarse class contributes half of the
# similarity.
COARSE = "coarse classes"


@dataclass(frozen=True)
class Dataset:
    """A published dataset with modifications.

    - `side`: shrink images to `side` x `side` pixels.
    - `noise`: fraction of training labels replaced with a random label from the same coarse class,
      possibly the label itself (paper 003, section 5.1).
    - `validation`: number of training samples, at most a quarter, moved to the split `validation`.
    - `limits`: maximum number of samples per split.
    - `vectors`: COARSE, or empty for the label vectors of the source.
    - `seed`: seed for the random choice of samples and labels.
    """

    source: str
    side: int | None = None
    noise: float = 0.0
    validation: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    vectors: str = ""
    seed: int = 0

    @property
    def job(self) -> Job:
        """The job that makes the shards."""
        return Job("shards:make_shards", asdict(self))


def make_shards(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Make the shards of a `Dataset` (a job). The measures are the numbers of samples per split."""
    dataset = Dataset(**settings)
    path = folders.data / CIFAR_100
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: add the published file to --data")
    source = ModifiedSource(Cifar100(path), dataset)
    written = write_shards(
        source, shards_of(dataset, folders), samples_per_shard=100_000, workers=1
    )
    manifest = written.manifest
    sizes = {
        split: sum(shard.samples for shard in manifest.of_split(split)) for split in manifest.splits
    }
    return {FOLDER: shards_of(dataset, folders).name, **sizes}


def shards_of(dataset: Dataset, folders: Folders) -> Path:
    """Return the folder of a dataset's shards."""
    return folders.shards / f"{dataset.source}-{dataset.job.key[:12]}"


class _Task(NamedTuple):
    task: Any
    label: int


@dataclass(frozen=True)
class ModifiedSource(Source):
    """A source with the modifications of a `Dataset`."""

    inner: Source
    dataset: Dataset

    @property
    def modality(self) -> Modality:  # type: ignore[override]
        return self.inner.modality

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.inner.kind

    def parameters(self) -> dict[str, Any]:
        return {**self.inner.parameters(), "changed": self.dataset.job.key}

    def classes(self) -> Sequence[ClassInfo]:
        return self.inner.classes()

    def label_vectors(self) -> np.ndarray | None:
        if self.dataset.vectors == COARSE:
            paths = [info.attributes[PATH] for info in self.classes()]
            unique = sorted(set(paths))
            coarse = np.eye(len(unique), dtype=np.float32)[[unique.index(path) for path in paths]]
            return np.hstack([np.eye(len(paths), dtype=np.float32), coarse])
        return self.inner.label_vectors()

    def splits(self) -> dict[str, Sequence[_Task]]:
        dataset = self.dataset
        found: dict[str, Sequence[_Task]] = {}
        for split, tasks in self.inner.splits().items():
            rng = np.random.default_rng([dataset.seed, *split.encode()])
            shuffled = [tasks[index] for index in rng.permutation(len(tasks))]
            found[split] = [_Task(task, task.label) for task in shuffled]
        if dataset.validation:
            number = min(dataset.validation, len(found["train"]) // 4)
            found["validation"], found["train"] = found["train"][:number], found["train"][number:]
        for split, limit in dataset.limits.items():
            found[split] = found[split][:limit]
        if dataset.noise:
            found["train"] = self._with_noise(found["train"])
        return found

    def render(self, task: _Task) -> Sample | Skipped:
        sample = self.inner.render(task.task)
        if isinstance(sample, Skipped):
            return sample
        data = sample.data
        if (side := self.dataset.side) is not None:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
            assert image is not None, "sources write valid PNG files"
            shrunk = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)
            is_gray = shrunk.ndim == 2
            data = lossless(shrunk if is_gray else cv2.cvtColor(shrunk, cv2.COLOR_BGR2RGB))
        return Sample(sample.key, data, sample.extension, task.label)

    def _with_noise(self, tasks: Sequence[_Task]) -> list[_Task]:
        rng = np.random.default_rng([self.dataset.seed, 1])
        paths = [info.attributes[PATH] for info in self.classes()]
        same = {path: [i for i, other in enumerate(paths) if other == path] for path in set(paths)}
        noisy = []
        for task, replaced in zip(tasks, rng.random(len(tasks)) < self.dataset.noise, strict=True):
            label = int(rng.choice(same[paths[task.label]])) if replaced else task.label
            noisy.append(task._replace(label=label))
        return noisy
