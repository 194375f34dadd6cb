"""Does a tree of real classes pay? Linear classifiers on fixed features with few samples per class.

Paper 000 builds its trees from label vectors. Here the tree is a hierarchy that people made: the
superclasses of CIFAR-100, the scripts and kinds of characters, and Unicode's groups of emoji. The
features are the principal components of pixels or of letter counts, so the comparison is about the
head alone.
"""

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from data.shards.hierarchy import PATH, SEPARATOR
from data.sources import Cifar100, EmojiNames, Glyphs
from data.sources.source import Sample, Source
from experiments.papers import tree_simulation as simulation
from experiments.papers.budget import Budget
from experiments.papers.comparison import Compared, best_rate, mean_accuracies, search
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.intervals import Mean
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Section, Table, verdict
from experiments.papers.tree_simulation import FloatArray, Protocol

_CIFAR = "cifar-100-binary.tar.gz"
_DATASETS = ("cifar100", "glyphs", "emoji")
_TREES = ("ce", "given", "shuffled")
_NAMES = {"ce": "cross entropy", "given": "tree loss", "shuffled": "tree loss, shuffled classes"}
# Training samples per class; "tail" is a Zipf distribution with 1 to 40 samples.
_SIZES: Sequence[int | str] = (1, 3, 10, "tail")
_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_DIM, _EPOCHS, _TESTS = 64, 10, 2000
_CLASSES, _BUCKETS = 200, 1024
# Names in Italian are the test samples. Those in other languages share roots and words with them.
_LANGUAGES = ("en", "es", "fr", "it", "pt", "de")
_PROTOCOL = Protocol(averaged=True)
_Arm = tuple[str, int | str, str]  # dataset, samples per class, tree


def _source(dataset: str, data: Path) -> Source:
    match dataset:
        case "cifar100":
            return Cifar100(data / _CIFAR)
        case "emoji":
            return EmojiNames(languages=_LANGUAGES, test_languages=("it",))
        case _:
            return Glyphs(classes_limit=_CLASSES, samples=2, size=16)


def _chosen_classes(source: Source) -> list[int]:
    """Return the classes of a source that the experiment uses: all, or a random choice."""
    order = np.random.default_rng(0).permutation(len(source.classes()))
    return sorted(order[:_CLASSES].tolist())


@cache
def _features(
    dataset: str, data: Path, samples: int
) -> tuple[tuple[torch.Tensor, NDArray[np.int64]], ...]:
    """Return the features [N, d] and labels of the training and the test samples.

    samples: the maximum number per split. Features are the largest principal components of the
    training samples' `_vector`, scaled to a mean squared norm of d.
    """
    source = _source(dataset, data)
    splits = source.splits()
    label_of = {one: label for label, one in enumerate(_chosen_classes(source))}
    found = []
    for name in ("train", "test"):
        tasks = splits[name]
        vectors, labels = [], []
        for index in np.random.default_rng(0).permutation(len(tasks)):
            sample = source.render(tasks[index])
            if isinstance(sample, Sample) and sample.label in label_of:
                vectors.append(_vector(sample))
                labels.append(label_of[sample.label])
            if len(labels) == samples:
                break
        found.append((np.stack(vectors), np.array(labels)))
    center = found[0][0].mean(0)
    _, scales, axes = np.linalg.svd(found[0][0] - center, full_matrices=False)
    projection = axes[:_DIM].T * np.sqrt(len(found[0][0])) / np.maximum(scales[:_DIM], 1e-6)
    return tuple((torch.from_numpy((x - center) @ projection).float(), y) for x, y in found)


