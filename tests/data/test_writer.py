"""Shards are plain webdataset tars, byte-identical every time, and never mixed with other files."""

import hashlib
import os
import resource
import shutil
import signal
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import psutil
import pytest

from data.shards.manifest import MANIFEST, Manifest, SourceInfo
from data.shards.split import open_split
from data.shards.writing.output import UNFINISHED, OutputFolder
from data.shards.writing.writer import write_shards
from data.skipped import SKIPPED, Skipped
from data.sources import ImageFolder, Sample, Source
from tests.data.conftest import contents
from tests.data.foreign_tars import Numbers, Planted, png, read_by_webdataset, set_of
from tests.ranks import forked
from tests.waiting import wait_until

SHA256 = {
    "train-000000.tar": "3e65f6a5fda8c5a3e88ab075e7beae258bc4df1ffdfa23315fb4a1e7738d6697",
    "train-000001.tar": "9789cdd8dd7398611ef1e7f95a66fa2cb737b094098d09747ac10f14b6fef141",
    "train-000002.tar": "2e4cfe80b0c88232759c8c5b5a2602faae42a2a77041e875b44218e92077af5a",
    "test-000000.tar": "f0f2007600d3fefa769948739141f416952bb93d39f524426361e6f0a9abd3e6",
}


def write(images: Path, folder: Path, workers: int = 1):
    source = ImageFolder(images, test_fraction=0.2)
    return write_shards(source, folder, samples_per_shard=10, workers=workers)


def test_webdataset_reads_every_sample(
    shards: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.load(shards)
    for name in manifest.splits:
        files = [shards / shard.file for shard in manifest.of_split(name)]
        theirs = read_by_webdataset(files, monkeypatch)
        with open_split(shards, name) as split:
            assert len(theirs) == len(split) == sum(s.samples for s in manifest.of_split(name))
            for i, sample in enumerate(theirs):
                data, extension, label = split.read(i)
                assert sample["__key__"] == split.key(i)
                assert sample[extension] == data
                assert int(sample["cls"]) == label == split.labels[i]
                # Small images are stored unchanged.
                assert data in {
                    p.read_bytes() for p in (images / split.classes[label].name).iterdir()
                }


@pytest.mark.parametrize("at_once", [4, 1 << 14])
def test_bytes_and_sample_order_are_the_same_in_every_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("data.shards.writing.writer._CHOSEN_AT_ONCE", at_once)
    write_shards(Numbers(25), tmp_path, samples_per_shard=10, workers=1)
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.glob("*.tar")}
    assert digests == SHA256


