"""Shards that a Ray cluster of several raylets writes equal local shards, whatever is killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from data.inspection.verify import damages
from data.messages import silent
from data.shards.manifest import MANIFEST
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder, Tweets
from data.tars.indexing import index_shards
from tests.data import ray_jobs
from tests.data.conftest import write_image
from tests.data.killed import contents
from tests.data.ray_cluster import RayCluster, ray_cluster
from tests.data.ray_jobs import Driver, SlowNumbers
from tests.data.s3_server import objects, s3_server
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with (
        s3_server() as variables,
        ray_cluster(tmp_path_factory.mktemp("cluster"), **variables) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes, bad ones and duplicates."""
    folder = tmp_path_factory.mktemp("mixed") / "in"
    for split, number in (("train", 60), ("val", 12)):
        for i in range(number):
            write_image(folder / split / "ab"[i % 2] / f"{i}.png", i)
    for i in range(6):
        (folder / "train" / "ab"[i % 2] / f"bad{i}.png").write_bytes(b"this is text")
    return folder


def on_ray(cluster: RayCluster, tmp_path: Path, source, out: Path | str, **options) -> Driver:
    options = {"samples_per_shard": 10, "ray": cluster.address, **options}
    return Driver(cluster, tmp_path, ray_jobs.write, source, out, options)


