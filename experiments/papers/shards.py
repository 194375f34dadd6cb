"""Shards for the experiments, made from the published files below the user's `data`.

Experiments request shards by a `Dataset`; equal datasets share their shards.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.classes.class_list import ClassInfo
from data.shards.hierarchy import PATH
from data.shards.manifest import SourceInfo
from data.shards.writing.writer import write_shards
from data.skipped import Skipped
from data.sources import Cifar100, Mnist, Table, Tweets
from data.sources.label_vectors import WithLabelVectors
from data.sources.packing import lossless
from data.sources.source import Modality, Sample, Source
from data.text.tokenizer_training import train_tokenizer
from experiments.papers.job import FOLDER, Folders, Job, Measures
from heads.tree import load_label_vectors

# Label vectors that encode a class and its coarse class. The coarse class contributes half of the
# similarity.
COARSE = "coarse classes"
_VOCABULARY = 20_000


@dataclass(frozen=True)
class Dataset:
    """A published dataset with modifications.

    - `side`: shrink images to `side` x `side` pixels.
    - `classes`: names of the classes to use; None means all classes.
    - `noise`: fraction of training labels replaced with a random label from the same coarse class,
      possibly the label itself (paper 003, section 5.1).
    - `validation`: number of training samples, at most a quarter, moved to the split `validation`.
    - `limits`: maximum number of samples per split.
    - `vectors`: file of label vectors, relative to the user's data, or COARSE.
    - `options`: options of the source.
    - `seed`: seed for the random choice of samples and labels.
    """

    source: str
    side: int | None = None
    classes: tuple[str, ...] | None = None
    noise: float = 0.0
    validation: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    vectors: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def job(self) -> Job:
        """The job that makes the shards."""
        return Job("shards:make_shards", asdict(self))


MNIST, CIFAR_100 = "mnist", "cifar-100-binary.tar.gz"  # below the user's data
TWEETS, EMOJI_VECTORS = "tweeteval-emoji", "emoji2vec/emoji2vec.bin"


def tweeteval(folder: Path, work: Path, *, texts: str = "clean", **options: Any) -> Source:
    """Return the emoji task of TweetEval. Its table is written to `work` as in docs/layouts.md.

    texts: "clean" removes the rest of the emoji from the texts, and "keep" does not.
    """
    lines = (folder / "mapping.txt").read_text(encoding="utf-8").splitlines()
    emoji = {line.split("\t")[0]: line.split("\t")[1] for line in lines}
    work.mkdir(parents=True, exist_ok=True)
    with (work / "tweeteval.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "split"])
        for split in ("train", "val", "test"):
            tweets = (folder / f"{split}_text.txt").read_bytes().decode().split("\n")
            labels = (folder / f"{split}_labels.txt").read_text().split()
            table.writerows(
                (text, emoji[x], split) for text, x in zip(tweets, labels, strict=False)
            )
    columns: dict[str, Any] = {"text": "text", "label": "label", "split": "split", **options}
    source = Tweets if texts == "clean" else Table
    return source((work / "tweeteval.csv",), work / "first-pass", **columns)


class _KnownSource(NamedTuple):
    path: str
    open: Callable[..., Source]


_SOURCES = {
    "mnist": _KnownSource(MNIST, Mnist),
    "cifar100": _KnownSource(CIFAR_100, Cifar100),
    "tweeteval-emoji": _KnownSource(TWEETS, tweeteval),
}


def make_shards(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Make the shards of a `Dataset` (a job). The measures are the numbers of samples per split."""
    dataset = Dataset(**settings)
    if dataset.source not in _SOURCES:
        raise ValueError(f"unknown source {dataset.source}: choose from {', '.join(_SOURCES)}")
    name, opened = _SOURCES[dataset.source]
    path = folders.data / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: add the published {name} to the --data folder"
        )
    options = dict(dataset.options)
    if dataset.source == "tweeteval-emoji":
        options["work"] = folders.work
    inner = opened(path, **options)
    if dataset.vectors not in ("", COARSE):
        inner = WithLabelVectors(inner, folders.data / dataset.vectors, _vectors_of)
    source = ModifiedSource(inner, dataset)
    written = write_shards(
        source, shards_of(dataset, folders), samples_per_shard=100_000, workers=1
    )
    manifest = written.manifest
    sizes = {
        split: sum(shard.samples for shard in manifest.of_split(split)) for split in manifest.splits
    }
    if source.modality == "text":
        out = tokenizer_of(dataset, folders)
        rmtree(out, ignore_errors=True)  # left by removed shards or an interrupted job
        train_tokenizer(
            str(shards_of(dataset, folders)), out, vocab_size=_VOCABULARY, lowercase=True
        )
    return {FOLDER: shards_of(dataset, folders).name, **sizes}


def shards_of(dataset: Dataset, folders: Folders) -> Path:
    """Return the folder of a dataset's shards."""
    return folders.shards / f"{dataset.source}-{dataset.job.key[:12]}"


def tokenizer_of(dataset: Dataset, folders: Folders) -> Path:
    """Return the folder of the tokenizer trained on a text dataset's training split."""
    folder = shards_of(dataset, folders)
    return folder.with_name(f"{folder.name}-tokenizer")


def _vectors_of(file: Path, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    return load_label_vectors(file, names, missing="zero")


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

    def describe(self) -> SourceInfo:
        inner = self.inner.describe()
        return SourceInfo(
            kind=inner.kind, parameters={**inner.parameters, "changed": self.dataset.job.key}
        )

    def classes(self) -> tuple[ClassInfo, ...]:
        all_classes = self.inner.classes()
        return tuple(all_classes[label] for label in self._labels)

    def label_vectors(self) -> np.ndarray | None:
        if self.dataset.vectors == COARSE:
            paths = [info.attributes[PATH] for info in self.classes()]
            unique = sorted(set(paths))
            coarse = np.eye(len(unique), dtype=np.float32)[[unique.index(path) for path in paths]]
            return np.hstack([np.eye(len(paths), dtype=np.float32), coarse])
        vectors = self.inner.label_vectors()
        return None if vectors is None else vectors[self._labels]

    def splits(self) -> dict[str, Sequence[_Task]]:
        dataset = self.dataset
        found: dict[str, Sequence[_Task]] = {}
        new = {label: index for index, label in enumerate(self._labels)}
        for split, tasks in self.inner.splits().items():
            rng = np.random.default_rng([dataset.seed, *split.encode()])
            selected = [task for task in tasks if task.label in new]
            shuffled = [selected[index] for index in rng.permutation(len(selected))]
            found[split] = [_Task(task, new[task.label]) for task in shuffled]
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

    @cached_property
    def _labels(self) -> list[int]:
        """The source's labels for the classes to use."""
        names = [info.name for info in self.inner.classes()]
        if self.dataset.classes is None:
            return list(range(len(names)))
        if unknown := set(self.dataset.classes) - set(names):
            raise ValueError(
                f"{self.dataset.source} has no class {min(unknown)}: correct the name in `classes`"
            )
        return [names.index(name) for name in self.dataset.classes]
