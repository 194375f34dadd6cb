"""The idx files of MNIST, uncompressed and compressed."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from data.images.decode import decode
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import Mnist
from tests.data.conftest import error_of

SIZES = {"train": 20, "t10k": 6}


def images(stem: str) -> np.ndarray:
    """Return images uint8 [N, 28, 28]."""
    rng = np.random.default_rng(len(stem))
    return rng.integers(0, 256, (SIZES[stem], 28, 28), dtype=np.uint8)


def labels(stem: str) -> list[int]:
    return [(7 * i) % 10 for i in range(SIZES[stem])]


def idx(magic: int, shape: tuple[int, ...], data: bytes) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + data


def files() -> dict[str, bytes]:
    found = {}
    for stem, number in SIZES.items():
        shape = (number, 28, 28)
        found[f"{stem}-images-idx3-ubyte"] = idx(0x803, shape, images(stem).tobytes())
        found[f"{stem}-labels-idx1-ubyte"] = idx(0x801, (number,), bytes(labels(stem)))
    return found


def write_files(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    compressed = {f"{name}.gz": gzip.compress(data) for name, data in files().items()}
    return write_files(tmp_path / "mnist", compressed)


def test_every_image_is_stored_losslessly(mnist: Path, tmp_path: Path) -> None:
    write_shards(Mnist(mnist), tmp_path / "out", samples_per_shard=8, workers=1)
    assert Manifest.load(tmp_path / "out").class_names == tuple("0123456789")
    for stem, split in (("train", "train"), ("t10k", "test")):
        with open_split(tmp_path / "out", split) as opened:
            assert len(opened) == SIZES[stem]
            for i in range(len(opened)):
                data, extension, label = opened.read(i)
                row = int(opened.key(i).removeprefix(f"{split}-"))
                assert (extension, label) == ("png", labels(stem)[row])
                np.testing.assert_array_equal(decode(data, 1)[:, :, 0], images(stem)[row])


@pytest.mark.parametrize("dot", [False, True])
def test_uncompressed_files_give_the_same_samples(mnist: Path, tmp_path: Path, dot: bool) -> None:
    named = {name.replace("-idx", ".idx") if dot else name: data for name, data in files().items()}
    plain = Mnist(write_files(tmp_path / "plain", named))
    assert plain.describe() == Mnist(mnist).describe()


def test_class_names_can_be_read_from_a_file(mnist: Path, tmp_path: Path) -> None:
    names = tmp_path / "fashion.txt"
    wanted = ("T-shirt/top", "Trouser", *(f"class {i}" for i in range(8)))
    names.write_text("\n".join(wanted) + "\n\n")
    source = Mnist(mnist, names)
    assert tuple(info.name for info in source.classes()) == wanted
    assert source.describe() != Mnist(mnist).describe()
    names.write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"fashion\.txt has 2 classes, but the largest label is 9"):
        Mnist(mnist, names).classes()
    names.unlink()
    with pytest.raises(FileNotFoundError, match=r"fashion\.txt does not exist"):
        Mnist(mnist, names).classes()


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda data: data[:-1], "complete idx file of bytes with 3 axes"),
        (IMAGES, lambda data: data[:9], "complete idx file"),
        (IMAGES, lambda data: data[:2] + b"\x0d" + data[3:], "complete idx file"),
        (IMAGES, lambda data: idx(0x803, (0, 28, 28), b""), "has 0 images, but"),
        (LABELS, lambda data: b"<html>", "complete idx file of bytes with 1 axes"),
        (LABELS, lambda data: idx(0x801, (19,), data[8:-1]), "20 images, but train-labels has 19"),
    ],
)
def test_a_damaged_file_raises(mnist: Path, name: str, change, message: str) -> None:
    (mnist / f"{name}.gz").write_bytes(gzip.compress(change(files()[name])))
    assert message in error_of(Mnist, mnist)


@pytest.mark.parametrize("keep", [5, -6])
def test_a_truncated_gz_raises_an_error_that_names_its_path(mnist: Path, keep: int) -> None:
    path = mnist / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:keep])
    assert error_of(Mnist, mnist).startswith(f"{path} is damaged (")


def test_a_missing_idx_file_raises_an_error_that_names_it(mnist: Path) -> None:
    (mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "has no t10k-labels-idx1-ubyte, with or without .gz: download it" in error_of(
        Mnist, mnist
    )
