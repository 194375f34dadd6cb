"""A small network on 8 x 8 images of handwritten digits, trained with a given loss."""

from dataclasses import dataclass
from functools import cached_property

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from heads import LOSSES, ClassHead

NUM_CLASSES = 10
_TRAINED_ON = 900  # images; the other 897 are held out
_STEPS, _BATCH, _WIDTH = 600, 128, 64


@dataclass(frozen=True)
class Predictions:
    """Logits [N, 10] of the held-out images and their labels [N]."""

    logits: Tensor
    labels: Tensor

    @cached_property
    def is_true(self) -> Tensor:
        """The mask of the true logits, bool [N, 10]."""
        return self.labels[:, None] == torch.arange(NUM_CLASSES)

    @cached_property
    def accuracy(self) -> float:
        return float((self.logits.argmax(1) == self.labels).float().mean())


def predictions(loss: str) -> Predictions:
    """Train with `loss` and predict the held-out images. The seed and the settings are the same for
    every loss."""
    images, labels = _images()
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(images.shape[1], _WIDTH), nn.ReLU())
    head = ClassHead(_WIDTH, NUM_CLASSES, LOSSES[loss](), init_std=0.05)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(_STEPS):
        batch = torch.randint(_TRAINED_ON, (_BATCH,))
        optimizer.zero_grad()
        head(network(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        features = network(images[_TRAINED_ON:])
        logits = torch.empty(len(features), NUM_CLASSES)
        for block in head.score_blocks(features):
            logits[:, block.class_ids] = block.scores
    return Predictions(logits, labels[_TRAINED_ON:])


def _images() -> tuple[Tensor, Tensor]:
    """All images [1797, 64] with values from 0 to 1 and their labels, in a fixed random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.data).to(torch.float32) / 16
    return images[order], torch.from_numpy(digits.target).long()[order]
