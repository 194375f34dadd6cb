"""Evaluate the frames of a feed in a replica.

Each frame requires one forward pass, regardless of the number of watches. If no watch selects the
feed, the model does not process its frames. A frame is answered once its hits are stored.

A feed can last for days, so each of its frames is processed by the version of the model that is
current at that time, with the classes of the watches looked up by name in that version.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from pydantic import BaseModel

from serving.api_error import ApiError
from serving.pipeline import pump_all, pump_latest
from serving.schemas import ErrorDetail
from serving.service import Service
from serving.watches.live import HitPublisher, LiveWatches
from serving.watches.matching import Criteria, Match, MatchPlan
from serving.watches.schemas import (
    Acknowledged,
    Dropped,
    FeedCounts,
    FeedDone,
    FrameError,
    WatchHit,
)
from serving.watches.watch import Watch, Watches, WatchesDownError
from trainer.bundle.bundle import Bundle


@dataclass(frozen=True)
class Frame:
    """A frame. `id` is set by the client; the default is the position in the feed. `content` is the
    model input, or the error if the frame is invalid."""

    id: str | int
    content: bytes | str | ApiError
    time: str | int | float | None = None


# `Service.features` prefixes its errors with this name and an index, which is always 0 here.
_FIELD = "frame"


class WatchCounts(Protocol):
    """Metrics of frames and hits."""

    def count_frame(self, outcome: str) -> None:
        """Count a frame. `outcome` is `ok`, `unwatched` (no watch selects it), `dropped` or an
        error code."""
        ...

    def count_hits(self, count: int) -> None: ...

    def count_lost_hits(self, count: int) -> None:
        """Count hits that were dropped before a listener received them."""
        ...

    def set_watches(self, count: int) -> None:
        """Set the number of watches in this replica's copy."""
        ...


@dataclass(frozen=True, eq=False)
class _Planned:
    """The plan for a version of the watches; None if no watch selects the feed."""

    version: tuple[str, int]
    plan: MatchPlan | None


class Feeds:
    """State shared by all feeds of a model in a replica: its copy of the watches, their plans, and
    the hits to store. `current` returns the current version of the model."""

    def __init__(
        self, current: Callable[[], Service], watches: Watches, counts: WatchCounts
    ) -> None:
        self._current, self.counts = current, counts
        self.config = self.service.config
        self.live = LiveWatches(watches)
        self.publisher = HitPublisher(watches, retry_seconds=self.config.request_timeout_seconds)
        # An entry is removed when its version is freed, so a plan must not refer to the service.
        self._plans: WeakKeyDictionary[Service, _Plans] = WeakKeyDictionary()
        self._planning = asyncio.Lock()

    @property
    def service(self) -> Service:
        return self._current()

    async def planned(self, service: Service, feed: str) -> _Planned:
        """Return the plan for the current watches. Connections to the same feed share it, and all
        feeds share the criteria."""
        async with self._planning:
            plans = self._plans.get(service)
            if plans is None:
                plans = self._plans[service] = _Plans(service.model.bundle)
            found = plans.by_feed.get(feed)
            if found is None or found.version != self.live.version:
                version, watches = self.live.version, self.live.of(feed)
                plan = await service.in_thread(plans.make, watches, self.live)
                found = plans.by_feed[feed] = _Planned(version, plan)
                self.counts.set_watches(len(self.live))
            return found


