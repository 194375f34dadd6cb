"""Paper 002's Tables 1 and 2 for one dataset: measures of single-logit classification by loss."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from experiments.papers.comparison import (
    Best,
    Compared,
    Reached,
    advantage,
    cell,
    mean_of,
    values,
)
from experiments.papers.experiment import Experiment, PlotFolder
from experiments.papers.experiments.loss_settings import loss_settings
from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.job import Measures
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table, Verdict, agreed, verdict
from heads.losses import LOSSES as REGISTERED

# The paper's eleven objectives. The quadratic and spherical losses are added for comparison.
_ELEVEN = (
    *("ce", "max_margin", "softmax_cs", "sigmoid_cs", "softmax_tanimoto"),
    *("batch_ce", "batch_max_margin", "self_norm", "nce", "bce", "sigmoid_tanimoto"),
)
_ADDITIONAL = ("quadratic", "ccql", "taylor_softmax", "spherical_softmax")
LOSSES = (*_ELEVEN, *_ADDITIONAL)
# For each loss, whether it is aligned with the Principle at its default hyperparameters.
ALIGNED = {loss: REGISTERED[loss]().aligned for loss in LOSSES}
_STYLES = {True: ("tab:blue", "o"), False: ("tab:red", "^")}
_SHORT = {
    "auprc": "AUPRC",
    "precision_at_recall_0.9": "precision at recall 0.9",
    "precision_at_recall_0.99": "precision at recall 0.99",
}
_MEASURES = tuple(_SHORT)
_HEADER = tuple(f"1 - {name}" for name in _SHORT.values())
_LEAST = 0.2  # the relative improvement in the paper's headline


def slc_section(
    experiment: Experiment,
    dataset: str,
    network: str,
    compared: Compared,
    kind: Kind,
    plots: PlotFolder,
) -> Section:
    """Return the section of one dataset. `kind`: the kind of the paper's claims with `network`."""
    plot = plots.save(
        experiment.name,
        _figure(dataset, compared),
        title=f"{dataset}: 1 - AUPRC of single logits, best rate of each loss.",
        alt_text="One point with error bars per loss, grouped by alignment with the Principle.",
    )
    samples = compared.samples["ce"]
    searches = compared.readings().items()
    return Section(
        name=experiment.name,
        paper=experiment.paper,
        title=experiment.title,
        setup=f"{network}. There are {samples['train']:,} training images. {compared.setup()}",
        claims=_claims(dataset, compared, kind),
        tables=[
            *(
                _table(
                    f"{dataset}, best rate of each loss, {search}",
                    dataset,
                    reached.runs,
                    reached.chosen,
                )
                for search, reached in searches
            ),
            _table(f"{dataset}, shared rate", dataset, compared.at_shared, None),
            _improvements_table(dataset, compared),
            *(
                _all_logits(f"{dataset}, {search}", dataset, reached)
                for search, reached in searches
            ),
        ],
        plots=[plot],
        remarks=_remarks(dataset),
    )


def _remarks(dataset: str) -> list[str]:
    unprinted = [loss for loss in _ELEVEN if loss not in published("002", "table 1", dataset)]
    own = {loss: loss_settings(loss) for loss in LOSSES}
    return [
        f"The paper defines {', '.join(unprinted[:-1])} and {unprinted[-1]} but prints no results "
        "for them. It also has results for SVHN, CIFAR-10 and ImageNet, which were not run here.",
        "The paper chooses the learning rate from 1, 0.1, 0.01 and 0.001 and trains for 100,000 "
        "steps. It does not mention weight decay.",
        "The losses' other settings were not tuned; they are kway's defaults: "
        f"{'; '.join(f'{loss} {settings}' for loss, settings in own.items() if settings)}.",
    ]


def _aligned(dataset: str, *, wanted: bool = True) -> list[str]:
    """Return the losses of Table 1 that are aligned with the Principle, or the others."""
    printed = published("002", "table 1", dataset)
    return [loss for loss in printed if ALIGNED[loss] is wanted]


