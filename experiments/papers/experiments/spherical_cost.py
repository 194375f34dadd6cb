"""Paper 004: a step of a spherical loss costs O(d^2), independent of the number of classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import SGD

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.intervals import Mean, mean
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Section, Table, verdict, verdict_within
from experiments.papers.turns import milliseconds, timed
from heads import ClassHead, FactoredHead
from heads.losses import SphericalSoftmax

_JOB = "experiments.spherical_cost:time_steps"
_BATCH = 64
_RATE, _DECAY = 0.01, 5e-4
_DIM = 64  # features, while the number of classes varies
_FIXED = 100_000  # classes, while the number of features varies
_CLASSES = tuple(10**power for power in range(3, 8))
_DIMS = (32, 64, 128, 256, 512)
_DENSE_NUMBERS = 100_000_000  # largest dense weight; a step needs three times this memory
# Slopes are fitted only to sizes that are at least this large, for which the fixed cost of calls is
# negligible.
_CLASSES_OF_SLOPE, _DIMS_OF_SLOPE = 10_000, 128
# A slope below this counts as flat: with ten times as many classes, a step costs at most 10% more.
_FLAT = math.log10(1.1)
# Each repeat creates new heads, because the memory that they get may affect the times.
_REPEATS, _SECONDS = 6, 10.0


def time_steps(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Time a training step (forward, backward, update) of the head in each of `cases` (a job).

    A case is [classes, dim]; `column` is the one of the two that varies. The measures are the
    seconds by kind of head and size. They include any consolidations of the factored heads.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = {
        kind: {str(case[settings["column"]]): _head(kind, device, *case) for case in cases}
        for kind, cases in settings["cases"].items()
    }
    # Not all in turn: a step of the largest dense head takes as long as hundreds of others.
    seconds = {
        kind: timed(
            {size: _step(head) for size, head in of_kind.items()},
            folders,
            rounds=settings["rounds"],
            seconds=settings["seconds"],
        )
        for kind, of_kind in heads.items()
    }
    factored = [head for head in heads["factored"].values() if isinstance(head, FactoredHead)]
    return {
        "seconds": seconds,
        "consolidations": sum(head.num_consolidations for head in factored),
        "device": device,
    }


def _head(kind: str, device: str, num_classes: int, dim: int) -> ClassHead:
    if kind == "factored":
        return FactoredHead(dim, num_classes, SphericalSoftmax(), device=device)
    return ClassHead(dim, num_classes, SphericalSoftmax(), bias=False, device=device)


def _step(head: ClassHead) -> Callable[[], None]:
    """Return a training step on noise.

    Every step draws new labels, so the rows that it touches are not in the cache yet.
    """
    train, device = _trained_by(head), head.engine.weights.device

    def step() -> None:
        features = torch.randn(_BATCH, head.dim, device=device, requires_grad=True)
        train(features, torch.randint(head.num_classes, (_BATCH,), device=device))

    return step


def _trained_by(head: ClassHead) -> Callable[[Tensor, Tensor], None]:
    """Return a step of SGD with weight decay, which is the same for both kinds of head."""
    if isinstance(head, FactoredHead):

        def factored(features: Tensor, labels: Tensor) -> None:
            head(features, labels).backward()
            head.step(_RATE, _DECAY)

        return factored
    sgd = SGD(head.parameters(), lr=_RATE, weight_decay=_DECAY)

    def dense(features: Tensor, labels: Tensor) -> None:
        sgd.zero_grad()
        head(features, labels).backward()
        sgd.step()

    return dense


def slope(seconds: Mapping[int, Sequence[float]]) -> float:
    """Return the slope of log time over log size, fitted to the medians."""
    sizes = np.log(list(seconds))
    centered = sizes - sizes.mean()
    medians = np.log([np.median(of_size) for of_size in seconds.values()])
    return float(centered @ medians / (centered @ centered))


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    classes, dims = (_CLASSES, _DIMS) if not budget.is_toy else ((100, 1_000), (8, 16))
    fixed, dim = (_FIXED, _DIM) if not budget.is_toy else (1_000, 8)
    cases = {
        "classes": _cases([(number, dim) for number in classes]),
        "dims": _cases([(fixed, number) for number in dims]),
    }
    repeats = 2 if budget.is_toy else _REPEATS
    jobs = {
        name: [
            Job(
                _JOB,
                {
                    "cases": of_sizes,
                    "column": column,
                    "repeat": repeat,
                    "rounds": budget.size(15, least=3),
                    "seconds": max(1.0, _SECONDS * budget.effort),
                },
                alone=True,
            )
            for repeat in range(repeats)
        ]
        for column, (name, of_sizes) in enumerate(cases.items())
    }
    results = yield [job for of_cases in jobs.values() for job in of_cases]
    by_classes, by_dims = (
        [results[job].measures for job in jobs[name]] for name in ("classes", "dims")
    )
    return _section(
        _Times(by_classes, least=_CLASSES_OF_SLOPE),
        _Times(by_dims, least=_DIMS_OF_SLOPE),
        f"d = {dim}",
        f"D = {fixed:,}",
        plots,
    )


def _cases(sizes: Sequence[tuple[int, int]]) -> dict[str, list[list[int]]]:
    """Return the sizes [classes, dim] at which each kind of head is timed."""
    kinds = {"factored": math.inf, "dense": _DENSE_NUMBERS}
    return {
        kind: [[number, dim] for number, dim in sizes if number * dim <= most]
        for kind, most in kinds.items()
    }


class _Times:
    """Seconds of both heads by size, and their slopes over sizes of at least `least`.

    `repeats`: the measures of each repeat, from which a slope is fitted.
    """

    def __init__(self, repeats: Sequence[Measures], *, least: int) -> None:
        self.device = repeats[0]["device"]
        self.consolidations = sum(measures["consolidations"] for measures in repeats)
        self.of: dict[str, dict[int, list[float]]] = {"factored": {}, "dense": {}}
        of_repeats = [
            {
                kind: {int(size): seconds for size, seconds in by_size.items()}
                for kind, by_size in measures["seconds"].items()
            }
            for measures in repeats
        ]
        for of_repeat in of_repeats:
            for kind, by_size in of_repeat.items():
                for size, seconds in by_size.items():
                    self.of[kind].setdefault(size, []).extend(seconds)
        self.least = least if max(self.of["dense"]) > least else 0
        self.slopes = {
            kind: mean([slope(self.fitted(of_repeat[kind])) for of_repeat in of_repeats])
            for kind in self.of
        }

    def fitted(self, by_size: Mapping[int, list[float]]) -> dict[int, list[float]]:
        """Return the sizes from which slopes are fitted."""
        return {size: seconds for size, seconds in by_size.items() if size >= self.least}

    @property
    def first(self) -> str:
        """The smallest size from which slopes are fitted."""
        return f"{min(self.fitted(self.of['factored'])):,}"


def _section(
    by_classes: _Times, by_dims: _Times, dim: str, classes: str, plots: PlotFolder
) -> Section:
    device = "a GPU" if by_classes.device == "cuda" else "a CPU"
    consolidations = by_classes.consolidations + by_dims.consolidations
    return Section(
        setup=(
            "This experiment measures a training step (forward, backward, SGD with weight "
            f"decay) of spherical softmax on a batch of {_BATCH} noise vectors, on {device}. The "
            "factored head is compared with a dense head, which computes every logit. The dense "
            "head is measured only at sizes where its weight has at most "
            f"{_DENSE_NUMBERS:,} elements. The heads of a row are timed in turn, and this is "
            f"repeated {by_classes.slopes['factored'].n} times with new heads. In each repeat, "
            "the slope of log time over log size is fitted to the medians; its confidence "
            "interval is over the repeats."
        ),
        claims=_claims(by_classes, by_dims, dim, classes),
        tables=[
            _table(f"ms per step by number of classes, {dim}", "D", by_classes),
            _table(f"ms per step by number of features, {classes}", "d", by_dims),
        ],
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure((by_classes, f"D, classes ({dim})"), (by_dims, f"d, features ({classes})")),
                title="Time per training step of the factored head and the dense head.",
                alt_text="Two panels, by classes and by features, with one line per head.",
            )
        ],
        remarks=[
            "After many steps, the factored head consolidates its rows, which requires a pass "
            f"over all rows. This happened {consolidations} times during the measurement.",
        ],
    )


def _claims(by_classes: _Times, by_dims: _Times, dim: str, classes: str) -> list[Claim]:
    flat = by_classes.slopes["factored"]
    in_dims = by_dims.slopes["factored"]
    return [
        Claim(
            f"the time of a step does not grow with the number of classes ({dim}; slope within "
            f"{_FLAT:.3f} of zero)",
            verdict_within(flat, _FLAT),
            f"slope {flat.text()} from {by_classes.first} to {max(by_classes.of['factored']):,}",
        ),
        Claim(
            f"the time of a step grows no faster than d^2 ({classes})",
            verdict(Mean(2 - in_dims.value, in_dims.half, in_dims.n)),
            f"slope {in_dims.text()} from d = {by_dims.first} to {max(by_dims.of['factored']):,}",
        ),
    ]


def _table(title: str, size: str, times: _Times) -> Table:
    numbers = list(times.of["factored"])
    rows = []
    for kind, by_size in times.of.items():
        cells = [milliseconds(by_size[one]) if one in by_size else "" for one in numbers]
        rows.append([kind, *cells, times.slopes[kind].text()])
    last = f"slope from {times.first}"
    return Table(title, ["head", *(f"{size} = {one:,}" for one in numbers), last], rows)


def _figure(*panels: tuple[_Times, str]) -> Figure:
    figure = Figure(figsize=(8, 4))
    styles = {"factored": ("o", "tab:blue"), "dense": ("s", "tab:red")}
    for axes, (times, label) in zip(
        figure.subplots(1, len(panels), sharey=True), panels, strict=True
    ):
        for kind, by_size in times.of.items():
            marker, color = styles[kind]
            low, middle, high = np.transpose(
                [np.quantile(seconds, [0.25, 0.5, 0.75]) for seconds in by_size.values()]
            )
            name = f"{kind}, slope {times.slopes[kind].text(2)}"
            axes.plot(list(by_size), middle, marker=marker, color=color, label=name)
            axes.fill_between(list(by_size), low, high, color=color, alpha=0.2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        sizes = list(times.of["factored"])
        axes.set_xticks(sizes, [f"{size:,}" if size < 1_000 else f"{size:.0e}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.legend(fontsize="small")
    figure.axes[0].set_ylabel("seconds per step (quartiles)")
    return figure


EXPERIMENT = Experiment(
    name="004-cost",
    paper="004",
    title="Cost of a step by number of classes and features",
    minutes=5,
    procedure=_procedure,
)
