"""CIFAR-100 as the experiments train on it: the published sizes, and a stand-in for a CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.papers.budget import Budget
from benchmarks.papers.comparison import Run
from benchmarks.papers.section import Kind
from benchmarks.papers.shards import Dataset

_MEAN, _STD = [0.507, 0.487, 0.441], [0.267, 0.256, 0.276]
_PUBLISHED_SIDE, _SIDE = 32, 8
_STAND_IN = {"model_type": "mlp", "image_size": _SIDE, "num_channels": 3}
# Huang et al. (2017), whose settings paper 003 takes; 45,000 pictures in batches of 64.
DENSENET_EPOCHS = 300
DENSENET_STEPS = DENSENET_EPOCHS * 45_000 // 64
DENSENET_DROPS = (0.5, 0.75)


@dataclass(frozen=True)
class Cifar:
    """How a budget has it: `network` (a backbone's config) at pictures of `side` pixels.

    `of` gives the dataset: all of the training pictures but 5,000 for validation at the published
    sizes, fewer (`limits`) otherwise.
    """

    network: Mapping[str, Any]
    network_name: str
    side: int
    batch: int
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_published(self) -> bool:
        """Whether it is the paper's network at the pictures' own size."""
        return self.side == _PUBLISHED_SIDE

    @property
    def kind(self) -> Kind:
        """Of the paper's claims, tested on it."""
        return Kind.PAPER if self.is_published else Kind.STAND_IN

    def of(self, **changes: Any) -> Dataset:
        """A dataset; `changes` are fields of `Dataset`."""
        dataset = Dataset(
            "cifar100",
            side=None if self.is_published else self.side,
            validation=5_000,
            limits=self.limits,
        )
        return replace(dataset, **changes)

    def recipe(self, run: Run, *, loss: Mapping[str, Any], **optimizer: Any) -> dict[str, Any]:
        """A recipe's tree with `loss` in its head; a cosine schedule. `optimizer` beside the rates.

        The stand-in's few pixels leave no room for the papers' shifts.
        """
        shifts = {"pad": 4} if self.is_published else {}
        return {
            "seed": run.seed,
            "data": {
                "image": {"size": self.side, "mean": _MEAN, "std": _STD},
                "augment": {"crop_area": None, **shifts, "flip": 0.5},
                "eval_split": run.split,
            },
            "backbone": {"config": dict(self.network)},
            "head": {"loss": loss},
            "optimizer": run.rates.optimizer(**optimizer),
            "train": {"duration": {"steps": run.steps}, "global_batch": self.batch},
            "evaluation": {"batch": 1000, "topk": [1, 5]},
            "checkpoint": {"every": {"steps": 1000}, "keep_last": 1},
        }

    def words(self) -> str:
        """The network, the pictures and their batches, for the page."""
        pictures = f"CIFAR-100 at {self.side} x {self.side} pixels"
        changed = "mirrored and shifted" if self.is_published else "mirrored"
        return f"{self.network_name} on {pictures}, {changed} at random, in batches of {self.batch}"


def cifar(
    budget: Budget,
    published: Mapping[str, Any],
    name: str,
    *,
    train: int = 20_000,
    test: int = 5_000,
    batch: int = 128,
) -> Cifar:
    """The published network, called `name`, in batches of `batch` under `--budget full`.

    Else the stand-in, which learns most in the seconds that a core has for it: two fully connected
    layers of 500 units on 8 x 8 pixels, with `train` training pictures, 2,000 for validation and
    `test` to test (less for less).
    """
    if budget.is_full:
        return Cifar(published, name, _PUBLISHED_SIDE, batch)
    limits = {
        "train": budget.size(train, full=train, least=256),
        "validation": budget.size(2_000, full=2_000, least=128),
        "test": budget.size(test, full=test, least=256),
    }
    return Cifar(_STAND_IN, f"An MLP of 2 x 500 units (a stand-in for {name})", _SIDE, 128, limits)


def densenet(budget: Budget, growth_rate: int, *, train: int, test: int = 5_000) -> Cifar:
    """Paper 003's DenseNet-40-`growth_rate`, or the stand-in."""
    network = {"model_type": "cifar_densenet", "depth": 40, "growth_rate": growth_rate}
    name = f"DenseNet-40-{growth_rate}"
    return cifar(budget, network, name, train=train, test=test, batch=64)


def drops(steps: int, shares: Sequence[float], factor: float) -> dict[str, Any]:
    """A schedule that multiplies the rate by `factor` after these shares of the steps."""
    milestones = [{"steps": round(share * steps)} for share in shares]
    return {"kind": "step", "milestones": milestones, "factor": factor}
