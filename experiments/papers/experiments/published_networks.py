"""The papers' tables on CIFAR-100, with the published networks on 45,000 images (`--gpu`).

One table compares several arms, which differ in the head or the labels. The rate of each arm is
searched on held-out training images, and all arms run with the same seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.papers.budget import Budget
from experiments.papers.comparison import DIVERGED, Compared, best_rate, search
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.mnist import LOSSES as OBJECTIVES
from experiments.papers.intervals import difference
from experiments.papers.job import Job, Result
from experiments.papers.section import Claim, Section, Table
from experiments.papers.shards import CIFAR_100, COARSE, Dataset
from experiments.papers.training import training

_MEAN, _STD = [0.507, 0.487, 0.441], [0.267, 0.256, 0.276]
_IMAGES, _VALIDATION, _SEEDS = 45_000, 5_000, 3
_LIMITS, _NO_SEARCH = (1e-5, 1e2), (1e2, 1e-5)
_NOISES = (0.2, 0.4, 0.6, 0.8, 1.0)
_TAUS = ("0", "1e-3", "1e-2", "1e-1", "1", "10", "100")  # of paper 003's Table 6


@dataclass(frozen=True)
class Contrast:
    """The claim that arm `better` has a higher value of `measure` than arm `worse`."""

    statement: str
    better: str
    worse: str
    measure: str
    of_worse: str = ""  # the measure of `worse`, if it differs


@dataclass(frozen=True)
class CifarTable:
    """A table on CIFAR-100: the network, how it is trained, its arms, and what the paper claims.

    `heads` are the recipe's head sections by arm, and `noises` the label noise of arms that have
    any. Runs are measured on the splits `test` and `train`, and, for `keep_best`, also at the
    checkpoint with the highest top-5 accuracy on the validation split (`best/test/...`).
    The search of the rate starts with `rates`; a single one is used without a search.
    `drops` are the fractions of the steps at which the rate is multiplied by `factor`; without
    them, the schedule is a cosine.
    """

    name: str
    title: str
    network: Mapping[str, Any]
    heads: Mapping[str, Mapping[str, Any]]
    contrasts: Sequence[Contrast]
    measures: Sequence[str]
    search_by: str
    steps: int
    rates: Sequence[float] = (0.032, 0.1, 0.32)
    batch: int = 128
    weight_decay: float = 5e-4
    drops: Sequence[float] = ()
    factor: float = 0.1
    nesterov: bool = False
    noises: Mapping[str, float] = field(default_factory=dict)
    keep_best: Sequence[str] = ()
    vectors: str = ""
    more_claims: Callable[[Compared[str]], Sequence[Claim]] = lambda _compared: ()

    def dataset(self, arm: str, *, toy: bool) -> Dataset:
        return Dataset(
            "cifar100",
            noise=self.noises.get(arm, 0.0),
            validation=_VALIDATION,
            vectors=self.vectors,
            limits=dict.fromkeys(("train", "validation", "test"), 128) if toy else {},
        )

    def recipe(
        self, arm: str, rate: float, steps: int, seed: int, *, final: bool
    ) -> dict[str, Any]:
        schedule: dict[str, Any] = {"kind": "cosine"}
        if self.drops:
            milestones = [{"steps": max(1, round(share * steps))} for share in self.drops]
            schedule = {"kind": "step", "milestones": milestones, "factor": self.factor}
        recipe: dict[str, Any] = {
            "seed": seed,
            "data": {
                "image": {"size": 32, "mean": _MEAN, "std": _STD},
                "augment": {"crop_area": None, "pad": 4, "flip": 0.5},
                "eval_split": "validation",
            },
            "backbone": {"config": dict(self.network)},
            "head": dict(self.heads[arm]),
            "optimizer": {
                "kind": "sgd",
                "lr": rate,
                "weight_decay": self.weight_decay,
                "nesterov": self.nesterov,
            },
            "schedule": schedule,
            "train": {"duration": {"steps": steps}, "global_batch": self.batch},
            "evaluation": {"batch": 1000, "topk": [1, 5]},
            "checkpoint": {"every": {"steps": 1000}, "keep_last": 1},
        }
        if final and arm in self.keep_best:
            recipe["evaluation"]["every"] = {"epochs": 1}
            recipe["checkpoint"]["keep_best"] = {"measure": "top5"}
        return recipe

    def procedure(self, budget: Budget, _plots: PlotFolder) -> Procedure:
        toy = budget.is_toy
        steps, first = 3 if toy else self.steps, budget.first_seed + 1
        yield list({self.dataset(arm, toy=toy).job for arm in self.heads})

        def jobs(arm: str, rates: Sequence[float]) -> list[Job]:
            length = 2 if toy else max(1, steps // 20)
            return [
                training(self.dataset(arm, toy=toy), self.recipe(arm, rate, length, 0, final=False))
                for rate in rates
            ]

        def read(found: Sequence[Result]) -> list[float]:
            return [result.measures.get(self.search_by, DIVERGED) for result in found]

        searched = yield from search(
            list(self.heads),
            jobs,
            read,
            rates=self.rates[:1] if toy else self.rates,
            limits=_NO_SEARCH if toy or len(self.rates) == 1 else _LIMITS,
        )
        also = ["test", "train"] if any("train" in name for name in self.measures) else ["test"]
        runs = {
            arm: [
                training(
                    self.dataset(arm, toy=toy),
                    self.recipe(arm, best_rate(searched[arm]), steps, seed, final=True),
                    also=also,
                )
                for seed in range(first, first + (1 if toy else _SEEDS))
            ]
            for arm in self.heads
        }
        results = yield [job for of_arm in runs.values() for job in of_arm]
        measured = {arm: [results[job].measures for job in of] for arm, of in runs.items()}
        return self.section(Compared(searched, measured), steps)

    def section(self, compared: Compared[str], steps: int) -> Section:
        rows = []
        for arm in self.heads:
            kept = {
                name: f"best/{name}" if arm in self.keep_best else name for name in self.measures
            }
            cells = (compared.mean(arm, name).percent(2) for name in kept.values())
            rows.append([arm, *cells, f"{compared.rate(arm):g}"])
        return Section(
            setup=f"The published network ({self.network}) is trained on {_IMAGES:,} images of "
            f"CIFAR-100 with random shifts and flips, for {steps:,} steps of {self.batch} images, "
            f"with {_SEEDS} seeds. {self._rates(steps)}",
            claims=[
                *(
                    compared.claim(
                        one.statement,
                        compared.gain(one.better, one.worse, one.measure, of_theirs=one.of_worse),
                        *(one.better, one.worse),
                        points=True,
                    )
                    for one in self.contrasts
                ),
                *self.more_claims(compared),
            ],
            tables=[
                Table("Measures in %, best rate of each arm", ["arm", *self.measures, "rate"], rows)
            ],
        )

    def _rates(self, steps: int) -> str:
        if len(self.rates) == 1:
            return f"All arms have the rate {self.rates[0]:g}."
        return (
            f"The rate of each arm is the one with the highest {self.search_by} on "
            f"{_VALIDATION:,} other images after {max(1, steps // 20):,} steps; rates are tried "
            "with factors of 3.2 until a lower and a higher one are worse."
        )

    def experiment(self) -> Experiment:
        return Experiment(
            name=self.name,
            paper=self.name.partition("-")[0],
            title=self.title,
            minutes=60,
            procedure=self.procedure,
            gpu=True,
            needs=(CIFAR_100,),
        )


def ccql_is_closer_to_ce(compared: Compared[str]) -> list[Claim]:
    """Claim that the test accuracy of ccql is closer to that of ce than to that of quadratic."""
    ce, quadratic, ccql = (
        compared.values(loss, "test/top1") for loss in ("ce", "quadratic", "ccql")
    )
    nearer = difference(
        [abs(a - b) for a, b in zip(ccql, quadratic, strict=True)],
        [abs(a - b) for a, b in zip(ccql, ce, strict=True)],
    )
    statement = "ccql is closer to ce than to quadratic (test accuracy, all 100 classes)"
    return [compared.claim(statement, nearer, "ce", "quadratic", "ccql", points=True)]


def _losses(*kinds: str) -> dict[str, dict[str, Any]]:
    return {kind: {"loss": {"kind": kind}} for kind in kinds}


def _temperature(tau: str) -> dict[str, Any]:
    """Return the head section; at temperature 0, the loss is its limit (Eq. 8)."""
    if float(tau) == 0:
        return {"loss": {"kind": "topk_hinge", "k": 5}}
    return {"loss": {"kind": "smooth_topk", "k": 5, "tau": float(tau)}}


_SLC_CNN = {"model_type": "slc_cnn"}
_DENSENET: dict[str, Any] = {"model_type": "cifar_densenet", "depth": 40}
# Huang et al. (2017), which paper 003 adopts: 300 epochs with batches of 64.
_OF_DENSENET: dict[str, Any] = {
    "steps": 300 * _IMAGES // 64,
    "batch": 64,
    "weight_decay": 1e-4,
    "drops": (0.5, 0.75),
    "nesterov": True,
    "search_by": "top5",
}
_TREE = CifarTable(
    name="000-cifar100",
    title="Tree loss on CIFAR-100 (Table 1)",
    network={"model_type": "cifar_resnet", "depth": 20},
    heads={"vtree": {"weights": {"kind": "vtree"}, "loss": {"kind": "ce"}},
           **_losses("ce", "simloss")},
    contrasts=[
        Contrast("the tree loss beats ce (cifar100, top-1)", "vtree", "ce", "test/top1"),
        Contrast("the tree loss beats simloss (cifar100, top-1)", "vtree", "simloss", "test/top1"),
    ],
    measures=("test/top1", "test/sa"),
    search_by="top1",
    steps=64_000,
    weight_decay=1e-4,
    vectors=COARSE,
)  # fmt: skip
_QUADRATIC = CifarTable(
    name="001-cifar100",
    title="Quadratic losses on CIFAR-100 (Figures 1 to 3)",
    network={"model_type": "wide_resnet", "depth": 28, "width": 10},
    heads=_losses("ce", "quadratic", "ccql"),
    contrasts=[
        Contrast(
            "ccql beats quadratic on training images (all 100 classes)",
            *("ccql", "quadratic", "train/top1"),
        )
    ],
    measures=("test/top1", "train/top1"),
    search_by="top1",
    steps=200 * _IMAGES // 128,
    drops=tuple(epoch / 200 for epoch in (50, 80, 110, 150, 170)),
    factor=1 / 4,
    more_claims=ccql_is_closer_to_ce,
)
_SINGLE_LOGITS = CifarTable(
    name="002-cifar100",
    title="Single-logit classification on CIFAR-100 (Table 1)",
    network=_SLC_CNN,
    heads=_losses(*OBJECTIVES),
    contrasts=[
        Contrast(f"{loss} beats ce on single logits (CIFAR-100, AUPRC)", loss, "ce", "test/auprc")
        for loss in ("batch_ce", "batch_max_margin", "self_norm", "nce", "bce")
    ],
    measures=("test/auprc", "test/top1"),
    search_by="auprc",
    steps=100_000,
    weight_decay=0.0,
)
_NOISE = CifarTable(
    name="003-label-noise",
    title="Label noise on CIFAR-100 (Table 1)",
    network={**_DENSENET, "growth_rate": 40},
    heads={
        f"{loss} {noise:g}": {"loss": {"kind": loss}}
        for noise in _NOISES
        for loss in ("ce", "smooth_topk")
    },
    noises={f"{loss} {noise:g}": noise for noise in _NOISES for loss in ("ce", "smooth_topk")},
    keep_best=[f"ce {noise:g}" for noise in _NOISES],  # the paper gives ce this advantage
    contrasts=[
        Contrast(
            f"at label noise {noise:g}, smooth_topk beats ce (top-5)",
            *(f"smooth_topk {noise:g}", f"ce {noise:g}", "test/top5"),
            of_worse="best/test/top5",
        )
        for noise in _NOISES
    ],
    measures=("test/top5", "test/top1"),
    **_OF_DENSENET,
)
_TEMPERATURE = CifarTable(
    name="003-temperature",
    title="The temperature of the smooth top-5 loss (Figure 2b, Table 6)",
    network={**_DENSENET, "growth_rate": 12},
    heads={tau: _temperature(tau) for tau in _TAUS},
    contrasts=[
        Contrast(
            f"temperature {tau} beats temperature 1e-3 (training top-5)",
            *(tau, "1e-3", "train/top5"),
        )
        for tau in ("1e-2", "1e-1", "1")
    ],
    measures=("train/top5", "test/top5"),
    rates=(0.1,),  # the paper uses one rate for all temperatures
    **_OF_DENSENET,
)
_SPHERICAL = CifarTable(
    name="004-cifar100",
    title="Spherical losses on CIFAR-100",
    network=_SLC_CNN,  # the available text of paper 004 does not specify its network
    heads=_losses("ce", "taylor_softmax", "spherical_softmax"),
    contrasts=[
        Contrast(f"ce has a lower error rate than {loss} (CIFAR-100)", "ce", loss, "test/top1")
        for loss in ("taylor_softmax", "spherical_softmax")
    ],
    measures=("test/top1",),
    search_by="top1",
    steps=100_000,
    weight_decay=0.0,
)
TABLES = (_TREE, _QUADRATIC, _SINGLE_LOGITS, _NOISE, _TEMPERATURE, _SPHERICAL)
EXPERIMENTS = tuple(table.experiment() for table in TABLES)
