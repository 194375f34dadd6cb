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

from benchmarks.papers.budget import Budget
from benchmarks.papers.edges import edge_note, is_at_edge
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.job import Job, Measures, Places
from benchmarks.papers.section import Claim, Kind, Section, Table, paired
from benchmarks.papers.turns import Median, ratio, timed
from heads import ClassHead, FactoredHead
from heads.logits import ClassRows
from heads.losses import CrossEntropy, NoiseContrastiveEstimation, Quadratic
from heads.slc import block_measures

_HERE = "experiments.beyond_million"
_RECALLS = (0.9, 0.99)
_DIM, _SIGMA = 32, 0.15
_POINTS = 5  # of the training at which it is measured
# Each loss may train on so few of the classes in a step: it computes those that its batch has, and
# some of the others, drawn at random; quadratic's factored head has them all, exactly.
_LOSSES = ("ce", "nce", "quadratic")
# Times the rows of a batch: a sample moves its row by so much.
_RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)
_MEASURES = {
    "auprc": "AUPRC",
    "precision_at_recall_0.9": "precision at recall 0.9",
    "precision_at_recall_0.99": "precision at recall 0.99",
}


def train_head(settings: Mapping[str, Any], _places: Places) -> Measures:
    """A job: one loss trained on samples of `seen` of the classes, and SLC measures of some of
    these, `points`, in the course of it; `ideal`, those of the true centres; or `diverged`."""
    torch.manual_seed(settings["seed"])
    num_classes, batch = settings["classes"], settings["batch"]
    centres = normalize(torch.randn(num_classes, _DIM))
    seen = torch.randperm(num_classes)[: settings["seen"]]
    wanted, (features, labels) = _test(centres, seen, settings["measured"])
    head = _head(settings)
    step = _step(head, settings["rate"] * batch)
    samples = _samples(centres, seen, batch)
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
    ideal = _measured(features @ centres[wanted].T, labels, wanted)
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
    """Plain SGD, whichever head."""
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


def _samples(centres: Tensor, seen: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels, every class as often as the others."""
    mixed = itertools.chain.from_iterable(
        seen[torch.randperm(len(seen))] for _ in itertools.count()
    )
    while True:
        labels = torch.stack(list(itertools.islice(mixed, batch)))
        yield _around(centres, labels).requires_grad_(), labels


def _around(centres: Tensor, labels: Tensor) -> Tensor:
    return centres[labels] + _SIGMA * torch.randn(len(labels), _DIM)


def _test(
    centres: Tensor, seen: Tensor, num_measured: int, each: int = 20
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The classes to measure, and samples: `each` of them, and as many of any other classes."""
    wanted = seen[:num_measured].sort().values
    own = wanted.repeat_interleave(each)
    labels = torch.cat([own, torch.randint(len(centres), (len(own),))])
    return wanted, (_around(centres, labels), labels)


def _rows(head: ClassHead, wanted: Tensor) -> ClassRows:
    """Those of the classes `wanted`, in ascending order."""
    rows = torch.empty(len(wanted), _DIM)
    bias = None if head.bias is None else torch.empty(len(wanted))
    for block in head.class_rows(1 << 18):
        places = torch.searchsorted(wanted, block.class_ids).clamp(max=len(wanted) - 1)
        here = wanted[places] == block.class_ids
        rows[places[here]] = block.rows[here].float()
        if bias is not None and block.bias is not None:
            bias[places[here]] = block.bias[here].float()
    return ClassRows(wanted, rows, bias)


def _measured(scores: Tensor, labels: Tensor, wanted: Tensor) -> dict[str, float]:
    return block_measures(scores, labels, wanted, _RECALLS).summary()


def time_logits(settings: Mapping[str, Any], places: Places) -> Measures:
    """A job: seconds by round of one logit of one sample, and of all of them."""
    torch.manual_seed(0)
    num_classes, repeats = settings["classes"], 100
    head = ClassHead(_DIM, 1, CrossEntropy())  # its own row is not asked for
    rows, features = torch.randn(num_classes, _DIM), torch.randn(1, _DIM)
    classes = ClassRows(torch.arange(num_classes), rows, torch.randn(num_classes))

    def one() -> None:
        for place in range(repeats):
            head.logits(features, classes[place : place + 1])

    with torch.inference_mode():
        found = timed(
            {"one": one, "all": lambda: head.logits(features, classes)},
            places,
            rounds=settings["rounds"],
            seconds=settings["seconds"],
        )
    return {"one": [seconds / repeats for seconds in found["one"]], "all": found["all"]}


def _course(budget: Budget, album: Album) -> Course:
    seen = budget.size(12_000, full=200_000, least=100)
    sizes = {
        "classes": 2_000 if budget.is_toy else 1_000_000,
        "seen": seen,
        "measured": 50 if budget.is_toy else min(500, seen),
        "batch": 64 if budget.is_toy else 2_048,
        "sampled": 64 if budget.is_toy else 2_048,
        # Of a few steps at a low rate nothing would be seen behind random rows.
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
        f"{sizes['classes']:,} classes, their centres drawn on the sphere in {_DIM} dimensions; a "
        f"sample is its class's centre and normal noise of {_SIGMA:g} a dimension. "
        f"{sizes['seen']:,} classes have training samples, {steps} steps of {sizes['batch']:,}; "
        f"{sizes['measured']:,} of them are measured by one logit each, on 20 samples of each and "
        "as many again of any class. ce and nce compute the batch's classes and "
        f"{sizes['sampled']:,} drawn ones in a step, quadratic all of them, exactly, by the "
        f"factored head. SGD from zero, {len(runs['ce'])} seeds; the learning rate of each is "
        f"the best of the same {len(rates)} after {search} steps of another seed. No "
        "backbone: rows are learned on given features."
    )
    return _section(words, best, runs, ratio(times["all"], times["one"]), times.measures, album)


def _auprc(measures: Measures) -> float:
    """One that diverged counts as nothing."""
    return -1.0 if "diverged" in measures else float(measures["points"][-1]["auprc"])


def _section(
    words: str,
    best: Mapping[str, float],
    runs: Mapping[str, list[Measures]],
    faster: Median,
    times: Measures,
    album: Album,
) -> Section:
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=words,
        claims=_claims(best, runs, faster),
        tables=[_table(best, runs), _times_table(times, faster)],
        pictures=[
            album.add(
                EXPERIMENT.name,
                _figure(runs),
                title="AUPRC of single logits by the samples that each class has had.",
                words="A line with its interval for each loss, and the dashed ideal.",
            )
        ],
        remarks=[
            "The ideal is the true centre as the class's row: no training gives a better one here.",
            "batch_ce has no form that draws classes, and all logits of a batch for a million "
            "classes do not fit this budget: not tried.",
        ],
    )


