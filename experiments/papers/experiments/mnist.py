"""The MNIST tables of paper 002 (single-logit classification) and paper 004 (spherical losses)."""

from collections.abc import Generator, Sequence

from matplotlib.figure import Figure

from data.messages import pluralize
from experiments.papers.budget import Budget
from experiments.papers.comparison import DIVERGED, Compared, best_rate, search
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.intervals import Mean, mean
from experiments.papers.job import Job, Measures, Result, Results
from experiments.papers.published import published
from experiments.papers.section import Claim, Section, Table, Verdict
from experiments.papers.stacked_mlp import training
from heads.losses import LOSSES as REGISTERED

# The paper's eleven objectives; its Table 1 prints results for seven of them.
LOSSES = (
    *("ce", "max_margin", "softmax_cs", "sigmoid_cs", "softmax_tanimoto"),
    *("batch_ce", "batch_max_margin", "self_norm", "nce", "bce", "sigmoid_tanimoto"),
)
# For each loss, whether it is aligned with the Principle of Logit Separation.
ALIGNED = {loss: REGISTERED[loss]().aligned for loss in LOSSES}
_PRINTED = tuple(published("002", "table 1", "MNIST"))
_SPHERICAL = ("ce", "taylor_softmax", "spherical_softmax")
MEASURES = {
    "auprc": "AUPRC",
    "precision_at_recall_0.9": "precision at recall 0.9",
    "precision_at_recall_0.99": "precision at recall 0.99",
}
_RATES, _LIMITS = (0.032, 0.1, 0.32), (1e-6, 1e3)
_SEARCH_STEPS, _STEPS, _PUBLISHED_STEPS = 1_000, 10_000, 100_000
_LONG = ("ce", "batch_ce", "bce")
_LEAST = 0.2  # the relative improvement in the paper's headline, "usually at least 20%"
_STYLES = {True: ("tab:blue", "o"), False: ("tab:red", "^")}
_NETWORK = (
    "The network of paper 002, two layers of 500 units with batch norm, is trained on the 60,000 "
    "images of MNIST with batches of 64, SGD with momentum 0.9, a constant rate, and initial "
    "weights of variance 2 / inputs (He et al.)"
)


def compared_on_mnist(
    budget: Budget, losses: Sequence[str], measure: str, *, most_seeds: int
) -> Generator[Sequence[Job], Results, tuple[Compared[str], int]]:
    """Search the rate of each loss by `measure` on held-out training images, then train all losses
    with 3 to `most_seeds` seeds. Return the results and the number of steps."""
    toy, limit = budget.is_toy, 300 if budget.is_toy else None
    steps = budget.size(_STEPS, least=4)

    def jobs(loss: str, rates: Sequence[float]) -> list[Job]:
        length = 4 if toy else _SEARCH_STEPS
        return [training(loss, rates, [0], length, split="validation", limit=limit)]

    def read(found: Sequence[Result]) -> list[float]:
        return [DIVERGED if of[0] is None else of[0] for of in found[0][measure]]

    limits = (_RATES[0], _RATES[-1]) if toy else _LIMITS
    searched = yield from search(losses, jobs, read, rates=_RATES, limits=limits)
    runs: dict[str, list[Measures]] = {loss: [] for loss in losses}
    for number in budget.rounds(at_least=3, at_most=most_seeds):
        seed = budget.first_seed + number + 1
        of_losses = {
            loss: training(loss, [best_rate(searched[loss])], [seed], steps, limit=limit)
            for loss in losses
        }
        results = yield list(of_losses.values())
        for loss, job in of_losses.items():
            runs[loss].append(_of_one_network(results[job]))
    return Compared(searched, runs), steps


def _of_one_network(result: Result) -> dict[str, float]:
    """Return the measures of a job with one rate and one seed."""
    return {name: of[0][0] for name, of in result.measures.items()}