def _claims(dataset: str, compared: Compared, kind: Kind) -> list[Claim]:
    beats = [
        compared.judge(
            f"{loss} beats {other} on single logits ({dataset}, AUPRC)",
            partial(_gain, loss, other),
            (loss, other),
            kind,
        )
        for loss in _aligned(dataset)
        for other in _aligned(dataset, wanted=False)
    ]
    printed = published("002", "mean relative improvement", dataset)
    improved = [
        _improved(dataset, compared, measure, percent, kind)
        for measure, percent in zip(_MEASURES, printed, strict=True)
    ]
    return [*beats, *improved, _comparable(dataset, compared, kind)]


def _gain(loss: str, other: str, reached: Reached) -> Mean:
    return advantage(reached.runs[loss], reached.runs[other], "auprc")


def _improved(dataset: str, compared: Compared, measure: str, printed: float, kind: Kind) -> Claim:
    """Claim an improvement of at least 20%, the paper's headline ("usually at least 20%").

    Where the published number is lower, the claim is that the aligned losses are better on average.
    """
    least = _LEAST if printed >= 100 * _LEAST else 0.0
    arms = [*_aligned(dataset), *_aligned(dataset, wanted=False)]
    improvement = f"of at least {least:.0%}" if least else "above zero"
    found = {
        search: _improvement(dataset, reached, measure)
        for search, reached in compared.readings().items()
    }
    return Claim(
        f"aligned losses have a mean relative improvement {improvement} ({dataset}, "
        f"{_SHORT[measure]}; published {printed:g}%)",
        agreed([verdict(Mean(one.value - least, one.half, one.n)) for one in found.values()]),
        ". ".join(
            f"{search}: {one.percent()}%{compared.readings()[search].edges(*arms)}"
            for search, one in found.items()
        )
        + f" (paired, {compared.seeds} seeds)",
        kind,
    )


def _improvement(dataset: str, reached: Reached, measure: str) -> Mean:
    """Return the relative improvement of the aligned losses over the others (paper 002, 6.1).

    It compares means of (1 - measure) over the losses of Table 1.
    """
    ours, theirs = (
        _by_seed(reached, _aligned(dataset, wanted=wanted), measure) for wanted in (True, False)
    )
    # All losses can separate a few samples perfectly.
    return mean([1 - (1 - a) / max(1 - b, 1e-9) for a, b in zip(ours, theirs, strict=True)])


def _comparable(dataset: str, compared: Compared, kind: Kind) -> Claim:
    """Claim that neither approach is "consistently more successful" (paper 002, 6.2).

    The claim holds if each approach is better in at least one measure, and fails if one is better
    in all of them.
    """
    found: dict[str, list[Mean]] = {
        search: [_over_all_logits(reached, measure) for measure in _MEASURES]
        for search, reached in compared.readings().items()
    }
    evidence = ". ".join(
        f"{search}: one logit minus all logits, "
        + ", ".join(
            f"{_SHORT[measure]} {gap.text(4)}" for measure, gap in zip(_MEASURES, gaps, strict=True)
        )
        + compared.readings()[search].edges("batch_ce", "ce")
        for search, gaps in found.items()
    )
    return Claim(
        f"one logit of batch_ce and all logits of ce are comparable ({dataset}): neither is better "
        "in all three measures",
        agreed([_neither_is_better(gaps) for gaps in found.values()]),
        f"{evidence} (paired, {compared.seeds} seeds)",
        kind,
    )


def _over_all_logits(reached: Reached, measure: str) -> Mean:
    one = values(reached.runs["batch_ce"], measure, diverged=0.0)
    all_logits = values(reached.runs["ce"], f"all_logits/{measure}", diverged=0.0)
    return difference(one, all_logits)


def _neither_is_better(gaps: Sequence[Mean]) -> Verdict:
    higher, lower = sum(gap.low > 0 for gap in gaps), sum(gap.high < 0 for gap in gaps)
    if higher and lower:
        return "holds"
    return "does not hold" if len(gaps) in (higher, lower) else "not settled"