_MANY = 100


def _claims(
    best: Mapping[str, float], runs: Mapping[str, list[Measures]], faster: Median
) -> list[Claim]:
    claims = [
        Claim(
            f"one logit of them is {_MANY} times as fast as all, or more",
            faster.above(_MANY),
            f"{faster.text(0)} times as fast",
            Kind.OWN_QUESTION,
        )
    ]
    for loss in _LOSSES[1:]:
        gained = difference(_values(runs[loss], "auprc"), _values(runs["ce"], "auprc"))
        statement = f"{loss}, aligned with the Principle, beats ce on single logits (AUPRC)"
        at_edge = [one for one in ("ce", loss) if is_at_edge(best[one], _RATES)]
        note = edge_note([f"{one} ({best[one]:g})" for one in at_edge])
        claims.append(paired(statement, gained, Kind.OWN_QUESTION, note=note))
    return claims


def _values(runs: Sequence[Measures], measure: str) -> list[float]:
    """At the end."""
    return [0.0 if "diverged" in run else float(run["points"][-1][measure]) for run in runs]


def _ideal(runs: Mapping[str, list[Measures]], measure: str) -> Mean | None:
    """Every loss has the same samples at a seed."""
    whole = [each for each in runs.values() if not any("diverged" in run for run in each)]
    return mean([run["ideal"][measure] for run in whole[0]]) if whole else None


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
    header = ["loss", *_MEASURES.values(), "rate x rows of a batch"]
    return Table("Single logits at the end of training", header, rows)


def _times_table(times: Measures, faster: Median) -> Table:
    row = [f"{1e6 * sorted(times[name])[len(times[name]) // 2]:,.1f}" for name in ("one", "all")]
    header = ["one logit", "all logits", "one is faster by"]
    return Table("Microseconds a sample, features given", header, [[*row, faster.text(0)]])


def _figure(runs: Mapping[str, list[Measures]]) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    styles = zip("os^", ("tab:red", "tab:orange", "tab:blue"), strict=True)
    for loss, (marker, colour) in zip(_LOSSES, styles, strict=True):
        whole = [run["points"] for run in runs[loss] if "diverged" not in run]
        if not whole:
            continue
        samples = [point["samples_per_class"] for point in whole[0]]
        found = [mean([point["auprc"] for point in points]) for points in zip(*whole, strict=True)]
        half = [0.0 if math.isinf(one.half) else one.half for one in found]
        axes.errorbar(
            samples,
            [one.value for one in found],
            yerr=half,
            marker=marker,
            color=colour,
            capsize=3,
            label=loss,
        )
    if (ideal := _ideal(runs, "auprc")) is not None:
        axes.axhline(ideal.value, linestyle="--", color="grey", label="ideal")
    axes.set_xlabel("samples of each class so far")
    axes.set_ylabel("AUPRC of single logits")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="beyond-million",
    paper="beyond",
    title="Single logits of a million classes",
    minutes=1,
    full="more samples and steps",
    course=_course,
)
