"""Commands with `--ray` give the same files on a Ray cluster as on this machine, for any number of
workers, and if a node or the driver is killed."""

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest

from heads.tree.encoder import encode_names
from tests.data.killed import contents
from tests.data.ray_cluster import RayCluster, ray_cluster
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from tests.system.processes import KWAY, ROOT, environment
from tests.system.processes import kway as kway_process
from tests.tiny_bundle import tiny_text_backbone, tiny_tokenizer
from tests.waiting import wait_until
from trainer.process.exit_codes import PREEMPTED
from trainer.train import train


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


@pytest.fixture(scope="module")
def run(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(glyph_recipe(glyphs, folder, evaluation={"topk": [1, 3]}), rank_world())
    shutil.rmtree(folder / "evaluations", ignore_errors=True)
    return folder


def evaluations(run: Path) -> dict[str, bytes]:
    """Return the results of an evaluation, and remove them."""
    found = contents(run / "evaluations")
    shutil.rmtree(run / "evaluations")
    return found


@pytest.fixture(scope="module")
def of_two_ranks(run: Path) -> dict[str, bytes]:
    """The results of a local evaluation with two ranks."""
    assert kway_process("eval", run, "--nproc", "2").returncode == 0
    return evaluations(run)


@pytest.mark.slow
def test_evaluation_on_a_cluster_gives_the_same_files(cluster, kway, run, of_two_ranks):
    cluster.resize(2)
    kway_on(cluster, "eval", run, "--nproc", 2).finish()
    assert evaluations(run) == of_two_ranks
    kway_on(cluster, "eval", run).finish()
    on_ray = evaluations(run)
    assert kway("eval", run) == 0
    assert on_ray == evaluations(run)


@pytest.mark.slow
def test_an_evaluation_starts_again_if_a_node_is_killed(cluster, run, of_two_ranks):
    cluster.resize(3)
    driver = kway_on(cluster, "eval", run, "--nproc", 2)
    wait_until(lambda: len(ranks_of(run)) == 2)
    actor = psutil.Process(ranks_of(run)[0]).parent()
    node = actor.ppid()
    cluster.raylets.sort(key=lambda raylet: raylet != node)  # kill_raylet kills the first
    cluster.kill_raylet()
    actor.kill()  # before the rank is done: a worker notices only later that its raylet is gone
    _, output = driver.finish()
    assert "restart 1 of 3" in output
    assert evaluations(run) == of_two_ranks


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_ranks_end_with_the_driver(number, cluster, run):
    cluster.resize(2)
    driver = kway_on(cluster, "eval", run, "--nproc", 2)
    wait_until(lambda: len(ranks_of(run)) == 2)
    driver.process.send_signal(number)
    driver.finish(PREEMPTED if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not ranks_of(run))


def ranks_of(run: Path) -> list[int]:
    """Return the process IDs of the ranks that evaluate the run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            if "trainer.evaluation" in command and command[-1] == str(run):
                found.append(process.pid)
    return found


@pytest.mark.slow
def test_errors_of_an_evaluation_are_one_line(cluster, run):
    cluster.resize(2)
    _, error = kway_on(cluster, "eval", run, "--split", "absent", "--nproc", 2).finish(2)
    (line,) = (line for line in error.splitlines() if "rank 0: " in line)
    assert "absent" in line
    _, error = kway_on(cluster, "eval", run, "--nproc", 9).finish(2)
    assert error.startswith("error: --nproc is 9, but the Ray cluster has room for 2 ranks")