class _Plans:
    """The plans of one version of the model."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._criteria = bundle, Criteria(bundle)
        self.by_feed: WeakValueDictionary[str, _Planned] = WeakValueDictionary()

    def make(self, watches: Sequence[Watch], live: LiveWatches) -> MatchPlan | None:
        pairs = self._criteria.of(watches, live)
        return MatchPlan(self._bundle, pairs) if pairs else None


@dataclass
class _FrameResult:
    """The result for one frame; `error` is set if it was rejected."""

    frame: Frame
    hits: Sequence[WatchHit] = ()
    error: ApiError | None = None


class Feed:
    """The frames that one connection sends to the feed `name`."""

    def __init__(
        self,
        feeds: Feeds,
        *,
        name: str,
        client: str,
        is_acknowledged: bool,
        write: Callable[[BaseModel], Awaitable[None]],
    ) -> None:
        self._feeds, self._name, self._client = feeds, name, client
        self._is_acknowledged, self._write_line = is_acknowledged, write
        self._counts = FeedCounts(frames=0, hits=0, errors=0, dropped=0)
        self._failed: set[str | int] = set()
        # An entry is removed when its version is freed.
        self._planned: WeakKeyDictionary[Service, _Planned] = WeakKeyDictionary()
        self._planning = asyncio.Lock()

    async def run(self, frames: AsyncIterator[Frame], *, latest: bool) -> None:
        """Process the frames, then write the counts. If `latest`, skip frames when newer ones are
        available."""
        if latest:
            await pump_latest(frames, self._process, self._write, on_dropped=self._drop)
        else:
            limit = self._feeds.config.max_frames_in_flight
            await pump_all(frames, self._process, self._write, limit=limit)
        await self._feeds.publisher.flush()
        await self._write_line(FeedDone(done=self._counts))

    async def _process(self, frame: Frame) -> _FrameResult:
        try:
            if isinstance(frame.content, ApiError):
                raise frame.content
            service = self._feeds.service
            plan = await self._current_plan(service)
            if plan is None:
                self._feeds.counts.count_frame("unwatched")
                return _FrameResult(frame)
            hits = await self._hits(frame, frame.content, service, plan)
        except ApiError as error:
            self._feeds.counts.count_frame(error.code)
            return _FrameResult(frame, error=error)
        self._feeds.counts.count_frame("ok")
        return _FrameResult(frame, hits)

    async def _current_plan(self, service: Service) -> MatchPlan | None:
        """Return the plan for the current watches, or None if no watch selects this feed."""
        async with self._planning:  # frames that wait for a plan keep their order
            found = self._planned.get(service)
            if found is None or found.version != self._feeds.live.version:
                found = self._planned[service] = await self._feeds.planned(service, self._name)
            return found.plan

    async def _hits(
        self, frame: Frame, content: bytes | str, service: Service, plan: MatchPlan
    ) -> list[WatchHit]:
        """Store all hits and return those of the sender's own watches."""
        find = partial(plan.matches, now=self._feeds.live.now())
        matches = await service.when_queue_has_room(
            lambda: service.computed([content], find, _FIELD)
        )
        if service.drift is not None:
            passed = {(match.class_id, match.threshold) for match in matches}
            service.drift.add_frame(plan.monitored, passed)
        if not matches:
            return []
        digest = _digest(content)
        hits = [self._hit(frame, match, digest, service) for match in matches]
        cursors = await self._stored(
            [(hit.watch, hit.model_dump_json(exclude={"cursor"})) for hit in hits]
        )
        self._feeds.counts.count_hits(len(hits))
        return [
            hit.model_copy(update={"cursor": cursor})
            for hit, match, cursor in zip(hits, matches, cursors, strict=True)
            if match.watch.client == self._client
        ]

    async def _stored(self, hits: Sequence[tuple[str, str]]) -> list[int | None]:
        """Store hits and return their cursors. Raises ApiError."""
        try:
            return await self._feeds.publisher.store(hits)
        except WatchesDownError as error:
            message = f"the hits are not stored ({error}). Send the frame again"
            raise ApiError(503, "watches_down", message) from error

    def _hit(self, frame: Frame, match: Match, digest: str, service: Service) -> WatchHit:
        watch, name = match.watch, service.model.bundle.names.names[match.class_id]
        return WatchHit(
            id=_digest(json.dumps([watch.id, name, self._name, frame.id, frame.time, digest])),
            watch=watch.id,
            label=watch.label,
            feed=self._name,
            frame=frame.id,
            time=frame.time,
            class_name=name,
            class_id=match.class_id,
            score=match.score,
            threshold=match.threshold,
            version=service.version,
        )

    async def _write(self, result: _FrameResult) -> None:
        self._counts.frames += 1
        self._counts.hits += len(result.hits)
        if result.error is not None:
            self._counts.errors += 1
            await self._write_line(_frame_error(result.error, result.frame.id))
        for hit in result.hits:
            await self._write_line(hit)
        if self._is_acknowledged and result.error is None:
            await self._write_line(Acknowledged(answered=result.frame.id, hits=len(result.hits)))
        self._set_position(result)

    def _set_position(self, result: _FrameResult) -> None:
        """Move the feed's position to this frame, unless an earlier one has failed and must be sent
        again."""
        if result.error is not None and result.error.status >= 500:
            self._failed.add(result.frame.id)
        else:
            self._failed.discard(result.frame.id)
        if not self._failed:
            self._feeds.publisher.set_position(self._client, self._name, result.frame.id)

    async def _drop(self, count: int) -> None:
        self._counts.frames += count
        self._counts.dropped += count
        for _ in range(count):
            self._feeds.counts.count_frame("dropped")
        await self._write_line(Dropped(dropped=count))


def _digest(content: bytes | str) -> str:
    raw = content if isinstance(content, bytes) else content.encode()
    return blake2b(raw, digest_size=16).hexdigest()


def _frame_error(error: ApiError, frame: str | int) -> FrameError:
    message = str(error).removeprefix(f"{_FIELD}[0]: ")
    return FrameError(frame=frame, error=ErrorDetail(code=error.code, message=message))
