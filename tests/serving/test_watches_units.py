"""Unit tests of watches. Only the last one uses Ray."""

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
from serving.tokens import Client
from serving.watches import feed_positions, listeners
from serving.watches import live as live_module
from serving.watches.board import Board
from serving.watches.live import HitPublisher, LiveWatches
from serving.watches.registry import Registry
from serving.watches.storage import MemoryStorage
from serving.watches.watch import (
    Changes,
    HitBatch,
    ListenerLimitError,
    NoWatchesError,
    Terms,
    UnknownCursorError,
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


def test_a_watch_expires_unless_a_change_renews_it() -> None:
    clock, storage = Clock(), MemoryStorage()
    registry = Registry(ServingConfig(), clock=clock, storage=storage)
    first, second = registry.create("a", terms()), registry.create("a", terms(20))
    clock.now += 9
    assert registry.change("a", first.id, {}).expires_at == clock.now + 10
    clock.now += 10
    with pytest.raises(UnknownWatchError):
        registry.get("a", first.id)
    assert registry.sweep() == [first.id]
    assert [one.id for one in registry.owned("a")] == [second.id] == list(storage)


def test_renewals_do_not_accumulate_and_the_last_one_determines_when_a_watch_expires() -> None:
    clock = Clock()
    registry = Registry(ServingConfig(), clock=clock, storage=MemoryStorage())
    made = [registry.create("a", terms(10 + index)) for index in range(3)]
    for _ in range(1000):
        clock.now += 1
        assert registry.change("a", made[2].id, {}).expires_at == clock.now + 12
    assert len(registry._expiries) < 200
    assert sorted(registry.sweep()) == sorted(one.id for one in made[:2])
    clock.now += 12
    assert registry.sweep() == [made[2].id]
    assert registry.owned("a") == registry.sweep() == []


def test_a_registry_with_a_limit_of_0_keeps_no_watches() -> None:
    registry = Registry(ServingConfig(max_watches=0), clock=Clock(), storage=MemoryStorage())
    with pytest.raises(NoWatchesError, match="--max-watches 0"):
        registry.create("a", terms())
    assert registry.owned("a") == []


def test_the_changes_since_a_version_contain_new_and_removed_watches() -> None:
    registry = Registry(
        ServingConfig(max_watches_per_client=1), clock=Clock(), storage=MemoryStorage()
    )
    first = registry.create("a", terms())
    with pytest.raises(WatchLimitError):
        registry.create("a", terms())
    start = registry.changes_since("", 0)
    assert start.is_complete
    assert registry.changes_since(start.epoch, start.version).watches == ()
    second = registry.create("b", terms())
    registry.remove("a", first.id)
    changes = registry.changes_since(start.epoch, start.version)
    assert (changes.is_complete, changes.removed) == (False, (first.id,))
    assert changes.watches == (second,)
    empty = registry.changes_since(changes.epoch, changes.version)
    assert (empty.watches, empty.removed) == ((), ())
    for _ in range(1001):
        registry.remove("a", registry.create("a", terms()).id)
    late = registry.changes_since(start.epoch, start.version)
    assert late.is_complete
    assert late.watches == (second,)


def line(value: object = "x") -> str:
    return json.dumps({"id": value}, separators=(",", ":"))


def stored(value: object, cursor: int) -> str:
    return json.dumps({"id": value, "cursor": cursor}, separators=(",", ":"))


async def publish(board: Board, watch_id: str, *values: object) -> list[int | None]:
    return await board.publish([(watch_id, line(value)) for value in values], {})


def test_the_oldest_hits_of_a_watch_are_dropped_and_a_listener_receives_their_count() -> None:
    async def run() -> None:
        board = Board(ServingConfig(max_watch_hits=3))
        watch_id = (await board.create("a", terms())).id
        listener, cursor = await board.listen("a", watch_id, None)
        assert cursor == 0
        assert await publish(board, watch_id, *range(5)) == [1, 2, 3, 4, 5]
        expected = tuple(stored(index, index + 1) for index in (2, 3, 4))
        assert await board.take(listener, 0) == HitBatch(expected, 2, None)
        assert await board.take(listener, 0) == HitBatch((), 0, None)

    asyncio.run(run())


def test_the_oldest_hits_of_all_watches_are_dropped_and_their_cursors_not_used_again() -> None:
    storage = MemoryStorage()

    async def run() -> None:
        board = Board(ServingConfig(max_hits=3), clock=Clock(), storage=storage)
        first, second = [(await board.create("a", terms())).id for _ in range(2)]
        assert await publish(board, first, "x", "y") == [1, 2]
        assert await publish(board, second, *range(3)) == [1, 2, 3]
        assert await publish(board, "ended", "x") == [None]
        board = Board(ServingConfig(), clock=Clock(), storage=storage)
        listener, _ = await board.listen("a", first, 1)
        assert await board.take(listener, 0) == HitBatch((), 1, None)
        assert await publish(board, first, "z") == [3]
        assert (await board.take(listener, 0)).lines == (stored("z", 3),)

    asyncio.run(run())


def test_a_listener_resumes_after_a_cursor_even_if_the_process_restarts() -> None:
    storage = MemoryStorage()

    async def run() -> None:
        board = Board(ServingConfig(), clock=Clock(), storage=storage)
        first, second = [(await board.create("a", terms())).id for _ in range(2)]
        await board.publish([(first, line(1)), (second, line(2)), (first, line(3))], {})
        board = Board(ServingConfig(), clock=Clock(), storage=storage)
        await publish(board, first, 4)
        for after, expected in ((0, [1, 3, 4]), (1, [3, 4]), (3, []), (None, [])):
            listener, cursor = await board.listen("a", first, after)
            assert cursor == (3 if after is None else after)
            lines = (await board.take(listener, 0)).lines
            assert [json.loads(one)["id"] for one in lines] == expected
        with pytest.raises(UnknownCursorError, match="the newest cursor of this watch is 3"):
            await board.listen("a", first, 4)
        assert len([key for key in storage if key.startswith("hit/")]) == 4
        await board.remove("a", first)
        await publish(board, second)  # the next transaction
        assert len([key for key in storage if key.startswith("hit/")]) == 1

    asyncio.run(run())


def test_hits_of_ended_watches_are_deleted_at_the_next_start() -> None:
    storage = MemoryStorage()

    async def run() -> None:
        board = Board(ServingConfig(), clock=Clock(), storage=storage)
        made = await board.create("a", terms())
        await publish(board, made.id, "x")
        del storage[made.id]
        board = Board(ServingConfig(), clock=Clock(), storage=storage)
        await board.publish([], {})
        assert list(storage.items()) == []

    asyncio.run(run())


class FailingStorage(MemoryStorage):
    """Records the transactions, and raises an error while `is_full` is set."""

    is_full = False

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        if self.is_full:
            raise WatchesDownError("no space left on device")
        self.sizes.append(len(changes))
        super().apply(changes)


def test_hits_that_arrive_during_a_transaction_share_the_next_one() -> None:
    async def run() -> None:
        storage = FailingStorage()
        board = Board(ServingConfig(), storage=storage)
        watch_id = (await board.create("a", terms())).id
        many = [asyncio.create_task(publish(board, watch_id, index)) for index in range(50)]
        assert sorted([(await one)[0] for one in many]) == list(range(1, 51))
        assert sum(storage.sizes) == 51
        assert len(storage.sizes) <= 3

    asyncio.run(run())


def test_hits_that_cannot_be_written_are_not_delivered_and_not_counted_as_dropped() -> None:
    async def run() -> None:
        storage = FailingStorage()
        board = Board(ServingConfig(), storage=storage)
        watch_id = (await board.create("a", terms())).id
        listener, _ = await board.listen("a", watch_id, None)
        await publish(board, watch_id, 1)
        storage.is_full = True
        for change in (publish(board, watch_id, 2), board.create("a", terms())):
            with pytest.raises(WatchesDownError, match="no space left"):
                await change
        storage.is_full = False
        await publish(board, watch_id, 3)
        batch = await board.take(listener, 0)
        assert [json.loads(one)["id"] for one in batch.lines] == [1, 3]
        assert batch.dropped == 0

    asyncio.run(run())


def test_positions_of_feeds_survive_a_restart_within_a_limit_per_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_positions, "_MAX_PER_CLIENT", 2)
    storage = MemoryStorage()

    async def run() -> None:
        board = Board(ServingConfig(), storage=storage)
        await board.publish([], {("a", "one"): 1, ("a", "two"): "f", ("b", "one"): 7})
        await board.publish([], {("a", "one"): 2, ("a", "three"): 3})
        await board.publish([], {})
        board = Board(ServingConfig(), storage=storage)
        feeds = [("a", "one"), ("a", "two"), ("a", "three"), ("b", "one"), ("b", "two")]
        assert [await board.position(*one) for one in feeds] == [2, None, 3, 7, None]

    asyncio.run(run())


