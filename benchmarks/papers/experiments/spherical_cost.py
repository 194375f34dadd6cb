"""Paper 004: a step of a spherical loss costs O(d^2), however many classes there are."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import SGD

from benchmarks.factored import QuickHead
from benchmarks.papers.budget import Budget
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.job import Job, Measures, Places
from benchmarks.papers.section import Claim, Kind, Section, Table, Verdict, verdict
from benchmarks.papers.turns import milliseconds, timed
from heads import ClassHead, FactoredHead
from heads.losses import SphericalSoftmax

_JOB = "experiments.spherical_cost:time_steps"
_BATCH = 64
_RATE, _DECAY = 0.01, 5e-4
_DIM = 64  # while the classes vary
_FIXED = 100_000  # classes, while d varies
_CLASSES = tuple(10**power for power in range(3, 8))
_DIMS = (32, 64, 128, 256, 512)
_DENSE_NUMBERS = 100_000_000  # of a dense head's weight, which a step needs three times over
# Slopes are of where the cost of calling anything at all is left behind.
_CLASSES_OF_SLOPE, _DIMS_OF_SLOPE = 10_000, 128
# A slope in the classes within this of zero: ten times the classes cost a tenth more at most.
_FLAT = math.log10(1.1)


def time_steps(settings: Mapping[str, Any], places: Places) -> Measures:
    """A job: seconds by round of a training step (forward, backward, update) of the heads `cases`,
    [kind, classes, dim] each, under the name `kind classes dim`; consolidations of the factored
    ones count where they come."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = {
        f"{kind} {num_classes} {dim}": _head(kind, num_classes, dim, device)
        for kind, num_classes, dim in settings["cases"]
    }
    found = timed(
        {name: _step(head) for name, head in heads.items()},
        places,
        rounds=settings["rounds"],
        seconds=settings["seconds"],
    )
    factored = [head for head in heads.values() if isinstance(head, FactoredHead)]
    return {
        "seconds": found,
        "consolidations": sum(head.num_consolidations for head in factored),
        "apart": rows_apart(steps=5),
        "device": device,
    }


def _head(kind: str, num_classes: int, dim: int, device: str) -> ClassHead:
    if kind == "factored":
        return QuickHead(dim, num_classes, SphericalSoftmax(), device=device)
    return ClassHead(dim, num_classes, SphericalSoftmax(), bias=False, device=device)


def _step(head: ClassHead) -> Callable[[], None]:
    """On noise, whose labels are drawn anew: the rows that it touches are as cold as their number
    makes them."""
    train, device = _trained_by(head), head.engine.weights.device

    def step() -> None:
        features = torch.randn(_BATCH, head.dim, device=device, requires_grad=True)
        train(features, torch.randint(head.num_classes, (_BATCH,), device=device))

    return step


def _trained_by(head: ClassHead) -> Callable[[Tensor, Tensor], None]:
    """The same step, plain SGD with weight decay, of either kind of head."""
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


def rows_apart(*, steps: int, num_classes: int = 1_000, dim: int = 32) -> float:
    """How far the factored head's rows end from the dense one's after the same steps, over how far
    the row that moved most went: what is timed is the same step."""
    dense = ClassHead(dim, num_classes, SphericalSoftmax(), bias=False)
    factored = FactoredHead(dim, num_classes, SphericalSoftmax())
    start = dense.weight.detach().clone()
    trained = _trained_by(dense), _trained_by(factored)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        features = torch.randn(_BATCH, dim, generator=draw)
        labels = torch.randint(num_classes, (_BATCH,), generator=draw)
        for train in trained:
            train(features.clone().requires_grad_(), labels)
    ends = dense.weight.detach()
    apart = (ends - factored.weight.detach()).norm(dim=1).max()
    return float(apart / (ends - start).norm(dim=1).max())


def slope(seconds: Mapping[int, Sequence[float]]) -> Mean:
    """Of log time by log size, fitted to each round by itself, with an interval over rounds."""
    sizes = np.log(list(seconds))
    centred = sizes - sizes.mean()
    return mean([float(centred @ np.log(one) / (centred @ centred)) for one in _by_round(seconds)])


