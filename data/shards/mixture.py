"""Several splits of shard sets as one list of samples, for training on a mixture of sets.

The classes of a mixture are identified by their names: first the classes of `data.shards`, in its
order, and then the classes that only the sets of `data.mixture` contain, in the order of the sets
and of their class lists. Labels of `data.shards`, which provides the evaluation split, therefore do
not change. `data/loading/sampling.py` defines how often each set is sampled.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data.config import DataConfig
from data.shards.manifest import ClassInfo, Manifest, paused_gc
from data.shards.split import BadSampleError, Split, open_split


def load_manifest(data: DataConfig) -> Manifest:
    """Return the manifest of `data.shards`. Its class list includes the classes of the mixture.

    Raises the errors of `Manifest.load` and `united_manifest`.
    """
    manifests = read_manifests(data)
    for address, manifest in zip(data.addresses, manifests, strict=True):
        manifest.check_shards(address)
    return united_manifest(data, manifests[0], manifests[1:])


def read_manifests(data: DataConfig) -> list[Manifest]:
    """Return the manifests of `data.shards` and of the sets of `data.mixture`, without checking the
    shards.
    """
    return [Manifest.read(address, data.cache) for address in data.addresses]


@paused_gc()
def united_manifest(data: DataConfig, manifest: Manifest, others: Sequence[Manifest]) -> Manifest:
    """Return `manifest` with the classes of `others`, the manifests of the sets of `data.mixture`.

    If a set adds classes, the result has no label vectors, because the file of `data.shards` does
    not contain vectors for these classes. Raises ValueError if the modalities differ.
    """
    classes: dict[str, ClassInfo] = {info.name: info for info in manifest.classes}
    for one, other in zip(data.mixture, others, strict=True):
        if other.modality != manifest.modality:
            raise ValueError(
                f"data.mixture: {one.shards} contains {other.modality}s, but {data.shards} "
                f"contains {manifest.modality}s: mix sets of the same modality"
            )
        for info in other.classes:
            classes.setdefault(info.name, info)
    if len(classes) == len(manifest.classes):
        return manifest
    without_vectors = {"label_vectors": None, "label_vectors_sha256": None}
    return manifest.model_copy(update={"classes": tuple(classes.values()), **without_vectors})


def open_mixture(data: DataConfig, manifest: Manifest) -> "Mixture":
    """Open the splits of `data.mixture`. manifest: the result of `load_manifest`.

    Raises the errors of `open_split`.
    """
    splits = []
    for number, one in enumerate(data.mixture):
        own = Manifest.load(one.shards, data.cache)
        own.of_split(one.split, key=f"data.mixture[{number}].split")
        most = data.max_bad_samples
        splits.append(
            open_split(one.shards, one.split, max_bad_labels=most, cache=data.cache, manifest=own)
        )
    return Mixture(splits, [one.weight for one in data.mixture], manifest)


class Mixture:
    """The samples of `splits`, one split after another, with the labels of a merged class list.

    weights: the relative number of samples that training draws from each split. manifest: its
    class list contains the classes of all splits; see `united_manifest`. A mixture has the methods
    of `Split` that training uses, and is as cheap to pickle.
    """

    def __init__(
        self, splits: Sequence[Split], weights: Sequence[float], manifest: Manifest
    ) -> None:
        self.splits = tuple(splits)
        self.weights = np.array(weights, np.float64)
        self.manifest = manifest
        self.num_classes = len(manifest.classes)
        self._starts = np.cumsum([0, *map(len, splits)])
        labels = {info.name: label for label, info in enumerate(manifest.classes)}
        # For each split, the labels of its classes in the merged class list.
        self._labels = [
            np.array([labels[info.name] for info in split.classes], np.int64) for split in splits
        ]

    def __getstate__(self) -> dict[str, Any]:
        # The class list may be long, but reading does not need it.
        return self.__dict__ | {"manifest": self.manifest.model_copy(update={"classes": ()})}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def united(self, number: int, per_class: np.ndarray) -> np.ndarray:
        """Map values of the classes of split `number` to the merged class list, [K]. Classes that
        the split does not contain get 0.
        """
        found = np.zeros(self.num_classes, per_class.dtype)
        found[self._labels[number]] = per_class
        return found

    def digest(self) -> dict[str, str]:
        """Return 16 hexadecimal digits for each split that identify its samples, their order and
        its classes.
        """
        found = {}
        for split, labels in zip(self.splits, self._labels, strict=True):
            digest = hashlib.sha256(f"{split.digest()}\n".encode())
            digest.update(labels.astype("<i8").tobytes())
            found[f"{split.folder} {split.name}"] = digest.hexdigest()[:16]
        return found

    def sizes(self, samples: np.ndarray) -> np.ndarray:
        """Return the size in bytes, int64 [n], of each of `samples` (int64 [n], in any order)."""
        found = np.empty(len(samples), np.int64)
        numbers = self._split_numbers(samples)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            found[here] = self.splits[number].sizes(samples[here] - self._starts[number])
        return found

    def key(self, i: int) -> str:
        """Return the webdataset key of sample `i`."""
        number, row = self._locate(i)
        return self.splits[number].key(row)

    def read(self, i: int) -> tuple[bytes, str, int]:
        """Return (bytes, extension, label) of sample `i`. Raises BadSampleError like a split."""
        number, row = self._locate(i)
        data, extension, label = self.splits[number].read(row)
        return data, extension, int(self._labels[number][label])

    def read_many(self, samples: np.ndarray) -> tuple[np.ndarray, Iterator[bytes | None]]:
        """Return the labels and the bytes of `samples`. See `Split.read_many`."""
        numbers, labels = self._split_numbers(samples), np.empty(len(samples), np.int64)
        contents: dict[int, Iterator[bytes | None]] = {}
        for number in np.unique(numbers).tolist():
            here = numbers == number
            own, contents[number] = self.splits[number].read_many(
                samples[here] - self._starts[number]
            )
            labels[here] = self._labels[number][own]
        return labels, (next(contents[number]) for number in numbers.tolist())

    def bad(self, i: int, reason: str) -> BadSampleError:
        """Return an error that names the shard and key of sample `i`."""
        number, row = self._locate(i)
        return self.splits[number].bad(row, reason)

    def will_read_all(self, position: int) -> None:
        """Prefetch all shards at URLs, because training reads them at the same time."""
        for split in self.splits:
            split.will_read_all(position)

    def _split_numbers(self, samples: np.ndarray) -> np.ndarray:
        numbers: np.ndarray = np.searchsorted(self._starts, samples, side="right") - 1
        return numbers

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} is out of range: the mixture has {len(self)} samples")
        number = int(self._split_numbers(np.array([i]))[0])
        return number, i - int(self._starts[number])

    def close(self) -> None:
        """Close the shards and stop prefetching. A later read opens them again."""
        for split in self.splits:
            split.close()

    def __enter__(self) -> "Mixture":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