def test_a_listener_whose_replica_died_is_removed() -> None:
    async def run() -> None:
        clock = Clock()
        board = Board(ServingConfig(max_watch_listeners=1), clock=clock)
        watch_id = (await board.create("a", terms(1000))).id
        listener, _ = await board.listen("a", watch_id, None)
        clock.now += 61
        await board.listen("a", watch_id, None)
        with pytest.raises(UnknownListenerError):
            await board.take(listener, 0)

    asyncio.run(run())


def test_a_restarted_registry_restores_its_watches_with_a_new_epoch() -> None:
    storage = MemoryStorage()
    before = Registry(ServingConfig(), clock=Clock(), storage=storage)
    made = before.create("a", terms())
    after = Registry(ServingConfig(), clock=Clock(), storage=storage)
    assert after.owned("a") == [made]
    assert before.epoch != after.epoch
    changes = after.changes_since(before.epoch, before.version)
    assert (changes.is_complete, changes.watches) == (True, (made,))


def test_owned_watches_are_sorted_by_creation_time() -> None:
    clock = Clock()
    registry = Registry(ServingConfig(), clock=clock, storage=MemoryStorage())
    made = []
    for _ in range(4):
        clock.now -= 1  # so that creation times are not in insertion order
        made.append(registry.create("a", terms(100)))
    assert registry.owned("a") == made[::-1]


