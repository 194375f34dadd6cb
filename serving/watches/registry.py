"""The list of watches: who owns which, how long they live, and what has changed since when.

Plain: no Ray, no HTTP, no event loop; the clock and the place to keep things are passed in.
"""

import secrets
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping

from serving.config import ServingConfig
from serving.watches.watch import (
    Changes,
    Held,
    Terms,
    UnknownWatchError,
    Watch,
    WatchLimitError,
)

# Replicas that miss more removals than this get the whole list.
_REMEMBERED_REMOVALS = 1000


class Registry:
    """Watches within the limits of `config`; `kept` outlives a restart, id -> JSON."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        clock: Callable[[], float],
        kept: MutableMapping[str, bytes],
    ) -> None:
        self.config = config
        self.epoch, self.version = secrets.token_hex(8), 0
        self._clock, self._kept = clock, kept
        watches = [Watch.model_validate_json(text) for text in kept.values()]
        self._watches = {watch.id: watch for watch in watches}
        self._changed_at = dict.fromkeys(self._watches, 0)
        self._listened: set[str] = set()
        self._removals: deque[tuple[int, str]] = deque()
        self._removals_known_since = 0

    def create(self, client: str, terms: Terms) -> Watch:
        """A new watch; WatchLimitError where there are too many."""
        self._check_room(client)
        now = self._clock()
        # `model_dump` and not `dict(terms)`: a Watch's own fields must not be passed in.
        watch = Watch(
            **terms.model_dump(include=set(Terms.model_fields)),
            id=secrets.token_hex(8),
            client=client,
            created_at=now,
            expires_at=now + terms.ttl_seconds,
        )
        self._put(watch)
        return watch

    def owned(self, client: str) -> list[Watch]:
        """The client's watches, oldest first."""
        mine = [watch for watch in self._watches.values() if watch.client == client]
        return sorted(mine, key=lambda watch: watch.created_at)

    def get(self, client: str, watch_id: str) -> Watch:
        """Raises UnknownWatchError, for another client's watch, too."""
        watch = self._watches.get(watch_id)
        if watch is None or watch.client != client or watch.expires_at <= self._clock():
            raise UnknownWatchError(
                f"you have no watch {watch_id[:40]!r}: it was deleted, has expired, or never was"
            )
        return watch

    def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        """Replace `fields` of a watch's terms and let its time run anew."""
        unknown = set(fields) - set(Terms.model_fields)
        assert not unknown, f"{unknown} are no terms of a watch"
        watch = self.get(client, watch_id).model_copy(update=dict(fields))
        watch = watch.model_copy(update={"expires_at": self._clock() + watch.ttl_seconds})
        self._put(watch)
        return watch

    def remove(self, client: str, watch_id: str) -> None:
        """Raises UnknownWatchError, for another client's watch, too."""
        self._drop(self.get(client, watch_id).id)

    def sweep(self) -> list[str]:
        """Drop the watches whose time is over; their ids."""
        now = self._clock()
        over = [watch.id for watch in self._watches.values() if watch.expires_at <= now]
        for watch_id in over:
            self._drop(watch_id)
        return over

    def set_listened(self, watch_id: str, is_listened: bool) -> None:
        """Note whether anybody listens to a watch's hits; nothing for one that is gone."""
        if watch_id in self._watches and (watch_id in self._listened) != is_listened:
            (self._listened.add if is_listened else self._listened.discard)(watch_id)
            self._note(watch_id)

    def changes_since(self, epoch: str, version: int) -> Changes:
        """What is new since `version`; all there is for another epoch, or for too old a version."""
        is_whole = epoch != self.epoch or version < self._removals_known_since
        news = [
            Held(watch, watch.id in self._listened)
            for watch in self._watches.values()
            if is_whole or self._changed_at[watch.id] > version
        ]
        gone = [watch_id for at, watch_id in self._removals if at > version and not is_whole]
        now = self._clock()
        return Changes(self.epoch, self.version, now, is_whole, tuple(news), tuple(gone))

    def _check_room(self, client: str) -> None:
        own, most = len(self.owned(client)), self.config.max_watches_per_client
        if own >= most:
            raise WatchLimitError(f"you have {own} watches, at most {most}: delete one first")
        if len(self._watches) >= self.config.max_watches:
            raise WatchLimitError(
                f"this server holds {len(self._watches)} watches and no more: try again later"
            )

    def _put(self, watch: Watch) -> None:
        self._kept[watch.id] = watch.model_dump_json().encode()
        self._watches[watch.id] = watch
        self._note(watch.id)

    def _note(self, watch_id: str) -> None:
        self.version += 1
        self._changed_at[watch_id] = self.version

    def _drop(self, watch_id: str) -> None:
        del self._kept[watch_id], self._watches[watch_id], self._changed_at[watch_id]
        self._listened.discard(watch_id)
        self.version += 1
        self._removals.append((self.version, watch_id))
        if len(self._removals) > _REMEMBERED_REMOVALS:
            self._removals_known_since, _ = self._removals.popleft()
