"""Replace the bundle of a server while clients send requests, and check every answer.

Two versions of a bundle, which give different answers, and damaged bundles are published at the
server's path, a symbolic link. Processes may be killed in the meantime. `test_swaps_under_load.py`
runs it.
"""

import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from serving.schemas import Answer
from tests.serving.published import QUESTIONS, Expected, publish, write_versions
from tests.serving.started import Server, end, replicas_of, start

_CLIENTS, _REPLICAS = 8, 2
_SWITCH_SECONDS = 60
_NOTICE_SECONDS = 3  # replicas check the path every second


@dataclass
class Outcome:
    """`answers` are the numbers of correct answers by version. `problems` describes failed requests
    and wrong answers. `lost` counts requests without an answer while processes are killed.
    `resident_mib` is the memory of the replicas at the start and after each swap."""

    requests: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    swaps: int = 0
    damaged: int = 0
    kills: int = 0
    lost: int = 0
    seconds: float = 0
    resident_mib: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Target:
    """A server, the path at which bundles are published, and the bundles."""

    server: Server
    path: Path
    versions: list[Path]
    expected: Expected

    def wait_until_all_serve(self, version: str) -> None:
        """Wait until all replicas serve a version: several answers in a row have it."""
        deadline, in_a_row = time.monotonic() + _SWITCH_SECONDS, 0
        with httpx.Client(base_url=self.server.url, timeout=30) as http:
            while in_a_row < 10 * _REPLICAS:
                assert time.monotonic() < deadline, f"a replica does not serve {version}"
                with suppress(httpx.HTTPError):
                    served = http.get("/v1/model").headers.get("kway-model-version")
                    in_a_row = in_a_row + 1 if served == version else 0
                time.sleep(0.02)


def run(
    num_requests: int,
    num_swaps: int,
    num_kills: int = 0,
    *,
    backbone_mib: int = 0,
    no_ray: bool = False,
) -> Outcome:
    """Send at least `num_requests` requests, replace the bundle `num_swaps` times in the meantime,
    and kill a replica during `num_kills` of these swaps. With `no_ray`, there are no replicas."""
    outcome, started = Outcome(), time.monotonic()
    size = backbone_mib * 2**20
    options = ("--no-ray",) if no_ray else ("--replicas", _REPLICAS)
    with (
        tempfile.TemporaryDirectory() as folder,
        _serving(Path(folder), size, options) as target,
    ):
        is_over = threading.Event()
        with ThreadPoolExecutor(_CLIENTS) as threads:
            counter = itertools.count()
            asking = [
                threads.submit(_ask, target, counter, num_requests, is_over, outcome, seed)
                for seed in range(_CLIENTS)
            ]
            try:
                _swap(target, num_swaps, num_kills, outcome)
            finally:
                is_over.set()
            for each in asking:
                outcome.answers.update(each.result(600))
    outcome.requests = outcome.answers.total()
    outcome.seconds = time.monotonic() - started
    return outcome


@contextmanager
def _serving(folder: Path, backbone_bytes: int, options: Sequence[object]) -> Iterator[_Target]:
    versions, path = write_versions(folder, extra_bytes=backbone_bytes), folder / "pets"
    expected = Expected(versions)
    publish(versions[0], path)
    server = start(path, folder / "stderr", *options)
    try:
        yield _Target(server, path, versions, expected)
    finally:
        end(server)
        print((folder / "stderr").read_text(), file=sys.stderr)


def _ask(
    target: _Target,
    counter: Iterator[int],
    num_requests: int,
    is_over: threading.Event,
    outcome: Outcome,
    seed: int,
) -> Counter[str]:
    """Send requests until there are enough and all swaps are over. Nothing is retried.

    A request in progress at a killed replica fails with status 500 of Ray's proxy or a closed
    connection.
    """
    answers: Counter[str] = Counter()
    choices = random.Random(seed)
    with httpx.Client(base_url=target.server.url, timeout=60) as http:
        while next(counter) < num_requests or not is_over.is_set():
            question = choices.choice(QUESTIONS)
            try:
                response = http.post("/v1/query", json=question.body)
                response.raise_for_status()
            except httpx.HTTPError as error:
                has_response = isinstance(error, httpx.HTTPStatusError)
                if outcome.kills and (not has_response or error.response.status_code == 500):
                    outcome.lost += 1
                else:
                    outcome.problems.append(f"{type(error).__name__}: {error}")
                continue
            answer = Answer.model_validate_json(response.content)
            header = response.headers.get("kway-model-version")
            problem = target.expected.problem(question, answer, header)
            if problem is None:
                answers[str(answer.version)] += 1
            else:
                outcome.problems.append(problem)
    return answers


def _swap(target: _Target, num_swaps: int, num_kills: int, outcome: Outcome) -> None:
    """Publish the versions in turn. Before each, publish a damaged bundle."""
    outcome.resident_mib.append(_resident_mib(target.server))
    for number in range(num_swaps):
        time.sleep(1)
        current, other = number % 2, (number + 1) % 2
        _publish_damaged(target, other, number, outcome)
        publish(target.versions[other], target.path)
        if number < num_kills:
            outcome.kills += 1
            random.choice(list(replicas_of(target.server).values())).kill()
        target.wait_until_all_serve(target.expected.versions[other])
        assert target.expected.versions[current] != target.expected.versions[other]
        outcome.swaps += 1
        outcome.resident_mib.append(_resident_mib(target.server))


def _publish_damaged(target: _Target, index: int, number: int, outcome: Outcome) -> None:
    """Publish a copy of a version in which one file is damaged or missing."""
    copy = target.path.with_name(f"damaged-{number}")
    shutil.copytree(target.versions[index], copy)
    file = random.Random(number).choice(
        [file for file in sorted(copy.rglob("*")) if file.is_file() and file.name != "bundle.json"]
    )
    if number % 2:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[::-1])
    publish(copy, target.path)
    time.sleep(_NOTICE_SECONDS)  # if it were served, the checks of the answers would notice it
    outcome.damaged += 1


def _resident_mib(server: Server) -> int:
    """Return the memory of the replicas after the last swap, whose old version is freed within two
    seconds."""
    time.sleep(4)
    found = [*replicas_of(server)] or [server.process.pid]
    return round(sum(psutil.Process(pid).memory_info().rss for pid in found) / 2**20)
