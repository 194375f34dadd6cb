"""Shards at a URL are verified like a local folder, with a bounded temporary file and no cache."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.inspection.verify import Damage
from data.retry import RetriesExhaustedError
from data.shards.index import index_path
from data.shards.manifest import Manifest
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames
from tests.data.conftest import damage_of, kway_shard, open_index, overwrite
from tests.data.file_server import FileServer, serving

FIRST = "train-000000.tar"


@pytest.fixture
def server(copy: Path) -> Iterator[FileServer]:
    with serving(copy) as files:
        yield files


def append(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


def flip(folder: Path) -> None:
    overwrite(folder / FIRST, int(open_index(folder / FIRST).blocks[3, 0]) * 512, b"\0\0")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "bytes": flip,
    "missing": lambda folder: (folder / FIRST).unlink(),
    "damaged index": lambda folder: overwrite(index_path(folder / FIRST), 300, b"x" * 9),
    "missing index": lambda folder: index_path(folder / FIRST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_is_reported_as_in_a_local_folder(
    damage: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    DAMAGE[damage](copy)
    url = f"file://{copy}"
    at_url = [
        Damage(one.kind, one.line.replace(url, str(copy)), one.count) for one in damage_of(url)
    ]
    assert at_url == damage_of(copy)
    assert bool(at_url) == (damage != "nothing")
    assert not (tmp_path / ".cache").exists()


def test_label_vectors_at_a_url_are_verified(tmp_path: Path) -> None:
    folder = tmp_path / "names"
    write_shards(EmojiNames(9, ("en", "fr"), ("fr",)), folder, workers=0)
    assert damage_of(f"file://{folder}") == []
    append(folder / "label_vectors.safetensors", b"x")
    (damage,) = damage_of(f"file://{folder}")
    assert damage.kind == "label vectors"


def test_a_forbidden_shard_is_listed_as_damage(server: FileServer) -> None:
    server.failures = {FIRST: [403]}
    (damage,) = damage_of(server.url)
    assert f"{server.url}/{FIRST} cannot be read (403 Forbidden)" in damage.line


def test_a_server_that_fails_raises_because_the_shards_may_be_intact(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.retry._LONGEST_SECONDS", 0.0)
    server.failures = {FIRST: [503] * 99}
    with pytest.raises(RetriesExhaustedError, match=f"{server.url}/{FIRST}: .*8 attempts"):
        damage_of(server.url)


def test_a_download_ends_at_the_limit_and_the_shard_is_reported(
    copy: Path, server: FileServer
) -> None:
    largest = max(shard.bytes for shard in Manifest.read(copy).shards)
    (copy / FIRST).write_bytes(bytes(4 * largest))
    (damage,) = damage_of(server.url)
    assert f"{server.url}/{FIRST} does not match the manifest (it has more than" in damage.line


def test_the_command_verifies_a_url_and_exits_with_2_if_a_shard_is_missing(
    copy: Path, server: FileServer
) -> None:
    done = kway_shard("verify", server.url)
    assert done.exit_code == 0
    assert f"{server.url} is intact: " in done.stdout
    (copy / FIRST).unlink()
    done = kway_shard("verify", server.url)
    assert done.exit_code == 2
    assert f"damaged: {server.url}/{FIRST} is missing: 10 samples are lost" in done.stderr
    assert "upload it again" in done.stderr
