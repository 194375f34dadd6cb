"""CIFAR-10 and CIFAR-100 in the published binary layout."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from data.images.decode import decode
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import Cifar10, Cifar100
from tests.data.conftest import error_of
from tests.data.foreign_tars import tar_of

COARSE = ("fish", "trees")
FINE = ("maple_tree", "ray", "shark")
ABOVE = (1, 0, 0)  # fine -> coarse
TEN = ("airplane", "automobile", "bird")
SIZES = {"train": 20, "test": 7}


def pixels(split: str) -> np.ndarray:
    """Return images uint8 [N, 32, 32, 3]."""
    rng = np.random.default_rng(len(split))
    return rng.integers(0, 256, (SIZES[split], 32, 32, 3), dtype=np.uint8)


def labels(split: str) -> list[int]:
    return [(2 * i) % 3 for i in range(SIZES[split])]


def records(split: str, coarse: bool) -> list[bytes]:
    """Return records: the label bytes, then all red, all green and all blue values."""
    return [
        bytes([ABOVE[label], label] if coarse else [label]) + image.transpose(2, 0, 1).tobytes()
        for image, label in zip(pixels(split), labels(split), strict=True)
    ]


def hundred() -> dict[str, bytes]:
    return {
        "train.bin": b"".join(records("train", True)),
        "test.bin": b"".join(records("test", True)),
        "fine_label_names.txt": "".join(f"{name}\n" for name in FINE).encode(),
        "coarse_label_names.txt": "".join(f"{name}\n" for name in COARSE).encode(),
    }


def ten() -> dict[str, bytes]:
    train = records("train", False)
    batches = {f"data_batch_{i + 1}.bin": b"".join(train[4 * i : 4 * i + 4]) for i in range(5)}
    # The published file of names ends with an empty line.
    names = "".join(f"{name}\n" for name in TEN) + "\n"
    return batches | {
        "test_batch.bin": b"".join(records("test", False)),
        "batches.meta.txt": names.encode(),
    }


def archive(path: Path, folder: str, files: dict[str, bytes]) -> Path:
    members = ((f"{folder}/{name}", data) for name, data in files.items())
    path.write_bytes(tar_of(members, mode="w:gz"))
    return path


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    return archive(tmp_path / "cifar-100-binary.tar.gz", "cifar-100-binary", hundred())


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    return archive(tmp_path / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", ten())


@pytest.mark.parametrize("kind", [Cifar10, Cifar100])
def test_every_image_is_stored_losslessly(
    cifar10: Path, cifar100: Path, tmp_path: Path, kind: type
) -> None:
    source = kind(cifar10 if kind is Cifar10 else cifar100)
    source.splits()
    source = pickle.loads(pickle.dumps(source))  # as a worker process receives it
    write_shards(source, tmp_path / "out", samples_per_shard=8, workers=1)
    names = TEN if kind is Cifar10 else FINE
    assert Manifest.load(tmp_path / "out").class_names == names
    for split in SIZES:
        with open_split(tmp_path / "out", split) as opened:
            assert len(opened) == SIZES[split]
            for i in range(len(opened)):
                data, extension, label = opened.read(i)
                row = int(opened.key(i).removeprefix(f"{split}-"))
                assert extension == "png"
                assert label == labels(split)[row]
                np.testing.assert_array_equal(decode(data, 3), pixels(split)[row])


def test_the_coarse_class_becomes_the_path(cifar100: Path) -> None:
    attributes = [info.attributes for info in Cifar100(cifar100).classes()]
    assert attributes == [{"path": COARSE[i]} for i in ABOVE]


def test_a_folder_gives_the_same_samples_as_the_archive(cifar100: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    for name, data in hundred().items():
        (folder / name).write_bytes(data)
    assert Cifar100(folder).describe() == Cifar100(cifar100).describe()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train.bin", lambda data: data[:-1]),
        ("test.bin", lambda data: b""),
        ("test.bin", lambda data: b"\0\x09" + data[2:]),
        ("test.bin", lambda data: b"\2" + data[1:]),
        ("fine_label_names.txt", lambda data: b""),
        ("fine_label_names.txt", lambda data: b"ray\nray\nshark"),
    ],
)
def test_damaged_content_raises_an_error_that_names_the_file(
    cifar100: Path, name: str, change
) -> None:
    archive(cifar100, "cifar-100-binary", {**hundred(), name: change(hundred()[name])})
    assert f": {name} is" in error_of(Cifar100, cifar100)
