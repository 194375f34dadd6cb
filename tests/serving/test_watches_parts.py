"""The parts of standing queries by themselves; the last test has Ray."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.http.streams import split_lines
from serving.limits import ClientLimit
from serving.pipeline import _Slot, pump_all, pump_latest
from serving.watches import listeners
from serving.watches.board import Board, Registry
from serving.watches.live import HitPublisher, LiveWatches
from serving.watches.watch import (
    Changes,
    HitBatch,
    ListenerLimitError,
    Terms,
    UnknownListenerError,
    UnknownWatchError,
    WatchesDownError,
    WatchLimitError,
)
from tests.system.processes import ROOT

T = TypeVar("T")


def terms(ttl_seconds: float = 10) -> Terms:
    return Terms(classes=("husky",), recall=None, threshold=0, ttl_seconds=ttl_seconds)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_lives_for_its_time_and_a_change_renews_it() -> None:
    clock, kept = Clock(), {}
    registry = Registry(ServingConfig(), clock=clock, storage=kept)
    first, second = registry.create("a", terms()), registry.create("a", terms(20))
    clock.now += 9
    assert registry.change("a", first.id, {}).expires_at == clock.now + 10
    clock.now += 10
    with pytest.raises(UnknownWatchError):
        registry.get("a", first.id)
    assert registry.sweep() == [first.id]
    assert [one.id for one in registry.owned("a")] == [second.id] == list(kept)


def test_changes_name_what_is_new_and_what_is_gone_since_a_version() -> None:
    registry = Registry(ServingConfig(max_watches_per_client=1), clock=Clock(), storage={})
    first = registry.create("a", terms())
    with pytest.raises(WatchLimitError):
        registry.create("a", terms())
    start = registry.changes_since("", 0)
    assert start.is_whole
    assert registry.changes_since(start.epoch, start.version).states == ()
    second = registry.create("b", terms())
    registry.remove("a", first.id)
    news = registry.changes_since(start.epoch, start.version)
    assert (news.is_whole, news.gone) == (False, (first.id,))
    assert [held.watch for held in news.states] == [second]
    nothing = registry.changes_since(news.epoch, news.version)
    assert (nothing.states, nothing.gone) == ((), ())
    for _ in range(1001):
        registry.remove("a", registry.create("a", terms()).id)
    late = registry.changes_since(start.epoch, start.version)
    assert late.is_whole
    assert [held.watch for held in late.states] == [second]


def test_a_slow_listener_loses_the_oldest_hits_and_is_told_how_many() -> None:
    async def run() -> None:
        board = Board(ServingConfig(max_listener_hits=3))
        watch_id = (await board.create("a", terms())).id
        listener = await board.listen("a", watch_id)
        await board.publish([(watch_id, str(place)) for place in range(5)], {watch_id: 10})
        letters = await board.take(listener, 0)
        assert (letters.lines, letters.dropped) == (("2", "3", "4"), 12)
        assert await board.take(listener, 0) == HitBatch((), 0, None)

    asyncio.run(run())


def test_hits_that_do_not_fit_the_outbox_are_counted_and_told() -> None:
    lost, told = [], []

    class _Slow(Board):
        async def publish(self, hits, counts) -> None:
            told.append((list(hits), dict(counts)))
            await asyncio.sleep(0)

    async def run() -> None:
        outbox = HitPublisher(_Slow(ServingConfig()), most=2, on_lost=lost.append)
        for place in range(5):
            outbox.put("w", str(place))
        await outbox._task

    asyncio.run(run())
    assert told == [([("w", "3"), ("w", "4")], {"w": 3})]
    assert lost == [1, 1, 1]


def test_a_listener_whose_replica_died_is_forgotten() -> None:
    async def run() -> None:
        clock = Clock()
        board = Board(ServingConfig(), clock=clock)
        watch_id = (await board.create("a", terms(1000))).id
        listener = await board.listen("a", watch_id)
        assert (await board.changed_since("", 0, 0)).states[0].is_listened
        clock.now += 61
        assert not (await board.changed_since("", 0, 0)).states[0].is_listened
        with pytest.raises(UnknownListenerError):
            await board.take(listener, 0)

    asyncio.run(run())


def test_a_restarted_registry_finds_its_watches_under_another_epoch() -> None:
    kept: dict[str, bytes] = {}
    before = Registry(ServingConfig(), clock=Clock(), storage=kept)
    made = before.create("a", terms())
    after = Registry(ServingConfig(), clock=Clock(), storage=kept)
    assert after.owned("a") == [made]
    assert before.epoch != after.epoch
    changes = after.changes_since(before.epoch, before.version)
    assert (changes.is_whole, [held.watch for held in changes.states]) == (True, [made])


def test_owned_watches_come_in_the_order_of_their_making() -> None:
    clock = Clock()
    registry = Registry(ServingConfig(), clock=clock, storage={})
    made = []
    for _ in range(4):
        clock.now -= 1  # whatever order they are kept in
        made.append(registry.create("a", terms(100)))
    assert registry.owned("a") == made[::-1]


def test_who_is_listened_to_is_a_change_once_each_time() -> None:
    registry = Registry(ServingConfig(), clock=Clock(), storage={})
    made, version = registry.create("a", terms()), registry.version
    registry.set_listened(made.id, False)
    registry.set_listened("gone", True)
    assert registry.version == version
    registry.set_listened(made.id, True)
    registry.set_listened(made.id, True)
    assert registry.version == version + 1
    (held,) = registry.changes_since(registry.epoch, version).states
    assert held.is_listened
    registry.set_listened(made.id, False)
    (held,) = registry.changes_since(registry.epoch, version + 1).states
    assert not held.is_listened
    registry.set_listened(made.id, True)
    registry.remove("a", made.id)
    assert not registry._listened  # of what is gone nothing is kept


def test_those_that_wait_for_changes_hear_at_once_of_each_kind() -> None:
    async def run() -> None:
        board = Board(ServingConfig())
        known = await board.changed_since("", 0, 0)

        async def heard(act: Coroutine[Any, Any, T]) -> T:
            nonlocal known
            waiting = asyncio.create_task(board.changed_since(known.epoch, known.version, 60))
            await asyncio.sleep(0)
            found = await act
            async with asyncio.timeout(10):
                news = await waiting
            assert news.version > known.version
            known = news
            return found

        made = await heard(board.create("a", terms()))
        await heard(board.change("a", made.id, {"label": "x"}))
        listener = await heard(board.listen("a", made.id))
        await heard(board.leave(listener))
        await heard(board.remove("a", made.id))

    asyncio.run(run())


def test_a_listener_hears_its_hits_in_order_and_those_of_its_watch_alone() -> None:
    async def run() -> None:
        board = Board(ServingConfig())
        first, second = [(await board.create("a", terms())).id for _ in range(2)]
        listeners = [await board.listen("a", one) for one in (first, first, second)]
        waiting = asyncio.create_task(board.take(listeners[0], 60))
        await asyncio.sleep(0)
        await board.publish([(first, "1"), (second, "2"), (first, "3")], {second: 2})
        async with asyncio.timeout(10):
            assert await waiting == HitBatch(("1", "3"), 0, None)
        assert await board.take(listeners[1], 0) == HitBatch(("1", "3"), 0, None)
        assert await board.take(listeners[2], 0) == HitBatch(("2",), 2, None)

    asyncio.run(run())


def test_a_watch_that_is_over_ends_its_own_listeners_alone_after_their_last_hits() -> None:
    async def run() -> None:
        clock = Clock()
        board = Board(ServingConfig(), clock=clock)
        short, gone, long = [
            (await board.create("a", terms(seconds))).id for seconds in (10, 1000, 1000)
        ]
        listeners = [await board.listen("a", one) for one in (short, gone, long)]
        await board.publish([(short, "last")], {})
        waiting = asyncio.create_task(board.take(listeners[1], 60))
        await asyncio.sleep(0)
        await board.remove("a", gone)
        async with asyncio.timeout(10):
            assert (await waiting).ended == "deleted"  # at once
        clock.now += 9.5
        assert await board.take(listeners[0], 0) == HitBatch(("last",), 0, None)
        clock.now += 0.5
        ended = [(await board.take(listener, 0)).ended for listener in listeners]
        assert ended == ["expired", "deleted", None]

    asyncio.run(run())


def test_who_listens_is_told_of_lost_hits_of_silence_and_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "WAIT_SECONDS", 0.01)
    lines: list[str] = []

    async def run() -> None:
        board = Board(ServingConfig(max_listener_hits=2))
        watch_id = (await board.create("a", terms())).id

        async def write(line: str) -> None:
            lines.append(line)
            if "listening" in line:
                await board.publish([(watch_id, str(place)) for place in range(5)], {})
            elif "waiting" in line:
                await board.remove("a", watch_id)

        await listeners.listen_to(board, "a", watch_id, write)
        assert not board._listeners.listened()
        assert lines[0] == json.dumps({"listening": watch_id}, separators=(",", ":"))

    asyncio.run(asyncio.wait_for(run(), 20))
    assert lines[1:] == ['{"dropped":3}', "3", "4", '{"waiting":true}', '{"end":"deleted"}']


def test_a_listener_that_takes_now_and_then_is_kept() -> None:
    async def run() -> None:
        clock = Clock()
        board = Board(ServingConfig(), clock=clock)
        listener = await board.listen("a", (await board.create("a", terms(1000))).id)
        for _ in range(4):
            clock.now += 40
            await board.take(listener, 0)
        await board.leave(listener)
        await board.leave(listener)
        with pytest.raises(UnknownListenerError):
            await board.take(listener, 0)

    asyncio.run(run())


def test_listeners_are_limited_for_a_watch_and_for_a_client() -> None:
    async def run() -> None:
        board = Board(ServingConfig(max_watch_listeners=2, max_listeners_per_client=3))
        first, second = [(await board.create("a", terms())).id for _ in range(2)]
        other = (await board.create("b", terms())).id
        with pytest.raises(UnknownWatchError):
            await board.listen("b", first)
        (one, _) = [await board.listen("a", first) for _ in range(2)]
        with pytest.raises(ListenerLimitError, match="2 listen to this watch"):
            await board.listen("a", first)
        await board.listen("a", second)
        with pytest.raises(ListenerLimitError, match="3 listen to your watches"):
            await board.listen("a", second)
        await board.listen("b", other)
        await board.leave(one)
        await board.listen("a", second)

    asyncio.run(run())


def test_a_board_lives_by_time_that_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    now, jump = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + jump)

    async def run() -> None:
        nonlocal jump
        board = Board(ServingConfig())
        made, short = [await board.create("a", terms(seconds)) for seconds in (1000, 0.2)]
        assert made.created_at == pytest.approx(now(), abs=60)
        listener = await board.listen("a", made.id)
        for other in (1e6, -1e6):
            jump = other
            assert made in await board.owned("a")
            assert (await board.take(listener, 0)).ended is None
        while short in await board.owned("a"):
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_other_limits_hold_from_when_they_are_told() -> None:
    async def run() -> None:
        board = Board(ServingConfig(max_watches_per_client=1))
        await board.create("a", terms())
        await board.configure(ServingConfig(max_watches_per_client=2, max_watches=2))
        await board.create("a", terms())
        with pytest.raises(WatchLimitError, match="this server holds 2 watches"):
            await board.create("b", terms())

    asyncio.run(run())


class Shaky(Board):
    """A board that does not answer while it `is_down`, and notes what was published."""

    is_down = False

    def __init__(self, config: ServingConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.told: list[tuple[list, dict]] = []

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        self._check()
        found = await super().changed_since(epoch, version, wait_seconds)
        self._check()
        return found

    async def publish(self, hits: Sequence[tuple[str, str]], lost: Mapping[str, int]) -> None:
        self._check()
        self.told.append((list(hits), dict(lost)))

    def _check(self) -> None:
        if self.is_down:
            raise WatchesDownError("down")


def test_hits_that_could_not_be_passed_on_are_told_with_the_next() -> None:
    lost: list[int] = []

    async def run() -> None:
        board = Shaky(ServingConfig())
        outbox = HitPublisher(board, most=2, on_lost=lost.append)
        board.is_down = True
        for place in range(3):
            outbox.put("v", str(place))
        await outbox._task
        board.is_down = False
        outbox.put("w", "3")
        await outbox._task
        outbox.put("w", "4")
        await outbox._task
        assert board.told == [([("w", "3")], {"v": 3}), ([("w", "4")], {})]

    asyncio.run(run())
    assert lost == [1, 2]


def test_the_copy_of_the_watches_follows_is_used_while_there_is_no_news_and_catches_up() -> None:
    async def run() -> None:
        board = Shaky(ServingConfig(), clock=Clock())
        made = await board.create("a", terms())
        live = LiveWatches(board)
        async with asyncio.timeout(20), live.followed(), live.followed():
            assert [one.watch for one in live.of("door", "a")] == [made]
            assert live.of("door", "b") == []
            assert live.now() == pytest.approx(1000, abs=10)  # the board's, not this machine's
            board.is_down = True
            second = await board.create("a", terms())
            await asyncio.sleep(0)
            assert [one.watch for one in live.of("door", "a")] == [made]
            board.is_down = False
            while len(live) < 2:
                await asyncio.sleep(0.01)
            await board.remove("a", made.id)
            while len(live) > 1:
                await asyncio.sleep(0.01)
            assert [one.watch for one in live.of("door", "a")] == [second]
            await board.listen("a", second.id)
            while not live.of("door", "b"):
                await asyncio.sleep(0.01)
        assert live._task is None
        board.is_down = True
        with pytest.raises(WatchesDownError):
            async with live.followed():
                pass
        assert live._followers == 0

    asyncio.run(run())


def test_an_answer_that_another_poll_has_overtaken_changes_nothing() -> None:
    async def run() -> None:
        board = Board(ServingConfig())
        live = LiveWatches(board)
        made = await board.create("a", terms())
        old = await board.changed_since("", 0, 0)
        live._apply(old)
        await board.remove("a", made.id)
        live._apply(await board.changed_since(old.epoch, old.version, 0))
        live._apply(old)
        assert len(live) == 0

    asyncio.run(run())


# -- frames on their way -----------------------------------------------------------------------


async def _items(count: int, error: Exception | None = None) -> AsyncIterator[int]:
    for place in range(count):
        yield place
    if error is not None:
        raise error


def test_answers_are_written_in_the_order_of_the_frames_so_many_at_a_time() -> None:
    begun: list[int] = []
    most_at_once, written = 0, []

    async def answer(item: int) -> int:
        nonlocal most_at_once
        begun.append(item)
        most_at_once = max(most_at_once, len(begun) - len(written))
        for _ in range(10 - item):  # later ones are faster
            await asyncio.sleep(0)
        return item

    async def write(item: int) -> None:
        written.append(item)

    asyncio.run(pump_all(_items(9), answer, write, limit=3))
    assert written == list(range(9))
    assert most_at_once == 3


@pytest.mark.parametrize("is_latest", [False, True])
def test_what_ends_a_feed_comes_after_the_answers_to_what_came_before(is_latest: bool) -> None:
    written: list[int] = []

    async def answer(item: int) -> int:
        await asyncio.sleep(0)
        return item

    async def write(item: int) -> None:
        written.append(item)

    async def dropped(count: int) -> None:
        written.extend([-1] * count)

    async def run() -> None:
        items = _items(3, ApiError(408, "idle", "no frame came"))
        if is_latest:
            await pump_latest(items, answer, write, on_dropped=dropped)
        else:
            await pump_all(items, answer, write, limit=2)

    with pytest.raises(ApiError, match="no frame came"):
        asyncio.run(run())
    assert written == ([-1, -1, 2] if is_latest else [0, 1, 2])


def test_the_newest_frame_is_answered_and_each_that_it_replaced_is_counted_once() -> None:
    slot = _Slot[str]()
    slot.put("a")
    assert slot.take() == ("a", 0)
    for item in "bcd":
        slot.put(item)
    assert slot.take() == ("d", 2)
    slot.put("e")
    slot.close()
    assert asyncio.run(slot.is_filled())
    assert slot.take() == ("e", 0)
    assert not asyncio.run(slot.is_filled())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_are_the_same_however_the_body_is_cut_and_a_limit_is_exact(size: int) -> None:
    body = b"ab\n\nabcde\nabcdef\nx" + b"y" * 30 + b"\nabcde\nlast"
    wanted = [b"ab", b"", b"abcde", None, None, b"abcde", b"last"]

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def run() -> list[bytes | None]:
        return [line async for line in split_lines(parts(), 5)]

    assert asyncio.run(run()) == wanted


def test_a_place_is_free_again_however_its_request_ends() -> None:
    slots = ClientLimit(2, "feeds", per_client=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), slots.slot("a"):
            raise ZeroDivisionError
    with slots.slot("a"), slots.slot("b"):
        for client in "abc":
            with pytest.raises(ApiError) as caught, slots.slot(client):
                pass
            assert (caught.value.status, caught.value.code) == (429, "too_many_feeds")
    with slots.slot("a"):
        with pytest.raises(ApiError, match="your limit of 1 feeds"), slots.slot("a"):
            pass
        with slots.slot("c"):
            pass


RAY = """
import asyncio, os, sys
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
import ray
from serving.config import ServingConfig
from serving.deploy.watch_actor import RayWatches
from serving.watches.live import LiveWatches
from serving.watches.watch import *