def test_each_kind_of_change_wakes_waiting_polls() -> None:
    async def run() -> None:
        board = Board(ServingConfig())
        known = await board.changed_since("", 0, 0)

        async def wakes_poll(action: Coroutine[Any, Any, T]) -> T:
            nonlocal known
            waiting = asyncio.create_task(board.changed_since(known.epoch, known.version, 60))
            await asyncio.sleep(0)
            result = await action
            async with asyncio.timeout(10):
                changes = await waiting
            assert changes.version > known.version
            known = changes
            return result

        made = await wakes_poll(board.create("a", terms()))
        await wakes_poll(board.change("a", made.id, {"label": "x"}))
        await wakes_poll(board.remove("a", made.id))

    asyncio.run(run())


def test_a_listener_receives_the_hits_of_its_watch_in_order() -> None:
    async def run() -> None:
        board = Board(ServingConfig())
        first, second = [(await board.create("a", terms())).id for _ in range(2)]
        listeners = [(await board.listen("a", one, None))[0] for one in (first, first, second)]
        waiting = asyncio.create_task(board.take(listeners[0], 60))
        await asyncio.sleep(0)
        await board.publish([(first, line(1)), (second, line(2)), (first, line(3))], {})
        expected = HitBatch((stored(1, 1), stored(3, 2)), 0, None)
        async with asyncio.timeout(10):
            assert await waiting == expected
        assert await board.take(listeners[1], 0) == expected
        assert await board.take(listeners[2], 0) == HitBatch((stored(2, 1),), 0, None)

    asyncio.run(run())


def test_a_watch_that_ends_closes_its_listeners_after_their_last_hits() -> None:
    async def run() -> None:
        clock = Clock()
        board = Board(ServingConfig(), clock=clock)
        short, deleted, long = [
            (await board.create("a", terms(seconds))).id for seconds in (10, 1000, 1000)
        ]
        listeners = [(await board.listen("a", one, None))[0] for one in (short, deleted, long)]
        await publish(board, short, "first")
        waiting = asyncio.create_task(board.take(listeners[1], 60))
        await asyncio.sleep(0)
        await board.remove("a", deleted)
        async with asyncio.timeout(10):
            assert (await waiting).ended == "deleted"  # immediately
        clock.now += 9.5
        assert await board.take(listeners[0], 0) == HitBatch((stored("first", 1),), 0, None)
        await publish(board, short, "last")
        clock.now += 0.5
        assert await board.take(listeners[0], 0) == HitBatch((stored("last", 2),), 0, "expired")
        ended = [(await board.take(listener, 0)).ended for listener in listeners]
        assert ended == ["expired", "deleted", None]

    asyncio.run(run())


def test_listeners_receive_dropped_waiting_and_end_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "WAIT_SECONDS", 0.01)
    lines: list[str] = []
    dropped: list[int] = []

    async def run() -> None:
        board = Board(ServingConfig(max_watch_hits=2))
        watch_id = (await board.create("a", terms())).id

        async def write(line: str) -> None:
            lines.append(line)
            if "listening" in line:
                await publish(board, watch_id, *range(5))
            elif "waiting" in line:
                await board.remove("a", watch_id)

        await listeners.listen_to(board, Client("a", "a"), watch_id, None, write, dropped.append)
        assert board._listeners.of(watch_id) == []
        assert json.loads(lines[0]) == {"listening": watch_id, "cursor": 0}

    asyncio.run(asyncio.wait_for(run(), 20))
    hits = [stored(3, 4), stored(4, 5)]
    assert lines[1:] == ['{"dropped":3}', *hits, '{"waiting":true}', '{"end":"deleted"}']
    assert dropped == [3]