def test_starting_to_write_a_hundred_million_samples_uses_little_memory(tmp_path: Path) -> None:
    class Interrupted(Numbers):
        def render(self, task: int) -> Sample:
            raise KeyboardInterrupt

    tracemalloc.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            write_shards(Interrupted(10**8), tmp_path, samples_per_shard=10**5, workers=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 2**20


def check_killed_and_resumed(
    source: Source, folder: Path, *, samples_per_shard: int, workers: int
) -> None:
    """Kill a writer in its second shard, resume it, and check that it writes the same bytes as an
    uninterrupted writer.

    Also check that the first shard is not written again, and that no worker outlives its killed
    parent.
    """
    whole, out = folder / "whole", folder / "out"
    write_shards(source, whole, samples_per_shard=samples_per_shard, workers=1)
    process = forked(_write_slowly, source, out, samples_per_shard, workers)
    process.start()
    finished = out / "train-000000.index.safetensors"
    wait_until(lambda: finished.exists() and any(out.glob("*.aside")), possible=process.is_alive)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.join(60)
    assert not (out / MANIFEST).exists()
    first = (out / "train-000000.tar").stat().st_mtime_ns
    written = write_shards(source, out, samples_per_shard=samples_per_shard, workers=1)
    assert 1 <= written.resumed < len(written.manifest.shards)
    assert (out / "train-000000.tar").stat().st_mtime_ns == first
    assert contents(out) == contents(whole)
    # No worker outlives its parent.
    wait_until(lambda: all(_ended(worker) for worker in children))


class _Slow:
    """Delays the samples of a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Slow, (self.source,)

    def render(self, task: Any) -> Sample | Skipped:
        time.sleep(0.03)
        return self.source.render(task)


def _write_slowly(source: Source, out: Path, samples_per_shard: int, workers: int) -> None:
    write_shards(_Slow(source), out, samples_per_shard=samples_per_shard, workers=workers)


def _ended(process: psutil.Process) -> bool:
    """Return whether a process has ended. It stays a zombie until its parent waits for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_and_resumed_writer_writes_the_same_bytes(tmp_path: Path) -> None:
    source = Planted([(png(number), "png", set_of(number)) for number in range(40)], 3)
    check_killed_and_resumed(source, tmp_path, samples_per_shard=10, workers=2)


def test_samples_skipped_before_a_kill_are_still_listed(mixed: Path, tmp_path: Path) -> None:
    source = ImageFolder(mixed, skip_bad=True)
    check_killed_and_resumed(source, tmp_path, samples_per_shard=15, workers=1)
    (skipped,) = {path.read_bytes() for path in tmp_path.glob(f"*/{SKIPPED}")}
    assert len(skipped.splitlines()) == 4
    assert b"train-000000.tar" in skipped


def test_writing_with_other_parameters_also_raises_for_an_unfinished_folder(
    images: Path, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source = ImageFolder(images)
    with pytest.raises(KeyboardInterrupt):
        write_shards(source, tmp_path / "out", samples_per_shard=10, workers=1, report=stop)
    before = contents(tmp_path / "out")
    assert "train-000000.tar" in before
    with pytest.raises(ValueError, match=r"samples_per_shard=10.*, not .*samples_per_shard=11"):
        write_shards(source, tmp_path / "out", samples_per_shard=11, workers=1)
    assert contents(tmp_path / "out") == before
    assert write_shards(source, tmp_path / "out", samples_per_shard=10, workers=1).resumed == 1


def test_a_folder_with_other_files_raises(images: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"is not empty \(it contains thesis.tex\)"):
        write(images, tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"precious"}


class Fatal(Numbers):
    """A source that kills its process at number 70, as the kernel does when memory runs out."""

    def render(self, task: int) -> Sample:
        if task == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().render(task)


def test_a_killed_worker_raises_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^a worker process was killed"):
        write_shards(Fatal(100), tmp_path, samples_per_shard=10, workers=2)
    again = write_shards(Numbers(100), tmp_path, samples_per_shard=10, workers=0)
    assert len(again.manifest.shards) == 11
    assert not list(tmp_path.glob("*.aside"))


def test_a_bad_image_raises_and_leaves_no_files(mixed: Path, tmp_path: Path) -> None:
    fix = "remove the file, or pass --skip-bad"
    with pytest.raises(ValueError, match=rf"/bad\d\.png: not an image.*{fix}"):
        write_shards(ImageFolder(mixed), tmp_path / "out", samples_per_shard=3, workers=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lost", "cut"),
    [
        ("train-000000.tar", False),
        ("test-000000.tar", True),
        ("train-000001.index.safetensors", True),
    ],
)
def test_lost_files_of_a_finished_folder_are_written_again(
    shards: Path, images: Path, tmp_path: Path, lost: str, cut: bool
) -> None:
    out = tmp_path / "out"
    shutil.copytree(shards, out)
    if cut:
        (out / lost).write_bytes((out / lost).read_bytes()[:300])
    else:
        (out / lost).unlink()
    written = write(images, out)
    assert not written.complete_before
    assert written.resumed == len(written.manifest.shards) - 1
    assert contents(out) == contents(shards)


@pytest.mark.parametrize(("limit", "named"), [(100, UNFINISHED), (9_000, "train-000000.tar")])
def test_a_full_disk_raises_and_repeating_the_call_resumes(
    shards: Path, images: Path, tmp_path: Path, limit: int, named: str
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=rf"{named} cannot be written \(.*\): free up space"):
            write(images, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("out/*.aside"))
    write(images, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(shards)


def test_an_output_path_that_is_a_file_raises(images: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ValueError, match="out is a file: choose a folder"):
        write(images, tmp_path / "out")


def test_only_one_of_several_concurrent_writers_claims_the_folder(tmp_path: Path) -> None:
    def write_once(folder: Path, start: Barrier) -> str:
        start.wait(60)
        try:
            with OutputFolder(folder).claimed(SourceInfo(kind="race")):
                start.wait(60)
                return "wrote"
        except ValueError as error:
            start.wait(60)
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        for attempt in range(5):
            arguments = tmp_path / f"{attempt}", Barrier(4, timeout=60)
            writers = [pool.submit(write_once, *arguments) for _ in range(4)]
            outcomes = [writer.result(timeout=180) for writer in writers]
            assert outcomes.count("wrote") == 1
            assert sum("is being written by another" in line for line in outcomes) == 3


def test_a_folder_of_only_bad_images_raises(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "bad.png").write_bytes(b"this is text")
    with pytest.raises(ValueError, match=r"all samples were skipped: ./bad\.png: not an image"):
        write_shards(ImageFolder(tmp_path / "in", skip_bad=True), tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
