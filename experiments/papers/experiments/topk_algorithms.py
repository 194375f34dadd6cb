"""Paper 003, Tables 3 to 5: speed and stability of algorithms for the smooth top-k loss."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.topk_jobs import PRECISIONS, K
from experiments.papers.job import Job, Measures, Result
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table, Verdict
from experiments.papers.turns import milliseconds, ratio

_JOBS = "experiments.topk_jobs"
# By number of classes: the seconds for each direction, chosen to fit the experiment's `minutes`.
_CLASSES = {100: 2, 1_000: 4, 10_000: 12, 100_000: 30}
_TOY_CLASSES = {20: 1, 41: 1}
_EXPONENTS = (1, 0, -1, -2, -3, -4)  # of the temperatures
# By the name used in published.yaml.
_FORWARD = {
    "summation": "summation (Algorithm 3)",
    "divide and conquer": "divide and conquer (Algorithm 1 in log space)",
    "ours": "kway",
}
_BACKWARD = {
    "automatic": "Algorithm 1 with autograd",
    "custom": "Algorithm 1 with Algorithm 2",
    "ours": "kway, custom backward",
}
_GRADIENTS = {
    "divide and conquer": "Algorithm 1 with autograd",
    "custom backward": "Algorithm 1 with Algorithm 2",
    "ours": "kway",
}

Stable = Mapping[str, Mapping[str, bool]]


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    timings = {
        number: Job(
            f"{_JOBS}:time_algorithms",
            {
                "batch": _batch(budget, number),
                "classes": number,
                "rounds": budget.size(15, full=50, least=2),
                "seconds": 600.0 if budget.is_full else max(1.0, seconds * budget.effort),
            },
            alone=True,
        )
        for number, seconds in (_TOY_CLASSES if budget.is_toy else _CLASSES).items()
    }
    stability = Job(
        f"{_JOBS}:try_temperatures",
        {
            "batch": 8 if budget.is_toy else 128,
            "classes": 50 if budget.is_toy else 1_000,
            "exponents": list(_EXPONENTS),
            "gain": 15.0,
            "seed": 0,
        },
    )
    results = yield [*timings.values(), stability]
    found = {number: results[job].measures for number, job in timings.items()}
    batches = {number: job.settings["batch"] for number, job in timings.items()}
    return _section(found, batches, stability, results[stability], plots)


def _batch(budget: Budget, num_classes: int) -> int:
    """Return the paper's batch size, or a smaller one if two rounds would exceed the budget."""
    if budget.is_toy:
        return 8
    return 64 if num_classes == max(_CLASSES) and not budget.is_full else 256


def _section(
    found: Mapping[int, Measures],
    batches: Mapping[int, int],
    stability: Job,
    stable: Result,
    plots: PlotFolder,
) -> Section:
    rounds = [
        len(one[which]["ours"]) for one in found.values() for which in ("forward", "backward")
    ]
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"The loss with k = {K} is computed from given scores in float32, for "
            f"{_batches_text(batches)}, on {_machine(found)} (the paper uses a Titan Xp). The "
            f"algorithms are timed in turn, and times are medians over {_rounds_text(rounds)} "
            "rounds. experiments/papers/experiments/topk_reference.py implements Algorithms 1 to 3 "
            "as printed in the paper, vectorized over the scores. kway's implementation "
            "(heads/losses/symmetric.py) "
            "multiplies the factors of the 2k largest scores of a row, first in pairs and then "
            "their products, as in Algorithm 1, and computes the polynomials of the others from "
            f"power sums with Newton's identities. {_scores_text(stability, stable)}"
        ),
        claims=[*_speed_claims(found), *_stability_claims(stable["losses"], stable["gradients"])],
        tables=[
            _speed_table("forward", "table 3", _FORWARD, found),
            _speed_table("backward", "table 4", _BACKWARD, found),
            _losses_table(stable["losses"]),
            _gradients_table(stable["gradients"]),
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
            "The losses of the three forward algorithms agree to within a relative difference of "
            f"{max(one['losses_apart'] for one in found.values()):.0e}.",
            "Algorithm 2 is implemented without the paper's approximation for unstable elements "
            "(appendix B.2.2).",
        ],
    )


