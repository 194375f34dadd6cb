"""Every kind of damage in real shards is found, counted and reported.

Shards at a URL are verified like a local folder, with a bounded temporary file and no cache.
"""

import pickle
import shutil
from collections import Counter
from pathlib import Path

import pytest

from data.inspection.verify import Damage
from data.remote.config import CacheConfig
from data.retry import RetriesExhaustedError
from data.shards.index import index_path
from data.shards.manifest import MAX_INLINE_CLASSES, Manifest
from data.shards.split import open_split
from data.tars.indexing import index_shards
from tests.data.conftest import damage_of, kway_shard, open_index, overwrite
from tests.data.file_server import FileServer, serving
from tests.data.foreign_tars import bomb, planted_shards, png, write_tar

FIRST = "train-000000.tar"


def kinds(found: list[Damage]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for damage in found:
        counts[damage.kind] += damage.count
    return counts


def test_a_flipped_byte_of_an_image_is_reported_with_its_key(copy: Path) -> None:
    with open_split(copy, "train") as split:
        key = split.key(3)
    index = open_index(copy / FIRST)
    overwrite(copy / FIRST, int(index.blocks[3, 0]) * 512 + 5, b"\0\0")
    shard, sample = damage_of(copy)
    assert (shard.kind, sample.kind) == ("shard", "bytes")
    assert f"{copy / FIRST} was changed: its SHA-256" in shard.line
    assert f"{FIRST}: {key}: its checksum does not match" in sample.line


def test_a_changed_label_is_reported(copy: Path) -> None:
    index = open_index(copy / FIRST)
    overwrite(copy / FIRST, int(index.blocks[2, 1]) * 512, b"9")
    assert kinds(damage_of(copy)) == {"shard": 1, "label": 1}
    assert ".cls differs from the label" in damage_of(copy)[1].line


def test_a_flipped_byte_outside_the_samples_is_found(copy: Path) -> None:
    index = open_index(copy / FIRST)
    for offset in (3, (int(index.blocks[4, 0]) - 1) * 512, (copy / FIRST).stat().st_size - 1):
        before = (copy / FIRST).read_bytes()
        overwrite(copy / FIRST, offset, b"\xff")
        assert kinds(damage_of(copy)) == {"shard": 1}
        (copy / FIRST).write_bytes(before)


def test_a_truncated_shard_is_reported_with_every_lost_sample(copy: Path) -> None:
    index = open_index(copy / FIRST)
    content = (copy / FIRST).read_bytes()
    # Truncate in the middle of sample 6, whose label precedes it.
    (copy / FIRST).write_bytes(content[: int(index.blocks[6, 0]) * 512 + 7])
    lost = damage_of(copy)
    assert kinds(lost) == {"shard": 1, "bytes": 1, "label": 3}
    assert f"of {len(content):,} bytes" in lost[0].line
    assert "(the file ends before it)" in lost[1].line
    assert len(lost) == 5


def test_damage_to_the_index_does_not_hide_damage_to_the_shard(copy: Path) -> None:
    index_path(copy / FIRST).write_bytes(index_path(copy / "train-000001.tar").read_bytes())
    assert kinds(damage_of(copy)) == {"index": 1}
    overwrite(copy / FIRST, 600, b"\1")
    assert kinds(damage_of(copy)) == {"index": 1, "shard": 1}
    index_path(copy / FIRST).unlink()
    assert kinds(damage_of(copy)) == {"index": 1, "shard": 1}


@pytest.mark.parametrize("bad", [bomb(), png(1)[:200]])
def test_images_that_were_written_damaged_are_found_by_decoding(tmp_path: Path, bad: bytes) -> None:
    shards = planted_shards(tmp_path / "out", {7: bad})
    assert damage_of(shards) == []
    (lost,) = damage_of(shards, decode=True)
    assert lost.kind == "image"
    assert "00007: " in lost.line


def test_a_text_that_is_not_utf8_is_found(tmp_path: Path) -> None:
    texts = [b"good", "crème".encode(), b"bad \xff", "crème".encode("latin-1")]
    members = []
    for number, text in enumerate(texts):
        members += [(f"{number}.txt", text), (f"{number}.cls", b"0")]
    write_tar(tmp_path / "a.tar", members)
    index_shards(tmp_path)
    lost = damage_of(tmp_path)
    assert [damage.kind for damage in lost] == ["text", "text"]
    assert "a.tar: 2: invalid UTF-8 at byte 4" in lost[0].line


def test_control_characters_in_a_key_are_escaped(tmp_path: Path) -> None:
    members = [("a\n\x1b[31m\u202eb.txt", b"bad \xff"), ("a\n\x1b[31m\u202eb.cls", b"0")]
    write_tar(tmp_path / "a.tar", members)
    index_shards(tmp_path)
    (lost,) = damage_of(tmp_path)
    assert "a.tar: aU+000AU+001B[31mU+202Eb: invalid UTF-8" in lost.line
    with open_split(tmp_path, "train") as split, pytest.raises(ValueError, match="aU\\+000A"):
        split.text(0)
    write_tar(tmp_path / "b.tar", [*members, ("c\nd.txt", b"x")])
    indexed = index_shards(tmp_path, skip_bad=True)
    assert "cU+000Ad: no " in str(indexed.problems[0])


def test_damaged_samples_beyond_the_limit_are_counted(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.inspection.verify._NAMED_PER_SHARD", 2)
    for row in range(4):
        index = open_index(copy / FIRST)
        overwrite(copy / FIRST, int(index.blocks[row, 0]) * 512 + 5, b"\0\0")
    some = damage_of(copy)
    assert kinds(some) == {"shard": 1, "bytes": 4}
    assert len(some) == 4
    assert "2 more damaged" in some[-1].line


def test_the_damage_found_does_not_depend_on_the_number_of_processes(copy: Path) -> None:
    overwrite(copy / FIRST, 700, b"\1")
    (copy / "train-000001.tar").unlink()
    assert damage_of(copy, workers=2, decode=True) == damage_of(copy, workers=0, decode=True) != []


# -------------------------------------------------------------------- at a URL


def test_damage_at_a_url_is_reported_as_in_a_local_folder(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    url = f"file://{copy}"
    assert damage_of(url) == []
    overwrite(copy / FIRST, int(open_index(copy / FIRST).blocks[3, 0]) * 512, b"\0\0")
    (copy / "train-000001.tar").unlink()
    overwrite(index_path(copy / "train-000002.tar"), 300, b"x" * 9)
    index_path(copy / "test-000000.tar").unlink()
    found = damage_of(copy)
    assert kinds(found) == {"shard": 1, "bytes": 1, "missing shard": 1, "index": 2}
    assert [one.line.replace(url, str(copy)) for one in damage_of(url)] == [
        one.line for one in found
    ]
    assert not (tmp_path / ".cache").exists()


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


def test_another_node_of_a_ray_cluster_does_not_need_the_class_list_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("".join(f"class {i}\n" for i in range(MAX_INLINE_CLASSES + 1)))
    folder, cache = tmp_path / "shards", tmp_path / "cache"
    folder.mkdir()
    write_tar(folder / "a.tar", [("0.txt", b"text"), ("0.cls", b"class 7")])
    index_shards(folder, classes=names)

    def on_another_node(work, jobs, **_):
        sent = pickle.dumps(work)
        shutil.rmtree(cache)
        return map(pickle.loads(sent), jobs)

    monkeypatch.setattr("data.inspection.verify.over_jobs", on_another_node)
    with serving(folder) as server:
        manifest = Manifest.read(server.url, CacheConfig(folder=cache))
        assert damage_of(server.url, manifest=manifest, ray="auto") == []
