"""Commands with `--ray` give the same files on a Ray cluster as on this machine, for any number of
workers, and if a node or the driver is killed."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest

from data.processes import in_order
from data.ray_pool import ray_pool
from heads.tree.encoder import encode_names
from heads.tree.named_tree import NamedTree
from serving.galleries.building import IndexOptions, index_collection
from serving.galleries.collection import open_collection
from serving.galleries.features import RayEncoder
from tests.ranks import rank_world
from tests.ray_cluster import RayCluster, running_cluster
from tests.shards import glyph_recipe
from tests.system.processes import KWAY, ROOT, environment
from tests.tiny_bundle import tiny_text_backbone, tiny_tokenizer, write, write_of_texts
from trainer.bundle.bundle import Bundle
from trainer.train import train

BATCH = 4
NUM_IMAGES = 330  # more than the tasks in flight contain


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of readable images. Most of them are links to a few files."""
    folder = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 256, (7, 200, 300, 3), np.uint8)
    for i in range(NUM_IMAGES):
        if i < len(pixels):
            cv2.imwrite(str(folder / f"{i:03}.png"), pixels[i])
        else:
            (folder / f"{i:03}.png").symlink_to(f"{i % len(pixels):03}.png")
    return folder


@pytest.fixture(scope="module")
def gallery(bundle: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gallery that a local run writes."""
    out = tmp_path_factory.mktemp("local") / "gallery"
    index = [*KWAY, "index", str(bundle), str(images), "-o", str(out), f"--batch-size={BATCH}"]
    subprocess.run(index, check=True, cwd=ROOT, env=environment())
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_gallery_is_identical_for_any_number_of_workers(
    cluster, kway, bundle, images, gallery, tmp_path
):
    for workers in (1, 2, 3):
        cluster.add_workers_until(workers)
        out = tmp_path / f"{workers}"
        arguments = (bundle, images, "-o", out, "--batch-size", BATCH, "--ray", cluster.address)
        assert kway("index", *arguments) == 0
        assert contents(out) == contents(gallery)


def test_unreadable_and_long_texts_give_the_same_gallery(cluster, kway, tmp_path):
    cluster.add_workers_until(2)
    text_bundle = write_of_texts(tmp_path / "bundle")
    lines = [b"a cat " * (i % 40) + (b"\xff" if i % 5 == 0 else b"dog") for i in range(100)]
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    options = (text_bundle, tmp_path / "lines", "--batch-size", BATCH)
    assert kway("index", *options, "-o", tmp_path / "local") == 0
    assert kway("index", *options, "-o", tmp_path / "ray", "--ray", cluster.address) == 0
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_the_work_of_a_killed_node_is_done_again(cluster, bundle, images, gallery, tmp_path):
    cluster.add_workers_until(3)
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if not killed:
            busiest = max(cluster.raylets(), key=_cpu_seconds)
            cluster.kill_raylet(busiest)
            killed.append(busiest)

    with ray_pool(cluster.address) as pool:
        index_collection(
            RayEncoder(Bundle.open(bundle), pool, device="cpu"),
            open_collection(images, "images"),
            tmp_path / "out",
            IndexOptions(batch_size=BATCH),
            computing=kill,
        )
    assert killed
    found, expected = contents(tmp_path / "out"), contents(gallery)
    assert found == expected


def _cpu_seconds(raylet: int) -> float:
    """Return the CPU time of the processes of a node."""
    processes = psutil.Process(raylet).children(recursive=True)
    return sum(sum(process.cpu_times()[:2]) for process in processes)


_DRIVER = """
import sys, time
from pathlib import Path
from data.ray_pool import ray_pool
from serving.galleries import building
from serving.galleries.building import IndexOptions, index_collection
from serving.galleries.collection import open_collection
from serving.galleries.features import RayEncoder
from trainer.bundle.bundle import Bundle

building._SECONDS_BETWEEN_COMMITS = 0
bundle, folder, out = map(Path, sys.argv[1:4])

def wait(done, total):
    if done >= 40:
        print(done, flush=True)
        time.sleep(60)

with ray_pool(sys.argv[4]) as pool:
    index_collection(
        RayEncoder(Bundle.open(bundle), pool, device="cpu"), open_collection(folder, "images"), out,
        IndexOptions(batch_size=4), computing=wait,
    )
"""


def test_a_run_whose_driver_was_killed_is_resumed(
    cluster, kway, bundle, images, gallery, tmp_path, capsys
):
    cluster.add_workers_until(2)
    out = tmp_path / "out"
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(bundle), str(images), str(out), cluster.address],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with driver:
        assert driver.stdout is not None
        while driver.stdout.readline() != b"40\n":  # Ray also prints to stdout
            assert driver.poll() is None
        driver.kill()
    assert not out.exists()
    arguments = (bundle, images, "-o", out, "--batch-size", BATCH, "--ray", cluster.address)
    assert kway("index", *arguments) == 0
    assert f"{NUM_IMAGES - 40} computed, 40 unchanged" in capsys.readouterr().out
    assert contents(out) == contents(gallery)


def test_a_cluster_that_does_not_exist_is_a_one_line_error(kway, bundle, images, tmp_path, capsys):
    assert kway("index", bundle, images, "-o", tmp_path / "out", "--ray", "127.0.0.1:9") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --ray 127.0.0.1:9:")
    assert error.count("\n") == 1


def test_the_vectors_of_class_names_are_identical_for_any_number_of_workers(
    cluster, kway, tmp_path
):
    encoder, file = tmp_path / "encoder", tmp_path / "names.txt"
    tiny_text_backbone().encoder.save_pretrained(encoder)
    tiny_tokenizer().save(encoder)
    names = [
        f"{i}{' '.join(words)}"
        for i, words in enumerate(product(("a", "cat", "and", "dog", "hund"), repeat=4))
    ]
    expected = encode_names(encoder, names)
    for workers in (1, 3):
        cluster.add_workers_until(workers)
        with ray_pool(cluster.address) as pool:
            run = partial(in_order, pool, ahead=2 * pool.num_workers)
            assert encode_names(encoder, names, run=run).tobytes() == expected.tobytes()
    file.write_text("\n".join(names))
    build = ("tree", "build", encoder, "--classes", file, "-o")
    assert kway(*build, tmp_path / "local.tree") == 0
    assert kway(*build, tmp_path / "ray.tree", "--ray", cluster.address) == 0
    local, on_ray = (NamedTree.load(tmp_path / f"{name}.tree") for name in ("local", "ray"))
    assert np.array_equal(on_ray.tree.parent, local.tree.parent)


@pytest.fixture(scope="module")
def run(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(glyph_recipe(glyphs, folder, evaluation={"topk": [1, 3]}), rank_world())
    return folder


def evaluations(run: Path) -> dict[str, bytes]:
    found = contents(run / "evaluations")
    shutil.rmtree(run / "evaluations")
    return found


def test_evaluation_on_a_cluster_gives_the_same_files(cluster, kway, run):
    cluster.add_workers_until(2)
    shutil.rmtree(run / "evaluations", ignore_errors=True)
    for ranks in (1, 2):
        assert kway("eval", run, "--nproc", ranks) == 0
        expected = evaluations(run)
        assert kway("eval", run, "--nproc", ranks, "--ray", cluster.address) == 0
        assert evaluations(run) == expected


def test_the_error_of_a_rank_reaches_the_driver(cluster, kway, run, capfd):
    cluster.add_workers_until(2)
    arguments = ("--split", "absent", "--nproc", 2, "--ray", cluster.address)
    assert kway("eval", run, *arguments) == 2
    assert "absent" in capfd.readouterr().err


def test_a_cluster_that_is_too_small_for_the_ranks_is_rejected(cluster, kway, run, capsys):
    assert kway("eval", run, "--nproc", 50, "--ray", cluster.address) == 2
    assert "--nproc is 50, but the Ray cluster has room for" in capsys.readouterr().err


def test_an_evaluation_starts_again_if_a_node_is_killed(cluster, kway, run):
    cluster.add_workers_until(3)
    assert kway("eval", run, "--nproc", 2) == 0
    expected = evaluations(run)
    driver = subprocess.Popen(
        [*KWAY, "eval", str(run), "--nproc", "2", "--ray", cluster.address],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
        text=True,
    )
    with driver:
        raylet = _wait_for_rank(cluster, run)
        cluster.kill_raylet(raylet)
        _, output = driver.communicate(timeout=120)
    assert driver.returncode == 0, output
    assert "restart 1 of 3" in output
    assert evaluations(run) == expected


def _wait_for_rank(cluster: RayCluster, run: Path) -> int:
    """Wait until a rank runs and return the raylet of its node."""
    while True:
        for raylet in cluster.raylets():
            for process in psutil.Process(raylet).children(recursive=True):
                try:
                    if {"trainer.evaluation", str(run)} <= set(process.cmdline()):
                        return raylet
                except psutil.NoSuchProcess:
                    continue
