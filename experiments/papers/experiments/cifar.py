"""CIFAR-100 training setups: the published sizes, and a small stand-in for CPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.papers.budget import Budget
from experiments.papers.comparison import Run
from experiments.papers.section import Kind
from experiments.papers.shards import Dataset

_MEAN, _STD = [0.507, 0.487, 0.441], [0.267, 0.256, 0.276]
_PUBLISHED_SIDE, _SIDE = 32, 8
_STAND_IN = {"model_type": "mlp", "image_size": _SIDE, "num_channels": 3}
# Settings of Huang et al. (2017), which paper 003 adopts: 45,000 images, batch size 64.
DENSENET_EPOCHS = 300
DENSENET_STEPS = DENSENET_EPOCHS * 45_000 // 64
DENSENET_DROPS = (0.5, 0.75)


@dataclass(frozen=True)
class Cifar:
    """A network, and CIFAR-100 at a given resolution.

    `network` is a backbone config, and images have `side` x `side` pixels. `of` returns the
    dataset. At the published sizes, its training split contains all training images except 5,000
    for validation. Otherwise, `limits` reduces the number of images in each split.
    """

    network: Mapping[str, Any]
    network_name: str
    side: int
    batch: int
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_published(self) -> bool:
        """Whether this is the paper's network at full resolution."""
        return self.side == _PUBLISHED_SIDE

    @property
    def kind(self) -> Kind:
        """The kind of the paper's claims when tested with this setup."""
        return Kind.PAPER if self.is_published else Kind.STAND_IN

    def of(self, **changes: Any) -> Dataset:
        """Return the dataset; `changes` override fields of `Dataset`."""
        dataset = Dataset(
            "cifar100",
            side=None if self.is_published else self.side,
            validation=5_000,
            limits=self.limits,
        )
        return replace(dataset, **changes)

    def recipe(self, run: Run, *, loss: Mapping[str, Any], **optimizer: Any) -> dict[str, Any]:
        """Return a recipe as a dictionary, with `loss` in its head and a cosine schedule.

        `optimizer`: settings other than the rates. The stand-in's images are too small for the
        random shifts that the papers use.
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

    def description(self) -> str:
        """Return a description of the network, the images and the batch size for the page."""
        images = f"CIFAR-100 at {self.side} x {self.side} pixels"
        augmentations = "random flips and shifts" if self.is_published else "random flips"
        return (
            f"{self.network_name} is trained on {images} with {augmentations} and a batch size "
            f"of {self.batch}"
        )


def cifar(
    budget: Budget,
    published: Mapping[str, Any],
    name: str,
    *,
    train: int = 20_000,
    test: int = 5_000,
    batch: int = 128,
) -> Cifar:
    """Return the setup with the published network `name` for `--budget full`, or the stand-in.

    The stand-in is what learns the most in a few seconds on a CPU core: two fully connected layers
    of 500 units on images of 8 x 8 pixels. It uses `train` training, 2,000 validation and `test`
    test images (fewer with smaller budgets).
    """
    if budget.is_full:
        return Cifar(published, name, _PUBLISHED_SIDE, batch)
    limits = {
        "train": budget.size(train, full=train, least=256),
        "validation": budget.size(2_000, full=2_000, least=128),
        "test": budget.size(test, full=test, least=256),
    }
    return Cifar(
        _STAND_IN, f"An MLP with 2 x 500 units (a stand-in for {name})", _SIDE, 128, limits
    )


def densenet(budget: Budget, growth_rate: int, *, train: int, test: int = 5_000) -> Cifar:
    """Return the setup with paper 003's DenseNet-40-`growth_rate`, or the stand-in."""
    network = {"model_type": "cifar_densenet", "depth": 40, "growth_rate": growth_rate}
    name = f"DenseNet-40-{growth_rate}"
    return cifar(budget, network, name, train=train, test=test, batch=64)


def drops(steps: int, shares: Sequence[float], factor: float) -> dict[str, Any]:
    """Return a schedule that multiplies the learning rate by `factor` at fractions of the steps."""
    milestones = [{"steps": round(share * steps)} for share in shares]
    return {"kind": "step", "milestones": milestones, "factor": factor}