def _setup(compared: Compared[str], measure: str, steps: int) -> str:
    seeds = len(compared.runs["ce"])
    return (
        f"{_NETWORK}. Each run takes {steps:,} steps, and there are {seeds} seeds. For each loss, "
        f"the rate with the highest {measure} on 10,000 held-out training images after "
        f"{_SEARCH_STEPS:,} steps is searched with factors of 3.2 until a lower and a higher rate "
        "are worse."
    )


def _scale(steps: int, network: str = "paper's network") -> str:
    return f"{network} and data, {steps:,} of {_PUBLISHED_STEPS:,} steps"


# ---------------------------------------------------------------- paper 002


def _single_logits(budget: Budget, plots: PlotFolder) -> Procedure:
    compared, steps = yield from compared_on_mnist(budget, LOSSES, "auprc", most_seeds=5)
    rates = {loss: compared.rate(loss) for loss in LOSSES}
    first = budget.first_seed + 1
    seeds = range(first, first + (2 if budget.is_toy else 3))
    starts = {
        start: [
            training(
                *("batch_ce", [rates["batch_ce"]], [seed], min(steps, 1_000)),
                start=start,
                limit=300 if budget.is_toy else None,
            )
            for seed in seeds
        ]
        for start in ("he", "linear")
    }
    results = yield [job for jobs in starts.values() for job in jobs]
    by_start = {
        start: mean([results[job]["auprc"][0][0] for job in jobs]) for start, jobs in starts.items()
    }
    runs: dict[str, list[Measures]] = {loss: [] for loss in _LONG}
    has_time = budget.is_toy or budget.effort == 1
    for number in budget.rounds(at_least=1, at_most=3) if has_time else ():
        of_losses = {
            loss: training(
                *(loss, [rates[loss]], [first + number]),
                4 if budget.is_toy else _PUBLISHED_STEPS,
                limit=300 if budget.is_toy else None,
            )
            for loss in _LONG
        }
        results = yield list(of_losses.values())
        for loss, job in of_losses.items():
            runs[loss].append(_of_one_network(results[job]))
    long = Compared(compared.searched, runs) if runs["ce"] else None
    plot = plots.save(
        "002-mnist",
        _figure(compared),
        title="MNIST: 1 - AUPRC of single logits, best rate of each loss.",
        alt_text="One point with error bars per loss, grouped by alignment with the Principle.",
    )
    return Section(
        setup=_setup(compared, "AUPRC", steps),
        scale=_scale(steps),
        claims=[*single_logit_claims(compared), *(_long_claims(long) if long else [])],
        tables=[
            _losses_table(compared),
            _all_logits_table(compared),
            Table(
                f"1 - AUPRC of batch_ce at rate {rates['batch_ce']:g} after {min(steps, 1_000):,} "
                "steps, by variance of the initial weights",
                ["2 / inputs (He et al.)", "1 / (3 inputs) (torch's nn.Linear)"],
                [[_missing(found).text(4) for found in by_start.values()]],
            ),
            *([_long_table(long)] if long else []),
        ],
        plots=[plot],
        remarks=[
            "The paper does not state the initial weights. Batch norm makes the output of a layer "
            "independent of the scale of its weights, so a variance six times smaller is "
            "equivalent to a rate of the hidden layers that is six times larger."
        ],
    )


def _of_alignment(aligned: bool) -> list[str]:
    """Return the losses of Table 1 that are aligned with the Principle, or the others."""
    return [loss for loss in _PRINTED if ALIGNED[loss] is aligned]


def single_logit_claims(compared: Compared[str]) -> list[Claim]:
    beats = [
        compared.claim(
            f"{loss} beats {other} on single logits (MNIST, AUPRC)",
            compared.gain(loss, other, "auprc"),
            *(loss, other),
        )
        for loss in _of_alignment(True)
        for other in _of_alignment(False)
    ]
    improved = []
    for measure, printed in zip(
        MEASURES, published("002", "mean relative improvement", "MNIST"), strict=True
    ):
        found = improvement(compared, measure)
        claim = compared.claim(
            "aligned losses have a mean relative improvement of at least 20% (MNIST, "
            f"{MEASURES[measure]}; published {printed:g}%)",
            *(Mean(found.value - _LEAST, found.half, found.n), *_PRINTED),
        )
        text = claim.evidence.partition(";")
        evidence = f"{found.percent()}% (paired, {found.n} seeds){text[1]}{text[2]}"
        improved.append(Claim(claim.statement, claim.verdict, evidence))
    return [*beats, *improved, _comparable(compared)]


