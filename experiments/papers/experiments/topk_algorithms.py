"""Paper 003, Tables 3 to 5: speed and stability of algorithms for the smooth top-k loss.

The algorithms are those of `topk_reference.py`, written as the paper prints them.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments import topk_reference as reference
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.published import published
from experiments.papers.section import Claim, Section, Table
from experiments.papers.turns import Seconds, milliseconds, ratio, synchronous, timed

K = 5
PRECISIONS = {"single": torch.float32, "double": torch.float64}
# By number of classes: the seconds for each direction, chosen to fit the experiment's `minutes`.
_CLASSES = {100: 2, 1_000: 12, 10_000: 12, 100_000: 60}
_TOY_CLASSES = {20: 1, 41: 1}
_EXPONENTS = (1, 0, -1, -2, -3, -4)  # of the temperatures
_GAIN = 15.0
# By the name used in published.yaml.
_FORWARD = {
    "summation": "summation (Algorithm 3)",
    "divide and conquer": "divide and conquer (Algorithm 1 in log space)",
}
_BACKWARD = {
    "automatic": "Algorithm 1 with autograd",
    "custom": "Algorithm 1 with Algorithm 2",
}
_POLYNOMIALS = {
    "summation": reference.summation,
    "divide and conquer": reference.divide_and_conquer,
    "automatic": reference.divide_and_conquer,
    "custom": reference.with_custom_backward,
}
# Whether the loss is finite, by algorithm and precision and then by the temperature's exponent.
Stable = Mapping[str, Mapping[str, bool]]


def time_algorithms(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Time forward and backward at temperature 1 for one number of classes (a job)."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, num_classes = settings["batch"], settings["classes"]
    logits = torch.randn(batch, num_classes, device=device, requires_grad=True)
    labels = torch.randint(num_classes, (batch,), device=device)

    def loss(name: str) -> Callable[[], Tensor]:
        return lambda: reference.smooth_topk(logits, labels, _POLYNOMIALS[name], k=K, tau=1.0)

    limits = {"rounds": settings["rounds"], "seconds": settings["seconds"]}
    with torch.no_grad():
        forward = timed({name: loss(name) for name in _FORWARD}, folders, **limits)
    backward = _backward_seconds({name: loss(name) for name in _BACKWARD}, logits, **limits)
    return {"forward": forward, "backward": backward, "device": device.type}


def _backward_seconds(
    losses: Mapping[str, Callable[[], Tensor]], logits: Tensor, *, rounds: int, seconds: float
) -> Seconds:
    """Time only the backward passes, in turn; each one follows an untimed forward pass."""
    clock = synchronous(time.perf_counter)
    found: Seconds = {name: [] for name in losses}
    began = 0.0
    for done in range(-1, rounds):  # the first warms up
        if done == 0:
            began = clock()
        if done > 0 and (clock() - began) * (done + 1) / done > seconds:
            break
        for name, loss in losses.items():
            value = loss()
            started = clock()
            torch.autograd.grad(value, logits)
            if done >= 0:
                found[name].append(clock() - started)
    return found


def try_temperatures(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Check whether the loss is finite (a job). See `Stable`."""
    scores, labels = trained_scores(settings["batch"], settings["classes"], gain=_GAIN, seed=0)
    found: dict[str, dict[str, bool]] = {}
    for precision, dtype in PRECISIONS.items():
        for name in _FORWARD:
            for exponent in _EXPONENTS:
                loss = reference.smooth_topk(
                    scores.to(dtype), labels, _POLYNOMIALS[name], k=K, tau=10.0**exponent
                )
                of_this = found.setdefault(f"{name} {precision}", {})
                of_this[str(exponent)] = bool(loss.isfinite())
    return {"losses": found, "true_score": float(scores.gather(1, labels[:, None]).mean())}


