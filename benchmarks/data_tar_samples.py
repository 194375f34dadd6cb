"""Random access to the samples of webdataset tars, as users without kway would write it.

This module does not import kway. It reads the same tars with `tarfile` and `pread`.
"""

import os
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from torch.utils.data import Dataset

Item = TypeVar("Item")


class TarSamples(Dataset[tuple[Item, int]], Generic[Item]):
    """Random access to the samples of `tars`, via a list of offsets and one `pread` per sample."""

    def __init__(
        self, tars: Sequence[str], sampled: Callable[[bytes], Item], suffix: str = "jpg"
    ) -> None:
        self._sampled = sampled
        self._samples: list[tuple[int, int, int, int]] = []  # descriptor, offset, size, label
        for path in tars:
            descriptor = os.open(path, os.O_RDONLY)
            with tarfile.open(path) as tar:
                members = {member.name: member for member in tar}
            for name, member in members.items():
                key, _, extension = name.partition(".")
                if extension == suffix:
                    label = members[f"{key}.cls"]
                    number = int(os.pread(descriptor, label.size, label.offset_data))
                    self._samples.append((descriptor, member.offset_data, member.size, number))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Item, int]:
        data, label = self.read(index)
        return self._sampled(data), label

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes and the label of a sample."""
        descriptor, offset, size, label = self._samples[index]
        return os.pread(descriptor, size, offset), label

    def batches(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield infinite batches of images and labels in random order."""
        for indices in self.random_indices(batch):
            images, labels = zip(*map(self.__getitem__, indices), strict=True)
            yield np.stack(images), np.array(labels)

    def random_indices(self, batch: int) -> Iterator[list[int]]:
        """Yield the indices of infinite batches, with a new permutation each epoch."""
        order: list[int] = []
        while True:
            while len(order) < batch:
                order += random.sample(range(len(self)), len(self))
            indices, order = order[:batch], order[batch:]
            yield indices
