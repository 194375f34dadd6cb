"""Kill the processes of a server at random while many feeds send frames, and check that no hit is
lost: neither by the server nor on the way to a webhook whose receiver fails at random.

`tests/serving/test_hits_survive_kills.py` runs a small size. The full size, the default, is:

    python -m tests.serving.kills --watches 1000 --frames 100 --kills 10
"""

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from serving.client import Acknowledged, Client, FrameError, Item, RejectedError, WatchHit
from serving.config import ServingConfig
from serving.deploy.session import free_port
from serving.watches.schemas import WatchInfo
from tests.serving.live.servers import serve_config
from tests.serving.receiver import SECRET, Message, Receiver, receiving
from tests.serving.started import Server, end
from tests.tiny_bundle import write_of_texts

_SENDERS, _LISTENERS = 8, 4
# By name of the process; the server itself is killed by its process id.
_PROCESSES = {"replica": "ServeReplica", "actor": "WatchActor", "proxy": "haproxy"}
KINDS = (*_PROCESSES, "server")
_RETRY_SECONDS = 180


@dataclass
class Outcome:
    """`hits` are the hits stored at the end, by watch and frame; `heard` are those that listeners
    received; `requests` and `failures` count all and the failed requests to the receiver, and
    `delivered` the hits in the others; `problems` are descriptions of lost hits and wrong ids."""

    kills: list[str] = field(default_factory=list)
    hits: int = 0
    duplicates: int = 0
    heard: int = 0
    requests: int = 0
    failures: int = 0
    delivered: int = 0
    seconds: float = 0
    problems: list[str] = field(default_factory=list)


class Target:
    """A server that is restarted on the same port with the same state folder."""

    def __init__(self, folder: Path, num_watches: int, num_frames: int, webhook_host: str) -> None:
        total = 10 * num_watches * num_frames
        self._config = ServingConfig(
            port=free_port("127.0.0.1", 0),
            replicas=2,
            state=folder / "state",
            max_watches=num_watches,
            max_watches_per_client=num_watches,
            max_watch_hits=total,
            max_hits=total,
            max_feeds_per_client=32,
            webhook_hosts=(webhook_host,),
        )
        self._bundle, self._folder = write_of_texts(folder / "texts"), folder
        self.url = f"http://127.0.0.1:{self._config.port}"
        self.server = self._start()

    def kill(self, kind: str) -> None:
        """Kill one process with SIGKILL. Restart a server that has been killed."""
        if kind != "server":
            children = psutil.Process(self.server.process.pid).children(recursive=True)
            found = [one for one in children if _PROCESSES[kind] in one.name()]
            if found:
                with suppress(psutil.NoSuchProcess):
                    random.choice(found).kill()
            return
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        self.server.process.kill()
        psutil.wait_procs(children, timeout=60)
        end(self.server)
        self.server = self._start()

    def _start(self) -> Server:
        """Start the server. On a busy machine, Ray may not start within its own time limits."""
        for _ in range(2):
            with suppress(pytest.fail.Exception):
                return serve_config(self._bundle, self._config, self._folder / "stderr")
        return serve_config(self._bundle, self._config, self._folder / "stderr")