def improvement(compared: Compared[str], measure: str) -> Mean:
    """Return the relative improvement of the aligned losses over the others (paper 002, 6.1), from
    the means of 1 - measure over the losses of Table 1."""
    ours, theirs = (
        _by_seed(compared, _of_alignment(aligned), measure) for aligned in (True, False)
    )
    # All losses can separate a few samples perfectly.
    return mean([1 - (1 - a) / max(1 - b, 1e-9) for a, b in zip(ours, theirs, strict=True)])


def _by_seed(compared: Compared[str], losses: Sequence[str], measure: str) -> list[float]:
    """Return the mean over losses for each seed."""
    of_losses = [compared.values(loss, measure) for loss in losses]
    return [sum(of_seed) / len(losses) for of_seed in zip(*of_losses, strict=True)]


def _comparable(compared: Compared[str]) -> Claim:
    """Claim that neither approach is "consistently more successful" (paper 002, 6.2): the claim
    holds if each is better in a measure, and fails if one is better in all of them."""
    gaps = {
        measure: compared.gain("batch_ce", "ce", measure, of_theirs=f"all_logits/{measure}")
        for measure in MEASURES
    }
    return Claim(
        "one logit of batch_ce and all logits of ce are comparable (MNIST): neither is better in "
        "all three measures",
        _neither_is_better(list(gaps.values())),
        "one logit minus all logits: "
        + ", ".join(f"{MEASURES[measure]} {gap.text(4)}" for measure, gap in gaps.items())
        + f" (paired, {len(compared.runs['ce'])} seeds)",
    )


def _neither_is_better(gaps: Sequence[Mean]) -> Verdict:
    higher, lower = sum(gap.low > 0 for gap in gaps), sum(gap.high < 0 for gap in gaps)
    if higher and lower:
        return "holds"
    return "does not hold" if len(gaps) in (higher, lower) else "not settled"


def _missing(found: Mean) -> Mean:
    """Return one minus a mean, which is how the paper prints its measures."""
    return Mean(1 - found.value, found.half, found.n)


def _with_published(cells: Sequence[Mean], printed: Sequence[float] | None) -> list[str]:
    ours = [_missing(found).text() for found in cells]
    if printed is None:
        return ours
    return [f"{mine} ({theirs:.3f})" for mine, theirs in zip(ours, printed, strict=True)]


_HEADER = tuple(f"1 - {name}" for name in MEASURES.values())


def _losses_table(compared: Compared[str]) -> Table:
    printed = published("002", "table 1", "MNIST")
    rows = [
        [
            loss,
            "yes" if ALIGNED[loss] else "no",
            *_with_published([compared.mean(loss, name) for name in MEASURES], printed.get(loss)),
            compared.mean(loss, "top1").text(),
            f"{compared.rate(loss):g}",
        ]
        for loss in LOSSES
    ]
    improvements = published("002", "mean relative improvement", "MNIST")
    cells = [
        f"{improvement(compared, name).percent()} ({theirs:g})"
        for name, theirs in zip(MEASURES, improvements, strict=True)
    ]
    rows.append(["mean relative improvement of aligned losses, %", "", *cells, "", ""])
    header = ["loss", "aligned", *_HEADER, "top-1", "rate"]
    return Table("Table 1 (published in parentheses)", header, rows)


