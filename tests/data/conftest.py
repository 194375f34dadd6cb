"""Small real images, and shards made from them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from data.inspection.verify import Damage, damages
from data.messages import silent
from data.shards.index import ShardIndex, index_path, parse_index
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import Glyphs, ImageFolder, Source
from launch.commands.shard import app
from tests.data.file_server import FileServer, serving
from tests.data.foreign_tars import planted_shards
from tests.noise_images import image


def write_image(path: Path, seed: int, height: int = 20, width: int = 26) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image(seed, height, width, path.suffix))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Replace bytes in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def kway_shard(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(kind: Callable[[Path], Source], path: Path) -> str:
    """Return the error of writing shards from the source at `path`. Check that it contains the
    path, and that nothing is written.
    """
    out = path.parent / "out"
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        write_shards(kind(path), out, workers=0)
    assert str(path) in str(error.value)
    assert not out.exists()
    return str(error.value)


def damage_of(shards: Path | str, **options: Any) -> list[Damage]:
    """Return all damage that `kway shard verify` finds."""
    return list(damages(shards, silent, **options))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, keyed by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read(shards: Path, split: str = "train") -> dict[bytes, str]:
    """Return a mapping from the content of each sample to its class name."""
    with open_split(shards, split) as opened:
        found = [opened.read(i) for i in range(len(opened))]
        return {data: opened.classes[label].name for data, _, label in found}


def read_sets(shards: Path, split: str = "train") -> dict[str, list[str]]:
    """Return a mapping from each text to the names of its classes."""
    with open_split(shards, split) as opened:
        names = opened.classes.names
        found = [opened.text(i) for i in range(len(opened))]
        return {text: [names[label] for label in labels] for text, labels in found}


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create four classes of 9 to 12 images, with a non-ASCII class name and dots in file names."""
    folder = tmp_path_factory.mktemp("images")
    for label, name in enumerate(("apple", "birne", "crème", "date")):
        for i in range(9 + label):
            stem = "with.dots" if i == 0 else f"{i:02d}"
            write_image(folder / name / f"{stem}.{'jpg' if i % 2 else 'png'}", 100 * label + i)
    return folder


@pytest.fixture(scope="session")
def shards(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 42 images to shards of up to 10 each. At least 3 shards are in the training split."""
    folder = tmp_path_factory.mktemp("shards") / "out"
    source = ImageFolder(images, test_fraction=0.2)
    write_shards(source, folder, samples_per_shard=10, workers=1)
    return folder


@pytest.fixture(scope="session")
def label_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 30 images with sets of labels to 3 shards."""
    return planted_shards(tmp_path_factory.mktemp("label-sets") / "out", {}, sets=True)


@pytest.fixture
def copy(shards: Path, tmp_path: Path) -> Path:
    """A copy of `shards` that the test may change."""
    return shutil.copytree(shards, tmp_path / "copy")


@pytest.fixture
def server(copy: Path) -> Iterator[FileServer]:
    """Serve `copy` from a real HTTP server."""
    with serving(copy) as files:
        yield files


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes and two splits. Four training images are bad."""
    folder = tmp_path_factory.mktemp("mixed") / "in"
    for split, number in (("train", 24), ("val", 6)):
        for i in range(number):
            write_image(folder / split / "ab"[i % 2] / f"{i}.png", i)
    for i in range(4):
        (folder / "train" / "ab"[i % 2] / f"bad{i}.png").write_bytes(b"this is text")
    return folder


@pytest.fixture(scope="session")
def all_glyphs() -> Glyphs:
    """Return a source that tests share, because comparing all drawings takes seconds."""
    return Glyphs(samples=1)


def open_index(shard: Path) -> ShardIndex:
    """Return the index of a local shard."""
    return parse_index(index_path(shard).read_bytes())