def _vector(sample: Sample) -> NDArray[np.floating[Any]]:
    """Return the gray pixels of an image at 16 x 16, or the counts of a text's character trigrams
    in hash buckets, scaled to norm 1."""
    if sample.extension != "txt":
        image = Image.open(io.BytesIO(sample.data)).convert("L").resize((16, 16))
        return np.asarray(image, np.float32).ravel() / 255
    text = f" {sample.data.decode().lower().replace('_', ' ')} "
    buckets = [zlib.crc32(text[i : i + 3].encode()) % _BUCKETS for i in range(len(text) - 2)]
    counts = np.bincount(buckets, minlength=_BUCKETS).astype(np.float32)
    return counts / max(float(np.linalg.norm(counts)), 1.0)


def hierarchy_counts(paths: Sequence[str], order: Sequence[int]) -> FloatArray:
    """Return P [K, N] of the tree with these paths ("animals > fish") above the classes.

    Class i has the path of class order[i]. The nodes are the classes and all prefixes of the paths.
    """
    split = [paths[i].split(SEPARATOR) if paths[i] else [] for i in order]
    prefixes = [[tuple(path[: end + 1]) for end in range(len(path))] for path in split]
    nodes = {node: i for i, node in enumerate(sorted({n for of in prefixes for n in of}))}
    counts = np.zeros((len(paths), len(paths) + len(nodes)))
    for row, of_class in enumerate(prefixes):
        counts[row, [row, *(len(paths) + nodes[node] for node in of_class)]] = 1
    return counts


