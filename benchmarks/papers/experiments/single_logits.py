"""What paper 002's Tables 1 and 2 show, of one dataset: SLC measures by loss."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.papers.comparison import Compared, advantage, cell, mean_of, values
from benchmarks.papers.experiment import Album, Experiment
from benchmarks.papers.experiments.loss_settings import loss_settings
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.job import Measures
from benchmarks.papers.published import published
from benchmarks.papers.section import Claim, Section, Table, paired
from heads.losses.registry import LOSSES as REGISTERED

# The paper's eleven objectives; the quadratic and spherical ones stand beside them.
_ELEVEN = (
    *("ce", "max_margin", "softmax_cs", "sigmoid_cs", "softmax_tanimoto"),
    *("batch_ce", "batch_max_margin", "self_norm", "nce", "bce", "sigmoid_tanimoto"),
)
_BESIDE = ("quadratic", "ccql", "taylor_softmax", "spherical_softmax")
LOSSES = (*_ELEVEN, *_BESIDE)
_MEASURES = ("auprc", "precision_at_recall_0.9", "precision_at_recall_0.99")
_HEADER = ("1 - AUPRC", "1 - precision at recall 0.9", "1 - precision at recall 0.99")
# By whether it is aligned with the Principle.
_STYLES = {True: ("tab:blue", "o"), False: ("tab:red", "^")}
_CLAIMED = ("batch_ce", "bce", "nce", "self_norm")


def slc_section(
    experiment: Experiment, dataset: str, network: str, compared: Compared, album: Album
) -> Section:
    """The section of one dataset of the paper."""
    picture = album.add(
        experiment.name,
        _figure(dataset, compared),
        title=f"{dataset}: one minus AUPRC of single logits, by loss, each at its best rates.",
        words="Points with intervals, one a loss, those aligned with the Principle apart.",
    )
    samples = compared.samples["ce"]
    return Section(
        name=experiment.name,
        paper=experiment.paper,
        title=experiment.title,
        setup=f"{network}, {samples['train']:,} training pictures. {compared.setup()}",
        claims=_claims(dataset, compared),
        tables=[
            _table(f"{dataset}, each at its best rates", dataset, compared, compared.at_best),
            _table(f"{dataset}, all at the shared rate", dataset, compared, compared.at_shared),
            _all_logits(dataset, compared),
        ],
        pictures=[picture],
        remarks=_remarks(dataset),
    )


def _remarks(dataset: str) -> list[str]:
    unprinted = [loss for loss in _ELEVEN if loss not in published("002", "table 1", dataset)]
    own = {loss: loss_settings(loss) for loss in LOSSES}
    return [
        f"The paper defines {', '.join(unprinted)} and prints nothing of them; it has SVHN, "
        "CIFAR-10 and ImageNet, too, which were not tried here.",
        "Settings of the losses' own are kway's defaults, not searched: "
        f"{'; '.join(f'{loss} {words}' for loss, words in own.items() if words)}.",
    ]


def _claims(dataset: str, compared: Compared) -> list[Claim]:
    claims = []
    for loss in _CLAIMED:
        for other in ("ce", "max_margin"):
            ours = advantage(compared.at_best[loss], compared.at_best[other], "auprc")
            claims.append(paired(f"{loss} beats {other} on single logits ({dataset}, AUPRC)", ours))
    aligned, others = (
        [loss for loss in _ELEVEN if REGISTERED[loss].aligned is wanted] for wanted in (True, False)
    )
    means = [_by_seed(compared, losses, "auprc") for losses in (aligned, others)]
    all_logits = values(compared.at_best["ce"], "all_logits/auprc", diverged=0.0)
    one_logit = values(compared.at_best["batch_ce"], "auprc", diverged=0.0)
    return [
        *claims,
        paired(
            f"losses aligned with the Principle beat the others ({dataset}, mean AUPRC)",
            difference(*means),
        ),
        paired(
            f"one logit of batch_ce beats all logits of ce ({dataset}, AUPRC)",
            difference(one_logit, all_logits),
        ),
    ]


def _table(
    title: str, dataset: str, compared: Compared, runs: Mapping[str, list[Measures]]
) -> Table:
    own = runs is compared.at_best
    rows = []
    for loss in LOSSES:
        printed = published("002", "table 1", dataset).get(loss)
        ours = [cell(runs[loss], name, _missing_text) for name in _MEASURES]
        both = ours if printed is None else _beside(ours, printed)
        aligned = "yes" if REGISTERED[loss].aligned else "no"
        rates = [compared.rates[loss].text()] if own else []
        rows.append([loss, aligned, *both, cell(runs[loss], "top1", Mean.text), *rates])
    header = ["loss", "aligned", *_HEADER, "top-1", *(["rate, decay"] if own else [])]
    return Table(f"{title} (published in brackets)", header, rows)


def _missing(found: Mean) -> Mean:
    return Mean(1 - found.value, found.half, found.n)


def _missing_text(found: Mean) -> str:
    return _missing(found).text()


def _all_logits(dataset: str, compared: Compared) -> Table:
    """Table 2: one logit against all of them."""
    printed = published("002", "table 2", dataset)
    # Of those that the paper's mean is of.
    aligned = [loss for loss in published("002", "table 1", dataset) if REGISTERED[loss].aligned]
    rows = []
    for name, columns in (
        ("mean of aligned", [_mean_over(compared, aligned, name) for name in _MEASURES]),
        ("batch_ce", [mean_of(compared.at_best["batch_ce"], name) for name in _MEASURES]),
        (
            "ce with all logits",
            [mean_of(compared.at_best["ce"], f"all_logits/{name}") for name in _MEASURES],
        ),
    ):
        ours = [_missing(found).text() for found in columns]
        rows.append([name, *_beside(ours, printed[name])])
    return Table(
        f"{dataset}: one logit against all (published in brackets)", ["method", *_HEADER], rows
    )


def _mean_over(compared: Compared, losses: Sequence[str], measure: str) -> Mean:
    """Over seeds, of the mean over losses."""
    return mean(_by_seed(compared, losses, measure))


def _by_seed(compared: Compared, losses: Sequence[str], measure: str) -> list[float]:
    of_losses = [values(compared.at_best[loss], measure, diverged=0.0) for loss in losses]
    return [sum(of_seed) / len(losses) for of_seed in zip(*of_losses, strict=True)]


def _beside(ours: Sequence[str], printed: Sequence[float]) -> list[str]:
    return [f"{mine} ({theirs:.3f})" for mine, theirs in zip(ours, printed, strict=True)]


def _figure(dataset: str, compared: Compared) -> Figure:
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    ordered = sorted(LOSSES, key=lambda loss: (REGISTERED[loss].aligned, -_auprc(compared, loss)))
    for place, loss in enumerate(ordered):
        found = _missing(mean_of(compared.at_best[loss], "auprc"))
        colour, marker = _STYLES[REGISTERED[loss].aligned]
        axes.errorbar(found.value, place, xerr=found.half, fmt=marker, color=colour, capsize=3)
        if (printed := published("002", "table 1", dataset).get(loss)) is not None:
            axes.plot(printed[0], place, "D", color="grey", mfc="none")
    axes.set_yticks(range(len(ordered)), ordered)
    shown = [_missing(mean_of(compared.at_best[loss], "auprc")).value for loss in LOSSES]
    axes.set_xscale("log" if max(shown) > 10 * min(shown) else "linear")
    axes.set_xlabel("1 - AUPRC of single logits (less is better)")
    for said, (colour, marker) in zip(
        ("aligned with the Principle", "not aligned"), _STYLES.values(), strict=True
    ):
        axes.plot([], [], marker, color=colour, label=said)
    axes.plot([], [], "D", color="grey", mfc="none", label="published")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure


def _auprc(compared: Compared, loss: str) -> float:
    return mean_of(compared.at_best[loss], "auprc").value
