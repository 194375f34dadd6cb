"""The output of `kway shard`."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data.shards.writing.output import OutputFolder
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder
from tests.data.conftest import contents, kway_shard
from tests.dispositions import ignored, is_ignored
from tests.system.processes import ROOT
from tests.waiting import wait_until


def test_shards_can_be_written_to_the_working_directory(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kway_shard("imagefolder", images.resolve(), "-o", ".")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "manifest.json").is_file()


@ignored(signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
def test_the_command_ignores_the_signals_that_its_parent_ignored_except_sigterm(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "launch", "shard", "glyphs", "-o", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(out.exists, possible=lambda: process.poll() is None)
            assert is_ignored(process.pid, signal.SIGINT)
            assert is_ignored(process.pid, signal.SIGHUP)
            process.terminate()
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()


def test_an_output_path_that_cannot_be_written_raises_an_error_that_names_the_option(
    images: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("0\n")
    out = tmp_path / "file" / "out"
    tweets = tmp_path / "a.txt"
    tweets.write_text("a 🔥\nb 🎉\n" * 4)
    for command in (
        ("imagefolder", images, "-o", out),
        ("tweets", tweets, "-o", out),
    ):
        failed = kway_shard(*command)
        assert isinstance(failed.exception, OSError), command
        assert "out cannot be written (Not a directory)" in str(failed.exception)
        assert "--out" in str(failed.exception)


def test_workers_and_ray_cannot_be_combined(shards: Path, tmp_path: Path) -> None:
    for command in (("verify", shards), ("glyphs", "-o", tmp_path / "out")):
        failed = kway_shard(*command, "--workers", 2, "--ray", "auto")
        assert isinstance(failed.exception, ValueError)
        assert "--workers 2 and --ray auto: pass only one" in str(failed.exception)


def test_an_address_without_a_ray_cluster_does_not_discard_an_interrupted_run(
    images: Path, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source, out = ImageFolder(images), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_shards(source, out, samples_per_shard=10, workers=1, report=stop)
    before = contents(out)
    address = ("--samples-per-shard", 10, "--ray", "127.0.0.1:9")
    failed = kway_shard("imagefolder", images, "-o", out, *address)
    assert isinstance(failed.exception, ValueError)
    assert "--ray 127.0.0.1:9: there is no such Ray cluster" in str(failed.exception)
    assert contents(out) == before
    assert "train-000000.tar" in before


def test_a_ray_node_without_the_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"does not exist on the Ray node .*: pass -o on a file"):
        OutputFolder(tmp_path / "out").check_shared()
