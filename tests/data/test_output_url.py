"""Shards that are written to an object store equal local shards, and runs can be resumed."""

import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from data.shards import manifest
from data.shards.manifest import MANIFEST, Manifest
from data.shards.split import open_split
from data.shards.writing.output import UNFINISHED
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder
from data.sources.first_pass import work_folder
from tests.data.conftest import contents, damage_of, kway_shard
from tests.data.s3_server import objects, s3_server
from tests.ranks import forked


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


@pytest.fixture
def url() -> str:
    return f"s3://bucket/{secrets.token_hex(4)}/set"


def write(source: ImageFolder, out: Path | str, **options):
    return write_shards(source, out, **{"samples_per_shard": 5, "workers": 1} | options)


def test_shards_at_a_url_equal_local_shards(mixed: Path, tmp_path: Path, url: str) -> None:
    source = ImageFolder(mixed, skip_bad=True)
    local = write(source, tmp_path / "out", ignored=source.skipped())
    remote = write(source, url, workers=2, ignored=source.skipped())
    assert objects(url) == contents(tmp_path / "out")
    assert {"skipped.jsonl", MANIFEST} < objects(url).keys()
    assert remote.skipped == f"{url}/skipped.jsonl"
    assert remote.num_skipped == local.num_skipped == 4
    assert remote.resumed == local.resumed == 0
    assert write(source, url).complete_before
    with open_split(url, "test") as split, open_split(tmp_path / "out", "test") as expected:
        samples = range(len(split))
        assert [split.read(i) for i in samples] == [expected.read(i) for i in samples]
    assert damage_of(url) == []


def test_a_long_class_list_is_written_and_read_at_a_url(
    mixed: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_INLINE_CLASSES", 1)
    written = write(ImageFolder(mixed, skip_bad=True), url).manifest
    assert written.class_file is not None
    assert Manifest.read(url).classes == written.classes


def test_the_work_folders_of_urls_with_the_same_last_name_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    urls = ["s3://a/shards", "s3://b/shards", "gs://a/shards", "s3://a/x/shards"]
    found = {str(work_folder(url)) for url in urls}
    assert len(found) == len(urls)
    assert all(re.fullmatch(r"shards-[0-9a-f]{8}\.first-pass", one) for one in found)


def _killed(source: ImageFolder, url: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)  # the process is forked from one that started earlier

    def stop(done: int, total: int) -> None:
        if done == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    write(source, url, report=stop)


def test_a_killed_writer_is_resumed(
    mixed: Path, tmp_path: Path, url: str, server: dict[str, str]
) -> None:
    source = ImageFolder(mixed, skip_bad=True)
    write(source, tmp_path / "whole")
    process = forked(_killed, source, url, server)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert MANIFEST not in objects(url)
    first = fsspec.filesystem("s3").modified(f"{url}/train-000000.tar")
    assert write(source, url).resumed == 2
    assert fsspec.filesystem("s3").modified(f"{url}/train-000000.tar") == first
    assert objects(url) == contents(tmp_path / "whole")


def test_two_runs_of_the_same_source_write_the_same_objects(
    mixed: Path, tmp_path: Path, url: str
) -> None:
    source = ImageFolder(mixed, skip_bad=True)
    write(source, tmp_path / "out")
    done_at_once = []

    def meanwhile(done: int, total: int) -> None:
        if done == 10 and not done_at_once:
            done_at_once.append(write(source, url))

    write(source, url, report=meanwhile)
    assert done_at_once[0].resumed == 2
    assert objects(url) == contents(tmp_path / "out")


def test_a_url_with_characters_of_patterns_leaves_other_folders_unchanged(
    mixed: Path, url: str
) -> None:
    other = dict.fromkeys(("unfinished.json", MANIFEST, "train-000000.tar"), b"precious")
    for name, content in other.items():
        fsspec.filesystem("s3").pipe_file(f"{url}1/{name}", content)
    with pytest.raises(ValueError, match="not an image"):
        write(ImageFolder(mixed), f"{url}[1]", samples_per_shard=2)
    assert objects(f"{url}[1]") == {}
    write(ImageFolder(mixed, skip_bad=True), f"{url}[1]")
    assert UNFINISHED not in objects(f"{url}[1]")
    assert objects(f"{url}1") == other


def test_a_missing_bucket_raises(mixed: Path) -> None:
    with pytest.raises(OSError, match=r"^s3://missing/set/.* cannot be written .*create"):
        write(ImageFolder(mixed, skip_bad=True), "s3://missing/set")


@pytest.mark.parametrize("out", ["http://127.0.0.1/set", "https://host/set", "memory://set/x"])
def test_a_url_that_is_not_writable_raises_before_the_input_is_read(out: str) -> None:
    done = kway_shard("imagefolder", "missing", "-o", out)
    assert isinstance(done.exception, ValueError)
    assert f"{out} is not writable: pass a local folder" in str(done.exception)


def test_a_file_url_is_a_local_folder(mixed: Path, tmp_path: Path) -> None:
    source = ImageFolder(mixed, skip_bad=True)
    write(source, f"file://{tmp_path}/out")
    write(source, tmp_path / "other")
    assert contents(tmp_path / "out") == contents(tmp_path / "other")