def _by_round(seconds: Mapping[int, Sequence[float]]) -> np.ndarray:
    """[rounds, sizes]"""
    return np.array(list(seconds.values())).T


def _course(budget: Budget, album: Album) -> Course:
    classes, dims = (_CLASSES, _DIMS) if not budget.is_toy else ((100, 1_000), (8, 16))
    fixed, dim = (_FIXED, _DIM) if not budget.is_toy else (1_000, 8)
    cases = {
        "classes": _cases([(number, dim) for number in classes]),
        "dims": _cases([(fixed, number) for number in dims]),
    }
    # Making ten million rows, and their squares once, comes on top.
    seconds = 300.0 if budget.is_full else max(1.0, 20 * EXPERIMENT.minutes * budget.effort)
    jobs = {
        name: Job(
            _JOB,
            {
                "cases": cases[name],
                "rounds": budget.size(60, full=200, least=3),
                "seconds": seconds,
            },
            alone=True,
        )
        for name in cases
    }
    results = yield list(jobs.values())
    by_classes, by_dims = (results[jobs[name]].measures for name in ("classes", "dims"))
    return _section(
        _Times(by_classes, column=1, least=_CLASSES_OF_SLOPE),
        _Times(by_dims, column=2, least=_DIMS_OF_SLOPE),
        f"d = {dim}",
        f"D = {fixed:,}",
        album,
    )


def _cases(sizes: Sequence[tuple[int, int]]) -> list[list[Any]]:
    kinds = {"factored": math.inf, "dense": _DENSE_NUMBERS}
    return [
        [kind, number, dim]
        for kind, most in kinds.items()
        for number, dim in sizes
        if number * dim <= most
    ]


class _Times:
    """Seconds of both heads by the size that varies, and their slopes from `least` on."""

    def __init__(self, measures: Measures, *, column: int, least: int) -> None:
        self.measures = measures
        self.of: dict[str, dict[int, list[float]]] = {"factored": {}, "dense": {}}
        for name, seconds in measures["seconds"].items():
            case = name.split()
            self.of[case[0]][int(case[column])] = seconds
        self.least = least if max(self.of["dense"]) > least else 0
        self.slopes = {kind: slope(self.fitted(kind)) for kind in self.of}

    def fitted(self, kind: str) -> dict[int, list[float]]:
        return {size: times for size, times in self.of[kind].items() if size >= self.least}

    @property
    def rounds(self) -> int:
        return self.slopes["factored"].n


def _section(by_classes: _Times, by_dims: _Times, dim: str, classes: str, album: Album) -> Section:
    device = "a GPU" if by_classes.measures["device"] == "cuda" else "a CPU"
    come = by_classes.measures["consolidations"] + by_dims.measures["consolidations"]
    apart = by_classes.measures["apart"]
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"A training step (forward, backward, SGD with weight decay) of spherical softmax on "
            f"{_BATCH} rows of noise, on {device}: the factored head beside a dense one, which "
            f"computes every logit, where its weight has {_DENSE_NUMBERS:,} numbers at most. Heads "
            f"take turns, {by_classes.rounds} and {by_dims.rounds} rounds. A slope is fitted to "
            "log time by log size in each round, with an interval over rounds."
        ),
        claims=_claims(by_classes, by_dims, dim, classes),
        tables=[
            _table(f"ms a step by classes, {dim}", "D", by_classes),
            _table(f"ms a step by features, {classes}", "d", by_dims),
        ],
        pictures=[
            album.add(
                EXPERIMENT.name,
                _figure((by_classes, f"classes D ({dim})"), (by_dims, f"features d ({classes})")),
                title="Seconds of a training step, the factored head beside a dense one.",
                words="Two panels, by classes and by features, with a line for either head.",
            )
        ],
        remarks=[
            f"Both heads train the same rows: after the same steps they are {apart:.0e} apart, "
            "relative to the way that the rows went.",
            "The factored head makes its rows plain once in many steps, which costs a pass over "
            f"all of them; that came {come} times among these steps. benchmarks/factored.py says "
            "how long it takes.",
            _break_even(by_classes, dim),
        ],
    )


