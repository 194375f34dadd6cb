"""The base class of published sets of small images, whose pixels are in arrays."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.classes.class_list import ClassInfo
from data.sources.packing import lossless
from data.sources.source import Sample, Source


class _Task(NamedTuple):
    key: str
    label: int
    pixels: np.ndarray


class PixelSource(Source):
    """A source of images that are stored losslessly, as PNG."""

    modality = "image"

    @property
    @abstractmethod
    def class_names(self) -> list[str]:
        """The names of the classes, in order."""

    @property
    @abstractmethod
    def arrays(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Map each split to images, uint8 [N, H, W] or RGB [N, H, W, 3], and labels, uint8 [N]."""

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=name) for name in self.class_names)

    def splits(self) -> dict[str, Sequence[_Task]]:
        return {
            split: [
                _Task(f"{split}-{i:05d}", int(label), image)
                for i, (image, label) in enumerate(zip(images, labels, strict=True))
            ]
            for split, (images, labels) in self.arrays.items()
        }

    def render(self, task: _Task) -> Sample:
        return Sample(task.key, lossless(task.pixels), "png", task.label)