async def main():
    config = ServingConfig(max_watches_per_client=2)
    one, other = RayWatches(config), RayWatches(config)
    terms = Terms(classes=("husky",), recall=None, threshold=0, ttl_seconds=60)
    kept, gone = [await one.create("a", terms) for _ in range(2)]
    try:
        await other.create("a", terms)
    except WatchLimitError as error:
        assert str(error).startswith("you have 2 watches")
    else:
        raise AssertionError
    await other.remove("a", gone.id)
    listener = await one.listen("a", kept.id)
    await other.publish([(kept.id, "hit")], {kept.id: 4})
    assert await one.take(listener, 5) == HitBatch(("hit",), 4, None)
    live = LiveWatches(other)
    async with live.followed():
        before = live.version
        ray.kill(one._actor, no_restart=False)
        epoch = before[0]
        while epoch == before[0]:
            try:
                epoch = (await other.changed_since("", 0, 0)).epoch
            except WatchesDownError:
                await asyncio.sleep(0.1)
        assert await other.get("a", kept.id) == kept
        assert [watch.id for watch in await other.owned("a")] == [kept.id]
        try:
            await one.take(listener, 0)
        except UnknownListenerError:
            pass
        else:
            raise AssertionError
        new = await one.create("a", terms)
        while not any(held.watch == new for held in live.of("door", "a")):
            await asyncio.sleep(0.02)
        assert live.version[0] != before[0]
        assert len(live) == 2

ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False,
         object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1])
asyncio.run(asyncio.wait_for(main(), 60))
ray.shutdown()
print("all is well")
"""


@pytest.mark.slow
def test_watches_in_the_ray_actor_outlive_its_restart() -> None:
    with TemporaryDirectory(prefix="kway-ray-") as folder:
        run = subprocess.run(
            [sys.executable, "-c", RAY, folder], cwd=ROOT, capture_output=True, text=True
        )
    assert run.stdout.endswith("all is well\n"), run.stderr[-3000:]
