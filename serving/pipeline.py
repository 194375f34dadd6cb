"""Pipelines from incoming items to outgoing answers, with a bounded number of items in flight."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from serving.api_error import ApiError

T = TypeVar("T")
R = TypeVar("R")


async def pump_all(
    items: AsyncIterator[T],
    answer: Callable[[T], Awaitable[R]],
    write: Callable[[R], Awaitable[None]],
    *,
    limit: int,
) -> None:
    """Answer every item, `limit` at a time, and write the answers in the order of the items.

    Reading pauses while `limit` items are in progress. An ApiError raised by `items` is re-raised
    after the answers to all earlier items are written. Any other error is raised immediately.
    """
    # `waiting` keeps the order of the items; None marks the end. `room` is released only after an
    # answer is written, so no new items are read while the client is slow.
    room, waiting = asyncio.Semaphore(limit), asyncio.Queue[asyncio.Task[R] | None]()

    async def read() -> ApiError | None:
        try:
            while True:
                await room.acquire()
                item = await anext(items)
                waiting.put_nowait(tasks.create_task(_awaited(answer(item))))
        except StopAsyncIteration:
            return None
        except ApiError as error:
            return error
        finally:
            waiting.put_nowait(None)

    try:
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(read())
            while (task := await waiting.get()) is not None:
                await write(await task)
                room.release()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    if (early := reader.result()) is not None:
        raise early


async def pump_latest(
    items: AsyncIterator[T],
    answer: Callable[[T], Awaitable[R]],
    write: Callable[[R], Awaitable[None]],
    *,
    on_dropped: Callable[[int], Awaitable[None]],
) -> None:
    """Answer one item at a time, always the newest, and report how many items were dropped.

    Use this for live feeds: reading never waits for the answers, and an item that a newer one has
    replaced is not answered.
    """
    slot = _Slot[T]()

    async def read() -> ApiError | None:
        try:
            async for item in items:
                slot.put(item)
        except ApiError as error:
            return error
        finally:
            slot.close()
        return None

    try:
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(read())
            while await slot.is_filled():
                item, dropped = slot.take()
                if dropped:
                    await on_dropped(dropped)
                await write(await answer(item))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    if (early := reader.result()) is not None:
        raise early


async def _awaited(work: Awaitable[R]) -> R:
    # `create_task` accepts only coroutines.
    return await work


class _Slot(Generic[T]):
    """A buffer for one item; a newer item replaces the older one."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._dropped, self._is_closed = 0, False
        self._news = asyncio.Event()

    def put(self, item: T) -> None:
        self._dropped += len(self._items)  # 1 if the previous item was not taken
        self._items = [item]
        self._news.set()

    def close(self) -> None:
        self._is_closed = True
        self._news.set()

    async def is_filled(self) -> bool:
        """Wait for an item. Return False if the slot is closed and empty."""
        while not self._items and not self._is_closed:
            self._news.clear()
            await self._news.wait()
        return bool(self._items)

    def take(self) -> tuple[T, int]:
        """Return the item and the number of items that it replaced since the last call."""
        (item,), dropped = self._items, self._dropped
        self._items, self._dropped = [], 0
        return item, dropped