def test_a_listener_that_takes_hits_regularly_does_not_expire() -> None:
    async def run() -> None:
        clock = Clock()
        board = Board(ServingConfig(), clock=clock)
        listener, _ = await board.listen("a", (await board.create("a", terms(1000))).id, None)
        for _ in range(4):
            clock.now += 40
            await board.take(listener, 0)
        await board.leave(listener)
        await board.leave(listener)
        with pytest.raises(UnknownListenerError):
            await board.take(listener, 0)

    asyncio.run(run())


def test_listeners_are_limited_per_watch_and_per_client() -> None:
    async def run() -> None:
        board = Board(ServingConfig(max_watch_listeners=2, max_listeners_per_client=3))
        first, second = [(await board.create("a", terms())).id for _ in range(2)]
        other = (await board.create("b", terms())).id
        with pytest.raises(UnknownWatchError):
            await board.listen("b", first, None)
        (one, _), _ = [await board.listen("a", first, None) for _ in range(2)]
        with pytest.raises(ListenerLimitError, match="limit of 2 listeners"):
            await board.listen("a", first, None)
        await board.listen("a", second, None)
        with pytest.raises(ListenerLimitError, match="your limit of 3 listeners"):
            await board.listen("a", second, None)
        await board.listen("b", other, None)
        await board.leave(one)
        await board.listen("a", second, None)

    asyncio.run(run())


def test_changing_the_system_clock_does_not_affect_a_board(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, jump = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + jump)

    async def run() -> None:
        nonlocal jump
        board = Board(ServingConfig())
        made, short = [await board.create("a", terms(seconds)) for seconds in (1000, 0.2)]
        assert made.created_at == pytest.approx(now(), abs=60)
        listener, _ = await board.listen("a", made.id, None)
        for other in (1e6, -1e6):
            jump = other
            assert made in await board.owned("a")
            assert (await board.take(listener, 0)).ended is None
        while short in await board.owned("a"):
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_new_limits_apply_immediately() -> None:
    async def run() -> None:
        board = Board(ServingConfig(max_watches_per_client=1))
        await board.create("a", terms())
        await board.configure(ServingConfig(max_watches_per_client=2, max_watches=2))
        await board.create("a", terms())
        with pytest.raises(WatchLimitError, match="limit of 2 watches"):
            await board.create("b", terms())

    asyncio.run(run())


class UnreliableBoard(Board):
    """A board that counts published hits, and raises errors while `is_down` is set."""

    is_down = False

    def __init__(self, config: ServingConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.published: list[int] = []

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        self._check()
        changes = await super().changed_since(epoch, version, wait_seconds)
        self._check()
        return changes

    async def publish(
        self, hits: Sequence[tuple[str, str]], positions: Mapping[tuple[str, str], str | int]
    ) -> list[int | None]:
        self._check()
        self.published.append(len(hits))
        return await super().publish(hits, positions)

    def _check(self) -> None:
        if self.is_down:
            raise WatchesDownError("down")


def test_frames_share_calls_and_wait_until_their_hits_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "_RETRY_SECONDS", 0.01)

    async def run() -> None:
        board = UnreliableBoard(ServingConfig())
        watch_id = (await board.create("a", terms())).id
        publisher = HitPublisher(board, retry_seconds=20)
        board.is_down = True
        frames = [
            asyncio.create_task(publisher.store([(watch_id, line(index))] * index))
            for index in range(5)
        ]
        done, _ = await asyncio.wait(frames, timeout=0.1)
        assert not done
        board.is_down = False
        found = [await frame for frame in frames]
        assert [cursor for cursors in found for cursor in cursors] == list(range(1, 11))
        assert board.published == [10]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_frame_fails_if_its_hits_cannot_be_stored_and_positions_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(live_module, "_POSITION_SECONDS", 0.01)

    async def run() -> None:
        board = UnreliableBoard(ServingConfig())
        publisher = HitPublisher(board, retry_seconds=0.05)
        board.is_down = True
        publisher.set_position("a", "door", 1)
        with pytest.raises(WatchesDownError):
            await publisher.store([("w", line())])
        board.is_down = False
        await publisher.flush()
        assert await board.position("a", "door") == 1
        publisher.set_position("a", "door", 2)
        while await board.position("a", "door") != 2:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_copy_of_the_watches_follows_changes_and_survives_an_outage() -> None:
    async def run() -> None:
        board = UnreliableBoard(ServingConfig(), clock=Clock())
        made = await board.create("a", terms())
        live = LiveWatches(board)
        async with asyncio.timeout(20), live.followed(), live.followed():
            assert live.of("door") == [made]
            assert live.now() == pytest.approx(
                1000, abs=10
            )  # the clock of the board, not of this machine
            board.is_down = True
            second = await board.create("a", terms())
            await asyncio.sleep(0)
            assert live.of("door") == [made]
            board.is_down = False
            while len(live) < 2:
                await asyncio.sleep(0.01)
            await board.remove("a", made.id)
            while len(live) > 1:
                await asyncio.sleep(0.01)
            assert live.of("door") == [second]
        assert live._task is None
        board.is_down = True
        with pytest.raises(WatchesDownError):
            async with live.followed():
                pass
        assert live._followers == 0

    asyncio.run(run())