def test_ray_workers_write_the_same_bytes(cluster: RayCluster, mixed: Path, tmp_path: Path) -> None:
    source = ImageFolder(mixed, skip_bad=True)
    options = {"ignored": source.skipped()}
    local = write_shards(source, tmp_path / "local", samples_per_shard=10, workers=1, **options)
    assert local.num_skipped == 6
    cluster.resize(3)
    assert on_ray(cluster, tmp_path, source, tmp_path / "out", **options).finish() == ""
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_texts_of_a_first_pass_on_ray_equal_local_texts(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.resize(2)
    files = tuple(tmp_path / f"{i}.txt" for i in range(3))
    for number, path in enumerate(files):
        lines = (f"text {number} {i} {'🔥🎉😀'[i % 3]}\n" for i in range(40))
        path.write_text("".join(lines) + "the same in all files 🔥\n")
    local = Tweets(files, tmp_path / "first-pass")
    write_shards(local, tmp_path / "local", samples_per_shard=10, workers=0)
    remote = Tweets(files, tmp_path / "ray-pass")
    assert on_ray(cluster, tmp_path, remote, tmp_path / "out").finish() == ""
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.parametrize("victim", [pytest.param("raylet", marks=pytest.mark.slow), "worker"])
def test_shards_of_a_killed_raylet_or_worker_are_written_again(
    cluster: RayCluster, tmp_path: Path, victim: str
) -> None:
    cluster.resize(2)
    source, out = SlowNumbers(150), tmp_path / "out"
    driver = on_ray(cluster, tmp_path, source, out)
    wait_until(lambda: any(out.glob("train-*.index.safetensors")) and len(cluster.workers()) == 2)
    if victim == "raylet":
        cluster.kill_raylet()
    else:
        cluster.workers()[0].kill()
    assert driver.finish() == ""
    write_shards(SlowNumbers(150, 0), tmp_path / "local", samples_per_shard=10, workers=1)
    assert contents(out) == contents(tmp_path / "local")


@pytest.mark.slow
def test_sigterm_ends_a_command_and_its_tasks_and_the_same_command_resumes(
    cluster: RayCluster, tmp_path: Path
) -> None:
    for i in range(240):
        write_image(tmp_path / "in" / "ab"[i % 2] / f"{i}.jpg", i, 500, 500)
    command = ["imagefolder", "in", "-o", "out", "--samples-per-shard", "8"]
    cluster.resize(2)
    stopped = _start(cluster, tmp_path, *command, "--ray", cluster.address)
    wait_until(lambda: _num_finished(tmp_path / "out") >= 4)
    stopped.terminate()
    _, errors = stopped.communicate(timeout=60)
    assert (stopped.returncode, errors) == (-signal.SIGTERM, "")
    wait_until(lambda: not cluster.workers())
    assert not (tmp_path / "out" / MANIFEST).exists()
    resumed = _start(cluster, tmp_path, *command, "--ray", cluster.address)
    printed, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    assert "resumed after" in printed
    write_shards(ImageFolder(tmp_path / "in"), tmp_path / "local", samples_per_shard=8, workers=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.slow
def test_a_command_that_is_killed_twice_resumes_with_other_workers_and_locally(
    cluster: RayCluster, tmp_path: Path
) -> None:
    for i in range(240):
        write_image(tmp_path / "in" / "ab"[i % 2] / f"{i}.jpg", i, 500, 500)
    source, out = ImageFolder(tmp_path / "in"), tmp_path / "out"
    write_shards(source, tmp_path / "local", samples_per_shard=8, workers=2)
    command = ["imagefolder", "in", "-o", "out", "--samples-per-shard", "8"]
    for workers, num_finished in ((2, 4), (3, 12)):
        cluster.resize(workers)
        killed = _start(cluster, tmp_path, *command, "--ray", cluster.address)
        wait_until(lambda least=num_finished: _num_finished(out) >= least)
        killed.kill()
        killed.communicate(timeout=60)
        assert not (out / MANIFEST).exists()
        wait_until(lambda: not cluster.workers())
    resumed = _start(cluster, tmp_path, *command)
    printed, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    assert "resumed after" in printed
    assert contents(out) == contents(tmp_path / "local")


def _num_finished(out: Path) -> int:
    return len(list(out.glob("*.index.safetensors")))


def test_a_bad_image_raises_the_same_error_and_leaves_no_files(
    cluster: RayCluster, mixed: Path, tmp_path: Path
) -> None:
    cluster.resize(2)
    error = on_ray(cluster, tmp_path, ImageFolder(mixed), tmp_path / "out").finish()
    assert error.startswith("ValueError: ")
    assert "not an image" in error
    assert "pass --skip-bad" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_shards_at_a_url_are_the_same_when_a_raylet_is_killed(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.resize(3)
    source, url = SlowNumbers(150), "s3://bucket/killed"
    driver = on_ray(cluster, tmp_path, source, url)
    wait_until(lambda: "train-000000.tar" in objects(url))
    cluster.kill_raylet()
    assert driver.finish() == ""
    write_shards(SlowNumbers(150, 0), tmp_path / "local", samples_per_shard=10, workers=1)
    assert objects(url) == contents(tmp_path / "local")


def _index(folder: Path, out: Path, ray: str) -> None:
    index_shards(folder, out=out, ray=ray)


def test_a_wrong_token_is_an_error_that_names_the_fix(cluster: RayCluster, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("ab" * 32)
    other = replace(cluster, environment={**cluster.environment, "RAY_AUTH_TOKEN_PATH": str(path)})
    error = on_ray(other, tmp_path, SlowNumbers(10), tmp_path / "out").finish()
    assert error.startswith(f"ValueError: --ray {cluster.address}: the token is missing or")
    assert "set RAY_AUTH_TOKEN_PATH" in error
    assert not (tmp_path / "out").exists()


def test_tars_indexed_on_ray_have_the_same_indices(
    cluster: RayCluster, mixed: Path, tmp_path: Path
) -> None:
    cluster.resize(2)
    source, tars = ImageFolder(mixed, skip_bad=True), tmp_path / "tars"
    write_shards(source, tmp_path / "out", samples_per_shard=10, workers=1)
    tars.mkdir()
    for path in (tmp_path / "out").glob("*.tar"):
        path.rename(tars / path.name)
    index_shards(tars, out=tmp_path / "local", workers=0)
    driver = Driver(cluster, tmp_path, _index, tars, tmp_path / "ray", cluster.address)
    assert driver.finish() == ""
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def _verify(folder: Path, ray: str | None, out: Path) -> None:
    found = damages(folder, silent, decode=True, ray=ray, workers=None if ray else 0)
    out.write_text("\n".join(map(str, found)))


def test_verify_on_ray_reports_the_same_damage(
    cluster: RayCluster, mixed: Path, tmp_path: Path
) -> None:
    cluster.resize(2)
    folder = tmp_path / "out"
    source = ImageFolder(mixed, skip_bad=True)
    write_shards(source, folder, samples_per_shard=10, workers=1)
    (folder / "train-000001.tar").unlink()
    tar = folder / "train-000003.tar"
    content = bytearray(tar.read_bytes())
    content[1024 : len(content) // 2] = bytes(len(content) // 2 - 1024)
    tar.write_bytes(content)
    _verify(folder, None, tmp_path / "local.txt")
    driver = Driver(cluster, tmp_path, _verify, folder, cluster.address, tmp_path / "ray.txt")
    assert driver.finish() == ""
    lines = (tmp_path / "ray.txt").read_text()
    assert lines == (tmp_path / "local.txt").read_text()
    assert "train-000001.tar is missing" in lines
    assert "train-000003.tar was changed" in lines


def _start(cluster: RayCluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "launch", "shard", *arguments],
        cwd=folder,
        env={**cluster.environment, "PYTHONPATH": str(root), "PATH": "", "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