def train_on_hierarchy(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Train one kind of tree at several rates on several subsets of the training data (a job)."""
    dataset, tree = settings["dataset"], settings["tree"]
    (train_x, train_y), (test_x, test_y) = _features(dataset, folders.data, settings["samples"])
    source = _source(dataset, folders.data)
    classes = source.classes()
    paths = [classes[one].attributes.get(PATH, "") for one in _chosen_classes(source)]
    counts, batches = [], []
    for seed in settings["seeds"]:
        rng = np.random.default_rng(seed)
        rows = _subset(train_y, settings["size"], len(paths), rng)
        epochs = np.concatenate([rng.permutation(rows) for _ in range(settings["epochs"])])
        tests = rng.permutation(len(test_y))[: settings["tests"]]
        batches.append((train_x[epochs], train_y[epochs], test_x[tests], test_y[tests]))
        same = range(len(paths))
        order = list(rng.permutation(len(paths))) if tree == "shuffled" else list(same)
        counts.append(np.eye(len(paths)) if tree == "ce" else hierarchy_counts(paths, order))
    shortest = min(len(batch[1]) for batch in batches)
    draws = simulation.Draws(
        torch.zeros(len(batches), len(paths), _DIM),
        np.zeros((len(batches), 0, 0)),
        torch.stack([x[:shortest] for x, *_ in batches]),
        torch.from_numpy(np.stack([y[:shortest] for _, y, *_ in batches])),
        torch.stack([x for *_, x, _ in batches]),
        torch.from_numpy(np.stack([y for *_, y in batches])),
    )
    found = simulation.train(draws, counts, settings["rates"], _PROTOCOL)
    return {"accuracy": [[round(a, 4) for a in row] for row in found.accuracy.T.tolist()]}


def _subset(
    labels: NDArray[np.int64], size: int | str, num_classes: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the rows of a random subset with `size` samples per class, or with a long tail."""
    wanted = np.full(num_classes, 0 if size == "tail" else size)
    if size == "tail":
        wanted = np.maximum(1, 40 // (1 + rng.permutation(num_classes)))
    shuffled = rng.permutation(len(labels))
    return np.concatenate(
        [shuffled[labels[shuffled] == i][: wanted[i]] for i in range(num_classes)]
    )


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    toy = budget.is_toy
    points = [(dataset, size) for dataset in _DATASETS for size in (_SIZES[:1] if toy else _SIZES)]
    draws = 3 if toy else budget.size(30, least=10)
    seeds = range(100 + budget.first_seed, 100 + budget.first_seed + draws)

    def job(dataset: str, size: int | str, tree: str, seeds: range, rates: Sequence[float]) -> Job:
        return Job(
            "experiments.tree_hierarchies:train_on_hierarchy",
            {
                "dataset": dataset,
                "samples": 500 if toy else 20_000,
                "size": size,
                "tree": tree,
                "seeds": list(seeds),
                "rates": list(rates),
                "epochs": 1 if toy else _EPOCHS,
                "tests": 100 if toy else _TESTS,
            },
        )

    arms = [(*point, tree) for point in points for tree in _TREES]
    searched = range(2 if toy else 5)
    found = yield from search(
        arms,
        lambda arm, rates: [job(*arm, searched, rates)],
        mean_accuracies,
        rates=_RATES[::3] if toy else _RATES,
        limits=(1e-3, 1.0) if toy else (1e-6, 1e3),
    )
    jobs = {arm: job(*arm, seeds, [best_rate(found[arm])]) for arm in arms}
    results = yield list(jobs.values())
    runs: dict[_Arm, list[Measures]] = {
        arm: [{"accuracy": of_draw} for of_draw in results[one]["accuracy"][0]]
        for arm, one in jobs.items()
    }
    return _section(points, Compared(found, runs), draws, plots)


def _section(
    points: Sequence[tuple[str, int | str]],
    compared: Compared[_Arm],
    draws: int,
    plots: PlotFolder,
) -> Section:
    def gain(point: tuple[str, int | str], ours: str = "given", theirs: str = "ce") -> Mean:
        return compared.gain((*point, ours), (*point, theirs), "accuracy")

    rows = [
        [
            f"{dataset}, {size}",
            *(compared.mean((dataset, size, tree), "accuracy").text() for tree in _TREES),
            gain((dataset, size)).text(4),
            gain((dataset, size), theirs="shuffled").text(4),
            ", ".join(f"{compared.rate((dataset, size, tree)):g}" for tree in _TREES),
        ]
        for dataset, size in points
    ]
    header = ["samples per class", *_NAMES.values(), "tree - ce", "tree - shuffled", "rates"]
    return Section(
        setup=f"Linear classifiers on the {_DIM} whitened principal components of 16 x 16 gray "
        "pixels, or of the character trigrams of a text (names of emoji in five languages, tested "
        f"in Italian), {_EPOCHS} epochs of single-sample SGD, averaged weights, {draws} random "
        "subsets of the training samples. Trees: the 20 superclasses of CIFAR-100, the Unicode "
        f"blocks and kinds of {_CLASSES} characters, and the Unicode groups and subgroups of "
        f"{_CLASSES} emoji; *shuffled* assigns the classes to the leaves at random. "
        '"tail": 1 to 40 samples per class. The rate of each loss is searched on other subsets '
        "until a lower and a higher rate are worse.",
        claims=[
            Claim(
                f"a hierarchy improves accuracy ({dataset}, {size} per class)",
                verdict(gain((dataset, size))),
                f"{gain((dataset, size)).text(4)} (paired, {draws} subsets)",
            )
            for dataset, size in points
        ],
        tables=[Table("Test accuracy at the best rate of each loss", header, rows)],
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure(points, gain),
                title="Accuracy minus that of cross entropy, by samples per class.",
                alt_text="Points with error bars around zero for three datasets and two trees.",
            )
        ],
    )


def _figure(points: Sequence[tuple[str, int | str]], gain: Callable[..., Mean]) -> Figure:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    labels = [f"{dataset}\n{size}" for dataset, size in points]
    for number, tree in enumerate(_TREES[1:]):
        found = [gain(point, tree) for point in points]
        axes.errorbar(
            [index + 0.1 * number for index in range(len(points))],
            [one.value for one in found],
            yerr=[one.half for one in found],
            fmt="os"[number],
            capsize=3,
            label=_NAMES[tree],
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xticks(range(len(points)), labels, fontsize=8)
    axes.set_ylabel("accuracy - cross entropy")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(
    name="000-hierarchies",
    paper="000",
    title="Hierarchies of real classes with few samples",
    minutes=6,
    procedure=_procedure,
    needs=(_CIFAR,),
)