def _rounds_text(rounds: Sequence[int]) -> str:
    """Return `15`, or `10 to 15`."""
    least, most = min(rounds), max(rounds)
    return str(least) if least == most else f"{least} to {most}"


def _batches_text(batches: Mapping[int, int]) -> str:
    """Return `256 rows (64 for n = 100,000)`."""
    first, *others = dict.fromkeys(batches.values())
    less = [f"{other} for n = {n:,}" for n, other in batches.items() if other in others]
    return f"{first} rows ({', '.join(less)})" if less else f"{first} rows"


def _machine(found: Mapping[int, Measures]) -> str:
    return "a GPU" if next(iter(found.values()))["device"] == "cuda" else "a CPU"


def _scores_text(stability: Job, stable: Result) -> str:
    case = stability.settings
    return (
        "To test stability, the paper uses the scores of ResNet-18 on ImageNet. In this "
        f"experiment, the scores of {case['batch']} rows x {case['classes']:,} classes are drawn "
        "from a normal distribution. The score of the true class is then increased by "
        f"{case['gain']:g}, and the scores of four similar classes by half as much. The average "
        f"score of the true class is {stable['true_score']:.1f}."
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
    rows = []
    for name in _FORWARD:
        for precision in PRECISIONS:
            theirs = printed.get(f"{name} {precision}", {})
            cells = [
                f"{_word(is_finite)} ({_word(theirs[exponent])})" if theirs else _word(is_finite)
                for exponent, is_finite in losses[f"{name} {precision}"].items()
            ]
            rows.append([_FORWARD[name], precision, *cells])
    return _temperatures("Table 5: is the loss finite? (published in parentheses)", rows)


def _gradients_table(gradients: Stable) -> Table:
    rows = [
        [label, precision, *map(_word, gradients[f"{name} {precision}"].values())]
        for name, label in _GRADIENTS.items()
        for precision in PRECISIONS
    ]
    return _temperatures("Is the gradient finite?", rows)


def _temperatures(title: str, rows: list[list[str]]) -> Table:
    header = ["algorithm", "precision", *(f"10^{exponent}" for exponent in _EXPONENTS)]
    return Table(title, header, rows)


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
                    Kind.PAPER,
                )
            )
    return claims


def _stability_claims(losses: Stable, gradients: Stable) -> list[Claim]:
    claims = []
    for what, finite in (("loss", losses), ("gradient", gradients)):
        of_both = [finite[f"divide and conquer {precision}"].values() for precision in PRECISIONS]
        claims.append(
            Claim(
                "Algorithm 1 in log space is stable at all temperatures in both precisions "
                f"({what})",
                _holds(all(map(all, of_both))),
                _reach(finite, "divide and conquer"),
                Kind.PAPER,
            )
        )
    single, double = (sum(losses[f"summation {precision}"].values()) for precision in PRECISIONS)
    claims.append(
        Claim(
            "summation overflows at low temperatures, earlier in single than in double precision",
            _holds(single < double < len(_EXPONENTS)),
            _reach(losses, "summation"),
            Kind.PAPER,
        )
    )
    return claims


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


def _holds(does: bool) -> Verdict:
    return "holds" if does else "does not hold"


def _figure(found: Mapping[int, Measures]) -> Figure:
    figure = Figure(figsize=(8, 4))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, which, key, algorithms in zip(
        panels, ("forward", "backward"), ("table 3", "table 4"), (_FORWARD, _BACKWARD), strict=True
    ):
        styles = zip("os^", ("tab:red", "tab:orange", "tab:blue"), strict=True)
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
    minutes=1.5,
    full="the published batch sizes for every number of classes (the paper used a GPU)",
    wants_gpu=True,
    procedure=_procedure,
)