def _all_logits_table(compared: Compared[str]) -> Table:
    printed = published("002", "table 2", "MNIST")
    columns = {
        "mean of aligned": [
            mean(_by_seed(compared, _of_alignment(True), name)) for name in MEASURES
        ],
        "batch_ce": [compared.mean("batch_ce", name) for name in MEASURES],
        "ce with all logits": [compared.mean("ce", f"all_logits/{name}") for name in MEASURES],
    }
    rows = [[name, *_with_published(cells, printed[name])] for name, cells in columns.items()]
    title = "Table 2: one logit vs. all logits (published in parentheses)"
    return Table(title, ["method", *_HEADER], rows)


def _long_claims(long: Compared[str]) -> list[Claim]:
    return [
        long.claim(
            f"after {_PUBLISHED_STEPS:,} steps, {loss} beats ce on single logits (MNIST, AUPRC)",
            long.gain(loss, "ce", "auprc"),
            *(loss, "ce"),
        )
        for loss in _LONG
        if loss != "ce"
    ]


def _long_table(long: Compared[str]) -> Table:
    printed = published("002", "table 1", "MNIST")
    rows = [
        [loss, *_with_published([long.mean(loss, name) for name in MEASURES], printed[loss])]
        for loss in _LONG
    ]
    seeds = pluralize(len(long.runs["ce"]), "seed")
    title = f"After {_PUBLISHED_STEPS:,} steps, {seeds} (published in parentheses)"
    return Table(title, ["loss", *_HEADER], rows)


def _figure(compared: Compared[str]) -> Figure:
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    means = {loss: _missing(compared.mean(loss, "auprc")) for loss in LOSSES}
    ordered = sorted(LOSSES, key=lambda loss: (ALIGNED[loss], means[loss].value))
    for index, loss in enumerate(ordered):
        color, marker = _STYLES[ALIGNED[loss]]
        found = means[loss]
        axes.errorbar(found.value, index, xerr=found.half, fmt=marker, color=color, capsize=3)
        if (printed := published("002", "table 1", "MNIST").get(loss)) is not None:
            axes.plot(printed[0], index, "D", color="gray", mfc="none")
    axes.set_yticks(range(len(ordered)), ordered)
    axes.set_xscale("log")
    axes.set_xlabel("1 - AUPRC of single logits (lower is better)")
    for label, (color, marker) in zip(("aligned", "not aligned"), _STYLES.values(), strict=True):
        axes.plot([], [], marker, color=color, label=label)
    axes.plot([], [], "D", color="gray", mfc="none", label="published")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure


# ---------------------------------------------------------------- paper 004


def _spherical(budget: Budget, _plots: PlotFolder) -> Procedure:
    # The difference between these losses is smaller than that between seeds.
    compared, steps = yield from compared_on_mnist(budget, _SPHERICAL, "top1", most_seeds=10)
    printed = published("004", "mnist")
    rows = [
        [
            loss,
            f"{_missing(compared.mean(loss, 'top1')).percent(2)} ({printed[loss]})",
            f"{compared.rate(loss):g}",
        ]
        for loss in _SPHERICAL
    ]
    return Section(
        setup=_setup(compared, "top-1 accuracy", steps)
        + " The available text of the paper does not specify its network.",
        scale=_scale(steps, "paper 002's network"),
        claims=spherical_claims(compared),
        tables=[
            Table("Error rate in % (published in parentheses)", ["loss", "ours", "rate"], rows)
        ],
    )


def spherical_claims(compared: Compared[str]) -> list[Claim]:
    return [
        compared.claim(
            f"{better} has a lower error rate than {worse} (MNIST)",
            compared.gain(better, worse, "top1"),
            *(better, worse),
            points=True,
        )
        for better, worse in (("taylor_softmax", "ce"), ("ce", "spherical_softmax"))
    ]


SINGLE_LOGITS = Experiment(
    name="002-mnist",
    paper="002",
    title="Single-logit classification on MNIST (Tables 1 and 2)",
    minutes=50,
    procedure=_single_logits,
    needs=("mnist",),
)
SPHERICAL = Experiment(
    name="004-mnist",
    paper="004",
    title="Spherical losses on MNIST",
    minutes=20,
    procedure=_spherical,
    needs=("mnist",),
)