def _table(
    title: str,
    dataset: str,
    runs: Mapping[str, list[Measures]],
    chosen: Mapping[str, Best] | None,
) -> Table:
    """Return the table of measures by loss. `chosen`: the rates of each loss, if they differ."""
    rows = []
    for loss in LOSSES:
        printed = published("002", "table 1", dataset).get(loss)
        ours = [cell(runs[loss], name, _missing_text) for name in _MEASURES]
        both = ours if printed is None else _with_published(ours, printed)
        aligned = "yes" if ALIGNED[loss] else "no"
        rates = [] if chosen is None else [chosen[loss].text()]
        rows.append([loss, aligned, *both, cell(runs[loss], "top1", Mean.text), *rates])
    rates_header = [] if chosen is None else ["rate, decay"]
    header = ["loss", "aligned", *_HEADER, "top-1", *rates_header]
    return Table(f"{title} (published in parentheses)", header, rows)


def _improvements_table(dataset: str, compared: Compared) -> Table:
    """Return the counterpart of the last row of each dataset in the paper's Table 1."""
    printed = published("002", "mean relative improvement", dataset)
    rows = []
    for search, reached in compared.readings().items():
        ours = [_improvement(dataset, reached, measure).percent() for measure in _MEASURES]
        rows.append([search, *(f"{a} ({b:g})" for a, b in zip(ours, printed, strict=True))])
    return Table(
        f"{dataset}: mean relative improvement of aligned losses in percent (published in "
        "parentheses)",
        ["search", *_HEADER],
        rows,
    )


def missing(found: Mean) -> Mean:
    """Return one minus a mean, which is how the paper prints its measures."""
    return Mean(1 - found.value, found.half, found.n)


def _missing_text(found: Mean) -> str:
    return missing(found).text()


def _all_logits(title: str, dataset: str, reached: Reached) -> Table:
    """Return Table 2: one logit compared with all logits."""
    printed = published("002", "table 2", dataset)
    aligned = _aligned(dataset)
    rows = []
    for name, columns in (
        ("mean of aligned", [mean(_by_seed(reached, aligned, name)) for name in _MEASURES]),
        ("batch_ce", [mean_of(reached.runs["batch_ce"], name) for name in _MEASURES]),
        (
            "ce with all logits",
            [mean_of(reached.runs["ce"], f"all_logits/{name}") for name in _MEASURES],
        ),
    ):
        ours = [missing(found).text() for found in columns]
        rows.append([name, *_with_published(ours, printed[name])])
    return Table(
        f"{title}: one logit vs. all logits (published in parentheses)",
        ["method", *_HEADER],
        rows,
    )


def _by_seed(reached: Reached, losses: Sequence[str], measure: str) -> list[float]:
    """Return the mean over losses for each seed."""
    of_losses = [values(reached.runs[loss], measure, diverged=0.0) for loss in losses]
    return [sum(of_seed) / len(losses) for of_seed in zip(*of_losses, strict=True)]


def _with_published(ours: Sequence[str], printed: Sequence[float]) -> list[str]:
    return [f"{mine} ({theirs:.3f})" for mine, theirs in zip(ours, printed, strict=True)]


def _figure(dataset: str, compared: Compared) -> Figure:
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    ordered = sorted(LOSSES, key=lambda loss: (ALIGNED[loss], -_auprc(compared, loss)))
    for index, loss in enumerate(ordered):
        found = missing(mean_of(compared.at_best[loss], "auprc"))
        color, marker = _STYLES[ALIGNED[loss]]
        axes.errorbar(found.value, index, xerr=found.half, fmt=marker, color=color, capsize=3)
        if (printed := published("002", "table 1", dataset).get(loss)) is not None:
            axes.plot(printed[0], index, "D", color="gray", mfc="none")
    axes.set_yticks(range(len(ordered)), ordered)
    shown = [missing(mean_of(compared.at_best[loss], "auprc")).value for loss in LOSSES]
    axes.set_xscale("log" if max(shown) > 10 * min(shown) else "linear")
    axes.set_xlabel("1 - AUPRC of single logits (lower is better)")
    for label, (color, marker) in zip(
        ("aligned with the Principle", "not aligned"), _STYLES.values(), strict=True
    ):
        axes.plot([], [], marker, color=color, label=label)
    axes.plot([], [], "D", color="gray", mfc="none", label="published")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure


def _auprc(compared: Compared, loss: str) -> float:
    return mean_of(compared.at_best[loss], "auprc").value
