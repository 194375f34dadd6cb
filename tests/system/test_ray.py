"""Commands with `--ray` give the same files on a Ray cluster as on this machine, for any number of
workers, and if a node or the driver is killed."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import pytest

from heads.tree.encoder import encode_names
from tests.data.killed import contents
from tests.data.ray_cluster import RayCluster, ray_cluster
from tests.system.processes import KWAY, ROOT, environment
from tests.tiny_bundle import tiny_text_backbone, tiny_tokenizer, write, write_of_texts
from tests.waiting import wait_until

BATCH = ("--batch-size", 4)
NUM_IMAGES = 330  # more than the tasks in flight contain


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


class Driver:
    """A running process that is connected to the cluster."""

    def __init__(self, cluster: RayCluster, *command: object) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**environment(), **cluster.environment},
            text=True,
        )

    def finish(self, code: int = 0) -> tuple[str, str]:
        """Wait until the process exits with `code` and return its stdout and stderr."""
        with self.process:
            output, error = self.process.communicate(timeout=180)
        assert self.process.returncode == code, error
        return output, error


def kway_on(cluster: RayCluster, *arguments: object) -> Driver:
    return Driver(cluster, *KWAY, *arguments, "--ray", cluster.address)


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


@pytest.fixture
def gallery(kway: Callable[..., int], bundle: Path, images: Path, tmp_path: Path) -> Path:
    """The gallery that a local run writes."""
    assert kway("index", bundle, images, "-o", tmp_path / "gallery", *BATCH) == 0
    return tmp_path / "gallery"


@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_a_gallery_is_identical_for_any_number_of_workers(
    workers, cluster, bundle, images, gallery, tmp_path
):
    cluster.resize(workers)
    kway_on(cluster, "index", bundle, images, "-o", tmp_path / "out", *BATCH).finish()
    assert contents(tmp_path / "out") == contents(gallery)


@pytest.mark.slow
def test_texts_of_different_lengths_and_unreadable_ones_give_the_same_gallery(
    cluster, kway, tmp_path
):
    cluster.resize(2)
    bundle, lines = write_of_texts(tmp_path / "bundle"), tmp_path / "lines"
    texts = [b"a cat " * (i % 40) + (b"\xff" if i % 5 == 0 else b"dog") for i in range(100)]
    lines.write_bytes(b"\n".join(texts))
    assert kway("index", bundle, lines, "-o", tmp_path / "local", *BATCH) == 0
    kway_on(cluster, "index", bundle, lines, "-o", tmp_path / "ray", *BATCH).finish()
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


@pytest.mark.slow
def test_the_work_of_a_killed_node_is_done_again(cluster, bundle, images, gallery, tmp_path):
    cluster.resize(2)
    driver = kway_on(cluster, "index", bundle, images, "-o", tmp_path / "out", *BATCH)
    wait_until(lambda: len(cluster.workers()) == 2)
    cluster.kill_raylet()
    driver.finish()
    assert contents(tmp_path / "out") == contents(gallery)


_INTERRUPTED = """
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
        print(f"\\n{done}", flush=True)
        time.sleep(60)

with ray_pool(sys.argv[4]) as pool:
    index_collection(
        RayEncoder(Bundle.open(bundle), pool, device="cpu"), open_collection(folder, "images"), out,
        IndexOptions(batch_size=4), computing=wait,
    )
"""


@pytest.mark.slow
def test_a_run_whose_driver_was_killed_is_resumed(cluster, bundle, images, gallery, tmp_path):
    cluster.resize(2)
    out = tmp_path / "out"
    command = (sys.executable, "-P", "-c", _INTERRUPTED)
    driver = Driver(cluster, *command, bundle, images, out, cluster.address)
    with driver.process as process:
        wait_until(lambda: process.stdout.readline() == "40\n")
        process.kill()
    assert not out.exists()
    output, _ = kway_on(cluster, "index", bundle, images, "-o", out, *BATCH).finish()
    assert f"{NUM_IMAGES - 40} computed, 40 unchanged" in output
    assert contents(out) == contents(gallery)


_PRINT_VECTORS = """
import hashlib
import heads.tree
from launch.main import main

encode = heads.tree.encode_names

def printed(*arguments, **options):
    vectors = encode(*arguments, **options)
    print("vectors", hashlib.sha256(vectors.tobytes()).hexdigest())
    return vectors

heads.tree.encode_names = printed
main()
"""


@pytest.mark.slow
def test_the_vectors_of_class_names_are_identical_for_any_number_of_workers(cluster, tmp_path):
    encoder, names = tmp_path / "encoder", tmp_path / "names.txt"
    tiny_text_backbone().encoder.save_pretrained(encoder)
    tiny_tokenizer().save(encoder)
    words = product(("a", "cat", "and", "dog", "hund"), repeat=4)
    names.write_text("".join(f"{' '.join(some)} {i}\n" for i, some in enumerate(words)))
    expected = encode_names(encoder, names.read_text().splitlines())
    build = ("tree", "build", encoder, "--classes", names, "--ray", cluster.address, "-o")
    for workers in (1, 3):
        cluster.resize(workers)
        command = (sys.executable, "-P", "-c", _PRINT_VECTORS, *build, tmp_path / f"{workers}")
        output, _ = Driver(cluster, *command).finish()
        assert f"vectors {hashlib.sha256(expected.tobytes()).hexdigest()}" in output.splitlines()