def test_outdated_changes_are_ignored() -> None:
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


# -- pipeline of frames ------------------------------------------------------------------------


async def _items(count: int, error: Exception | None = None) -> AsyncIterator[int]:
    for index in range(count):
        yield index
    if error is not None:
        raise error


def test_frames_are_processed_concurrently_and_answered_in_order() -> None:
    started: list[int] = []
    max_concurrent, written = 0, []

    async def answer(item: int) -> int:
        nonlocal max_concurrent
        started.append(item)
        max_concurrent = max(max_concurrent, len(started) - len(written))
        for _ in range(10 - item):  # later ones are faster
            await asyncio.sleep(0)
        return item

    async def write(item: int) -> None:
        written.append(item)

    asyncio.run(pump_all(_items(9), answer, write, limit=3))
    assert written == list(range(9))
    assert max_concurrent == 3


@pytest.mark.parametrize("is_latest", [False, True])
def test_the_error_that_ends_a_feed_follows_the_answers_to_earlier_frames(is_latest: bool) -> None:
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


def test_the_newest_frame_is_processed_and_replaced_frames_are_counted() -> None:
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
def test_lines_are_independent_of_chunk_boundaries_and_the_limit_is_exact(size: int) -> None:
    body = b"ab\n\nabcde\nabcdef\nx" + b"y" * 30 + b"\nabcde\nlast"
    expected = [b"ab", b"", b"abcde", None, None, b"abcde", b"last"]

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def run() -> list[bytes | None]:
        return [line async for line in split_lines(parts(), 5)]

    assert asyncio.run(run()) == expected


def test_a_slot_is_freed_even_if_the_request_fails() -> None:
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
    first, second = [await one.create("a", terms) for _ in range(2)]
    try:
        await other.create("a", terms)
    except WatchLimitError as error:
        assert str(error).startswith("you have reached your limit of 2 watches")
    else:
        raise AssertionError
    await other.remove("a", second.id)
    listener, _ = await one.listen("a", first.id, None)
    assert await other.publish([(first.id, '{"id":1}')], {("a", "door"): 7}) == [1]
    assert await one.take(listener, 5) == HitBatch(('{"id":1,"cursor":1}',), 0, None)
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
        assert await other.get("a", first.id) == first
        assert await other.position("a", "door") == 7
        listener, cursor = await other.listen("a", first.id, 0)
        assert await other.take(listener, 5) == HitBatch(('{"id":1,"cursor":1}',), 0, None)
        listener = "other"
        assert [watch.id for watch in await other.owned("a")] == [first.id]
        try:
            await one.take(listener, 0)
        except UnknownListenerError:
            pass
        else:
            raise AssertionError
        new = await one.create("a", terms)
        while new not in live.of("door"):
            await asyncio.sleep(0.02)
        assert live.version[0] != before[0]
        assert len(live) == 2

ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False,
         object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1])
asyncio.run(asyncio.wait_for(main(), 60))
ray.shutdown()
print("passed")
"""


@pytest.mark.slow
def test_watches_survive_a_restart_of_the_ray_actor() -> None:
    with TemporaryDirectory(prefix="kway-ray-") as folder:
        run = subprocess.run(
            [sys.executable, "-c", RAY, folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert run.stdout.endswith("passed\n"), run.stderr[-3000:]
