"""Sampled negatives: the sampled loss compared with the exact one, and the accuracy after training
with it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn

from docs.figures.look import AMBER, GRAY, INK, TEAL, new_figure
from heads import ClassHead, CrossEntropy

_CLASSES, _DIM, _WIDTH, _NOISE = 1000, 16, 64, 0.5
_BATCH, _STEPS, _HALFWAY, _SEEDS = 64, 300, 60, 2
_TRAINED_AT = (1.0, 0.3, 0.1, 0.03)  # rates
_ESTIMATED_AT, _DRAWS = (0.5, 0.2, 0.1, 0.05, 0.02), 200  # rates, draws per rate


@dataclass(frozen=True)
class _Moment:
    """A network and its head after some steps of training."""

    steps: int
    network: nn.Module
    head: ClassHead


def draw() -> Figure:
    figure = new_figure(4.1)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    features, labels = _samples(_BATCH, seed=3)
    for offset, color, moment in zip((-0.14, 0.14), (AMBER, TEAL), _train(1.0, 0), strict=True):
        with torch.no_grad():
            _draw_estimates(left, moment, moment.network(features), labels, offset, color)
    _finish_estimates(left)
    _draw_training(right)
    return figure


def _samples(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points [num, d] around the centers of their classes, and the classes [num]."""
    centers = torch.randn(_CLASSES, _DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(_CLASSES, (num,), generator=generator)
    return centers[labels] + _NOISE * torch.randn(num, _DIM, generator=generator), labels


def _train(rate: float, seed: int) -> Iterator[_Moment]:
    """Train with a sample rate; yield the state after `_HALFWAY` steps and at the end."""
    points, labels = _samples(20_000, seed=1)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(_DIM, _WIDTH), nn.ReLU())
    head = ClassHead(_WIDTH, _CLASSES, CrossEntropy(sample_rate=rate), seed=seed)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=5e-3)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, _STEPS + 1):
        batch = torch.randint(len(points), (_BATCH,), generator=generator)
        optimizer.zero_grad()
        head(network(points[batch]), labels[batch]).backward()
        optimizer.step()
        if step in (_HALFWAY, _STEPS):
            yield _Moment(step, network, head)


def _logits(head: ClassHead, features: Tensor) -> Tensor:
    logits = torch.empty(len(features), _CLASSES)
    for block in head.score_blocks(features):
        logits[:, block.class_ids] = block.scores
    return logits


def _draw_estimates(
    ax: Axes, moment: _Moment, features: Tensor, labels: Tensor, offset: float, color: str
) -> None:
    """Draw the distribution of the sampled loss of a batch around the exact loss, its mean and the
    predicted mean."""
    exact = float(moment.head(features, labels))
    probabilities = _logits(moment.head, features).softmax(1)
    probabilities[:, labels.unique()] = 0
    squares = float(probabilities.square().sum(1).mean())
    for column, rate in enumerate(_ESTIMATED_AT):
        x = column + offset
        errors = _sampled_losses(moment.head, rate, features, labels) - exact
        low, high = errors.quantile(torch.tensor([0.05, 0.95])).tolist()
        ax.vlines(x, low, high, color=color, lw=5, alpha=0.45)
        ax.plot(x, float(errors.mean()), "o", color=color, mec=INK, ms=7, zorder=3)
        ax.plot(x, -(1 / rate - 1) / 2 * squares, "x", color=INK, ms=7, mew=1.8, zorder=4)
    name = f"after {moment.steps} steps, loss {exact:.2f}"
    ax.plot([], [], "o-", color=color, mec=INK, ms=7, lw=5, label=name)


def _sampled_losses(head: ClassHead, rate: float, features: Tensor, labels: Tensor) -> Tensor:
    """The losses [draws] of one batch with the weights of `head`, each with a new draw."""
    sampled = ClassHead(_WIDTH, _CLASSES, CrossEntropy(sample_rate=rate))
    sampled.weight = head.weight
    with torch.enable_grad():
        return torch.stack([sampled(features, labels).detach() for _ in range(_DRAWS)])


def _finish_estimates(ax: Axes) -> None:
    ax.axhline(0, color=GRAY, lw=1, zorder=0)
    ax.plot([], [], "x", color=INK, ms=7, mew=1.8, label="predicted mean")
    ax.set_xticks(range(len(_ESTIMATED_AT)), [f"{rate:g}" for rate in _ESTIMATED_AT])
    ax.set(xlabel="sample_rate", ylabel="sampled loss \N{MINUS SIGN} exact loss")
    ax.set_title("Loss of one batch: mean and 90% of draws")
    ax.legend(loc="lower left")


def _draw_training(ax: Axes) -> None:
    """Draw the accuracy on held-out samples against the share of classes computed per step."""
    points, labels = _samples(4000, seed=2)
    means = []
    for rate in _TRAINED_AT:
        accuracies, share = [], _share(rate)
        for seed in range(_SEEDS):
            *_, end = _train(rate, seed)
            with torch.no_grad():
                found = _logits(end.head, end.network(points)).argmax(1)
            accuracies.append(float((found == labels).float().mean()))
        ax.plot([share] * _SEEDS, accuracies, "o", color=TEAL, mec=INK, ms=7, zorder=3)
        means.append((share, sum(accuracies) / _SEEDS))
        name = "exact" if rate == 1 else f"rate {rate:g}"
        ax.annotate(name, means[-1], (7, -16), textcoords="offset points")
    ax.plot(*zip(*means, strict=True), color=TEAL, zorder=1)
    ax.set(xscale="log", xlim=(0.06, 2.0), ylim=(0, 1))
    ax.set_xticks([0.1, 0.2, 0.5, 1.0], minor=False)
    ax.set_xticks([], minor=True)
    ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.set(xlabel="share of classes computed per step", ylabel="top-1 on held-out samples")
    ax.set_title(f"Training, {_STEPS} steps with batch size {_BATCH}")


def _share(rate: float) -> float:
    """The mean share of classes computed per step: those of the batch, and sampled others."""
    own = 1 - (1 - 1 / _CLASSES) ** _BATCH
    return own + rate * (1 - own)
