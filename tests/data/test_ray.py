"""Shards that a Ray cluster of several raylets writes equal local shards, whatever is killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from data.shards.manifest import MANIFEST
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder
from data.tars.indexing import index_shards
from tests.data.conftest import contents, damage_of, write_image
from tests.data.foreign_tars import Numbers
from tests.data.ray_cluster import Driver, RayCluster, ray_cluster
from tests.data.s3_server import objects, s3_server
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with (
        s3_server() as variables,
        ray_cluster(tmp_path_factory.mktemp("cluster"), **variables) as started,
    ):
        yield started


def on_ray(cluster: RayCluster, tmp_path: Path, source, out: Path | str, **options) -> Driver:
    options = {"samples_per_shard": 10, "ray": cluster.address, **options}
    return Driver(cluster, tmp_path, partial(write_shards, source, out, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "out"), [("raylet", "s3://bucket/killed"), ("worker", None)])
def test_shards_of_a_killed_raylet_or_worker_are_written_again(
    cluster: RayCluster, tmp_path: Path, victim: str, out: str | None
) -> None:
    cluster.resize(2)
    source, folder = Numbers(150, 0.05), out or tmp_path / "out"
    driver = on_ray(cluster, tmp_path, source, folder)
    first = "train-000000.tar"
    wait_until(
        lambda: first in objects(out) if out else (folder / first).exists(),
        possible=driver.process.is_alive,
    )
    if victim == "raylet":
        cluster.kill_raylet()
    else:
        cluster.workers()[0].kill()
    assert driver.finish() == ""
    write_shards(Numbers(150), tmp_path / "local", samples_per_shard=10, workers=1)
    found = objects(out) if out else contents(folder)
    assert found == contents(tmp_path / "local")


@pytest.mark.slow
def test_sigterm_ends_a_command_and_its_tasks_and_the_same_command_resumes(
    cluster: RayCluster, tmp_path: Path
) -> None:
    for i in range(240):
        write_image(tmp_path / "in" / "ab"[i % 2] / f"{i}.jpg", i, 500, 500)
    command = ["imagefolder", "in", "-o", "out", "--samples-per-shard", "8"]
    cluster.resize(2)
    root = Path(__file__).parents[2]

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launch", "shard", *command, *arguments],
            cwd=tmp_path,
            env={**cluster.environment, "PYTHONPATH": str(root), "PATH": "", "HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    stopped = start("--ray", cluster.address)
    wait_until(lambda: len(list((tmp_path / "out").glob("*.index.safetensors"))) >= 4)
    stopped.terminate()
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == -signal.SIGTERM
    assert errors.startswith("random split")
    wait_until(lambda: not cluster.workers())
    assert not (tmp_path / "out" / MANIFEST).exists()
    resumed = start()  # with processes of this machine
    printed, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    assert "resumed after" in printed
    write_shards(ImageFolder(tmp_path / "in"), tmp_path / "local", samples_per_shard=8, workers=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


def test_a_bad_image_raises_the_same_error_and_leaves_no_files(
    cluster: RayCluster, mixed: Path, tmp_path: Path
) -> None:
    cluster.resize(2)
    error = on_ray(cluster, tmp_path, ImageFolder(mixed), tmp_path / "out").finish()
    assert error.startswith("ValueError: ")
    assert "not an image" in error
    assert "pass --skip-bad" in error
    assert not (tmp_path / "out").exists()


def test_a_wrong_token_is_an_error_that_names_the_fix(cluster: RayCluster, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("ab" * 32)
    other = replace(cluster, environment={**cluster.environment, "RAY_AUTH_TOKEN_PATH": str(path)})
    error = on_ray(other, tmp_path, Numbers(10), tmp_path / "out").finish()
    assert error.startswith(f"ValueError: --ray {cluster.address}: there is no such")
    assert "set RAY_AUTH_TOKEN_PATH" in error
    assert not (tmp_path / "out").exists()


def _index_and_verify(folder: Path, ray: str | None) -> None:
    index_shards(folder, ray=ray, workers=None if ray else 0)
    (folder / "train-000001.tar").unlink()
    found = damage_of(folder, ray=ray, workers=None if ray else 0)
    (folder / "damage").write_text("\n".join(one.line.replace(str(folder), "") for one in found))


def test_tars_are_indexed_and_verified_on_ray_as_locally(
    cluster: RayCluster, mixed: Path, tmp_path: Path
) -> None:
    cluster.resize(2)
    source = ImageFolder(mixed, skip_bad=True)
    write_shards(source, tmp_path / "out", samples_per_shard=10, workers=1)
    local, on_cluster = tmp_path / "1" / "tars", tmp_path / "2" / "tars"
    for folder in (local, on_cluster):
        folder.mkdir(parents=True)
        for path in (tmp_path / "out").glob("*.tar"):
            (folder / path.name).symlink_to(path)
    _index_and_verify(local, None)
    driver = Driver(cluster, tmp_path, _index_and_verify, on_cluster, cluster.address)
    assert driver.finish() == ""
    assert contents(on_cluster) == contents(local)
    assert b"train-000001.tar is missing" in contents(on_cluster)["damage"]
