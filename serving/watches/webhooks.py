"""`Webhooks`: sends the stored hits of watches to their webhooks, at least once.

Each watch with a webhook has a cursor: the hits up to it have been delivered. The cursor is stored
after a delivery, so the hits after it are sent again if the process dies in between. As long as a
watch has hits after its cursor, a task sends them in batches, and waits longer after each failure.
"""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

from serving.config import ServingConfig
from serving.watches.hit_log import HitLog
from serving.watches.registry import Registry
from serving.watches.storage import Storage
from serving.watches.watch import Delivery, HitBatch, Watch, WatchesDownError
from serving.watches.webhook import Webhook
from serving.watches.webhook_request import DeliveryError, Sender

_SENT = "sent/"
_MAX_BATCH_HITS = 100
# Maximum number of concurrent requests per client and receiving host. A receiver that does not
# respond delays only requests of the same client to the same host.
_MAX_REQUESTS = 4
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 300.0


class DeliveryCounts(Protocol):
    """Metrics of webhooks."""

    def count_delivery(self, outcome: str) -> None:
        """Count a request. `outcome` is `ok` or `failed`."""
        ...

    def count_lost_hits(self, count: int) -> None:
        """Count hits that were dropped before they were delivered."""
        ...


class NoDeliveryCounts:
    def count_delivery(self, outcome: str) -> None:
        pass

    def count_lost_hits(self, count: int) -> None:
        pass


class _State:
    """The delivery of one watch. `batch_size` is the number of hits in a batch that has not been
    delivered: later hits wait, so that a repeated request has the same id and content."""

    def __init__(self, cursor: int, delivered_at: float | None = None) -> None:
        self.cursor, self.delivered_at = cursor, delivered_at
        self.failures = 0
        self.error: str | None = None
        self.next_attempt_at: float | None = None
        self.batch_size = 0
        self.retry = asyncio.Event()  # set to try again at once
        self.task: asyncio.Task[None] | None = None