def trained_scores(
    batch: int, num_classes: int, *, gain: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return scores [batch, num_classes] similar to those of an ImageNet classifier, and labels.

    Scores are normally distributed with a standard deviation of 2.5. The score of the true class is
    then increased by `gain`, and those of four similar classes by half as much.
    """
    draw = torch.Generator().manual_seed(seed)
    scores = 2.5 * torch.randn(batch, num_classes, generator=draw, dtype=torch.float64)
    order = torch.rand(batch, num_classes, generator=draw).argsort(1)
    scores.scatter_add_(1, order[:, :1], torch.full((batch, 1), gain, dtype=torch.float64))
    scores.scatter_add_(1, order[:, 1:5], torch.full((batch, 4), gain / 2, dtype=torch.float64))
    return scores, order[:, 0]


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    timings = {
        number: Job(
            "experiments.topk_algorithms:time_algorithms",
            {
                "batch": 8 if budget.is_toy else 64 if number == max(_CLASSES) else 256,
                "classes": number,
                "rounds": budget.size(31, least=2),
                "seconds": max(1.0, seconds * budget.effort),
            },
            alone=True,
        )
        for number, seconds in (_TOY_CLASSES if budget.is_toy else _CLASSES).items()
    }
    batch, classes = (8, 50) if budget.is_toy else (128, 1_000)
    stability = Job(
        "experiments.topk_algorithms:try_temperatures", {"batch": batch, "classes": classes}
    )
    results = yield [*timings.values(), stability]
    found = {number: results[job].measures for number, job in timings.items()}
    losses = results[stability]["losses"]
    device = "a GPU" if found[max(found)]["device"] == "cuda" else "a CPU"
    rounds = min(
        len(times)
        for one in found.values()
        for way in ("forward", "backward")
        for times in one[way].values()
    )
    return Section(
        setup=f"The loss with k = {K} is computed from given scores in float32, for batches of 256 "
        f"rows (64 for n = {max(_CLASSES):,}), on {device} (the paper uses a Titan Xp). The "
        f"algorithms are timed in turn, for at least {rounds} rounds, and times are medians. "
        "experiments/papers/experiments/topk_reference.py implements them as printed in the paper, "
        "vectorized over the scores. To test stability, the paper uses the scores of ResNet-18 on "
        f"ImageNet; here, the scores of {batch} rows x {classes:,} classes are normally "
        f"distributed, the score of the true class is increased by {_GAIN:g}, and those of four "
        "similar classes by half as much. The average score of the true class is "
        f"{results[stability]['true_score']:.1f}.",
        claims=[*_speed_claims(found), *_stability_claims(losses)],
        tables=[
            _speed_table("forward", "table 3", _FORWARD, found),
            _speed_table("backward", "table 4", _BACKWARD, found),
            _losses_table(losses),
        ],
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure(found),
                title="Time per batch by number of classes. Dashed: published, on a GPU.",
                alt_text="Two panels, forward and backward, with one line per algorithm.",
            )
        ],
        remarks=[
            "Algorithm 2 is implemented without the paper's approximation for unstable elements "
            "(appendix B.2.2).",
        ],
    )


def _speed_table(
    which: str, key: str, algorithms: Mapping[str, str], found: Mapping[int, Measures]
) -> Table:
    printed = published("003", key)
    rows = []
    for name, label in algorithms.items():
        cells = [label]
        for number, measures in found.items():
            theirs = printed.get(name, {}).get(number)
            in_parentheses = "" if theirs is None else f" ({1e3 * theirs:,.0f})"
            cells.append(milliseconds(measures[which][name]) + in_parentheses)
        rows.append(cells)
    return Table(
        f"{key.capitalize()}: ms {which} (published, on a GPU, in parentheses)",
        ["algorithm", *(f"n = {number:,}" for number in found)],
        rows,
    )


def _losses_table(losses: Stable) -> Table:
    printed = published("003", "table 5")
    rows = [
        [
            _FORWARD[name],
            precision,
            *(
                f"{_word(is_finite)} ({_word(printed[f'{name} {precision}'][exponent])})"
                for exponent, is_finite in losses[f"{name} {precision}"].items()
            ),
        ]
        for name in _FORWARD
        for precision in PRECISIONS
    ]
    header = ["algorithm", "precision", *(f"10^{exponent}" for exponent in _EXPONENTS)]
    return Table("Table 5: is the loss finite? (published in parentheses)", header, rows)


def _word(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _speed_claims(found: Mapping[int, Measures]) -> list[Claim]:
    comparisons = (
        ("divide and conquer is faster than summation", "forward", "summation",
         "divide and conquer"),
        ("Algorithm 2 is faster than autograd", "backward", "automatic", "custom"),
    )  # fmt: skip
    claims = []
    for statement, which, slower, faster in comparisons:
        for number in (1_000, max(found)) if 1_000 in found else (max(found),):
            times = ratio(found[number][which][slower], found[number][which][faster])
            claims.append(
                Claim(
                    f"{statement} ({which}, n = {number:,})",
                    times.above(1),
                    f"{times.text()} times as fast",
                )
            )
    return claims


def _stability_claims(losses: Stable) -> list[Claim]:
    of_both = [losses[f"divide and conquer {precision}"].values() for precision in PRECISIONS]
    single, double = (sum(losses[f"summation {precision}"].values()) for precision in PRECISIONS)
    return [
        Claim(
            "Algorithm 1 in log space is stable at all temperatures in both precisions (loss)",
            "holds" if all(map(all, of_both)) else "does not hold",
            _reach(losses, "divide and conquer"),
        ),
        Claim(
            "summation overflows at low temperatures, earlier in single than in double precision",
            "holds" if single < double < len(_EXPONENTS) else "does not hold",
            _reach(losses, "summation"),
        ),
    ]


def _reach(finite: Stable, name: str) -> str:
    """Return the lowest temperature at which the algorithm is stable, for each precision."""
    limits = []
    for precision in PRECISIONS:
        reached = None
        for exponent, is_finite in finite[f"{name} {precision}"].items():
            if not is_finite:
                break
            reached = exponent
        limit = "never finite" if reached is None else f"finite down to 10^{reached}"
        limits.append(f"{precision} precision: {limit}")
    return ", ".join(limits)


def _figure(found: Mapping[int, Measures]) -> Figure:
    figure = Figure(figsize=(8, 4))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, which, key, algorithms in zip(
        panels, ("forward", "backward"), ("table 3", "table 4"), (_FORWARD, _BACKWARD), strict=True
    ):
        styles = zip("os", ("tab:red", "tab:orange"), strict=True)
        for (name, label), (marker, color) in zip(algorithms.items(), styles, strict=True):
            medians = [median(measures[which][name]) for measures in found.values()]
            axes.plot(list(found), medians, marker=marker, color=color, label=label.split(" (")[0])
            printed = published("003", key).get(name, {})
            numbers, seconds = list(printed), list(printed.values())
            axes.plot(numbers, seconds, "--", marker=marker, color=color, mfc="none", alpha=0.6)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("number of classes")
        axes.set_title(which)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("seconds per batch")
    return figure


EXPERIMENT = Experiment(
    name="003-algorithms",
    paper="003",
    title="Algorithms for the smooth top-k loss (Tables 3 to 5)",
    minutes=2,
    procedure=_procedure,
)
