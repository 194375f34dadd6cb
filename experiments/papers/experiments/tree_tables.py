"""Paper 000's Table 1 for one dataset: the tree loss, cross entropy and SimLoss."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from experiments.papers.comparison import Compared, advantage, cell, mean_of
from experiments.papers.intervals import Mean
from experiments.papers.job import Measures
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Table, paired

ARMS = ("vtree", "ce", "simloss")
_MEASURES = {"top1": "top-1", "sa": "SA"}


def head(arm: str) -> dict[str, object]:
    """Return the recipe's head section for an arm. The tree loss is cross entropy on a V-tree."""
    if arm == "vtree":
        return {"weights": {"kind": "vtree"}, "loss": {"kind": "ce"}}
    return {"loss": {"kind": arm}}


def claims(dataset: str, compared: Compared, kind: Kind) -> list[Claim]:
    """Claim that the tree loss beats both other losses in both measures."""
    found = []
    for other in ("ce", "simloss"):
        for measure, name in _MEASURES.items():
            ours = advantage(compared.at_best["vtree"], compared.at_best[other], measure)
            statement = f"the tree loss beats {other} ({dataset}, {name})"
            found.append(paired(statement, ours, kind, note=compared.best.edges("vtree", other)))
    return found


def table(title: str, dataset: str, compared: Compared, *, is_best: bool) -> Table:
    """Return a table in percent, with the published numbers in parentheses."""
    runs: Mapping[str, list[Measures]] = compared.at_best if is_best else compared.at_shared
    rows = []
    for arm in ARMS:
        printed = published("000", "table 1", dataset)[arm]
        cells = []
        for measure in _MEASURES:
            cells.append(f"{cell(runs[arm], measure, Mean.percent)} ({printed[measure]:.2f})")
        rates = compared.best.chosen[arm] if is_best else compared.shared
        rows.append([arm, *cells, rates.text()])
    return Table(
        f"{title} (published in parentheses)", ["loss", "top-1 %", "SA %", "rate, decay"], rows
    )


def figure(compared: Compared) -> Figure:
    """Plot both measures of the three losses at their best rates and at the shared rate."""
    figure = Figure(figsize=(7, 3))
    for axes, (measure, name) in zip(figure.subplots(1, 2), _MEASURES.items(), strict=True):
        for runs, marker, label in (
            (compared.at_best, "o", "best rate of each loss"),
            (compared.at_shared, "s", "shared rate"),
        ):
            found = [mean_of(runs[arm], measure) for arm in ARMS]
            axes.errorbar(
                ARMS,
                [100 * one.value for one in found],
                yerr=[100 * one.half for one in found],
                fmt=marker,
                mfc="none" if marker == "s" else None,
                capsize=3,
                label=label,
            )
        axes.set_ylabel(f"{name}, %")
        axes.margins(x=0.2)
    axes.legend(fontsize="small")
    figure.tight_layout()
    return figure