class Webhooks:
    """The deliveries of the watches in `registry`. Use it from a single event loop."""

    def __init__(
        self,
        config: ServingConfig,
        storage: Storage,
        *,
        registry: Registry,
        log: HitLog,
        clock: Callable[[], float],
        counts: DeliveryCounts,
    ) -> None:
        self.config = config
        self._registry, self._log, self._clock, self._counts = registry, log, clock, counts
        self._sender: Sender | None = None  # created by the first delivery, which takes 20 ms
        self._states: dict[str, _State] = {}
        self._slots: defaultdict[tuple[str, str], asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, _MAX_REQUESTS)
        )
        self._load(storage)

    def resume(self) -> None:
        """Start to deliver the hits that an earlier process has not delivered."""
        self.wake(list(self._states))

    async def close(self) -> None:
        """Stop all deliveries and close the connections."""
        tasks = [state.task for state in self._states.values() if state.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()

    def wake(self, watch_ids: Iterable[str]) -> None:
        """Deliver the new hits of watches."""
        for watch_id in watch_ids:
            state = self._states.get(watch_id)
            if state is not None and (state.task is None or state.task.done()):
                state.task = asyncio.create_task(self._deliver(watch_id, state))

    async def begin(self, watch_id: str) -> None:
        """Skip the stored hits of a watch that is about to get a webhook. Raises
        WatchesDownError."""
        state = _State(self._log.last(watch_id))
        await self._log.append((), _stored(watch_id, state))
        self._states[watch_id] = state

    def update(self, watch: Watch) -> None:
        """Apply a change of a watch's webhook, and send a request without waiting for the next
        attempt."""
        if watch.webhook is None:
            self.end(watch.id)
            return
        self._states.setdefault(watch.id, _State(0)).retry.set()
        self.wake([watch.id])

    def end(self, watch_id: str) -> None:
        """Stop the delivery of a watch, except for a request that is being sent."""
        state = self._states.pop(watch_id, None)
        if state is not None:
            state.retry.set()
            self._log.delete({_SENT + watch_id: None})

    def shown(self, watch: Watch) -> Watch:
        """Return the watch with the state of its delivery."""
        state = self._states.get(watch.id)
        if state is None:
            return watch
        delivery = Delivery(
            cursor=state.cursor,
            pending=self._log.last(watch.id) - state.cursor,
            delivered_at=state.delivered_at,
            failures=state.failures,
            error=state.error,
            next_attempt_at=state.next_attempt_at,
        )
        return watch.model_copy(update={"delivery": delivery})

    def _load(self, storage: Storage) -> None:
        """Read the cursors, and delete those of watches that have ended."""
        for watch in self._registry.watches():
            if watch.webhook is not None:
                self._states[watch.id] = _State(0)
        for key, value in storage.items():
            if not key.startswith(_SENT):
                continue
            watch_id = key.removeprefix(_SENT)
            if watch_id in self._states:
                self._states[watch_id] = _State(**json.loads(value))
            else:
                self._log.delete({key: None})

    async def _deliver(self, watch_id: str, state: _State) -> None:
        while (due := self._due(watch_id, state)) is not None:
            client, webhook = due
            async with self._slots[client, webhook.host]:
                if self._due(watch_id, state) != due:  # it has changed in the meantime
                    continue
                state.retry.clear()  # a change during the request is tried at once
                end, error = await self._attempt(watch_id, webhook, state)
            if self._states.get(watch_id) is not state:
                return
            if error is None:
                await self._succeed(watch_id, state, end)
            else:
                await self._wait_for_retry(state, error)

    def _due(self, watch_id: str, state: _State) -> tuple[str, Webhook] | None:
        """Return the client and the webhook of a watch, or None if it has no hits to deliver."""
        if self._states.get(watch_id) is not state or self._log.last(watch_id) <= state.cursor:
            return None
        watch = self._registry.find(watch_id)
        if watch is None or watch.webhook is None:  # a new webhook could not be stored
            return None
        return watch.client, watch.webhook

    async def _attempt(
        self, watch_id: str, webhook: Webhook, state: _State
    ) -> tuple[int, str | None]:
        """Send the next batch. Return its last cursor, and the reason if this failed."""
        batch, end = self._next_batch(watch_id, state)
        message_id = f"{watch_id}_{state.cursor + 1}_{end}"
        try:
            try:
                webhook.check_allowed(self.config.webhook_hosts)
            except ValueError as error:  # the server was restarted with other hosts
                raise DeliveryError(str(error)) from error
            if self._sender is None:
                self._sender = Sender()
            await self._sender.send(webhook, message_id, _body(watch_id, end, batch))
        except DeliveryError as error:
            self._counts.count_delivery("failed")
            return end, str(error)
        self._counts.count_delivery("ok")
        self._counts.count_lost_hits(batch.dropped)
        return end, None

    def _next_batch(self, watch_id: str, state: _State) -> tuple[HitBatch, int]:
        most = state.batch_size or _MAX_BATCH_HITS
        batch, end = self._log.after(watch_id, state.cursor, most=most)
        state.batch_size = len(batch.lines)
        return batch, end

    async def _succeed(self, watch_id: str, state: _State, cursor: int) -> None:
        state.cursor, state.batch_size, state.delivered_at = cursor, 0, self._clock()
        state.failures, state.error, state.next_attempt_at = 0, None, None
        with suppress(WatchesDownError):  # the next delivery stores a later cursor
            await self._log.append((), _stored(watch_id, state))

    async def _wait_for_retry(self, state: _State, error: str) -> None:
        state.failures, state.error = state.failures + 1, error
        longest = min(_MAX_RETRY_SECONDS, _MIN_RETRY_SECONDS * 2.0 ** min(state.failures - 1, 60))
        seconds = longest * random.uniform(0.5, 1.0)
        state.next_attempt_at = self._clock() + seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await state.retry.wait()


def _stored(watch_id: str, state: _State) -> dict[str, bytes | None]:
    value = {"cursor": state.cursor, "delivered_at": state.delivered_at}
    return {_SENT + watch_id: json.dumps(value).encode()}


def _body(watch_id: str, cursor: int, batch: HitBatch) -> bytes:
    """Return the JSON of a request. The hits are stored as JSON."""
    head = f'"watch":"{watch_id}","cursor":{cursor},"dropped":{batch.dropped}'
    hits = ",".join(batch.lines)
    return f'{{"type":"watch.hits","data":{{{head},"hits":[{hits}]}}}}'.encode()
