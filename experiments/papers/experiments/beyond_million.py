"""Beyond the papers: single-logit classification (002) with a million classes."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize
from torch.optim import SGD

from experiments.papers.budget import Budget
from experiments.papers.edges import edge_note, is_at_edge
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Kind, Section, Table, paired
from experiments.papers.turns import Median, ratio, timed
from heads import ClassHead, FactoredHead
from heads.logits import ClassRows
from heads.losses import CrossEntropy, NoiseContrastiveEstimation, Quadratic
from heads.slc import block_measures

_HERE = "experiments.beyond_million"
_RECALLS = (0.9, 0.99)
_DIM, _SIGMA = 32, 0.15
_POINTS = 5  # number of evaluations during training
# These losses scale to a million classes: ce and nce compute only the logits of the batch's classes
# and of a random sample of the others; quadratic accounts for all classes exactly, using the
# factored head.
_LOSSES = ("ce", "nce", "quadratic")
# Learning rates per sample. They are multiplied by the batch size, because the loss is a mean over
# the batch.
_RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)
_MEASURES = {
    "auprc": "AUPRC",
    "precision_at_recall_0.9": "precision at recall 0.9",
    "precision_at_recall_0.99": "precision at recall 0.99",
}


def train_head(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Train one loss on samples of `seen` classes and measure single-logit classification (a job).

    `points` contains the measures of some of these classes during training, and `ideal` those of
    the true centers. A run that diverges has only the measure `diverged`.
    """
    torch.manual_seed(settings["seed"])
    num_classes, batch = settings["classes"], settings["batch"]
    centers = normalize(torch.randn(num_classes, _DIM))
    seen = torch.randperm(num_classes)[: settings["seen"]]
    wanted, (features, labels) = _test(centers, seen, settings["measured"])
    head = _head(settings)
    step = _step(head, settings["rate"] * batch)
    samples = _samples(centers, seen, batch)
    points = []
    every = max(1, settings["steps"] // _POINTS)
    for number in range(1, settings["steps"] + 1):
        try:
            step(*next(samples))
        except FloatingPointError as error:
            return {"diverged": str(error)}
        if number % every == 0 or number == settings["steps"]:
            rows = _rows(head, wanted)
            if not rows.rows.isfinite().all():
                return {"diverged": f"a class row is not finite after step {number}"}
            scores = head.loss.score(head.logits(features, rows))
            measures = _measured(scores, labels, wanted)
            points.append({"samples_per_class": number * batch / len(seen), **measures})
    ideal = _measured(features @ centers[wanted].T, labels, wanted)
    return {"points": points, "ideal": ideal, "test": len(labels)}


def _head(settings: Mapping[str, Any]) -> ClassHead:
    num_classes, sampled = settings["classes"], settings["sampled"]
    start = {"seed": settings["seed"], "init_std": settings["init_std"]}
    match settings["loss"]:
        case "quadratic":
            return FactoredHead(_DIM, num_classes, Quadratic(), **start)
        case "ce":
            loss = CrossEntropy(sample_rate=sampled / num_classes)
            return ClassHead(_DIM, num_classes, loss, **start)
        case _:
            nce = NoiseContrastiveEstimation(noise="uniform", samples=sampled)
            return ClassHead(_DIM, num_classes, nce, **start)


def _step(head: ClassHead, lr: float) -> Callable[[Tensor, Tensor], None]:
    """Return a step of plain SGD for either kind of head."""
    if isinstance(head, FactoredHead):

        def factored(features: Tensor, labels: Tensor) -> None:
            head(features, labels).backward()
            head.step(lr)

        return factored
    sgd = SGD(head.parameters(), lr=lr)

    def dense(features: Tensor, labels: Tensor) -> None:
        sgd.zero_grad()
        head(features, labels).backward()
        sgd.step()

    return dense


def _samples(centers: Tensor, seen: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features and labels; all classes occur equally often."""
    shuffled = itertools.chain.from_iterable(
        seen[torch.randperm(len(seen))] for _ in itertools.count()
    )
    while True:
        labels = torch.stack(list(itertools.islice(shuffled, batch)))
        yield _around(centers, labels).requires_grad_(), labels


def _around(centers: Tensor, labels: Tensor) -> Tensor:
    return centers[labels] + _SIGMA * torch.randn(len(labels), _DIM)


def _test(
    centers: Tensor, seen: Tensor, num_measured: int, each: int = 20
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the classes to measure, and the test samples.

    There are `each` samples per class, and the same number of samples of random classes.
    """
    wanted = seen[:num_measured].sort().values
    own = wanted.repeat_interleave(each)
    labels = torch.cat([own, torch.randint(len(centers), (len(own),))])
    return wanted, (_around(centers, labels), labels)


def _rows(head: ClassHead, wanted: Tensor) -> ClassRows:
    """Return the rows of the `wanted` classes, whose ids are in ascending order."""
    rows = torch.empty(len(wanted), _DIM)
    bias = None if head.bias is None else torch.empty(len(wanted))
    for block in head.class_rows(1 << 18):
        positions = torch.searchsorted(wanted, block.class_ids).clamp(max=len(wanted) - 1)
        here = wanted[positions] == block.class_ids
        rows[positions[here]] = block.rows[here].float()
        if bias is not None and block.bias is not None:
            bias[positions[here]] = block.bias[here].float()
    return ClassRows(wanted, rows, bias)


def _measured(scores: Tensor, labels: Tensor, wanted: Tensor) -> dict[str, float]:
    return block_measures(scores, labels, wanted, _RECALLS).summary()


def time_logits(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Time one logit and all logits of one sample (a job)."""
    torch.manual_seed(0)
    num_classes, repeats = settings["classes"], 100
    head = ClassHead(_DIM, 1, CrossEntropy())  # the row of this head is not used
    rows, features = torch.randn(num_classes, _DIM), torch.randn(1, _DIM)
    classes = ClassRows(torch.arange(num_classes), rows, torch.randn(num_classes))

    def one() -> None:
        for index in range(repeats):
            head.logits(features, classes[index : index + 1])

    with torch.inference_mode():
        found = timed(
            {"one": one, "all": lambda: head.logits(features, classes)},
            folders,
            rounds=settings["rounds"],
            seconds=settings["seconds"],
        )
    return {"one": [seconds / repeats for seconds in found["one"]], "all": found["all"]}


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    seen = budget.size(12_000, full=200_000, least=100)
    sizes = {
        "classes": 2_000 if budget.is_toy else 1_000_000,
        "seen": seen,
        "measured": 50 if budget.is_toy else min(500, seen),
        "batch": 64 if budget.is_toy else 2_048,
        "sampled": 64 if budget.is_toy else 2_048,
        # Random initial rows would hide the effect of a few steps at a low learning rate.
        "init_std": 0.0,
    }
    steps = budget.size(60, full=5_000, least=10)

    def job(loss: str, rate: float, steps: int, seed: int) -> Job:
        settings = {**sizes, "loss": loss, "rate": rate, "steps": steps, "seed": seed}
        return Job(f"{_HERE}:train_head", settings)

    search = max(5, steps // 5)
    rates = _RATES[:1] if budget.is_toy else _RATES
    found = yield [job(loss, rate, search, 0) for loss in _LOSSES for rate in rates]
    best = {
        loss: max(rates, key=lambda rate: _auprc(found[job(loss, rate, search, 0)].measures))
        for loss in _LOSSES
    }
    timing = Job(
        f"{_HERE}:time_logits",
        {"classes": sizes["classes"], "rounds": 51, "seconds": max(0.5, 5 * budget.effort)},
        alone=True,
    )
    results = yield [timing]
    runs: dict[str, list[Measures]] = {loss: [] for loss in _LOSSES}
    for number in budget.rounds(at_most=5):
        jobs = {loss: job(loss, best[loss], steps, number + 1) for loss in _LOSSES}
        measured = yield list(jobs.values())
        for loss in _LOSSES:
            runs[loss].append(measured[jobs[loss]].measures)
    times = results[timing]
    words = (
        f"There are {sizes['classes']:,} classes with random centers on the unit sphere in "
        f"{_DIM} dimensions. A sample is the center of its class plus normal noise with a standard "
        f"deviation of {_SIGMA:g} per dimension. There is no backbone: the features are given. "
        f"Training samples come from {sizes['seen']:,} of the classes, and training takes {steps} "
        f"steps with a batch size of {sizes['batch']:,}. Single logits are evaluated for "
        f"{sizes['measured']:,} of these classes, on 20 samples of each class and the same number "
        "of samples of random classes. In each step, ce and nce compute the logits of the batch's "
        f"classes and of {sizes['sampled']:,} random classes, whereas quadratic accounts for all "
        "classes exactly, using the factored head. The heads are initialized to zero and "
        f"trained with SGD, with {len(runs['ce'])} seeds. For each loss, the best of the same "
        f"{len(rates)} learning rates is chosen after {search} steps with another seed."
    )
    return _section(words, best, runs, ratio(times["all"], times["one"]), times.measures, plots)


def _auprc(measures: Measures) -> float:
    """Return the final AUPRC; -1 for a run that diverged."""
    return -1.0 if "diverged" in measures else float(measures["points"][-1]["auprc"])


def _section(
    words: str,
    best: Mapping[str, float],
    runs: Mapping[str, list[Measures]],
    faster: Median,
    times: Measures,
    plots: PlotFolder,
) -> Section:
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=words,
        claims=_claims(best, runs, faster),
        tables=[_table(best, runs), _times_table(times, faster)],
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure(runs),
                title="AUPRC of single logits by number of training samples per class.",
                alt_text="One line with error bars per loss, and a dashed line for the ideal.",
            )
        ],
        remarks=[
            'In the row "ideal", each class row is the true center of its class: no training can '
            "do better here.",
            "batch_ce was not run: it has no variant that samples classes, and computing the "
            "logits of a million classes for every batch would exceed this budget.",
        ],
    )


_MANY = 100


def _claims(
    best: Mapping[str, float], runs: Mapping[str, list[Measures]], faster: Median
) -> list[Claim]:
    claims = [
        Claim(
            f"one logit is at least {_MANY} times as fast as all logits",
            faster.above(_MANY),
            f"{faster.text(0)} times as fast",
            Kind.ADDITIONAL,
        )
    ]
    for loss in _LOSSES[1:]:
        gained = difference(_values(runs[loss], "auprc"), _values(runs["ce"], "auprc"))
        statement = f"{loss}, aligned with the Principle, beats ce on single logits (AUPRC)"
        at_edge = [one for one in ("ce", loss) if is_at_edge(best[one], _RATES)]
        note = edge_note([f"{one} ({best[one]:g})" for one in at_edge])
        claims.append(paired(statement, gained, Kind.ADDITIONAL, note=note))
    return claims


def _values(runs: Sequence[Measures], measure: str) -> list[float]:
    """Return each run's measure at the end of training; 0 for a run that diverged."""
    return [0.0 if "diverged" in run else float(run["points"][-1][measure]) for run in runs]


def _ideal(runs: Mapping[str, list[Measures]], measure: str) -> Mean | None:
    """Return the measure of the true centers, which is the same for all losses of a seed."""
    complete = [each for each in runs.values() if not any("diverged" in run for run in each)]
    return mean([run["ideal"][measure] for run in complete[0]]) if complete else None


def _table(best: Mapping[str, float], runs: Mapping[str, list[Measures]]) -> Table:
    rows = [
        [
            loss,
            *(mean(_values(runs[loss], measure)).text() for measure in _MEASURES),
            f"{best[loss]:g}{' (edge)' if is_at_edge(best[loss], _RATES) else ''}",
        ]
        for loss in _LOSSES
    ]
    ideal = [_ideal(runs, measure) for measure in _MEASURES]
    rows.append(["ideal", *("" if one is None else one.text() for one in ideal), ""])
    header = ["loss", *_MEASURES.values(), "learning rate / batch size"]
    return Table("Single logits at the end of training", header, rows)


def _times_table(times: Measures, faster: Median) -> Table:
    row = [f"{1e6 * sorted(times[name])[len(times[name]) // 2]:,.1f}" for name in ("one", "all")]
    header = ["one logit", "all logits", "speedup of one logit"]
    return Table("Microseconds per sample, without backbone", header, [[*row, faster.text(0)]])


def _figure(runs: Mapping[str, list[Measures]]) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    styles = zip("os^", ("tab:red", "tab:orange", "tab:blue"), strict=True)
    for loss, (marker, color) in zip(_LOSSES, styles, strict=True):
        complete = [run["points"] for run in runs[loss] if "diverged" not in run]
        if not complete:
            continue
        samples = [point["samples_per_class"] for point in complete[0]]
        by_point = zip(*complete, strict=True)
        found = [mean([point["auprc"] for point in points]) for points in by_point]
        half = [0.0 if math.isinf(one.half) else one.half for one in found]
        axes.errorbar(
            samples,
            [one.value for one in found],
            yerr=half,
            marker=marker,
            color=color,
            capsize=3,
            label=loss,
        )
    if (ideal := _ideal(runs, "auprc")) is not None:
        axes.axhline(ideal.value, linestyle="--", color="gray", label="ideal")
    axes.set_xlabel("training samples per class")
    axes.set_ylabel("AUPRC of single logits")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="beyond-million",
    paper="beyond",
    title="Single-logit classification with a million classes",
    minutes=1,
    full="more samples and steps",
    procedure=_procedure,
)
