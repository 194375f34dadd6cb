"""The bundle of a server is replaced while clients send requests, and every answer is checked.

Two versions of a bundle, which give different answers, and damaged bundles are published at the
server's path, a symbolic link. Replicas may be killed in the meantime.
"""

import itertools
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from serving.schemas import Answer
from tests.serving.published import QUESTIONS, Expected, publish, write_versions
from tests.serving.started import Server, end, replicas_of, start

_CLIENTS, _REPLICAS = 8, 2
_SWITCH_SECONDS = 60
_NOTICE_SECONDS = 3  # replicas check the path every second
_BACKBONE_MIB = 150


@dataclass
class Swaps:
    """A server, the path at which bundles are published, and the bundles. Requests in progress may
    fail if `kills` replicas are killed, each during one of the first swaps.

    `answers` are the numbers of correct answers by version, `problems` describes failed requests
    and wrong answers, and `resident_mib` is the memory of the replicas at the start and after each
    swap.
    """

    server: Server
    path: Path
    versions: list[Path]
    expected: Expected
    kills: int
    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resident_mib: list[int] = field(default_factory=list)

    def run(self, num_requests: int, num_swaps: int) -> None:
        """Send at least `num_requests` requests and publish the versions in turn in the meantime,
        each after a damaged bundle."""
        is_over, counter = threading.Event(), itertools.count()

        def goes_on() -> bool:
            return next(counter) < num_requests or not is_over.is_set()

        with ThreadPoolExecutor(_CLIENTS) as threads:
            asking = [threads.submit(self._ask, goes_on, seed) for seed in range(_CLIENTS)]
            try:
                self._note_memory()
                for number in range(num_swaps):
                    self._swap(number)
            finally:
                is_over.set()
            for each in asking:
                self.answers.update(each.result(600))

    def _ask(self, goes_on: Callable[[], bool], seed: int) -> Counter[str]:
        """Send requests. Nothing is retried.

        A request in progress at a killed replica fails with status 500 of Ray's proxy or a closed
        connection.
        """
        answers: Counter[str] = Counter()
        choices = random.Random(seed)
        with httpx.Client(base_url=self.server.url, timeout=60) as http:
            while goes_on():
                question = choices.choice(QUESTIONS)
                try:
                    response = http.post("/v1/query", json=question.body)
                    response.raise_for_status()
                except httpx.HTTPError as error:
                    has_response = isinstance(error, httpx.HTTPStatusError)
                    is_lost = not has_response or error.response.status_code == 500
                    if not (self.kills and is_lost):
                        self.problems.append(f"{type(error).__name__}: {error}")
                    continue
                answer = Answer.model_validate_json(response.content)
                header = response.headers.get("kway-model-version")
                problem = self.expected.problem(question, answer, header)
                if problem is None:
                    answers[str(answer.version)] += 1
                else:
                    self.problems.append(problem)
        return answers

    def _swap(self, number: int) -> None:
        other = (number + 1) % 2
        time.sleep(1)
        publish(self._damaged(other, number), self.path)
        time.sleep(_NOTICE_SECONDS)  # if it were served, the checks of the answers would notice it
        publish(self.versions[other], self.path)
        if number < self.kills:
            random.choice(list(replicas_of(self.server).values())).kill()
        self._wait_until_all_serve(self.expected.versions[other])
        self._note_memory()

    def _damaged(self, index: int, number: int) -> Path:
        """Return a copy of a version in which one file is damaged or missing."""
        copy = self.path.with_name(f"damaged-{number}")
        shutil.copytree(self.versions[index], copy)
        files = [file for file in sorted(copy.rglob("*")) if file.is_file()]
        file = random.Random(number).choice([one for one in files if one.name != "bundle.json"])
        if number % 2:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[::-1])
        return copy

    def _wait_until_all_serve(self, version: str) -> None:
        """Wait until all replicas serve a version: several answers in a row have it."""
        deadline, in_a_row = time.monotonic() + _SWITCH_SECONDS, 0
        with httpx.Client(base_url=self.server.url, timeout=30) as http:
            while in_a_row < 10 * _REPLICAS:
                assert time.monotonic() < deadline, f"a replica does not serve {version}"
                with suppress(httpx.HTTPError):
                    served = http.get("/v1/model").headers.get("kway-model-version")
                    in_a_row = in_a_row + 1 if served == version else 0
                time.sleep(0.02)

    def _note_memory(self) -> None:
        time.sleep(4)  # the replaced version is freed within two seconds
        found = [*replicas_of(self.server)] or [self.server.process.pid]
        resident = sum(psutil.Process(pid).memory_info().rss for pid in found)
        self.resident_mib.append(round(resident / 2**20))


@pytest.fixture
def swaps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Swaps]:
    """A server with these options, MiB of its backbone, and the number of replicas to kill."""
    options, backbone_mib, kills = request.param
    versions, path = write_versions(tmp_path, extra_bytes=backbone_mib * 2**20), tmp_path / "pets"
    expected = Expected(versions)
    publish(versions[0], path)
    server = start(path, tmp_path / "stderr", *options)
    try:
        yield Swaps(server, path, versions, expected, kills)
    finally:
        end(server)


_RAY = ("--replicas", _REPLICAS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "swaps",
    [(("--no-ray",), _BACKBONE_MIB, 0), (_RAY, _BACKBONE_MIB, 0)],
    ids=["no-ray", "ray"],
    indirect=True,
)
def test_20000_requests_during_swaps_are_answered_by_the_version_which_they_name(
    swaps: Swaps,
) -> None:
    swaps.run(20_000, 10)
    assert swaps.problems == []
    assert swaps.answers.total() >= 20_000
    assert len(swaps.answers) == 2
    # No replica has kept an old version.
    assert swaps.resident_mib[-1] - swaps.resident_mib[0] < _BACKBONE_MIB


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [(_RAY, 0, 3)], ids=["kills"], indirect=True)
def test_replicas_that_are_killed_during_swaps_serve_the_new_version(swaps: Swaps) -> None:
    swaps.run(2000, 4)
    assert swaps.problems == []
    assert len(swaps.answers) == 2