def _claims(by_classes: _Times, by_dims: _Times, dim: str, classes: str) -> list[Claim]:
    flat, rising = by_classes.slopes["factored"], by_classes.slopes["dense"]
    shared = list(by_classes.fitted("dense"))
    steeper = difference(
        _slopes(by_classes.of["dense"], shared), _slopes(by_classes.of["factored"], shared)
    )
    in_dims = by_dims.slopes["factored"]
    return [
        Claim(
            f"a step's time does not grow with the classes ({dim}; a slope within "
            f"{_FLAT:.3f} of zero)",
            _within(flat, _FLAT),
            f"slope {flat.text()} from {_first(by_classes)} to {max(by_classes.of['factored']):,}",
            Kind.PAPER,
        ),
        Claim(
            f"a dense head's grows with them more than the factored one's ({dim})",
            verdict(steeper),
            f"slope {rising.text()}, steeper by {steeper.text()}",
            Kind.TRIVIAL,  # it computes every logit
        ),
        Claim(
            f"a step's time grows with d^2 at most ({classes})",
            verdict(Mean(2 - in_dims.value, in_dims.half, in_dims.n)),
            f"slope {in_dims.text()} from d = {_first(by_dims)} to {max(by_dims.of['factored']):,}",
            Kind.PAPER,
        ),
    ]


def _first(times: _Times) -> str:
    return f"{min(times.fitted('factored')):,}"


def _slopes(seconds: Mapping[int, Sequence[float]], sizes: Sequence[int]) -> list[float]:
    chosen = {size: seconds[size] for size in sizes}
    return [
        slope({size: [one[place]] for place, size in enumerate(chosen)}).value
        for one in _by_round(chosen)
    ]


def _within(found: Mean, tolerance: float) -> Verdict:
    if max(abs(found.low), abs(found.high)) < tolerance:
        return "holds"
    return "does not hold" if found.low > tolerance or found.high < -tolerance else "not settled"


def _break_even(by_classes: _Times, dim: str) -> str:
    """The classes from which on the factored head is the faster one."""
    factored, dense = by_classes.of["factored"], by_classes.of["dense"]
    wins = [size for size, times in dense.items() if median(times) > median(factored[size])]
    if not wins:
        return f"At no number of classes measured here is the factored head the faster ({dim})."
    most = max(wins)
    times = median(dense[most]) / median(factored[most])
    return (
        f"Of the numbers of classes measured, the factored head is the faster one at "
        f"{', '.join(f'{size:,}' for size in sorted(wins))} ({dim}); at {most:,} it is "
        f"{times:.0f} times as fast."
    )


def _table(title: str, size: str, times: _Times) -> Table:
    numbers = list(times.of["factored"])
    rows = []
    for kind, by_size in times.of.items():
        cells = [milliseconds(by_size[one]) if one in by_size else "" for one in numbers]
        rows.append([kind, *cells, times.slopes[kind].text()])
    last = f"slope from {_first(times)}"
    return Table(title, ["head", *(f"{size} = {one:,}" for one in numbers), last], rows)


def _figure(*panels: tuple[_Times, str]) -> Figure:
    figure = Figure(figsize=(8, 4))
    styles = {"factored": ("o", "tab:blue"), "dense": ("s", "tab:red")}
    for axes, (times, label) in zip(
        figure.subplots(1, len(panels), sharey=True), panels, strict=True
    ):
        for kind, by_size in times.of.items():
            marker, colour = styles[kind]
            low, middle, high = np.quantile(_by_round(by_size), [0.25, 0.5, 0.75], axis=0)
            name = f"{kind}, slope {times.slopes[kind].text(2)}"
            axes.plot(list(by_size), middle, marker=marker, color=colour, label=name)
            axes.fill_between(list(by_size), low, high, color=colour, alpha=0.2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        sizes = list(times.of["factored"])
        axes.set_xticks(sizes, [f"{size:,}" if size < 1_000 else f"{size:.0e}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.legend(fontsize="small")
    figure.axes[0].set_ylabel("seconds a step (quartiles)")
    return figure


EXPERIMENT = Experiment(
    name="004-cost",
    paper="004",
    title="The cost of a step by classes and features",
    minutes=1.5,
    full="more rounds",
    course=_course,
)
