"""The MNIST network of paper 002 (section 6.1), with many seeds and learning rates at a time.

A stack of S networks is trained as one batch of matrix products, with one loss and without the
trainer, whose overhead per step is larger than the step of a network this small. Forward and
backward passes of the network are written out; the gradient of the logits comes from kway's loss.

Shape legend: S networks, b rows of a batch, m inputs and n outputs of a layer, K classes.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from data.files import temporary_path
from data.sources import Mnist
from experiments.papers.job import Folders, Job, Measures
from heads.losses import LOSSES, ClassFacts, Loss
from heads.losses.base import Block, Rows
from heads.slc import block_measures

SIDE, CLASSES, UNITS = 28, 10, 500
BATCH, MOMENTUM = 64, 0.9
_NORM_EPS, _NORM_MOMENTUM = 1e-5, 0.1
_VALIDATION = 10_000
_MEAN, _STD = 0.1307, 0.3081
_SECONDS_BETWEEN_CHECKPOINTS = 60.0


def training(
    loss: str,
    rates: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    *,
    start: str = "he",
    split: str = "test",
    limit: int | None = None,
) -> Job:
    """Return a job that trains a network for each pair of a rate and a seed.

    `split`: "test" trains on all 60,000 training images, and "validation" holds out 10,000 of them.
    `start`: the initial weights of the hidden layers, as in `initial_weight`. `limit`: maximum
    number of samples per split.

    The measures are lists by rate, then by seed: top-1 accuracy and the measures of single logits.
    For `ce`, they also include those of all logits, `all_logits/...`. A network that diverged has
    None.
    """
    settings = {
        "loss": loss,
        "rates": list(rates),
        "seeds": list(seeds),
        "steps": steps,
        "start": start,
        "split": split,
        "limit": limit,
    }
    return Job("stacked_mlp:train", settings)


@dataclass
class Layer:
    """S fully connected layers: weight [S, n, m], its momentum, and a bias [S, n]."""

    weight: Tensor
    bias: Tensor
    velocity: Tensor = field(init=False)
    bias_velocity: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.velocity = torch.zeros_like(self.weight)
        self.bias_velocity = torch.zeros_like(self.bias)

    def step(self, by_output: Tensor, inputs: Tensor, rates: Tensor) -> None:
        """Update by SGD with momentum, from the gradient by the products of `inputs` [S, b, m]
        with the weight [S, b, n]. The gradient is added directly to the momentum."""
        self.velocity.baddbmm_(by_output.mT, inputs, beta=MOMENTUM)
        self.weight.addcmul_(self.velocity, rates[:, None, None], value=-1)

    def step_bias(self, gradient: Tensor, rates: Tensor) -> None:
        self.bias_velocity.mul_(MOMENTUM).add_(gradient)
        self.bias.addcmul_(self.bias_velocity, rates[:, None], value=-1)


@dataclass
class Normalized(Layer):
    """A layer without a bias, batch norm, which has a gain and the bias, and ReLU."""

    gain: Tensor = field(init=False)
    gain_velocity: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    variance: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gain, self.variance = torch.ones_like(self.bias), torch.ones_like(self.bias)
        self.gain_velocity, self.mean = torch.zeros_like(self.bias), torch.zeros_like(self.bias)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, the normalized products, and the inverse standard deviations."""
        products = inputs @ self.weight.mT
        variance, mean = torch.var_mean(products, 1, correction=0)
        rows = products.shape[1]
        self.mean.lerp_(mean, _NORM_MOMENTUM)
        self.variance.lerp_(variance * (rows / (rows - 1)), _NORM_MOMENTUM)
        inverse = (variance + _NORM_EPS).rsqrt()[:, None]
        normalized = products.sub_(mean[:, None]).mul_(inverse)
        outputs = torch.addcmul(self.bias[:, None], normalized, self.gain[:, None]).relu_()
        return outputs, normalized, inverse

    def backward(
        self, by_output: Tensor, saved: tuple[Tensor, Tensor, Tensor], rates: Tensor
    ) -> Tensor:
        """Update gain and bias, and return the gradient by the products. Overwrites `by_output`."""
        outputs, normalized, inverse = saved
        gradient = by_output.mul_(outputs > 0)
        by_bias, by_gain = gradient.sum(1), (gradient * normalized).sum(1)
        rows = gradient.shape[1]
        gradient -= by_bias[:, None] / rows
        gradient.addcmul_(normalized, by_gain[:, None], value=-1 / rows)
        gradient *= self.gain[:, None] * inverse
        self.gain_velocity.mul_(MOMENTUM).add_(by_gain)
        self.gain.addcmul_(self.gain_velocity, rates[:, None], value=-1)
        self.step_bias(by_bias, rates)
        return gradient

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Return the outputs with the running statistics."""
        scale = self.gain * (self.variance + _NORM_EPS).rsqrt()
        shift = self.bias - self.mean * scale
        return torch.addcmul(shift[:, None], inputs @ self.weight.mT, scale[:, None]).relu_()


class StackedMlp:
    """S networks with two hidden layers, and the class rows on top of them."""

    def __init__(self, hidden: Sequence[Normalized], head: Layer, loss: Loss) -> None:
        self.hidden, self.head, self.loss = hidden, head, loss

    @staticmethod
    def drawn(seeds: Sequence[int], loss: Loss, *, start: str, inputs: int) -> "StackedMlp":
        """Draw initial weights; networks with the same seed start from the same weights."""
        sizes = [inputs, UNITS, UNITS]
        drawn: list[list[Tensor]] = [[], [], []]
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for of_layer, n, m in zip(drawn, (UNITS, UNITS, CLASSES), sizes, strict=True):
                kind = start if n == UNITS else "head"
                of_layer.append(initial_weight(kind, n, m, generator))
        first, second, top = (torch.stack(of_layer) for of_layer in drawn)
        zeros = torch.zeros(len(seeds), UNITS)
        bias = torch.full((len(seeds), CLASSES), loss.initial_bias(CLASSES))
        hidden = [Normalized(weight, zeros.clone()) for weight in (first, second)]
        return StackedMlp(hidden, Layer(top, bias), loss)

    def step(self, inputs: Tensor, labels: Tensor, rates: Tensor) -> None:
        """Train on inputs [S, b, m] and labels [S, b] with the learning rates [S]."""
        first, second = self.hidden
        saved_1 = first.forward(inputs)
        saved_2 = second.forward(saved_1[0])
        logits = saved_2[0] @ self.head.weight.mT + self.head.bias[:, None]
        gradient = gradient_of_logits(self.loss, logits, labels)
        by_features = gradient @ self.head.weight
        self.head.step(gradient, saved_2[0], rates)
        self.head.step_bias(gradient.sum(1), rates)
        by_second = second.backward(by_features, saved_2, rates)
        by_first = by_second @ second.weight
        second.step(by_second, saved_1[0], rates)
        first.step(first.backward(by_first, saved_1, rates), inputs, rates)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits [S, N, K] of inputs [N, m] for evaluation."""
        found = inputs.expand(len(self.head.weight), -1, -1)
        for layer in self.hidden:
            found = layer.evaluate(found)
        return found @ self.head.weight.mT + self.head.bias[:, None]

    def state(self) -> dict[str, Tensor]:
        """Return all tensors, by the number of the layer and the name."""
        layers = enumerate((*self.hidden, self.head))
        return {
            f"{at}.{name}": tensor for at, layer in layers for name, tensor in vars(layer).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def gradient_of_logits(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the sum of the S losses by the logits [S, b, K]."""
    logits = logits.detach().requires_grad_()
    ids = torch.arange(logits.shape[2])
    total = torch.zeros((), dtype=logits.dtype)
    blocks = []
    for of_network, of_rows in zip(logits, labels, strict=True):
        block = Block.of(ids, of_rows, of_rows, of_network)
        total = total + loss.value(loss.statistics(of_network, block), Rows(len(ids), of_rows))
        blocks.append(block)
    gradient, *by_true = torch.autograd.grad(total, [logits, *(one.true for one in blocks)])
    # The true logits are separate leaves; see `Block`.
    for of_network, block, by in zip(gradient, blocks, by_true, strict=True):
        block.positions.add(of_network, by)
    return gradient


def initial_weight(start: str, n: int, m: int, generator: torch.Generator) -> Tensor:
    """Return a weight [n, m]: "he" with variance 2 / m (He et al. 2015), "linear" uniform with
    variance 1 / (3 m), as in torch's nn.Linear, and "head" with variance 1e-4, as in kway's heads.
    """
    match start:
        case "he":
            return torch.randn(n, m, generator=generator) * math.sqrt(2 / m)
        case "linear":
            return (2 * torch.rand(n, m, generator=generator) - 1) / math.sqrt(m)
        case "head":
            return torch.randn(n, m, generator=generator) * 0.01
    raise ValueError(f"unknown start {start!r}: use he, linear or head")


def train(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Train and evaluate (the job that `training` returns).

    Continues from the last checkpoint of the same training, or from the end of a shorter one.
    """
    splits = mnist_splits(str(folders.data / "mnist"), settings["limit"])
    images, labels = splits["train"]
    if settings["split"] == "test":
        held_images, held_labels = splits["validation"]
        images, labels = torch.cat([images, held_images]), torch.cat([labels, held_labels])
    counts = torch.bincount(labels, minlength=CLASSES).double()
    loss = LOSSES[settings["loss"]]().prepare(ClassFacts(CLASSES, counts))
    rates, seeds = settings["rates"], settings["seeds"]
    networks = StackedMlp.drawn(
        seeds * len(rates), loss, start=settings["start"], inputs=images.shape[1]
    )
    rate_of = torch.tensor(rates).repeat_interleave(len(seeds))
    # A run with more steps continues this one, so `steps` is not part of the name.
    identity = Job("stacked_mlp:train", {**settings, "steps": 0}).key
    checkpoint, first = folders.shards.parent / "networks" / f"{identity}.safetensors", 0
    is_longest = True  # a shorter run does not replace the checkpoint of a longer one
    if checkpoint.is_file():
        stored = load_file(checkpoint)
        is_longest = int(stored["step"]) <= settings["steps"]
        if is_longest:
            networks.load(stored)
            first = int(stored["step"])
    written = time.monotonic()
    batches = _batches(len(labels), seeds, first)
    for step in range(first + 1, settings["steps"] + 1):
        rows = next(batches).repeat(len(rates), 1)
        networks.step(images[rows], labels[rows], rate_of)
        is_last = step == settings["steps"]
        is_due = is_last or time.monotonic() - written > _SECONDS_BETWEEN_CHECKPOINTS
        if is_longest and is_due:
            written = time.monotonic()
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            with temporary_path(checkpoint) as path:
                save_file({"step": torch.tensor(step), **networks.state()}, path)
                path.rename(checkpoint)
    found = _evaluated(networks, *splits[settings["split"]])
    num = len(seeds)
    return {
        measure: [of_networks[i * num : (i + 1) * num] for i in range(len(rates))]
        for measure, of_networks in found.items()
    }


def _batches(samples: int, seeds: Sequence[int], step: int) -> Iterator[Tensor]:
    """Yield the rows [seeds, BATCH] of each step, from `step` on. An epoch is a permutation."""
    per_epoch = samples // BATCH
    while True:
        epoch = step // per_epoch
        orders = torch.from_numpy(
            np.stack([np.random.default_rng([s, epoch]).permutation(samples) for s in seeds])
        )
        for batch in range(step % per_epoch, per_epoch):
            yield orders[:, batch * BATCH : (batch + 1) * BATCH]
        step = (epoch + 1) * per_epoch


def _evaluated(networks: StackedMlp, images: Tensor, labels: Tensor) -> dict[str, list[Any]]:
    """Return each measure by network. A network whose logits are not finite has None."""
    found: dict[str, list[Any]] = {}
    logits = torch.cat([networks.logits(part) for part in images.split(2_000)], dim=1)
    ids = torch.arange(CLASSES)
    for of_network in logits:
        scores = networks.loss.score(of_network)
        measures: dict[str, float | None] = {}
        is_finite = bool(of_network.isfinite().all())
        ranked = scores if is_finite else torch.zeros_like(scores)
        measures["top1"] = float((ranked.argmax(1) == labels).double().mean())
        measures |= block_measures(ranked, labels, ids).summary()
        if networks.loss.kind == "ce":
            of_all = block_measures(F.log_softmax(ranked, 1), labels, ids).summary()
            measures |= {f"all_logits/{name}": value for name, value in of_all.items()}
        for name, value in measures.items():
            found.setdefault(name, []).append(value if is_finite else None)
    return found


@cache
def mnist_splits(folder: str, limit: int | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images [N, 784] and labels [N] of train, validation and test.

    Validation samples are chosen at random from the training images.
    """
    arrays = Mnist(Path(folder)).arrays
    splits: dict[str, tuple[Tensor, Tensor]] = {}
    for split, (pixels, classes) in arrays.items():
        order = np.random.default_rng(0).permutation(len(classes))[:limit]
        scaled = torch.from_numpy(pixels[order].reshape(len(order), -1)).float() / 255
        splits[split] = (scaled - _MEAN) / _STD, torch.from_numpy(classes[order]).long()
    images, labels = splits["train"]
    held = min(_VALIDATION, len(labels) // 4)
    splits["validation"] = images[:held], labels[:held]
    splits["train"] = images[held:], labels[held:]
    return splits
