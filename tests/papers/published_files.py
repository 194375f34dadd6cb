"""Tiny datasets in the published formats: MNIST, and the binary version of CIFAR-100."""

import struct
from pathlib import Path

import numpy as np

from tests.data.foreign_tars import tar_of

_COARSE = [f"coarse {i}" for i in range(20)]
_MAMMALS = (
    "aquatic_mammals",
    "small_mammals",
    "medium_mammals",
    "large_carnivores",
    "large_omnivores_and_herbivores",
)


def write_papers_data(folder: Path) -> Path:
    """Write all datasets in the layout of `--data`."""
    _write_mnist(folder / "mnist", {"train": 400, "t10k": 100})
    _write_cifar(folder / "cifar-100-binary.tar.gz", {"train": 1_200, "test": 300})
    return folder


def _write_mnist(folder: Path, sizes: dict[str, int]) -> None:
    folder.mkdir(parents=True)
    for stem, number in sizes.items():
        labels = (np.arange(number) % 10).astype(np.uint8)
        images = _images(labels, 10, 28, channels=1)[..., 0]
        header = struct.pack(">4I", 0x803, number, 28, 28)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">2I", 0x801, number)
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def _write_cifar(path: Path, sizes: dict[str, int]) -> None:
    """Write CIFAR-100 with class i in coarse class i // 5, including the mammal superclasses."""
    coarse = [*_MAMMALS, *_COARSE[len(_MAMMALS) :]]
    files = {
        "fine_label_names.txt": "".join(f"fine {i}\n" for i in range(100)).encode(),
        "coarse_label_names.txt": "".join(f"{name}\n" for name in coarse).encode(),
    }
    for split, number in sizes.items():
        labels = (np.arange(number) % 100).astype(np.uint8)
        planes = _images(labels, 100, 32, channels=3).transpose(0, 3, 1, 2)
        files[f"{split}.bin"] = b"".join(
            bytes([label // 5, label]) + image.tobytes()
            for label, image in zip(labels, planes, strict=True)
        )
    members = ((f"cifar-100-binary/{name}", content) for name, content in files.items())
    path.write_bytes(tar_of(members, mode="w:gz"))


def _images(labels: np.ndarray, num_classes: int, side: int, *, channels: int) -> np.ndarray:
    """Return uint8 [N, side, side, channels]: one pattern per class, with noise."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 200, (num_classes, side, side, channels))
    noise = rng.integers(0, 56, (len(labels), side, side, channels))
    return (patterns[labels] + noise).astype(np.uint8)