def run(num_watches: int, num_frames: int, num_kills: int, seed: int = 0) -> Outcome:
    """Send `num_frames` frames to the feed of each watch, and kill `num_kills` processes in the
    meantime: each kind first, then random ones."""
    outcome, started = Outcome(), time.monotonic()
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        receiver = opened.enter_context(receiving())
        receiver.respond = _unreliable(seed)
        target = Target(folder, num_watches, num_frames, receiver.host)
        opened.callback(lambda: end(target.server))
        with Client(target.url) as client:
            watches = [
                client.create_watch(
                    ["husky"],
                    threshold=-1e6,
                    ttl_seconds=86400,
                    feeds=[_feed(i)],
                    webhook_url=f"{receiver.url}/{_feed(i)}",
                    webhook_secret=SECRET,
                )
                for i in range(num_watches)
            ]
        with _killing(target, num_kills, seed, outcome) as is_over:
            _exchange(target.url, watches, num_frames, is_over, outcome)
        for watch in _delivered(target.url):
            stored = _check(target.url, watch, num_frames, outcome)
            _check_delivery(watch, stored, receiver, outcome)
        _count_requests(receiver, outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def _feed(index: int) -> str:
    return f"feed-{index}"


@contextmanager
def _killing(
    target: Target, num_kills: int, seed: int, outcome: Outcome
) -> Iterator[Callable[[], bool]]:
    """Kill processes in another thread. Yields whether all of them have been killed."""
    generator = random.Random(seed)
    kinds = [*KINDS, *generator.choices(KINDS, k=max(0, num_kills - len(KINDS)))][:num_kills]
    generator.shuffle(kinds)

    def kill() -> None:
        for kind in kinds:
            time.sleep(generator.uniform(1, 6))
            print(f"{time.monotonic():.0f} s: kill {kind}", file=sys.stderr, flush=True)
            target.kill(kind)
            outcome.kills.append(kind)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield lambda: not thread.is_alive()
    finally:
        thread.join(60)


def _exchange(
    url: str,
    watches: list[WatchInfo],
    num_frames: int,
    is_over: Callable[[], bool],
    outcome: Outcome,
) -> None:
    """Send all frames, and listen to some watches in the meantime. Frames are held back so that
    the feeds last until the last process has been killed."""

    def send(sender: int) -> None:
        for index in range(sender, len(watches), _SENDERS):
            is_last = index + _SENDERS >= len(watches)
            _send(url, _feed(index), num_frames, is_over if is_last else None)

    with ThreadPoolExecutor(_SENDERS + _LISTENERS) as threads:
        listeners = [
            threads.submit(_listen, url, watch, num_frames) for watch in watches[-_LISTENERS:]
        ]
        for sender in [threads.submit(send, sender) for sender in range(_SENDERS)]:
            sender.result(60)
        outcome.heard = sum(listener.result(60) for listener in listeners)


def _send(url: str, feed: str, num_frames: int, is_over: Callable[[], bool] | None) -> None:
    """Send the frames of a feed. After a lost connection, continue after the last answered frame,
    which the server knows, too."""

    def frames(first: int) -> Iterator[Item]:
        for index in range(first, num_frames):
            while is_over is not None and index == num_frames - 1 and not is_over():
                time.sleep(0.1)
            yield Item(f"text {index}", id=index)

    following = 0
    while following < num_frames:
        with suppress(OSError, RejectedError), _client(url) as client:
            position = client.feed_position(feed)
            following = max(following, -1 if position is None else int(position) + 1)
            for event in client.feed(feed, frames(following), acknowledge=True):
                if isinstance(event, Acknowledged):
                    following = int(event.answered) + 1
                elif isinstance(event, FrameError):
                    break


def _listen(url: str, watch: WatchInfo, num_frames: int) -> int:
    """Listen until the hits of all frames have arrived, and return the number of events."""
    heard: list[int] = []
    cursor = 0
    while len(set(heard)) < num_frames:
        with suppress(OSError, RejectedError), _client(url) as client:
            for event in client.listen(watch.id, after=cursor):
                if isinstance(event, WatchHit):
                    assert event.cursor == cursor + 1, (event, cursor)
                    cursor = event.cursor
                    heard.append(int(event.frame))
                    if len(set(heard)) == num_frames:
                        break
    return len(heard)


@contextmanager
def _client(url: str) -> Iterator[Client]:
    with Client(url, retry_seconds=_RETRY_SECONDS) as client:
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:  # the first request is not retried if the connection is refused
            try:
                client.served()
                break
            except OSError:
                assert time.monotonic() < deadline, f"{url} does not come back"
                time.sleep(0.5)
        yield client


def _unreliable(seed: int) -> Callable[[Message], int | None]:
    """Fail a third of the requests: half of these with a status, the others without a response."""
    generator = random.Random(seed)
    return lambda _: generator.choice([200, 200, 200, 200, 500, None])


def _delivered(url: str) -> list[WatchInfo]:
    """Wait for the last deliveries, and return all watches."""
    deadline = time.monotonic() + _RETRY_SECONDS
    with _client(url) as client:
        while any(one.webhook is None or one.webhook.pending for one in client.watches()):
            assert time.monotonic() < deadline, "the hits are not delivered"
            time.sleep(0.5)
        return client.watches()


def _check(url: str, watch: WatchInfo, num_frames: int, outcome: Outcome) -> dict[int, str]:
    """Read all stored hits of a watch, and return their ids by cursor."""
    ids: dict[int, set[str]] = {}
    cursors: dict[int, str] = {}
    assert watch.webhook is not None
    params = {"after": 0}
    with httpx.stream("GET", f"{url}/v1/watches/{watch.id}/hits", params=params) as response:
        for line in response.iter_lines():
            if '"listening"' in line:
                continue
            hit = WatchHit.model_validate_json(line)
            assert hit.cursor is not None
            cursors[hit.cursor] = hit.id
            outcome.hits += 1
            outcome.duplicates += int(hit.frame) in ids
            ids.setdefault(int(hit.frame), set()).add(hit.id)
            if hit.cursor == watch.webhook.cursor:  # the last one
                break
    if missing := sorted(set(range(num_frames)) - set(ids)):
        outcome.problems.append(f"{watch.feeds}: hits of frames {missing} are lost")
    if any(len(found) > 1 for found in ids.values()):
        outcome.problems.append(f"{watch.feeds}: hits of one frame have different ids")
    if len(set().union(*ids.values())) < len(ids):
        outcome.problems.append(f"{watch.feeds}: hits of different frames have the same id")
    return cursors


def _check_delivery(
    watch: WatchInfo, stored: dict[int, str], receiver: Receiver, outcome: Outcome
) -> None:
    """Compare the hits of a watch that the receiver accepted with the stored ones, by cursor."""
    hits = receiver.accepted(f"/{watch.feeds[0]}")
    outcome.delivered += len(hits)
    found = {(hit["cursor"], hit["id"]) for hit in hits}
    if found != set(stored.items()):
        wrong = sorted(found ^ set(stored.items()))
        outcome.problems.append(f"{watch.feeds}: lost or wrong on the way to the webhook: {wrong}")


def _count_requests(receiver: Receiver, outcome: Outcome) -> None:
    outcome.requests = len(receiver.messages)
    outcome.failures = sum(not message.accepted for message in receiver.messages)
    outcome.problems += receiver.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--watches", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=100, help="frames for each watch")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcome = run(given.watches, given.frames, given.kills, given.seed)
    print(outcome)
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
